"""Launches `turboquant_attention.cu` with this step's write in it; see the record in `onegraph.ops.turboquant_decode`.

A cluster of blocks takes a (sequence, kv head) pair and merges what its blocks found through shared memory: one launch,
for rows that can hold little for the blocks there are. What else there is, is left to the two ops.
"""

import math
from dataclasses import dataclass
from functools import cache as cached

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.turboquant_attention import (
    ARGUMENTS,
    DTYPES,
    MAX_BATCH,
    PLACES,
    TILE,
    Near,
    Plan,
    available,
    kernels,
)

DIMS = (64, 128)
MAX_GROUP = 6  # queries of a kv head: with key and value, the rows of half a product
ALIGNMENT = 16  # bytes, of what is read as 16 bytes at once
SCALES = {"norm": 0, "matched": 1, "unbiased": 2}
CLUSTERS = (8, 4, 2)
SHORT = 4096  # tokens that a row can hold at most
TILES = 5  # that a warp has at most: beyond, blocks that follow the lengths balance rows better


@dataclass(frozen=True)
class Token:
    """What a row's new token is made of; see `onegraph.ops.turboquant.turboquant_write`."""

    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    cos: Tensor | None
    sin: Tensor | None
    turn: Tensor
    heads: int
    kind: str


@cached
def _clusters(plan: Plan, sizes: tuple[int, ...], device: int) -> dict[int, int]:
    """How many clusters of each size run at once."""
    stages, threads = plan.stages(1, build.device(device)), plan.warps * 32
    together = kernels(plan, stages, device)[0]
    return {n: build.clusters(together, threads, plan.shared(stages, 1), n) for n in sizes}


def plan_of(
    token: Token,
    cache: Tensor,
    block_table: Tensor,
    k_codebook: Tensor,
    v_codebook: Tensor,
    page_size: int,
) -> tuple[Plan, int] | None:
    """What `decode` computes such a call with, and how many blocks share the keys of a pair: the most of which all
    pairs' run at once. None where it does not."""
    qkv, dim, kv_heads = token.qkv, token.turn.shape[0], cache.shape[1]
    batch, length, _ = qkv.shape
    group, reach = token.heads // kv_heads, block_table.shape[1] * page_size
    read = [t for t in (qkv, token.q_norm, token.k_norm, token.cos, token.sin, token.turn) if t is not None]
    if not (
        qkv.is_cuda
        and length == 1
        and 0 < batch <= MAX_BATCH
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and dim in DIMS
        and group <= MAX_GROUP
        and reach <= SHORT
        and all(t.data_ptr() % ALIGNMENT == 0 for t in read)
        and available(qkv.device.index)
    ):
        return None
    bits = [c.numel().bit_length() - 1 for c in (k_codebook, v_codebook)]
    rows, kind = 4 if group <= 4 else 8, SCALES[token.kind]
    plan = Plan(dim, bits[0], bits[1], rows, DTYPES[qkv.dtype], page_size // 16, group, kind)
    fitting = _clusters(plan, CLUSTERS, qkv.device.index)
    size = next((n for n in CLUSTERS if batch * kv_heads <= fitting[n]), 1)
    return (plan, size) if reach <= TILES * plan.warps * TILE * size else None


def decode(
    token: Token, plan: Plan, cluster: int, cache: Tensor, block_table: Tensor, positions: Tensor,
    counts: Tensor, rotation: Tensor, k_codebook: Tensor, v_codebook: Tensor, page_size: int, scale: float,
    window: int, recent: int, near: Near, early: bool = False,
) -> Tensor:  # fmt: skip
    """[B, 1, heads, D], as `plan_of` says; `window` and `recent` as of
    `turboquant_attention.attend`. `early`: let the next launch go in the first line."""
    batch, dim, device = len(token.qkv), plan.dim, token.qkv.device.index
    pages, kv_heads, _ = cache.shape
    out = token.qkv.new_empty((batch, 1, token.heads, dim))
    stages = plan.stages(1, build.device(device))
    (kernel,) = kernels(plan, stages, device)
    ring_size = near.ring.shape[1]
    arguments = ARGUMENTS.pack(
        **build.addresses(
            q=token.qkv, cache=cache, block_table=block_table, positions=positions, counts=counts, ends=None,
            rotation=rotation, k_codebook=k_codebook, v_codebook=v_codebook, sinks=None, partial=None, sums=None,
            work=None, out=out, lse=None, ring=near.ring, slots=near.slots, q_norm=token.q_norm, k_norm=token.k_norm,
            cos=token.cos, sin=token.sin, turn=token.turn,
        ),
        batch=batch, length=1, kv_heads=kv_heads, group=plan.group, table_stride=block_table.stride(0),
        reach=block_table.shape[1] * page_size, pages=pages, window=window, row_tiles=1, limit=0, least=0,
        recent=recent, spare=near.spare, near_limit=near.limit, ring_size=ring_size,
        ring_tiles=-(-ring_size // PLACES), ring_at=0, ahead=1, cluster=cluster,
        max_position=0 if token.cos is None else len(token.cos) - 1, early=early,
        scale=scale * math.log2(math.e), back=dim**-0.5, eps=token.eps,
    )  # fmt: skip
    stream = torch._C._cuda_getCurrentRawStream(device)
    with torch.cuda.device(token.qkv.device):
        threads, shared = plan.warps * 32, plan.shared(stages, 1)
        kernel.launch((kv_heads * cluster, batch, 1), threads, shared, cluster, stream, arguments)
    return out
