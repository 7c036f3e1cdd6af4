"""Which experts a token uses, and how much of each: read on the device, never on the host."""

import torch
from torch import Tensor

from onegraph.ops.checks import check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register


def _softmax_route(logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    logits = logits if bias is None else logits + bias
    chosen, experts = logits.topk(top_k, dim=1)
    weights = chosen.softmax(1) if normalise else logits.softmax(1).gather(1, experts)
    return experts.to(torch.int32), weights


def _check(logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool) -> None:
    op = "softmax_route"
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"{op}: top_k is {top_k}; logits {tuple(logits.shape)} must be [T, E], of E no less than that")
    count, experts = logits.shape
    check_tensors(
        op, logits.device, logits=(logits, torch.float32, (count, experts)), bias=(bias, torch.float32, (experts,))
    )


def _case(name: str, tokens: int, experts: int, top_k: int, normalise: bool, bias: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        logits = 3 * torch.randn(tokens, experts, generator=generator)
        extra = torch.randn(experts, generator=generator).to(device) if bias else None
        return logits.to(device), extra, top_k, normalise

    return Case(name=name, make=make)


softmax_route = register(
    Op(
        name="softmax_route",
        schema="(Tensor logits, Tensor? bias, int top_k, bool normalise) -> (Tensor, Tensor)",
        reference=_softmax_route,
        fake=lambda logits, bias, top_k, normalise: (
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
        ),
        tolerance={torch.float32: 2e-6},
        bytes_moved=lambda logits, bias, top_k, normalise: nbytes(logits, bias) + 8 * logits.shape[0] * top_k,
        flops=lambda logits, *rest: 4 * logits.numel(),
    )
)
"""logits float32 [T, E] -> (experts int32 [T, k], weights float32 [T, k]): the k largest of s = logits + bias [E],
descending, and their softmax, over the k with `normalise` (Mixtral, gpt-oss, and Qwen3-MoE where norm_topk_prob is set:
softmax over all, then divided by the sum of the chosen, is the same number), else over all E. Which of equal ones is
chosen is torch.topk's affair on a CPU, and the first on a GPU. Where an s is NaN, so are all weights of its token."""
