"""Latent attention: some heads of a query against a split of its row's tokens on tensor cores, then the splits merged.

A token's key is rank + rope numbers, of which the first `rank` are its value too, so that each is loaded once. A latent
is two halves, so that a byte of TurboQuant's codes has numbers of both. What a row of codes is multiplied by goes to
scores and weights.

Programs of one split read the same tokens, each for some heads. With 16 heads a program, 128 heads read every token
eight times from the L2, which at 64k tokens took six times as long as memory does; 64 heads read it twice, and fill
Hopper's tile of 64 rows.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import LatentAttention, LatentWrite
from onegraph.ops.triton.deepseek_compress import from_e4m3, to_e4m3
from onegraph.ops.triton.deepseek_index import places
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

TILE = 128  # columns whose splits a program merges
MOST = 64  # splits of a query
H200 = 132, True  # as the interpreter cuts
SCALES = {"norm": 0, "matched": 1, "unbiased": 2}


@triton.jit
def _turned(x, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Sylvester's Hadamard matrix of 2^STEPS = SIZE times x, not normalised: each step takes the lowest bit of the
    index and makes it the highest."""
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
        x = tl.reshape(tl.trans(tl.join(even + odd, even - odd)), (SIZE,))
    return x


@triton.jit
def _level(x, one, three, five):
    """An odd polynomial: see `formats/latent_kv.py`."""
    square = x * x
    return x * (one + square * (three + square * five))


@triton.jit
def _store_plane(to, values, RANK: tl.constexpr, WIDTH: tl.constexpr, real):
    """Values below 2^WIDTH as a plane of `formats/latent_kv.py`."""
    BYTES: tl.constexpr = RANK * WIDTH // 8
    part = tl.arange(0, 8 // WIDTH)[:, None] * WIDTH
    packed = tl.sum(tl.reshape(values, (8 // WIDTH, BYTES)) << part, axis=0)
    tl.store(to + tl.arange(0, BYTES), packed.to(tl.uint8), mask=real)


@triton.jit
def _store_latent(
    to, x, column, curve, real, RANK: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr,
    SCALE: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """x float32 [WIDE], 0 from RANK on, at `to`: numbers, or codes and their factor."""
    if BITS == 0:
        tl.store(to + column, x.to(to.dtype.element_ty), mask=(column < RANK) & real)
    else:
        if BITS == 8:
            factor = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30) * (1 / 448.0)
            tl.store(to + column, to_e4m3(x / factor).to(tl.uint8), mask=(column < RANK) & real)
        else:
            y = _turned(x, WIDE, STEPS) * RANK**-0.5
            factor = tl.sqrt_rn(tl.sum(y * y, axis=0))
            unit = y / tl.maximum(factor, 1e-30)
            rank = tl.zeros((WIDE,), dtype=tl.int32)
            one, three, five = tl.load(curve), tl.load(curve + 1), tl.load(curve + 2)
            below = _level(0.5, one, three, five)
            level = tl.zeros((WIDE,), dtype=tl.float32) + below
            for i in tl.static_range(1, 1 << (BITS - 1)):
                above = _level(i + 0.5, one, three, five)
                beyond = tl.abs(unit) > (above + below) * 0.5
                rank += beyond.to(tl.int32)
                level = tl.where(beyond, above, level)
                below = above
            # HALF + rank or HALF - 1 - rank, without a sum: ptxas 12.8 drops the constant of two 16-bit sums in one.
            HALF: tl.constexpr = 1 << (BITS - 1)
            code = rank ^ tl.where(unit < 0, HALF - 1, HALF)
            if BITS == 3:
                _store_plane(to, code & 3, RANK, 2, real)
                _store_plane(to + RANK // 4, code >> 2, RANK, 1, real)
            else:
                _store_plane(to, code, RANK, BITS, real)
            if SCALE == 1:
                factor = factor / tl.sqrt_rn(tl.sum(level * level, axis=0))
            elif SCALE == 2:
                factor = factor / tl.maximum(tl.sum(tl.abs(unit) * level, axis=0), 1e-3)
        place = (to + RANK * BITS // 8 + 2 * ROPE).to(tl.pointer_type(tl.float32))
        tl.store(place, factor, mask=real)


@triton.jit
def _store_turned(to, first, second, one, two, mask):
    tl.store(to + one, first.to(to.dtype.element_ty), mask=mask)
    tl.store(to + two, second.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length", "last", "table_stride", "reach"])
def _write(
    q, latent, norm, cos, sin, positions, counts, block_table, pool, curve, out, eps, length, q_row, q_head, latent_row,
    last, table_stride, reach, pages,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
    HALF: tl.constexpr, PAIRS: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr,
    SCALE: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
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
    else:
        source = latent + row * latent_row + RANK
    first = tl.load(source + one, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + two, mask=there, other=0.0).to(tl.float32)
    # As the queries' type has them, whatever the pool's is.
    turned = (first * c - second * s).to(out.dtype.element_ty)
    across = (second * c + first * s).to(out.dtype.element_ty)
    if head < HEADS:
        _store_turned(out + (row * HEADS + head) * (2 * HALF), turned, across, one, two, there)
    else:
        real = (step < tl.load(counts + batch)) & (token >= 0) & (token < reach)
        place = places(block_table + batch * table_stride, tl.where(real, token, 0), real, pages, PAGE)
        target = pool + place.to(tl.int64) * ROW
        x = tl.load(latent + row * latent_row + column, mask=column < RANK, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / RANK + eps)) * gain
        _store_latent(target, x, column, curve, real, RANK, WIDE, STEPS, BITS, SCALE, 2 * HALF)
        if BITS == 0:
            _store_turned(target + RANK, turned, across, one, two, there & real)
        else:
            key = (target + RANK * BITS // 8).to(tl.pointer_type(tl.bfloat16))
            _store_turned(key, turned, across, one, two, there & real)


def latent_write(call: LatentWrite) -> Tensor:
    """See `onegraph.ops.latent_attention.latent_write`."""
    q, latent, norm, eps, cos, sin, positions, counts, block_table, pool, interleaved, bits, curve, kind = call
    (batch, length, heads, width), half = q.shape, cos.shape[1]
    out = q.new_empty((batch, length, heads, 2 * half))
    if q.numel() == 0:
        return out
    q = q if q.stride(0) == length * q.stride(1) else q.contiguous()
    latent = latent if latent.stride(0) == length * latent.stride(1) else latent.contiguous()
    rank, page_size = norm.shape[0], pool.shape[1]
    wide = triton.next_power_of_2(rank)
    with on_device(q):
        _write[(batch * length, heads + 1)](
            q, latent, norm, cos, sin, positions, counts, block_table, pool, norm if curve is None else curve, out,
            eps, length, q.stride(1), q.stride(2), latent.stride(1), cos.shape[0] - 1, block_table.stride(0),
            block_table.shape[1] * page_size, pool.shape[0],
            HEADS=heads, NOPE=width - 2 * half, RANK=rank, WIDE=wide, STEPS=wide.bit_length() - 1, HALF=half,
            PAIRS=triton.next_power_of_2(half), PAGE=page_size, ROW=pool.shape[2], BITS=bits,
            SCALE=SCALES[kind], INTERLEAVED=interleaved, num_warps=1, **options(q),
        )  # fmt: skip
    return out


@triton.jit
def _plane(at, byte, shift, seen, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """Of rows of codes, a plane's part in the codes of each half of the latent."""
    packed = tl.load(at[:, None] + FROM + byte[None, :], mask=seen[:, None], other=0).to(tl.int32) >> shift[None, :]
    return packed & ((1 << WIDTH) - 1), (packed >> 4) & ((1 << WIDTH) - 1)


@triton.jit
def _planes(at, column, seen, FROM: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr):
    BYTES: tl.constexpr = RANK * WIDTH // 8
    return _plane(at, column % BYTES, column // BYTES * WIDTH, seen, FROM, WIDTH)


@triton.jit
def _halves(at, column, seen, one, three, five, RANK: tl.constexpr, BITS: tl.constexpr, kind: tl.constexpr):
    """Rows of the pool, codes without factor: the latents' first columns and those a half behind [KEYS, WIDE / 2]."""
    BEHIND: tl.constexpr = column.shape[0]
    if BITS == 0 or BITS == 8:
        near = seen[:, None] & (column < RANK)[None, :]
        far = seen[:, None] & (column + BEHIND < RANK)[None, :]
        first = tl.load(at[:, None] + column[None, :], mask=near, other=0)
        second = tl.load(at[:, None] + (column + BEHIND)[None, :], mask=far, other=0)
        if BITS == 8:
            first = from_e4m3(first.to(tl.int32)).to(kind)
            second = from_e4m3(second.to(tl.int32)).to(kind)
        return first, second
    else:
        if BITS == 3:
            first, second = _planes(at, column, seen, 0, RANK, 2)
            high, higher = _planes(at, column, seen, RANK // 4, RANK, 1)
            first, second = first | (high << 2), second | (higher << 2)
        else:
            first, second = _planes(at, column, seen, 0, RANK, BITS)
        MIDDLE: tl.constexpr = ((1 << BITS) - 1) / 2
        first = _level(first.to(tl.float32) - MIDDLE, one, three, five)
        return first.to(kind), _level(second.to(tl.float32) - MIDDLE, one, three, five).to(kind)


@triton.jit(do_not_specialize=["length", "table_stride", "capacity", "pages"])
def _attend(
    q, q_rope, pool, block_table, positions, counts, selected, curve, part, part_max, part_sum, scale, q_row, q_head,
    length, table_stride, capacity, pages,
    HEADS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, TURNED: tl.constexpr,
    PAGE: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    split, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, step = row // length, (row % length).to(tl.int32)
    head = tile * ROWS + tl.arange(0, ROWS)
    HALF: tl.constexpr = WIDE // 2
    column, turned = tl.arange(0, HALF), tl.arange(0, TURNED)
    token = tl.load(positions + batch) + step
    wait_for_previous(PDL)
    many = tl.minimum(token + 1, capacity)
    if TOP_K > 0:
        many = TOP_K
    share = tl.cdiv(tl.cdiv(many, SPLITS), KEYS) * KEYS
    first = split * share
    stop = tl.where(step < tl.load(counts + batch), tl.minimum(first + share, many), 0)
    near = (head < HEADS)[:, None] & (column < RANK)[None, :]
    far = (head < HEADS)[:, None] & (column + HALF < RANK)[None, :]
    aside = (head < HEADS)[:, None] & (turned < ROPE)[None, :]
    kind: tl.constexpr = q.dtype.element_ty
    one, three, five = 0.0, 0.0, 0.0
    if BITS > 0 and BITS < 8:
        one, three, five = tl.load(curve), tl.load(curve + 1), tl.load(curve + 2)
    asked = q + row * q_row + head[:, None] * q_head + column[None, :]
    query, behind = tl.load(asked, mask=near, other=0.0), tl.load(asked + HALF, mask=far, other=0.0)
    place = tl.load(q_rope + (row * HEADS + head)[:, None] * ROPE + turned[None, :], mask=aside, other=0.0)
    best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, HALF), dtype=tl.float32)
    rest = tl.zeros((ROWS, HALF), dtype=tl.float32)
    for begin in range(first, stop, KEYS):
        index = begin + tl.arange(0, KEYS)
        seen = index < stop
        if TOP_K > 0:
            source = tl.load(selected + row * TOP_K + index, mask=seen, other=-1)
            seen = seen & (source >= 0)
            source = tl.minimum(tl.maximum(source, 0), pages * PAGE - 1)
        else:
            source = places(block_table + batch * table_stride, index, seen, pages, PAGE)
        at = pool + source.to(tl.int64) * ROW
        keys, more = _halves(at, column, seen, one, three, five, RANK, BITS, kind)
        tail = at + RANK if BITS == 0 else (at + RANK * BITS // 8).to(tl.pointer_type(tl.bfloat16))
        tails = tl.load(tail[:, None] + turned[None, :], mask=seen[:, None] & (turned < ROPE)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(behind, tl.trans(more), scores, input_precision="ieee")
        if BITS > 0:
            factor = tl.load((at + RANK * BITS // 8 + 2 * ROPE).to(tl.pointer_type(tl.float32)), mask=seen, other=0.0)
            scores = scores * factor[None, :]
        scores = tl.dot(place, tl.trans(tails.to(kind)), scores, input_precision="ieee") * (scale * 1.4426950408889634)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weight, axis=1)
        if BITS > 0:
            weight = weight * factor[None, :]
        weight = weight.to(kind)
        acc = tl.dot(weight, keys, acc * keep[:, None], input_precision="ieee")
        rest = tl.dot(weight, more, rest * keep[:, None], input_precision="ieee")
        best = higher
    mine = (row * HEADS + head) * SPLITS + split
    to, some = part + mine[:, None] * RANK + column[None, :], stop > first  # of most splits of a short row: no
    tl.store(to, acc, mask=near & some)
    tl.store(to + HALF, rest, mask=far & some)
    tl.store(part_max + mine, best, mask=head < HEADS)
    tl.store(part_sum + mine, total, mask=head < HEADS)


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
    some = (there & (best > float("-inf")))[:, None]
    acc = tl.load(part + place, mask=some & (column < RANK)[None, :], other=0.0)
    highest = tl.max(best, axis=0)
    weight = tl.exp2(best - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(total * weight, axis=0)
    result = tl.sum(acc * weight[:, None], axis=0) / tl.where(whole > 0, whole, 1.0)
    result = tl.where(step < tl.load(counts + batch), result, 0.0)
    tl.store(out + at * RANK + column, result.to(out.dtype.element_ty), mask=column < RANK)


class Tiling(NamedTuple):
    """Heads of a program, tokens of its step, its warps and stages of loads; programs that a decode step is split into
    if it has tokens enough."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int


@lru_cache(maxsize=64)
def _device(index: int) -> tuple[int, bool]:
    """How many SMs, and whether they are Hopper's."""
    found = torch.cuda.get_device_properties(index)
    return found.multi_processor_count, found.major == 9


def tiling(heads: int, rank: int, itemsize: int, sms: int, hopper: bool) -> Tiling:
    """Of three stages two hold keys, and one what says where they lie. Blackwell's tile of 64 rows takes more shared
    memory than there is."""
    if itemsize > 2:
        return Tiling(16, 16, 8, 2, 2 * sms)
    if heads <= 16 or not hopper:
        return Tiling(16, 32, 4, 3, 2 * sms)
    return Tiling(64, 64, 8, 3, sms) if heads > 32 else Tiling(32, 32 if rank > 256 else 64, 8, 3, sms)


def latent_attention(call: LatentAttention) -> Tensor:
    """See `onegraph.ops.latent_attention.latent_attention`."""
    q, q_rope, pool, block_table, positions, counts, selected, scale, bits, curve = call
    (batch, length, heads, rank), rope, page_size = q.shape, q_rope.shape[3], pool.shape[1]
    out = torch.empty((batch, length, heads, rank), dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    q = q if q.stride(0) == length * q.stride(1) else q.contiguous()
    top_k = 0 if selected is None else selected.shape[2]
    capacity = block_table.shape[1] * page_size
    cut = tiling(heads, rank, q.element_size(), *(_device(q.device.index) if q.is_cuda else H200))
    tiles = triton.cdiv(heads, cut.rows)
    span = min(top_k or capacity, capacity)
    splits = max(1, min(cut.programs // (tiles * batch * length), triton.cdiv(span, cut.keys), MOST))
    part = torch.empty((batch * length * heads, splits, rank), dtype=torch.float32, device=q.device)
    sums = torch.empty((2, batch * length * heads, splits), dtype=torch.float32, device=q.device)
    with on_device(q):
        opts = options(q)
        _attend[(splits, tiles, batch * length)](
            q, q_rope, pool, block_table, positions, counts, positions if selected is None else selected,
            sums if curve is None else curve, part, sums[0], sums[1], scale, q.stride(1), q.stride(2), length,
            block_table.stride(0), capacity, pool.shape[0],
            HEADS=heads, RANK=rank, WIDE=max(32, triton.next_power_of_2(rank)), ROPE=rope,
            TURNED=max(16, triton.next_power_of_2(rope)), PAGE=page_size, ROW=pool.shape[2],
            BITS=bits, TOP_K=top_k, ROWS=cut.rows, KEYS=cut.keys, SPLITS=splits, num_warps=cut.warps,
            num_stages=1 if span <= splits * cut.keys else cut.stages, **opts,
        )  # fmt: skip
        _finish[(batch * length * heads, triton.cdiv(rank, TILE))](
            part, sums[0], sums[1], counts, out, length,
            HEADS=heads, RANK=rank, TILE=TILE, SPLITS=splits, MANY=triton.next_power_of_2(splits), num_warps=2, **opts,
        )  # fmt: skip
    return out
