"""Output gates of attention: taken from between the queries, and multiplied by."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def _split(qkv, plain, gates, HEADS: tl.constexpr, VECTORS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    """One program a token and vector, of queries and gates in turn, then of keys and values."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    vector = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    wait_for_previous(PDL)
    x = tl.load(qkv + (token * VECTORS + vector) * DIM + column, mask=inside, other=0.0)
    if (vector < 2 * HEADS) & (vector % 2 == 1):
        tl.store(gates + (token * HEADS + vector // 2) * DIM + column, x, mask=inside)
    else:
        to = tl.where(vector < 2 * HEADS, vector // 2, vector - HEADS)
        tl.store(plain + (token * (VECTORS - HEADS) + to) * DIM + column, x, mask=inside)


def split_gates(qkv: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.gate.split_gates`."""
    batch, tokens, width = qkv.shape
    plain, gates = qkv.new_empty((batch, tokens, width - heads * dim)), qkv.new_empty((batch, tokens, heads * dim))
    if batch * tokens > 0:
        with on_device(qkv):
            _split[(batch * tokens, width // dim)](
                qkv, plain, gates, HEADS=heads, VECTORS=width // dim, DIM=dim, WIDTH=triton.next_power_of_2(dim),
                num_warps=1, **options(qkv),
            )  # fmt: skip
    return plain, gates


@triton.jit
def _gate(x, gates, out, count, TILE: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    wait_for_previous(PDL)
    gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    # exp may overflow to infinity, for which the quotient is the right zero.
    result = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """See `onegraph.ops.gate.gate_heads`."""
    out, tile = torch.empty_like(x), 1024
    if x.numel() > 0:
        with on_device(x):
            _gate[(triton.cdiv(x.numel(), tile),)](x, gates, out, x.numel(), TILE=tile, num_warps=4, **options(x))
    return out
