"""NVFP4 and MXFP4 linears and routed experts of one token on a GPU: how `nvfp4_one.cu` is cut, and what it takes.

Codes come through the copy engine, and so do the scales of NVFP4, whose boxes need k in multiples of 256; MXFP4
takes multiples of 64. One block an SM, also where some are idle.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.stream import GATE, GATE_UP, LINEAR, NO_GATE, ROWS, SIZES, WARPS
from onegraph.ops.cuda.tensor_map import edged_tensor_map, sliced_tensor_map

SLICE, UNITS = 256, 8  # columns of a unit, as in nvfp4_one.cu; units of a stage
PACE = 300  # nanoseconds between the first stages of a long linear
DEPTHS = (4, 2)  # stages under way
ROUND = 16  # row tiles whose sums a block holds
ARGUMENTS = build.Arguments(
    maps=("codes", "scale"),
    pointers=("x", "scales", "global_scale", "bias", "experts", "weights", "y"),
    ints=(*SIZES, "hold", "round", "span", "box"),
    floats=GATE,
)


def _defines(
    mode: int, half: bool, depth: int, group: int, *, edge: bool, wide: bool, pace: int = PACE
) -> dict[str, int]:
    flags = {"HALF": int(half), "EDGE": int(edge), "FLOAT": int(wide)}
    return flags | {"MODE": mode, "WARPS": WARPS, "DEPTH": depth, "PACE": pace, "GROUP": group}


KERNEL = build.Source(
    "nvfp4_one",
    ops=("nvfp4_linear", "mxfp4_linear", "nvfp4_experts", "mxfp4_experts"),
    functions=("nvfp4_one",),
    arguments=ARGUMENTS,
    capabilities=build.CLUSTERS,
    otherwise="nvfp4.cu runs one token too",
    example=_defines(LINEAR, False, DEPTHS[0], 16, edge=False, wide=False),
)


@dataclass(frozen=True)
class OneTokenTiling:
    """Each block owns up to `hold` row tiles, adds up `round` of them at a time, and holds up to `span` rows of x; of
    up to `stages` stages `depth` are under way. `shared`: bytes of shared memory."""

    blocks: int
    hold: int
    round: int
    span: int
    stages: int
    depth: int
    shared: int

    def pace(self, mode: int) -> int:
        """Nanoseconds between the first stages, without which activations come behind all of them: of a long linear,
        since in a step of V4-Flash, of short linears and experts, it costs more than it gives."""
        return PACE if mode == LINEAR and self.stages > 2 * self.depth else 0


@cache
def plan(tiles: int, slices: int, gains: int, each: int, blocks: int, room: int, group: int) -> OneTokenTiling | None:
    """`tiles` tiles of 16 rows with `slices` slices of k over `blocks` blocks. `gains`: numbers held of a row; `each`:
    tiles of a row of x. None where a block does not fit into `room` bytes of shared memory."""
    stage = UNITS * (2304 if group == 16 else 2048) + 16  # bytes: codes, of NVFP4 scales, two barriers
    hold = -(-tiles // blocks)
    stages = -(-hold * slices // UNITS)
    round = min(hold, ROUND)
    edges = [tiles * i // blocks for i in range(blocks + 1)]
    span = max((end - 1) // each - begin // each + 1 for begin, end in pairwise(edges) if begin < end)
    scales = span * slices * (1 if group == 16 else SLICE // group)  # of x
    beside = span * slices * 2 * SLICE + (-(-scales // 4) + 1) * 16 + (round * WARPS + hold * gains) * ROWS * 4
    for depth in DEPTHS:
        if (shared := depth * stage + beside) <= room:
            return OneTokenTiling(blocks, hold, round, span, stages, depth, shared)
    return None


def takes(group: int, *widths: int) -> bool:
    """Whether rows of so many numbers can be copied."""
    return not any(k % (SLICE if group == 16 else 2 * group) for k in widths)


def linear_plan(n: int, k: int, groups: int, device: build.Device, group: int = 16) -> OneTokenTiling | None:
    """The plan of `groups` linears of one token side by side, None where another kernel is to take them."""
    tiles = -(-n // ROWS)
    if not takes(group, k):
        return None
    return plan(groups * tiles, -(-k // SLICE), 1, tiles, device.sms, device.shared, group)


def experts_plans(
    tokens: int, dim: int, wide: int, top_k: int, device: build.Device, group: int = 16
) -> tuple[OneTokenTiling, OneTokenTiling] | None:
    """The plans of gate-up and down of experts, None where another kernel is to take them. Every token reads the
    experts that it chose for itself."""
    if not takes(group, dim, wide):
        return None
    tiles, wide_tiles = -(-dim // ROWS), top_k * (wide // 8)
    gate_up = plan(tokens * wide_tiles, -(-dim // SLICE), 1, wide_tiles, device.sms, device.shared, group)
    gains = top_k + (group != 16)
    down = plan(tokens * tiles, top_k * -(-wide // SLICE), gains, tiles, device.sms, device.shared, group)
    return None if gate_up is None or down is None else (gate_up, down)


def run(
    mode: int,
    codes: Tensor,
    scale: Tensor,
    tensors: tuple[Tensor | None, ...],
    y: Tensor,
    sizes: tuple[int, int, int, int, int],
    plan: OneTokenTiling,
    gate: tuple[float, ...] = NO_GATE,
) -> None:
    """Launches one mode, of MXFP4 where there is no global_scale. `tensors`: x, global_scale, bias, experts, weights;
    `sizes`: tokens, n, k, matrices, top_k. Pointers are multiples of 16."""
    _, n, k, matrices, _ = sizes
    x, global_scale, *_ = tensors
    assert x is not None
    group, edge = 32 if global_scale is None else 16, k % SLICE != 0
    rows, box = ROWS // 2 if mode == GATE_UP else ROWS, 1 if edge else gcd(k // SLICE, UNITS)
    at, lines = codes.data_ptr(), matrices * n
    codes_map = (
        edged_tensor_map(at, lines, k // 2, (SLICE // 2, rows))
        if edge
        else sliced_tensor_map(at, lines, k // 2, (SLICE // 2, rows, box), swizzle=True)
    )
    scale_map = bytes(128)
    if group == 16:
        scale_map = sliced_tensor_map(scale.data_ptr(), lines, k // 16, (SLICE // 16, rows, box), swizzle=False)
    pointers = dict(zip(("x", "global_scale", "bias", "experts", "weights"), tensors, strict=True))
    half, wide = x.dtype == torch.float16, y.dtype == torch.float32
    launch(
        KERNEL,
        _defines(mode, half, plan.depth, group, edge=edge, wide=wide, pace=plan.pace(mode)),
        Launch((plan.blocks, 1, 1), (WARPS + 1) * 32, plan.shared),
        codes=codes_map,
        scale=scale_map,
        **pointers,
        scales=scale,
        y=y,
        **dict(zip(SIZES, sizes, strict=True)),
        hold=plan.hold,
        round=plan.round,
        span=plan.span,
        box=box,
        **dict(zip(GATE, gate, strict=True)),
    )
