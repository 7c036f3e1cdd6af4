"""One record per op: its schema, reference, kernel, example cases, tolerance and cost.

`register` turns a record into a `torch.ops.onegraph.*` op: the reference is the CPU implementation, the kernel the CUDA
one, so tests, simulation and the GPU go through one call. `Library.define` + `impl` costs about 10 us a call where
`torch.library.custom_op` costs 50 to 70 (torch 2.11, H200).
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from onegraph.ops import family
from onegraph.ops.calls import Call

_LIBRARY = torch.library.Library("onegraph", "DEF")
_USE_REFERENCE: ContextVar[bool] = ContextVar("onegraph_use_reference", default=False)
_SEEN: ContextVar[str | None] = ContextVar("onegraph_seen", default=None)  # the device of a step that ran before

OPS: dict[str, "Op"] = {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Example arguments of an op, from which its tests and benchmarks are generated.

    `make(device, dtype, generator)` returns the positional arguments; random tensors are drawn from the CPU `generator`
    and then moved, so that every device sees the same values.
    """

    name: str
    make: Callable[[torch.device, torch.dtype, torch.Generator], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """A registered op. Calling it dispatches on the tensors' device.

    Args:
        schema: argument list and result as torch's schema language writes them, without the name. Arguments that the op
            writes carry an alias mark, e.g. `Tensor(a!) out`. With `call`, the result alone.
        call: the record of the arguments, where they are many (`ops/calls.py`). The functions below and the kernel then
            take it; once registered, they are called as the op is.
        reference: pure torch, right on any device, obeys the capture contract.
        fake: shapes and dtypes of the results from those of the arguments.
        kernel: "module:function" with the reference's signature, or a method of an object in the module, imported on
            the first CUDA call; None where the reference is the CUDA implementation too, as it is of every op under
            `ONEGRAPH_KERNELS=reference`.
        sole: the kernel has nothing beside it on a GPU, whose graphs the reference cannot be captured in: it runs
            whatever `ONEGRAPH_KERNELS` says.
        cpu: likewise for a CPU, where values are at hand and each of torch's calls costs more than what it does.
        check: raises ValueError (got / allowed / what to do) before anything is launched; None for ops that accept
            whatever torch itself accepts.
        tolerance: largest allowed relative error ‖out − ref‖ / ‖ref‖ per dtype, against the float32 truth.
        bytes_moved, flops: from the arguments; what a roofline counts (each input read once, each output written once).
        on_cpu, on_cuda: what a CPU and a GPU run; `register` sets them.
    """

    name: str
    schema: str
    call: type[Call] | None = None
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    kernel: str | None = None
    sole: bool = False
    cpu: str | None = None
    check: Callable[..., None] | None = None
    cases: tuple[Case, ...] = ()
    tolerance: Mapping[torch.dtype, float] = field(default_factory=dict)
    bytes_moved: Callable[..., int] | None = None
    flops: Callable[..., int] | None = None
    on_cpu: Callable[..., Any] | None = None
    on_cuda: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # a tracer follows neither context variables nor messages made of shapes
            return self.overload(*args, **named)
        seen = _SEEN.get()
        if self.check is not None and seen is None:
            self.check(*args, **named)
        if _USE_REFERENCE.get():
            return self.reference(*args, **named)
        if seen == "cpu" and self.on_cpu is not None:
            return self.on_cpu(*args, **named)
        return self.overload(*args, **named)

    def unpacked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of the op's record, or of its arguments where it has none, as a function of the arguments."""
        call = self.call
        return function if call is None else lambda *args, **named: function(call(*args, **named))

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.onegraph, self.name).default


def register(op: Op) -> Op:
    """Register `op` with torch under `onegraph::<name>` and list it in `OPS`."""
    if op.name in OPS:
        raise ValueError(f"op {op.name!r} is registered already; a name belongs to one op")
    if op.call is not None:
        functions = {name: getattr(op, name) for name in ("reference", "fake", "check", "bytes_moved", "flops")}
        functions = {name: op.unpacked(function) for name, function in functions.items() if function is not None}
        op = replace(op, schema=f"({op.call.schema()}) {op.schema}", **functions)
    _LIBRARY.define(op.name + op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    kernel = None if family.FORCED == "reference" and not op.sole else op.kernel
    cpu, cuda = (op.reference if each is None else op.unpacked(_lazy(each)) for each in (op.cpu, kernel))
    op = replace(op, on_cpu=cpu, on_cuda=cuda)
    for key, function in (("CPU", cpu), ("CUDA", cuda)):
        _LIBRARY.impl(op.name, function, key)
    torch.library.register_fake(f"onegraph::{op.name}", op.fake, lib=_LIBRARY)
    OPS[op.name] = op
    return op


def _lazy(target: str) -> Callable[..., Any]:
    """A function that imports `module:function` when first called: no Triton on a machine without a GPU."""
    module, _, name = target.partition(":")
    found: list[Callable[..., Any]] = []

    def kernel(*args: Any) -> Any:
        if not found:
            found.append(attrgetter(name)(importlib.import_module(module)))
        return found[0](*args)

    return kernel


@contextmanager
def reference_ops() -> Iterator[None]:
    """Inside this context every op runs its reference, on any device: the other side of an A/B comparison."""
    token = _USE_REFERENCE.set(True)
    try:
        yield
    finally:
        _USE_REFERENCE.reset(token)


@contextmanager
def seen_before(device: torch.device) -> Iterator[None]:
    """Inside this context, of a step that has run on the same buffers of `device`, no op checks its arguments, and on a
    CPU none goes through torch's dispatcher: either takes as long there as the arithmetic of a norm."""
    token = _SEEN.set(device.type)
    try:
        yield
    finally:
        _SEEN.reset(token)


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes that the given tensors hold; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
