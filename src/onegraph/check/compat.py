"""The private names of torch that the checker touches, each with why, and the first torch that is known to have it.

No other module of `check` may name one: a test reads their sources. `tests/check/test_compat.py` holds every name to
what is needed of it; `make torch-versions` runs that with each torch of TESTED that can be had. All of them are in
OLDEST, the oldest torch that is supported, unless a line says otherwise. What costs time to import (dynamo, fake
tensors, decompositions) is imported when it is first asked for.

Private attributes of torch's objects, which cannot be imported, are in ATTRIBUTES; only those may be read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch._library.custom_ops
import torch._ops
import torch.autograd.graph
import torch.utils._python_dispatch
import torch.utils._pytree

from onegraph.check.report import CheckError

OLDEST = "2.11"
TESTED = ("2.11", "2.13", "the newest stable")

try:
    # The names of C++ dispatch keys: which kernel an op has for which of them. Since 1.13.
    DispatchKey = torch._C.DispatchKey
    DispatchKeySet = torch._C.DispatchKeySet

    # Kernels that Python registered, as "namespace/op/KEY" (`torch.library.Library.impl`). Since 1.13.
    LIBRARY_KERNELS: set[str] = torch.library._impls

    # No subclass or mode listens to functions in its block: the checker's own work is not the step's. Since 2.0.
    no_torch_function = torch._C.DisableTorchFunction

    # Nor do modes listen to ops: the checker works inside of its own. Since 2.0.
    no_modes = torch.utils._python_dispatch._disable_current_modes

    # What a subclass assigns to `__torch_function__` to see ops alone, not functions. Since 1.7.
    no_torch_function_of_its_own: Any = torch._C._disabled_torch_function_impl

    # `torch.tensor(..., device=d)` makes its values on the CPU first, in sight, and copies them. Since 2.4.
    only_lifts_cpu_tensors = torch._C._only_lift_cpu_tensors
    set_only_lift_cpu_tensors = torch._C._set_only_lift_cpu_tensors

    # torch's own device guard that does nothing, for CUDA builds that see no GPU.
    ensure_cuda_device_guard = torch._C._ensureCUDADeviceGuardSet

    # The number of the next autograd node: what has a smaller one was made before the step. Since 1.13.
    next_node_number = torch._C._autograd._get_sequence_nr

    # All backward passes go through it, `Tensor.backward` and `autograd.grad` alike. Since 2.2.
    run_backward: Callable[..., Any] = torch.autograd.graph._engine_run_backward

    # Custom ops made by `torch.library.custom_op`, by name: their Python bodies. Since 2.4.
    OPDEFS = torch._library.custom_ops.OPDEFS

    # Ops that take functions (cond, while_loop, flex_attention): they reach a dispatch mode as such. Since 2.0.
    HigherOrderOperator = torch._ops.HigherOrderOperator

    # The mode that hears every op; its module never got a public name. Since 1.13.
    TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

    # Walks lists, tuples and dicts as torch does. Since 1.8.
    tree_map = torch.utils._pytree.tree_map

    # The names of all ops, with their overloads. Since 1.8.
    _op_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names

    # Whether an op, by name, has a kernel for a dispatch key.
    _has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key

    # A tensor that claims a device which its data is not on: how the simulated GPU's tensors are made. Since 1.10.
    make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

    # A storage by its C address, without keeping it alive: state that the step replaced. Since 2.0.
    storage_by_address: Callable[[Any], torch.UntypedStorage] = torch.UntypedStorage._new_with_weak_ptr

    # 1 where elements of a tensor share memory (`expand`): such a tensor cannot be poisoned in place. Since 1.6.
    overlaps: Callable[[torch.Tensor], int] = torch._debug_has_internal_overlap

    # Zeros without memory, which stand in for gradients and which no kernel but their own can read. Since 1.11.
    EFFICIENT_ZERO = torch.ops.aten._efficientzerotensor.default

    # The class behind `torch.Generator`, which the simulation stands in for.
    GeneratorBase: Any = torch._C.Generator
except (ImportError, AttributeError) as problem:
    raise CheckError(
        f"torch {torch.__version__} has not got what the checker needs of it ({problem}); allowed: {OLDEST} or newer, "
        f"tested with {', '.join(TESTED)}"
    ) from None

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

DEVICE_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""The C++ symbol in libc10 of its device guards by device type (c10/core/impl/DeviceGuardImplInterface.h)."""

RUN_BACKWARD = "_engine_run_backward"
"""The name of `run_backward` in torch.autograd and torch.autograd.graph: each holds its own, to be stood in for."""

LAZY_INIT = "_lazy_init"
"""What torch.cuda calls before it touches a GPU: nothing is started while a simulation runs."""

SLEEP = "_sleep"
"""What keeps a GPU busy for some cycles, in tests of whether something waits."""

NVTX = "_nvtx"
"""The C functions behind torch.cuda.nvtx, which a CPU build has not got."""


class PlainDispatchMode(TorchDispatchMode):
    """A mode of which the compiler is not kept out: torch imports all of dynamo to do that, longer than torch itself
    takes. For modes under which nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


ATTRIBUTES = {
    "_schema": "of an op: its name, and which arguments it writes",
    "_cdata": "of a storage: its C address, the identity that views share",
    "_base": "of a tensor: what it is a view of",
    "_is_view": "of a tensor: whether it is a view",
    "_version": "of a tensor: how often it was written in place",
    "_is_param": "of a tensor: makes a subclass count as torch.nn.Parameter",
    "_values": "of a sparse tensor: what it stores, coalesced or not",
    "_sequence_nr": "of an autograd node: when it was made",
    "_input_metadata": "of an autograd node: shapes and devices of what it takes",
    "_backend_fns": "of a custom op's definition: its Python bodies by device type",
    "_compiled_call_impl": "of a module: what `module.compile()` sets",
    "_call_impl": "of a module: its call with hooks",
    "_current_frames": "of Python's sys: where every thread is",
}
"""Private attributes of torch's objects and of Python's sys, and what of."""


def decomposition(func: Any) -> Callable[..., Any] | None:
    """How torch writes an op out in others (`torch._decomp`, since 1.12), None where it does not."""
    import torch._decomp

    return torch._decomp.decomposition_table.get(func)


def is_composed(name: str) -> bool:
    """Whether the op of this name is made of others. Raises RuntimeError where there is no such op."""
    return _has_kernel(name, "CompositeImplicitAutograd")


def capturing() -> bool:
    """Whether the current stream is captured, as C knows it: `torch.cuda.is_current_stream_capturing` is stood in for.

    Only a CUDA build has it.
    """
    return torch._C._cuda_isCurrentStreamCapturing()


def fake_mode(shapes: Any) -> FakeTensorMode:
    """A mode in which ops compute shapes alone (since 1.13); half a second to import. `shapes`: a ShapeEnv or None."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


def size_depends_on_values() -> type[Exception]:
    """What a fake raises where the size of its result depends on values."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    return DynamicOutputShapeException


@contextmanager
def no_mode_asked(kernel: Callable[..., Any]) -> Iterator[None]:
    """Some eager forms of ops that take functions refuse to run where a mode listens: here they find none."""
    name, known = "_get_current_dispatch_mode", kernel.__globals__
    if name not in known:
        yield
        return
    before, known[name] = known[name], lambda: None
    try:
        yield
    finally:
        known[name] = before


def register_fake_groups() -> None:
    """Make torch know the backend "fake", whose collectives do nothing (since 2.0)."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - to import it registers it


def ops() -> frozenset[str]:
    """ "namespace::name" of every op that torch knows, without overloads."""
    return frozenset(name.partition(".")[0] for name in _op_names())


@contextmanager
def compiled_calls(hear: Callable[[Any], None]) -> Iterator[None]:
    """Hears, while it lasts, of every call of a function that torch compiled: `hear(callback)`.

    Each of them asks this function of dynamo what the stance says, since 2.6.
    """
    from torch._dynamo import eval_frame

    real = eval_frame._callback_from_stance

    def asked(callback: Any) -> Any:
        hear(callback)
        return real(callback)

    eval_frame._callback_from_stance = asked
    try:
        yield
    finally:
        eval_frame._callback_from_stance = real
