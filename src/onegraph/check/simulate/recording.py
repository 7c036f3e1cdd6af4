"""Writes down what an op did: for the captured step everything that a replay needs, for later ones what differs."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat
from onegraph.check.simulate import frames, hazards
from onegraph.check.simulate.device import DeviceTensor, StorageRecord, block, flat_bytes, storage_of, weak
from onegraph.check.simulate.machine import Machine
from onegraph.check.simulate.records import OpRecord, Step, map_tensors, same, targets, written
from onegraph.check.simulate.unknown import GivenTensor


def launched(
    world: Machine, func: Any, name: str, chain: frames.Chain, virtual: list[DeviceTensor], scalars: tuple[Any, ...],
    given: tuple[GivenTensor, ...] | None = None,
) -> None:  # fmt: skip
    """Write down a launch that cannot be run: whatever it was given, it may have written. `given`: as `World.given`
    told before it; None: as it is now."""
    if world.current is None or world.phase != "step":
        return
    op = begun(world, func, name, "launch", chain, scalars, virtual)
    op.opaque, op.derived = True, ()
    op.given = world.given(virtual, [t.inner for t in virtual]) if given is None else given
    if world.step == world.captured_step:
        op.tensors = tuple(t.inner for t in virtual)
    if op.captured:  # what it writes nobody knows: as a reader it meets those that are known to write
        world.streams.use(world, chain, ((t.record.number, False, t.inner) for t in virtual))
    if world.step != world.captured_step and world.reference is not None and not world.current.parted:
        compare(world, op, world.current, [])
    world.current.ops.append(op)


def begun(
    world: Machine, func: Any, name: str, kind: str, chain: frames.Chain, scalars: tuple[Any, ...],
    virtual: list[DeviceTensor], followed: Sequence[StorageRecord] = (),
) -> OpRecord:  # fmt: skip
    """The record of an op, or launch, that is given `virtual`, and reaches the storages `followed` by addresses."""
    assert world.current is not None
    used = [*(t.record for t in virtual), *followed]
    index = virtual[0].device.index if virtual else world.device_index
    return OpRecord(
        func=func,
        name=name,
        kind=kind,
        chain=chain,
        scalars=world.current.addresses.named(scalars),
        shapes=tuple(tuple(t.inner.shape) for t in virtual),
        externals=tuple(-1 if r.made_in(world.step) else r.number for r in used),
        derived=tuple(t.made == world.step for t in virtual),
        captured=kind == "view" or world.streams.launch(world, chain, index),
        reads=tuple(dict.fromkeys(r.number for r in used)),
    )


def keep(world: Machine, target: Tensor) -> None:
    """Copy on write: what an older storage held before this step, for the referee to go back to."""
    assert world.current is not None
    key = storage_of(target)
    record = world.storages.records.get(key)
    if record is None or record.made_in(world.step) or key in world.current.before:
        return
    whole = flat_bytes(target)
    world.current.before[key] = (whole, whole.clone())


def put_back(world: Machine, step: Step) -> None:
    """The capture of a graph has ended: on a GPU it runs nothing, so what its ops wrote is as it was."""
    with compat.no_torch_function(), world.off(), torch.inference_mode():
        for whole, before in step.before.values():
            whole.copy_(before)
    step.before.clear()


def record(
    world: Machine,
    func: Any,
    kind: str,
    chain: frames.Chain,
    scalars: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    virtual: list[DeviceTensor],
    hosts: list[Tensor],
    outs: list[Tensor],
    known: set[int],
    hazard: hazards.Hazard | None,
) -> None:
    step = world.current
    assert step is not None
    fresh = tuple(storage_of(o) not in known for o in outs)
    if turns(func) or (outs and kind == "op" and not any(fresh) and not written(func)):
        kind = "view"
    op = begun(world, func, name_of(func), kind, chain, tuple(scalars), virtual)
    op.out_shapes = tuple(tuple(o.shape) for o in outs)
    op.codes = (hazard.code,) if hazard else ()
    if kind != "view" and op.captured and world.streams.order.forked:
        world.streams.use(world, chain, uses(world, func, args, kwargs, virtual, outs, fresh))
    if kind == "h2d":
        source = hosts[0].detach()
        op.source, op.contents = weak(source), source.clone()
        op.frozen = op.contents
        values = block(source)
        op.source_view = (values.shape, values.stride(), values.storage_offset())
        for other in step.ops:
            if other.kind == "d2h" and other.captured and storage_of(source) in other.lands:
                op.fed = other.feeds = True
    if kind == "d2h":
        op.lands = tuple(storage_of(t) for t in (*hosts, *outs))
    if world.step == world.captured_step:
        _remember(world, op, args, kwargs, virtual, hosts, outs, fresh)
    elif world.reference is not None and not step.parted:
        compare(world, op, step, outs)
    step.ops.append(op)


@functools.cache
def name_of(func: Any) -> str:
    """`str(func)`, which torch puts together anew each time."""
    return str(func)


@functools.cache
def turns(func: Any) -> bool:
    """Whether an op changes shape or strides of a tensor in place and nothing else (transpose_, squeeze_, ...)."""
    return torch.Tag.inplace_view in func.tags and func._schema.name not in _REPLACED


def uses(
    world: Machine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], virtual: list[DeviceTensor],
    outs: list[Tensor], fresh: tuple[bool, ...],
) -> Iterator[tuple[int, bool, Tensor]]:  # fmt: skip
    """(storage number, whether it is written, the part of it) of all on the device that an op reads or writes."""
    writes = {id(t) for t in targets(func, args, kwargs)}
    for tensor in virtual:
        yield tensor.record.number, id(tensor.inner) in writes, tensor.inner
    for out, new in zip(outs, fresh, strict=True):
        record = world.storages.record(out)
        if new and record is not None:
            yield record.number, True, out


_REPLACED = ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::resize_as_sparse_")


def freeze(step: Step, tensor: Tensor) -> None:
    """A tensor is about to be turned in place: what was recorded of it keeps the shape and strides of now."""
    now = tensor.detach()

    def frozen(t: Tensor) -> Tensor:
        return now if t is tensor else t

    for op in step.ops:
        if any(t is tensor for t in (*op.outs, *op.tensors)):
            op.args, op.kwargs = map_tensors((op.args, op.kwargs), frozen)
            op.outs, op.tensors = map_tensors((op.outs, op.tensors), frozen)


def _remember(
    world: Machine, op: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any], virtual: list[DeviceTensor],
    hosts: list[Tensor], outs: list[Tensor], fresh: tuple[bool, ...],
) -> None:  # fmt: skip
    if op.kind == "h2d":
        args = tuple(a for a in args[:1] if op.func._schema.name == "aten::copy_")  # never hold the host source
        kwargs = {}
    elif op.kind == "op" and hosts:  # passed by value: later changes of the host tensor do not reach the graph
        held = {id(h) for h in hosts}
        args, kwargs = map_tensors((args, kwargs), lambda t: t.clone() if id(t) in held else t)
    op.args, op.kwargs, op.outs, op.fresh = args, kwargs, tuple(outs), fresh
    op.tensors = tuple(t.inner for t in virtual)
    made = [(o, world.storages.record(o)) for o, new in zip(outs, fresh, strict=True) if new]
    op.allocates = tuple(r.number for _, r in made if r is not None)
    op.bytes = sum(r.nbytes for _, r in made if r is not None)
    written_to = [world.storages.record(t) for t in targets(op.func, args, kwargs)]
    op.writes = tuple(r.number for r in written_to if r is not None)


def compare(world: Machine, op: OpRecord, step: Step, outs: list[Tensor]) -> None:
    """Keep this op's results if it differs from the captured step's op at the same position."""
    assert world.reference is not None
    at = len(step.ops)
    if at >= len(world.reference.ops):
        step.parted = True
        return
    other = world.reference.ops[at]
    if other.func is not op.func or other.chain != op.chain:
        step.parted = True
        return
    op.chain = other.chain  # one object for equal ones: thousands of ops have them, of dozens of frames
    differs = other.scalars != op.scalars or other.shapes != op.shapes or other.out_shapes != op.out_shapes
    differs = differs or not _same_storages(world.reference, other, step, op)
    if not differs and op.kind == "h2d" and other.contents is not None and op.contents is not None:
        differs = not op.fed and not same(other.contents, op.contents)
    if differs:
        op.evidence = tuple(o.detach().clone() for o in outs)


def _same_storages(captured: Step, ours: OpRecord, step: Step, theirs: OpRecord) -> bool:
    """Whether two ops use the same storages from outside, those of one input taken for one."""
    if ours.externals == theirs.externals:
        return True
    pairs = zip(ours.externals, theirs.externals, strict=False)
    inputs, others = captured.inputs, step.inputs
    same_inputs = all(a == b or (a in inputs and inputs[a] == others.get(b)) for a, b in pairs)
    return same_inputs and len(ours.externals) == len(theirs.externals)


def convert(value: Any, virtual: list[DeviceTensor], hosts: list[Tensor], scalars: list[Any]) -> Any:
    """`value` with inner tensors for device tensors; sorts what it meets into the three lists."""
    if type(value) in _SCALARS:
        scalars.append(value)
        return value
    if isinstance(value, DeviceTensor):
        virtual.append(value)
        return value.inner
    if isinstance(value, Tensor):
        hosts.append(value)
        return value
    if isinstance(value, list | tuple):
        return type(value)([convert(v, virtual, hosts, scalars) for v in value])
    if not isinstance(value, _UNSAID):
        scalars.append(value)
    return value


_SCALARS = frozenset({int, float, bool, type(None), torch.dtype, torch.layout, torch.memory_format})
_UNSAID = (torch.Generator, torch.ScriptObject)
"""No values of an op: process groups and their options are objects."""
