"""Which experts a token uses, and how much of each: read on the device, never on the host."""

import torch
from torch import Tensor

from onegraph.ops.checks import check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register


def with_shared(experts: Tensor, weights: Tensor, count: int, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """The chosen of `count` experts and their weights [T, k] with one more [T, k + 1]: expert `count`, for every token.
    gate: logits [T, 1] of its weight, by sigmoid; None: the weight is 1."""
    gain = torch.ones_like(weights[:, :1]) if gate is None else gate.sigmoid()
    return torch.nn.functional.pad(experts, (0, 1), value=count), torch.cat((weights, gain), 1)


def _split(logits: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    """Logits of the router [T, E], and of the shared expert's gate [T, 1]."""
    return (logits[:, :-1], logits[:, -1:]) if gated else (logits, None)


def _softmax_route(
    logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool, shared: bool, gated: bool,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits, gate = _split(logits, gated)
    logits = logits if bias is None else logits + bias
    chosen, experts = logits.topk(top_k, dim=1)
    weights = chosen.softmax(1) if normalise else logits.softmax(1).gather(1, experts)
    if scales is not None:
        weights = weights * scales[experts]
    if shared:
        experts, weights = with_shared(experts, weights, logits.shape[1], gate)
    return experts.to(torch.int32), weights


def _check_logits(op: str, logits: Tensor, bias: Tensor | None, top_k: int, shared: bool, gated: bool) -> int:
    """How many experts there are to choose from."""
    if gated and not shared:
        raise ValueError(
            f"{op}: gated is True and shared is False; a gate is of a shared expert: give both, or neither"
        )
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1] - gated:
        last = " and a column more" if gated else ""
        raise ValueError(
            f"{op}: top_k is {top_k}; logits {tuple(logits.shape)} must be [T, E], of E no less than that{last}"
        )
    experts = logits.shape[1] - gated
    given = {"logits": (logits, torch.float32, tuple(logits.shape)), "bias": (bias, torch.float32, (experts,))}
    check_tensors(op, logits.device, **given)
    return experts


def _check_softmax(
    logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool, shared: bool, gated: bool,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    experts = _check_logits("softmax_route", logits, bias, top_k, shared, gated)
    check_tensors("softmax_route", logits.device, scales=(scales, torch.float32, (experts,)))


def _routes(logits: Tensor, top_k: int, shared: bool) -> tuple[Tensor, Tensor]:
    """Empty results."""
    shape = logits.shape[0], top_k + shared
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


def _bytes(logits: Tensor, bias: Tensor | None, top_k: int, shared: bool) -> int:
    return nbytes(logits, bias) + 8 * logits.shape[0] * (top_k + shared)


def _case(
    name: str, tokens: int, experts: int, top_k: int, normalise: bool, bias: bool = False, *,
    shared: bool = False, gated: bool = False, scaled: bool = False,
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        logits = 3 * torch.randn(tokens, experts + gated, generator=generator)
        extra = torch.randn(experts, generator=generator).to(device) if bias else None
        scales = (0.5 + torch.rand(experts, generator=generator)).to(device) if scaled else None
        return logits.to(device), extra, top_k, normalise, shared, gated, scales

    return Case(name=name, make=make)


softmax_route = register(
    Op(
        name="softmax_route",
        schema=(
            "(Tensor logits, Tensor? bias, int top_k, bool normalise, bool shared, bool gated, Tensor? scales=None)"
            " -> (Tensor, Tensor)"
        ),
        reference=_softmax_route,
        fake=lambda logits, bias, top_k, normalise, shared, gated, scales=None: _routes(logits, top_k, shared),
        kernel="onegraph.ops.triton.route:softmax_route",
        check=_check_softmax,
        cases=(
            _case("qwen3_moe", 3, 128, 8, True),
            _case("not_normalised", 5, 60, 4, False),
            _case("mixtral", 17, 8, 2, True),
            _case("gpt_oss", 2, 32, 4, True, bias=True),
            _case("all_of_three", 4, 3, 3, False, bias=True),
            _case("one_of_many", 1, 600, 1, False),
            _case("qwen3_5_moe", 3, 256, 8, True, shared=True, gated=True),
            _case("qwen3_next", 1, 512, 10, True, shared=True, gated=True),
            _case("shared_of_weight_one", 4, 20, 4, False, bias=True, shared=True),
            _case("gemma4", 2, 128, 8, True, scaled=True),
        ),
        tolerance={torch.float32: 2e-6},
        bytes_moved=lambda logits, bias, top_k, normalise, shared, gated, scales=None: (
            _bytes(logits, bias, top_k, shared) + nbytes(scales)
        ),
        flops=lambda logits, *rest: 4 * logits.numel(),
    )
)
"""logits float32 [T, E] -> (experts int32 [T, k], weights float32 [T, k]): the k largest of s = logits + bias [E],
descending, and their softmax, over the k with `normalise` (Mixtral, gpt-oss, and Qwen3-MoE where norm_topk_prob is set:
softmax over all, then divided by the sum of the chosen, is the same number), else over all E; each weight times its
expert's of `scales` [E], if they are given (Gemma 4). Which of equal ones is chosen is torch.topk's affair on a CPU,
and the first on a GPU. Where an s is NaN, so are all weights of its token.

shared: results are [T, k + 1], whose last expert is E, for every token, of weight 1; gated: logits are [T, E + 1], and
that weight is the sigmoid of the last one."""


def _sigmoid_route(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, top_groups: int, normalise: bool, scale: float,
    shared: bool, gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits, gate = _split(logits, gated)
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
    weights = weights * scale
    if shared:
        experts, weights = with_shared(experts, weights, logits.shape[1], gate)
    return experts.to(torch.int32), weights


def _check_sigmoid(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, top_groups: int, normalise: bool, scale: float,
    shared: bool, gated: bool,
) -> None:  # fmt: skip
    op = "sigmoid_route"
    check_groups(op, _check_logits(op, logits, bias, top_k, shared, gated), top_k, groups, top_groups)


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
    name: str, tokens: int, count: int, top_k: int, *, groups: int = 1, top_groups: int = 1, normalise: bool = True,
    shared: bool = False, gated: bool = False,
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        logits = 3 * torch.randn(tokens, count + gated, generator=generator)
        bias = 0.3 * torch.randn(count, generator=generator)
        return logits.to(device), bias.to(device), top_k, groups, top_groups, normalise, 2.5, shared, gated

    return Case(name=name, make=make)


sigmoid_route = register(
    Op(
        name="sigmoid_route",
        schema=(
            "(Tensor logits, Tensor bias, int top_k, int groups, int top_groups, bool normalise, float scale, "
            "bool shared, bool gated) -> (Tensor, Tensor)"
        ),
        reference=_sigmoid_route,
        fake=lambda logits, bias, top_k, groups, top_groups, normalise, scale, shared, gated: _routes(
            logits, top_k, shared
        ),
        kernel="onegraph.ops.triton.route:sigmoid_route",
        check=_check_sigmoid,
        cases=(
            _sigmoid_case("glm_4_5_air", 3, 128, 8),
            _sigmoid_case("glm_4_6", 5, 160, 8),
            _sigmoid_case("deepseek_v3", 4, 256, 8, groups=8, top_groups=4),
            _sigmoid_case("groups_of_three", 6, 15, 4, groups=5, top_groups=2, normalise=False),
            _sigmoid_case("not_normalised", 2, 9, 3, normalise=False),
            _sigmoid_case("glm_4_5_air_shared", 3, 128, 8, shared=True),
            _sigmoid_case("deepseek_v3_shared", 2, 256, 8, groups=8, top_groups=4, shared=True),
            _sigmoid_case("gated", 4, 15, 3, groups=5, top_groups=2, shared=True, gated=True),
        ),
        tolerance={torch.float32: 2e-6},
        bytes_moved=lambda logits, bias, top_k, groups, top_groups, normalise, scale, shared, gated: _bytes(
            logits, bias, top_k, shared
        ),
        flops=lambda logits, *rest: 6 * logits.numel(),
    )
)
"""logits float32 [T, E] -> (experts int32 [T, k], weights float32 [T, k]), as DeepSeek-V3 and GLM-4.5 choose (arXiv
2412.19437, section 2.1.2). s = sigmoid(logits); the experts are the k largest of s + bias [E], descending, within the
`top_groups` of `groups` equal parts of E whose two largest s + bias have the largest sum; weights are their s, over
the sum of them with `normalise`, times scale: the bias never enters one. Of equal ones, shared and gated see
`softmax_route`."""
