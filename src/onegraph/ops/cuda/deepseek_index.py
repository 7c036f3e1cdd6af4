"""Launches `deepseek_index.cu`, the selection behind Triton's scores; where it cannot be built, Triton's follows."""

import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.calls import DeepseekIndex
from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 512  # of a block, as in the kernel


@cache
def _kernel(per_page: int, device: int) -> build.Kernel:
    return build.load(SOURCE, {"PER_PAGE": per_page}, ("select_places",), device, 0)[0]


@cache
def available(device: int) -> bool:
    """Whether the kernel can be built for this GPU; warns once where not."""
    return build.usable(lambda: _kernel(32, device))


def select(
    scores: Tensor, positions: Tensor, counts: Tensor, block_table: Tensor, pages: int, ratio: int, top_k: int
) -> Tensor:
    """See `onegraph.ops.triton.deepseek_index.select`."""
    batch, (queries, capacity) = positions.shape[0], scores.shape
    selected = torch.empty((batch, queries // batch, top_k), dtype=torch.int32, device=scores.device)
    tensors = scores, positions, counts, block_table, selected
    sizes = queries // batch, block_table.stride(0), capacity, pages, ratio, top_k
    arguments = struct.pack("5Q6i", *(t.data_ptr() for t in tensors), *sizes)
    kernel = _kernel(capacity // block_table.shape[1], scores.device.index)
    with torch.cuda.device(scores.device):  # the driver launches in the current context
        kernel.launch((queries, 1, 1), THREADS, 0, 1, torch.cuda.current_stream().cuda_stream, arguments)
    return selected


def deepseek_index(call: DeepseekIndex) -> Tensor:
    """See `onegraph.ops.deepseek_index.deepseek_index`."""
    from onegraph.ops.triton import deepseek_index as kernels  # compiled as of its import

    if call.q.numel() == 0 or not available(call.q.device.index):
        return kernels.deepseek_index(call)
    rows = call.positions, call.counts, call.block_table
    return select(kernels.score(call), *rows, call.entries.shape[0], call.ratio, call.top_k)
