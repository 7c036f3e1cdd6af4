"""What differs between the captured step and later ones: path, shapes, numbers, host contents, storages."""

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onegraph.check.report import SILENT, Severity, relative
from onegraph.check.simulate import frames
from onegraph.check.simulate.follow import BAKED, KEPT
from onegraph.check.simulate.records import Argument, OpRecord, RawFinding, Step, same
from onegraph.check.simulate.replay import Verdict

_LONGEST = 60

Values = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StorageTable:
    """What is known of storages. names: per storage number; alive: numbers that someone still owns; made: phase and
    step in which a storage was made; returned: storages that earlier steps returned."""

    names: dict[int, str]
    alive: set[int]
    made: dict[int, tuple[str, int]]
    returned: dict[int, int]


def differences(
    captured: Step, later: list[Step], verdicts: dict[int, Verdict], table: StorageTable, refreshed: dict[int, set[int]]
) -> tuple[list[RawFinding], list[tuple[frames.CodeLocation, RawFinding]]]:
    """(hazards at an op, hazards at a branch with their place), for every later step against the captured one."""
    found: list[RawFinding] = []
    branches: list[tuple[frames.CodeLocation, RawFinding]] = []
    parted = any(step.parted or len(step.ops) != len(captured.ops) for step in later)
    for step in later:
        verdict = verdicts.get(step.index)
        decided = _decision(captured, step)
        for at, place, raw in _paths(captured, step, verdict):
            if decided is not None and max(at, _common(captured, step)) >= decided[0]:
                _follows(raw, decided[1])
            branches.append((place, raw))
        swapped = _swapped(captured, step) if parted else lambda ours, theirs: False
        rebound: dict[tuple[int, int], frames.Chain] = {}
        for position, ours, theirs in pairs(captured, step):
            if swapped(ours, theirs):
                continue
            for code, message, values, pair in _op(
                position, ours, theirs, captured, step, table, refreshed.get(step.index, set())
            ):
                severity = _severity(position, ours, verdict)
                raw = RawFinding(step.index, code, severity, ours.chain, message, SILENT, values, pair, position)
                if code in BAKED and len(ours.shapes) == len(theirs.shapes):
                    raw.sizes = frozenset(_sizes(ours, theirs))
                if code in KEPT:
                    raw.storages = frozenset(n for swap in _swaps(ours, theirs) for n in swap if n != -1)
                chosen = code == "CG205" and _chosen(ours, theirs, table)
                if decided is not None and position >= decided[0] and (chosen or (step.parted and code != "CG208")):
                    _follows(raw, decided[1])
                elif code == "CG205" and severity is Severity.ERROR:  # where it does no harm it stands for no other
                    _again(raw, ours, theirs, rebound)
                found.append(raw)
    return found, branches


def _swaps(ours: OpRecord, theirs: OpRecord) -> list[tuple[int, int]]:
    """Storages of arguments that are others in the two steps."""
    return [(a, b) for a, b in zip(ours.externals, theirs.externals, strict=False) if a != b]


def _common(captured: Step, step: Step) -> int:
    """How many ops both did before they parted."""
    both = enumerate(zip(captured.ops, step.ops, strict=False))
    shorter = min(len(captured.ops), len(step.ops))
    return next((i for i, (a, b) in both if a.func is not b.func or a.chain != b.chain), shorter)


def _decision(captured: Step, step: Step) -> tuple[int, frames.Chain] | None:
    """Where the host first learnt something else than at capture: (ops before it, its chain). What the host does after
    it may follow from it: reads of a value, and results whose shape depends on values."""
    for ours, theirs in zip(captured.reads, step.reads, strict=False):
        if ours[0] != theirs[0] or ours[1] != theirs[1]:
            return ours[2], ours[0]
    for position, (mine, other) in enumerate(zip(captured.ops, step.ops, strict=False)):
        if mine.func is not other.func:
            break
        if "CG104" in mine.codes and mine.out_shapes != other.out_shapes:
            return position, mine.chain
    return None


def _follows(raw: RawFinding, chain: frames.Chain) -> None:
    """The cause is an error of its own; what follows from it is said, as a warning."""
    raw.severity = Severity.WARNING
    if chain:
        at = frames.place(*chain[0])
        raw.cause = chain
        raw.message += f"; it follows from the device value read at {relative(at.path)}:{at.line}"


def _again(raw: RawFinding, ours: OpRecord, theirs: OpRecord, rebound: dict[tuple[int, int], frames.Chain]) -> None:
    """Of the lines that use a tensor which was rebound, the first one is told as an error: one binding is the cause.

    Args:
        rebound: (storage at capture, storage now) of the ops before this one, and where the first of them was.
    """
    swaps = _swaps(ours, theirs)
    first = next((rebound[s] for s in swaps if s in rebound), ())
    if first and first != raw.chain and all(s in rebound for s in swaps):
        raw.severity, raw.cause = Severity.WARNING, first
    for swap in swaps:
        rebound.setdefault(swap, raw.chain)


def _chosen(ours: OpRecord, theirs: OpRecord, table: StorageTable) -> bool:
    """Every storage that differs is one that the factory made and someone still owns: another one was picked."""
    return all(
        n in table.alive and table.made.get(n, ("build", -1))[0] in ("build", "outside")
        for swap in _swaps(ours, theirs)
        for n in swap
    )


def _swapped(captured: Step, step: Step) -> Callable[[OpRecord, OpRecord], bool]:
    """Tells two rounds of one loop, set side by side because the paths parted: each run did both of them."""

    def key(op: OpRecord, run: Step) -> Any:
        lasting = tuple(n for n in op.externals if n != -1 and n not in run.inputs)
        return (op.func, op.chain, repr(op.scalars), lasting)

    mine, other = ({key(op, run) for op in run.ops} for run in (captured, step))

    def swapped(ours: OpRecord, theirs: OpRecord) -> bool:
        a, b = key(ours, captured), key(theirs, step)
        return a != b and (a in other or b in mine)

    return swapped


def keys(step: Step) -> list[tuple[Any, frames.Chain]]:
    return [(op.func, op.chain) for op in step.ops]


def pairs(captured: Step, step: Step) -> Iterator[tuple[int, OpRecord, OpRecord]]:
    """Ops that both steps ran, aligned: by position while the paths agree, by longest common blocks after."""
    if not step.parted and len(step.ops) == len(captured.ops):
        for position, (ours, theirs) in enumerate(zip(captured.ops, step.ops, strict=True)):
            yield position, ours, theirs
        return
    matcher = difflib.SequenceMatcher(None, keys(captured), keys(step), autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            yield block.a + offset, captured.ops[block.a + offset], step.ops[block.b + offset]


def _paths(
    captured: Step, step: Step, verdict: Verdict | None
) -> Iterator[tuple[int, frames.CodeLocation, RawFinding]]:
    """(position in the captured step, place, raw finding) of each stretch that one of the two did not do."""
    if not step.parted and len(step.ops) == len(captured.ops):
        return
    ours, theirs = keys(captured), keys(step)
    for tag, a, a_end, b, b_end in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        common = ours[a - 1][1] if a else None
        here = ours[a][1] if a < len(ours) else None
        there = theirs[b][1] if b < len(theirs) else None
        if b < b_end:
            place = frames.parted(common, there, here)
        else:
            place = frames.parted(common, here, there)
        culprit = (there if b < b_end else here) or ()
        if place is None:
            continue
        raw = RawFinding(
            step.index,
            "CG201",
            _stale(verdict),
            culprit,
            "the path through the step is not the captured one",
            SILENT,
            (f"step {step.index} runs {b_end - b} ops here where step {captured.index} ran {a_end - a}",),
        )
        only = {op.name for op in (*captured.ops[a:a_end], *step.ops[b:b_end])}
        here_too = any(frames.place(*frame).line == place.line for frame in culprit)
        if here_too and "aten.slice.Tensor" in only <= {"aten.slice.Tensor", "aten.alias.default"}:
            # torch leaves out a slice of everything
            raw.code, raw.message = "CG202", "a slice is taken in some steps only: its bounds change"
        yield a, place, raw


def _stale(verdict: Verdict | None) -> Severity:
    return Severity.ERROR if verdict is None or verdict.stale else Severity.WARNING


def _severity(position: int, op: OpRecord, verdict: Verdict | None) -> Severity:
    """An error where the referee saw another result; a warning where this op's result, or all of it, is equal."""
    if verdict is None or not verdict.stale:
        return Severity.ERROR if op.kind == "launch" and op.again is None else Severity.WARNING
    if op.kind not in ("view", "launch") and position in verdict.equal_ops and not op.writes:
        return Severity.WARNING
    return Severity.ERROR


Hazard = tuple[str, str, tuple[str, ...], Any]
"""Code, message, both values, and the pair of numbers that changed: see `_sequence`."""


def _op(
    position: int,
    ours: OpRecord,
    theirs: OpRecord,
    captured: Step,
    step: Step,
    table: StorageTable,
    refreshed: set[int],
) -> Iterator[Hazard]:
    """What differs at one op and is not a consequence of another: the first such thing, and numbers beside a shape."""
    at = f"step {captured.index}", f"step {step.index}"
    if ours.shapes != theirs.shapes:
        shape = _shape(ours, theirs, at, table)
        if shape is not None:
            yield (*shape, _sequence(ours, theirs))
        yield from _beside(ours, theirs, at, shape is None)
        return
    changed = next(_changed(ours, theirs), None)
    if changed or len(ours.scalars) != len(theirs.scalars):
        mine, other = changed or (ours.scalars, theirs.scalars)
        yield (*_number(ours, mine, other, at), _sequence(ours, theirs))
        return
    found = _contents(position, ours, theirs, at, refreshed) if ours.kind == "h2d" else None
    if found is None and ours.kind != "h2d":
        if ours.out_shapes != theirs.out_shapes and not ours.codes:
            values = f"{at[0]}: {_text(ours.out_shapes)}", f"{at[1]}: {_text(theirs.out_shapes)}"
            found = "CG208", "the result has another shape", values
        else:
            found = _storages(ours, theirs, captured, step, table)
    if found is not None:
        yield (*found, _sequence(ours, theirs))


def _shape(
    ours: OpRecord, theirs: OpRecord, at: tuple[str, str], table: StorageTable
) -> tuple[str, str, Values] | None:
    """An argument that comes from outside of the graph has another shape; one that the step made is told before."""
    if len(ours.shapes) != len(theirs.shapes):
        values = f"{at[0]}: {len(ours.shapes)} tensors", f"{at[1]}: {len(theirs.shapes)} tensors"
        return "CG208", "the number of tensors changes", values
    for mine, other, number, derived in zip(ours.shapes, theirs.shapes, ours.externals, ours.derived, strict=False):
        if mine != other and number != -1 and not derived:
            name = table.names.get(number)
            what = f"{name} " if name else "a tensor from outside of the graph "
            return "CG208", f"{what}has another shape", (f"{at[0]}: {list(mine)}", f"{at[1]}: {list(other)}")
    return None


def _changed(ours: OpRecord, theirs: OpRecord) -> Iterator[tuple[Any, Any]]:
    """NaN is NaN, though it differs from itself."""
    pairs = zip(ours.scalars, theirs.scalars, strict=False)
    return ((a, b) for a, b in pairs if a != b and not (a != a and b != b))


def _number(ours: OpRecord, mine: Any, other: Any, at: tuple[str, str]) -> tuple[str, str, Values]:
    """A Python value that an op is given, or a kernel is launched with, is another one."""
    if isinstance(mine, tuple) and mine and mine[0] == "cpu":
        return "CG203", "a CPU scalar tensor is passed by value", (f"{at[0]}: {mine[1]}", f"{at[1]}: {other[1]}")
    text = f"a Python number is baked into {short(ours.name)}"
    if isinstance(mine, Argument) and isinstance(other, Argument):
        what = "the grid" if mine.name == "grid" else f"argument {mine.name}"
        text = f"{what} of kernel {short(ours.name)} changes: it is baked into the launch"
        mine, other = mine.value, other.value
    return "CG202", text, (f"{at[0]}: {_text(mine)}", f"{at[1]}: {_text(other)}")


def _beside(ours: OpRecord, theirs: OpRecord, at: tuple[str, str], before: bool) -> Iterator[Hazard]:
    """Numbers that change where a shape does and are no sizes that changed: of a slice its bounds.

    Of a launch also those that may be such sizes, unless its own argument's shape is told (not `before`): the code
    names them, and where it asks a tensor for them they are told as what follows.
    """
    if len(ours.shapes) != len(theirs.shapes) or len(ours.scalars) != len(theirs.scalars):
        return
    sizes = _sizes(ours, theirs)
    for mine, other in _changed(ours, theirs):
        named = isinstance(mine, Argument) and before
        pair = _pair(mine, other)
        if pair is None or (isinstance(mine, Argument) and mine.name == "grid") or (not named and _of(*pair, sizes)):
            continue
        yield (*_number(ours, mine, other, at), pair)
        return


def _sizes(ours: OpRecord, theirs: OpRecord) -> set[tuple[int, int]]:
    """(in one step, in the other) of every size that differs, numbers of elements too."""
    shapes = [*zip(ours.shapes, theirs.shapes, strict=True), *zip(ours.out_shapes, theirs.out_shapes, strict=False)]
    pairs_ = {pair for a, b in shapes for pair in (*zip(a, b, strict=False), (math.prod(a), math.prod(b)))}
    return {(a, b) for a, b in pairs_ if a != b}


def _of(mine: Any, other: Any, sizes: set[tuple[int, int]]) -> bool:
    """Whether a number may be made of a size: a multiple or a part of it; of an integer, it and a constant (`n + 1`,
    what is left to pad)."""
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in (mine, other)):
        return False
    whole = isinstance(mine, int) and isinstance(other, int)
    return any(
        mine * b == other * a or mine * a == other * b or (whole and (mine - other) in (a - b, b - a)) for a, b in sizes
    )


def _contents(
    position: int, ours: OpRecord, theirs: OpRecord, at: tuple[str, str], refreshed: set[int]
) -> tuple[str, str, Values] | None:
    """What a copy from the host brings is another thing, and the caller does not bring it to the replay."""
    if position in refreshed or ours.fed or ours.contents is None or theirs.contents is None:
        return None
    if same(ours.contents, theirs.contents):
        return None
    values = f"{at[0]}: {_text(ours.contents.tolist())}", f"{at[1]}: {_text(theirs.contents.tolist())}"
    if "CG102" in ours.codes or "CG103" in ours.codes:
        return ours.codes[0], "", values
    return "CG204", "what the host copies to the device changes", values


def _storages(
    ours: OpRecord, theirs: OpRecord, captured: Step, step: Step, table: StorageTable
) -> tuple[str, str, Values] | None:
    for mine, other in zip(ours.externals, theirs.externals, strict=False):
        if mine == other:
            continue
        if mine in captured.inputs and captured.inputs[mine] == step.inputs.get(other):
            continue
        if mine == -1 or (other == -1 and step.parted):
            continue  # another path makes other tensors: that path is reported
        name = table.names.get(mine) or table.names.get(other)
        phase, _ = table.made.get(mine, ("build", -1))
        values = (f"step {captured.index}: {_storage(mine, table)}", f"step {step.index}: {_storage(other, table)}")
        if mine in table.returned and phase == "step":
            return "CG209", "an output of an earlier step is read after the next replay has overwritten it", values
        if mine not in table.alive and phase != "step" and name is None:
            return "CG206", "a tensor from outside of the graph is freed before the replay", values
        gone = " and the captured one is freed" if mine not in table.alive else ""
        return "CG205", f"{name or 'a tensor that lives across steps'} is another storage in each step{gone}", values
    return None


def _storage(number: int, table: StorageTable) -> str:
    if number == -1:
        return "made in the step"
    phase, born = table.made.get(number, ("build", -1))
    origin = "made by the factory" if born < 0 else f"made in {'inputs' if phase == 'inputs' else 'step'} {born}"
    name = table.names.get(number)
    return f"storage {number}{f' ({name})' if name else ''}, {origin}"


def _sequence(ours: OpRecord, theirs: OpRecord) -> tuple[Any, Any] | None:
    """The pair of numbers that changed, for tracing them to a host read or to a Python variable."""
    for mine, other in _changed(ours, theirs):
        return _pair(mine, other)
    if ours.contents is not None and theirs.contents is not None and ours.contents.shape == theirs.contents.shape:
        flat = zip(ours.contents.flatten().tolist()[:64], theirs.contents.flatten().tolist()[:64], strict=False)
        return next(((x, y) for x, y in flat if x != y), None)
    return None


def _pair(mine: Any, other: Any) -> tuple[Any, Any] | None:
    """The numbers of two scalars that differ; of lists the first that do."""
    if isinstance(mine, Argument) or (isinstance(mine, tuple) and mine and mine[0] == "cpu"):
        mine, other = mine[1], other[1]
    if isinstance(mine, list | tuple) and isinstance(other, list | tuple):
        return next(((x, y) for x, y in zip(mine, other, strict=False) if x != y), None)
    return mine, other


def traced(
    numbers: dict[int, Any], steps: dict[int, Step], locate: Callable[[frames.Chain], frames.CodeLocation | None]
) -> str:
    """Where a changing number came from: the host read that gave the same numbers (or the same up to an offset)."""
    if len(numbers) < 2 or any(isinstance(v, bool) or not isinstance(v, int | float) for v in numbers.values()):
        return ""
    exact, shifted = None, None
    first = steps[min(numbers)]
    for index, (chain, *_) in enumerate(first.reads):
        offsets = set()
        for number, value in numbers.items():
            reads = steps[number].reads
            if index >= len(reads) or reads[index][0] != chain:
                break
            offsets.add(value - reads[index][1])
        else:
            if offsets == {0} and exact is None:
                exact = chain
            elif len(offsets) == 1 and shifted is None:
                shifted = chain
    chain = exact or shifted or ()
    place = locate(chain) if chain else None
    return (
        f"; the number comes from the device value read at {relative(place.path)}:{place.line} ({place.source.strip()})"
        if place
        else ""
    )


def short(name: str) -> str:
    """The name of an op or kernel as people write it."""
    return name.removeprefix("aten.").removeprefix("triton:").removesuffix(".default")


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
