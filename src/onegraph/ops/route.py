"""Which experts a token uses, and how much of each: read on the device, never on the host."""

import torch
from torch import Tensor

from onegraph.ops.checks import check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register


def _softmax_route(
    logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    logits = logits if bias is None else logits + bias
    chosen, experts = logits.topk(top_k, dim=1)
    weights = chosen.softmax(1) if normalise else logits.softmax(1).gather(1, experts)
    if scales is not None:
        weights = weights * scales[experts]
    return experts.to(torch.int32), weights


def _check(logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool, scales: Tensor | None = None) -> None:
    op = "softmax_route"
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"{op}: top_k is {top_k}; logits {tuple(logits.shape)} must be [T, E], of E no less than that")
    count, experts = logits.shape
    check_tensors(
        op, logits.device, logits=(logits, torch.float32, (count, experts)), bias=(bias, torch.float32, (experts,)),
        scales=(scales, torch.float32, (experts,)),
    )  # fmt: skip


def _case(
    name: str, tokens: int, experts: int, top_k: int, normalise: bool, bias: bool = False, scaled: bool = False
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        logits = 3 * torch.randn(tokens, experts, generator=generator)
        extra = torch.randn(experts, generator=generator).to(device) if bias else None
        scales = (0.5 + torch.rand(experts, generator=generator)).to(device) if scaled else None
        return logits.to(device), extra, top_k, normalise, scales

    return Case(name=name, make=make)


softmax_route = register(
    Op(
        name="softmax_route",
        schema="(Tensor logits, Tensor? bias, int top_k, bool normalise, Tensor? scales=None) -> (Tensor, Tensor)",
        reference=_softmax_route,
        fake=lambda logits, bias, top_k, *rest: (
            logits.new_empty((logits.shape[0], top_k), dtype=torch.int32),
            logits.new_empty((logits.shape[0], top_k)),
        ),
        kernel="onegraph.ops.triton.route:softmax_route",
        check=_check,
        cases=(
            _case("qwen3_moe", 3, 128, 8, True),
            _case("not_normalised", 5, 60, 4, False),
            _case("mixtral", 17, 8, 2, True),
            _case("gpt_oss", 2, 32, 4, True, bias=True),
            _case("all_of_three", 4, 3, 3, False, bias=True),
            _case("one_of_many", 1, 600, 1, False),
            _case("gemma4", 2, 128, 8, True, scaled=True),
        ),
        tolerance={torch.float32: 2e-6},
        bytes_moved=lambda logits, bias, top_k, normalise, scales=None: (
            nbytes(logits, bias, scales) + 8 * logits.shape[0] * top_k
        ),
        flops=lambda logits, *rest: 4 * logits.numel(),
    )
)
"""logits float32 [T, E] -> (experts int32 [T, k], weights float32 [T, k]): the k largest of s = logits + bias [E],
descending, and their softmax, over the k with `normalise` (Mixtral, gpt-oss, and Qwen3-MoE where norm_topk_prob is set:
softmax over all, then divided by the sum of the chosen, is the same number), else over all E; each weight times its
expert's of `scales` [E], if they are given (Gemma 4). Which of equal ones is
chosen is torch.topk's affair on a CPU, and the first on a GPU. Where an s is NaN, so are all weights of its token."""


def _sigmoid_route(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, top_groups: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = (scores + bias).unflatten(1, (groups, -1))
    if top_groups < groups:
        kept = choice.topk(2, dim=2).values.sum(2).topk(top_groups, dim=1).indices
        out = torch.ones(len(logits), groups, dtype=torch.bool, device=logits.device).scatter(1, kept, False)
        choice = choice.masked_fill(out.unsqueeze(2), float("-inf"))
    experts = choice.flatten(1).topk(top_k, dim=1).indices
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return experts.to(torch.int32), weights * scale


def _check_sigmoid(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, top_groups: int, normalise: bool, scale: float
) -> None:
    op = "sigmoid_route"
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"{op}: top_k is {top_k}; logits {tuple(logits.shape)} must be [T, E], of E no less than that")
    count, experts = logits.shape
    check_groups(op, experts, top_k, groups, top_groups)
    check_tensors(
        op, logits.device, logits=(logits, torch.float32, (count, experts)), bias=(bias, torch.float32, (experts,))
    )


def check_groups(op: str, experts: int, top_k: int, groups: int, top_groups: int) -> None:
    """Raises ValueError unless `groups` of at least two experts each divide them and the chosen groups have enough."""
    each = experts // max(groups, 1)
    if not 1 <= top_groups <= groups or each * groups != experts or (each < 2 and top_groups < groups):
        raise ValueError(
            f"{op}: {top_groups} of {groups} groups of {experts} experts; groups must divide the experts, have two or "
            "more each, and no more be chosen than there are"
        )
    if top_groups * each < top_k:
        raise ValueError(f"{op}: {top_groups} groups of {each} experts are fewer than the {top_k} that a token uses")


def _sigmoid_case(
    name: str, tokens: int, count: int, top_k: int, *, groups: int = 1, top_groups: int = 1, normalise: bool = True
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        logits = 3 * torch.randn(tokens, count, generator=generator)
        bias = 0.3 * torch.randn(count, generator=generator)
        return logits.to(device), bias.to(device), top_k, groups, top_groups, normalise, 2.5

    return Case(name=name, make=make)


sigmoid_route = register(
    Op(
        name="sigmoid_route",
        schema=(
            "(Tensor logits, Tensor bias, int top_k, int groups, int top_groups, bool normalise, float scale)"
            " -> (Tensor, Tensor)"
        ),
        reference=_sigmoid_route,
        fake=lambda logits, bias, top_k, *rest: (
            logits.new_empty((logits.shape[0], top_k), dtype=torch.int32),
            logits.new_empty((logits.shape[0], top_k)),
        ),
        kernel="onegraph.ops.triton.route:sigmoid_route",
        check=_check_sigmoid,
        cases=(
            _sigmoid_case("glm_4_5_air", 3, 128, 8),
            _sigmoid_case("glm_4_6", 5, 160, 8),
            _sigmoid_case("deepseek_v3", 4, 256, 8, groups=8, top_groups=4),
            _sigmoid_case("groups_of_three", 6, 15, 4, groups=5, top_groups=2, normalise=False),
            _sigmoid_case("not_normalised", 2, 9, 3, normalise=False),
        ),
        tolerance={torch.float32: 2e-6},
        bytes_moved=lambda logits, bias, top_k, *rest: nbytes(logits, bias) + 8 * logits.shape[0] * top_k,
        flops=lambda logits, *rest: 6 * logits.numel(),
    )
)
"""logits float32 [T, E] -> (experts int32 [T, k], weights float32 [T, k]), as DeepSeek-V3 and GLM-4.5 choose (arXiv
2412.19437, section 2.1.2). s = sigmoid(logits); the experts are the k largest of s + bias [E], descending, within the
`top_groups` of `groups` equal parts of E whose two largest s + bias have the largest sum; weights are their s, over
the sum of them with `normalise`, times scale: the bias never enters one. Of equal ones see `softmax_route`."""
