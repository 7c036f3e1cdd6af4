"""Launches `turboquant_attention.cu` with this step's write in it; see the record in `onegraph.ops.turboquant_decode`.

A cluster of blocks takes a (sequence, kv head) pair and merges what its blocks found through shared memory: one launch,
for rows that can hold little for the blocks there are. What else there is, is left to the two ops.
"""

import math
import struct
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
    Variant,
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
def _clusters(variant: Variant, sizes: tuple[int, ...], device: int) -> dict[int, int]:
    """How many clusters of each size run at once."""
    stages, threads = variant.stages(1), variant.warps * 32
    together = kernels(variant, stages, device)[0]
    return {n: build.clusters(together, threads, variant.shared(stages, 1), n) for n in sizes}


def form(
    token: Token, cache: Tensor, block_table: Tensor, k_codebook: Tensor, v_codebook: Tensor, page_size: int
) -> tuple[Variant, int] | None:
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
    variant = Variant(dim, bits[0], bits[1], rows, DTYPES[qkv.dtype], page_size // 16, group, kind)
    fitting = _clusters(variant, CLUSTERS, qkv.device.index)
    size = next((n for n in CLUSTERS if batch * kv_heads <= fitting[n]), 1)
    return (variant, size) if reach <= TILES * variant.warps * TILE * size else None


def decode(
    token: Token, variant: Variant, cluster: int, cache: Tensor, block_table: Tensor, positions: Tensor,
    counts: Tensor, rotation: Tensor, k_codebook: Tensor, v_codebook: Tensor, page_size: int, scale: float,
    window: int, recent: int, near: Near,
) -> Tensor:  # fmt: skip
    """[B, 1, heads, D], in the `form` that the call has; `window` and `recent` as of `turboquant_attention.attend`."""
    batch, dim, device = len(token.qkv), variant.dim, token.qkv.device.index
    pages, kv_heads, _ = cache.shape
    out = token.qkv.new_empty((batch, 1, token.heads, dim))
    stages = variant.stages(1)
    (kernel,) = kernels(variant, stages, device)
    tensors = (
        token.qkv, cache, block_table, positions, counts, None, rotation, k_codebook, v_codebook, None, None, None,
        None, out, None, near.ring, near.slots,
    )  # fmt: skip
    made = token.q_norm, token.k_norm, token.cos, token.sin, token.turn
    ring_size = near.ring.shape[1]
    arguments = struct.pack(
        ARGUMENTS,
        *(0 if t is None else t.data_ptr() for t in tensors),
        batch, 1, kv_heads, variant.group, block_table.stride(0), block_table.shape[1] * page_size, pages, window,
        1, 0, 0, recent, near.spare, near.limit, ring_size, -(-ring_size // PLACES), 0, 1, cluster,
        scale * math.log2(math.e), dim**-0.5,
        *(0 if t is None else t.data_ptr() for t in made), 0 if token.cos is None else len(token.cos) - 1, token.eps,
    )  # fmt: skip
    stream = torch._C._cuda_getCurrentRawStream(device)
    with torch.cuda.device(token.qkv.device):
        threads, shared = variant.warps * 32, variant.shared(stages, 1)
        kernel.launch((kv_heads * cluster, batch, 1), threads, shared, cluster, stream, arguments)
    return out
