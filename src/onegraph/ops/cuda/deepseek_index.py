"""Launches `deepseek_index.cu`, the selection behind Triton's scores; where it cannot be built, Triton's follows."""

from functools import cache

import torch
from torch import Tensor

from onegraph.ops.calls import DeepseekIndex
from onegraph.ops.cuda import build

THREADS = 512  # of a block, as in the kernel

ARGUMENTS = build.Arguments(
    pointers=("scores", "positions", "counts", "table", "selected"),
    ints=("length", "table_stride", "capacity", "pages", "ratio", "top_k"),
)
KERNEL = build.Source(
    "deepseek_index",
    ops=("deepseek_index",),
    functions=("select_places",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example={"PER_PAGE": 32},
)


@cache
def _kernel(per_page: int, device: int) -> build.Kernel:
    return KERNEL.load({"PER_PAGE": per_page}, device)[0]


@cache
def available(device: int) -> bool:
    """Whether the kernel can be built for this GPU; warns once where not."""
    return KERNEL.usable(device, "Triton's selects")


def select(
    scores: Tensor, positions: Tensor, counts: Tensor, block_table: Tensor, pages: int, ratio: int, top_k: int
) -> Tensor:
    """See `onegraph.ops.triton.deepseek_index.select`."""
    batch, (queries, capacity) = positions.shape[0], scores.shape
    selected = torch.empty((batch, queries // batch, top_k), dtype=torch.int32, device=scores.device)
    arguments = ARGUMENTS.pack(
        **build.addresses(
            scores=scores, positions=positions, counts=counts, table=block_table, selected=selected
        ),
        length=queries // batch,
        table_stride=block_table.stride(0),
        capacity=capacity,
        pages=pages,
        ratio=ratio,
        top_k=top_k,
    )  # fmt: skip
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
