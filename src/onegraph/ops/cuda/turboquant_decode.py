"""Launches `turboquant_attention.cu` with this step's write in it; see the record in `onegraph.ops.turboquant_decode`.

A cluster of blocks takes a (sequence, kv head) pair and merges what its blocks found through shared memory: one launch,
for rows that can hold little for the blocks there are. What else there is, is left to the two ops.
"""

import math
import struct
from functools import cache as cached

import torch
from torch import Tensor

from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cuda import build
from onegraph.ops.cuda.turboquant import SCALES
from onegraph.ops.cuda.turboquant_attention import (
    ARGUMENTS,
    DTYPES,
    MAX_BATCH,
    PLACES,
    TILE,
    Variant,
    available,
    kernels,
)

DIMS = (64, 128)
MAX_GROUP = 6  # queries of a kv head: with key and value, the rows of half a product
ALIGNMENT = 16  # bytes, of what is read as 16 bytes at once
CLUSTERS = (8, 4, 2)
SHORT = 4096  # tokens that a row can hold at most
TILES = 5  # that a warp has at most: beyond, blocks that follow the lengths balance rows better


@cached
def _clusters(variant: Variant, sizes: tuple[int, ...], device: int) -> dict[int, int]:
    """How many clusters of each size run at once."""
    stages, threads = variant.stages(1), variant.warps * 32
    together = kernels(variant, stages, device)[0]
    return {n: build.clusters(together, threads, variant.shared(stages, 1), n) for n in sizes}


def _page_size(call: TurboQuantDecode) -> int:
    bits = sum(book.numel().bit_length() - 1 for book in (call.k_codebook, call.v_codebook))
    return call.cache.shape[2] * 8 // (call.turn.shape[0] * bits + 32)


def form(call: TurboQuantDecode) -> tuple[Variant, int] | None:
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
        and dim in DIMS
        and group <= MAX_GROUP
        and reach <= SHORT
        and all(t.data_ptr() % ALIGNMENT == 0 for t in read)
        and available(qkv.device.index)
    ):
        return None
    bits = [book.numel().bit_length() - 1 for book in (call.k_codebook, call.v_codebook)]
    rows, kind = 4 if group <= 4 else 8, SCALES[call.kind]
    variant = Variant(dim, bits[0], bits[1], rows, DTYPES[qkv.dtype], page_size // 16, group, kind)
    fitting = _clusters(variant, CLUSTERS, qkv.device.index)
    size = next((n for n in CLUSTERS if batch * kv_heads <= fitting[n]), 1)
    return (variant, size) if reach <= TILES * variant.warps * TILE * size else None


def decode(call: TurboQuantDecode, variant: Variant, cluster: int, spare: int) -> Tensor:
    """[B, 1, heads, D], in the `form` that the call has; `spare` as of `onegraph.ops.recent_attention`."""
    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, turn, *coded = call
    k_codebook, v_codebook, cache, ring, slots, heads, _, rotation, scale, window, limit = coded
    batch, dim, device, reach = len(qkv), variant.dim, qkv.device.index, block_table.shape[1] * _page_size(call)
    pages, kv_heads, _ = cache.shape
    out = qkv.new_empty((batch, 1, heads, dim))
    stages = variant.stages(1)
    (kernel,) = kernels(variant, stages, device)
    tensors = (
        qkv, cache, block_table, positions, counts, None, rotation, k_codebook, v_codebook, None, None, None,
        None, out, None, ring, slots,
    )  # fmt: skip
    made = q_norm, k_norm, cos, sin, turn
    ring_size = ring.shape[1]
    arguments = struct.pack(
        ARGUMENTS,
        *(0 if t is None else t.data_ptr() for t in tensors),
        batch, 1, kv_heads, variant.group, block_table.stride(0), reach, pages, max(limit - window, 0),
        1, 0, 0, window, spare, limit, ring_size, -(-ring_size // PLACES), 0, 1, cluster,
        scale * math.log2(math.e), dim**-0.5,
        *(0 if t is None else t.data_ptr() for t in made), 0 if cos is None else len(cos) - 1, eps,
    )  # fmt: skip
    stream = torch._C._cuda_getCurrentRawStream(device)
    with torch.cuda.device(qkv.device):
        threads, shared = variant.warps * 32, variant.shared(stages, 1)
        kernel.launch((kv_heads * cluster, batch, 1), threads, shared, cluster, stream, arguments)
    return out
