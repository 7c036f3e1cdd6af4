"""Simulated replay, the referee: the captured step's ops again, with frozen arguments, against eager on new inputs."""

from collections.abc import Callable, Container
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onegraph.check import compat, containers
from onegraph.check.simulate.addresses import point_alike
from onegraph.check.simulate.cpu_fallbacks import Unavailable, perform
from onegraph.check.simulate.device import block, flat_bytes, storage_of
from onegraph.check.simulate.randomness import Returns
from onegraph.check.simulate.records import UNWRITTEN, OpRecord, Step, close, targets, tensors_in
from onegraph.check.simulate.unknown import Doubts
from onegraph.check.simulate.world import World

REFUSALS = (RuntimeError, IndexError)
"""What an op raises on values that it was not made for."""

_LONGEST_TEXT = 80


@dataclass(slots=True)
class Verdict:
    """How one replay compares. differing: positions of ops whose result is not eager's (of those that were kept).
    doubtful: outputs and state that are unknown, and that something which changed may reach."""

    step: int
    worst: float = 0.0
    outputs: tuple[str, ...] = ()
    state: tuple[int, ...] = ()
    differing: set[int] = field(default_factory=set)
    equal_ops: set[int] = field(default_factory=set)
    failed: str = ""
    doubtful: tuple[str, ...] = ()

    @property
    def stale(self) -> bool:
        """Another result than eager's, or one that nobody can call the same."""
        return bool(self.outputs or self.state or self.failed or self.doubtful)

    def compare(self, ours: dict[str, Tensor], theirs: dict[str, Tensor], but: Container[str] = ()) -> None:
        """What a replay gives against what eager gives, by path; nothing is said of the paths `but`."""
        if other := containers.same_places(ours, theirs):
            self.failed = f"another result: {other}"
        both = [path for path in theirs if path in ours and path not in but]
        compared = {path: close(ours[path].detach(), theirs[path]) for path in both}
        self.worst = max((error for _, error in compared.values()), default=0.0)
        self.outputs = tuple(path for path, (fine, _) in compared.items() if not fine)


def replay(
    world: World,
    captured: Step,
    eager: Step,
    outputs: dict[str, Tensor],
    static_inputs: dict[str, Tensor],
    new_inputs: dict[str, Tensor],
    eager_outputs: dict[str, Tensor],
    dead: set[int],
    rng_before: Tensor,
) -> Verdict:
    """Replay `captured` in the state that `eager` started from; everything is put back as eager left it.

    Args:
        outputs, eager_outputs: results of the captured and of the eager step, plain tensors by their path.
        static_inputs, new_inputs: tensors in the arguments of both steps, by their path.
        dead: storages that the captured ops read and that nobody owns any more.
        rng_before: state of the CPU generator when the eager step began.
    """
    verdict = Verdict(step=eager.index)
    after: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(tensor: Tensor) -> None:
        key = storage_of(tensor)
        if key not in after:
            whole = flat_bytes(tensor)
            after[key] = (whole, whole.clone())

    eager_values = {path: o.detach().clone() for path, o in eager_outputs.items()}
    rng_after = torch.get_rng_state()
    for whole, _ in eager.before.values():
        keep(whole)
    inputs = [(static, new_inputs[path]) for path, static in static_inputs.items() if path in new_inputs]
    fresh_inputs = [_before(new, eager).clone() for _, new in inputs]
    for whole, before in eager.before.values():
        whole.copy_(before)
    for (static, _), fresh in zip(inputs, fresh_inputs, strict=True):
        if static.shape == fresh.shape:
            keep(static)
            static.copy_(fresh)
    made = {storage_of(o) for op in captured.ops for o, new in zip(op.outs, op.fresh, strict=False) if new}
    for out in outputs.values():
        if storage_of(out) in made:
            _poison(block(out))
    torch.set_rng_state(rng_before)
    poison_freed(captured, dead, keep)
    doubts = Doubts(captured, eager, made) if _any_unknown(captured, eager) else None
    if doubts is not None:
        for static, new in inputs:
            doubts.static_input(static, new)
    returns = Returns(captured)
    for position, op in enumerate(captured.ops):
        returns.before(position)
        doubtful = doubts.op(position, op) if doubts is not None else None
        if op.captured and op.again is not None:
            if not op.again(op, lambda t: None if storage_of(t) in made else keep(t)):
                verdict.failed = verdict.failed or f"{op.name} cannot run again on what it was captured with"
        elif op.captured and (op.kind in ("op", "h2d") or op.feeds):
            for target in targets(op.func, op.args, op.kwargs):
                if storage_of(target) not in made:  # the graph's own memory
                    keep(target)
            try:
                failed = "" if again(op) else f"{op.name} gives another shape"
            except REFUSALS as refusal:
                failed = f"{op.name} raises {told(refusal)}"
            verdict.failed = verdict.failed or failed
        if position < len(eager.ops) and (kept := eager.ops[position].evidence) is not None and not eager.parted:
            same = doubtful is None and all(close(a, b)[0] for a, b in zip(op.outs, kept, strict=False))
            differs = not same and doubtful is not False
            (verdict.differing if differs else verdict.equal_ops).add(position)
    common = {path: (outputs[path], theirs) for path, theirs in eager_outputs.items() if path in outputs}
    may_differ = {path: doubts.result(*pair) for path, pair in common.items()} if doubts is not None else {}
    verdict.compare(outputs, eager_values, [path for path, told in may_differ.items() if told is not None])
    moved = [(static, new) for static, new in inputs if storage_of(static) != storage_of(new)]
    given = {storage_of(t) for pair in moved for t in pair}
    touched = []
    for key, (whole, value) in after.items():
        if doubts is not None and (key in doubts.unknown or key in eager.unknown_after):
            continue
        if key not in given and not _equal_storage(captured, eager, key, whole, value):
            touched.append(key)
    for static, new in moved:  # what a step leaves in the buffers that it was given
        key = storage_of(new)
        if doubts is not None and (storage_of(static) in doubts.unknown or key in eager.unknown_after):
            continue
        if key in eager.before and static.shape == new.shape and not close(static, _view(new, after[key][1]))[0]:
            touched.append(storage_of(static))
    verdict.state = tuple(touched)
    if doubts is not None:
        unsure = [f"result{path}" for path, told in may_differ.items() if told]
        verdict.doubtful = (*unsure, *(["state"] if doubts.lasting() else []))
    for whole, value in after.values():
        whole.copy_(value)
    torch.set_rng_state(rng_after)
    return verdict


def _any_unknown(*steps: Step) -> bool:
    return any(step.unknown or step.unknown_after for step in steps)


def _before(tensor: Tensor, step: Step) -> Tensor:
    """An input as it was when the step began (a step may write its inputs)."""
    kept = step.before.get(storage_of(tensor))
    if kept is None:
        return tensor
    return _view(tensor, kept[1])


def _view(tensor: Tensor, whole: Tensor) -> Tensor:
    """The same part of a copy of a tensor's storage."""
    view = torch.empty(0, dtype=tensor.dtype).set_(whole.untyped_storage())
    return view.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def poison_freed(captured: Step, dead: set[int], keep: Callable[[Tensor], None]) -> None:
    """Freed memory holds whatever came next: ones in every bit. `keep` is called with each tensor before."""
    for op in captured.ops:
        for tensor, number in zip(op.tensors, op.externals, strict=False):
            if number in dead:
                keep(tensor)
                flat_bytes(tensor).fill_(255)


def told(error: BaseException) -> str:
    """An error's class and the first line of what it says."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    short = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT].rstrip() + "..."
    return f"{type(error).__name__}: {short}" if text else type(error).__name__


def refresh(op: OpRecord) -> bool:
    """A captured copy from pinned memory reads it again at every replay; whether that memory is still there."""
    if op.kind != "h2d" or op.source is None or op.codes or op.contents is None:
        return False
    storage = compat.storage_by_address(op.source.cdata)
    if storage is not None:
        op.frozen = source_of(storage, op).clone()
    return storage is not None


def source_of(storage: torch.UntypedStorage, op: OpRecord) -> Tensor:
    """What a copy from the host reads of a storage."""
    assert op.contents is not None
    whole: Tensor = torch.empty(0, dtype=op.contents.dtype).set_(storage)
    return whole.as_strided(*op.source_view)


def again(op: OpRecord) -> bool:
    """Run one recorded op again, into the storages that it had; whether what it gives has the same shapes.

    Raises one of REFUSALS where the op does on the values that it finds.
    """
    if op.kind == "h2d":
        if op.fed:
            refresh(op)
        assert op.frozen is not None
        target = op.args[0] if op.args else op.outs[0]
        target.copy_(op.frozen)
        return True
    if op.func._schema.name in UNWRITTEN:
        op.outs[0].zero_()
        return True
    try:
        result = perform(op.func, op.args, op.kwargs)
    except Unavailable:
        return True  # its zeros stay
    outs = (
        [result]
        if isinstance(result, Tensor)
        else [r for r in result if isinstance(r, Tensor)]
        if isinstance(result, list | tuple)
        else []
    )
    for recorded, fresh, anew in zip(op.outs, op.fresh, outs, strict=False):
        if fresh and anew is not recorded:
            if anew.shape != recorded.shape:
                return False
            recorded.copy_(anew)
    return True


def _equal_storage(captured: Step, eager: Step, key: int, whole: Tensor, value: Tensor) -> bool:
    """State is compared bit for bit first, then as the type that an op last used it as."""
    if torch.equal(whole, value):
        return True
    for op in reversed(captured.ops):
        for tensor in (*op.outs, *tensors_in((op.args, op.kwargs))):
            if (
                storage_of(tensor) == key
                and tensor.dtype is not torch.uint8
                and whole.numel() % tensor.element_size() == 0
            ):
                now, then = whole.view(tensor.dtype), value.view(tensor.dtype)
                return close(now, then)[0] or point_alike(now, captured.addresses, then, eager.addresses)
    return False
