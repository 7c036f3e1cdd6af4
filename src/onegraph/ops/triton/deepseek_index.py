"""The indexer: scores of 64 entries a program, then for each query the k largest by their bits, in ascending order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

ENTRIES = 64  # of a program that scores
CHUNK = 2048  # scores that the selection looks at together


@triton.jit(do_not_specialize=["length", "table_stride", "capacity", "pages", "last"])
def _score(
    q, weights, cos, sin, positions, counts, block_table, entries, scores, gain,
    length, weight_stride, table_stride, capacity, pages, last,
    HEADS: tl.constexpr, HP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    RATIO: tl.constexpr, PER_PAGE: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    first, row = tl.program_id(0) * ENTRIES, tl.program_id(1).to(tl.int64)
    batch, step = row // length, (row % length).to(tl.int32)
    head, pair = tl.arange(0, HP), tl.arange(0, WIDTH // 2)
    wait_for_previous(PDL)
    token = tl.load(positions + batch) + step
    ready = tl.where(step < tl.load(counts + batch), tl.minimum((token + 1) // RATIO, capacity), 0)
    if first < ready:
        at = (row * HEADS + head)[:, None] * DIM + 2 * pair[None, :]
        inside = (head < HEADS)[:, None] & (2 * pair < DIM)[None, :]
        even = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(q + at + 1, mask=inside, other=0.0).to(tl.float32)
        angle = tl.minimum(tl.maximum(token, 0), last).to(tl.int64) * HALF + pair - (DIM // 2 - HALF)
        rotates = (pair >= DIM // 2 - HALF) & (2 * pair < DIM)
        c = tl.load(cos + angle, mask=rotates, other=1.0)[None, :]
        s = tl.load(sin + angle, mask=rotates, other=0.0)[None, :]
        kind = q.dtype.element_ty
        turned_even, turned_odd = (even * c - odd * s).to(kind), (odd * c + even * s).to(kind)
        entry = first + tl.arange(0, ENTRIES)
        there = entry < ready
        page = tl.load(block_table + batch * table_stride + entry // PER_PAGE, mask=there, other=0)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
        place = (page.to(tl.int64) * PER_PAGE + entry % PER_PAGE) * DIM
        valid = there[:, None] & (2 * pair < DIM)[None, :]
        key_even = tl.load(entries + place[:, None] + 2 * pair[None, :], mask=valid, other=0.0)
        key_odd = tl.load(entries + place[:, None] + 2 * pair[None, :] + 1, mask=valid, other=0.0)
        dots = tl.dot(key_even, tl.trans(turned_even), input_precision="ieee")
        dots = tl.dot(key_odd, tl.trans(turned_odd), dots, input_precision="ieee")
        weight = tl.load(weights + row * weight_stride + head, mask=head < HEADS, other=0.0).to(tl.float32) * gain
        total = tl.sum(tl.maximum(dots, 0.0) * weight[None, :], axis=1)
        tl.store(scores + row * capacity + entry, total, mask=there)


@triton.jit
def _order(x):
    """float32 -> int64 in 0 .. 2^32 - 1 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648)
    return key.to(tl.int64) & 0xFFFFFFFF


@triton.jit(do_not_specialize=["length", "capacity"])
def _select(
    scores, positions, counts, selected, length, capacity,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    batch, step = row // length, (row % length).to(tl.int32)
    lane = tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    token = tl.load(positions + batch) + step
    ready = tl.where(step < tl.load(counts + batch), tl.minimum((token + 1) // RATIO, capacity), 0)
    # The k-th largest key, byte by byte: among keys that share the bytes found so far, how many have each next byte.
    found = tl.zeros((), dtype=tl.int64)
    need = tl.zeros((), dtype=tl.int32) + TOP_K
    if ready > TOP_K:
        bin = tl.arange(0, 256)
        for turn in tl.static_range(4):
            shift = 24 - 8 * turn
            histogram = tl.zeros((256,), dtype=tl.int32)
            for start in range(0, ready, CHUNK):
                at = start + lane
                key = _order(tl.load(scores + row * capacity + at, mask=at < ready, other=0.0))
                same = (at < ready) & ((key >> (shift + 8)) == (found >> (shift + 8)))
                histogram += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=same)
            above = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0)  # keys with a larger byte
            byte = tl.min(tl.where(above < need, bin, 255), axis=0)
            need -= tl.sum(tl.where(bin == byte, above, 0), axis=0)
            found = found | (byte.to(tl.int64) << shift)
    done = tl.zeros((), dtype=tl.int32)
    equal = tl.zeros((), dtype=tl.int32)
    for start in range(0, ready, CHUNK):
        at = start + lane
        there = at < ready
        key = _order(tl.load(scores + row * capacity + at, mask=there, other=0.0))
        tie = (there & (key == found)).to(tl.int32)
        before = equal + tl.cumsum(tie, axis=0) - tie
        keep = there & ((key > found) | ((tie > 0) & (before < need)))
        if ready <= TOP_K:
            keep = there
        taken = keep.to(tl.int32)
        place = done + tl.cumsum(taken, axis=0) - taken
        tl.store(selected + row * TOP_K + place, at.to(tl.int32), mask=keep & (place < TOP_K))
        done += tl.sum(taken, axis=0)
        equal += tl.sum(tie, axis=0)
    for start in range(0, TOP_K, CHUNK):
        at = start + lane
        tl.store(selected + row * TOP_K + at, tl.full((CHUNK,), -1, tl.int32), mask=(at >= done) & (at < TOP_K))


def deepseek_index(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    entries: Tensor,
    ratio: int,
    top_k: int,
) -> Tensor:
    """See `onegraph.ops.deepseek_index.deepseek_index`."""
    batch, length, heads, dim = q.shape
    selected = torch.empty((batch, length, top_k), dtype=torch.int32, device=q.device)
    if batch * length == 0:
        return selected
    if weights.stride(0) != length * weights.stride(1):
        weights = weights.contiguous()
    capacity = block_table.shape[1] * entries.shape[1]
    scores = torch.empty((batch * length, capacity), dtype=torch.float32, device=q.device)
    chunk = min(CHUNK, max(16, triton.next_power_of_2(max(capacity, top_k))))
    with on_device(q):
        opts = options(q)
        _score[(triton.cdiv(capacity, ENTRIES), batch * length)](
            q, weights, cos, sin, positions, counts, block_table, entries, scores, dim**-0.5 * heads**-0.5,
            length, weights.stride(1), block_table.stride(0), capacity, entries.shape[0], cos.shape[0] - 1,
            HEADS=heads, HP=max(16, triton.next_power_of_2(heads)), DIM=dim, WIDTH=max(32, triton.next_power_of_2(dim)),
            HALF=cos.shape[1], RATIO=ratio, PER_PAGE=entries.shape[1], ENTRIES=ENTRIES, num_warps=4, **opts,
        )  # fmt: skip
        _select[(batch * length,)](
            scores, positions, counts, selected, length, capacity,
            RATIO=ratio, TOP_K=top_k, CHUNK=chunk, num_warps=8, **opts,
        )  # fmt: skip
    return selected
