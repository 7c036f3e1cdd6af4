"""RMSNorm: one program a row, the row in registers, float32 inside."""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.strides import row_stride
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def _unit(value, width, eps):
    return value * (1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / width + eps))


@triton.jit
def _row(at, column, inside):
    return tl.load(at + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm(
    x, residual, beside, weight, post, factor, total, out, width, stride, eps,
    ADD: tl.constexpr, POST: tl.constexpr, BESIDE: tl.constexpr, SCALED: tl.constexpr, NORMS: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NORMS results, one behind the other, of x or of the sum; POST: what x goes through before the sum."""
    let_next_start(PDL)
    column = tl.arange(0, WIDTH)
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    at = row * width
    if NORMS > 0:
        gain_0 = _row(weight, column, inside)
    if NORMS > 1:
        gain_1 = _row(weight + width, column, inside)
    if NORMS > 2:
        gain_2 = _row(weight + 2 * width, column, inside)
    if POST:
        of_x = _row(post, column, inside)
    if BESIDE:
        of_beside = _row(post + width, column, inside)
        of_both = _row(post + 2 * width, column, inside)
    if SCALED:
        by = tl.load(factor).to(tl.float32)
    wait_for_previous(PDL)
    value = _row(x + row * stride, column, inside)
    if ADD:
        stream = _row(residual + at, column, inside)
        if BESIDE:
            other = _row(beside + at, column, inside)
        if POST:
            value = _unit(value, width, eps) * of_x
        if BESIDE:
            value = _unit(value + _unit(other, width, eps) * of_beside, width, eps) * of_both
        value = stream + value
        if SCALED:
            value = value * by
        # The sum is rounded before it is normalised: the fused op equals the composition of its parts.
        value = value.to(total.dtype.element_ty)
        tl.store(total + at + column, value, mask=inside)
        value = value.to(tl.float32)
    if NORMS > 0:
        value = _unit(value, width, eps)
        tl.store(out + at + column, (value * gain_0).to(out.dtype.element_ty), mask=inside)
    rows = tl.num_programs(0).to(tl.int64)
    if NORMS > 1:
        tl.store(out + at + rows * width + column, (value * gain_1).to(out.dtype.element_ty), mask=inside)
    if NORMS > 2:
        tl.store(out + at + 2 * rows * width + column, (value * gain_2).to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor, eps: float, *, residual: Tensor | None = None, weight: Tensor | None = None, post: Tensor | None = None,
    scale: Tensor | None = None, beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(The sum, its norms); without a residual or a weight, there is one of them, and both are that."""
    norms = 0 if weight is None else weight.shape[:-1].numel()
    out = x.new_empty(x.shape if weight is None else (*weight.shape[:-1], *x.shape))
    total = out if residual is None or weight is None else x.new_empty(x.shape)
    width = x.shape[-1]
    if x.numel():
        given = (x if tensor is None else tensor for tensor in (residual, beside, weight, post, scale))
        with on_device(x):
            _rms_norm[(x.numel() // width,)](
                x, *given, total, out, width, row_stride(x), eps,
                ADD=residual is not None,
                POST=post is not None,
                BESIDE=beside is not None,
                SCALED=scale is not None,
                NORMS=norms,
                WIDTH=triton.next_power_of_2(width),
                num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
                **options(x),
            )  # fmt: skip
    return total, out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, scale: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `onegraph.ops.norm.rms_norm`."""
    if add is None:
        return _launch(x, eps, weight=weight)[1]
    return _launch(x, eps, residual=add, post=weight, scale=scale, beside=beside)[0]


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, post: Tensor | None = None, scale: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `onegraph.ops.norm.add_rms_norm`."""
    return _launch(x, eps, residual=residual, weight=weight, post=post, scale=scale, beside=beside)
