"""A dense linear for few tokens: a program holds whole rows of the weight in registers before the step gets there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.strides import row_stride
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

MAX_TOKENS = 4  # above, tensor cores win: cuBLAS
MAX_ROWS = 16384  # of a weight; a vocabulary is cuBLAS's
MAX_WIDTH = 8192  # of a row that a program holds


@triton.jit
def _rows(
    x, weight, bias, out, n, k, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < n)[:, None] & (column < k)[None, :]
    value = tl.load(weight + row.to(tl.int64)[:, None] * k + column[None, :], mask=inside, other=0.0)
    if BIAS:
        more = tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    for token in tl.static_range(TOKENS):
        given = tl.load(x + token * k + column, mask=column < k, other=0.0).to(tl.float32)
        result = tl.sum(value.to(tl.float32) * given[None, :], axis=1)
        if BIAS:
            result += more
        tl.store(out + token * n + row, result.to(out.dtype.element_ty), mask=row < n)


@triton.jit
def _linear(
    x, weight, bias, out, n, k, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    _rows(x, weight, bias, out, n, k, TOKENS, ROWS, WIDTH, BIAS, PDL)


@triton.jit(do_not_specialize=["programs"])
def _linear_beside_norm(
    x, weight, out, n, k, low, norm, normed, low_stride, eps, programs,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, LOW_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`programs` have rows of the weight, those behind them a token of `low` each."""
    let_next_start(PDL)
    if tl.program_id(0) < programs:
        _rows(x, weight, weight, out, n, k, TOKENS, ROWS, WIDTH, False, PDL)
    else:
        token = tl.program_id(0) - programs
        column = tl.arange(0, LOW_WIDTH)
        inside = column < LOW
        gain = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        value = tl.load(low + token * low_stride + column, mask=inside, other=0.0).to(tl.float32)
        unit = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / LOW + eps)
        tl.store(normed + token * LOW + column, (value * unit * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _normed_linear(
    x, norm, weight, out, n, k, eps, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """As `_linear`; each program norms the tokens for itself, which takes less time than a launch for all of them."""
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = column < k
    inside = (row < n)[:, None] & there[None, :]
    value = tl.load(weight + row.to(tl.int64)[:, None] * k + column[None, :], mask=inside, other=0.0)
    gain = tl.load(norm + column, mask=there, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    for token in tl.static_range(TOKENS):
        given = tl.load(x + token * k + column, mask=there, other=0.0).to(tl.float32)
        unit = 1.0 / tl.sqrt_rn(tl.sum(given * given, axis=0) / k + eps)
        given = (given * unit * gain).to(out.dtype.element_ty).to(tl.float32)  # as the norm alone rounds it
        result = tl.sum(value.to(tl.float32) * given[None, :], axis=1)
        tl.store(out + token * n + row, result.to(out.dtype.element_ty), mask=row < n)


def takes(x: Tensor, weight: Tensor) -> bool:
    n, k = weight.shape
    few = x.numel() <= MAX_TOKENS * k and n <= MAX_ROWS and k <= MAX_WIDTH
    return few and x.numel() > 0 and x.is_contiguous() and weight.is_contiguous()


def _cut(n: int, k: int) -> tuple[int, int, int]:
    """Rows of a program, the width that it holds of each, its warps."""
    rows, width = 2 if n <= 1024 else 4, triton.next_power_of_2(k)  # enough programs for every SM
    return rows, width, 4 if rows * width <= 8192 else 8


def linear(x: Tensor, weight: Tensor, wide: bool, bias: Tensor | None = None) -> Tensor:
    """See `onegraph.ops.linear.linear`; for what `takes` says."""
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n), dtype=torch.float32 if wide else x.dtype)
    rows, width, warps = _cut(n, k)
    with on_device(x):
        _linear[(triton.cdiv(n, rows),)](
            x, weight, weight if bias is None else bias, out, n, k, TOKENS=x.numel() // k, ROWS=rows, WIDTH=width,
            BIAS=bias is not None, num_warps=warps, **options(x),
        )  # fmt: skip
    return out


def linear_beside_norm(x: Tensor, weight: Tensor, low: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.linear.linear_beside_norm`; for what `takes` says."""
    n, k = weight.shape
    out, normed, size, tokens = x.new_empty((*x.shape[:-1], n)), low.new_empty(low.shape), low.shape[-1], x.numel() // k
    rows, width, warps = _cut(n, k)
    programs = triton.cdiv(n, rows)
    with on_device(x):
        _linear_beside_norm[(programs + tokens,)](
            x, weight, out, n, k, low, norm, normed, row_stride(low), eps, programs,
            TOKENS=tokens, ROWS=rows, WIDTH=width, LOW=size, LOW_WIDTH=triton.next_power_of_2(size), num_warps=warps,
            **options(x),
        )  # fmt: skip
    return out, normed


def normed_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See `onegraph.ops.linear.normed_linear`; for what `takes` says."""
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n))
    rows, width = 1, triton.next_power_of_2(k)  # a narrow linear: as many programs as there are rows
    with on_device(x):
        _normed_linear[(n,)](
            x, norm, weight, out, n, k, eps, TOKENS=x.numel() // k, ROWS=rows, WIDTH=width,
            num_warps=4 if width <= 4096 else 8, **options(x),
        )  # fmt: skip
    return out
