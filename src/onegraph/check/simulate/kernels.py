"""Launches of Triton kernels: interpreted, and written into the books as ops that a replay does again."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onegraph.check import compat
from onegraph.check.declared import capturable, name_of
from onegraph.check.simulate import frames, interpret, recording, specialized
from onegraph.check.simulate.device import DeviceTensor, StorageRecord, flat_bytes, refuse
from onegraph.check.simulate.records import Argument, OpRecord
from onegraph.check.simulate.unknown import Given

if TYPE_CHECKING:
    from onegraph.check.simulate.world import World

LONGEST = 3.0
"""Seconds of this thread that a step's kernels may take to interpret; one that does not fit is opaque from then on."""

LEAST = 0.1
"""Seconds that a kernel which was not interpreted yet may take, whatever others of the step took."""

_PLAIN = (int, float, complex, bool, str, type(None))


@dataclass
class Kernels:
    """What a simulated machine knows of Triton kernels.

    refused: why a kernel is not interpreted. proven: kernels that were interpreted to their end. seen: one object per
    code and closure, so that a kernel made anew in each step is the same one in all of them. Kernels are known by `id`:
    to hash one, Triton reads its source and all that it calls.
    """

    refused: dict[int, str] = field(default_factory=dict)
    proven: set[int] = field(default_factory=set)
    seen: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    spent: dict[int, float] = field(default_factory=dict)  # seconds, by step
    books: specialized.Compiled = field(default_factory=specialized.Compiled)

    def same(self, kernel: Any) -> Any:
        """The first kernel that was launched with this one's code and closure."""
        function = kernel.fn
        cells = [_cell(c) for c in getattr(function, "__closure__", None) or ()]
        key = (function.__code__, function.__code__.co_filename, *(known for known, _ in cells))
        return self.seen.setdefault(key, (kernel, cells))[0]


def _cell(cell: Any) -> tuple[Any, Any]:
    """(what tells a closure's variable from another, the variable)."""
    try:
        value = cell.cell_contents
    except ValueError:
        return None, None
    told = value.value if type(value).__name__ == "constexpr" else value
    return (told if isinstance(told, _PLAIN) else id(value)), value


@dataclass
class _Launch:
    """One launch, its arguments sorted: `arguments` by parameter as the user gave them, `inner` on CPU tensors; `given`
    is what its tensors held before it, where something is unknown."""

    kernel: Any
    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    inner: dict[str, Any]
    virtual: list[DeviceTensor]
    chain: frames.Chain
    given: tuple[Given, ...] | None = None


def launch(world: "World", kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
    """Run one launch on the simulated device. Raises what Triton raises for wrong arguments."""
    chain = world.chain(3)
    arguments, options = bound(kernel, args, kwargs)
    made = _sorted(world, world.kernels.same(kernel), arguments, _sizes(grid, arguments), chain)
    world.kernels.books.launched(world, kernel, made.name, arguments, options, chain)
    for hook in getattr(kernel, "pre_run_hooks", ()):
        hook(*args, **kwargs)
    if world.unknowns:  # looked at before the kernel writes there
        made.given = world.given(made.virtual, [t.inner for t in made.virtual])
    memory = _memory(world, made)
    reason = _interpreted(world, made, memory)
    if reason:
        opaque(world, made, reason)
        return
    if capturable(made.name) is False:
        world.opaque(made.name, f"Triton kernel {_short(made.name)}", chain)
    used = [*tensors_of(made.inner), *memory.followed]
    if world.unknowns.among(used):  # what it computed from that is as unknown
        _unknown(world, made, f"Triton kernel {_short(made.name)}")
    elif world.current is not None and world.phase == "step" and not world.muted:
        _record(world, made, memory)


def bound(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments by parameter, options of the launch such as num_warps)."""
    signature = inspect.signature(kernel.fn)
    names = signature.parameters.keys()
    options = {key: value for key, value in kwargs.items() if key not in names}
    found = signature.bind(*args, **{key: value for key, value in kwargs.items() if key in names})
    found.apply_defaults()
    return dict(found.arguments), options


def _sizes(grid: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    if callable(grid):
        grid = grid(dict(arguments))
    sizes = tuple(int(size) for size in grid)
    if len(sizes) > 3:
        refuse(f"grid: got {len(sizes)} sizes, allowed 3")
    return sizes


def _sorted(
    world: "World", kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...], chain: frames.Chain
) -> _Launch:
    virtual: list[DeviceTensor] = []
    place = 0

    def inner(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            if tensor.world is not world:
                world.adopt(tensor)
            virtual.append(tensor)
            return tensor.inner
        if not world.is_pinned(tensor):
            refuse(f"Pointer argument (at {place}) cannot be accessed from Triton (cpu tensor?)")
        return tensor

    plain = {}
    for place, (name, value) in enumerate(arguments.items()):  # noqa: B007 - `inner` says which one it was
        plain[name] = interpret.plain(value, inner)
    return _Launch(kernel, name_of(kernel), grid, arguments, plain, virtual, chain)


def _memory(world: "World", made: _Launch) -> interpret.Memory:
    """Storages that were there before this step are kept as they were, for the referee to go back to."""
    replayed = world.phase == "step" and world.current is not None and world.step > world.captured_step
    undo = id(made.kernel) not in world.kernels.proven

    def first_write(whole: Tensor) -> None:
        if replayed:
            recording.keep_one(world, whole)
        if undo:
            memory.kept.append((whole, whole.clone()))

    spent = world.kernels.spent.get(world.step, 0.0)
    limit = max(LONGEST - spent, LEAST) if undo else 60.0
    memory = interpret.Memory(tensors_of(made.inner), partial(_owner, world), first_write, limit)
    return memory


def tensors_of(arguments: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for value in arguments.values():
        interpret.plain(value, note)
    return found


def _owner(world: "World", address: int) -> Tensor | None:
    """A tensor of the living storage that holds `address`."""
    for key in list(world.records):
        storage = compat.storage_by_address(key)
        if storage is not None and storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
            return torch.empty(0, dtype=torch.uint8).set_(storage)
    return None


def _interpreted(world: "World", made: _Launch, memory: interpret.Memory) -> str:
    """Run it; why that could not be, or "". What it had written until then is put back."""
    kernels = world.kernels
    if id(made.kernel) in kernels.refused:
        return kernels.refused[id(made.kernel)]
    try:
        with compat.no_torch_function(), world.off():
            interpret.run(made.kernel.fn, made.inner, made.grid, memory)
    except interpret.Cannot as error:
        for whole, before in memory.kept:
            whole.copy_(before)
        kernels.refused[id(made.kernel)] = str(error)
        return str(error)
    kernels.proven.add(id(made.kernel))
    kernels.spent[world.step] = kernels.spent.get(world.step, 0.0) + memory.seconds()
    return ""


def opaque(world: "World", made: _Launch, reason: str) -> None:
    """A launch that nothing could look into: what it would have written is not known."""
    what = f"Triton kernel {_short(made.name)}"
    world.opaque(made.name, f"{what} ({reason})", made.chain)
    _unknown(world, made, what)


def _unknown(world: "World", made: _Launch, what: str) -> None:
    grid = [Argument("grid", made.grid)] if made.grid else []
    recording.launched(world, made.kernel, made.name, made.chain, made.virtual, (*_scalars(made), *grid), made.given)
    world.unknown([t.inner for t in made.virtual], what, made.chain)


def foreign(world: "World", kernel: Any, name: str, given: tuple[Any, ...]) -> None:
    """A launch of a kernel that is not Triton's, where it was given tensors of the device: nothing looks into it."""
    virtual: list[DeviceTensor] = []
    scalars: list[Any] = []
    recording.convert(list(given), virtual, [], scalars)
    if not virtual or world.phase != "step" or world.muted:
        return
    numbers = {f"{index}": value for index, value in enumerate(scalars) if isinstance(value, _PLAIN)}
    made = _Launch(kernel, name, (), numbers, {}, virtual, world.chain(3))
    world.opaque(name, f"kernel {name} (no Triton kernel: it cannot be interpreted)", made.chain)
    _unknown(world, made, f"kernel {name}")


def _record(world: "World", made: _Launch, memory: interpret.Memory) -> None:
    step = world.current
    assert step is not None
    virtual = made.virtual
    touched = _records(world, memory.followed)
    written = {whole.data_ptr() for whole in memory.written.values()}
    outs = [t.inner for t in virtual if flat_bytes(t.inner).data_ptr() in written]
    op = OpRecord(
        func=made.kernel,
        name=made.name,
        kind="launch",
        chain=made.chain,
        scalars=step.addresses.named((*_scalars(made), Argument("grid", made.grid))),
        shapes=tuple(tuple(t.inner.shape) for t in virtual),
        externals=tuple(_external(world, r) for r in (*(t.record for t in virtual), *touched)),
        derived=tuple(t.made == world.step for t in virtual),
        captured=world.streams.launch(world, made.chain, virtual[0].device.index if virtual else world.device_index),
        reads=tuple(dict.fromkeys(r.number for r in (*(t.record for t in virtual), *touched))),
    )
    op.writes = tuple(r.number for r in _records(world, list(memory.written.values())))
    if op.captured and world.streams.order.forked:
        used = ((t.record.number, flat_bytes(t.inner).data_ptr() in written, t.inner) for t in virtual)
        world.streams.use(world, made.chain, used)
    if world.step == world.captured_step:
        op.kwargs = made.inner
        op.outs, op.fresh = tuple(outs), (False,) * len(outs)
        op.tensors = (*(t.inner for t in virtual), *memory.followed)
        op.again = partial(_again, made.kernel, made.grid, memory.followed)
    elif world.reference is not None and not step.parted:
        recording.compare(world, op, step, outs)
    step.ops.append(op)


def _again(
    kernel: Any, grid: tuple[int, ...], followed: list[Tensor], op: OpRecord, keep: Callable[[Tensor], None]
) -> bool:
    """A replay: the same launch on the storages that it had."""
    given = [*tensors_of(op.kwargs), *followed]
    memory = interpret.Memory(given, lambda address: None, keep, 60.0)
    try:
        interpret.run(kernel.fn, op.kwargs, grid, memory)
    except interpret.Cannot:
        return False
    return True


def _external(world: "World", record: StorageRecord) -> int:
    """Its number, or -1 where the running step made it."""
    return -1 if record.born == world.step and record.phase == "step" else record.number


def _records(world: "World", tensors: list[Tensor]) -> list[StorageRecord]:
    by_address = {}
    for key, record in list(world.records.items()):
        storage = compat.storage_by_address(key)
        if storage is not None:
            by_address[storage.data_ptr()] = record
    return [by_address[t.data_ptr()] for t in tensors if t.data_ptr() in by_address]


def _scalars(made: _Launch) -> Iterator[Argument]:
    for name, value in made.arguments.items():
        value = value.value if type(value).__name__ == "constexpr" else value
        if isinstance(value, tuple):
            value = tuple(v for v in value if isinstance(v, _PLAIN))
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and value):
            yield Argument(name, value)


def _short(name: str) -> str:
    return name.removeprefix("triton:")
