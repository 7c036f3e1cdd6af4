"""E8P linear for 5 to 64 tokens: how `e8p_batch.cu` is cut over the GPU, and which calls it takes.

The codes are read once for up to 64 tokens; what a call needs beside its result is the rotated activations in two bytes
each, a scale for a token and share of k, and sums where several clusters share k.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import MAX_K, ROWS, SLICE, SLOT, TABLES, Linear
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.tensor_map import tensor_map

MAX_TOKENS = 64
LARGEST = 8  # blocks of a cluster
CUTS = *((cluster, 1) for cluster in range(1, LARGEST + 1)), (2, 2), (2, 4)  # of k: blocks of a cluster, clusters
# Microseconds that a block takes for a slice on an H200, by tokens and bits: how the cuts of 14336 -> 4096 and those of
# 4096 -> 4096 differ.
SLICE_US = {16: {2: 0.84, 3: 1.33, 4: 1.52}, 32: {2: 1.18, 3: 1.72, 4: 1.77}, 64: {2: 0.84, 3: 1.12, 4: 1.21}}
SHAPE = "N", "K", "PER_BLOCK", "CLUSTER", "PARTS", "SILU", "WIDE"  # what `Shape` of e8p_batch.cu is made of

ARGUMENTS = build.Arguments(
    maps=("codes_map", "residual_map"),
    pointers=("x", "codebook", "in_scale", "out_scale", "bias", "add", "y", "bytes", "scales", "sums", "arrived"),
    ints=("tokens",),
    floats=("norm", "eps"),
)


@dataclass(frozen=True, order=True)
class BatchTiling:
    """`tiles` of rows, each of `parts` clusters of `cluster` blocks, which own `per_block` slices of k. A block's share
    is `groups` warpgroups of 64 rows by `tokens`; each warp has `depth` slices of codes under way, and the block
    `stages` of activations, 128 columns each."""

    cluster: int
    parts: int
    per_block: int
    tiles: int
    tokens: int
    groups: int
    depth: int
    stages: int

    @property
    def rows(self) -> int:
        return self.groups * 64

    @property
    def cuts(self) -> int:
        """Shares of k."""
        return self.cluster * self.parts

    @property
    def threads(self) -> int:
        return self.groups * 128 + 32

    @property
    def rotating(self) -> int:
        """Threads of a block of e8p_rotate: a warp holds as few slices as 16 warps allow."""
        return 32 * -(-self.per_block // -(-self.per_block // 16))

    def shared(self, bits: int) -> int:
        """Bytes of shared memory: tables, barriers, stages, rings, sums."""
        rings = self.groups * 4 * self.depth * SLOT[bits]
        return TABLES[bits] + 1024 + self.stages * self.tokens * 256 + rings + self.tokens * (self.rows + 8) * 4

    def cost(self, bits: int, device: build.Device) -> float:
        """Estimated microseconds on an H200, up to what all plans have in common. One block an SM: it takes more than
        half of its shared memory."""
        tokens = max(self.tokens, 16)  # 8 are cut as 16 are (ops/invariant.py)
        waves = -(-self.tiles * self.parts // max(1, device.clusters[self.cluster - 1]))
        clustered = 0.5 + 0.15 * self.cluster if self.cluster > 1 else 0.0
        met = 1.4 + 1e-4 * self.parts * tokens * self.rows if self.parts > 1 else 0.0
        return waves * (self.per_block * SLICE_US[tokens][bits] + 1.5) + clustered + met


def share(bits: int, tokens: int) -> tuple[int, int, int, int]:
    """tokens, groups, depth, stages of a block: as much under way as shared memory holds."""
    depth = 4 if bits == 2 else 2
    if tokens <= 16:
        return 8 if tokens <= 8 else 16, 4, depth, 12 if bits == 3 else 16
    if tokens <= 32:
        return 32, 4, depth, 6 if bits == 3 else 8
    return 64, 2, depth, 4 if bits == 3 else 6


@lru_cache(maxsize=1024)
def plan(n: int, k: int, bits: int, tokens: int, device: build.Device) -> BatchTiling:
    """The plan that costs least."""
    own = share(bits, tokens)
    slices, tiles = -(-k // SLICE), -(-n // (own[1] * 64))
    plans = [BatchTiling(cluster, parts, -(-slices // (cluster * parts)), tiles, *own) for cluster, parts in CUTS]
    plans = [plan for plan in plans if (plan.cuts - 1) * plan.per_block < slices]  # every block has something to do
    return min(
        (plan for plan in plans if plan.parts == 1 or tiles * plan.parts <= device.clusters[plan.cluster - 1]),
        key=lambda plan: (plan.cost(bits, device), plan),
    )


def supports_shape(tokens: int, k: int, bits: int) -> bool:
    """Whether this kernel computes a shape that `e8p.supports_shape` allows: the copy engine wants rows of 16 bytes."""
    return tokens <= MAX_TOKENS and k <= MAX_K and (bits != 3 or k % 128 == 0)


def defines(plan: BatchTiling, n: int, k: int, bits: int, half: bool, silu: bool, wide: bool) -> dict[str, int]:
    """What e8p_batch.cu is compiled with."""
    made = {"BITS": bits, "HALF": int(half), "TOKENS": plan.tokens, "GROUPS": plan.groups}
    made |= {"DEPTH": plan.depth, "AHEAD": plan.stages}
    return made | dict(zip(SHAPE, (n, k, plan.per_block, plan.cluster, plan.parts, int(silu), int(wide)), strict=True))


KERNELS = build.Source(
    "e8p_batch",
    ops=("e8p_linear",),
    functions=("e8p_batch", "e8p_rotate"),
    arguments=ARGUMENTS,
    capabilities=build.HOPPER,
    example=defines(BatchTiling(1, 1, 16, 16, *share(2, MAX_TOKENS)), 2048, 4096, 2, False, False, False),
    otherwise="another kernel runs 5 to 64 tokens of an E8P linear",
)


def run(call: Linear) -> None:
    """`call`, whose shape `supports_shape` allows."""
    n, k, bits, tokens, device = call.n, call.k, call.bits, call.tokens, call.out.device
    gpu = build.device(device.index)
    chosen = plan(n, k, bits, tokens, gpu)
    data = torch.empty(-(-k // SLICE) * chosen.tokens * 512, dtype=torch.uint8, device=device)
    scales = torch.empty(tokens * chosen.cuts * 4, dtype=torch.float32, device=device)
    counters, sums = chosen.tiles * chosen.tokens * chosen.rows // ROWS, 0
    if chosen.parts > 1:
        meeting = torch.empty(counters * (1 + chosen.parts * ROWS), dtype=torch.float32, device=device)
        sums = meeting.data_ptr()
    codes_map = tensor_map(call.codes.data_ptr(), n, k // 4, 16, SLICE // 4)
    residual_map, width = codes_map, 8 if bits == 3 else 4  # columns that a byte of the residual stands for
    if call.residual is not None:
        residual_map = tensor_map(call.residual.data_ptr(), n, k // width, 16, SLICE // width)
    blocks = min(chosen.tiles, gpu.sms) if chosen.cuts == 1 else chosen.tiles * chosen.cuts
    launch(
        KERNELS, defines(chosen, n, k, bits, call.half, call.silu, call.wide),
        Launch((tokens * chosen.cuts, 1, 1), chosen.rotating, function="e8p_rotate"),
        Launch((blocks, 1, 1), chosen.threads, chosen.shared(bits), chosen.cluster, "e8p_batch"),
        **call.arguments, codes_map=codes_map, residual_map=residual_map, codebook=call.codebook, bytes=data,
        scales=scales, sums=sums, arrived=sums and sums + 4 * counters * chosen.parts * ROWS,
    )  # fmt: skip
