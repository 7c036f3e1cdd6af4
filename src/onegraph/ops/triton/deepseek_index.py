"""The indexer's scores, of `ENTRIES` entries a program; `ops/cuda/deepseek_index.py` selects among them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import DeepseekIndex
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

ENTRIES = 32  # of a program that scores


@triton.jit(do_not_specialize=["length", "table_stride", "capacity", "pages", "last"])
def _score(
    q, weights, cos, sin, positions, counts, block_table, entries, scores, gain,
    length, q_stride, weight_stride, table_stride, capacity, pages, last,
    HEADS: tl.constexpr, HP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    RATIO: tl.constexpr, PER_PAGE: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    first, row = tl.program_id(0) * ENTRIES, tl.program_id(1).to(tl.int64)
    batch, step = row // length, (row % length).to(tl.int32)
    head, pair, column = tl.arange(0, HP), tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH)
    entry = first + tl.arange(0, ENTRIES)
    place = places(block_table + batch * table_stride, entry, entry < capacity, pages, PER_PAGE)
    token = tl.load(positions + batch) + step
    angle = tl.minimum(tl.maximum(token, 0), last).to(tl.int64) * HALF + pair - (DIM // 2 - HALF)
    rotates = (pair >= DIM // 2 - HALF) & (2 * pair < DIM)
    c = tl.load(cos + angle, mask=rotates, other=1.0)[None, :]
    s = tl.load(sin + angle, mask=rotates, other=0.0)[None, :]
    wait_for_previous(PDL)
    ready = tl.where(step < tl.load(counts + batch), tl.minimum((token + 1) // RATIO, capacity), 0)
    if first < ready:
        there = entry < ready
        at = row * q_stride + head[:, None] * DIM + column[None, :]
        query = tl.load(q + at, mask=(head < HEADS)[:, None] & (column < DIM)[None, :], other=0.0)
        at = place.to(tl.int64)[:, None] * DIM + column[None, :]
        keys = tl.load(entries + at, mask=there[:, None] & (column < DIM)[None, :], other=0.0)
        weight = tl.load(weights + row * weight_stride + head, mask=head < HEADS, other=0.0).to(tl.float32) * gain
        even, odd = tl.split(tl.reshape(query.to(tl.float32), (HP, WIDTH // 2, 2)))
        turned = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (HP, WIDTH)).to(q.dtype.element_ty)
        dots = tl.dot(keys, tl.trans(turned), input_precision="ieee")
        total = tl.sum(tl.maximum(dots, 0.0) * weight[None, :], axis=1)
        tl.store(scores + row * capacity + entry, total, mask=there)


@triton.jit
def places(table, entry, there, pages, PER_PAGE: tl.constexpr):
    """Rows of the pool where a sequence's entries lie, by its part of the block table."""
    page = tl.load(table + entry // PER_PAGE, mask=there, other=0)
    page = tl.minimum(tl.maximum(page, 0), pages - 1)  # a wrong table must not read past the pool
    return page * PER_PAGE + entry % PER_PAGE


def score(call: DeepseekIndex) -> Tensor:
    """float32 [B Q, capacity]; what the query does not see is not written."""
    q, weights, cos, sin, positions, counts, block_table, entries, ratio, _ = call
    batch, length, heads, dim = q.shape
    if weights.stride(0) != length * weights.stride(1):
        weights = weights.contiguous()
    if q.stride(0) != length * q.stride(1):
        q = q.contiguous()
    capacity = block_table.shape[1] * entries.shape[1]
    scores = torch.empty((batch * length, capacity), dtype=torch.float32, device=q.device)
    with on_device(q):
        _score[(triton.cdiv(capacity, ENTRIES), batch * length)](
            q, weights, cos, sin, positions, counts, block_table, entries, scores, dim**-0.5 * heads**-0.5,
            length, q.stride(1), weights.stride(1), block_table.stride(0), capacity, entries.shape[0], cos.shape[0] - 1,
            HEADS=heads, HP=max(16, triton.next_power_of_2(heads)), DIM=dim, WIDTH=max(32, triton.next_power_of_2(dim)),
            HALF=cos.shape[1], RATIO=ratio, PER_PAGE=entries.shape[1], ENTRIES=ENTRIES, num_warps=4, **options(q),
        )  # fmt: skip
    return scores
