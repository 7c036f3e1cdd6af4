"""E8P linear for 5 to 64 tokens: how `e8p_batch.cu` is cut over the GPU, and which calls it takes.

The codes are read once for up to 64 tokens; what a call needs beside its result is the rotated activations in two bytes
each, a scale for a token and share of k, and sums where several clusters share k.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import MAX_K, ROWS, SLICE, SLOT, TABLES, Linear
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
class Plan:
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
def plan(n: int, k: int, bits: int, tokens: int, device: build.Device) -> Plan:
    """The plan that costs least."""
    own = share(bits, tokens)
    slices, tiles = -(-k // SLICE), -(-n // (own[1] * 64))
    plans = [Plan(cluster, parts, -(-slices // (cluster * parts)), tiles, *own) for cluster, parts in CUTS]
    plans = [plan for plan in plans if (plan.cuts - 1) * plan.per_block < slices]  # every block has something to do
    return min(
        (plan for plan in plans if plan.parts == 1 or tiles * plan.parts <= device.clusters[plan.cluster - 1]),
        key=lambda plan: (plan.cost(bits, device), plan),
    )


def takes(tokens: int, k: int, bits: int) -> bool:
    """Whether this kernel computes a shape that `e8p.takes` allows: the copy engine wants rows of 16 bytes."""
    return tokens <= MAX_TOKENS and k <= MAX_K and (bits != 3 or k % 128 == 0)


def defines(plan: Plan, n: int, k: int, bits: int, half: bool, silu: bool, wide: bool) -> dict[str, int]:
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
    example=defines(Plan(1, 1, 16, 16, *share(2, MAX_TOKENS)), 2048, 4096, 2, False, False, False),
)


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    return KERNELS.usable(device, "another kernel runs 5 to 64 tokens of an E8P linear")


@lru_cache(maxsize=4096)
def _kernels(
    n: int, k: int, bits: int, tokens: int, half: bool, silu: bool, wide: bool, device: int
) -> tuple[build.Kernel, build.Kernel, Plan, int]:
    """The kernels of a shape, their plan, and bytes of shared memory of the first."""
    chosen = plan(n, k, bits, tokens, build.device(device))
    shared = chosen.shared(bits)
    batch, rotate = KERNELS.load(defines(chosen, n, k, bits, half, silu, wide), device, shared)
    return batch, rotate, chosen, shared


def launch(call: Linear) -> None:
    """`call`, which `takes` allows, on the current device."""
    n, k, bits, device = call.n, call.k, call.bits, call.out.device.index
    batch, rotate, plan, shared = _kernels(n, k, bits, call.tokens, call.half, call.silu, call.wide, device)
    data = torch.empty(-(-k // SLICE) * plan.tokens * 512, dtype=torch.uint8, device=call.out.device)
    scales = torch.empty(call.tokens * plan.cuts * 4, dtype=torch.float32, device=call.out.device)
    counters, sums = plan.tiles * plan.tokens * plan.rows // ROWS, 0
    if plan.parts > 1:
        meeting = torch.empty(counters * (1 + plan.parts * ROWS), dtype=torch.float32, device=call.out.device)
        sums = meeting.data_ptr()
    codes_map = tensor_map(call.codes.data_ptr(), n, k // 4, 16, SLICE // 4)
    residual_map, width = codes_map, 8 if bits == 3 else 4  # columns that a byte of the residual stands for
    if call.residual is not None:
        residual_map = tensor_map(call.residual.data_ptr(), n, k // width, 16, SLICE // width)
    arguments = ARGUMENTS.pack(
        codes_map=codes_map,
        residual_map=residual_map,
        x=call.x.data_ptr(),
        codebook=call.codebook.data_ptr(),
        in_scale=call.in_scale.data_ptr(),
        out_scale=call.out_scale.data_ptr(),
        bias=build.pointer(call.bias),
        add=build.pointer(call.add),
        y=call.out.data_ptr(),
        bytes=data.data_ptr(),
        scales=scales.data_ptr(),
        sums=sums,
        arrived=sums and sums + 4 * counters * plan.parts * ROWS,
        tokens=call.tokens,
        norm=call.norm,
        eps=call.eps,
    )
    stream = torch._C._cuda_getCurrentRawStream(device)
    rotate.launch((call.tokens * plan.cuts, 1, 1), plan.rotating, 0, 1, stream, arguments)
    blocks = min(plan.tiles, build.device(device).sms) if plan.cuts == 1 else plan.tiles * plan.cuts
    batch.launch((blocks, 1, 1), plan.threads, shared, plan.cluster, stream, arguments)
