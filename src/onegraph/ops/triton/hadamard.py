"""Block Hadamard rotation as a tensor-core product with a matrix of +-1 that each program builds in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

MIN_TILE = 16  # the shortest inner dimension of tl.dot on 16-bit operands


@triton.jit
def hadamard_matrix(TILE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """[TILE, TILE] of +-1: TILE/BLOCK copies of H_BLOCK on the diagonal, zero elsewhere. TILE is at most 256.

    Sylvester's matrix is H[i, j] = (-1)^popcount(i & j); 0x6996 holds the parities of the numbers 0 to 15.
    """
    i = tl.arange(0, TILE)[:, None]
    j = tl.arange(0, TILE)[None, :]
    v = i & j & (BLOCK - 1)
    v = v ^ (v >> 4)
    sign = 1 - 2 * ((0x6996 >> (v & 15)) & 1)
    if BLOCK < TILE:
        sign = tl.where((i ^ j) < BLOCK, sign, 0)
    return sign.to(DTYPE)


@triton.jit
def _hadamard(x, out, size, norm, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    matrix = hadamard_matrix(TILE, BLOCK, dtype)
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
