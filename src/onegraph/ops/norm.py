"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and fused with the residual addition before it."""

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.strides import row_stride


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def _add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return total, _rms_norm(total, weight, eps)


def check_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"rms_norm: x is {x.dtype}; allowed are float32, bfloat16 and float16")
    if weight.dtype not in FLOATS:
        raise ValueError(f"rms_norm: weight is {weight.dtype}; allowed are float32, bfloat16 and float16")
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {tuple(weight.shape)}, x has {tuple(x.shape)}; "
            "weight must have one entry per element of x's last dimension"
        )
    if row_stride(x) is None or not weight.is_contiguous():
        raise ValueError(
            f"rms_norm: x has strides {x.stride()}, weight {weight.stride()}; weight and x's rows must be contiguous "
            "and one stride lead from each row to the next: call .contiguous() on them first"
        )
    if x.device != weight.device:
        raise ValueError(f"rms_norm: x is on {x.device}, weight on {weight.device}; move them to one device")
    if not eps >= 0.0:
        raise ValueError(f"rms_norm: eps is {eps}; it must be 0 or more")


def _check_add_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    check_norm(x, weight, eps)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise ValueError(
            f"add_rms_norm: residual is {tuple(residual.shape)} {residual.dtype} on {residual.device}, x is "
            f"{tuple(x.shape)} {x.dtype} on {x.device}; they must agree in shape, dtype and device"
        )
    if not residual.is_contiguous():
        raise ValueError(
            f"add_rms_norm: residual has strides {residual.stride()}; it must be contiguous: call .contiguous() on it"
        )


def _norm_case(shape: tuple[int, ...], *, fused: bool, gap: int = 0) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        x = torch.randn(shape, generator=generator)
        weight = 1 + 0.2 * torch.randn(shape[-1], generator=generator)
        inputs = [torch.randn(shape, generator=generator), x] if fused else [x]
        *inputs, x, weight = (t.to(device, dtype) for t in (*inputs, weight))
        return *inputs, torch.nn.functional.pad(x, (0, gap))[..., : shape[-1]], weight, 1e-5

    return Case(name="x".join(map(str, shape)) + (f" in {shape[-1] + gap}" if gap else ""), make=make)


# 576 is SmolLM2's hidden size; 80 and 1000 are no powers of two; 4096 and 8192 are those of large models.
_SHAPES = ((1, 1, 576), (3, 5, 80), (7, 1000), (2, 1, 4096), (1, 8192))
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}

rms_norm = register(
    Op(
        name="rms_norm",
        schema="(Tensor x, Tensor weight, float eps) -> Tensor",
        reference=_rms_norm,
        fake=lambda x, weight, eps: x.new_empty(x.shape),
        kernel="onegraph.ops.triton.norm:rms_norm",
        cpu="onegraph.ops.cpu.norm:rms_norm",
        check=check_norm,
        cases=(*(_norm_case(shape, fused=False) for shape in _SHAPES), _norm_case((3, 5, 80), fused=False, gap=24)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda x, weight, eps: 2 * nbytes(x) + nbytes(weight),
        flops=lambda x, weight, eps: 4 * x.numel(),
    )
)
"""x [..., D], weight [D] -> weight * x / sqrt(mean(x²) + eps), float32 inside, rounded once to x's dtype."""

add_rms_norm = register(
    Op(
        name="add_rms_norm",
        schema="(Tensor residual, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
        reference=_add_rms_norm,
        fake=lambda residual, x, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
        kernel="onegraph.ops.triton.norm:add_rms_norm",
        cpu="onegraph.ops.cpu.norm:add_rms_norm",
        check=_check_add_norm,
        cases=tuple(_norm_case(shape, fused=True) for shape in _SHAPES),
        tolerance=_TOLERANCE,
        bytes_moved=lambda residual, x, weight, eps: 4 * nbytes(x) + nbytes(weight),
        flops=lambda residual, x, weight, eps: 5 * x.numel(),
    )
)
"""residual, x [..., D] -> (residual + x, rounded to their dtype; rms_norm of that rounded sum): the fused op equals the
composition of its parts."""
