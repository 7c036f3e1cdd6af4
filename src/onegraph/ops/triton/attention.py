"""Paged attention: rotate and write the new keys and values; attend.

Grids depend on shapes alone, so one graph serves every context length. The keys of a sequence are divided among a fixed
number of programs *by its length, on the device*: each takes an equal share, so a short context in a long block table
keeps all of them busy too. The division depends on the row's own length and nothing else: no row changes with the batch
that it is in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import PagedAttention, RopeCacheWrite
from onegraph.ops.strides import row_stride
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

SPLITS = 16  # programs that share the keys of one sequence and kv head in a decode step
MIN_SHARE = 64  # keys: a program's share is a multiple of it, so that short contexts are not cut into crumbs


@triton.jit(do_not_specialize=["length", "row", "table_stride", "reach", "max_position", "given"])
def _rope_cache_write(
    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, slots, k_cache, v_cache, out,
    length, row, turn_stride, table_stride, reach, max_position, given, page_stride, place_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a token and head: heads of q, then of k, then of v, as qkv has them. The first TURNED of the DIM
    coordinates rotate; REST is 0 where that is all of them. With SLOTS positions and slots are made before a step
    begins, and are read before the wait."""
    let_next_start(PDL)
    index = tl.program_id(0)
    head = tl.program_id(1)
    batch = index // length
    step = index % length
    half = tl.arange(0, HALF)
    inside = half < TURNED // 2
    rotated = head < HEADS + KV_HEADS
    if not SLOTS:
        wait_for_previous(PDL)
    position = tl.load(positions + batch) + step
    if ROPE:
        at = tl.minimum(tl.maximum(position, 0), max_position).to(tl.int64) * turn_stride + half
        c = tl.load(cos + at, mask=inside & rotated, other=0.0)
        s = tl.load(sin + at, mask=inside & rotated, other=0.0)
    if SLOTS:
        slot = tl.load(slots + index, mask=index < given, other=-1)
        wait_for_previous(PDL)
    source = qkv + index.to(tl.int64) * row + head * DIM
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + TURNED // 2 + half, mask=inside, other=0.0).to(tl.float32)
    if REST > 0:
        beyond = TURNED + tl.arange(0, REST)
        rest = tl.load(source + beyond, mask=beyond < DIM, other=0.0).to(tl.float32)
    if NORM and rotated:
        weight = q_norm if head < HEADS else k_norm
        squares = tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=0)
        scale = 1.0 / tl.sqrt_rn(squares / DIM + eps)
        first = first * scale * tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
        second = second * scale * tl.load(weight + TURNED // 2 + half, mask=inside, other=0.0).to(tl.float32)
        if REST > 0:
            rest = rest * scale * tl.load(weight + beyond, mask=beyond < DIM, other=0.0).to(tl.float32)
    if ROPE and rotated:
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    dtype: tl.constexpr = qkv.dtype.element_ty
    if head < HEADS:
        place = out + (index.to(tl.int64) * HEADS + head) * DIM
        tl.store(place + half, first.to(dtype), mask=inside)
        tl.store(place + TURNED // 2 + half, second.to(dtype), mask=inside)
        if REST > 0:
            tl.store(place + beyond, rest.to(dtype), mask=beyond < DIM)
    else:
        # Padding and what lies beyond the block table is not written at all: the sentinel page stays as it is.
        if SLOTS:
            real = slot >= 0
        else:
            real = (step < tl.load(counts + batch)) & (position >= 0) & (position < reach)
            page = tl.load(block_table + batch.to(tl.int64) * table_stride + position // PAGE, mask=real, other=0)
            slot = page.to(tl.int64) * PAGE + position % PAGE
        offset = (slot // PAGE) * page_stride + (slot % PAGE) * place_stride
        if rotated:
            place = k_cache + offset + (head - HEADS) * head_stride
        else:
            place = v_cache + offset + (head - HEADS - KV_HEADS) * head_stride
        tl.store(place + half, first.to(dtype), mask=inside & real)
        tl.store(place + TURNED // 2 + half, second.to(dtype), mask=inside & real)
        if REST > 0:
            tl.store(place + beyond, rest.to(dtype), mask=(beyond < DIM) & real)


def rope_cache_write(call: RopeCacheWrite) -> Tensor:
    """See `onegraph.ops.attention.rope_cache_write`."""
    qkv, cos, sin, table, slots = call.qkv, call.cos, call.sin, call.block_table, call.slots
    (batch, length, _), (_, page_size, kv_heads, dim) = qkv.shape, call.k_cache.shape
    out = torch.empty((batch, length, call.heads, dim), dtype=qkv.dtype, device=qkv.device)
    if batch * length == 0:
        return out
    norm, rope, paged = call.q_norm is not None, cos is not None, slots is None
    turned = 2 * cos.shape[1] if rope else dim
    given = (call.counts, table, call.positions) if paged else (call.positions, call.positions, slots)
    with on_device(qkv):
        vectors = call.heads if call.queries_alone else call.heads + 2 * kv_heads
        _rope_cache_write[(batch * length, vectors)](
            qkv, call.q_norm if norm else qkv, call.k_norm if norm else qkv, call.eps,
            cos if rope else qkv, sin if rope else qkv, call.positions, *given, call.k_cache, call.v_cache, out,
            length, row_stride(qkv), cos.stride(0) if rope else 0, table.stride(0) if paged else 0,
            table.shape[1] * page_size if paged else 0, cos.shape[0] - 1 if rope else 0,
            0 if paged else slots.shape[0], *call.k_cache.stride()[:3],
            HEADS=call.heads, KV_HEADS=kv_heads, DIM=dim, TURNED=turned, HALF=triton.next_power_of_2(turned // 2),
            REST=triton.next_power_of_2(dim - turned) if turned < dim else 0, PAGE=page_size, NORM=norm, ROPE=rope,
            SLOTS=not paged, num_warps=1, **options(qkv),
        )  # fmt: skip
    return out


@triton.jit
def _share(position, length, reach, WINDOW: tl.constexpr, SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr):
    """(first key that any query of the row sees, end of the keys, keys a split): from the row's own length."""
    last = tl.minimum(tl.maximum(position, 0), reach - 1)
    end = tl.minimum(last + length, reach)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0) // MIN_SHARE * MIN_SHARE
    share = tl.cdiv(tl.cdiv(end - first, SPLITS), MIN_SHARE) * MIN_SHARE
    return last, first, end, share


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap). exp2 may overflow to infinity, for which the quotient is the right zero."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634) / softcap)))


@triton.jit
def with_sink(best, total, sink):
    """(maximum, sum, what the sum before is to be multiplied by) of a softmax once a head's sink is counted; log2
    domain. A query without keys has best = -inf and sum = 0."""
    high = tl.maximum(best, sink * 1.4426950408889634)
    base = tl.where(high == float("-inf"), 0.0, high)
    keep = tl.exp2(best - base)
    return high, total * keep + tl.exp2(sink * 1.4426950408889634 - base), keep


@triton.jit(do_not_specialize=["length", "table_stride", "reach", "pages"])
def _attend(
    q, k_cache, v_cache, block_table, positions, counts, sinks, out, part, part_max, part_sum,
    scale, softcap, length, table_stride, reach, pages, page_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr,
    SINKS: tl.constexpr, CAPPED: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS (token, head of the group) pairs, token by token, against a split of the row's keys."""
    let_next_start(PDL)
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    step = row // GROUP
    column = tl.arange(0, WIDTH)
    wait_for_previous(PDL)
    last, first, end, share = _share(tl.load(positions + batch), length, reach, WINDOW, SPLITS, MIN_SHARE)
    start = first + split * share
    stop = tl.minimum(start + share, end)
    # Keys after the tile's last token are nobody's; with a window, neither are those before its first token's window.
    final = tl.minimum(last + tl.minimum(length - 1, (tile * ROWS + ROWS - 1) // GROUP), reach - 1)
    stop = tl.minimum(stop, final + 1)
    if COUNTED:
        stop = tl.minimum(stop, last + tl.load(counts + batch))
    if WINDOW > 0:
        early = tl.maximum(last + tile * ROWS // GROUP - WINDOW + 1, 0) // KEYS * KEYS
        start = tl.maximum(start, early)

    at = (batch * length + step) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    inside = (step < length)[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + at[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    token = tl.minimum(last + step, reach - 1)
    best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for key_start in range(start, stop, KEYS):
        key = key_start + tl.arange(0, KEYS)
        there = key < stop
        page = tl.load(block_table + batch * table_stride + key // PAGE, mask=there, other=0)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)  # a wrong table must not read past the cache
        slot = page.to(tl.int64) * page_stride + (key % PAGE * KV_HEADS + kv_head) * DIM
        valid = there[:, None] & (column < DIM)[None, :]
        keys = tl.load(k_cache + slot[:, None] + column[None, :], mask=valid, other=0.0)
        values = tl.load(v_cache + slot[:, None] + column[None, :], mask=valid, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if CAPPED:
            scores = capped(scores * scale, softcap) * 1.4426950408889634
        else:
            scores = scores * (scale * 1.4426950408889634)
        seen = there[None, :] & (key[None, :] <= token[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > token[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: exp2(-inf - 0) = 0, not NaN
        weight = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        best = higher
    if SPLITS == 1:
        if SINKS:
            best, total, keep = with_sink(best, total, tl.load(sinks + kv_head * GROUP + row % GROUP))
            acc = acc * keep[:, None]
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at[:, None] * DIM + column[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        place = at * SPLITS + split
        tl.store(part + place[:, None] * DIM + column[None, :], acc, mask=inside)
        tl.store(part_max + place, best, mask=step < length)
        tl.store(part_sum + place, total, mask=step < length)


@triton.jit
def _merge(
    part, part_max, part_sum, sinks, out, heads, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Splits of one query and head by their log-sum-exp. A split without keys has best = -inf, sum = 0, part = 0."""
    let_next_start(PDL)
    at = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDTH)
    wait_for_previous(PDL)
    best = tl.load(part_max + at * SPLITS + split)
    total = tl.load(part_sum + at * SPLITS + split)
    place = (at * SPLITS + split)[:, None] * DIM + column[None, :]
    acc = tl.load(part + place, mask=(column < DIM)[None, :], other=0.0)
    base = tl.max(best, axis=0)
    weight = tl.exp2(best - tl.where(base == float("-inf"), 0.0, base))
    total = tl.sum(total * weight, axis=0)
    result = tl.sum(acc * weight[:, None], axis=0)
    if SINKS:
        base, total, keep = with_sink(base, total, tl.load(sinks + at % heads))
        result = result * keep
    result = result / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * DIM + column, result.to(out.dtype.element_ty), mask=column < DIM)


def paged_attention(call: PagedAttention) -> Tensor:
    """See `onegraph.ops.attention.paged_attention`."""
    q, k_cache, v_cache, block_table, positions, scale, window, sinks, softcap, counts = call
    batch, length, heads, dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    out = torch.empty_like(q)
    if q.numel() == 0:
        return out
    group = heads // kv_heads
    reach = block_table.shape[1] * page_size
    width = max(16, triton.next_power_of_2(dim))
    rows = min(64 if width <= 256 else 32, max(16, triton.next_power_of_2(length * group)))
    tiles = triton.cdiv(length * group, rows)
    # Two tiles of keys and values in shared memory.
    keys = 64 if width <= 128 else max(16, 16384 // (width * q.element_size()))
    # Keys that a row of tiles can see at most, from shapes; a prefill chunk has tiles enough without splitting.
    span = reach if window == 0 else min(reach, window + length + MIN_SHARE)
    splits = 1 if tiles > 1 else min(SPLITS, triton.next_power_of_2(triton.cdiv(span, MIN_SHARE)))
    split = splits > 1
    part = torch.empty((q.numel() // dim, splits, dim), dtype=torch.float32, device=q.device) if split else out
    sums = torch.empty((2, q.numel() // dim, splits), dtype=torch.float32, device=q.device) if split else (out, out)
    with on_device(q):
        opts = options(q)
        _attend[(tiles * splits, kv_heads, batch)](
            q, k_cache, v_cache, block_table, positions, positions if counts is None else counts,
            out if sinks is None else sinks, out, part, sums[0], sums[1],
            scale, softcap, length, block_table.stride(0), reach, pages, k_cache.stride(0),
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, WIDTH=width, PAGE=page_size, ROWS=rows, KEYS=keys,
            WINDOW=window, SPLITS=splits, MIN_SHARE=MIN_SHARE, SINKS=sinks is not None, CAPPED=softcap > 0,
            COUNTED=counts is not None, num_warps=4 if width <= 128 else 8, num_stages=2, **opts,
        )  # fmt: skip
        if split:
            _merge[(q.numel() // dim,)](
                part, sums[0], sums[1], out if sinks is None else sinks, out, heads, DIM=dim, WIDTH=width,
                SPLITS=splits, SINKS=sinks is not None, num_warps=1, **opts,
            )  # fmt: skip
    return out
