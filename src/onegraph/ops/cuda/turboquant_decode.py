"""Launches `turboquant_attention.cu` with this step's write in it; see the record in `onegraph.ops.turboquant_decode`.

A cluster of blocks takes a (sequence, kv head) pair and merges what its blocks found through shared memory: one launch,
for rows that can hold little for the blocks there are. What else there is, is left to the two ops.
"""

import math
from functools import cache as cached

import torch
from torch import Tensor

from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cuda import build, launcher
from onegraph.ops.cuda.turboquant import SCALES
from onegraph.ops.cuda.turboquant_attention import (
    CLUSTERED,
    DTYPES,
    KERNELS,
    MAX_BATCH,
    PLACES,
    TILE,
    AttentionTiling,
)

DIMS = (64, 128)
MAX_GROUP = 6  # queries of a kv head: with key and value, the rows of half a product
ALIGNMENT = 16  # bytes, of what is read as 16 bytes at once
CLUSTERS = (8, 4, 2)
SHORT = 4096  # tokens that a row can hold at most
TILES = 5  # that a warp has at most: beyond, blocks that follow the lengths balance rows better


@cached
def _clusters(plan: AttentionTiling, sizes: tuple[int, ...], device: int) -> dict[int, int]:
    """How many clusters of each size run at once."""
    stages, threads = plan.stages(1, build.device(device)), plan.warps * 32
    together = launcher.kernels(KERNELS, device, *plan.defines(stages).items())[CLUSTERED[0]]
    return {n: build.clusters(together, threads, plan.shared(stages, 1), n) for n in sizes}


def _page_size(call: TurboQuantDecode) -> int:
    bits = sum(book.numel().bit_length() - 1 for book in (call.k_codebook, call.v_codebook))
    return call.cache.shape[2] * 8 // (call.turn.shape[0] * bits + 32)


def plan_of(call: TurboQuantDecode) -> tuple[AttentionTiling, int] | None:
    """What `decode` computes such a call with, and how many blocks share the keys of a pair: the most of which all
    pairs' run at once. None where it does not."""
    qkv, dim, kv_heads, page_size = call.qkv, call.turn.shape[0], call.cache.shape[1], _page_size(call)
    batch, length, _ = qkv.shape
    group, reach = call.heads // kv_heads, call.block_table.shape[1] * page_size
    read = [t for t in (qkv, call.q_norm, call.k_norm, call.cos, call.sin, call.turn) if t is not None]
    if not (
        qkv.is_cuda
        and length == 1
        and 0 < batch <= MAX_BATCH
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and all(norm is None or norm.dtype == qkv.dtype for norm in (call.q_norm, call.k_norm))
        and dim in DIMS
        and (call.cos is None or 2 * call.cos.shape[1] == dim)
        and group <= MAX_GROUP
        and reach <= SHORT
        and all(t.data_ptr() % ALIGNMENT == 0 for t in read)
        and KERNELS.is_built(qkv.device.index)
        and not KERNELS.is_portable(qkv.device.index)
    ):
        return None
    bits = [book.numel().bit_length() - 1 for book in (call.k_codebook, call.v_codebook)]
    rows, kind = 4 if group <= 4 else 8, SCALES[call.kind]
    plan = AttentionTiling(dim, bits[0], bits[1], rows, DTYPES[qkv.dtype], page_size // 16, group, kind)
    fitting = _clusters(plan, CLUSTERS, qkv.device.index)
    size = next((n for n in CLUSTERS if batch * kv_heads <= fitting[n]), 1)
    return (plan, size) if reach <= TILES * plan.warps * TILE * size else None


def decode(call: TurboQuantDecode, plan: AttentionTiling, cluster: int, spare: int) -> Tensor:
    """[B, 1, heads, D], as `plan_of` says; `spare` as of `onegraph.ops.recent_attention`."""
    qkv, cache, ring, dim, table = call.qkv, call.cache, call.ring, plan.dim, call.block_table
    batch, device, (pages, kv_heads, _), ring_size = len(qkv), qkv.device.index, cache.shape, ring.shape[1]
    out = qkv.new_empty((batch, 1, call.heads, dim))
    stages = plan.stages(1, build.device(device))
    grid, shared = (kv_heads * cluster, batch, 1), plan.shared(stages, 1)
    launcher.launch(
        KERNELS, plan.defines(stages), launcher.Launch(grid, plan.warps * 32, shared, cluster, CLUSTERED[0]),
        q=qkv, cache=cache, block_table=table, positions=call.positions, counts=call.counts, ends=None,
        rotation=call.rotation, k_codebook=call.k_codebook, v_codebook=call.v_codebook, sinks=None, partial=None,
        sums=None, work=None, out=out, lse=None, ring=ring, slots=call.slots, q_norm=call.q_norm,
        k_norm=call.k_norm, cos=call.cos, sin=call.sin, turn=call.turn,
        batch=batch, length=1, kv_heads=kv_heads, group=plan.group, table_stride=table.stride(0),
        reach=table.shape[1] * _page_size(call), pages=pages, window=max(call.limit - call.window, 0), row_tiles=1,
        limit=0, least=0, recent=call.window, spare=spare, near_limit=call.limit, ring_size=ring_size,
        ring_tiles=-(-ring_size // PLACES), ring_at=0, ahead=1, cluster=cluster,
        max_position=0 if call.cos is None else len(call.cos) - 1, early=call.early,
        scale=call.scale * math.log2(math.e), back=dim**-0.5, eps=call.eps,
    )  # fmt: skip
    return out
