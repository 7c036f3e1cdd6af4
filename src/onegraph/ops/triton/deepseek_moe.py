"""Routing."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous
from onegraph.ops.triton.route import keep, largest


@triton.jit
def _affinity(x):
    """sqrt(softplus(x)): log(1 + e) without losing a small e (Kahan's log1p), and x itself where e would overflow."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    soft = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.sqrt_rn(tl.where(x > 20.0, x, soft))


@triton.jit
def _route(
    logits, bias, table, tokens, experts, weights, scale, count, last,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, KP: tl.constexpr, BIAS: tl.constexpr, HASH: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    there = k < TOP_K
    column = tl.arange(0, WIDTH)
    inside = column < count
    if BIAS:
        extra = tl.load(bias + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    if HASH:
        token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), last)
        chosen = tl.load(table + token * TOP_K + k, mask=there, other=0)
    else:
        choice = _affinity(tl.load(logits + row * count + column, mask=inside, other=0.0))
        if BIAS:
            choice += extra
        chosen = largest(choice, inside, column, k, TOP_K)
    picked = tl.where(there, _affinity(tl.load(logits + row * count + chosen, mask=there, other=0.0)), 0.0)
    weight = picked / (tl.sum(picked, axis=0) + 1e-20) * scale
    keep(experts, weights, row, k, chosen, weight, count, 1.0, TOP_K, SHARED)


def deepseek_route(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, tokens: Tensor, top_k: int, scale: float, shared: bool
) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.deepseek_moe.deepseek_route`."""
    rows, count = logits.shape
    experts = logits.new_empty((rows, top_k + shared), dtype=torch.int32)
    weights = logits.new_empty((rows, top_k + shared))
    if rows == 0:
        return experts, weights
    with on_device(logits):
        _route[(rows,)](
            logits, logits if bias is None else bias, experts if table is None else table, tokens, experts, weights,
            scale, count, 0 if table is None else table.shape[0] - 1,
            TOP_K=top_k, WIDTH=triton.next_power_of_2(count), KP=triton.next_power_of_2(top_k + shared),
            BIAS=bias is not None, HASH=table is not None, SHARED=int(shared),
            num_warps=1 if count <= 512 else 4, **options(logits),
        )  # fmt: skip
    return experts, weights
