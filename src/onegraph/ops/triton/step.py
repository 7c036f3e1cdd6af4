"""The bookkeeping of a step: one program for all rows, since there are few.

`begin_step` is launched without the programmatic attribute: it stands between two eager steps where in a graph its
border stands (rule 4 of launch.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit(do_not_specialize=["rows", "length"])
def _begin(positions, limits, counts, after, rows, length, ROWS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.arange(0, ROWS)
    position = tl.load(positions + row, mask=row < rows, other=0)
    limit = tl.load(limits + row, mask=row < rows, other=0)
    count = tl.minimum(tl.maximum(limit - position, 0), length)
    tl.store(counts + row, count, mask=row < rows)
    tl.store(after + row, position + count, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _finish(tokens, logits, after, drawn, positions, report, rows, width, ROWS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.arange(0, ROWS)
    inside = row < rows
    wait_for_previous(PDL)
    token = tl.load(tokens + row, mask=inside, other=0)
    best = tl.load(logits + row.to(tl.int64) * width + token, mask=inside, other=0.0).to(tl.float32)
    tl.store(drawn + row, token, mask=inside)
    tl.store(positions + row, tl.load(after + row, mask=inside, other=0), mask=inside)
    tl.store(report + row, tl.where(best < float("inf"), token, -1), mask=inside)  # false for NaN as well


def begin_step(positions: Tensor, limits: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.step.begin_step`."""
    counts, after = torch.empty_like(positions), torch.empty_like(positions)
    rows = positions.numel()
    if rows:
        with on_device(positions):
            _begin[(1,)](
                positions, limits, counts, after, rows, length,
                ROWS=triton.next_power_of_2(rows), num_warps=1, PDL=options(positions)["PDL"],
            )  # fmt: skip
    return counts, after


def finish_step(tokens: Tensor, logits: Tensor, after: Tensor, drawn: Tensor, positions: Tensor) -> Tensor:
    """See `onegraph.ops.step.finish_step`."""
    report = torch.empty_like(tokens)
    rows, width = logits.shape
    if rows:
        with on_device(logits):
            _finish[(1,)](
                tokens, logits, after, drawn, positions, report, rows, width,
                ROWS=triton.next_power_of_2(rows), num_warps=1, **options(logits),
            )  # fmt: skip
    return report
