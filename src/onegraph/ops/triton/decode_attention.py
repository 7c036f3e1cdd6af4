"""The attention of a decode step in one launch: norm, rotate and write the new key and value, attend, merge.

The grid depends on shapes alone. The keys of a row are divided among SPLITS programs *by its length, on the device*, so
that a short context keeps them busy too. Each program needs its first
tile of keys and values before it waits for the linear that makes q, k and v; at the end the last program of a head to
draw a ticket merges the splits, in their order, whichever program that is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops import invariant
from onegraph.ops.calls import PagedAttention, PagedDecode, RopeCacheWrite
from onegraph.ops.triton.attention import capped, paged_attention, rope_cache_write, with_sink
from onegraph.ops.triton.gate import gate_heads, split_gates
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous
from onegraph.ops.triton.values import normed_values

KEYS = 64  # of a tile; half as many where a key has more than 128 numbers, and again beyond 256
STAGES = 5  # of Triton's pipeline, two of which hold tiles of keys and values
WARPS = 4
MERGED = 16384  # numbers of all splits that the last program merges: more than these do not stay in registers
PROGRAMS = 256  # wanted: two for each SM of a large GPU
SHARED_BYTES = 160 << 10  # that two tiles of keys and values may take
SPLITS = 4, 32  # of a row's keys, at least and at most
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _prefetch(address):
    """Asks for the line at `address` [...] to be brought into the L2."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _turned(source, weight, cos, sin, eps, half, DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
            WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Heads `source` + DIM * row [ROWS, WIDTH] in float32, normed, their first 2 * half coordinates rotated; zeros
    beyond GROUP rows."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    partner = tl.where(column < half, column + half, column - half)
    turns = column < 2 * half
    inside = (row < GROUP)[:, None] & (column < DIM)[None, :]
    x = tl.load(source + row[:, None] * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        norm = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / DIM + eps)
        x = x * norm[:, None] * tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    if ROPE:
        y = tl.load(source + row[:, None] * DIM + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM:
            y = y * norm[:, None] * tl.load(weight + partner, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
        c = tl.load(cos + column % half, mask=turns, other=1.0)
        s = tl.load(sin + column % half, mask=turns, other=0.0)
        x = x * c[None, :] + y * tl.where(column < half, -s, s)[None, :]
    return x


@triton.jit(do_not_specialize=["table_stride", "reach", "max_position", "pages"])
def _decode(
    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, k_cache, v_cache, tickets, sinks, out, part,
    sums, scale, softcap, table_stride, reach, max_position, pages, page_stride, sum_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, HEADS_P2: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, LINES: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, SINKS: tl.constexpr,
    CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a split of the keys, kv head and row of the batch. The last one to end merges the splits."""
    let_next_start(PDL)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    # Position, pages and the keys of earlier tokens: what this step writes nowhere before it ends (launch.py, rule 4).
    position = tl.load(positions + batch)
    last = tl.minimum(tl.maximum(position, 0), reach - 1)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0) // KEYS * KEYS
    tiles = tl.cdiv(last + 1 - first, KEYS)
    share = tl.cdiv(tiles, SPLITS)
    active = tl.cdiv(tiles, share)
    start = first + split * share * KEYS
    stop = tl.minimum(start + share * KEYS, last)  # the token's own key and value come from registers
    table = block_table + batch * table_stride
    column = tl.arange(0, WIDTH)
    if PDL:
        soon = start + tl.arange(0, KEYS)
        soon_page = tl.load(table + soon // PAGE, mask=soon < stop, other=0)
        soon_page = tl.minimum(tl.maximum(soon_page, 0), pages - 1).to(tl.int64)
        soon_slot = soon_page * page_stride + (soon % PAGE * KV_HEADS + kv_head) * DIM
        lines = tl.where(soon < stop, soon_slot, 0)[:, None] + (tl.arange(0, LINES) * (DIM // LINES))[None, :]
        _prefetch((k_cache + lines).to(tl.int64))
        _prefetch((v_cache + lines).to(tl.int64))
    wait_for_previous(PDL)
    if split < active:
        real = (tl.load(counts + batch) > 0) & (position == last)
        half: tl.constexpr = TURNED // 2
        turn = tl.minimum(tl.maximum(position, 0), max_position).to(tl.int64) * half
        heads = qkv + batch * ((GROUP + 2) * KV_HEADS * DIM)
        dtype: tl.constexpr = k_cache.dtype.element_ty
        mine = heads + kv_head * GROUP * DIM
        cos_at, sin_at = cos + turn, sin + turn
        queries = _turned(mine, q_norm, cos_at, sin_at, eps, half, DIM, NORM, ROPE, WIDTH, ROWS, GROUP).to(dtype)
        best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        acc = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        if split == active - 1:
            own = heads + (KV_HEADS * GROUP + kv_head) * DIM
            turned = _turned(own, k_norm, cos_at, sin_at, eps, half, DIM, NORM, ROPE, WIDTH, 1, 1)
            new_key = tl.sum(turned, axis=0).to(dtype)
            new_value = tl.load(own + KV_HEADS * DIM + column, mask=column < DIM, other=0.0)
            own_page = tl.minimum(tl.maximum(tl.load(table + last // PAGE), 0), pages - 1).to(tl.int64)
            own_slot = own_page * page_stride + (last % PAGE * KV_HEADS + kv_head) * DIM + column
            tl.store(k_cache + own_slot, new_key, mask=real & (column < DIM))
            tl.store(v_cache + own_slot, new_value, mask=real & (column < DIM))
            own_score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1)
            if CAPPED:
                best = capped(own_score * scale, softcap) * LOG2_E
            else:
                best = own_score * (scale * LOG2_E)
            total = total + 1.0
            acc = acc + new_value.to(tl.float32)[None, :]

        for at in range(start, stop, KEYS):
            key = at + tl.arange(0, KEYS)
            page = tl.load(table + key // PAGE, mask=key < stop, other=0)
            page = tl.minimum(tl.maximum(page, 0), pages - 1)  # a wrong table must not read past the cache
            slot = page.to(tl.int64) * page_stride + (key % PAGE * KV_HEADS + kv_head) * DIM
            valid = (key < stop)[:, None] & (column < DIM)[None, :]
            keys = tl.load(k_cache + slot[:, None] + column[None, :], mask=valid, other=0.0)
            values = tl.load(v_cache + slot[:, None] + column[None, :], mask=valid, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if CAPPED:
                scores = capped(scores * scale, softcap) * LOG2_E
            else:
                scores = scores * (scale * LOG2_E)
            seen = key < stop
            if WINDOW > 0:
                seen = seen & (key > position - WINDOW)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: exp2(-inf - 0) = 0, not NaN
            weight = tl.exp2(scores - base[:, None])
            keep = tl.exp2(best - base)
            total = total * keep + tl.sum(weight, axis=1)
            acc = tl.dot(weight.to(dtype), values, acc * keep[:, None], input_precision="ieee")
            best = higher

        row = tl.arange(0, ROWS)
        group = batch * KV_HEADS + kv_head
        if active == 1:
            if SINKS:
                logit = tl.load(sinks + kv_head * GROUP + row, mask=row < GROUP, other=0.0)
                best, total, keep = with_sink(best, total, logit)
                acc = acc * keep[:, None]
            result = tl.where(real, acc / total[:, None], 0.0).to(dtype)
            mask = (row < GROUP)[:, None] & (column < DIM)[None, :]
            tl.store(out + (group * GROUP + row)[:, None] * DIM + column[None, :], result, mask=mask)
        else:
            mine_at = (group * SPLITS + split) * GROUP + row
            tl.store(part + mine_at[:, None] * WIDTH + column[None, :], acc, mask=(row < GROUP)[:, None])
            tl.store(sums + mine_at, best, mask=row < GROUP)
            tl.store(sums + sum_stride + mine_at, total, mask=row < GROUP)
            tl.debug_barrier()  # the ticket is drawn by one thread and speaks for all
            if tl.atomic_add(tickets + group, 1, sem="acq_rel") == active - 1:
                cut = tl.arange(0, SPLITS)
                head = tl.arange(0, HEADS_P2)
                all_at = ((group * SPLITS + cut) * GROUP)[:, None] + head[None, :]
                there = (cut < active)[:, None] & (head < GROUP)[None, :]
                highs = tl.load(sums + all_at, mask=there, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(sums + sum_stride + all_at, mask=there, other=0.0, cache_modifier=".cg")
                high = tl.max(highs, axis=0)
                factor = tl.exp2(highs - tl.where(high == float("-inf"), 0.0, high)[None, :])
                whole = tl.sum(totals * factor, axis=0)
                parts = tl.load(
                    part + all_at[:, :, None] * WIDTH + column[None, None, :],
                    mask=there[:, :, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                merged = tl.sum(parts * factor[:, :, None], axis=0)
                if SINKS:
                    logit = tl.load(sinks + kv_head * GROUP + head, mask=head < GROUP, other=0.0)
                    high, whole, keep = with_sink(high, whole, logit)
                    merged = merged * keep[:, None]
                merged = merged / tl.where(whole == 0.0, 1.0, whole)[:, None]
                mask = (head < GROUP)[:, None] & (column < DIM)[None, :]
                place = (group * GROUP + head)[:, None] * DIM + column[None, :]
                tl.store(out + place, tl.where(real, merged, 0.0).to(dtype), mask=mask)
                tl.store(tickets + group, 0)


def paged_decode(call: PagedDecode) -> Tensor:
    """See `onegraph.ops.decode_attention.paged_decode`. Its launches let the next go where they always do. To
    several tokens a row the kernels of the two ops attend; where results must not depend on what runs beside them, one
    token after the other, their keys cut as those of one row."""
    call = call.values_normed(normed_values)
    if call.gated:
        return call.ungated(paged_decode, split_gates, gate_heads)
    tokens, alike = call.qkv.shape[1], invariant.on()
    if tokens > 1 and alike:
        return torch.cat([paged_decode(call.token(i)) for i in range(tokens)], dim=1)
    if tokens > 1:
        return call.composed(
            lambda *write: rope_cache_write(RopeCacheWrite(*write)),
            lambda *attention: paged_attention(PagedAttention(*attention)),
        )
    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, k_cache, v_cache, tickets, *numbers = call
    heads, scale, window, _, sinks, softcap, *_ = numbers
    batch = qkv.shape[0]
    pages, page_size, kv_heads, dim = k_cache.shape
    out = torch.empty((batch, 1, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    norm, rope = q_norm is not None, cos is not None
    group = heads // kv_heads
    width = max(16, triton.next_power_of_2(dim))
    reach = block_table.shape[1] * page_size
    keys = KEYS if width <= 128 else KEYS // 2 if width <= 256 else KEYS // 4
    span = reach if window == 0 else min(reach, window + keys)
    splits = min(max(PROGRAMS // triton.next_power_of_2((1 if alike else batch) * kv_heads), SPLITS[0]), SPLITS[1])
    if not alike:  # nor on how long texts may be
        splits = min(splits, triton.next_power_of_2(triton.cdiv(span, keys)))
    if width > 128:
        splits = min(splits, max(SPLITS[0], MERGED // (triton.next_power_of_2(group) * width)))
    cut = batch * heads * splits
    lines = triton.next_power_of_2(triton.cdiv(dim * k_cache.element_size(), 128))  # of a key, as the L2 has them
    part = torch.empty((cut, width), dtype=torch.float32, device=qkv.device)
    sums = torch.empty((2, cut), dtype=torch.float32, device=qkv.device)
    with on_device(qkv):
        _decode[(splits, kv_heads, batch)](
            qkv, q_norm if norm else qkv, k_norm if norm else qkv, eps, cos if rope else qkv, sin if rope else qkv,
            positions, counts, block_table, k_cache, v_cache, tickets, out if sinks is None else sinks, out, part,
            sums, scale, softcap, block_table.stride(0), reach, cos.shape[0] - 1 if rope else 0, pages,
            k_cache.stride(0), cut,
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, TURNED=2 * cos.shape[1] if rope else dim, WIDTH=width,
            PAGE=page_size, ROWS=max(16, triton.next_power_of_2(group)), HEADS_P2=triton.next_power_of_2(group),
            KEYS=keys, WINDOW=window, SPLITS=splits, LINES=lines, NORM=norm, ROPE=rope, SINKS=sinks is not None,
            CAPPED=softcap > 0, num_warps=WARPS,
            num_stages=STAGES if 4 * keys * width * k_cache.element_size() <= SHARED_BYTES else 3, **options(qkv),
        )  # fmt: skip
    return out
