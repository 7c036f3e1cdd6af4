"""TurboQuant's cache write: norm, RoPE, rotation, quantization, packing and scatter of a step's tokens in one launch.

A program takes 16 vectors of one kv head: queries of its group, or keys, or values. The rotation is a product on the
tensor cores, in slices of the inner dimension, so that RoPE needs only a slice and its partner at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import TurboQuantWrite
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

ROWS = 16  # vectors of a program, the least that tl.dot takes
SLICE = 64  # of the inner dimension of a product
SCALES = {"norm": 0, "matched": 1, "unbiased": 2}


@triton.jit
def _pack(values, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """[ROWS, WIDTH] of values below 2^BITS -> the words of a plane: bytes, or 16 bits where BITS is 1."""
    COUNT: tl.constexpr = 16 if BITS == 1 else 8 // BITS
    i = tl.arange(0, COUNT)
    if BITS == 1:
        k = i // 2
        shift = 8 * (k // 2 % 2) + k % 2 + k // 4 * 2 + 4 * (i % 2)
    else:
        shift = 4 * (i % 2) + i // 2 * BITS
    return tl.sum(tl.reshape(values, [ROWS, WIDTH // COUNT, COUNT]) << shift[None, None, :], axis=2)


@triton.jit
def _store_plane(
    values, block, token, real,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """One plane's bits; `block` points at each token's block."""
    ROW: tl.constexpr = DIM * BITS // 8
    words = _pack(values, ROWS, WIDTH, BITS)
    COUNT: tl.constexpr = WIDTH // 16 if BITS == 1 else WIDTH * BITS // 8
    PARTS: tl.constexpr = 2 if BITS == 1 else 1
    for part in tl.static_range(PARTS):
        byte = tl.arange(0, COUNT) * PARTS + part
        if PAIRED:
            within = (token // 2 * (2 * ROW) + token % 2)[:, None] + 2 * byte[None, :]
        else:
            within = (token * ROW)[:, None] + byte[None, :]
        place = block[:, None] + (OFFSET + within)
        tl.store(place, ((words >> (8 * part)) & 255).to(tl.uint8), mask=real[:, None] & (byte < ROW)[None, :])


@triton.jit
def _store_norm(norm, block, token, real, OFFSET: tl.constexpr):
    bits = tl.minimum(norm, 65504.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    place = block + OFFSET + 2 * token
    tl.store(place, (bits & 255).to(tl.uint8), mask=real)
    tl.store(place + 1, ((bits >> 8) & 255).to(tl.uint8), mask=real)


@triton.jit
def _quantize(
    y, codebook, block, token, real,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr,
    PLANE: tl.constexpr, NORM: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Rotated vectors y [ROWS, WIDTH] into their tokens' places: codes of BITS, from byte PLANE of the block on."""
    column = tl.arange(0, WIDTH)
    inside = (column < DIM)[None, :]
    norm = tl.sqrt_rn(tl.sum(y * y, axis=1))
    unit = y / tl.maximum(norm, 1e-30)[:, None]
    size = tl.abs(unit)
    level = tl.full((ROWS, WIDTH), 0.0, dtype=tl.float32)
    rank = tl.zeros((ROWS, WIDTH), dtype=tl.int32)
    below = tl.load(codebook)
    level += below
    for i in tl.static_range(1, 1 << (BITS - 1)):
        above = tl.load(codebook + 2 * i)
        beyond = size > (above + below) * 0.5
        rank += beyond.to(tl.int32)
        level = tl.where(beyond, above, level)
        below = above
    code = 2 * rank + (unit < 0).to(tl.int32)
    level = tl.where(inside, tl.where(unit < 0, -level, level), 0.0)
    if BITS == 3:
        _store_plane(code & 3, block, token, real, ROWS, WIDTH, 2, DIM, PLANE, PAIRED)
        _store_plane(code >> 2, block, token, real, ROWS, WIDTH, 1, DIM, PLANE + 4 * DIM, PAIRED)
    else:
        _store_plane(code, block, token, real, ROWS, WIDTH, BITS, DIM, PLANE, PAIRED)
    if SCALE == 1:
        norm = norm / tl.sqrt_rn(tl.sum(level * level, axis=1))
    elif SCALE == 2:
        norm = norm / tl.maximum(tl.sum(unit * level, axis=1), 1e-3)
    _store_norm(norm, block, token, real, NORM)


@triton.jit(do_not_specialize=["tokens", "length", "table_stride", "reach", "max_position"])
def _write(
    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table,
    turn, k_codebook, v_codebook, cache, ring, slots, out, kept,
    tokens, length, table_stride, reach, max_position, page_bytes, ring_size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, SCALE: tl.constexpr,
    V_PLANE: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    QK_NORM: tl.constexpr, ROPE: tl.constexpr, RING: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dtype: tl.constexpr = qkv.dtype.element_ty
    kv_head = tl.program_id(1)
    tile = tl.program_id(0)
    query_tiles = tl.cdiv(tokens * GROUP, ROWS)
    tiles = tl.cdiv(tokens, ROWS)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    weight = q_norm
    kind = 0
    if tile >= query_tiles:
        kind = 1 + (tile - query_tiles) // tiles
        token = row - query_tiles * ROWS
        head = tl.full((ROWS,), HEADS, dtype=tl.int32) + kv_head
        weight = k_norm
        if kind == 2:
            token -= tiles * ROWS
            head += KV_HEADS
    there = token < tokens
    batch = token // length
    step = token % length
    column = tl.arange(0, WIDTH)
    wait_for_previous(PDL)

    position = tl.load(positions + batch, mask=there, other=0) + step
    source = qkv + (token.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * DIM
    scale = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if QK_NORM and kind < 2:
        x = tl.load(source[:, None] + column[None, :], mask=there[:, None] & (column < DIM)[None, :], other=0.0)
        x = x.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / DIM + eps)
    HALF: tl.constexpr = TURNED // 2
    at = tl.minimum(tl.maximum(position, 0), max_position).to(tl.int64) * HALF
    y = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in tl.static_range(0, WIDTH, SLICE):
        k = start + tl.arange(0, SLICE)
        inside = there[:, None] & (k < DIM)[None, :]
        x = tl.load(source[:, None] + k[None, :], mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        if QK_NORM and kind < 2:
            x *= tl.load(weight + k, mask=k < DIM, other=0.0).to(tl.float32)[None, :]
        if ROPE and kind < 2:
            other = tl.where(k < HALF, k + HALF, tl.where(k < TURNED, k - HALF, k))
            angle = at[:, None] + tl.where(k < HALF, k, other)[None, :]
            turns = inside & (k < TURNED)[None, :]
            partner = tl.load(source[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32) * scale[:, None]
            if QK_NORM:
                partner *= tl.load(weight + other, mask=k < DIM, other=0.0).to(tl.float32)[None, :]
            c = tl.load(cos + angle, mask=turns, other=1.0)
            s = tl.load(sin + angle, mask=turns, other=0.0)
            x = x * c + tl.where(k < HALF, -partner, partner) * s
        matrix = tl.load(
            turn + k[:, None] * DIM + column[None, :], mask=(k < DIM)[:, None] & (column < DIM)[None, :], other=0.0
        )
        y = tl.dot(x.to(dtype), matrix, y, input_precision="ieee")
    y *= DIM**-0.5
    wide = there[:, None] & (column < DIM)[None, :]
    if kind == 0:
        place = out + (token.to(tl.int64) * HEADS + head) * DIM
        tl.store(place[:, None] + column[None, :], y.to(dtype), mask=wide)
    else:
        count = tl.load(counts + batch, mask=there, other=0)
        real = there & (step < count) & (position >= 0) & (position < reach)
        if EXACT:
            place = kept + ((token.to(tl.int64) * 2 + kind - 1) * KV_HEADS + kv_head) * DIM
            tl.store(place[:, None] + column[None, :], y.to(dtype), mask=wide)
        if RING:
            latest = real & (step >= count - ring_size)
            slot = tl.load(slots + batch, mask=there, other=0).to(tl.int64) * ring_size + position % ring_size
            place = ring + ((slot * 2 + kind - 1) * KV_HEADS + kv_head) * DIM
            tl.store(place[:, None] + column[None, :], y.to(dtype), mask=wide & latest[:, None])
        # Padding and what lies beyond the block table is not written at all: the sentinel page stays as it is.
        page = tl.load(block_table + batch.to(tl.int64) * table_stride + position // PAGE, mask=real, other=0)
        block = cache + (page.to(tl.int64) * KV_HEADS + kv_head) * page_bytes + position % PAGE // 16 * BLOCK_BYTES
        if kind == 1:
            _quantize(
                y, k_codebook, block, position % 16, real, ROWS, DIM, WIDTH, K_BITS, SCALE, 0, K_NORM, False,
            )  # fmt: skip
        else:
            _quantize(
                y, v_codebook, block, position % 16, real, ROWS, DIM, WIDTH, V_BITS, SCALE, V_PLANE, V_NORM, True,
            )  # fmt: skip


def turboquant_write(call: TurboQuantWrite) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.turboquant.turboquant_write`."""
    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, turn, *coded = call
    k_codebook, v_codebook, cache, ring, slots, heads, kind, exact = coded
    k_bits, v_bits = (book.numel().bit_length() - 1 for book in (k_codebook, v_codebook))
    batch, length, _ = qkv.shape
    _, kv_heads, page_bytes = cache.shape
    dim, tokens = turn.shape[0], batch * length
    token_bytes = dim * (k_bits + v_bits) // 8 + 4
    out = torch.empty((batch, length, heads, dim), dtype=qkv.dtype, device=qkv.device)
    kept = torch.empty((batch if exact else 0, length, 2, kv_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out, kept
    norm, rope, page = q_norm is not None, cos is not None, page_bytes // token_bytes
    tiles = triton.cdiv(tokens * (heads // kv_heads), ROWS) + 2 * triton.cdiv(tokens, ROWS)
    with on_device(qkv):
        _write[(tiles, kv_heads)](
            qkv, q_norm if norm else qkv, k_norm if norm else qkv, eps, cos if rope else qkv, sin if rope else qkv,
            positions, counts, block_table, turn, k_codebook, v_codebook, cache,
            qkv if ring is None else ring, positions if slots is None else slots, out, kept,
            tokens, length, block_table.stride(0), block_table.shape[1] * page, cos.shape[0] - 1 if rope else 0,
            page_bytes, 1 if ring is None else ring.shape[1],
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, TURNED=2 * cos.shape[1] if rope else dim,
            WIDTH=triton.next_power_of_2(dim), PAGE=page,
            K_BITS=k_bits, V_BITS=v_bits, SCALE=SCALES[kind], V_PLANE=2 * dim * k_bits,
            K_NORM=2 * dim * (k_bits + v_bits), V_NORM=2 * dim * (k_bits + v_bits) + 32, BLOCK_BYTES=16 * token_bytes,
            QK_NORM=norm, ROPE=rope, RING=ring is not None, EXACT=exact,
            ROWS=ROWS, SLICE=SLICE, num_warps=4, **options(qkv),
        )  # fmt: skip
    return out, kept
