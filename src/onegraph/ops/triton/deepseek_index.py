"""The indexer: scores of 64 entries a program, then for each query the k largest by their bits, in ascending order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import DeepseekIndex
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

ENTRIES = 32  # of a program that scores
CHUNK = 4096  # scores that the selection looks at together


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


@triton.jit
def _keys(scores, at, there):
    """Scores as int32 of the same order."""
    bits = tl.load(scores + at, mask=there, other=0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["length", "table_stride", "capacity", "pages"])
def _select(
    scores, positions, counts, block_table, selected, length, table_stride, capacity, pages,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, PER_PAGE: tl.constexpr, CHUNK: tl.constexpr, FITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One query. FITS: all its scores stay in registers."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    batch, step = row // length, (row % length).to(tl.int32)
    scores += row * capacity
    table = block_table + batch * table_stride
    lane = tl.arange(0, CHUNK)
    token = tl.load(positions + batch) + step
    if FITS:
        place = places(table, lane, lane < capacity, pages, PER_PAGE)
    wait_for_previous(PDL)
    ready = tl.where(step < tl.load(counts + batch), tl.minimum((token + 1) // RATIO, capacity), 0)
    if FITS:
        key = _keys(scores, lane, lane < ready)
    # The k-th largest key, two bits at a time from above: how many keys reach each of the three larger values that the
    # two bits may have.
    found = tl.full((), -2147483648, tl.int32)
    if ready > TOP_K:
        unit = tl.full((), 1 << 30, tl.int32)
        for _ in range(16):
            low = found + unit
            middle = low + unit
            high = middle + unit
            lows, middles, highs = 0, 0, 0
            for start in range(0, ready, CHUNK):
                at = start + lane
                if not FITS:
                    key = _keys(scores, at, at < ready)
                there = at < ready
                two = (there & (key >= low)).to(tl.int32) + ((there & (key >= middle)).to(tl.int32) << 16)
                total = tl.sum(two, axis=0)
                lows += total & 0xFFFF
                middles += total >> 16
                highs += tl.sum((there & (key >= high)).to(tl.int32), axis=0)
            found = tl.where(
                highs >= TOP_K, high, tl.where(middles >= TOP_K, middle, tl.where(lows >= TOP_K, low, found))
            )
            unit = unit >> 2
    # Those above it, and of those equal to it the first: every lane's place by one running sum of both counts.
    larger_before, equal_before, need = 0, 0, 0
    for start in range(0, ready, CHUNK):
        at = start + lane
        if not FITS:
            key = _keys(scores, at, at < ready)
        need += tl.sum(((at < ready) & (key > found)).to(tl.int32), axis=0)
    need = TOP_K - need
    for start in range(0, ready, CHUNK):
        at = start + lane
        if not FITS:
            key = _keys(scores, at, at < ready)
            place = places(table, at, at < ready, pages, PER_PAGE)
        larger, equal = (at < ready) & (key > found), (at < ready) & (key == found)
        both = larger.to(tl.int32) + (equal.to(tl.int32) << 16)
        ahead = tl.cumsum(both, axis=0) - both
        ties = equal_before + (ahead >> 16)
        to = larger_before + (ahead & 0xFFFF) + tl.minimum(ties, need)
        tl.store(selected + row * TOP_K + to, place, mask=larger | (equal & (ties < need)))
        total = tl.sum(both, axis=0)
        larger_before += total & 0xFFFF
        equal_before += total >> 16
    done = tl.minimum(ready, TOP_K)
    for start in range(0, TOP_K, CHUNK):
        at = start + lane
        tl.store(selected + row * TOP_K + at, tl.full((CHUNK,), -1, tl.int32), mask=(at >= done) & (at < TOP_K))


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


def select(
    scores: Tensor, positions: Tensor, counts: Tensor, block_table: Tensor, pages: int, ratio: int, top_k: int
) -> Tensor:
    """Scores as `score` gives them -> int32 [B, Q, top_k], as of the op; of equal scores the first entries'."""
    batch, (queries, capacity) = positions.shape[0], scores.shape
    selected = torch.empty((batch, queries // batch, top_k), dtype=torch.int32, device=scores.device)
    per_page = capacity // block_table.shape[1]
    chunk = min(CHUNK, max(32, triton.next_power_of_2(capacity)))
    with on_device(scores):
        _select[(queries,)](
            scores, positions, counts, block_table, selected, queries // batch, block_table.stride(0), capacity, pages,
            RATIO=ratio, TOP_K=top_k, PER_PAGE=per_page, CHUNK=chunk, FITS=capacity <= chunk,
            num_warps=max(1, min(16, chunk // 256)), **options(scores),
        )  # fmt: skip
    return selected


def deepseek_index(call: DeepseekIndex) -> Tensor:
    """See `onegraph.ops.deepseek_index.deepseek_index`."""
    if call.q.numel() == 0:
        return call.q.new_empty((*call.q.shape[:2], call.top_k), dtype=torch.int32)
    rows = call.positions, call.counts, call.block_table
    return select(score(call), *rows, call.entries.shape[0], call.ratio, call.top_k)
