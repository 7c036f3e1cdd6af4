"""Block Hadamard rotation as a tensor-core product with a matrix of +-1 that each program builds in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

MIN_TILE = 16  # the shortest inner dimension of tl.dot on 16-bit operands


# Bit j of PATTERN_b is bit b of j: the signs of row 2^b of Sylvester's matrix, 32 columns of it.
PATTERN_0 = tl.constexpr(0xAAAAAAAA - 2**32)
PATTERN_1 = tl.constexpr(0xCCCCCCCC - 2**32)
PATTERN_2 = tl.constexpr(0xF0F0F0F0 - 2**32)
PATTERN_3 = tl.constexpr(0xFF00FF00 - 2**32)
PATTERN_4 = tl.constexpr(0xFFFF0000 - 2**32)


@triton.jit
def hadamard_matrix(first, TILE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """[TILE, WIDTH]: columns `first` and on of TILE/BLOCK copies of H_BLOCK (+-1) on the diagonal; BLOCK <= 128.

    Sylvester's matrix is H[i, j] = (-1)^popcount(i & j). A row's signs are the XOR of the patterns of its number's
    bits, so an element costs a shift of its row's word instead of a popcount: each launch builds its matrix anew.
    """
    i = tl.arange(0, TILE)
    j = first + tl.arange(0, WIDTH)
    row = i & (BLOCK - 1)
    word = -(row & 1) & PATTERN_0
    word ^= -((row >> 1) & 1) & PATTERN_1
    word ^= -((row >> 2) & 1) & PATTERN_2
    word ^= -((row >> 3) & 1) & PATTERN_3
    word ^= -((row >> 4) & 1) & PATTERN_4
    sign = word[:, None] >> (j & 31)[None, :]
    if BLOCK > 32:
        high = (row >> 5)[:, None] & (j >> 5)[None, :]
        sign ^= high ^ (high >> 1)
    if DTYPE == tl.bfloat16:  # noqa: SIM300  # DTYPE is the variable
        matrix = ((sign << 15) | 0x3F80).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        matrix = (1 - 2 * (sign & 1)).to(DTYPE)
    if BLOCK < TILE:
        matrix = tl.where((i[:, None] ^ j[None, :]) < BLOCK, matrix, 0.0)
    return matrix


@triton.jit
def _hadamard(x, out, size, norm, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    matrix = hadamard_matrix(0, TILE, TILE, BLOCK, dtype)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * TILE + tl.arange(0, TILE)[None, :]
    wait_for_previous(PDL)
    values = tl.load(x + at, mask=at < size, other=0.0)
    # +-1 times a 16-bit float is exact, so the only roundings are those of the float32 sum and of the result.
    result = tl.dot(values, matrix, input_precision="ieee") * norm
    tl.store(out + at, result.to(dtype), mask=at < size)


def hadamard(x: Tensor, block: int) -> Tensor:
    """See `onegraph.ops.hadamard.hadamard`. The tensor is one run of blocks: `block` divides its last dimension."""
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    tile = max(block, MIN_TILE)
    rows = 16
    with on_device(x):
        _hadamard[(triton.cdiv(x.numel(), rows * tile),)](
            x, out, x.numel(), block**-0.5, TILE=tile, BLOCK=block, ROWS=rows, num_warps=4, **options(x)
        )
    return out
