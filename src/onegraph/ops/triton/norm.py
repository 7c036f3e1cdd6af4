"""RMSNorm: one program a row, the row in registers, float32 inside."""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.strides import row_stride
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def _scale_of(value, width, eps):
    return 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / width + eps)


@triton.jit
def _rms_norm(
    x, residual, weight, post, factor, total, out, width, stride, eps,
    ADD: tl.constexpr, POST: tl.constexpr, SCALED: tl.constexpr, NORMS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """NORMS results, one behind the other, of x or of the sum; POST: what x goes through before the sum."""
    let_next_start(PDL)
    column = tl.arange(0, WIDTH)
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    at = row * width + column
    plane = tl.num_programs(0).to(tl.int64) * width
    if POST:
        gain = tl.load(post + column, mask=inside, other=0.0).to(tl.float32)
    else:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        by = tl.load(factor).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        behind = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if POST:
            value = value * _scale_of(value, width, eps) * gain
            if NORMS > 0:
                gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        value = behind + value
        if SCALED:
            value = value * by
        # The sum is rounded before it is normalised: the fused op equals the composition of its parts.
        value = value.to(total.dtype.element_ty)
        tl.store(total + at, value, mask=inside)
        value = value.to(tl.float32)
    if NORMS > 0:
        value = value * _scale_of(value, width, eps)
        tl.store(out + at, (value * gain).to(out.dtype.element_ty), mask=inside)
    for n in tl.static_range(1, NORMS):
        gain = tl.load(weight + n * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + n * plane + at, (value * gain).to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, post: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(The sum, its norms); what is not asked for is the other one."""
    norms = 0 if weight is None else weight.shape[:-1].numel()
    out = x.new_empty(x.shape if weight is None else (*weight.shape[:-1], *x.shape))
    total = out if residual is None or weight is None else x.new_empty(x.shape)
    width = x.shape[-1]
    if x.numel():
        with on_device(x):
            _rms_norm[(x.numel() // width,)](
                x, x if residual is None else residual, x if weight is None else weight, x if post is None else post,
                x if scale is None else scale, total, out, width, row_stride(x), eps,
                ADD=residual is not None,
                POST=post is not None,
                SCALED=scale is not None,
                NORMS=norms,
                WIDTH=triton.next_power_of_2(width),
                num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
                **options(x),
            )  # fmt: skip
    return total, out


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """See `onegraph.ops.norm.rms_norm`."""
    if add is None:
        return _launch(x, None, weight, eps, None, None)[1]
    return _launch(x, add, None, eps, weight, scale)[0]


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, post: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.norm.add_rms_norm`."""
    return _launch(x, residual, weight, eps, post, scale)
