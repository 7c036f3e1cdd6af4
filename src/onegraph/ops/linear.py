"""A dense linear whose result is float32: for logits, where rounding to bfloat16 makes ties that greedy then breaks."""

import torch
from torch import Tensor

from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    if not x.is_cuda or x.dtype == torch.float32:
        return torch.nn.functional.linear(x, weight).float()
    out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)  # torch has this on CUDA only
    return out.view(*x.shape[:-1], -1)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        raise ValueError(
            f"linear_float32: x is {x.dtype}, weight {weight.dtype}; allowed is one of float32, bfloat16 and float16"
        )
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_float32: x is {tuple(x.shape)}, weight {tuple(weight.shape)}; they must be [..., k] and [n, k]"
        )
    if x.device != weight.device:
        raise ValueError(f"linear_float32: x is on {x.device}, weight on {weight.device}; move them to one device")


def _case(shape: tuple[int, ...], n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        weight = torch.randn(n, shape[-1], generator=generator) * shape[-1] ** -0.5
        return torch.randn(shape, generator=generator).to(device, dtype), weight.to(device, dtype)

    return Case(name=f"{'x'.join(map(str, shape))}->{n}", make=make)


linear_float32 = register(
    Op(
        name="linear_float32",
        schema="(Tensor x, Tensor weight) -> Tensor",
        reference=_linear_float32,
        fake=lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
        kernel=None,  # cuBLAS
        check=_check,
        cases=(_case((1, 576), 1000), _case((3, 2, 72), 131), _case((96,), 49)),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda x, weight: nbytes(x, weight) + 4 * x.numel() // x.shape[-1] * weight.shape[0],
        flops=lambda x, weight: 2 * x.numel() * weight.shape[0],
    )
)
"""x [..., k], weight [n, k] of one dtype -> float32 [..., n], summed in float32. On a CPU the result passes through x's
dtype: torch has no mixed product there, and widening a vocabulary's weight in every step would cost more."""
