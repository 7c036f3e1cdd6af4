"""Attention to one latent vector a key: 16 heads of a query against a split of its keys, then the splits merged."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import DeepseekAttention
from onegraph.ops.triton.deepseek_compress import load_angles, load_rows, put, put_all, rows, store_row, turn_by
from onegraph.ops.triton.deepseek_index import places
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

ROWS = 16  # heads of a program: the smallest tile of the tensor cores
KEYS = 32  # keys of a step
TILE = 128  # columns whose splits a program merges
PROGRAMS = 256  # that a decode step is split into, if it has keys enough


@triton.jit
def unit_head(
    q, kv, norm, cos, sin, positions, q_out, kv_out, eps, row, head, length, q_stride, kv_stride, last,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token, or (head HEADS) its latent vector, by all of a program."""
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    latent = head == HEADS
    gain = tl.load(norm + column, mask=inside & latent, other=1.0).to(tl.float32)
    position = tl.load(positions + row // length) + (row % length).to(tl.int32)
    c, s = load_angles(cos, sin, position, last, tl.arange(0, WIDTH // 2), HALF, DIM // 2 - HALF)
    wait_for_previous(PDL)
    at = tl.where(latent, kv + row * kv_stride, q + row * q_stride + head * DIM)
    x = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    x = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / DIM + eps)) * gain
    x = turn_by(x, c, s, False)
    if latent:
        store_row(kv_out + row * ROW, x, column, inside, DIM, 2 * HALF)
    else:
        tl.store(q_out + (row * HEADS + head) * DIM + column, x.to(q_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "last"])
def _qkv(
    q, kv, norm, cos, sin, positions, q_out, kv_out, eps, length, q_stride, kv_stride, last,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    unit_head(
        q, kv, norm, cos, sin, positions, q_out, kv_out, eps, tl.program_id(0).to(tl.int64), tl.program_id(1), length,
        q_stride, kv_stride, last, HEADS, DIM, WIDTH, HALF, ROW, PDL,
    )  # fmt: skip


def qkv_out(q: Tensor, kv: Tensor, half: int, fp8: bool) -> tuple[Tensor, Tensor]:
    """What `deepseek_qkv` fills."""
    (batch, length, width), dim = q.shape, kv.shape[2]
    out = q.new_empty((batch, length, width // dim, dim))
    if not fp8:
        return out, kv.new_empty((batch, length, dim))
    # codes, bfloat16 rotary part, a scale for 64 codes, up to a multiple of 16
    row = triton.cdiv(dim + 2 * half + triton.cdiv(dim - 2 * half, 64), 16) * 16
    return out, kv.new_zeros((batch, length, row), dtype=torch.uint8)


def deepseek_qkv(
    q: Tensor, kv: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, fp8: bool
) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.deepseek_attention.deepseek_qkv`."""
    batch, length, dim, half = *q.shape[:2], kv.shape[2], cos.shape[1]
    out, latent = qkv_out(q, kv, half, fp8)
    if batch * length == 0:
        return out, latent
    q, kv, heads = rows(q), rows(kv), out.shape[2]
    with on_device(q):
        _qkv[(batch * length, heads + 1)](
            q, kv, norm, cos, sin, positions, out, latent, eps, length, q.stride(1), kv.stride(1), cos.shape[0] - 1,
            HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(dim), HALF=half, ROW=latent.shape[2], num_warps=1,
            **options(q),
        )  # fmt: skip
    return out, latent


@triton.jit(do_not_specialize=["length", "table_stride", "capacity", "pages"])
def _attend(
    q, kv, ring, slots, positions, counts, block_table, entries, selected, part, part_max, part_sum, scale,
    length, table_stride, capacity, pages,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr,
    RING: tl.constexpr, PER_PAGE: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, WRITE: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    split, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, step = row // length, (row % length).to(tl.int32)
    head = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    start_at, slot = tl.load(positions + batch), tl.load(slots + batch).to(tl.int64)
    token = start_at + step
    wait_for_previous(PDL)
    count = tl.load(counts + batch)
    # Keys are numbered: the window's from token - WINDOW + 1 on, then entries.
    many = WINDOW
    if RATIO > 0:
        ready = tl.minimum((token + 1) // RATIO, capacity)
        many += tl.minimum(ready, TOP_K) if TOP_K > 0 else ready
    share = tl.cdiv(tl.cdiv(many, SPLITS), KEYS) * KEYS
    first = split * share
    stop = tl.where(step < count, tl.minimum(first + share, many), 0)
    place = (row * HEADS + head) * SPLITS + split
    inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + (row * HEADS + head)[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for begin in range(first, stop, KEYS):
        index = begin + tl.arange(0, KEYS)
        behind = token - WINDOW + 1 + index
        near = index < WINDOW
        seen = (index < stop) & ((behind >= 0) | (index >= WINDOW))
        own = behind >= start_at
        at = tl.where(own, kv + (batch * length + behind - start_at) * ROW, ring + (slot * RING + behind % RING) * ROW)
        if RATIO > 0:
            entry = index - WINDOW
            far = (index >= WINDOW) & (index < stop)
            if TOP_K > 0:
                source = tl.load(selected + row * TOP_K + entry, mask=far, other=0)
                seen = seen & ((source >= 0) | near)
                source = tl.minimum(tl.maximum(source, 0), pages * PER_PAGE - 1)
            else:
                source = places(block_table + batch * table_stride, entry, far, pages, PER_PAGE)
            at = tl.where(near, at, entries + source.to(tl.int64) * ROW)
        valid = seen[:, None] & (column < DIM)[None, :]
        keys = load_rows(at, column, valid, DIM, 2 * HALF, q.dtype.element_ty)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * 1.4426950408889634)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(keys.dtype), keys, acc * keep[:, None], input_precision="ieee")
        best = higher
    tl.store(part + place[:, None] * DIM + column[None, :], acc, mask=inside)
    tl.store(part_max + place, best, mask=head < HEADS)
    tl.store(part_sum + place, total, mask=head < HEADS)
    # A decode step's token takes the place of the one RING before it, which the query no longer sees.
    if WRITE and (split == 0) & (tile == 0):
        put(kv, ring, slot, start_at, count > 0, batch, ROW, RING, ROW, WIDTH)


@triton.jit(do_not_specialize=["length", "last"])
def _finish(
    part, part_max, part_sum, sinks, cos, sin, positions, counts, out, length, last,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one query and head: splits by their log-sum-exp, the sink in the denominator, RoPE undone."""
    let_next_start(PDL)
    at = tl.program_id(0).to(tl.int64)
    row, head = at // HEADS, at % HEADS
    batch, step = row // length, (row % length).to(tl.int32)
    split = tl.arange(0, WIDE)
    there = split < SPLITS
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    sink = tl.load(sinks + head) * 1.4426950408889634
    pair = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
    c, s = load_angles(cos, sin, tl.load(positions + batch) + step, last, pair, HALF, DIM // 2 - HALF)
    wait_for_previous(PDL)
    best = tl.load(part_max + at * SPLITS + split, mask=there, other=float("-inf"))
    total = tl.load(part_sum + at * SPLITS + split, mask=there, other=0.0)
    place = (at * SPLITS + split)[:, None] * DIM + column[None, :]
    acc = tl.load(part + place, mask=there[:, None] & (column < DIM)[None, :], other=0.0)
    base = tl.maximum(tl.max(best, axis=0), sink)
    weight = tl.exp2(best - base)
    result = tl.sum(acc * weight[:, None], axis=0) / (tl.sum(total * weight, axis=0) + tl.exp2(sink - base))
    real = step < tl.load(counts + batch)
    result = tl.where(real, result, 0.0)
    tl.store(out + at * DIM + column, turn_by(result, c, s, True).to(out.dtype.element_ty), mask=column < DIM)


def deepseek_attention(call: DeepseekAttention) -> Tensor:
    """See `onegraph.ops.deepseek_attention.deepseek_attention`."""
    q, kv, ring, sinks, cos, sin, slots, positions, counts, block_table, entries, selected, ratio, window, scale = call
    batch, length, heads, dim = q.shape
    out = torch.empty_like(q)
    if q.numel() == 0:
        return out
    pool = ring if entries is None else entries
    per_page = 1 if entries is None else entries.shape[1]
    capacity = block_table.shape[1] * per_page
    top_k = 0 if selected is None else selected.shape[2]
    tiles = triton.cdiv(heads, ROWS)
    span = window + (0 if entries is None else min(top_k or capacity, capacity))
    splits = max(1, min(PROGRAMS // (tiles * batch * length), triton.cdiv(span, KEYS)))
    part = torch.empty((batch * length * heads, splits, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((2, batch * length * heads, splits), dtype=torch.float32, device=q.device)
    width = max(16, triton.next_power_of_2(dim))
    with on_device(q):
        opts = options(q)
        _attend[(splits, tiles, batch * length)](
            q, kv, ring, slots, positions, counts, block_table, pool, positions if selected is None else selected,
            part, sums[0], sums[1], scale, length, block_table.stride(0), capacity, pool.shape[0],
            HEADS=heads, DIM=dim, WIDTH=width, WINDOW=window, RATIO=0 if entries is None else ratio,
            RING=ring.shape[1], PER_PAGE=per_page, TOP_K=top_k, ROWS=ROWS, KEYS=KEYS, SPLITS=splits, WRITE=length == 1,
            ROW=ring.shape[2], HALF=cos.shape[1], num_warps=4, num_stages=1 if span <= splits * KEYS else 2, **opts,
        )  # fmt: skip
        _finish[(batch * length * heads, triton.cdiv(dim, TILE))](
            part, sums[0], sums[1], sinks, cos, sin, positions, counts, out, length, cos.shape[0] - 1,
            HEADS=heads, DIM=dim, TILE=TILE, HALF=cos.shape[1], SPLITS=splits, WIDE=triton.next_power_of_2(splits),
            num_warps=2, **opts,
        )  # fmt: skip
        if length > 1:
            put_all(kv, ring, slots, positions, counts)
    return out
