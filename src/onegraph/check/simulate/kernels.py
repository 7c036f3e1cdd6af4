"""Launches of Triton kernels: interpreted, and written into the books as ops that a replay does again."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat
from onegraph.check.declared import capturable, key_of, name_of
from onegraph.check.simulate import frames, interpret, recording, specialized
from onegraph.check.simulate.budget import Budget, for_replay
from onegraph.check.simulate.device import DeviceTensor, StorageRecord, flat_bytes, refuse
from onegraph.check.simulate.machine import Machine
from onegraph.check.simulate.records import Argument, OpRecord
from onegraph.check.simulate.unknown import GivenTensor

Code = tuple[CodeType, str]

_PLAIN = (int, float, complex, bool, str, type(None))


@dataclass
class Kernels:
    """What a simulated machine knows of Triton kernels.

    barred: kernels that are not interpreted from the start, by their code, and why. refused: the same of those that
    were tried. late: those that were refused after the captured step had run them: whoever compares steps begins again
    without them. proven: kernels that were interpreted to their end. captured: those that the captured step ran.
    seen: one object per code and closure, so that a kernel made anew in each step is the same one in all of them.
    Kernels are known by `id`: to hash one, Triton reads its source and all that it calls.
    """

    barred: dict[Code, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    late: dict[Code, str] = field(default_factory=dict)
    proven: set[int] = field(default_factory=set)
    captured: set[int] = field(default_factory=set)
    seen: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    books: specialized.Compiled = field(default_factory=specialized.Compiled)

    def why_not(self, kernel: Any) -> str:
        """Why a kernel is not interpreted; "" where it is."""
        return self.refused.get(id(kernel)) or self.barred.get(code_of(kernel), "")

    def refuse(self, kernel: Any, reason: str) -> None:
        """It is not interpreted from now on."""
        self.refused[id(kernel)] = reason

    def refuse_late(self, kernel: Any, reason: str) -> None:
        """The same of one that the captured step has run: what that computed can be compared with nothing."""
        self.refuse(kernel, reason)
        self.late[code_of(kernel)] = reason

    def same(self, kernel: Any) -> Any:
        """The first kernel that was launched with this one's code and closure."""
        cells = [_cell(c) for c in getattr(kernel.fn, "__closure__", None) or ()]
        key = (*code_of(kernel), *(known for known, _ in cells))
        return self.seen.setdefault(key, (kernel, cells))[0]


def code_of(kernel: Any) -> Code:
    """What a kernel is known by from one run of its factory to the next. Code is equal to that of another file."""
    code = kernel.fn.__code__
    return code, code.co_filename


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
    key: str  # what it is declared by
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    inner: dict[str, Any]
    virtual: list[DeviceTensor]
    chain: frames.Chain
    given: tuple[GivenTensor, ...] | None = None


def launch(world: Machine, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
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
    if capturable(made.key) is False:
        world.opaque(made.key, f"Triton kernel {_short(made.name)}", chain)
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
    world: Machine, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...], chain: frames.Chain
) -> _Launch:
    virtual: list[DeviceTensor] = []
    place = 0

    def inner(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            if tensor.world is not world:
                world.adopt(tensor)
            virtual.append(tensor)
            return tensor.inner
        if not world.storages.is_pinned(tensor):
            refuse(f"Pointer argument (at {place}) cannot be accessed from Triton (cpu tensor?)")
        return tensor

    plain = {}
    for place, (name, value) in enumerate(arguments.items()):  # noqa: B007 - `inner` says which one it was
        plain[name] = interpret.plain(value, inner)
    return _Launch(kernel, name_of(kernel), key_of(kernel), grid, arguments, plain, virtual, chain)


def _memory(world: Machine, made: _Launch) -> interpret.Memory:
    """Storages that were there before this step are kept as they were, for the referee to go back to."""
    current = world.current if world.phase == "step" else None
    replayed = current is not None and (current.graph or world.step > world.captured_step)
    undo = id(made.kernel) not in world.kernels.proven

    def first_write(whole: Tensor) -> None:
        if replayed:
            recording.keep(world, whole)
        if undo:
            memory.kept.append((whole, whole.clone()))

    limit = world.kernels.budget.left(world, proven=not undo)
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


def _owner(world: Machine, address: int) -> Tensor | None:
    """A tensor of the living storage that holds `address`."""
    for key in list(world.storages.records):
        storage = compat.storage_by_address(key)
        if storage is not None and storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
            return torch.empty(0, dtype=torch.uint8).set_(storage)
    return None


def _interpreted(world: Machine, made: _Launch, memory: interpret.Memory) -> str:
    """Run it; why that could not be, or "". What it had written until then is put back."""
    kernels, kernel = world.kernels, made.kernel
    if reason := kernels.why_not(kernel):
        return reason
    try:
        with compat.no_torch_function(), world.off():
            interpret.run(kernel.fn, made.inner, made.grid, memory)
    except interpret.Cannot as error:
        for whole, before in memory.kept:
            whole.copy_(before)
        late = id(kernel) in kernels.captured and world.phase == "step"
        (kernels.refuse_late if late else kernels.refuse)(kernel, str(error))
        kernels.budget.wasted += memory.seconds()
        return str(error)
    kernels.proven.add(id(kernel))
    kernels.budget.took(world, memory.seconds())
    return ""


def opaque(world: Machine, made: _Launch, reason: str) -> None:
    """A launch that nothing could look into: what it would have written is not known."""
    what = f"Triton kernel {_short(made.name)}"
    world.opaque(made.key, f"{what} ({reason})", made.chain)
    _unknown(world, made, what)


def _unknown(world: Machine, made: _Launch, what: str) -> None:
    grid = [Argument("grid", made.grid)] if made.grid else []
    recording.launched(world, made.kernel, made.name, made.chain, made.virtual, (*_scalars(made), *grid), made.given)
    world.unknown([t.inner for t in made.virtual], what, made.chain)


def foreign(world: Machine, kernel: Any, name: str, given: tuple[Any, ...]) -> None:
    """A launch of a kernel that is not Triton's, where it was given tensors of the device: nothing looks into it."""
    virtual: list[DeviceTensor] = []
    scalars: list[Any] = []
    recording.convert(list(given), virtual, [], scalars)
    if not virtual or world.phase != "step" or world.muted:
        return
    numbers = {f"{index}": value for index, value in enumerate(scalars) if isinstance(value, _PLAIN)}
    made = _Launch(kernel, name, name, (), numbers, {}, virtual, world.chain(3))
    world.opaque(name, f"kernel {name} (no Triton kernel: it cannot be interpreted)", made.chain)
    _unknown(world, made, f"kernel {name}")


def _record(world: Machine, made: _Launch, memory: interpret.Memory) -> None:
    step = world.current
    assert step is not None
    virtual = made.virtual
    touched = _records(world, memory.followed)
    written = {whole.data_ptr() for whole in memory.written.values()}
    outs = [t.inner for t in virtual if flat_bytes(t.inner).data_ptr() in written]
    scalars = (*_scalars(made), Argument("grid", made.grid))
    op = recording.begun(world, made.kernel, made.name, "launch", made.chain, scalars, virtual, touched)
    op.writes = tuple(r.number for r in _records(world, list(memory.written.values())))
    if op.captured and world.streams.order.forked:
        used = ((t.record.number, flat_bytes(t.inner).data_ptr() in written, t.inner) for t in virtual)
        world.streams.use(world, made.chain, used)
    if world.step == world.captured_step:
        world.kernels.captured.add(id(made.kernel))
        op.kwargs = made.inner
        op.outs, op.fresh = tuple(outs), (False,) * len(outs)
        op.tensors = (*(t.inner for t in virtual), *memory.followed)
        op.again = _Again(world, made.kernel, made.grid, memory.followed, for_replay(memory.seconds()))
    elif world.reference is not None and not step.parted:
        recording.compare(world, op, step, outs)
    step.ops.append(op)


@dataclass
class _Again:
    """A replay of a launch: the same on the storages that it had, within `limit` seconds."""

    world: Machine
    kernel: Any
    grid: tuple[int, ...]
    followed: list[Tensor]
    limit: float

    def __call__(self, op: OpRecord, keep: Callable[[Tensor], None]) -> bool:
        given = [*tensors_of(op.kwargs), *self.followed]
        memory = interpret.Memory(given, lambda address: None, keep, self.limit)
        try:
            interpret.run(self.kernel.fn, op.kwargs, self.grid, memory)
        except interpret.NoTime as error:
            self.world.kernels.refuse_late(self.kernel, str(error))
            return False
        except interpret.Cannot:
            return False
        return True


def _records(world: Machine, tensors: list[Tensor]) -> list[StorageRecord]:
    by_address = {}
    for key, record in list(world.storages.records.items()):
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
