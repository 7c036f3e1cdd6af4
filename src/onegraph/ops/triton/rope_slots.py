"""RoPE and the write of keys and values by slot, in one launch (`onegraph/ops/rope_slots.py`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit(do_not_specialize=["given", "row"])
def _rope_slots_write(
    qkv, positions, table, slots, keys, values, out, given, row, page_stride, place_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a token and head: heads of q, then of k, then of v, as qkv has them. Positions and slots are made
    before a step begins, so they are read before the wait."""
    let_next_start(PDL)
    token, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    at = tl.load(positions + token) * DIM + half
    cos = tl.load(table + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(table + DIM // 2 + at, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + token, mask=token < given, other=-1)
    wait_for_previous(PDL)
    source = qkv + token.to(tl.int64) * row + head * DIM
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    dtype: tl.constexpr = out.dtype.element_ty
    if head < HEADS:
        place = out + (token.to(tl.int64) * HEADS + head) * DIM
        kept = inside
    else:
        offset = (slot // PAGE) * page_stride + (slot % PAGE) * place_stride
        if head < HEADS + KV_HEADS:
            place = keys + offset + (head - HEADS) * head_stride
        else:
            place = values + offset + (head - HEADS - KV_HEADS) * head_stride
        kept = inside & (slot >= 0)
    tl.store(place + half, first.to(dtype), mask=kept)
    tl.store(place + DIM // 2 + half, second.to(dtype), mask=kept)


def rope_slots_write(
    qkv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:
    """See `onegraph.ops.rope_slots.rope_slots_write`."""
    tokens, (_, page_size, kv_heads, dim) = qkv.shape[0], keys.shape
    out = torch.empty(tokens, heads * dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    with on_device(qkv):
        _rope_slots_write[(tokens, heads + 2 * kv_heads)](
            qkv, positions, table, slots, keys, values, out, slots.shape[0], qkv.stride(0), *keys.stride()[:3],
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2), PAGE=page_size,
            num_warps=1, **options(qkv),
        )  # fmt: skip
    return out
