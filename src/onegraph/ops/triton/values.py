"""Values of attention that are normed, beside queries and keys."""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def _values(qkv, out, eps, BEFORE: tl.constexpr, KV_HEADS: tl.constexpr, GIVEN: tl.constexpr, DIM: tl.constexpr,
            WIDTH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program a token and vector that comes out; those before BEFORE are copied, of GIVEN that came."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    vector = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    source = tl.where(vector < BEFORE, vector, vector - BEFORE + GIVEN - KV_HEADS)
    wait_for_previous(PDL)
    x = tl.load(qkv + (token * GIVEN + source) * DIM + column, mask=inside, other=0.0)
    if vector >= BEFORE:
        wide = x.to(tl.float32)
        x = (wide / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / DIM + eps)).to(x.dtype)
    tl.store(out + (token * (BEFORE + KV_HEADS) + vector) * DIM + column, x, mask=inside)


def normed_values(qkv: Tensor, heads: int, kv_heads: int, dim: int, eps: float) -> Tensor:
    """See `onegraph.ops.values.normed_values`."""
    batch, tokens, width = qkv.shape
    out = qkv.new_empty((batch, tokens, (heads + 2 * kv_heads) * dim))
    if batch * tokens > 0:
        with on_device(qkv):
            _values[(batch * tokens, heads + 2 * kv_heads)](
                qkv, out, eps, BEFORE=heads + kv_heads, KV_HEADS=kv_heads, GIVEN=width // dim, DIM=dim,
                WIDTH=triton.next_power_of_2(dim), num_warps=1, **options(qkv),
            )  # fmt: skip
    return out
