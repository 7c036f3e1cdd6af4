"""E8P linear for 5 to 64 tokens: how `e8p_few.cu` is cut over the GPU, and which calls it takes.

The codes are read once for up to 64 tokens; what a call needs beside its result is the rotated activations in two bytes
each and a scale a token.
"""

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_name("e8p_few.cu")
MAX_TOKENS = 64
MAX_K = 32768  # 16 warps of e8p_bytes hold 8 slices each
SLICE = 256  # columns, as in e8p_common.cuh
LARGEST = 8  # blocks of a cluster
KNOWN = "N", "K", "PER_BLOCK", "CLUSTER", "SILU", "WIDE"  # what `Shape` of e8p_few.cu is made of
SHARED_LIMIT = 227 * 1024  # bytes that a block can have on Hopper
SLOT = {2: 1024, 3: 1536, 4: 2048}  # bytes of 16 rows' codes of a slice, by bits


@dataclass(frozen=True)
class Form:
    """A block's share: `groups` warpgroups of 64 rows by `tokens`. Each warp has `depth` slices of codes under way, and
    the block `stages` of activations, 128 columns each."""

    tokens: int
    groups: int
    depth: int
    stages: int

    @property
    def rows(self) -> int:
        return self.groups * 64

    @property
    def threads(self) -> int:
        return self.groups * 128 + 32

    def shared(self, bits: int) -> int:
        """Bytes of shared memory: tables, barriers, stages, rings, sums."""
        tables = 98304 if bits == 3 else 65536
        rings = self.groups * 4 * self.depth * SLOT[bits]
        return tables + 1024 + self.stages * self.tokens * 256 + rings + self.tokens * (self.rows + 8) * 4


def form(bits: int, tokens: int) -> Form:
    """The form for a number of tokens: as much under way as shared memory holds."""
    depth = 4 if bits == 2 else 2
    if tokens <= 16:
        return Form(8 if tokens <= 8 else 16, 4, depth, 12 if bits == 3 else 16)
    if tokens <= 32:
        return Form(32, 4, depth, 6 if bits == 3 else 8)
    return Form(64, 2, depth, 4 if bits == 3 else 6)


@dataclass(frozen=True, order=True)
class Plan:
    """`tiles` of rows, each of a cluster of `cluster` blocks that own `per_block` slices of k."""

    cluster: int
    per_block: int
    tiles: int

    def cost(self, room: tuple[int, ...]) -> float:
        """Estimated microseconds on an H200, up to what all cuts have in common. `room`: clusters of 1, 2, .. blocks
        that the GPU holds at a time."""
        waves = -(-self.tiles // max(1, room[self.cluster - 1]))
        return waves * (self.per_block * 0.9 + 1.5) + (0.5 + 0.15 * self.cluster if self.cluster > 1 else 0.0)


@lru_cache(maxsize=1024)
def plan(n: int, k: int, rows: int, room: tuple[int, ...]) -> Plan:
    """The cut that costs least."""
    slices, tiles = -(-k // SLICE), -(-n // rows)
    cuts = [Plan(c, -(-slices // c), tiles) for c in range(1, LARGEST + 1)]
    return min(
        (cut for cut in cuts if (cut.cluster - 1) * cut.per_block < slices),  # every block has something to do
        key=lambda cut: (cut.cost(room), cut),
    )


def takes(tokens: int, bits: int, k: int) -> bool:
    """Whether this kernel computes a shape that `e8p.takes` allows: the copy engine wants rows of 16 bytes."""
    return 4 < tokens <= MAX_TOKENS and k <= MAX_K and (bits != 3 or k % 128 == 0)


@cache
def _kernels(bits: int, shape: Form, half: bool, known: tuple[int, ...], device: int) -> tuple[build.Kernel, ...]:
    """`known`: as in `KNOWN`."""
    defines = {"BITS": bits, "HALF": int(half), "TOKENS": shape.tokens, "GROUPS": shape.groups}
    defines |= {"DEPTH": shape.depth, "AHEAD": shape.stages} | dict(zip(KNOWN, known, strict=True))
    return build.load(SOURCE, defines, ("e8p_few", "e8p_bytes"), device, SHARED_LIMIT)


@cache
def _room(device: int) -> tuple[int, ...]:
    """Clusters of 1 to LARGEST blocks that the GPU holds at a time. One block an SM: one of any form takes more than
    half of its shared memory."""
    shape = form(2, MAX_TOKENS)
    few = _kernels(2, shape, False, (shape.rows, SLICE, 1, 1, 0, 0), device)[0]
    sizes = range(2, LARGEST + 1)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return sms, *(build.clusters(few, shape.threads, shape.shared(2), size) for size in sizes)


def launch(
    inputs: list[Tensor | None], out: Tensor, bits: int, tokens: int, n: int, k: int, half: bool, norm: float,
    options: tuple[float, bool, bool],
) -> None:  # fmt: skip
    """`inputs` (x, codes, residual, codebook, in_scale, out_scale, bias, add) -> out.

    `options`: eps (negative: none), silu, wide.
    """
    device, slices = out.device.index, -(-k // SLICE)
    shape, room = form(bits, tokens), _room(device)
    cut = plan(n, k, shape.rows, room)
    eps, *around = options
    few, spread = _kernels(bits, shape, half, (n, k, cut.per_block, cut.cluster, *map(int, around)), device)
    data = torch.empty(slices * shape.tokens * 512, dtype=torch.uint8, device=out.device)
    scales = torch.empty(tokens * 2, dtype=torch.float32, device=out.device)
    x, codes, residual, *rest = (0 if t is None else t.data_ptr() for t in (*inputs, out, data, scales))
    maps = build.tensor_map(codes, n, k // 4, 16, 64)
    width = 8 if bits == 3 else 4  # columns that a byte of the residual stands for
    maps += maps if bits == 2 else build.tensor_map(residual, n, k // width, 16, 256 // width)
    arguments = maps + struct.pack("9Qi2f44x", x, *rest, tokens, norm, eps)
    stream = torch._C._cuda_getCurrentRawStream(device)
    spread.launch((tokens, 1, 1), 512, 0, 1, stream, arguments)
    blocks = min(cut.tiles, room[0]) if cut.cluster == 1 else cut.tiles * cut.cluster
    few.launch((blocks, 1, 1), shape.threads, shape.shared(bits), cut.cluster, stream, arguments)
