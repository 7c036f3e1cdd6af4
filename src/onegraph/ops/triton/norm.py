"""RMSNorm: one program a row, the row in registers, float32 inside."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.strides import row_stride
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def _rms_norm(
    x, residual, weight, total, out, width, stride, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    let_next_start(PDL)
    column = tl.arange(0, WIDTH)
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    at = row * width + column
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        # The sum is rounded before it is normalised: the fused op equals the composition of its parts.
        value = (tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + value).to(total.dtype.element_ty)
        tl.store(total + at, value, mask=inside)
        value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / width + eps)
    tl.store(out + at, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape)
    total = out if residual is None else torch.empty_like(out)
    width = x.shape[-1]
    if x.numel():
        with on_device(x):
            _rms_norm[(x.numel() // width,)](
                x, x if residual is None else residual, weight, total, out, width, row_stride(x), eps,
                ADD=residual is not None,
                WIDTH=triton.next_power_of_2(width),
                num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
                **options(x),
            )  # fmt: skip
    return total, out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `onegraph.ops.norm.rms_norm`."""
    return _launch(x, None, weight, eps)[1]


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.norm.add_rms_norm`."""
    return _launch(x, residual, weight, eps)
