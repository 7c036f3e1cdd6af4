"""The norm of all heads of queries together, and of keys: mean squares, and what is divided by their roots."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

COLUMNS = 1024  # of a program that divides


@triton.jit
def _mean_squares(qkv, out, width, q_size, k_size, ranks, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """One program a row and one of queries and keys."""
    let_next_start(PDL)
    row, keys = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    size = tl.where(keys > 0, k_size, q_size)
    wait_for_previous(PDL)
    x = tl.load(qkv + row * width + keys * q_size + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + 2 * row + keys, tl.sum(x * x, axis=0) / (tl.maximum(size, 1) * ranks))


@triton.jit
def _qk_norm(qkv, weight, mean_squares, out, width, q_size, normed, eps, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """One program a row and some columns, of which `normed` are queries or keys."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < normed
    gain = tl.load(weight + column, mask=inside, other=1.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(qkv + row * width + column, mask=column < width, other=0.0)
    means = mean_squares + 2 * row
    mean = tl.where(column < q_size, tl.load(means), tl.load(means + 1))
    scaled = (x.to(tl.float32) * (1.0 / tl.sqrt_rn(mean + eps)) * gain).to(x.dtype)
    tl.store(out + row * width + column, tl.where(inside, scaled, x), mask=column < width)


def qk_mean_squares(qkv: Tensor, q_size: int, k_size: int, ranks: int) -> Tensor:
    """See `onegraph.ops.qk_norm.qk_mean_squares`."""
    width, most = qkv.shape[-1], max(q_size, k_size)
    out = qkv.new_empty((*qkv.shape[:-1], 2), dtype=torch.float32)
    if qkv.numel():
        with on_device(qkv):
            _mean_squares[(qkv.numel() // width, 2)](
                qkv, out, width, q_size, k_size, ranks, WIDTH=triton.next_power_of_2(most),
                num_warps=4 if most <= 2048 else 8 if most <= 8192 else 16, **options(qkv),
            )  # fmt: skip
    return out


def qk_norm(qkv: Tensor, weight: Tensor, mean_squares: Tensor, q_size: int, eps: float) -> Tensor:
    """See `onegraph.ops.qk_norm.qk_norm`."""
    width, out = qkv.shape[-1], torch.empty_like(qkv)
    if qkv.numel():
        with on_device(qkv):
            _qk_norm[(qkv.numel() // width, triton.cdiv(width, COLUMNS))](
                qkv, weight, mean_squares, out, width, q_size, len(weight), eps, COLUMNS=COLUMNS, num_warps=4,
                **options(qkv),
            )  # fmt: skip
    return out
