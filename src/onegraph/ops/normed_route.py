"""From the residual stream to the experts of each token: sum, norms and router, of few tokens one launch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.calls import NormedRoute
from onegraph.ops.checks import check_tensors
from onegraph.ops.linear import linear
from onegraph.ops.norm import MOST_NORMS, add_rms_norm, check_norm, rms_norm
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.route import check_groups, sigmoid_route, softmax_route

Result = tuple[Tensor, Tensor, Tensor, Tensor]


def composed(call: NormedRoute, run: Callable[[Op], Callable[..., Any]] = lambda op: op) -> Result:
    """By the ops that it stands for, each as `run` has it."""
    norm = call.norm.view(-1, call.norm.shape[-1])
    if call.residual is None:
        total, normed = call.x.new_empty(0), run(rms_norm)(call.x, norm, call.eps)
    else:
        total, normed = run(add_rms_norm)(call.residual, call.x, norm, call.eps, call.post)
    logits = run(linear)(normed[-1], call.gate, True)
    if call.groups:
        assert call.bias is not None
        groups = call.groups, call.top_groups, call.normalise, call.factor
        chosen = run(sigmoid_route)(logits, call.bias, call.top_k, *groups, call.shared, call.gated)
    else:
        shared = call.shared, call.gated
        chosen = run(softmax_route)(logits, call.bias, call.top_k, call.normalise, *shared, call.scales)
    return total, normed, *chosen


def _check(call: NormedRoute) -> None:
    op, x, gate = "normed_route", call.x, call.gate
    if x.dim() != 2:
        raise ValueError(f"{op}: x is {tuple(x.shape)}; it must be [T, D]: flatten it")
    check_norm(x, call.norm, call.eps, op=op, most=MOST_NORMS)
    if call.post is not None and call.residual is None:
        raise ValueError(f"{op}: post is given without residual; it is of the norm before the sum: give both or none")
    check_tensors(op, x.device, residual=(call.residual, x.dtype, tuple(x.shape)))
    if call.post is not None:
        check_norm(x, call.post, call.eps, op=op)
    kinds = [x.dtype] if gate.dtype == x.dtype else [torch.float32]
    check_tensors(op, x.device, gate=(gate, kinds[0], (-1, x.shape[1])))
    if call.gated and not call.shared:
        raise ValueError(
            f"{op}: gated is True and shared is False; a gate is of a shared expert: give both, or neither"
        )
    if not 1 <= call.top_k <= call.count:
        raise ValueError(
            f"{op}: top_k is {call.top_k} and the router has {call.count} experts; it must be 1 to as many"
        )
    wanted = torch.float32, (call.count,)
    check_tensors(op, x.device, bias=(call.bias, *wanted), scales=(call.scales, *wanted))
    if call.groups:
        if call.bias is None or call.scales is not None:
            raise ValueError(f"{op}: scores by sigmoid (groups is {call.groups}) take a bias and no scales; give zeros")
        check_groups(op, call.count, call.top_k, call.groups, call.top_groups)


def on_gpu(call: NormedRoute) -> Result:
    """The kernel for what it takes; its parts for the rest."""
    from onegraph.ops.cuda import route as kernel

    found = kernel.normed_route(call)
    return composed(call) if found is None else found


def _fake(call: NormedRoute) -> Result:
    x, chosen = call.x, (call.x.shape[0], call.top_k + call.shared)
    total = x.new_empty(0 if call.residual is None else x.shape)
    experts, weights = x.new_empty(chosen, dtype=torch.int32), x.new_empty(chosen, dtype=torch.float32)
    return total, x.new_empty((call.norms, *x.shape)), experts, weights


def _case(
    name: str, tokens: int, hidden: int, experts: int, top_k: int, *, norms: int = 1, normalise: bool = True,
    groups: tuple[int, int] = (0, 1), bias: bool = False, scaled: bool = False, shared: bool = False,
    gated: bool = False, add: bool = False, post: bool = False, exact: bool = False,
) -> Case:  # fmt: skip
    """exact: router and norms are float32 whatever x is. Logits of a token are apart, so that rounding changes no
    choice."""

    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        wide = torch.float32 if exact else dtype

        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=g)

        x, residual = draw(tokens, hidden).to(dtype), draw(tokens, hidden).to(dtype) if add else None
        norm, behind = (1 + 0.2 * draw(norms, hidden)).to(wide), 1 + 0.2 * draw(hidden) if post else None
        many = min(2 * top_k, experts)
        levels = torch.cat((torch.linspace(-6, -3, experts - many), torch.linspace(-2.4, 2.4, many)))
        logits = torch.stack([levels[torch.rand(experts, generator=g).argsort()] for _ in range(tokens)])
        if gated:
            logits = torch.cat((logits, draw(tokens, 1)), 1)
        extra = 0.01 * draw(experts) if bias else None
        scales = 0.5 + torch.rand(experts, generator=g) if scaled else None
        behind = None if behind is None else behind.to(dtype)
        total = x if residual is None else add_rms_norm.reference(residual, x, norm[-1], 1e-6, behind)[0]
        inputs = rms_norm.reference(total.float(), norm[-1].float(), 1e-6)
        gate = (torch.linalg.pinv(inputs.double()) @ logits.double()).T.to(wide).contiguous()
        tensors = x, norm[0] if norms == 1 else norm, gate, extra, scales, residual, behind
        one, weight, *more = (None if t is None else t.to(device) for t in tensors)
        factor = 2.5 if groups[0] else 1.0
        return one, weight, 1e-6, *more[:3], top_k, normalise, *groups, factor, shared, gated, *more[3:]

    return Case(name=name, make=make)


normed_route = register(
    Op(
        name="normed_route",
        call=NormedRoute,
        schema="-> (Tensor, Tensor, Tensor, Tensor)",
        reference=lambda call: composed(call, lambda op: op.reference),
        fake=_fake,
        kernel="onegraph.ops.normed_route:on_gpu",
        cpu="onegraph.ops.normed_route:composed",
        check=_check,
        cases=(
            _case("qwen3_moe", 3, 256, 128, 8),
            _case("qwen3_5_moe", 1, 2048, 256, 8, shared=True, gated=True, exact=True),
            _case("qwen3_next", 4, 576, 512, 10, shared=True, gated=True, add=True),
            _case("not_normalised", 4, 72, 60, 4, normalise=False),
            _case("gpt_oss", 1, 2880, 32, 4, bias=True, add=True),
            _case("glm_4_5", 2, 1000, 160, 8, groups=(1, 1), bias=True, shared=True),
            _case("deepseek_v3", 4, 7168, 256, 8, groups=(8, 4), bias=True, shared=True, add=True),
            _case("sums_of_scores", 3, 64, 15, 4, groups=(5, 2), bias=True, normalise=False),
            _case("many_experts", 2, 96, 700, 2),
            _case("many_tokens", 5, 64, 20, 3),
            _case("all_of_three", 9, 66, 3, 3),
            _case("gemma4", 2, 2816, 128, 8, norms=3, scaled=True, add=True, post=True, exact=True),
            _case("gemma4_one", 1, 2816, 128, 8, norms=3, scaled=True, add=True, post=True),
        ),
        tolerance={torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: (
            nbytes(call.x, call.residual, call.norm, call.post, call.gate, call.bias, call.scales)
            + (call.norms + (call.residual is not None)) * nbytes(call.x)
            + 8 * call.x.shape[0] * (call.top_k + call.shared)
        ),
        flops=lambda call: 2 * call.x.shape[0] * call.gate.numel() + 4 * call.x.numel() * call.norms,
    )
)
"""x [T, D], norm [N, D] or [D], gate [E, D] of x's dtype or float32 -> (total [0], normed [N, T, D], experts int32
[T, k], weights float32 [T, k]): x under each of the norms, as `rms_norm` has it, and what the router `gate` chooses by
the logits `linear(normed[-1], gate, True)`: by `softmax_route` with `bias`, `scales` and `normalise`, or where `groups`
is not 0 by `sigmoid_route` with `bias`, `groups`, `top_groups`, `normalise` and the scale `factor`. shared and gated as
there: k + 1 results, and gate [E + 1, D].

With `residual` [T, D] what is normed is total [T, D], the sum of both, as `add_rms_norm` has it with `post` [D]. Logits
may differ from `linear`'s by rounding. For equal logits and NaN see `softmax_route`. Raises ValueError where shapes,
dtypes or devices do not fit."""
