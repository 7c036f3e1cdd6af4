"""E8P: codes to integers, and the linear on them. The codes' layout is told in `onegraph.formats.e8p`.

**Decoding.** A code stands for eight int8, handled as one int64 (byte j is column j): the codebook's row, one XOR with
a mask made of the sign byte, and the sum of the stages, byte by byte but in one 64-bit addition, since with 128 added
to each byte no carry crosses. Everything up to the product is exact.

**The linear**, up to `MAX_TOKENS` tokens: program (tile of rows, slice of k) walks its slice in Hadamard blocks of k,
rotates the block's activations by a tensor-core product with +-1, decodes the block's codes and accumulates. Where the
rows alone would leave SMs idle, k is cut into slices and a second, tiny launch adds the slices in order (no atomics),
rotates the outputs, scales and adds the bias; else the same program does that. More tokens, and all of float32 (whose
products run on no tensor core; ptxas took minutes for their unrolled code): a strip of rows is decoded once and handed
to cuBLAS, between two launches for the rotations.

A 16-bit operand would round the rotated activations. Instead they enter as a pair of bfloat16, x = hi + lo, side by
side as further lines of the product, which tensor cores leave idle in a decode step anyhow: up to 16 tokens the
result is as good as float32 arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import E8PLinear
from onegraph.ops.triton.activation import swiglu
from onegraph.ops.triton.hadamard import hadamard_matrix
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous
from onegraph.ops.triton.norm import rms_norm

MAX_BLOCK = 128  # of the Hadamard rotation: the largest power of two that divides a dimension, but no more
MIN_TILE = 64  # columns and rows of a tile: several Hadamard blocks where a dimension has small ones
MAX_TOKENS = 64  # above, a strip of weights is decoded once and multiplied by cuBLAS
STRIP_BYTES = 64 << 20  # of decoded weights at a time: the workspace of the large-batch path
WANTED_PROGRAMS = 528  # four for each SM of an H200
# Tiles that a program walks, unrolled. Tokens are the short side of every product, so that decode steps run on
# mma.sync: with weights on the long side Triton 3.6 used wgmma, and got it wrong from the second tile of 128 on, looped
# or unrolled (compute-sanitizer: an operand read outside of shared memory).
MAX_TILES = 4

ONES = tl.constexpr(0x0101010101010101)
BIT_OF_BYTE = tl.constexpr(0x8040201008040201 - 2**64)  # bit j of byte j
SIGN_BITS = tl.constexpr(0x8080808080808080 - 2**64)
LOW_BITS = tl.constexpr(0x7F7F7F7F7F7F7F7F)
OFFSET_3 = tl.constexpr(128 * 0x0101010101010101 - 2**64)  # 128 in each byte, as int64
OFFSET_4 = tl.constexpr(512 * 0x0101010101010101 % 2**64)  # 4 * 128 in each byte, modulo 2^64


@triton.jit
def _decode_e8p(code, codebook):
    """int16 codes -> int64 of eight int8: the row of the high byte XOR the mask of the low byte."""
    row = tl.load(codebook + ((code >> 8) & 0xFF).to(tl.int32))
    signs = code.to(tl.int32) & 0xFF
    fold = signs ^ (signs >> 4)
    parity = (0x6996 >> (fold & 15)) & 1
    spread = ((signs ^ parity).to(tl.int64) * ONES) & BIT_OF_BYTE  # byte j keeps bit j, at its place
    negative = ((spread + LOW_BITS) >> 7) & ONES  # byte j is 1 if bit j was set
    return row ^ (negative * 0xFC) ^ (parity.to(tl.int64) * (2 * ONES))


@triton.jit
def _decode(code, rest, codebook, BITS: tl.constexpr):
    """The integers Q of both stages as int64 of eight int8. `codebook` is int64: rows of eight int8."""
    packed = _decode_e8p(code, codebook)
    if BITS == 3:
        second = tl.load(codebook + 256 + rest.to(tl.int32))
        packed = ((packed ^ SIGN_BITS) + (second ^ SIGN_BITS) - OFFSET_3) ^ SIGN_BITS
    elif BITS == 4:
        second = _decode_e8p(rest, codebook)
        packed = (4 * (packed ^ SIGN_BITS) + (second ^ SIGN_BITS) - OFFSET_4) ^ SIGN_BITS
    return packed


@triton.jit
def _unpack(packed, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """int64 [ROWS, GROUPS] -> int8 [ROWS, 8 * GROUPS], in place: joins keep a thread's bytes in its registers."""
    a = tl.join((packed >> 0).to(tl.int8), (packed >> 32).to(tl.int8))
    b = tl.join((packed >> 16).to(tl.int8), (packed >> 48).to(tl.int8))
    c = tl.join((packed >> 8).to(tl.int8), (packed >> 40).to(tl.int8))
    d = tl.join((packed >> 24).to(tl.int8), (packed >> 56).to(tl.int8))
    return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS, 8 * GROUPS))


@triton.jit
def _rotate(x, matrix, EXACT: tl.constexpr):
    """x @ matrix (+-1) in float32. A bfloat16 pair holds 16 bits of x; EXACT multiplies in float32."""
    if EXACT:
        result = tl.dot(x, matrix, input_precision="ieee")
    else:
        hi = x.to(tl.bfloat16)
        lo = (x - hi.to(tl.float32)).to(tl.bfloat16)
        result = tl.dot(lo, matrix, tl.dot(hi, matrix))
    return result


@triton.jit
def _finish(y, out, out_scale, bias, row, token, n, inside, norm, HAS_BIAS: tl.constexpr):
    scale = tl.load(out_scale + row, mask=row < n, other=0.0) * norm
    y = y * scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * n + row[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weights(
    codes, residual, codebook, row, at, n, k, BITS: tl.constexpr, TILE_K: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """[TILE_N, TILE_K] of Q from column `at` on; zero outside."""
    group = at // 8 + tl.arange(0, TILE_K // 8)
    valid = (row < n)[:, None] & (group < k // 8)[None, :]
    place = row.to(tl.int64)[:, None] * (k // 8) + group[None, :]
    code = tl.load(codes + place, mask=valid, other=0)
    rest = code
    if BITS > 2:
        rest = tl.load(residual + place, mask=valid, other=0)
    return _unpack(_decode(code, rest, codebook, BITS), TILE_N, TILE_K // 8).to(tl.bfloat16)


@triton.jit
def _activations(
    x, scale, matrix, at, tokens, k, TILE_K: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """[PARTS * TOKENS, TILE_K] of H_k (in_scale * x) from column `at` on: the tokens' hi, then, with two parts, lo."""
    line = tl.arange(0, PARTS * TOKENS)
    token = line % TOKENS
    i = at + tl.arange(0, TILE_K)
    inside = (token < tokens)[:, None] & (i < k)[None, :]
    v = tl.load(x + token.to(tl.int64)[:, None] * k + i[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = _rotate(v * scale[None, :], matrix, False)
    operand = rotated.to(matrix.dtype)
    if PARTS == 2:
        lo = (rotated - operand.to(tl.float32)).to(matrix.dtype)
        operand = tl.where((line < TOKENS)[:, None], operand, lo)
    return operand


@triton.jit
def _scale(in_scale, at, k, norm, TILE_K: tl.constexpr):
    i = at + tl.arange(0, TILE_K)
    return tl.load(in_scale + i, mask=i < k, other=0.0) * norm


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x, codes, residual, codebook, in_scale, out_scale, bias, out, partial, tokens, n, k, in_norm, out_norm,
    BITS: tl.constexpr, IN_BLOCK: tl.constexpr, OUT_BLOCK: tl.constexpr, TILE_K: tl.constexpr, TILE_N: tl.constexpr,
    TILES: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, SLICED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    cut = tl.program_id(1)
    at = cut * (TILES * TILE_K)
    # Weights and scales of the first tile do not depend on the kernel before: they are decoded while it runs.
    q = _weights(codes, residual, codebook, row, at, n, k, BITS, TILE_K, TILE_N)
    matrix = hadamard_matrix(0, TILE_K, TILE_K, IN_BLOCK, tl.bfloat16)
    scale = _scale(in_scale, at, k, in_norm, TILE_K)
    wait_for_previous(PDL)
    acc = tl.zeros((PARTS * TOKENS, TILE_N), dtype=tl.float32)
    for _ in tl.static_range(TILES - 1):
        operand = _activations(x, scale, matrix, at, tokens, k, TILE_K, TOKENS, PARTS)
        acc = tl.dot(operand, tl.trans(q), acc)
        at += TILE_K
        q = _weights(codes, residual, codebook, row, at, n, k, BITS, TILE_K, TILE_N)
        scale = _scale(in_scale, at, k, in_norm, TILE_K)
    operand = _activations(x, scale, matrix, at, tokens, k, TILE_K, TOKENS, PARTS)
    acc = tl.dot(operand, tl.trans(q), acc)
    if not SLICED:
        acc = _rotate(acc, hadamard_matrix(0, TILE_N, TILE_N, OUT_BLOCK, tl.bfloat16), False)
    if PARTS == 2:
        acc = tl.sum(tl.reshape(acc, (2, TOKENS, TILE_N)), axis=0)
    token = tl.arange(0, TOKENS)
    inside = (token < tokens)[:, None] & (row < n)[None, :]
    if SLICED:
        tl.store(partial + (cut * tokens + token)[:, None].to(tl.int64) * n + row[None, :], acc, mask=inside)
    else:
        _finish(acc, out, out_scale, bias, row, token, n, inside, out_norm, HAS_BIAS)


@triton.jit(do_not_specialize=["tokens"])
def _reduce(
    partial, out, out_scale, bias, tokens, n, norm, SLICES: tl.constexpr, OUT_BLOCK: tl.constexpr,
    TILE_N: tl.constexpr, PIECE: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds the slices in order, rotates the outputs, scales, adds the bias. partial is float32 [SLICES, tokens, n].

    Lines of the product are TOKENS tokens times GROUP slices: a rotation is linear, so a decode step's few tokens leave
    room to rotate the slices first and add them afterwards, where each is read by threads of its own. A program makes
    PIECE of the tile's outputs, for building its part of the matrix is most of its work.
    """
    let_next_start(PDL)
    first = tl.program_id(0) * PIECE
    row = first // TILE_N * TILE_N + tl.arange(0, TILE_N)
    line = tl.arange(0, TOKENS * GROUP)
    token = tl.program_id(1) * TOKENS + line // GROUP
    cut = line % GROUP
    matrix = hadamard_matrix(first % TILE_N, TILE_N, PIECE, OUT_BLOCK, tl.float32 if EXACT else tl.bfloat16)
    wait_for_previous(PDL)
    y = tl.zeros((TOKENS * GROUP, TILE_N), dtype=tl.float32)
    for start in tl.static_range(0, SLICES, GROUP):
        inside = ((token < tokens) & (start + cut < SLICES))[:, None] & (row < n)[None, :]
        at = ((start + cut) * tokens + token).to(tl.int64)[:, None] * n + row[None, :]
        y += tl.load(partial + at, mask=inside, other=0.0)
    y = _rotate(y, matrix, EXACT)
    if GROUP > 1:
        y = tl.sum(tl.reshape(y, (TOKENS, GROUP, PIECE)), axis=1)
    row = first + tl.arange(0, PIECE)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < tokens)[:, None] & (row < n)[None, :]
    _finish(y, out, out_scale, bias, row, token, n, inside, norm, HAS_BIAS)


@triton.jit(do_not_specialize=["tokens"])
def _rotate_inputs(
    x, in_scale, hi, lo, tokens, k, norm, IN_BLOCK: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_LO: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hi (+ lo) = H_k (in_scale * x), [tokens, k]."""
    let_next_start(PDL)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < tokens)[:, None] & (i < k)[None, :]
    at = token.to(tl.int64)[:, None] * k + i[None, :]
    matrix = hadamard_matrix(0, TILE, TILE, IN_BLOCK, tl.float32 if EXACT else tl.bfloat16)
    scale = tl.load(in_scale + i, mask=i < k, other=0.0) * norm
    wait_for_previous(PDL)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    rotated = _rotate(v * scale[None, :], matrix, EXACT)
    upper = rotated.to(hi.dtype.element_ty)
    tl.store(hi + at, upper, mask=inside)
    if HAS_LO:
        tl.store(lo + at, (rotated - upper.to(tl.float32)).to(lo.dtype.element_ty), mask=inside)


@triton.jit
def _decode_all(
    codes, residual, codebook, out, size, BITS: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Every code to eight values of `out`: stored as one int64 of int8 if PACKED, else converted to out's dtype."""
    let_next_start(PDL)
    wait_for_previous(PDL)  # a quantizer decodes what the kernel before has just encoded
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    code = tl.load(codes + at, mask=at < size, other=0)
    rest = code
    if BITS > 2:
        rest = tl.load(residual + at, mask=at < size, other=0)
    packed = _decode(code, rest, codebook, BITS)
    if PACKED:
        tl.store(out + at, packed, mask=at < size)
    else:
        q = tl.reshape(_unpack(packed[:, None], TILE, 1), (TILE, 8)).to(out.dtype.element_ty)
        place = at[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(out + place, q, mask=(at < size)[:, None])


def _as_rows(codebook: Tensor) -> Tensor:
    """int8 [512, 8] -> int64 [512]. A codebook that a view has put at an odd address is copied first."""
    if codebook.data_ptr() % 8:
        codebook = codebook.clone()
    return codebook.view(torch.int64).view(-1)


def _decode_to(codes: Tensor, residual: Tensor | None, rows: Tensor, bits: int, out: Tensor) -> None:
    packed = out.dtype == torch.int64
    tile = 512 if packed else 128
    with on_device(codes):
        _decode_all[(triton.cdiv(codes.numel(), tile),)](
            codes, codes if residual is None else residual, rows, out, codes.numel(),
            BITS=bits, PACKED=packed, TILE=tile, num_warps=4, **options(codes),
        )  # fmt: skip


def decode(codes: Tensor, residual: Tensor | None, codebook: Tensor, bits: int) -> Tensor:
    """See `onegraph.ops.e8p.e8p_decode`."""
    out = torch.empty(codes.shape, dtype=torch.int64, device=codes.device)
    if codes.numel():
        _decode_to(codes, residual, _as_rows(codebook), bits, out)
    return out.view(torch.int8)


def linear(call: E8PLinear) -> Tensor:
    """See `onegraph.ops.e8p.e8p_linear`. What stands around the linear is launched apart, rounded in between."""
    x, residual, n, k, tokens = call.x.contiguous(), call.residual, call.n, call.k, call.tokens
    shape, dtype = call.result
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if tokens == 0:
        return out
    if call.silu:
        x = swiglu(x)
    elif call.eps is not None:
        x = rms_norm(x, torch.ones(k, dtype=x.dtype, device=x.device), call.eps)
    with on_device(x):
        path = _small if tokens <= MAX_TOKENS and x.dtype != torch.float32 else _large
        scales = call.in_scale, call.out_scale, call.bias
        path(x, call.codes, residual, _as_rows(call.codebook), *scales, call.bits, out, tokens, n, k)
    return out if call.add is None else out.add_(call.add)


def _block(dimension: int) -> int:
    return min(dimension & -dimension, MAX_BLOCK)


def plan(n: int, k: int) -> tuple[int, int, int]:
    """(rows a program, slices of k, Hadamard tiles a slice): from the shape alone, so that a graph has one grid."""
    tiles_k = triton.cdiv(k, max(_block(k), MIN_TILE))
    whole = max(_block(n), MIN_TILE)
    wanted = max(1, WANTED_PROGRAMS // triton.cdiv(n, MIN_TILE))
    per_slice = min(MAX_TILES, triton.cdiv(tiles_k, min(tiles_k, wanted)))
    slices = triton.cdiv(tiles_k, per_slice)
    return (whole, 1, tiles_k) if slices == 1 else (MIN_TILE, slices, per_slice)


def _small(
    x: Tensor, codes: Tensor, residual: Tensor | None, rows: Tensor, in_scale: Tensor, out_scale: Tensor,
    bias: Tensor | None, bits: int, out: Tensor, tokens: int, n: int, k: int,
) -> None:  # fmt: skip
    tile_n, slices, per_slice = plan(n, k)
    columns = max(8, triton.next_power_of_2(tokens))
    parts = 1 if columns > 16 and x.dtype == torch.bfloat16 else 2
    in_block, out_block = _block(k), _block(n)
    sliced = slices > 1
    partial = torch.empty((slices, tokens, n), dtype=torch.float32, device=x.device) if sliced else out
    opts = options(x)
    has_bias = bias is not None
    _linear[(triton.cdiv(n, tile_n), slices)](
        x, codes, codes if residual is None else residual, rows, in_scale, out_scale, bias if has_bias else out_scale,
        out, partial, tokens, n, k, in_block**-0.5, out_block**-0.5,
        BITS=bits, IN_BLOCK=in_block, OUT_BLOCK=out_block, TILE_K=max(in_block, MIN_TILE), TILE_N=tile_n,
        TILES=per_slice, TOKENS=max(columns, 16 // parts), PARTS=parts, SLICED=sliced, HAS_BIAS=has_bias,
        num_warps=8 if max(tile_n, in_block) == 128 and per_slice > 1 else 4, num_stages=1, **opts,
    )  # fmt: skip
    if sliced:
        _launch_reduce(partial, out, out_scale, bias, tokens, n, slices, False)


def _launch_reduce(
    partial: Tensor, out: Tensor, out_scale: Tensor, bias: Tensor | None, tokens: int, n: int, slices: int, exact: bool
) -> None:
    block = _block(n)
    tile = max(block, MIN_TILE)
    piece = min(32, tile)
    group = min(16, triton.next_power_of_2(slices))
    _reduce[(triton.cdiv(n, piece), triton.cdiv(tokens, 16 // group))](
        partial, out, out_scale, out_scale if bias is None else bias, tokens, n, block**-0.5,
        SLICES=slices, OUT_BLOCK=block, TILE_N=tile, PIECE=piece, TOKENS=16 // group, GROUP=group,
        HAS_BIAS=bias is not None, EXACT=exact, num_warps=2, **options(out),
    )  # fmt: skip


def _large(
    x: Tensor, codes: Tensor, residual: Tensor | None, rows: Tensor, in_scale: Tensor, out_scale: Tensor,
    bias: Tensor | None, bits: int, out: Tensor, tokens: int, n: int, k: int,
) -> None:  # fmt: skip
    """bfloat16 multiplies in bfloat16, as a dense layer would; float16 as a bfloat16 pair, which has its precision and
    range to spare; float32 in float32."""
    exact = x.dtype == torch.float32
    operand = torch.float32 if exact else torch.bfloat16
    pair = x.dtype == torch.float16
    block = _block(k)
    tile = max(block, MIN_TILE)
    hi = torch.empty((tokens, k), dtype=operand, device=x.device)
    lo = torch.empty_like(hi) if pair else hi
    _rotate_inputs[(triton.cdiv(k, tile), triton.cdiv(tokens, 16))](
        x, in_scale, hi, lo, tokens, k, block**-0.5,
        IN_BLOCK=block, TILE=tile, TOKENS=16, HAS_LO=pair, EXACT=exact, num_warps=4, **options(x),
    )  # fmt: skip
    strip = max(MAX_BLOCK, STRIP_BYTES // (k * hi.element_size()) // MAX_BLOCK * MAX_BLOCK)
    strips = []
    for first in range(0, n, strip):
        some = slice(first, min(first + strip, n))
        q = torch.empty((some.stop - some.start, k), dtype=operand, device=x.device)
        _decode_to(codes[some], None if residual is None else residual[some], rows, bits, q)
        strips.append(_matmul(hi, q) + _matmul(lo, q) if pair else _matmul(hi, q))
    y = strips[0] if len(strips) == 1 else torch.cat(strips, dim=1)
    _launch_reduce(y, out, out_scale, bias, tokens, n, 1, exact)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T summed and returned in float32."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float().T
    return torch.mm(a, b.T, out_dtype=torch.float32)
