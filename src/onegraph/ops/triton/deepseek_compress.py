"""The compressor: one program for each entry that a call could complete, which returns at once where it does not."""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import DeepseekCompress
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def turn(value, cos, sin, position, last, pair, HALF: tl.constexpr, FIRST: tl.constexpr, BACK: tl.constexpr):
    """Interleaved RoPE of value [N], whose pairs from FIRST on rotate by the angles of `position`; BACK undoes it."""
    c, s = load_angles(cos, sin, position, last, pair, HALF, FIRST)
    return turn_by(value, c, s, BACK)


@triton.jit
def load_angles(cos, sin, position, last, pair, HALF: tl.constexpr, FIRST: tl.constexpr):
    at = tl.minimum(tl.maximum(position, 0), last).to(tl.int64) * HALF + pair - FIRST
    rotates = (pair >= FIRST) & (pair < FIRST + HALF)
    return tl.load(cos + at, mask=rotates, other=1.0), tl.load(sin + at, mask=rotates, other=0.0)


@triton.jit
def turn_by(value, c, s, BACK: tl.constexpr):
    if BACK:
        s = -s
    even, odd = tl.split(tl.reshape(value, (value.shape[0] // 2, 2)))
    return tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (value.shape[0],))


@triton.jit
def to_e4m3(value):
    """Float32 to the nearest code, int32; what exceeds 448 becomes that."""
    # E4M3's exponent and mantissa are float32's with another bias: round to the three bits that stay.
    magnitude = tl.minimum(tl.abs(value), 448.0)
    coarse = (magnitude + 0.0).to(tl.int32, bitcast=True)
    normal = (coarse + 0x7FFFF + ((coarse >> 20) & 1)) >> 20
    normal -= (127 - 7) << 3
    # Below 2^-6 the steps are 2^-9: adding 2^14 leaves them as the last bits, rounded to nearest even.
    steps = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0.015625, steps, normal) | tl.where(value < 0, 128, 0)


@triton.jit
def from_e4m3(code):
    """Codes int32 as float32."""
    # The bits in float32's places stand for 2^-120 of the number, subnormals too.
    bits = ((code & 127) << 20) | ((code & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def store_row(to, value, column, inside, DIM: tl.constexpr, ROPE: tl.constexpr):
    """value float32 [N] at `to`: a row of to's type, or of FP8 where that is uint8 (formats/deepseek_kv.py)."""
    if to.dtype.element_ty == tl.uint8:
        PLAIN: tl.constexpr = DIM - ROPE
        BLOCK: tl.constexpr = 64 if value.shape[0] >= 64 else value.shape[0]
        BLOCKS: tl.constexpr = value.shape[0] // BLOCK
        plain = column < PLAIN
        top = tl.max(tl.reshape(tl.where(plain, tl.abs(value), 0.0), (BLOCKS, BLOCK)), axis=1)
        bits = (top * (1 / 448.0)).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, 1), 254)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        small = tl.reshape(tl.reshape(value, (BLOCKS, BLOCK)) / scale[:, None], (value.shape[0],))
        code = to_e4m3(small)
        tl.store(to + column, code.to(tl.uint8), mask=plain)
        wide = (to + PLAIN).to(tl.pointer_type(tl.bfloat16))
        tl.store(wide + column - PLAIN, value.to(tl.bfloat16), mask=inside & (column >= PLAIN))
        block = tl.arange(0, BLOCKS)
        tl.store(to + PLAIN + 2 * ROPE + block, exponent.to(tl.uint8), mask=block * BLOCK < PLAIN)
    else:
        tl.store(to + column, value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def load_rows(at, column, valid, DIM: tl.constexpr, ROPE: tl.constexpr, kind: tl.constexpr):
    """Rows that store_row wrote, [K, N] of `kind`; zero where not valid [K, N]."""
    if at.dtype.element_ty == tl.uint8:
        PLAIN: tl.constexpr = DIM - ROPE
        plain = valid & (column < PLAIN)[None, :]
        code = tl.load(at[:, None] + column[None, :], mask=plain, other=0).to(tl.int32)
        exponent = tl.load(at[:, None] + PLAIN + 2 * ROPE + (column // 64)[None, :], mask=plain, other=127).to(tl.int32)
        value = from_e4m3(code)
        value = value * (exponent << 23).to(tl.float32, bitcast=True)
        wide = (at + PLAIN).to(tl.pointer_type(tl.bfloat16))
        turned = tl.load(wide[:, None] + (column - PLAIN)[None, :], mask=valid & (column >= PLAIN)[None, :], other=0.0)
        return tl.where((column < PLAIN)[None, :], value, turned.to(tl.float32)).to(kind)
    else:
        return tl.load(at[:, None] + column[None, :], mask=valid, other=0.0)


@triton.jit
def compress_entry(
    states, ring, bias, norm, cos, sin, slots, positions, counts, block_table, entries, eps,
    batch, number, length, row_stride, table_stride, capacity, last,
    RATIO: tl.constexpr, REACH: tl.constexpr, RING: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, PER_PAGE: tl.constexpr, TOKENS: tl.constexpr, WRITE: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """Of row `batch` the entry so many behind the one that its first token falls into, by all of a program."""
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    position, count = tl.load(positions + batch), tl.load(counts + batch)
    slot = tl.load(slots + batch).to(tl.int64)
    entry = position // RATIO + number
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
            past = ring + (slot * RING + token % RING) * (2 * WIDE)
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
        place = (page.to(tl.int64) * PER_PAGE + entry % PER_PAGE) * ROW
        store_row(entries + place, value, column, inside, DIM, 2 * HALF)
    # A decode step's token takes the place of the one RING before it, which no entry of this call sees.
    if WRITE:
        put(states, ring, slot, position, count > 0, batch, row_stride, RING, 2 * WIDE, 1024)


@triton.jit(do_not_specialize=["length", "table_stride", "capacity", "last"])
def _compress(
    states, ring, bias, norm, cos, sin, slots, positions, counts, block_table, entries, eps,
    length, row_stride, table_stride, capacity, last,
    RATIO: tl.constexpr, REACH: tl.constexpr, RING: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, PER_PAGE: tl.constexpr, TOKENS: tl.constexpr, WRITE: tl.constexpr,
    ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    compress_entry(
        states, ring, bias, norm, cos, sin, slots, positions, counts, block_table, entries, eps,
        tl.program_id(1).to(tl.int64), tl.program_id(0), length, row_stride, table_stride, capacity, last,
        RATIO, REACH, RING, WIDE, DIM, WIDTH, HALF, PER_PAGE, TOKENS, WRITE, ROW,
    )  # fmt: skip


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


def deepseek_compress(call: DeepseekCompress) -> None:
    """See `onegraph.ops.deepseek_compress.deepseek_compress`."""
    states, ring, bias, norm, eps, cos, sin, slots, positions, counts, block_table, entries = call
    (batch, length, _), (ratio, wide), dim, per_page = states.shape, bias.shape, norm.shape[0], entries.shape[1]
    reach = ratio * (wide // dim)
    if batch * length == 0:
        return
    states = rows(states)
    with on_device(states):
        _compress[(triton.cdiv(length, ratio), batch)](
            states, ring, bias, norm, cos, sin, slots, positions, counts, block_table, entries, eps,
            length, states.stride(1), block_table.stride(0), block_table.shape[1] * per_page, cos.shape[0] - 1,
            RATIO=ratio, REACH=reach, RING=ring.shape[1], WIDE=wide, DIM=dim, WIDTH=triton.next_power_of_2(dim),
            HALF=cos.shape[1], PER_PAGE=per_page, TOKENS=min(16, triton.next_power_of_2(reach)),
            WRITE=length == 1, ROW=entries.shape[2], num_warps=8, **options(states),
        )  # fmt: skip
        if length > 1:
            put_all(states, ring, slots, positions, counts)
