"""NVFP4 linears of one token and experts of few on a GPU: how `nvfp4_one.cu` is cut, and which calls it takes.

Codes and scales come through the copy engine, whose boxes ask for k in multiples of 256. A block leaves room for one of
the next launch, which fetches its first codes meanwhile. Every launch has as many blocks as the GPU has SMs, also where
some are idle: of fewer, the next launch's blocks would gather in pairs where there is room.
"""

import struct
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_name("nvfp4_one.cu")
ROWS, SLICE, UNITS = 16, 256, 8  # as in nvfp4_one.cu; units of a stage
STAGE = UNITS * 2304 + 16  # bytes of shared memory: codes and scales of a stage, two barriers
PACE = 300  # nanoseconds between the first stages
ROUND = 16  # row tiles whose sums a block holds
HALF_SM, WHOLE_SM = 113 * 1024, 227 * 1024  # bytes of shared memory of each of two blocks on a Hopper SM, and of one
MOST_TWICE = 1.3  # pairs of a token and an expert for each distinct expert, were all as popular
LINEAR, GATE_UP, DOWN = 0, 1, 2  # MODE


@dataclass(frozen=True)
class Cut:
    """Each block owns up to `hold` row tiles, adds up `round` of them at a time, and holds up to `span` rows of x.
    `warps` multiply, one more fetches; `depth` stages are under way. `shared`: bytes of shared memory."""

    blocks: int
    hold: int
    round: int
    span: int
    warps: int
    depth: int
    shared: int


@cache
def cut(
    tiles: int, slices: int, gains: int, each: int, blocks: int, warps: int, depths: tuple[int, ...], limit: int
) -> Cut | None:
    """The cut of `tiles` tiles of 16 rows with `slices` slices of k over `blocks` blocks. `gains`: global scales of a
    row; `each`: tiles of a row of x. The first of `depths` beside which all the rest fits into `limit` bytes is taken;
    None where none does."""
    hold = -(-tiles // blocks)
    round = min(hold, ROUND)
    edges = [tiles * i // blocks for i in range(blocks + 1)]
    span = max((end - 1) // each - begin // each + 1 for begin, end in pairwise(edges) if begin < end)
    beside = span * slices * 2 * SLICE + (-(-span * slices // 4) + 1) * 16 + (round * warps + hold * gains) * ROWS * 4
    for depth in depths:
        if (shared := depth * STAGE + beside) <= limit:
            return Cut(blocks, hold, round, span, warps, depth, shared)
    return None


def linear_cut(n: int, k: int, groups: int, sms: int) -> Cut | None:
    """The cut of `groups` linears of one token side by side, None where another kernel is to take them."""
    tiles = -(-n // ROWS)
    return None if k % SLICE else cut(groups * tiles, k // SLICE, 1, tiles, sms, 8, (4, 3, 2), HALF_SM)


def experts_cuts(tokens: int, dim: int, wide: int, matrices: int, top_k: int, sms: int) -> tuple[Cut, Cut] | None:
    """The cuts of gate-up and down of experts, None where another kernel is to take them. Every pair of a token and an
    expert reads that one's weights for itself: not where tokens are bound to choose the same experts.

    Gate-up, whose first codes wait for the choice of experts anyway, takes what one token's down leaves."""
    pairs = tokens * top_k
    distinct = matrices * (1 - (1 - 1 / matrices) ** pairs)
    if dim % SLICE or wide % SLICE or (tokens > 1 and pairs > MOST_TWICE * distinct):
        return None
    tiles, wide_tiles = -(-dim // ROWS), top_k * (wide // 8)
    few = (8, (3, 2), HALF_SM) if tokens == 1 else (16, (8, 6, 4), WHOLE_SM)
    down = cut(tokens * tiles, top_k * (wide // SLICE), top_k, tiles, sms, *few)
    if down is None:
        return None
    left = 2 * HALF_SM - down.shared if tokens == 1 else WHOLE_SM
    gate_up = cut(tokens * wide_tiles, dim // SLICE, 1, wide_tiles, sms, 16, (8, 6, 4, 2)[tokens == 1 :], left)
    return None if gate_up is None else (gate_up, down)


@cache
def _kernel(mode: int, half: bool, warps: int, depth: int, device: int) -> build.Kernel:
    defines = {"MODE": mode, "HALF": int(half), "WARPS": warps, "DEPTH": depth, "PACE": PACE}
    return build.load(SOURCE, defines, ("nvfp4_one",), device, WHOLE_SM)[0]


def run(
    mode: int,
    codes: Tensor,
    scale: Tensor,
    tensors: tuple[Tensor | None, ...],
    y: Tensor,
    sizes: tuple[int, int, int, int, int],
    cut: Cut,
    limit: float = 0.0,
) -> None:
    """Launches one mode. `tensors`: x, global_scale, bias, experts, weights; `sizes`: tokens, n, k, matrices, top_k.
    Pointers are multiples of 16."""
    _, n, k, matrices, _ = sizes
    rows, box = ROWS // 2 if mode == GATE_UP else ROWS, gcd(k // SLICE, UNITS)
    maps = build.sliced_tensor_map(codes.data_ptr(), matrices * n, k // 2, (SLICE // 2, rows, box), swizzle=True)
    maps += build.sliced_tensor_map(scale.data_ptr(), matrices * n, k // 16, (SLICE // 16, rows, box), swizzle=False)
    pointers = [0 if t is None else t.data_ptr() for t in (*tensors, y)]
    kernel = _kernel(mode, y.dtype == torch.float16, cut.warps, cut.depth, y.device.index)
    arguments = maps + struct.pack("6Q9if40x", *pointers, *sizes, cut.hold, cut.round, cut.span, box, limit)
    with torch.cuda.device(y.device):  # the driver launches in the current context
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch((cut.blocks, 1, 1), (cut.warps + 1) * 32, cut.shared, 1, stream, arguments)
