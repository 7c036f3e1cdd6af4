"""A dense linear that is quick for the few tokens of a decode step, its result float32 where asked: logits rounded to
bfloat16 tie, and greedy then breaks ties."""

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS, check_tensors
from onegraph.ops.norm import check_norm, rms_norm
from onegraph.ops.registry import Case, Op, nbytes, register


def _linear(x: Tensor, weight: Tensor, wide: bool, bias: Tensor | None = None) -> Tensor:
    x = x.to(weight.dtype)
    if wide and x.is_cuda and x.dtype != torch.float32:
        out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)  # torch has this on CUDA only
        out = out.view(*x.shape[:-1], -1)
        return out if bias is None else out.add_(bias)
    y = torch.nn.functional.linear(x, weight, bias)
    return y.float() if wide else y


def _on_gpu(x: Tensor, weight: Tensor, wide: bool, bias: Tensor | None = None) -> Tensor:
    """The kernel for what it takes, whose weight is on its way before the step gets there; cuBLAS for the rest."""
    from onegraph.ops.triton import linear as kernel

    return (kernel.linear if kernel.takes(x, weight) else _linear)(x, weight, wide, bias)


def _check(x: Tensor, weight: Tensor, wide: bool, bias: Tensor | None = None) -> None:
    if x.dtype not in FLOATS or (weight.dtype != x.dtype and not (wide and weight.dtype == torch.float32)):
        raise ValueError(
            f"linear: x is {x.dtype}, weight {weight.dtype}; allowed is one of float32, bfloat16, float16, and a "
            "weight of float32 where the result is"
        )
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x is {tuple(x.shape)}, weight {tuple(weight.shape)}; they must be [..., k] and [n, k]"
        )
    if x.device != weight.device:
        raise ValueError(f"linear: x is on {x.device}, weight on {weight.device}; move them to one device")
    check_tensors("linear", x.device, bias=(bias, weight.dtype, (weight.shape[0],)))


def _case(shape: tuple[int, ...], n: int, wide: bool = False, *, exact: bool = False, biased: bool = False) -> Case:
    """exact: the weight is float32 whatever x is."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        weight = torch.randn(n, shape[-1], generator=generator) * shape[-1] ** -0.5
        weight = weight.to(device, torch.float32 if exact else dtype)
        bias = torch.randn(n, generator=generator).to(weight) if biased else None
        return torch.randn(shape, generator=generator).to(device, dtype), weight, wide, bias

    name = f"{'x'.join(map(str, shape))}->{n}{' wide' if wide else ''}"
    return Case(name=name + " of float32" * exact + " biased" * biased, make=make)


linear = register(
    Op(
        name="linear",
        schema="(Tensor x, Tensor weight, bool wide, Tensor? bias=None) -> Tensor",
        reference=_linear,
        fake=lambda x, weight, wide, bias=None: x.new_empty(
            (*x.shape[:-1], weight.shape[0]), dtype=torch.float32 if wide else x.dtype
        ),
        kernel="onegraph.ops.linear:_on_gpu",
        check=_check,
        cases=(
            _case((1, 1, 4096), 256, True), _case((1, 72), 131), _case((2, 2, 576), 75), _case((17, 96), 49, True),
            _case((96,), 49, True), _case((1, 40), 17000, True), _case((2, 136), 33, True, exact=True),
            _case((9, 72), 20, True, exact=True), _case((1, 1, 2880), 5120, biased=True),
            _case((3, 72), 131, True, biased=True), _case((6, 72), 131, biased=True),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda x, weight, wide, bias=None: (
            nbytes(x, weight, bias) + (4 if wide else x.element_size()) * x.numel() // x.shape[-1] * weight.shape[0]
        ),
        flops=lambda x, weight, wide, bias=None: 2 * x.numel() * weight.shape[0],
    )
)  # fmt: skip
"""x [..., k], weight [n, k] and bias [n] of one dtype -> [..., n] summed in float32, in x's dtype or (`wide`) in
float32, for which weight and bias may be float32 beside any x. On a CPU the result passes through the weight's dtype:
torch has no mixed product there, and widening a vocabulary's weight in every step would cost more."""


def _beside_norm(x: Tensor, weight: Tensor, low: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _linear(x, weight, False), rms_norm.reference(low, norm, eps)


def _beside_norm_on_gpu(x: Tensor, weight: Tensor, low: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from onegraph.ops.triton import linear as kernel
    from onegraph.ops.triton import norm as norms

    if kernel.takes(x, weight):
        return kernel.linear_beside_norm(x, weight, low, norm, eps)
    return _linear(x, weight, False), norms.rms_norm(low, norm, eps)


def _check_beside_norm(x: Tensor, weight: Tensor, low: Tensor, norm: Tensor, eps: float) -> None:
    _check(x, weight, False)
    check_norm(low, norm, eps)
    if low.dtype != x.dtype or low.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"linear_beside_norm: low is {low.dtype} {tuple(low.shape)}, x {x.dtype} {tuple(x.shape)}; they must be of "
            "one dtype and as many rows"
        )


def _beside_norm_case(shape: tuple[int, ...], n: int, low: int, gap: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        x, weight, *_ = _case(shape, n).make(device, dtype, generator)
        side = torch.randn(*shape[:-1], low + gap, generator=generator).to(device, dtype)[..., :low]
        return x, weight, side, (1 + 0.2 * torch.randn(low, generator=generator)).to(device), 1e-6

    return Case(name=f"{'x'.join(map(str, shape))}->{n} beside {low}", make=make)


linear_beside_norm = register(
    Op(
        name="linear_beside_norm",
        schema="(Tensor x, Tensor weight, Tensor low, Tensor norm, float eps) -> (Tensor, Tensor)",
        reference=_beside_norm,
        fake=lambda x, weight, low, *rest: (x.new_empty(*x.shape[:-1], weight.shape[0]), low.new_empty(low.shape)),
        kernel="onegraph.ops.linear:_beside_norm_on_gpu",
        check=_check_beside_norm,
        cases=(
            _beside_norm_case((1, 1, 4096), 1090, 1024, 512),
            _beside_norm_case((3, 72), 131, 40, 0),
            _beside_norm_case((2, 7, 96), 49, 80, 16),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda x, weight, low, norm, eps: (
            nbytes(x, weight, norm) + 2 * nbytes(low) + x.numel() // x.shape[-1] * weight.shape[0] * x.element_size()
        ),
        flops=lambda x, weight, low, *rest: 2 * x.numel() * weight.shape[0] + 4 * low.numel(),
    )
)
"""(`linear(x, weight, False)`, `rms_norm(low, norm, eps)`) of as many rows, neither of which needs the other: of few
tokens one launch."""


def _normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    return _linear(rms_norm.reference(x, norm, eps), weight, False)


def _normed_on_gpu(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    from onegraph.ops.triton import linear as kernel
    from onegraph.ops.triton import norm as norms

    if kernel.takes(x, weight):
        return kernel.normed_linear(x, norm, eps, weight)
    return _linear(norms.rms_norm(x, norm, eps), weight, False)


def _check_normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> None:
    check_norm(x, norm, eps)
    _check(x, weight, False)


def _normed_case(shape: tuple[int, ...], n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        x, weight, *_ = _case(shape, n).make(device, dtype, generator)
        return 3 * x, (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(device), 1e-6, weight

    return Case(name=f"{'x'.join(map(str, shape))}->{n} normed", make=make)


normed_linear = register(
    Op(
        name="normed_linear",
        schema="(Tensor x, Tensor norm, float eps, Tensor weight) -> Tensor",
        reference=_normed,
        fake=lambda x, norm, eps, weight: x.new_empty((*x.shape[:-1], weight.shape[0])),
        kernel="onegraph.ops.linear:_normed_on_gpu",
        check=_check_normed,
        cases=(_normed_case((1, 1, 5120), 96), _normed_case((4, 1, 72), 13), _normed_case((2, 7, 96), 49)),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4},
        bytes_moved=lambda x, norm, eps, weight: (
            nbytes(x, norm, weight) + x.numel() // x.shape[-1] * weight.shape[0] * x.element_size()
        ),
        flops=lambda x, norm, eps, weight: 2 * x.numel() * weight.shape[0] + 4 * x.numel(),
    )
)
"""`linear(rms_norm(x, norm, eps), weight, False)`: of few tokens one launch."""
