"""Routing by softmax, and by sigmoid with a bias."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit
def largest(score, inside, column, k, TOP_K: tl.constexpr):
    """The columns of the TOP_K largest scores that are `inside`, descending, each once whatever they hold: NaN counts
    as the largest, as it does for torch.topk, and of equal ones comes the first. In [KP]: zeros beyond TOP_K of k."""
    score = tl.where(score != score, float("inf"), tl.maximum(score, -3.4028234663852886e38))
    score = tl.where(inside, score, float("-inf"))
    chosen = tl.zeros_like(k)
    for n in tl.static_range(TOP_K):
        best = tl.argmax(score, axis=0)
        chosen = tl.where(k == n, best, chosen)
        score = tl.where(column == best, float("-inf"), score)
    return chosen


@triton.jit
def shared_gain(logits, GATED: tl.constexpr):
    """The shared expert's weight: the sigmoid of the logit there, or 1."""
    gain = 1.0
    if GATED:
        gain = 1.0 / (1.0 + tl.exp(-tl.load(logits)))
    return gain


@triton.jit
def keep(experts, weights, row, k, chosen, weight, count, gain, TOP_K: tl.constexpr, SHARED: tl.constexpr):
    """Stores what a token uses: TOP_K of `chosen`, and with SHARED one more, expert `count` of weight `gain`."""
    if SHARED:
        chosen, weight = tl.where(k < TOP_K, chosen, count), tl.where(k < TOP_K, weight, gain)
    place, stored = row * (TOP_K + SHARED) + k, k < TOP_K + SHARED
    tl.store(experts + place, chosen, mask=stored)
    tl.store(weights + place, weight, mask=stored)


@triton.jit
def _route(
    logits, bias, scales, experts, weights, count,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, KP: tl.constexpr, BIAS: tl.constexpr, NORMALISE: tl.constexpr,
    SCALED: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
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
    logits += row * (count + GATED)
    gain = shared_gain(logits + count, GATED)
    score = tl.load(logits + column, mask=inside, other=float("-inf"))
    if BIAS:
        score += extra
    chosen = largest(score, inside, column, k, TOP_K)
    picked = tl.load(logits + chosen, mask=there, other=float("-inf"))
    if BIAS:
        picked += tl.load(bias + chosen, mask=there, other=0.0)
    high = tl.max(picked, axis=0)
    weight = tl.exp(picked - high)
    total = tl.sum(weight, axis=0) if NORMALISE else tl.sum(tl.exp(score - high), axis=0)
    weight = weight / total
    if SCALED:
        weight *= tl.load(scales + chosen, mask=there, other=0.0)
    keep(experts, weights, row, k, chosen, weight, count, gain, TOP_K, SHARED)


def softmax_route(
    logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool, shared: bool, gated: bool,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `onegraph.ops.route.softmax_route`."""
    rows, count = logits.shape[0], logits.shape[1] - gated
    experts = torch.empty((rows, top_k + shared), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k + shared), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return experts, weights
    with on_device(logits):
        _route[(rows,)](
            logits, logits if bias is None else bias, logits if scales is None else scales, experts, weights, count,
            TOP_K=top_k, WIDTH=triton.next_power_of_2(count), KP=triton.next_power_of_2(top_k + shared),
            BIAS=bias is not None, NORMALISE=normalise, SCALED=scales is not None, SHARED=int(shared), GATED=int(gated),
            num_warps=1 if count <= 512 else 4, **options(logits),
        )  # fmt: skip
    return experts, weights


@triton.jit
def _sigmoid(
    logits, bias, experts, weights, count, scale,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GP: tl.constexpr, NORMALISE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    there = k < TOP_K
    column = tl.arange(0, WIDTH)
    inside = column < count
    extra = tl.load(bias + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    logits += row * (count + GATED)
    gain = shared_gain(logits + count, GATED)
    score = tl.load(logits + column, mask=inside, other=0.0)
    choice = 1.0 / (1.0 + tl.exp(-score)) + extra
    if TOP_GROUPS < GROUPS:
        group = tl.arange(0, GP)
        mine = column // (count // GROUPS)
        best = tl.zeros((GP,), dtype=tl.float32)
        for g in tl.static_range(GROUPS):
            own = tl.where(inside & (mine == g), choice, float("-inf"))
            two = tl.max(own, axis=0) + tl.max(tl.where(column == tl.argmax(own, axis=0), float("-inf"), own), axis=0)
            best = tl.where(group == g, two, best)
        # Places beyond TOP_GROUPS hold 0, which is a group of its own: they must not count.
        kept = largest(best, group < GROUPS, group, group, TOP_GROUPS)
        kept = tl.where(group < TOP_GROUPS, kept, -1)
        allowed = tl.max((mine[:, None] == kept[None, :]).to(tl.int32), axis=1) > 0
        # What is shut out must stay below all that is not, -inf included: `largest` takes those that are inside.
        inside = inside & allowed
    chosen = largest(choice, inside, column, k, TOP_K)
    picked = tl.load(logits + chosen, mask=there, other=float("-inf"))
    weight = tl.where(there, 1.0 / (1.0 + tl.exp(-picked)), 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    keep(experts, weights, row, k, chosen, weight * scale, count, gain, TOP_K, SHARED)


def sigmoid_route(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, top_groups: int, normalise: bool, scale: float,
    shared: bool, gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `onegraph.ops.route.sigmoid_route`."""
    rows, count = logits.shape[0], logits.shape[1] - gated
    experts = torch.empty((rows, top_k + shared), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k + shared), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return experts, weights
    with on_device(logits):
        _sigmoid[(rows,)](
            logits, bias, experts, weights, count, scale,
            TOP_K=top_k, WIDTH=triton.next_power_of_2(count), KP=triton.next_power_of_2(top_k + shared), GROUPS=groups,
            TOP_GROUPS=top_groups, GP=triton.next_power_of_2(groups), NORMALISE=normalise, SHARED=int(shared),
            GATED=int(gated), num_warps=1 if count <= 512 else 4, **options(logits),
        )  # fmt: skip
    return experts, weights
