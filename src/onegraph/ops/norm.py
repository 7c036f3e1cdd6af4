"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and fused with the residual addition before it or behind it."""

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.strides import row_stride


def _rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], None, eps)
    normed = normed * weight.float().view(*weight.shape[:-1], *[1] * (x.dim() - 1), -1)
    if add is not None:
        normed = add.float() + normed
    return (normed if scale is None else normed * scale.float()).to(x.dtype)


def _add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, post: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = residual + x if post is None else _rms_norm(x, post, eps, residual, scale)
    return total, _rms_norm(total, weight, eps)


def check_norm(
    x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, scale: Tensor | None = None, op: str = "rms_norm"
) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: x is {x.dtype}; allowed are float32, bfloat16 and float16")
    if weight.dtype not in FLOATS:
        raise ValueError(f"{op}: weight is {weight.dtype}; allowed are float32, bfloat16 and float16")
    if x.dim() == 0 or weight.dim() not in (1, 2) or weight.shape[-1:] != x.shape[-1:] or weight.numel() == 0:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, x has {tuple(x.shape)}; "
            "weight must have one entry per element of x's last dimension, or rows of so many"
        )
    if row_stride(x) is None or not weight.is_contiguous():
        raise ValueError(
            f"{op}: x has strides {x.stride()}, weight {weight.stride()}; weight and x's rows must be contiguous "
            "and one stride lead from each row to the next: call .contiguous() on them first"
        )
    if x.device != weight.device:
        raise ValueError(f"{op}: x is on {x.device}, weight on {weight.device}; move them to one device")
    if not eps >= 0.0:
        raise ValueError(f"{op}: eps is {eps}; it must be 0 or more")
    if add is not None:
        _check_sum(op, "add", add, x)
        if weight.dim() != 1:
            raise ValueError(f"{op}: add is given and weight has shape {tuple(weight.shape)}; give one weight [D]")
    if scale is not None and (scale.numel() != 1 or scale.dtype not in FLOATS or scale.device != x.device):
        raise ValueError(
            f"{op}: scale is {tuple(scale.shape)} {scale.dtype} on {scale.device}; it must be one float on {x.device}"
        )
    if scale is not None and add is None:
        raise ValueError(f"{op}: scale is given without a sum that it scales; multiply the weight by it")


def _check_sum(op: str, name: str, other: Tensor, x: Tensor) -> None:
    if other.shape != x.shape or other.dtype != x.dtype or other.device != x.device:
        raise ValueError(
            f"{op}: {name} is {tuple(other.shape)} {other.dtype} on {other.device}, x is "
            f"{tuple(x.shape)} {x.dtype} on {x.device}; they must agree in shape, dtype and device"
        )
    if not other.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {other.stride()}; it must be contiguous: call .contiguous() on it")


def _check_add_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, post: Tensor | None = None, scale: Tensor | None = None
) -> None:
    op = "add_rms_norm"
    check_norm(x, weight, eps, op=op)
    _check_sum(op, "residual", residual, x)
    if post is not None:
        check_norm(x, post, eps, residual, scale, op)
    elif scale is not None:
        raise ValueError(f"{op}: scale is given without post; the sum is scaled behind a norm alone")


def _norm_case(
    shape: tuple[int, ...], *, fused: bool, gap: int = 0, weights: int = 0, behind: bool = False, scaled: bool = False
) -> Case:
    """fused: of `add_rms_norm`. weights: rows of weight, 0 for one of [D]. behind: with `add` or `post`."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def gain(*sizes: int) -> torch.Tensor:
            return (1 + 0.2 * torch.randn(*sizes, shape[-1], generator=generator)).to(device, dtype)

        x = torch.randn(shape, generator=generator).to(device, dtype)
        other = torch.randn(shape, generator=generator).to(device, dtype) if fused or behind else None
        weight = gain(weights) if weights else gain()
        last = (gain() if fused else other) if behind else None
        factor = torch.tensor([0.7], dtype=dtype, device=device) if scaled else None
        x = torch.nn.functional.pad(x, (0, gap))[..., : shape[-1]]
        return *((other,) if fused else ()), x, weight, 1e-5, last, factor

    name = "x".join(map(str, shape)) + (f" in {shape[-1] + gap}" if gap else "") + (f", {weights}" if weights else "")
    return Case(name=name + (", behind" if behind else "") + (", scaled" if scaled else ""), make=make)


# 576 is SmolLM2's hidden size; 80 and 1000 are no powers of two; 4096 and 8192 are those of large models.
_SHAPES = ((1, 1, 576), (3, 5, 80), (7, 1000), (2, 1, 4096), (1, 8192))
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def _more(fused: bool) -> tuple[Case, ...]:
    """Of what Gemma does: 2816 and 5376 are hidden sizes of Gemma 4."""
    return (
        _norm_case((3, 5, 80), fused=fused, gap=24),
        _norm_case((3, 5, 80), fused=fused, weights=3),
        _norm_case((3, 5, 80), fused=fused, gap=24, behind=True),
        _norm_case((2, 1, 2816), fused=fused, behind=True),
        _norm_case((1, 1, 5376), fused=fused, behind=True, scaled=True),
    )


rms_norm = register(
    Op(
        name="rms_norm",
        schema="(Tensor x, Tensor weight, float eps, Tensor? add=None, Tensor? scale=None) -> Tensor",
        reference=_rms_norm,
        fake=lambda x, weight, *rest: x.new_empty((*weight.shape[:-1], *x.shape)),
        kernel="onegraph.ops.triton.norm:rms_norm",
        cpu="onegraph.ops.cpu.norm:rms_norm",
        check=check_norm,
        cases=(*(_norm_case(shape, fused=False) for shape in _SHAPES), *_more(fused=False)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda x, weight, eps, add=None, scale=None: (
            nbytes(x, weight, add, scale) + nbytes(x) * weight.shape[:-1].numel()
        ),
        flops=lambda x, *rest: 4 * x.numel(),
    )
)
"""x [..., D], weight [D] -> weight * x / sqrt(mean(x²) + eps), float32 inside, rounded once to x's dtype. Weights
[N, D] -> [N, ..., D], the same x under each of them. With `add` [..., D], of x's dtype: (add + that) * scale, rounded
once; scale [1] or None for 1."""

add_rms_norm = register(
    Op(
        name="add_rms_norm",
        schema=(
            "(Tensor residual, Tensor x, Tensor weight, float eps, Tensor? post=None, Tensor? scale=None)"
            " -> (Tensor, Tensor)"
        ),
        reference=_add_rms_norm,
        fake=lambda residual, x, weight, *rest: (x.new_empty(x.shape), x.new_empty((*weight.shape[:-1], *x.shape))),
        kernel="onegraph.ops.triton.norm:add_rms_norm",
        cpu="onegraph.ops.cpu.norm:add_rms_norm",
        check=_check_add_norm,
        cases=(*(_norm_case(shape, fused=True) for shape in _SHAPES), *_more(fused=True)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda residual, x, weight, eps, post=None, scale=None: (
            3 * nbytes(x) + nbytes(weight, post, scale) + nbytes(x) * weight.shape[:-1].numel()
        ),
        flops=lambda residual, x, weight, eps, post=None, scale=None: (5 if post is None else 9) * x.numel(),
    )
)
"""residual, x [..., D] -> (residual + x, rounded to their dtype; rms_norm of that rounded sum): the fused op equals the
composition of its parts. With `post` [D], the weight of a norm behind a sublayer, the sum is `rms_norm(x, post, eps,
residual, scale)`. weight [D], or [N, D] of norms that read the same sum."""
