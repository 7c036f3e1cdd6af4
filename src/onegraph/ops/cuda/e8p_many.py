"""E8P linear for more tokens than `e8p.cu` takes: how `e8p_many.cu` is cut over the GPU.

The weights are decoded into the tensor cores' operands and never written out; what a call needs beside its result is
the rotated activations in float16 (`SLICE`-padded, at most `AT_ONCE` tokens) and, where k is cut, float32 partial sums.
"""

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_name("e8p_many.cu")
SLICE = 256  # columns, as in e8p_common.cuh
MAX_K = 32768  # a thread of e8p_spread holds k / 2048 groups of eight
AT_ONCE = 4096  # tokens of a pass: bounds the workspace
SHARED_LIMIT = 227 * 1024  # bytes that a block can have on Hopper
THREADS = 384


@dataclass(frozen=True)
class Tile:
    """What a block makes: `tokens` by `rows`; `depth` stages of 64 columns are under way."""

    tokens: int
    rows: int
    depth: int

    def shared(self, bits: int) -> int:
        """Bytes of shared memory: tables, barriers and stages; the sums take their place afterwards."""
        tables = 98304 if bits == 3 else 65536
        return max(tables + 1024 + self.depth * self.tokens * 128, self.rows * self.tokens * 4 * 132 // 128)


def tile(n: int, k: int, tokens: int, sms: int) -> Tile:
    """As many tokens as one decoding of the codes can serve; half as many where that fills the SMs with k not cut.

    512 tokens on 4096 -> 4096 take 35.7 us at 2 bits in tiles of 128, 38.9 in tiles of 256 with k cut in two, the same
    at 4 bits; on 14336 -> 4096 109 and 104; 256 tokens on 4096 -> 6144, where 96 SMs would work, 35.9 at 2 bits either
    way and 41.4 and 39.1 at 4 (benchmarks/results/prefill-tiles-h200.jsonl).
    """
    if tokens <= 64:
        return Tile(32, 128, 12) if tokens <= 32 else Tile(64, 128, 8)
    small, large = Tile(128, 128, 8), Tile(256, 128, 4)
    halves = -(-n // small.rows) * -(-tokens // small.tokens)
    return small if tokens <= 128 or (3 * sms // 4 < halves <= sms and k <= 4096) else large


def most(slices: int) -> int:
    """Slices that a warp of e8p_spread holds: eight warps share a token's."""
    return next(m for m in (2, 4, 8, 16) if m * 8 >= slices)


@lru_cache(maxsize=1024)
def splits(n: int, k: int, tokens: int, sms: int) -> tuple[int, int]:
    """(slices of a split, splits): k is cut until every SM has a block."""
    shape, slices = tile(n, k, tokens, sms), -(-k // SLICE)
    blocks = -(-n // shape.rows) * -(-tokens // shape.tokens)
    per_split = -(-slices // max(1, min(slices, sms // blocks)))
    return per_split, -(-slices // per_split)


@cache
def _kernels(bits: int, shape: Tile, half: bool, most: int, device: int) -> tuple[build.Kernel, ...]:
    defines = {"BITS": bits, "TOKENS": shape.tokens, "MT": shape.rows // 128, "DEPTH": shape.depth}
    defines |= {"HALF": int(half), "MOST": most}
    return build.load(SOURCE, defines, ("e8p_spread", "e8p_many", "e8p_gather"), device, SHARED_LIMIT)


def launch(
    inputs: list[Tensor | None], out: Tensor, bits: int, tokens: int, n: int, k: int, half: bool, norm: float,
    options: tuple[float, bool, bool], sms: int,
) -> None:  # fmt: skip
    """`inputs` (x, codes, residual, codebook, in_scale, out_scale, bias, add) -> out.

    `options`: eps (negative: none), silu, wide.
    """
    device, slices = out.device.index, -(-k // SLICE)
    stream = torch._C._cuda_getCurrentRawStream(device)
    pointers = [0 if t is None else t.data_ptr() for t in (*inputs, out)]
    for first in range(0, tokens, AT_ONCE):
        count = min(AT_ONCE, tokens - first)
        shape = tile(n, k, count, sms)
        per_split, parts = splits(n, k, count, sms)
        spread, many, gather = _kernels(bits, shape, half, most(slices), device)
        tiles = -(-count // shape.tokens)
        workspace = [
            torch.empty(tiles * slices * shape.tokens * 512, dtype=torch.uint8, device=out.device),
            torch.empty(count * 2, dtype=torch.float32, device=out.device),
            torch.empty(parts * count * n, dtype=torch.float32, device=out.device) if parts > 1 else None,
        ]
        x, *layer, add, y = pointers
        at = (
            x + first * (2 * k if options[1] else k) * 2,
            *layer,
            add and add + first * n * out.element_size(),
            y + first * n * out.element_size(),
            *(0 if t is None else t.data_ptr() for t in workspace),
        )
        arguments = struct.pack("12Q6i2f2i", *at, count, n, k, slices, per_split, parts, norm, *options)
        spread.launch((count, 1, 1), 256, 0, 1, stream, arguments)
        many.launch((-(-n // shape.rows), tiles, parts), THREADS, shape.shared(bits), 1, stream, arguments)
        if parts > 1:
            gather.launch((-(-n // 128), -(-count // 8), 1), 256, 0, 1, stream, arguments)
