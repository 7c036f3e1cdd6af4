"""What a step did, op by op: the record that simulation and GPU share, and that steps are compared by."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from onegraph.check import compat
from onegraph.check.report import CheckError, Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.addresses import Addresses
from onegraph.check.tables import WRITING_COLLECTIVES

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
UNWRITTEN = frozenset(f"aten::{name}" for name in _EMPTY)
"""Ops whose result holds whatever was there; a simulation takes zeros."""


class Argument(NamedTuple):
    """A number that a kernel is launched with, under the name of its parameter; "grid" is how many programs."""

    name: str
    value: Any


@dataclass(slots=True)
class OpRecord:
    """One op of a step. Tensors are kept for the captured step alone, as plain CPU tensors.

    kind: "op", "h2d", "d2h", "launch", "view". externals: per device argument the storage number, or -1 where the
    step made it. captured: false for work on a stream that the capture does not see. again: runs a launch on the
    recorded storages once more, told of each storage before it is written; false where that cannot be. A launch that
    has none was not looked into. lands: storages of the host that a copy writes. fed: a copy from host memory that an
    earlier op of the step, which `feeds`, wrote: a replay writes it too.
    """

    func: Any
    name: str
    kind: str
    chain: frames.Chain
    scalars: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    externals: tuple[int, ...]
    out_shapes: tuple[tuple[int, ...], ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: tuple[Tensor, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    fresh: tuple[bool, ...] = ()
    evidence: tuple[Tensor, ...] | None = None
    derived: tuple[bool, ...] = ()
    frozen: Tensor | None = None
    source: StorageWeakRef | None = None
    source_view: tuple[Any, Any, Any] = ((), (), 0)
    contents: Tensor | None = None
    fed: bool = False
    feeds: bool = False
    lands: tuple[int, ...] = ()
    captured: bool = True
    writes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()
    bytes: int = 0
    codes: tuple[str, ...] = ()
    again: Callable[["OpRecord", Callable[[Tensor], None]], bool] | None = None
    opaque: bool = False  # nothing here computes what it gives and writes
    given: tuple[Any, ...] = ()  # see `unknown.GivenTensor`; empty where nothing is unknown


@dataclass(slots=True)
class RawFinding:
    """A hazard seen while running: at which step, through which calls."""

    step: int
    code: str
    severity: Severity
    chain: frames.Chain
    message: str
    happens: str
    values: tuple[str, ...] = ()
    note: Any = None
    position: int = -1  # of the captured step's op, where two steps were compared
    cause: frames.Chain = ()  # of the host read that this one follows from
    storages: frozenset[int] = frozenset()  # that differ between the two steps
    sizes: frozenset[tuple[int, int]] = frozenset()  # of tensors of the op, at capture and now, where they differ
    count: int = 1  # how often it was seen
    construct: str = ""  # which one it stands at, where that is known


@dataclass(slots=True)
class Step:
    """Everything one step did."""

    index: int
    ops: list[OpRecord] = field(default_factory=list)
    parted: bool = False
    reads: list[tuple[frames.Chain, Any, int]] = field(default_factory=list)  # what the host read, after how many ops
    before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # storage -> (bytes, copy from before)
    rng: list[tuple[int, int]] = field(default_factory=list)  # see `World.random_state`
    inputs: dict[int, str] = field(default_factory=dict)  # storage number -> path of the input
    unknown: frozenset[int] = frozenset()  # storages with unknown contents when it began
    exposed: frozenset[int] = frozenset()  # those of them whose address was handed out
    unknown_after: frozenset[int] = frozenset()
    addresses: Addresses = field(default_factory=Addresses)
    marked: dict[int, tuple[int, int]] = field(default_factory=dict)  # storage number -> where it became unknown
    memory: list[tuple[int, int, int]] = field(default_factory=list)  # storage, its bytes or -1 freed, ops before
    memory_end: int | None = None  # how much of that was inside of the step; None: all
    graph: bool = False  # a graph that the program itself captures: what it writes is put back

    def freed(self, number: int) -> None:
        """The last tensor of a storage that this step made is gone."""
        self.memory.append((number, -1, len(self.ops)))


@dataclass(frozen=True, slots=True)
class Writes:
    positions: tuple[int, ...]
    names: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)


_UNSAID = {
    f"aten::{name}": ("running_mean", "running_var")
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
} | {f"c10d::{name}": ("tensors", "output", *(f"output{s}" for s in ("s", "_tensor", "_tensors", "_lists")))
     for name in WRITING_COLLECTIVES}  # fmt: skip
"""Arguments that an op writes although its schema does not say so."""


@functools.cache
def written(func: Any) -> Writes:
    """Which arguments an op writes, from its schema."""
    positions, names = [], []
    unsaid = _UNSAID.get(func._schema.name, ())
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in unsaid or (argument.alias_info is not None and argument.alias_info.is_write):
            names.append(argument.name)
            if not argument.kwarg_only:
                positions.append(index)
    return Writes(tuple(positions), tuple(names))


def results_said(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(whether the schema tells an op's results, the results): nothing, or arguments that it writes."""
    schema = func._schema
    given = {a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(schema.arguments)}
    found = []
    for result in schema.returns:
        alias = result.alias_info
        names = [
            a.name
            for a in schema.arguments
            if alias is not None
            and alias.is_write
            and a.alias_info is not None
            and a.alias_info.before_set & alias.before_set
        ]
        if not names:
            return False, None
        found.append(given[names[0]])
    return True, None if not found else found[0] if len(found) == 1 else tuple(found)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


def targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that the op writes, of what it is given."""
    writes = written(func)
    if not writes:
        return []
    given = [args[i] for i in writes.positions if i < len(args)] + [kwargs[n] for n in writes.names if n in kwargs]
    return list(tensors_in(given))


def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """(tensors that the op writes, the other ones that it is given)."""
    writes = targets(func, args, kwargs)
    ids = {id(t) for t in writes}
    return writes, [t for t in tensors_in((args, kwargs)) if id(t) not in ids]


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([map_tensors(item, change) for item in tree])
    if isinstance(tree, dict):
        return {key: map_tensors(item, change) for key, item in tree.items()}
    return tree


@functools.cache
def composed(func: Any) -> bool:
    """Whether an op is made of others (item, where, to, ...): in inference mode torch hands it over as a whole."""
    try:
        return compat.is_composed(func.name())
    except RuntimeError:  # a property (dim, size) of a tensor written in Python, which is no op of the dispatcher
        return False


def eagerly(func: compat.HigherOrderOperator) -> Callable[..., Any]:
    """What an op that calls functions (cond, flex_attention, ...) does where nothing is compiled."""
    kernel: Callable[..., Any] | None = func.py_kernels.get(compat.DispatchKey.CompositeExplicitAutograd)
    if kernel is None:
        raise CheckError(f"{func.name()} calls functions in a way that is not followed: torch has no eager form of it")

    def run(*args: Any, **kwargs: Any) -> Any:
        """The kernel as it is; some refuse where a mode listens, which is what they are asked for here."""
        with compat.no_mode_asked(inspect.unwrap(kernel)):
            return kernel(*args, **kwargs)

    return run


def body_of(func: Any) -> Callable[..., Any] | None:
    """The Python function behind a custom op: one for CUDA, or for every device."""
    name = func._schema.name
    definition = compat.OPDEFS.get(name)
    if definition is not None:
        bodies = definition._backend_fns
        body: Callable[..., Any] | None = bodies.get("cuda" if "cuda" in bodies else None)
        return body
    kernel = f"{name.replace('::', '/')}{'.' * bool(func._schema.overload_name)}{func._schema.overload_name}/CUDA"
    if kernel not in compat.LIBRARY_KERNELS:
        return None
    return functools.partial(func.redispatch, compat.DispatchKeySet(compat.DispatchKey.CUDA))


def for_cuda(func: Any) -> bool:
    """Whether the Python function behind a custom op is one that its author wrote for CUDA."""
    definition = compat.OPDEFS.get(func._schema.name)
    return definition is None or "cuda" in definition._backend_fns


def has_another(func: Any) -> bool:
    """Whether an op with a function for CUDA has a kernel for the CPU beside it."""
    definition = compat.OPDEFS.get(func._schema.name)
    if definition is not None:
        return {"cuda", "cpu"} <= definition._backend_fns.keys()
    return bool(func.has_kernel_for_dispatch_key(compat.DispatchKey.CPU))


def dense(tensor: Tensor) -> Tensor:
    """What a tensor says in a form that torch can compare: of a sparse one, of one of eight bits."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.float()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal shapes and values, NaN equal to NaN."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    ours, theirs = dense(ours), dense(theirs)
    if torch.equal(ours, theirs):
        return True
    return (
        ours.is_floating_point()
        and torch.equal(ours.nan_to_num(0.123), theirs.nan_to_num(0.123))
        and torch.equal(ours.isnan(), theirs.isnan())
    )


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference over largest value that two runs of the same op may show (one unit of rounding, threads)."""


def close(ours: Tensor, theirs: Tensor) -> tuple[bool, float]:
    """(equal up to the noise of one rounding, largest difference over largest value). NaN equals NaN alone."""
    if ours.shape != theirs.shape:
        return False, float("inf")
    if ours.dtype != theirs.dtype:
        return False, float("inf")
    ours, theirs = dense(ours), dense(theirs)
    if same(ours, theirs):
        return True, 0.0
    if not ours.is_floating_point():
        return False, 1.0
    a, b = ours.double(), theirs.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return False, float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    scale = max(float(b.abs().max()), 1e-30)
    error = float((a - b).abs().max()) / scale
    return error <= _TOLERANCE.get(ours.dtype, 0.1), error


def reshaped(
    leaves: Sequence[Tensor], before: Sequence[list[int]], seen: dict[int, tuple[str, frames.Chain]]
) -> Iterator[tuple[str, str, frames.Chain, tuple[str, ...]]]:
    """(code, message, chain, values) of each input that a step leaves with another shape than it came with.

    Args:
        before: shapes when the step began. seen: by id, the op that changed a tensor's shape in place, and its chain.
    """
    for leaf, shape in zip(leaves, before, strict=True):
        if id(leaf) in seen and list(leaf.shape) != shape:
            name, chain = seen[id(leaf)]
            text = f"{name.split('::')[1]} changes the shape of an input, which is the caller's static buffer"
            yield "CG208", text, chain, (f"before the step: {shape}", f"after it: {list(leaf.shape)}")


def convert_plain(tree: Any, device: list[Tensor], hosts: list[Tensor], scalars: list[Any]) -> None:
    """Sort the leaves of an op's arguments: tensors of a GPU, tensors of the host, everything else but generators.

    A lazy parameter is left out: it has no storage yet, and raises where it is asked for its shape.
    """
    if isinstance(tree, Tensor):
        if not is_lazy(tree):
            (device if tree.is_cuda else hosts).append(tree)
    elif isinstance(tree, list | tuple):
        for item in tree:
            convert_plain(item, device, hosts, scalars)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            if key != "device":
                convert_plain(item, device, hosts, scalars)
    elif not isinstance(tree, torch.Generator):
        scalars.append(tree)
