"""What the ops themselves say about findings that have one cause: a storage, a shape, the pass backwards."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import CodeType

from onegraph.check.causes import Ops, leads, rebinds, sized
from onegraph.check.report import Cause, Finding, Frame, Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.records import OpRecord, RawFinding, Step

KEPT = ("CG205", "CG206", "CG209")
BAKED = ("CG202", "CG208")
_PASSES = ("backward", "grad")

Key = tuple[str, str, int]


@dataclass(slots=True)
class Trace:
    """The ops that a finding was made of. storages: those that stand at the same place of an op in two steps, and
    differ; numbers: (position of the op, step, number at capture, number in that step); sizes: (step, size at capture,
    size in that step) of its tensors; own: an op of the step's own calls, none that autograd ran by itself."""

    first: int = 1 << 62
    storages: set[int] = field(default_factory=set)
    numbers: set[tuple[int, int, int, int]] = field(default_factory=set)
    sizes: set[tuple[int, int, int]] = field(default_factory=set)
    own: bool = False

    def add(self, raw: RawFinding, where: tuple[CodeType, int] | None) -> None:
        """Keep what one comparison of two ops tells. where: the user's instruction that led to the op."""
        self.first = min(self.first, raw.position)
        self.storages |= raw.storages
        self.own |= where is None or frames.called(*where) not in _PASSES
        pair = raw.note
        if isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int for n in pair):
            self.numbers.add((raw.position, raw.step, *pair))
        self.sizes |= {(raw.step, *pair) for pair in raw.sizes}

    def explains(self, other: "Trace") -> bool:
        """Whether its number shapes a tensor, and the other one has that number, or a size of that tensor, in each of
        its steps."""
        given = self.sizes | {number[1:] for number in self.numbers}
        told = {number[1:] for number in other.numbers} or other.sizes
        common = told & given
        return bool(self.sizes and common) and {step for step, *_ in told} == {step for step, *_ in common}


def link(found: dict[Key, Finding], traces: dict[Key, Trace], steps: dict[int, Step], captured: int, ops: Ops) -> None:
    """Mark in `found` what follows from another finding of the comparison.

    - Two lines that use a tensor which is another one in each step: the line that binds it is the cause, else the
      first one.
    - A number that autograd computes with is one of the pass forward.
    - A size of a tensor follows from what changed that tensor's shape, and so does the path of a loop over tensors that
      a number has cut.
    - A number that has shaped a tensor before is the same one.
    """
    errors = [k for k in found if k in traces and found[k].severity is Severity.ERROR and found[k].follows is None]
    errors.sort(key=lambda k: traces[k].first)
    _same_storages(found, traces, [k for k in errors if k[0] in KEPT])
    baked = [k for k in errors if k[0] in BAKED]
    forward = [k for k in baked if traces[k].own]
    for key in baked:
        before = [k for k in forward if traces[k].first < traces[key].first and found[k].follows is None]
        if not traces[key].own:
            _mark(found, key, before[:1])
        elif key[0] == "CG202" and found[key].calls and sized(found[key].calls[-1], ops):
            _mark(found, key, [k for k in before if _sizes(traces[k], traces[key], steps, captured)][:1])
        else:
            _mark(found, key, [k for k in before if traces[k].explains(traces[key])][:1])
    cut = [k for k in forward if traces[k].sizes and found[k].follows is None]
    for key, finding in list(found.items()):
        tensors = finding.code == "CG208" and key in traces and not traces[key].sizes
        if finding.severity is Severity.ERROR and finding.follows is None and (tensors or finding.code == "CG201"):
            _mark(found, key, [k for k in cut if k != key and _goes_on(found[k].calls, _to(finding), ops)][:1])


def _goes_on(cut: tuple[Frame, ...], target: tuple[Frame, ...], ops: Ops) -> bool:
    """Whether the line at the end of `target` comes behind the one at the end of `cut`, and reads what it made."""
    apart = next(((a.line, b.line) for a, b in zip(cut, target, strict=False) if a != b), (0, 0))
    return apart[0] < apart[1] and leads(cut, target, ops)


def _to(finding: Finding) -> tuple[Frame, ...]:
    """The calls that lead to the line where a finding stands; those of the op may go on from there."""
    places = [(frame.path, frame.line) for frame in finding.calls]
    at = (finding.path, finding.line)
    return finding.calls[: places.index(at) + 1] if at in places else finding.calls


def _mark(found: dict[Key, Finding], key: Key, causes: Iterable[Key]) -> None:
    for code, path, line in causes:
        found[key] = replace(found[key], follows=Cause(path=path, line=line, code=code))


def _same_storages(found: dict[Key, Finding], traces: dict[Key, Trace], keys: list[Key]) -> None:
    groups: list[tuple[set[int], list[Key]]] = []
    for key in keys:
        storages, members = set(traces[key].storages), [key]
        for group in [g for g in groups if g[0] & storages]:
            groups.remove(group)
            storages |= group[0]
            members = group[1] + members
        groups.append((storages, members))
    for _, members in groups:
        binds = {k for k in members if found[k].calls and rebinds(found[k].calls[-1])}
        first = min(members, key=lambda k: (k not in binds, traces[k].first))
        for key in members:
            if key != first:
                _mark(found, key, [first])


def _sizes(cause: Trace, trace: Trace, steps: dict[int, Step], captured: int) -> bool:
    """Whether each number is a size that a tensor got, from the cause on, in the captured step and in the other one."""
    ours = steps[captured].ops
    told = [(p, steps[i], a, b) for p, i, a, b in trace.numbers if i in steps]

    def of(ops: list[OpRecord], number: int, last: int) -> bool:
        return any(number in shape for op in ops[cause.first : last] for shape in op.out_shapes)

    def aligned(theirs: list[OpRecord], position: int, a: int, b: int) -> bool:
        return any(
            (mine, other) == (a, b)
            for k in range(cause.first, min(position, len(ours), len(theirs)))
            for x, y in zip(ours[k].out_shapes, theirs[k].out_shapes, strict=False)
            for mine, other in zip(x, y, strict=False)
        )

    return bool(told) and all(
        of(ours, a, position) and of(step.ops, b, len(step.ops)) if step.parted else aligned(step.ops, position, a, b)
        for position, step, a, b in told
    )
