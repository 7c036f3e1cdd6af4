"""Launches `deepseek_index.cu`, the selection behind Triton's scores."""

import torch
from torch import Tensor

from onegraph.ops.calls import DeepseekIndex
from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch

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
    otherwise="torch computes DeepSeek's index",
)


def select(
    scores: Tensor, positions: Tensor, counts: Tensor, block_table: Tensor, pages: int, ratio: int, top_k: int
) -> Tensor:
    """Scores as `ops.triton.deepseek_index.score` gives them -> int32 [B, Q, top_k], as of the op; of equal scores the
    first entries'."""
    batch, (queries, capacity) = positions.shape[0], scores.shape
    selected = torch.empty((batch, queries // batch, top_k), dtype=torch.int32, device=scores.device)
    launch(
        KERNEL, {"PER_PAGE": capacity // block_table.shape[1]}, Launch((queries, 1, 1), THREADS),
        scores=scores, positions=positions, counts=counts, table=block_table, selected=selected,
        length=queries // batch, table_stride=block_table.stride(0), capacity=capacity, pages=pages, ratio=ratio,
        top_k=top_k,
    )  # fmt: skip
    return selected


def deepseek_index(call: DeepseekIndex) -> Tensor:
    """See `onegraph.ops.deepseek_index.deepseek_index`, of at least one query."""
    from onegraph.ops.triton.deepseek_index import score  # compiled as of its import

    rows = call.positions, call.counts, call.block_table
    return select(score(call), *rows, call.entries.shape[0], call.ratio, call.top_k)
