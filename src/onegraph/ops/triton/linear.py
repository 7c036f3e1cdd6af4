"""A dense linear for few tokens: a program holds whole rows of the weight in registers before the step gets there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

MAX_TOKENS = 4  # above, tensor cores win: cuBLAS
MAX_ROWS = 16384  # of a weight; a vocabulary is cuBLAS's
MAX_WIDTH = 8192  # of a row that a program holds


@triton.jit
def _linear(
    x, weight, out, n, k, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < n)[:, None] & (column < k)[None, :]
    value = tl.load(weight + row.to(tl.int64)[:, None] * k + column[None, :], mask=inside, other=0.0)
    wait_for_previous(PDL)
    for token in tl.static_range(TOKENS):
        given = tl.load(x + token * k + column, mask=column < k, other=0.0).to(tl.float32)
        result = tl.sum(value.to(tl.float32) * given[None, :], axis=1)
        tl.store(out + token * n + row, result.to(out.dtype.element_ty), mask=row < n)


def takes(x: Tensor, weight: Tensor) -> bool:
    n, k = weight.shape
    few = x.numel() <= MAX_TOKENS * k and n <= MAX_ROWS and k <= MAX_WIDTH
    return few and x.numel() > 0 and x.is_contiguous() and weight.is_contiguous()


def linear(x: Tensor, weight: Tensor, wide: bool) -> Tensor:
    """See `onegraph.ops.linear.linear`; for what `takes` says."""
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n), dtype=torch.float32 if wide else x.dtype)
    rows = 2 if n <= 1024 else 4  # enough programs for every SM
    width = triton.next_power_of_2(k)
    with on_device(x):
        _linear[(triton.cdiv(n, rows),)](
            x, weight, out, n, k, TOKENS=x.numel() // k, ROWS=rows, WIDTH=width,
            num_warps=4 if rows * width <= 8192 else 8, **options(x),
        )  # fmt: skip
    return out
