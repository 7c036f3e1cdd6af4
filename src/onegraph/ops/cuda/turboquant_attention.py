"""Attention from TurboQuant codes: which calls `turboquant_attention.cu` takes and how it is cut over the GPU.

A call is two launches: `attend` over a constant grid of blocks that take splits of sequences and tiles of rings,
`merge` over the queries. What a split is follows from the lengths and is computed on the device. Where rows can hold
little (`SHORT`), it is one launch, the splits of a sequence a cluster of blocks each. `turboquant_decode.py` launches
that with a decode step's write in it.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MAX_DIM, MAX_BATCH = 256, 1024
TILE, LEAST = 32, 4  # tokens; tiles that a split has at least
WARPS = 8  # of a block: as many as merge, and half of them where shared memory is short
MAX_STAGES = 4
SHORT = 4096  # tokens of a row at most, for which the splits of a sequence are the blocks of a cluster, in one launch
CLUSTERS = (2, 4, 8)
MANY = 128  # queries, from which on a block merges four of them
PLACES = 16  # of a ring, that a warp attends to
RINGERS, RECEIVED = 4, 8  # of a block that writes: warps that attend to the ring, rows that others send

ARGUMENTS = build.Arguments(
    pointers=(
        "q", "cache", "block_table", "positions", "counts", "ends", "rotation", "k_codebook", "v_codebook", "sinks",
        "partial", "sums", "work", "out", "lse", "ring", "slots", "q_norm", "k_norm", "cos", "sin", "turn",
    ),
    ints=(
        "batch", "length", "kv_heads", "group", "table_stride", "reach", "pages", "window", "row_tiles", "limit",
        "least", "recent", "spare", "near_limit", "ring_size", "ring_tiles", "ring_at", "ahead", "cluster",
        "max_position", "early",
    ),
    floats=("scale", "back", "eps"),
)  # fmt: skip


CLUSTERED, FUNCTIONS = ("attend_and_merge",), ("attend", "merge_1", "merge_4")


@dataclass(frozen=True)
class Near:
    """The ring of exact tokens; see `onegraph.ops.turboquant_hybrid.turboquant_hybrid`."""

    ring: Tensor
    slots: Tensor
    spare: int
    limit: int


@dataclass(frozen=True)
class AttentionTiling:
    """What the kernel is compiled for; see the end of the first comment of `turboquant_attention.cu`. `group`: of the
    queries of a launch that writes its step's token, 0 for one that does not."""

    dim: int
    k_bits: int
    v_bits: int
    rows: int
    dtype: int
    page_blocks: int
    group: int = 0
    scale: int = 0
    warps: int = WARPS

    @property
    def per_sm(self) -> int:
        """Blocks that share an SM: two where their registers suffice. (One of 16 warps was slower but for 32k x 8.)"""
        return 2 if self.dim <= 128 and self.rows <= 8 else 1

    @property
    def stage(self) -> int:
        """Bytes of two blocks of 16 tokens in shared memory, rows of values apart."""
        width = 2 if self.v_bits == 3 else self.v_bits
        pair = self.dim * width // 4
        block = 2 * self.dim * (self.k_bits + self.v_bits) + 64
        return 2 * (block + (8 * 32 if pair % 64 == 0 else 0))

    def shared(self, stages: int, batch: int) -> int:
        """Bytes of shared memory of a block, rounded up."""
        fixed = 64 + 16 * self.rows * (1 + self.warps) + 2 * self.rows * (self.dim + 16) + 256
        probabilities = self.warps * max(8, self.rows) * 80
        ring = max(stages * self.stage, self.rows * self.dim * 4) * self.warps
        fresh = 2 * (self.group + 2) * (self.dim + 8) + 8 * (self.dim + 4)
        parts = RINGERS * self.rows * (self.dim * 4 + 8) + RECEIVED * self.dim * 4
        return fixed + probabilities + ring + (fresh + parts if self.group else 0) + 28 * batch

    def stages(self, batch: int, device: build.Device) -> int:
        """Tiles that a warp has in flight: as many as fit, at least one."""
        room = device.sm_shared // self.per_sm - build.RESERVED
        return max([1, *(s for s in range(1, MAX_STAGES + 1) if self.shared(s, batch) <= room)])

    def fitting(self, batch: int, device: build.Device) -> "AttentionTiling":
        """This, with half the warps where a block's shared memory does not hold the sums of all."""
        return self if self.shared(1, batch) <= device.shared else replace(self, warps=WARPS // 2)

    def defines(self, stages: int) -> dict[str, int]:
        """What turboquant_attention.cu is compiled with."""
        made = {"DIM": self.dim, "KBITS": self.k_bits, "VBITS": self.v_bits, "ROWS": self.rows, "DTYPE": self.dtype}
        made |= {"PAGE_BLOCKS": self.page_blocks, "WARPS": self.warps, "STAGES": stages, "PER_SM": self.per_sm}
        return made | {
            "WRITES": int(self.group > 0),
            "GROUP": max(self.group, 1),
            "SCALE": self.scale,
        }


KERNELS = build.Source(
    "turboquant_attention",
    ops=("turboquant_attention", "turboquant_hybrid", "turboquant_decode"),
    functions=(*CLUSTERED, *FUNCTIONS),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    clustered=CLUSTERED,
    example=AttentionTiling(64, 4, 4, 4, 0, 1).defines(2),
    otherwise="attention from TurboQuant codes runs unfused",
)


def most_rows(dim: int, clusters: bool) -> int:
    """Queries of a kv head that a warp has at a time, at most: sums of 16 do not stay in registers of the portable form
    where heads are large."""
    return 16 if clusters or dim <= 128 else 8


def supports_input(q: Tensor) -> bool:
    """Whether `attend` computes a call with these queries [B, Q, H, D]."""
    return q.is_cuda and q.shape[3] <= MAX_DIM and q.shape[0] <= MAX_BATCH and KERNELS.is_built(q.device.index)


def _limit(pairs: int, at_once: int) -> int:
    """Items that all splits together may make. Where (sequence, head) pairs are fewer than blocks, one a block, and the
    same number for each pair if that leaves few blocks idle; else the fewest splits that fill nine tenths of the last
    wave."""
    if pairs <= at_once:
        whole = at_once // pairs * pairs
        return whole if whole >= 0.9 * at_once else at_once
    full = (n for n in range(pairs, 5 * pairs, pairs) if n >= 0.9 * at_once * -(-n // at_once))
    return next(full, 4 * pairs)


def _cluster(pairs: int, per_sm: int, device: build.Device) -> int:
    """Blocks that share the keys of a (sequence, head) pair, if all clusters fit at once; 0 where none do."""
    return max((size for size in CLUSTERS if pairs <= device.at_once(size, per_sm)), default=0)


def attend(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    counts: Tensor,
    ends: Tensor | None,
    rotation: Tensor | None,
    k_codebook: Tensor,
    v_codebook: Tensor,
    sinks: Tensor | None,
    page_size: int,
    scale: float,
    window: int,
    recent: int = 0,
    near: Near | None = None,
) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.turboquant_attention.turboquant_attention`; codes of 1 to 4 bits, variant `mse`. The latest
    `recent` tokens of each query are left out. With `near`, of queries in 16 bits,
    `onegraph.ops.turboquant_hybrid.turboquant_hybrid`, and no log-sum-exp."""
    batch, length, heads, dim = q.shape
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3] if near is None else 0, dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    pages, kv_heads, _ = cache.shape
    device, group = build.device(q.device.index), heads // kv_heads
    clustered = not KERNELS.is_portable(q.device.index)
    rows = next((n for n in (4, 8) if length * group <= n), most_rows(dim, clustered))
    bits = [c.numel().bit_length() - 1 for c in (k_codebook, v_codebook)]
    plan = AttentionTiling(dim, bits[0], bits[1], rows, DTYPES[q.dtype], page_size // 16).fitting(batch, device)
    stages = plan.stages(batch, device)

    row_tiles = -(-length * group // rows)
    blocks, pairs, reach = device.sms * plan.per_sm, batch * kv_heads * row_tiles, block_table.shape[1] * page_size
    cluster = _cluster(pairs, plan.per_sm, device) if reach <= SHORT and clustered else 0
    if cluster < min(rows, length * group):  # else a block would merge several queries
        cluster = 0
    limit = pairs * cluster or min(_limit(pairs, blocks), pairs * -(-reach // (TILE * LEAST)))
    items = max(limit, pairs)
    ring_tiles = -(-near.ring.shape[1] // PLACES) if near else 0
    results = (items + pairs * ring_tiles) * rows
    partial = torch.empty(results * dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(results * 2, dtype=torch.float32, device=q.device)
    work = torch.empty(batch * 2, dtype=torch.int32, device=q.device)
    ring, spare, near_limit, slots = (near.ring, near.spare, near.limit, near.slots) if near else (None, 0, 0, None)
    threads, shared = plan.warps * 32, plan.shared(stages, batch)
    if cluster:
        grid = kv_heads * cluster, batch * row_tiles, 1
        launches = [Launch(grid, threads, shared, cluster, "attend_and_merge")]
    else:
        queries = batch * length * heads
        merged = 4 if queries >= MANY else 1  # by a block, which reads the rotation once
        parts = 8 + merged + 512 // dim * merged
        merge = Launch((-(-queries // merged), 1, 1), 256, parts * dim * 4 + 64, function=f"merge_{merged}")
        launches = [Launch((min(blocks, items), 1, 1), threads, shared, function="attend"), merge]
    launch(
        KERNELS, plan.defines(stages), *launches,
        q=q, cache=cache, block_table=block_table, positions=positions, counts=counts, ends=ends, rotation=rotation,
        k_codebook=k_codebook, v_codebook=v_codebook, sinks=sinks, partial=partial, sums=sums, work=work, out=out,
        lse=None if near else lse, ring=ring, slots=slots, q_norm=None, k_norm=None, cos=None, sin=None, turn=None,
        batch=batch, length=length, kv_heads=kv_heads, group=group, table_stride=block_table.stride(0), reach=reach,
        pages=pages, window=window, row_tiles=row_tiles, limit=limit, least=LEAST, recent=recent, spare=spare,
        near_limit=near_limit, ring_size=1 if ring is None else ring.shape[1], ring_tiles=ring_tiles, ring_at=items,
        ahead=length == 1, cluster=cluster, max_position=0, early=1,
        scale=scale * math.log2(math.e), back=dim**-0.5, eps=0.0,
    )  # fmt: skip
    return out, lse
