"""What a replay does, as far as a CPU can: the recorded ops again, with frozen arguments, into the same storages."""

import torch

from onegraph.check import compat
from onegraph.check.program.world import Capture, ProgramWorld
from onegraph.check.report import SILENT, Severity
from onegraph.check.simulate.compare import short
from onegraph.check.simulate.cpu_fallbacks import Unavailable, perform
from onegraph.check.simulate.randomness import Returns
from onegraph.check.simulate.records import OpRecord, RawFinding, map_tensors
from onegraph.check.simulate.replay import REFUSALS, again, poison_freed, refresh, told

REFUSED = "CUDA error: device-side assert triggered; or memory past the tensor is read or written, without an error"


def freed(world: ProgramWorld, capture: Capture) -> set[int]:
    """Storages from outside that the graph reads and that no tensor of the program's refers to any more."""
    outside = {number for op in capture.step.ops for number in op.externals if number != -1}
    return outside - world.storages.alive() - world.made_inside


def tell_freed(world: ProgramWorld, capture: Capture, dead: set[int]) -> None:
    """A graph that is replayed after what it reads was freed; once for each storage, at the op that reads it."""
    for number in sorted(dead):
        if f"freed {number}" in capture.told:
            continue
        capture.told.add(f"freed {number}")
        op = next(op for op in capture.step.ops if number in op.externals)
        name = capture.names.get(number) or "a tensor from outside of the graph"
        text = f"{name} is freed before the replay, which reads its memory"
        world.raw_findings.append(RawFinding(capture.number, "CG206", Severity.ERROR, op.chain, text, SILENT))


def refreshed(capture: Capture) -> set[int]:
    """Positions of copies from pinned memory that is still there: a replay reads it again."""
    return {position for position, op in enumerate(capture.step.ops) if refresh(op)}


def replay(world: ProgramWorld, capture: Capture, dead: set[int]) -> None:
    """The graph's work on the storages that it was captured with; freed ones hold whatever came next, ones here."""
    step = capture.step
    with compat.no_torch_function(), world.off(), torch.inference_mode():
        if dead:
            poison_freed(step, dead, lambda _: None)
        returns = Returns(step)
        for position, op in enumerate(step.ops):
            returns.before(position)
            if op.captured and op.again is not None:
                op.again(op, lambda _: None)
            elif op.captured and op.kind in ("op", "h2d", "d2h"):
                try:
                    again(op)
                except REFUSALS as error:
                    if not (dead or op.given or world.unknowns.among(op.tensors)):  # else its values are no real ones
                        _tell_refused(world, capture, position, error)


def _tell_refused(world: ProgramWorld, capture: Capture, position: int, error: Exception) -> None:
    """An op of a replay raises on the values that it finds there, as on an index past the end."""
    op = capture.step.ops[position]
    if position not in capture.refusing:
        capture.refusing[position] = _takes_others(op)
    if not capture.refusing[position]:
        return
    world.flag(
        capture, "CG212", f"a replay gives {short(op.name)} values that it refuses", op.chain,
        (f"replay {capture.replays + 1}: {told(error)}",), happens=REFUSED, construct="refused values",
    )  # fmt: skip


def _takes_others(op: OpRecord) -> bool:
    """Whether an op that raised does not where its integers are 0, or 1: then it raised because of their values."""
    for fill in (0, 1):

        def other(tensor: torch.Tensor, fill: int = fill) -> torch.Tensor:
            plain = tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided
            return tensor.clone() if plain else torch.full_like(tensor, fill)

        try:
            perform(op.func, map_tensors(op.args, other), map_tensors(op.kwargs, other))
        except (Unavailable, *REFUSALS):
            continue
        return True
    return False
