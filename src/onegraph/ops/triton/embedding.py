"""Rows of an embedding table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

TILE = 1024  # numbers of a row that a program copies


@triton.jit
def _rows(ids, weight, out, vocabulary, width, TILE: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    wait_for_previous(PDL)
    at = tl.minimum(tl.maximum(tl.load(ids + row).to(tl.int64), 0), vocabulary - 1)
    tl.store(out + row * width + column, tl.load(weight + at * width + column, mask=inside, other=0.0), mask=inside)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `onegraph.ops.embedding.embedding`."""
    vocabulary, width = weight.shape
    out = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    with on_device(weight):
        _rows[(ids.numel(), triton.cdiv(width, TILE))](
            ids.contiguous(), weight, out, vocabulary, width, TILE=TILE, num_warps=4, **options(weight)
        )
    return out
