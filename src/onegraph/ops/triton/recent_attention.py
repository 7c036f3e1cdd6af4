"""Attention to a ring of exact tokens or to a chunk's own, merged with the history's, turned back: one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import RecentAttention
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit(do_not_specialize=["length"])
def _attend(
    q, ring, slots, positions, history, history_lse, rotation, out, scale, length,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, WINDOW: tl.constexpr, SPARE: tl.constexpr,
    LIMIT: tl.constexpr, HISTORY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS (token, head of the group) pairs against all places of the row's ring."""
    let_next_start(PDL)
    dtype: tl.constexpr = q.dtype.element_ty
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = row // GROUP
    column = tl.arange(0, WIDTH)
    wait_for_previous(PDL)
    position = tl.load(positions + batch)
    token = position + step
    last = position + length - 1
    at = (batch * length + step) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    inside = (step < length)[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + at[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    source = ring + tl.load(slots + batch).to(tl.int64) * SIZE * 2 * KV_HEADS * DIM
    best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, SIZE, KEYS):
        place = start + tl.arange(0, KEYS)
        behind = (last - place) % SIZE  # of C's remainder the sign is the dividend's
        key = last - tl.where(behind < 0, behind + SIZE, behind)
        there = (place < SIZE) & (key >= 0)
        slot = (place * 2 * KV_HEADS + kv_head) * DIM
        valid = there[:, None] & (column < DIM)[None, :]
        keys = tl.load(source + slot[:, None] + column[None, :], mask=valid, other=0.0)
        values = tl.load(source + slot[:, None] + KV_HEADS * DIM + column[None, :], mask=valid, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = there[None, :] & (key[None, :] <= token[:, None])
        if WINDOW > 0:
            seen = seen & ((key[None, :] > token[:, None] - WINDOW) | (token < WINDOW + SPARE)[:, None])
        if LIMIT > 0:
            seen = seen & (key[None, :] > token[:, None] - LIMIT)
        scores = tl.where(seen, scores, float("-inf"))
        values = tl.where((tl.max(seen.to(tl.int32), axis=0) > 0)[:, None], values, 0.0).to(dtype)
        higher = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(dtype), values, acc * keep[:, None], input_precision="ieee")
        best = higher
    if HISTORY:
        far = tl.load(history_lse + at, mask=step < length, other=float("-inf")) * 1.4426950408889634
        if WINDOW > 0:
            far = tl.where(token >= WINDOW + SPARE, far, float("-inf"))
        higher = tl.maximum(best, far)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp2(best - base)
        share = tl.exp2(far - base)
        past = tl.load(history + at[:, None] * DIM + column[None, :], mask=inside & (share > 0)[:, None], other=0.0)
        acc = acc * keep[:, None] + past.to(tl.float32) * share[:, None]
        total = total * keep + share
    acc = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(dtype)
    for first in tl.static_range(0, WIDTH, SLICE):
        n = first + tl.arange(0, SLICE)
        matrix = tl.load(
            rotation + column[:, None] * DIM + n[None, :], mask=(column < DIM)[:, None] & (n < DIM)[None, :], other=0.0
        )
        turned = tl.dot(acc, matrix, input_precision="ieee") * DIM**-0.5
        tl.store(
            out + at[:, None] * DIM + n[None, :], turned.to(dtype), mask=(step < length)[:, None] & (n < DIM)[None, :]
        )


def recent_attention(call: RecentAttention) -> Tensor:
    """See `onegraph.ops.recent_attention.recent_attention`."""
    q, ring, slots, positions, history, history_lse, rotation, scale, window, spare, limit = call
    batch, length, heads, dim = q.shape
    _, size, _, kv_heads, _ = ring.shape
    out = torch.empty_like(q)
    if q.numel() == 0:
        return out
    group = heads // kv_heads
    rows = min(32, max(16, triton.next_power_of_2(length * group)))
    width = triton.next_power_of_2(dim)
    with on_device(q):
        _attend[(triton.cdiv(length * group, rows), kv_heads, batch)](
            q, ring, slots, positions, q if history is None else history, q if history_lse is None else history_lse,
            rotation, out, scale, length,
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, WIDTH=width, SIZE=size, ROWS=rows,
            KEYS=16 if width > 256 else 32 if width * q.element_size() > 512 else 64, SLICE=64, WINDOW=window,
            SPARE=spare, LIMIT=limit, HISTORY=history is not None, num_warps=4 if width <= 256 else 8, num_stages=2,
            **options(q),
        )  # fmt: skip
    return out
