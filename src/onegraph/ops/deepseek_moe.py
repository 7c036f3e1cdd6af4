"""Routing of DeepSeek-V4 and experts behind it: which experts a token uses is read on the device, never on the host."""

from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from onegraph.ops.activation import ReLU2, between, check_gate, parts_of
from onegraph.ops.checks import FLOATS, check_tensors
from onegraph.ops.deepseek_compress import INT32
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.route import with_shared


def _deepseek_route(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, tokens: Tensor, top_k: int, scale: float, shared: bool
) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.softplus(logits).sqrt()
    if table is not None:
        experts = table.index_select(0, tokens).long()
    else:
        experts = (scores if bias is None else scores + bias).topk(top_k, dim=1).indices
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * scale
    if shared:
        experts, weights = with_shared(experts, weights, logits.shape[1], None)
    return experts.to(INT32), weights


def _routed_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    limit: float,
    alpha: float,
    shift: float,
) -> Tensor:
    tokens, top_k = experts.shape
    biases, gate = (gate_up_bias, down_bias), (limit, alpha, shift)

    def biased(y: Tensor, layer: int, of: Callable[[Tensor], Tensor]) -> Tensor:
        bias = biases[layer]
        return y if bias is None else (y.float() + of(bias)).to(y.dtype)

    if tokens * top_k <= gate_up.shape[0]:  # few tokens: the weights that they use
        chosen = experts.flatten()
        hidden = torch.einsum("tkfd,td->tkf", gate_up.index_select(0, chosen).unflatten(0, (tokens, top_k)), x)

        def own(bias: Tensor) -> Tensor:
            rows: Tensor = bias.index_select(0, chosen).unflatten(0, (tokens, top_k))
            return rows

        hidden = between(biased(hidden, 0, own), *gate)
        each = torch.einsum("tkdf,tkf->tkd", down.index_select(0, chosen).unflatten(0, (tokens, top_k)), hidden)
        return (biased(each, 1, own).float() * weights.unsqueeze(2)).sum(1).to(x.dtype)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):  # many: every expert on all tokens, weighted by zero where not chosen
        gain = torch.where(experts == expert, weights, 0.0).sum(1, keepdim=True)
        row = itemgetter(expert)
        hidden = between(biased(x @ gate_up[expert].t(), 0, row), *gate)
        out += gain * biased(hidden @ down[expert].t(), 1, row).float()
    return out.to(x.dtype)


def _check_route(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, tokens: Tensor, top_k: int, scale: float, shared: bool
) -> None:
    op = "deepseek_route"
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"{op}: top_k is {top_k}; logits {tuple(logits.shape)} must be [T, E], of E no less than that")
    count, experts = logits.shape
    check_tensors(
        op, logits.device, logits=(logits, torch.float32, (count, experts)), bias=(bias, torch.float32, (experts,)),
        tokens=(tokens, torch.int64, (count,)), table=(table, INT32, (-1, top_k)),
    )  # fmt: skip


def _check_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    limit: float,
    alpha: float,
    shift: float,
) -> None:
    op = "routed_experts"
    if x.dim() != 2 or x.dtype not in FLOATS or gate_up.dim() != 3 or gate_up.shape[1] % parts_of(alpha):
        raise ValueError(
            f"{op}: x is {x.dtype} {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}; they must be [T, D] of a float "
            "dtype and [E, 2F, D]"
        )
    (count, dim), (many, width) = x.shape, gate_up.shape[:2]
    check_tensors(
        op, x.device, x=(x, x.dtype, (count, dim)), gate_up=(gate_up, x.dtype, (many, width, dim)),
        down=(down, x.dtype, (many, dim, width // parts_of(alpha))), experts=(experts, INT32, (count, -1)),
        weights=(weights, torch.float32, tuple(experts.shape)),
        gate_up_bias=(gate_up_bias, torch.float32, (many, width)), down_bias=(down_bias, torch.float32, (many, dim)),
    )  # fmt: skip
    check_gate(op, limit, alpha, shift)


def _route_case(name: str, tokens: int, experts: int, top_k: int, kind: str, shared: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        logits = torch.randn(tokens, experts, generator=generator)
        bias = torch.randn(experts, generator=generator) if kind == "bias" else None
        order = torch.rand(50, experts, generator=generator).argsort(1)[:, :top_k]
        table = order.to(INT32).contiguous() if kind == "hash" else None
        ids = torch.randint(0, 50, (tokens,), generator=generator)
        return tuple(
            a.to(device) if isinstance(a, Tensor) else a for a in (logits, bias, table, ids, top_k, 1.5, shared)
        )

    return Case(name=name, make=make)


def _experts_case(
    name: str, tokens: int, experts: int, top_k: int, dim: int, wide: int, *, biases: bool = False, relu2: bool = False
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        args = [
            torch.randn(tokens, dim, generator=generator).to(dtype),
            torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].to(INT32).contiguous(),
            torch.rand(tokens, top_k, generator=generator),
            (torch.randn(experts, (2 - relu2) * wide, dim, generator=generator) * 3 * dim**-0.5).to(dtype),
            None,
            (torch.randn(experts, dim, wide, generator=generator) * wide**-0.5).to(dtype),
            None,
        ]
        if biases:
            args[4] = torch.randn(experts, 2 * wide, generator=generator)
            args[6] = torch.randn(experts, dim, generator=generator)
        gate = ReLU2.numbers if relu2 else (2.0, 1.702, 1.0) if biases else (5.0, 1.0, 0.0)
        return *(a if a is None else a.to(device) for a in args), *gate

    return Case(name=name, make=make)


deepseek_route = register(
    Op(
        name="deepseek_route",
        schema=(
            "(Tensor logits, Tensor? bias, Tensor? table, Tensor tokens, int top_k, float scale, bool shared)"
            " -> (Tensor, Tensor)"
        ),
        reference=_deepseek_route,
        fake=lambda logits, bias, table, tokens, top_k, scale, shared: (
            logits.new_empty((logits.shape[0], top_k + shared), dtype=INT32),
            logits.new_empty((logits.shape[0], top_k + shared)),
        ),
        kernel="onegraph.ops.triton.deepseek_moe:deepseek_route",
        check=_check_route,
        cases=(
            _route_case("flash", 3, 256, 6, "bias"),
            _route_case("plain", 5, 40, 3, "plain"),
            _route_case("hash", 4, 32, 6, "hash"),
            _route_case("shared", 2, 256, 6, "bias", True),
            _route_case("hash_shared", 3, 32, 4, "hash", True),
        ),
        tolerance={torch.float32: 2e-6},
        bytes_moved=lambda logits, bias, table, tokens, top_k, scale, shared: (
            nbytes(logits, bias, tokens) + 12 * logits.shape[0] * top_k
        ),
        flops=lambda logits, *rest: 8 * logits.numel(),
    )
)
"""logits float32 [T, E] -> (experts int32 [T, k], weights float32 [T, k]), with `shared` one more: expert E of weight 1
for every token. s = sqrt(softplus(logits)); the experts are row tokens[t] of `table` int32 [V, k] (hash layers),
else the k largest of s + bias, descending; weights are their s over the sum, times scale: the bias never enters one."""

routed_experts = register(
    Op(
        name="routed_experts",
        schema=(
            "(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
            "Tensor? down_bias, float limit, float alpha, float shift) -> Tensor"
        ),
        reference=_routed_experts,
        fake=lambda x, *rest: torch.empty_like(x),
        check=_check_experts,
        cases=(
            _experts_case("decode", 1, 16, 6, 96, 64), _experts_case("many", 19, 8, 2, 40, 24),
            _experts_case("relu2", 5, 8, 2, 40, 24, relu2=True),
            _experts_case("biases", 1, 16, 4, 96, 64, biases=True),
            _experts_case("many biases", 19, 8, 2, 40, 24, biases=True),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3},
        bytes_moved=lambda x, experts, weights, gate_up, gate_up_bias, down, *rest: (
            2 * nbytes(x) + nbytes(experts, weights)
            + min(experts.numel(), gate_up.shape[0]) * nbytes(gate_up[0], down[0])
        ),
        flops=lambda x, experts, weights, gate_up, gate_up_bias, down, *rest: (
            2 * experts.numel() * (gate_up[0].numel() + down[0].numel())
        ),
    )
)  # fmt: skip
"""x [T, D], experts int32 [T, k], weights float32 [T, k], gate_up [E, 2F, D], down [E, D, F], biases float32 [E, 2F]
and [E, D] or None -> [T, D]: Σ_k weights_k (down_e swiglu(gate_up_e x + bias_e) + bias_e), the products rounded to x's
dtype, summed in float32; limit, alpha and shift are the numbers of a `Gate`, of which `ReLU2` has up rows alone."""
