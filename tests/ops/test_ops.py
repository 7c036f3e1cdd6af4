"""Every registered op, from its own record: what it claims in the schema, its reference, and on a GPU its kernel."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import onegraph.ops
from guarded import guarded
from onegraph.formats.turboquant_layout import unpack_pages
from onegraph.ops.registry import OPS, Case, Op, reference_ops
from variants import with_sources

for _module in pkgutil.iter_modules(onegraph.ops.__path__):
    if not _module.ispkg:
        importlib.import_module(f"onegraph.ops.{_module.name}")

CASES = [pytest.param(op, case, id=f"{name}-{case.name}") for name, op in sorted(OPS.items()) for case in op.cases]
SOURCES = with_sources()
# Of an op that no CUDA source runs both families have the same kernels. With `--dist loadgroup` one worker has all
# cases of an op in a family, and loads each kernel once.
GPU_CASES = [
    pytest.param(
        family, op, case, dtype, id=f"{family}-{name}-{case.name}-{str(dtype).removeprefix('torch.')}",
        marks=pytest.mark.xdist_group(f"{name}-{family}"),
    )
    for family in ("own", "portable")
    for name, op in sorted(OPS.items())
    if family == "own" or name in SOURCES
    for case in op.cases
    for dtype in op.tolerance
]  # fmt: skip


def make(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, ...]:
    return case.make(torch.device(device), dtype, torch.Generator().manual_seed(0))


def clone(args: Any, change: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    return tree_map(lambda a: change(a) if isinstance(a, Tensor) else a, args)


def mutated(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that the schema says are written; of a list each."""
    return [
        tensor
        for a, s in zip(args, op.overload._schema.arguments, strict=True)
        if a is not None and s.alias_info and s.alias_info.is_write
        for tensor in _tensors(a)
    ]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if leaf is not None]


def results(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """Everything the op produces, returned or written, without what its record calls unspecified."""
    out = _tensors(op(*args)) + mutated(op, args)
    if op.name == "rope_cache_write" and args[7] is not None:  # padding's q and the sentinel page are anyone's
        counts = args[7]
        real = torch.arange(args[0].shape[1], device=counts.device) < counts.unsqueeze(1)
        out = [out[0][real], out[1][1:], out[2][1:]]
    if op.name == "paged_decode":
        length = args[0].shape[1]
        real = torch.arange(length, device=args[7].device) < args[7].unsqueeze(1)
        out = [out[0] if length == 1 else out[0][real], out[1][1:], out[2][1:], out[3]]
    if op.name == "strided_decode":
        out = [out[0][1:], out[1][1:], out[2]]
    if op.name == "turboquant_write":
        out = _written(op, args, out)
    if op.name == "turboquant_decode":
        out = _written(op, args, [out[0], out[0][:0], *out[1:]])
    if op.name == "latent_write" and out[1].dtype == torch.uint8:
        latent: Any = importlib.import_module("onegraph.ops.latent_attention")
        assert op.call is not None
        call: Any = op.call(*args)
        out[1] = latent.held(out[1], call.norm.shape[0], 2 * call.cos.shape[1], call.bits, call.curve)
    if op.name.endswith(("all_reduce", "all_gather")):  # rounds count chunks of words: of float32 there are more
        out = out[: 4 if op.name == "hyper_all_reduce" else 1]
    if op.name == "turboquant_attention":  # the log-sum-exp of no keys
        out[1] = out[1].masked_fill(out[1] == float("-inf"), 0.0)
    return out


def _written(op: Op, args: tuple[Any, ...], out: list[Tensor]) -> list[Tensor]:
    """What a TurboQuant cache holds, as vectors: at a near-tie two codes are equally right."""
    turboquant = importlib.import_module("onegraph.ops.turboquant")
    assert op.call is not None
    call: Any = op.call(*args)
    coded = unpack_pages(turboquant.layout_in(op.name, call, call.turn.shape[0]), out[2][1:])
    books = call.k_codebook, call.v_codebook
    vectors = [turboquant.dequantize(part, table) for part, table in zip(coded, books, strict=True)]
    counts = call.counts
    real = torch.arange(args[0].shape[1], device=counts.device) < counts.unsqueeze(1)
    return [out[0][real], *(kept[real] for kept in out[1:2] if len(kept)), *vectors, *(ring[1:] for ring in out[3:])]


class Launches(TorchDispatchMode):
    """Collects the names of what would be a launch on a GPU."""

    FREE = "as_strided|view|slice|select|transpose|permute|expand|unsqueeze|squeeze|t|detach|new_empty|split"

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in self.FREE.split("|"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("op", "case"), [case for case in CASES if case.values[0].check])
def test_a_check_launches_nothing(op: Op, case: Case) -> None:
    """Checks run inside steps that are captured: what one computes is replayed with every step."""
    args = make(case, torch.float32)
    assert op.check is not None
    with Launches() as launches:
        op.check(*args)
    assert not launches.found


def error(got: Tensor, truth: Tensor) -> float:
    """‖got − truth‖ / ‖truth‖ in float64; NaN in `got` gives NaN, which passes no comparison; ±inf is a number."""
    got, truth = (t.double().nan_to_num(nan=torch.nan, posinf=1e30, neginf=-1e30) for t in (got, truth))
    return float((got - truth).norm() / truth.norm().clamp_min(1e-30))


def test_every_op_has_a_record_that_can_be_tested() -> None:
    assert {"rms_norm", "add_rms_norm", "swiglu", "rope_cache_write", "paged_attention"} <= set(OPS)
    for name, op in OPS.items():
        assert op.cases, name
        assert op.tolerance, name
        assert op.bytes_moved is not None, name
        assert op.flops is not None, name
        assert len({case.name for case in op.cases}) == len(op.cases), name


@pytest.mark.parametrize(("op", "case"), CASES)
def test_opcheck(op: Op, case: Case) -> None:
    """Schema, fake and aliasing of each case; of an op's last, which has the fewest arguments that are None, tracing
    under dynamic shapes, where most of the time goes, and of its first, which has the most, the fake under them."""
    args, checks = (
        make(case, next(iter(op.tolerance))),
        ["test_schema", "test_autograd_registration", "test_faketensor"],
    )
    if case == op.cases[-1]:
        checks.append("test_aot_dispatch_dynamic")
    elif case == op.cases[0]:
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            found = _tensors(op.overload(*clone(args, mode.from_tensor)))
        for got, want in zip(found, _tensors(op.fake(*args)), strict=True):
            assert (got.dtype, tuple(map(int, got.shape))) == (want.dtype, want.shape)
    torch.library.opcheck(op.overload, args, test_utils=checks)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_bytes_moved_covers_the_results(op: Op, case: Case) -> None:
    """A roofline that forgets the result would flatter every kernel."""
    args = make(case, next(iter(op.tolerance)))
    assert op.bytes_moved is not None
    assert op.flops is not None
    returned = _tensors(op(*clone(args)))
    assert op.bytes_moved(*args) >= sum(t.numel() * t.element_size() for t in returned)
    assert op.flops(*args) >= 0


@pytest.mark.parametrize(("op", "case"), CASES)
def test_deterministic_and_leaves_other_inputs_alone(op: Op, case: Case) -> None:
    args = make(case, next(iter(op.tolerance)))
    first, second = clone(args), clone(args)
    for a, b in zip(results(op, first), results(op, second), strict=True):
        assert torch.equal(a, b)
    written = {id(t) for t in mutated(op, first)}
    for before, after in zip(args, first, strict=True):
        if isinstance(before, Tensor) and id(after) not in written:
            assert torch.equal(before, after)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_reference_in_low_precision_meets_its_own_tolerance(op: Op, case: Case) -> None:
    """The yardstick is honest: the same-dtype reference itself stays within what kernels are held to; and so does what
    runs on a CPU in its place."""
    for dtype, tolerance in op.tolerance.items():
        args = make(case, dtype)
        with reference_ops():
            truth, found = (results(op, clone(args, change)) for change in (widen(dtype), torch.clone))
        for ran in (found, results(op, args)) if op.cpu else (found,):
            for got, want in zip(ran, truth, strict=True):
                assert error(got, want) <= tolerance, dtype


def widen(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(torch.float32 if t.dtype == dtype else t.dtype, copy=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel_family", "op", "case", "dtype"), GPU_CASES, indirect=["kernel_family"], scope="module"
)
def test_on_a_gpu_against_float32_truth(kernel_family: str, op: Op, case: Case, dtype: torch.dtype) -> None:
    args = make(case, dtype, "cuda")
    with reference_ops():
        truth = results(op, clone(args, widen(dtype)))
    got = results(op, clone(args))
    for a, b in zip(got, truth, strict=True):
        if b.is_floating_point():
            assert error(a, b) <= op.tolerance[dtype]
        else:
            assert torch.equal(a, b)
    with guarded() as guard:  # where a read past an argument is an error
        for a, b in zip(got, results(op, clone(args, guard.copy)), strict=True):
            assert torch.equal(a, b), "two runs of the kernel differ"
