"""Routing of DeepSeek-V4 and experts behind it: which experts a token uses is read on the device, never on the host."""

import torch
from torch import Tensor

from onegraph.ops.activation import swiglu
from onegraph.ops.deepseek_compress import INT32
from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


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
        experts = torch.nn.functional.pad(experts, (0, 1), value=logits.shape[1])
        weights = torch.nn.functional.pad(weights, (0, 1), value=1.0)
    return experts.to(INT32), weights


def _routed_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    tokens, top_k = experts.shape
    if tokens * top_k <= gate_up.shape[0]:  # few tokens: the weights that they use
        chosen = experts.flatten()
        hidden = torch.einsum("tkfd,td->tkf", gate_up.index_select(0, chosen).unflatten(0, (tokens, top_k)), x)
        hidden = swiglu.reference(hidden, limit)
        each = torch.einsum("tkdf,tkf->tkd", down.index_select(0, chosen).unflatten(0, (tokens, top_k)), hidden)
        return (each.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):  # many: every expert on all tokens, weighted by zero where not chosen
        gain = torch.where(experts == expert, weights, 0.0).sum(1, keepdim=True)
        out += gain * (swiglu.reference(x @ gate_up[expert].t(), limit) @ down[expert].t()).float()
    return out.to(x.dtype)


def _check_route(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, tokens: Tensor, top_k: int, scale: float, shared: bool
) -> None:
    name = "deepseek_route"
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"{name}: logits is {logits.dtype} {tuple(logits.shape)}; it must be contiguous float32 [T, E]"
        )
    count, experts = logits.shape
    if not 1 <= top_k <= experts:
        raise ValueError(f"{name}: top_k is {top_k}; logits {tuple(logits.shape)} allow 1 to {experts}")
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32):
        raise ValueError(f"{name}: bias is {bias.dtype} {tuple(bias.shape)}; it must be float32 ({experts},)")
    if tokens.shape != (count,) or tokens.dtype != torch.int64:
        raise ValueError(f"{name}: tokens is {tokens.dtype} {tuple(tokens.shape)}; it must be int64 ({count},)")
    if table is not None and (table.dim() != 2 or table.shape[1] != top_k or table.dtype != INT32):
        raise ValueError(f"{name}: table is {table.dtype} {tuple(table.shape)}; it must be int32 [V, {top_k}]")


def _check_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> None:
    name = "routed_experts"
    if x.dim() != 2 or x.dtype not in FLOATS or not x.is_contiguous():
        raise ValueError(f"{name}: x is {x.dtype} {tuple(x.shape)}; it must be a contiguous float [T, D]")
    if gate_up.dim() != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != x.shape[1]:
        raise ValueError(
            f"{name}: gate_up is {tuple(gate_up.shape)}; x {tuple(x.shape)} asks for [E, 2F, {x.shape[1]}]"
        )
    wanted = (gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2)
    if down.shape != wanted:
        raise ValueError(f"{name}: down is {tuple(down.shape)}; gate_up {tuple(gate_up.shape)} asks for {wanted}")
    for what, tensor in (("gate_up", gate_up), ("down", down)):
        if tensor.dtype != x.dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: {what} is {tensor.dtype}; it must be contiguous, of x's {x.dtype}")
    if experts.dim() != 2 or experts.shape[0] != x.shape[0] or experts.dtype != INT32:
        raise ValueError(f"{name}: experts is {experts.dtype} {tuple(experts.shape)}; int32 [{x.shape[0]}, K]")
    if weights.shape != experts.shape or weights.dtype != torch.float32:
        raise ValueError(f"{name}: weights is {weights.dtype} {tuple(weights.shape)}; float32 {tuple(experts.shape)}")
    if not limit > 0:
        raise ValueError(f"{name}: limit is {limit}; it must be above 0")


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


def _experts_case(name: str, tokens: int, experts: int, top_k: int, dim: int, wide: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        args = (
            torch.randn(tokens, dim, generator=generator).to(dtype),
            torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].to(INT32).contiguous(),
            torch.rand(tokens, top_k, generator=generator),
            (torch.randn(experts, 2 * wide, dim, generator=generator) * 3 * dim**-0.5).to(dtype),
            (torch.randn(experts, dim, wide, generator=generator) * wide**-0.5).to(dtype),
        )
        return *(a.to(device) for a in args), 5.0

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
            "(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor down, float limit) -> Tensor"
        ),
        reference=_routed_experts,
        fake=lambda x, *rest: torch.empty_like(x),
        check=_check_experts,
        cases=(_experts_case("decode", 1, 16, 6, 96, 64), _experts_case("many", 19, 8, 2, 40, 24)),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3},
        bytes_moved=lambda x, experts, weights, gate_up, down, limit: (
            2 * nbytes(x) + nbytes(experts, weights)
            + min(experts.numel(), gate_up.shape[0]) * nbytes(gate_up[0], down[0])
        ),
        flops=lambda x, experts, weights, gate_up, down, limit: (
            2 * experts.numel() * (gate_up[0].numel() + down[0].numel())
        ),
    )
)  # fmt: skip
"""x [T, D], experts int32 [T, k], weights float32 [T, k], gate_up [E, 2F, D], down [E, D, F] -> [T, D]:
Σ_k weights_k down_e swiglu(gate_up_e x, limit), the products rounded to x's dtype, summed in float32."""
