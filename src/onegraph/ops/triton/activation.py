"""The elementwise part of SwiGLU and GeGLU."""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.strides import row_stride
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def _swiglu(
    gate_up, out, width, limit, alpha, shift, LIMIT: tl.constexpr, GELU: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    wait_for_previous(PDL)
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    if LIMIT:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    # exp may overflow to infinity, for which the quotient is the right zero.
    if GELU:  # by tanh, as in _geglu
        exponent = -2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    else:
        exponent = -alpha * gate
    hidden = gate / (1.0 + tl.exp(exponent)) * (up + shift)
    tl.store(out + row * width + column, hidden.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0) -> Tensor:
    """See `onegraph.ops.activation.swiglu`."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel() == 0:
        return out
    tile = min(1024, triton.next_power_of_2(width))
    with on_device(gate_up):
        _swiglu[(out.numel() // width, triton.cdiv(width, tile))](
            gate_up, out, width, limit or 0.0, alpha, shift, LIMIT=limit is not None, GELU=alpha == 0,
            TILE=tile, num_warps=4, **options(gate_up),
        )  # fmt: skip
    return out


@triton.jit
def _geglu(gate_at, up_at, out, width, gate_stride, up_stride, TILE: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    wait_for_previous(PDL)
    gate = tl.load(gate_at + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_at + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    # gelu(x) = x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + exp(-2 u)); exp may
    # overflow to infinity, for which the quotient is the right zero.
    u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    hidden = gate / (1.0 + tl.exp(-2.0 * u)) * up
    tl.store(out + row * width + column, hidden.to(out.dtype.element_ty), mask=inside)


def geglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """See `onegraph.ops.activation.geglu`."""
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    width = gate.shape[-1]
    out = gate.new_empty(gate.shape)
    if out.numel() == 0:
        return out
    tile = min(1024, triton.next_power_of_2(width))
    with on_device(gate):
        _geglu[(out.numel() // width, triton.cdiv(width, tile))](
            gate, up, out, width, row_stride(gate), row_stride(up), TILE=tile, num_warps=4, **options(gate)
        )
    return out
