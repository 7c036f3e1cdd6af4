"""Latent attention: some heads of a query against a split of its row's tokens on tensor cores, then the splits merged.

A token's key is rank + rope numbers, of which the first `rank` are its value too, so that each is loaded once; 16 heads
fill the rows of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import LatentAttention, LatentWrite
from onegraph.ops.triton.deepseek_index import places
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

ROWS = 16  # heads of a program: the smallest tile of the tensor cores
KEYS = 32  # tokens of a step
TILE = 128  # columns whose splits a program merges
PROGRAMS = 264  # that a decode step is split into, if it has tokens enough: two for each SM of an H200
MOST = 64  # splits of a query


@triton.jit(do_not_specialize=["length", "last", "table_stride", "reach"])
def _write(
    q, latent, norm, cos, sin, positions, counts, block_table, pool, out, eps, length, q_row, q_head, latent_row,
    last, table_stride, reach, pages,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head's rotated part of one token's query, or (head HEADS) the token's latent and key into their page."""
    let_next_start(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, step = row // length, (row % length).to(tl.int32)
    pair = tl.arange(0, PAIRS)
    there = pair < HALF
    one = 2 * pair if INTERLEAVED else pair
    two = 2 * pair + 1 if INTERLEAVED else pair + HALF
    token = tl.load(positions + batch) + step
    angle = tl.minimum(tl.maximum(token, 0), last) * HALF + pair
    c, s = tl.load(cos + angle, mask=there, other=0.0), tl.load(sin + angle, mask=there, other=0.0)
    column = tl.arange(0, WIDE)
    gain = tl.load(norm + column, mask=(column < RANK) & (head == HEADS), other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if head < HEADS:
        source = q + row * q_row + head * q_head + NOPE
        target = out + (row * HEADS + head) * (2 * HALF)
        real = True
    else:
        source = latent + row * latent_row + RANK
        real = (step < tl.load(counts + batch)) & (token >= 0) & (token < reach)
        place = places(block_table + batch * table_stride, tl.where(real, token, 0), real, pages, PAGE)
        target = pool + place.to(tl.int64) * (RANK + 2 * HALF) + RANK
        x = tl.load(latent + row * latent_row + column, mask=column < RANK, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / RANK + eps)) * gain
        tl.store(target - RANK + column, x.to(pool.dtype.element_ty), mask=(column < RANK) & real)
    first = tl.load(source + one, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + two, mask=there, other=0.0).to(tl.float32)
    tl.store(target + one, (first * c - second * s).to(out.dtype.element_ty), mask=there & real)
    tl.store(target + two, (second * c + first * s).to(out.dtype.element_ty), mask=there & real)


def latent_write(call: LatentWrite) -> Tensor:
    """See `onegraph.ops.latent_attention.latent_write`."""
    q, latent, norm, eps, cos, sin, positions, counts, block_table, pool, interleaved = call
    (batch, length, heads, width), half = q.shape, cos.shape[1]
    out = q.new_empty((batch, length, heads, 2 * half))
    if q.numel() == 0:
        return out
    q = q if q.stride(0) == length * q.stride(1) else q.contiguous()
    latent = latent if latent.stride(0) == length * latent.stride(1) else latent.contiguous()
    rank, page_size = norm.shape[0], pool.shape[1]
    with on_device(q):
        _write[(batch * length, heads + 1)](
            q, latent, norm, cos, sin, positions, counts, block_table, pool, out, eps, length, q.stride(1), q.stride(2),
            latent.stride(1), cos.shape[0] - 1, block_table.stride(0), block_table.shape[1] * page_size, pool.shape[0],
            HEADS=heads, NOPE=width - 2 * half, RANK=rank, WIDE=triton.next_power_of_2(rank), HALF=half,
            PAIRS=triton.next_power_of_2(half), PAGE=page_size, INTERLEAVED=interleaved, num_warps=1, **options(q),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["length", "table_stride", "capacity", "pages"])
def _attend(
    q, q_rope, pool, block_table, positions, counts, selected, part, part_max, part_sum, scale, q_row, q_head, length,
    table_stride, capacity, pages,
    HEADS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, TURNED: tl.constexpr,
    PAGE: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    split, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, step = row // length, (row % length).to(tl.int32)
    head = tile * ROWS + tl.arange(0, ROWS)
    column, turned = tl.arange(0, WIDE), tl.arange(0, TURNED)
    token = tl.load(positions + batch) + step
    wait_for_previous(PDL)
    many = tl.minimum(token + 1, capacity)
    if TOP_K > 0:
        many = TOP_K
    share = tl.cdiv(tl.cdiv(many, SPLITS), KEYS) * KEYS
    first = split * share
    stop = tl.where(step < tl.load(counts + batch), tl.minimum(first + share, many), 0)
    inside = (head < HEADS)[:, None] & (column < RANK)[None, :]
    aside = (head < HEADS)[:, None] & (turned < ROPE)[None, :]
    kind = q.dtype.element_ty
    content = tl.load(q + row * q_row + head[:, None] * q_head + column[None, :], mask=inside, other=0.0)
    place = tl.load(q_rope + (row * HEADS + head)[:, None] * ROPE + turned[None, :], mask=aside, other=0.0)
    best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    for begin in range(first, stop, KEYS):
        index = begin + tl.arange(0, KEYS)
        seen = index < stop
        if TOP_K > 0:
            source = tl.load(selected + row * TOP_K + index, mask=seen, other=-1)
            seen = seen & (source >= 0)
            source = tl.minimum(tl.maximum(source, 0), pages * PAGE - 1)
        else:
            source = places(block_table + batch * table_stride, index, seen, pages, PAGE)
        at = pool + source.to(tl.int64) * (RANK + ROPE)
        keys = tl.load(at[:, None] + column[None, :], mask=seen[:, None] & (column < RANK)[None, :], other=0.0)
        tails = tl.load(at[:, None] + RANK + turned[None, :], mask=seen[:, None] & (turned < ROPE)[None, :], other=0.0)
        scores = tl.dot(place, tl.trans(tails), input_precision="ieee")
        scores = tl.dot(content, tl.trans(keys), scores, input_precision="ieee") * (scale * 1.4426950408889634)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(kind), keys, acc * keep[:, None], input_precision="ieee")
        best = higher
    at = (row * HEADS + head) * SPLITS + split
    tl.store(part + at[:, None] * RANK + column[None, :], acc, mask=inside)
    tl.store(part_max + at, best, mask=head < HEADS)
    tl.store(part_sum + at, total, mask=head < HEADS)


@triton.jit(do_not_specialize=["length"])
def _finish(
    part, part_max, part_sum, counts, out, length,
    HEADS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MANY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one query's head: its splits by their log-sum-exp; zeros where it sees nothing."""
    let_next_start(PDL)
    at = tl.program_id(0).to(tl.int64)
    row = at // HEADS
    batch, step = row // length, (row % length).to(tl.int32)
    split, column = tl.arange(0, MANY), tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = split < SPLITS
    wait_for_previous(PDL)
    best = tl.load(part_max + at * SPLITS + split, mask=there, other=float("-inf"))
    total = tl.load(part_sum + at * SPLITS + split, mask=there, other=0.0)
    place = (at * SPLITS + split)[:, None] * RANK + column[None, :]
    acc = tl.load(part + place, mask=there[:, None] & (column < RANK)[None, :], other=0.0)
    highest = tl.max(best, axis=0)
    weight = tl.exp2(best - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(total * weight, axis=0)
    result = tl.sum(acc * weight[:, None], axis=0) / tl.where(whole > 0, whole, 1.0)
    result = tl.where(step < tl.load(counts + batch), result, 0.0)
    tl.store(out + at * RANK + column, result.to(out.dtype.element_ty), mask=column < RANK)


def latent_attention(call: LatentAttention) -> Tensor:
    """See `onegraph.ops.latent_attention.latent_attention`."""
    q, q_rope, pool, block_table, positions, counts, selected, scale = call
    (batch, length, heads, rank), rope, page_size = q.shape, q_rope.shape[3], pool.shape[1]
    out = torch.empty((batch, length, heads, rank), dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    q = q if q.stride(0) == length * q.stride(1) else q.contiguous()
    top_k = 0 if selected is None else selected.shape[2]
    capacity = block_table.shape[1] * page_size
    tiles = triton.cdiv(heads, ROWS)
    span = min(top_k or capacity, capacity)
    splits = max(1, min(PROGRAMS // (tiles * batch * length), triton.cdiv(span, KEYS), MOST))
    part = torch.empty((batch * length * heads, splits, rank), dtype=torch.float32, device=q.device)
    sums = torch.empty((2, batch * length * heads, splits), dtype=torch.float32, device=q.device)
    with on_device(q):
        opts = options(q)
        _attend[(splits, tiles, batch * length)](
            q, q_rope, pool, block_table, positions, counts, positions if selected is None else selected, part, sums[0],
            sums[1], scale, q.stride(1), q.stride(2), length, block_table.stride(0), capacity, pool.shape[0],
            HEADS=heads, RANK=rank, WIDE=max(16, triton.next_power_of_2(rank)), ROPE=rope,
            TURNED=max(16, triton.next_power_of_2(rope)), PAGE=page_size, TOP_K=top_k, ROWS=ROWS, KEYS=KEYS,
            SPLITS=splits, num_warps=4, num_stages=1 if span <= splits * KEYS else 2, **opts,
        )  # fmt: skip
        _finish[(batch * length * heads, triton.cdiv(rank, TILE))](
            part, sums[0], sums[1], counts, out, length,
            HEADS=heads, RANK=rank, TILE=TILE, SPLITS=splits, MANY=triton.next_power_of_2(splits), num_warps=2, **opts,
        )  # fmt: skip
    return out
