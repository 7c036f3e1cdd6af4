"""`trellis_encode.c` on the tiles of a matrix, shared between torch's number of threads."""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from onegraph.formats.trellis import STATE, TILE
from onegraph.ops.cpu.build import library
from onegraph.ops.cpu.e8p_encode import pool

SOURCE = Path(__file__).with_name("trellis_encode.c")

# x [16, N], weights of its inputs [P, 16], of its outputs likewise or None, weights around the ends -> codes, values
Encode = Callable[[Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]


def native(bits: int, levels: Tensor) -> Encode | None:
    """The encoder at a rate; None where there is no compiler.

    Args:
        levels: float32 [65536], the value of each state.

    It is called with x float32 [16, N], each 16 columns a tile; weights of squared errors by input [P, 16], of P equal
    parts of the tiles; the same by output, or None; and how many weights on either side of a tile's ends the first pass
    takes. Returns codes int32 [bits, N], word i of a tile at [i // 16, i % 16] of its columns, and values [16, N].
    """
    found = library(SOURCE, (("BITS", bits),))
    if found is None:
        return None
    function = found.trellis_encode
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4 + [ctypes.c_int32] + [ctypes.c_void_p] * 2
    levels = levels.contiguous()
    parts = levels.view(1 << bits, 1 << (STATE - 2 * bits), 1 << bits)  # newest bits, those between, oldest
    table = parts.transpose(1, 2) if bits <= 3 else parts.permute(1, 2, 0)
    return partial(_encode, function, bits, table.contiguous(), levels)


def _encode(
    function: Callable[..., int], bits: int, table: Tensor, levels: Tensor, x: Tensor, weights: Tensor,
    outer: Tensor | None, around: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x, weights, outer = x.contiguous(), weights.contiguous(), None if outer is None else outer.contiguous()
    tiles, value = x.shape[1] // TILE, torch.empty_like(x)
    codes = torch.empty(bits, x.shape[1], dtype=torch.int32)
    under = None if outer is None else outer.data_ptr()

    def run(begin: int, end: int) -> int:
        return function(
            table.data_ptr(), levels.data_ptr(), x.data_ptr(), weights.data_ptr(), under, tiles // len(weights),
            x.shape[1], begin, end, around, codes.data_ptr(), value.data_ptr(),
        )  # fmt: skip

    shares = max(1, min(torch.get_num_threads(), tiles))
    edges = [tiles * i // shares for i in range(shares + 1)]
    failed = [run(0, tiles)] if shares == 1 else list(pool(shares, os.getpid()).map(run, edges[:-1], edges[1:]))
    if any(failed):
        raise MemoryError("the trellis encoder found no memory for its costs; 8 MB a thread are enough")
    return codes, value
