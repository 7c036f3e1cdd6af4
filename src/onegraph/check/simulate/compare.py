"""What differs between the captured step and later ones: path, shapes, numbers, host contents, storages."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onegraph.check.report import SILENT, Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.records import OpRecord, Sighting, Step, same
from onegraph.check.simulate.replay import Verdict

_LONGEST = 60


@dataclass(frozen=True, slots=True)
class Books:
    """What is known of storages. names: per storage number; alive: numbers that someone still owns; made: phase and
    step in which a storage was made; returned: storages that earlier steps returned."""

    names: dict[int, str]
    alive: set[int]
    made: dict[int, tuple[str, int]]
    returned: dict[int, int]


def differences(
    captured: Step, later: list[Step], verdicts: dict[int, Verdict], books: Books, refreshed: dict[int, set[int]]
) -> tuple[list[Sighting], list[tuple[frames.Place, Sighting]]]:
    """(hazards at an op, hazards at a branch with their place), for every later step against the captured one."""
    found: list[Sighting] = []
    branches: list[tuple[frames.Place, Sighting]] = []
    for step in later:
        verdict = verdicts.get(step.index)
        for place, sighting in _paths(captured, step, verdict):
            branches.append((place, sighting))
        for position, ours, theirs in pairs(captured, step):
            hazard = _op(position, ours, theirs, captured, step, books, refreshed.get(step.index, set()))
            if hazard is not None:
                code, message, values = hazard
                severity = _severity(position, ours, verdict, step)
                found.append(
                    Sighting(step.index, code, severity, ours.chain, message, SILENT, values, _sequence(ours, theirs))
                )
    return found, branches


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


def _paths(captured: Step, step: Step, verdict: Verdict | None) -> Iterator[tuple[frames.Place, Sighting]]:
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
        sighting = Sighting(
            step.index,
            "CG201",
            _stale(verdict),
            culprit,
            "the path through the step is not the captured one",
            SILENT,
            (f"step {captured.index}: {a_end - a} ops here", f"step {step.index}: {b_end - b} ops here"),
        )
        yield place, sighting


def _stale(verdict: Verdict | None) -> Severity:
    return Severity.ERROR if verdict is None or verdict.stale else Severity.WARNING


def _severity(position: int, op: OpRecord, verdict: Verdict | None, step: Step) -> Severity:
    """An error where the referee saw another result; a warning where this op's result, or all of it, is equal."""
    if verdict is None or not verdict.stale:
        return Severity.ERROR if op.kind == "launch" else Severity.WARNING
    if op.kind not in ("view", "launch") and position in verdict.equal_ops and not op.writes:
        return Severity.WARNING
    return Severity.ERROR


def _op(
    position: int, ours: OpRecord, theirs: OpRecord, captured: Step, step: Step, books: Books, refreshed: set[int]
) -> tuple[str, str, tuple[str, ...]] | None:
    """(code, message, values) of the first thing that differs at one op and is not a consequence of another."""
    at = f"step {captured.index}", f"step {step.index}"
    if ours.shapes != theirs.shapes:
        if len(ours.shapes) != len(theirs.shapes):
            values = f"{at[0]}: {len(ours.shapes)} tensors", f"{at[1]}: {len(theirs.shapes)} tensors"
            return "CG208", "the number of tensors changes", values
        for mine, other, number, derived in zip(ours.shapes, theirs.shapes, ours.externals, ours.derived, strict=False):
            if mine != other and number != -1 and not derived:
                name = books.names.get(number)
                what = f"{name} " if name else "a tensor from outside of the graph "
                return "CG208", f"{what}has another shape", (f"{at[0]}: {list(mine)}", f"{at[1]}: {list(other)}")
        return None
    if ours.scalars != theirs.scalars:
        changed = [(a, b) for a, b in zip(ours.scalars, theirs.scalars, strict=False) if a != b] or [
            (ours.scalars, theirs.scalars)
        ]
        mine, other = changed[0]
        if isinstance(mine, tuple) and mine and mine[0] == "cpu":
            text = "a CPU scalar tensor is passed by value"
            return "CG203", text, (f"{at[0]}: {mine[1]}", f"{at[1]}: {other[1]}")
        if isinstance(mine, tuple) and mine and mine[0] == "grid":
            return "CG202", f"the grid of {ours.name} changes", (f"{at[0]}: {mine[1]}", f"{at[1]}: {other[1]}")
        text = f"a Python number is baked into {_short(ours.name)}"
        return "CG202", text, (f"{at[0]}: {_text(mine)}", f"{at[1]}: {_text(other)}")
    if ours.kind == "h2d":
        if (
            position in refreshed
            or ours.contents is None
            or theirs.contents is None
            or same(ours.contents, theirs.contents)
        ):
            return None
        values = f"{at[0]}: {_text(ours.contents.tolist())}", f"{at[1]}: {_text(theirs.contents.tolist())}"
        if "CG102" in ours.codes or "CG103" in ours.codes:
            return ours.codes[0], "", values
        return "CG204", "what the host copies to the device changes", values
    if ours.out_shapes != theirs.out_shapes and not ours.codes:
        values = f"{at[0]}: {_text(ours.out_shapes)}", f"{at[1]}: {_text(theirs.out_shapes)}"
        return "CG208", "the result has another shape", values
    return _storages(ours, theirs, captured, step, books)


def _storages(
    ours: OpRecord, theirs: OpRecord, captured: Step, step: Step, books: Books
) -> tuple[str, str, tuple[str, ...]] | None:
    for mine, other in zip(ours.externals, theirs.externals, strict=False):
        if mine == other:
            continue
        if mine in captured.inputs and captured.inputs[mine] == step.inputs.get(other):
            continue
        if mine == -1 or (other == -1 and step.parted):
            continue  # another path makes other tensors: that path is reported
        name = books.names.get(mine) or books.names.get(other)
        phase, _ = books.made.get(mine, ("build", -1))
        values = (f"step {captured.index}: {_storage(mine, books)}", f"step {step.index}: {_storage(other, books)}")
        if mine in books.returned and phase == "step":
            return "CG209", "an output of an earlier step is read after the next replay has overwritten it", values
        if mine not in books.alive and phase != "step" and name is None:
            return "CG206", "a tensor from outside of the graph is freed before the replay", values
        gone = " and the captured one is freed" if mine not in books.alive else ""
        return "CG205", f"{name or 'a tensor that lives across steps'} is another storage in each step{gone}", values
    return None


def _storage(number: int, books: Books) -> str:
    if number == -1:
        return "made in the step"
    phase, born = books.made.get(number, ("build", -1))
    origin = "made by the factory" if born < 0 else f"made in {'inputs' if phase == 'inputs' else 'step'} {born}"
    name = books.names.get(number)
    return f"storage {number}{f' ({name})' if name else ''}, {origin}"


def _sequence(ours: OpRecord, theirs: OpRecord) -> tuple[Any, Any] | None:
    """The pair of numbers that changed, for tracing them to a host read or to a Python variable."""
    for a, b in zip(ours.scalars, theirs.scalars, strict=False):
        if a != b:
            mine, other = (a[1], b[1]) if isinstance(a, tuple) and a and a[0] in ("cpu", "grid") else (a, b)
            if isinstance(mine, list | tuple) and isinstance(other, list | tuple):
                return next(((x, y) for x, y in zip(mine, other, strict=False) if x != y), None)
            return mine, other
    if ours.contents is not None and theirs.contents is not None and ours.contents.shape == theirs.contents.shape:
        flat = zip(ours.contents.flatten().tolist()[:64], theirs.contents.flatten().tolist()[:64], strict=False)
        return next(((x, y) for x, y in flat if x != y), None)
    return None


def traced(
    numbers: dict[int, Any], steps: dict[int, Step], locate: Callable[[frames.Chain], frames.Place | None]
) -> str:
    """Where a changing number came from: the host read that gave the same numbers (or the same up to an offset)."""
    if len(numbers) < 2 or any(isinstance(v, bool) or not isinstance(v, int | float) for v in numbers.values()):
        return ""
    exact, shifted = None, None
    first = steps[min(numbers)]
    for index, (chain, _) in enumerate(first.reads):
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
        f"; the number comes from the device value read at {place.path}:{place.line} ({place.source.strip()})"
        if place
        else ""
    )


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
