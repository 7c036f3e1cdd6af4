"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and fused with the residual addition before it or behind it."""

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.strides import row_stride

MOST_NORMS = 3  # of one x


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32; weight [D] or [N, D]."""
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], None, eps)
    return normed * weight.float().view(*weight.shape[:-1], *[1] * (x.dim() - 1), -1)


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, scale: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype = x.dtype
    if beside is not None:
        first, second, weight = weight
        x = _normed(x, first, eps) + _normed(beside, second, eps)
    normed = _normed(x, weight, eps)
    if add is not None:
        normed = add.float() + normed
    return (normed if scale is None else normed * scale.float()).to(dtype)


def _add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, post: Tensor | None = None, scale: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = residual + x if post is None else _rms_norm(x, post, eps, residual, scale, beside)
    return total, _rms_norm(total, weight, eps)


def check_norm(x: Tensor, weight: Tensor, eps: float, *, op: str = "rms_norm", most: int = 1) -> None:
    """Raises ValueError for what is no RMSNorm; weight [D], or with `most` above 1 up to so many rows of it."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: x is {x.dtype}; allowed are float32, bfloat16 and float16")
    if weight.dtype not in FLOATS:
        raise ValueError(f"{op}: weight is {weight.dtype}; allowed are float32, bfloat16 and float16")
    rows = weight.shape[:-1]
    if x.dim() == 0 or weight.shape[-1:] != x.shape[-1:] or len(rows) > (most > 1) or not 1 <= rows.numel() <= most:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, x has {tuple(x.shape)}; weight must have one entry per "
            f"element of x's last dimension{f', or up to {most} rows of so many' if most > 1 else ''}"
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


def _check_rms_norm(
    x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, scale: Tensor | None = None,
    beside: Tensor | None = None, *, op: str = "rms_norm",
) -> None:  # fmt: skip
    check_norm(x, weight, eps, op=op, most=MOST_NORMS)
    for name, other in (("add", add), ("beside", beside)):
        if other is not None:
            _check_alike(op, name, other, x)
    if add is None:
        if scale is not None or beside is not None:
            raise ValueError(f"{op}: scale or beside is given without add; they go with a sum: give add too")
        return
    if weight.shape[:-1] != (() if beside is None else (3,)):
        raise ValueError(
            f"{op}: add is given and weight has shape {tuple(weight.shape)}; it must be [D], or [3, D] with beside"
        )
    if scale is not None and (scale.numel() != 1 or scale.dtype not in FLOATS or scale.device != x.device):
        raise ValueError(
            f"{op}: scale is {tuple(scale.shape)} {scale.dtype} on {scale.device}; it must be one float on {x.device}"
        )


def _check_alike(op: str, name: str, other: Tensor, x: Tensor) -> None:
    if other.shape != x.shape or other.dtype != x.dtype or other.device != x.device:
        raise ValueError(
            f"{op}: {name} is {tuple(other.shape)} {other.dtype} on {other.device}, x is "
            f"{tuple(x.shape)} {x.dtype} on {x.device}; they must agree in shape, dtype and device"
        )
    if not other.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {other.stride()}; it must be contiguous: call .contiguous() on it")


def _check_add_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, post: Tensor | None = None, scale: Tensor | None = None,
    beside: Tensor | None = None,
) -> None:  # fmt: skip
    op = "add_rms_norm"
    check_norm(x, weight, eps, op=op, most=MOST_NORMS)
    _check_alike(op, "residual", residual, x)
    if post is not None:
        _check_rms_norm(x, post, eps, residual, scale, beside, op=op)
    elif scale is not None or beside is not None:
        raise ValueError(f"{op}: scale or beside is given without post; they go with a norm before the sum")


def _norm_case(
    shape: tuple[int, ...], *, fused: bool, gap: int = 0, weights: int = 0, behind: bool = False, scaled: bool = False,
    two: bool = False,
) -> Case:  # fmt: skip
    """fused: of `add_rms_norm`. weights: rows of weight, 0 for one of [D]. behind: with `add` or `post`. two: with
    `beside`."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).to(device, dtype)

        def gain(rows: int) -> Tensor:
            return 1 + 0.2 * draw(*((rows,) if rows else ()), shape[-1])

        x = torch.nn.functional.pad(draw(*shape), (0, gap))[..., : shape[-1]]
        factor = torch.tensor([0.7], dtype=dtype, device=device) if scaled else None
        more = factor, draw(*shape) if two else None
        inner = 3 if two else 0
        if fused:
            return draw(*shape), x, gain(weights), 1e-5, gain(inner) if behind else None, *more
        return x, gain(inner or weights), 1e-5, draw(*shape) if behind else None, *more

    told = {f"in {shape[-1] + gap}": gap, f"{weights} norms": weights, "behind": behind, "scaled": scaled, "two": two}
    return Case(name=", ".join(["x".join(map(str, shape)), *(key for key, given in told.items() if given)]), make=make)


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
        _norm_case((2, 1, 2816), fused=fused, weights=3 if fused else 0, behind=True, scaled=True, two=True),
        _norm_case((3, 5, 80), fused=fused, gap=24, behind=True, two=True),
    )


rms_norm = register(
    Op(
        name="rms_norm",
        schema=(
            "(Tensor x, Tensor weight, float eps, Tensor? add=None, Tensor? scale=None, Tensor? beside=None) -> Tensor"
        ),
        reference=_rms_norm,
        fake=lambda x, weight, eps, add=None, *rest: x.new_empty(
            x.shape if add is not None else (*weight.shape[:-1], *x.shape)
        ),
        kernel="onegraph.ops.triton.norm:rms_norm",
        cpu="onegraph.ops.cpu.norm:rms_norm",
        check=_check_rms_norm,
        cases=(*(_norm_case(shape, fused=False) for shape in _SHAPES), *_more(fused=False)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda x, weight, eps, add=None, scale=None, beside=None: (
            nbytes(x, weight, add, scale, beside) + nbytes(x) * (1 if add is not None else weight.shape[:-1].numel())
        ),
        flops=lambda x, weight, eps, add=None, scale=None, beside=None: (4 if beside is None else 12) * x.numel(),
    )
)
"""x [..., D], weight [D] -> weight * x / sqrt(mean(x²) + eps), float32 inside, rounded once to x's dtype. Weights
[N, D] -> [N, ..., D], the same x under each of them. With `add` [..., D], of x's dtype: (add + that) * scale, rounded
once; scale [1] or None for 1. With `beside` [..., D] too, weight [3, D] is of x, of `beside`, and of the sum of those
two norms, which is what `add` is added to."""

add_rms_norm = register(
    Op(
        name="add_rms_norm",
        schema=(
            "(Tensor residual, Tensor x, Tensor weight, float eps, Tensor? post=None, Tensor? scale=None, "
            "Tensor? beside=None) -> (Tensor, Tensor)"
        ),
        reference=_add_rms_norm,
        fake=lambda residual, x, weight, *rest: (x.new_empty(x.shape), x.new_empty((*weight.shape[:-1], *x.shape))),
        kernel="onegraph.ops.triton.norm:add_rms_norm",
        cpu="onegraph.ops.cpu.norm:add_rms_norm",
        check=_check_add_norm,
        cases=(*(_norm_case(shape, fused=True) for shape in _SHAPES), *_more(fused=True)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda residual, x, weight, eps, post=None, scale=None, beside=None: (
            3 * nbytes(x) + nbytes(weight, post, scale, beside) + nbytes(x) * weight.shape[:-1].numel()
        ),
        flops=lambda residual, x, weight, eps, post=None, scale=None, beside=None: (
            (5 if post is None else 9 if beside is None else 17) * x.numel()
        ),
    )
)
"""residual, x [..., D] -> (residual + x, rounded to their dtype; rms_norm of that rounded sum): the fused op equals the
composition of its parts. With `post`, the weight of a norm behind a sublayer, the sum is `rms_norm(x, post, eps,
residual, scale, beside)`. weight [D], or [N, D] of norms that read the same sum."""
