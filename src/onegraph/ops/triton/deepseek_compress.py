"""The compressor: one program for each entry that a call could complete, which returns at once where it does not."""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def turn(value, cos, sin, position, last, pair, HALF: tl.constexpr, FIRST: tl.constexpr, BACK: tl.constexpr):
    """Interleaved RoPE of value [N], whose pairs from FIRST on rotate by the angles of `position`; BACK undoes it."""
    at = tl.minimum(tl.maximum(position, 0), last).to(tl.int64) * HALF + pair - FIRST
    rotates = (pair >= FIRST) & (pair < FIRST + HALF)
    c = tl.load(cos + at, mask=rotates, other=1.0)
    s = tl.load(sin + at, mask=rotates, other=0.0)
    if BACK:
        s = -s
    even, odd = tl.split(tl.reshape(value, (value.shape[0] // 2, 2)))
    return tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (value.shape[0],))


@triton.jit(do_not_specialize=["length", "table_stride", "capacity", "last"])
def _compress(
    states, ring, bias, norm, cos, sin, slots, positions, counts, block_table, entries, eps,
    length, row_stride, table_stride, capacity, last,
    RATIO: tl.constexpr, REACH: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, PER_PAGE: tl.constexpr, TOKENS: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    wait_for_previous(PDL)
    position, count = tl.load(positions + batch), tl.load(counts + batch)
    slot = tl.load(slots + batch).to(tl.int64)
    entry = position // RATIO + tl.program_id(0)
    page = tl.load(block_table + batch * table_stride + entry // PER_PAGE, mask=entry < capacity, other=0)
    if ((entry + 1) * RATIO <= position + count) & (page > 0):
        best = tl.full((WIDTH,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((WIDTH,), dtype=tl.float32)
        acc = tl.zeros((WIDTH,), dtype=tl.float32)
        for start in range(0, REACH, TOKENS):
            k = start + tl.arange(0, TOKENS)
            token = entry * RATIO + RATIO - REACH + k
            real = (token >= 0) & (k < REACH)
            # Own window: the last DIM columns; the window before (overlap): the first.
            shift = tl.where(k < REACH - RATIO, 0, WIDE - DIM)
            here = token >= position
            now = states + (batch * length + token - position) * row_stride
            past = ring + (slot * REACH + token % REACH) * (2 * WIDE)
            at = tl.where(here, now, past) + shift
            mask = real[:, None] & inside[None, :]
            content = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
            score = tl.load(at[:, None] + WIDE + column[None, :], mask=mask, other=0.0).to(tl.float32)
            row = (k % RATIO) * WIDE + shift
            score += tl.load(bias + row[:, None] + column[None, :], mask=mask, other=0.0)
            score = tl.where(real[:, None], score, float("-inf"))
            higher = tl.maximum(best, tl.max(score, axis=0))
            floor = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp(score - floor[None, :])
            keep = tl.exp(best - floor)
            total = total * keep + tl.sum(weight, axis=0)
            acc = acc * keep + tl.sum(weight * content, axis=0)
            best = higher
        value = acc / total
        value = tl.where(inside, value, 0.0)
        unit = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / DIM + eps)
        value = value * unit * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
        pair = tl.arange(0, WIDTH // 2)
        value = turn(value, cos, sin, entry * RATIO, last, pair, HALF, DIM // 2 - HALF, False)
        place = (page.to(tl.int64) * PER_PAGE + entry % PER_PAGE) * DIM
        tl.store(entries + place + column, value.to(entries.dtype.element_ty), mask=inside)
    # A decode step's token takes the place of the one REACH before it, which no entry of this call sees.
    if WRITE:
        put(states, ring, slot, position, count > 0, batch, row_stride, REACH, 2 * WIDE, 1024)


@triton.jit
def put(value, ring, slot, position, real, row, row_stride, SIZE: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """value[row] to ring[slot, position mod SIZE], if it is real and has an owner."""
    target = ring + (slot * SIZE + position % SIZE) * WIDE
    for start in range(0, WIDE, TILE):
        column = start + tl.arange(0, TILE)
        mask = (column < WIDE) & real & (slot > 0)
        tl.store(target + column, tl.load(value + row * row_stride + column, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["length"])
def _put_all(
    value, ring, slots, positions, counts, length, row_stride,
    SIZE: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    step, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    count = tl.load(counts + batch)
    real = (step < count) & (step >= count - SIZE)
    slot, position = tl.load(slots + batch).to(tl.int64), tl.load(positions + batch) + step
    put(value, ring, slot, position, real, batch * length + step, row_stride, SIZE, WIDE, TILE)


def put_all(value: Tensor, ring: Tensor, slots: Tensor, positions: Tensor, counts: Tensor) -> None:
    """The latest tokens of value [B, Q, W], rows at one stride, into ring [slots, R, W]."""
    batch, length, wide = value.shape
    _put_all[(length, batch)](
        value, ring, slots, positions, counts, length, value.stride(1),
        SIZE=ring.shape[1], WIDE=wide, TILE=min(1024, triton.next_power_of_2(wide)), num_warps=4, **options(value),
    )  # fmt: skip


def rows(x: Tensor) -> Tensor:
    """x [B, Q, W] itself if one stride leads from each row to the next, else a contiguous copy."""
    return x if x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


def deepseek_compress(
    states: Tensor,
    ring: Tensor,
    bias: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    entries: Tensor,
) -> None:
    """See `onegraph.ops.deepseek_compress.deepseek_compress`."""
    (batch, length, _), (ratio, wide), (per_page, dim) = states.shape, bias.shape, entries.shape[1:]
    if batch * length == 0:
        return
    states = rows(states)
    with on_device(states):
        _compress[(triton.cdiv(length, ratio), batch)](
            states, ring, bias, norm, cos, sin, slots, positions, counts, block_table, entries, eps,
            length, states.stride(1), block_table.stride(0), block_table.shape[1] * per_page, cos.shape[0] - 1,
            RATIO=ratio, REACH=ring.shape[1], WIDE=wide, DIM=dim, WIDTH=triton.next_power_of_2(dim),
            HALF=cos.shape[1], PER_PAGE=per_page, TOKENS=min(16, triton.next_power_of_2(ring.shape[1])),
            WRITE=length == 1, num_warps=8, **options(states),
        )  # fmt: skip
        if length > 1:
            put_all(states, ring, slots, positions, counts)
