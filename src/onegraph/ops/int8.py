"""Linears on int8 rows, on a CPU: torch's own kernel for few tokens, a product in bfloat16 for more."""

import torch
from torch import Tensor

from onegraph.formats.int8 import rotated, turned_back
from onegraph.formats.weight import WeightFormat
from onegraph.ops.activation import SwiGLU
from onegraph.ops.weight import KernelArgs, WeightOps

FEW = 8
"""Rows up to which torch's kernel reads int8 faster than its bfloat16 product reads decoded rows."""

VECTOR = 32
"""torch's kernel reads whole vectors of a row, past its end where that is in the middle of one (torch 2.13)."""

AT_ONCE = 1 << 23  # weights that are decoded at a time


def _linear(
    format: WeightFormat,
    x: Tensor,
    weight: KernelArgs,
    bias: Tensor | None,
    add: None,
    eps: None,
    silu: bool,
    float32: bool,
) -> Tensor:
    """Activations are rounded to bfloat16 on both sides of the product, which sums in float32."""
    y = _product(x.reshape(-1, x.shape[-1]), weight["weight"], weight["scale"])
    y = y.view(*x.shape[:-1], -1)
    wanted = torch.float32 if float32 else x.dtype
    return y.to(wanted) if bias is None else (y.float() + bias).to(wanted)


def _product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x [T, k], codes [n, k], scale [n] -> bfloat16 [T, n]."""
    x = rotated(x).bfloat16()
    if len(x) <= FEW and codes.shape[1] % VECTOR == 0:
        return torch._weight_int8pack_mm(x, codes, scale)
    parts = codes.split(max(1, AT_ONCE // codes.shape[1]))
    return torch.cat([x @ part.bfloat16().t() for part in parts], dim=-1) * scale


def _experts(
    format: WeightFormat,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: KernelArgs,
    down: KernelArgs,
    gate: SwiGLU,
    biases: tuple[Tensor, Tensor] | None,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in experts.unique().tolist():  # only those that a token goes to: a CPU's values are at hand
        token, choice = (experts == expert).nonzero(as_tuple=True)
        y = x[token]
        for each, bias, act in zip((gate_up, down), biases or (None, None), (gate, None), strict=True):
            y = _product(y, each["weight"][expert], each["scale"][expert]).float()
            y = y if bias is None else y + bias[expert]
            y = y if act is None else act(y)
        out.index_add_(0, token, y * weights[token, choice, None])
    return out.to(x.dtype)


def _decode(format: WeightFormat, weight: KernelArgs) -> Tensor:
    return turned_back(weight["weight"].float() * weight["scale"].float().unsqueeze(-1))


WEIGHT = WeightOps(linear=_linear, decode=_decode, experts=_experts)
