"""Linears on NVFP4 codes: one, one for each group, routed experts.

Few tokens run in one launch (`ops/cuda/nvfp4.cu`). Arguments of a weight are those of `ops/nvfp4.py`.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.nvfp4 import NVFP4Format
from onegraph.ops.activation import SwiGLU, check_gate, swiglu
from onegraph.ops.checks import check_routes
from onegraph.ops.norm import FLOATS
from onegraph.ops.nvfp4 import (
    check_float,
    check_weight,
    dequantize_weight,
    nvfp4_dequantize_weight,
    random_weight,
)
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.weight import Given, WeightOps


def _linear(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    y = x.float() @ dequantize_weight(codes, scale, global_scale).T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _grouped_linear(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    weight = dequantize_weight(codes, scale, global_scale)  # [G, n, k]
    return torch.einsum("...gk,gnk->...gn", x.float(), weight).to(x.dtype).contiguous()


def _experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
    limit: float,
    alpha: float,
    shift: float,
) -> Tensor:
    chosen, (tokens, top_k) = experts.flatten(), experts.shape
    in_weight = dequantize_weight(*(t.index_select(0, chosen) for t in (gate_up, gate_up_scale, gate_up_global)))
    gate_up_out = torch.einsum("pfd,pd->pf", in_weight, x.float().repeat_interleave(top_k, 0))
    hidden = swiglu.reference(gate_up_out, limit, alpha, shift).to(x.dtype).float()  # between the two launches
    out_weight = dequantize_weight(*(t.index_select(0, chosen) for t in (down, down_scale, down_global)))
    out = torch.einsum("pdf,pf->pd", out_weight, hidden).unflatten(0, (tokens, top_k))
    return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------- on a GPU


def linear_on_gpu(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    from onegraph.ops.cuda import nvfp4

    if not nvfp4.takes(x):
        return _linear(x, codes, scale, global_scale, bias)
    return nvfp4.linear(x, codes, scale, global_scale, bias)


def grouped_linear_on_gpu(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    from onegraph.ops.cuda import nvfp4

    if not nvfp4.takes(x):
        return _grouped_linear(x, codes, scale, global_scale)
    return nvfp4.grouped_linear(x, codes, scale, global_scale)


def experts_on_gpu(x: Tensor, experts: Tensor, weights: Tensor, *layers: Any) -> Tensor:
    from onegraph.ops.cuda import nvfp4

    if not nvfp4.takes_experts(x, layers[3].shape[2] * 2, experts.shape[1]):
        return _experts(x, experts, weights, *layers)
    return nvfp4.experts(x, experts, weights, *layers)


def _check_linear(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> None:
    check_weight(codes, scale, global_scale, 2)
    check_float("x", x, codes.shape[1] * 2)
    if bias is not None and (bias.dtype not in FLOATS or bias.shape != codes.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; it must be a contiguous float ({codes.shape[0]},)")


def _check_grouped(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor) -> None:
    check_weight(codes, scale, global_scale, 3)
    check_float("x", x, codes.shape[2] * 2)
    if x.dim() < 2 or x.shape[-2] != codes.shape[0]:
        raise ValueError(f"x has shape {tuple(x.shape)}; codes {tuple(codes.shape)} ask for [..., {codes.shape[0]}, k]")


def _check_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
    limit: float,
    alpha: float,
    shift: float,
) -> None:
    check_weight(gate_up, gate_up_scale, gate_up_global, 3, "gate_up")
    check_weight(down, down_scale, down_global, 3, "down")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, D]")
    check_float("x", x, gate_up.shape[2] * 2)
    wanted = (gate_up.shape[0], x.shape[1], gate_up.shape[1] // 4)
    if gate_up.shape[1] % 32 or tuple(down.shape) != wanted:
        raise ValueError(f"down is {tuple(down.shape)}; gate_up {tuple(gate_up.shape)} asks for {wanted}")
    check_routes(x, experts, weights)
    check_gate("nvfp4_experts", limit, alpha, shift)


def _linear_case(batch: tuple[int, ...], n: int, k: int, bias: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(*batch, k, generator=g).to(device, dtype)
        b = torch.randn(n, generator=g).to(device, dtype) if bias else None
        return x, *random_weight((n, k), device, g), b

    return Case(name=f"{'x'.join(map(str, batch))}x{k}->{n}{'+bias' if bias else ''}", make=make)


def _grouped_case(batch: tuple[int, ...], groups: int, n: int, k: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(*batch, groups, k, generator=g).to(device, dtype)
        return x, *random_weight((groups, n, k), device, g)

    return Case(name=f"{'x'.join(map(str, batch))}x{groups}x{k}->{n}", make=make)


def _experts_case(tokens: int, top_k: int, experts: int, dim: int, wide: int, *gate: float) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = (3 * torch.randn(tokens, dim, generator=g)).to(device, dtype)
        chosen = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].int().contiguous().to(device)
        gains = torch.rand(tokens, top_k, generator=g).to(device)
        gate_up, down = (
            random_weight((experts, 2 * wide, dim), device, g),
            random_weight((experts, dim, wide), device, g),
        )
        return x, chosen, gains, *gate_up, *down, *(gate or (10.0, 1.0, 0.0))

    name = f"{tokens} tokens, {top_k} of {experts}, {dim}x{wide}" + "".join(f", {number}" for number in gate)
    return Case(name=name, make=make)


_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}

nvfp4_linear = register(
    Op(
        name="nvfp4_linear",
        schema="(Tensor x, Tensor codes, Tensor scale, Tensor global_scale, Tensor? bias) -> Tensor",
        reference=_linear,
        fake=lambda x, codes, *rest: x.new_empty((*x.shape[:-1], codes.shape[0])),
        kernel="onegraph.ops.nvfp4_linear:linear_on_gpu",
        check=_check_linear,
        cases=(
            _linear_case((1,), 576, 576),
            _linear_case((1,), 4096, 256),
            _linear_case((1,), 1000, 4096, bias=True),
            _linear_case((2,), 192, 1536, bias=True),
            _linear_case((8,), 128, 4096),
            _linear_case((2, 3), 48, 208),
            _linear_case((17,), 100, 512, bias=True),
            _linear_case((0,), 128, 128),
        ),
        tolerance=_TOLERANCE,
        bytes_moved=lambda x, codes, scale, global_scale, bias: (
            nbytes(x, codes, scale, global_scale, bias) + x.numel() // x.shape[-1] * codes.shape[0] * x.element_size()
        ),
        flops=lambda x, codes, *rest: 2 * x.numel() * codes.shape[0],
    )
)
"""`nvfp4_linear(x [..., k], codes [n, k/2], scale [n, k/16], global_scale [n], bias) -> [..., n]` in x's dtype."""

nvfp4_grouped_linear = register(
    Op(
        name="nvfp4_grouped_linear",
        schema="(Tensor x, Tensor codes, Tensor scale, Tensor global_scale) -> Tensor",
        reference=_grouped_linear,
        fake=lambda x, codes, *rest: x.new_empty((*x.shape[:-1], codes.shape[1])),
        kernel="onegraph.ops.nvfp4_linear:grouped_linear_on_gpu",
        check=_check_grouped,
        cases=(_grouped_case((1,), 4, 64, 256), _grouped_case((3,), 2, 128, 512), _grouped_case((2, 5), 8, 32, 64)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda x, codes, scale, global_scale: (
            nbytes(x, codes, scale, global_scale) + x.numel() // x.shape[-1] * codes.shape[1] * x.element_size()
        ),
        flops=lambda x, codes, *rest: 2 * x.numel() * codes.shape[1],
    )
)
"""`nvfp4_grouped_linear(x [..., G, k], codes [G, n, k/2], ...) -> [..., G, n]`: group g of x times group g's weight."""

nvfp4_experts = register(
    Op(
        name="nvfp4_experts",
        schema="(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, "
        "Tensor gate_up_global, Tensor down, Tensor down_scale, Tensor down_global, float limit, float alpha, "
        "float shift) -> Tensor",
        reference=_experts,
        fake=lambda x, *rest: torch.empty_like(x),
        kernel="onegraph.ops.nvfp4_linear:experts_on_gpu",
        check=_check_experts,
        cases=(
            _experts_case(1, 6, 16, 256, 128),
            _experts_case(1, 7, 16, 1024, 512),
            _experts_case(4, 3, 32, 512, 256),
            _experts_case(3, 2, 4, 128, 64, 1.0, 1.0, 0.0),
            _experts_case(1, 2, 8, 256, 256, 7.0, 1.702, 1.0),
            _experts_case(5, 2, 4, 128, 64, float("inf"), 1.702, 1.0),
            _experts_case(16, 6, 24, 256, 64),
            _experts_case(13, 2, 3, 256, 128),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
        bytes_moved=lambda x, experts, weights, *layers: (
            2 * nbytes(x) + min(experts.numel(), layers[0].shape[0]) * (nbytes(*layers[:6]) // layers[0].shape[0])
        ),
        flops=lambda x, experts, weights, gate_up, *rest: 3 * experts.numel() * x.shape[1] * gate_up.shape[1],
    )
)
"""`nvfp4_experts(x [T, D], experts int32 [T, K], weights float32 [T, K], gate_up [E, 2F, D/2], its scale and global
scale [E, 2F], down [E, D, F/2], its scales, limit, alpha, shift) -> [T, D]`: sum over k of weights * down(swiglu(..)),
as `SwiGLU` tells it. Which experts run is read on the device. Gate rows come first, then up rows; F % 16 == 0."""

# --------------------------------------------------------------------------------------------------- as a weight format


def _weight(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    return given["codes"], given["scale"], given["global_scale"]


def _run(
    format: NVFP4Format, x: Tensor, weight: Given, bias: Tensor | None, add: None, eps: None, silu: bool, float32: bool
) -> Tensor:
    return nvfp4_linear(x.float() if float32 else x, *_weight(weight), bias)


def _run_experts(
    format: NVFP4Format,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Given,
    down: Given,
    gate: SwiGLU,
    biases: tuple[Tensor, Tensor] | None,
) -> Tensor:
    if biases is not None:
        raise ValueError(f"{format} has no experts with biases; decode them, or give experts without")
    return nvfp4_experts(x, experts, weights, *_weight(gate_up), *_weight(down), *gate.numbers)


def _reads(format: Any, n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    from onegraph.ops.cuda import nvfp4

    return nvfp4.reads(n, k, dtype, device, scaled=True)


WEIGHT = WeightOps(
    linear=_run,
    decode=lambda format, weight: nvfp4_dequantize_weight(*_weight(weight)),
    grouped=lambda format, x, weight: nvfp4_grouped_linear(x, *_weight(weight)),
    experts=_run_experts,
    reads=_reads,
)
