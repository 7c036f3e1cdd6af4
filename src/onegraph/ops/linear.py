"""A dense linear that is quick for the few tokens of a decode step, its result float32 where asked: logits rounded to
bfloat16 tie, and greedy then breaks ties."""

import torch
from torch import Tensor

from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _linear(x: Tensor, weight: Tensor, wide: bool) -> Tensor:
    if wide and x.is_cuda and x.dtype != torch.float32:
        out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)  # torch has this on CUDA only
        return out.view(*x.shape[:-1], -1)
    y = torch.nn.functional.linear(x, weight)
    return y.float() if wide else y


def _on_gpu(x: Tensor, weight: Tensor, wide: bool) -> Tensor:
    """The kernel for what it takes, whose weight is on its way before the step gets there; cuBLAS for the rest."""
    from onegraph.ops.triton import linear as kernel

    return kernel.linear(x, weight, wide) if kernel.takes(x, weight) else _linear(x, weight, wide)


def _check(x: Tensor, weight: Tensor, wide: bool) -> None:
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        raise ValueError(f"linear: x is {x.dtype}, weight {weight.dtype}; allowed is one of float32, bfloat16, float16")
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x is {tuple(x.shape)}, weight {tuple(weight.shape)}; they must be [..., k] and [n, k]"
        )
    if x.device != weight.device:
        raise ValueError(f"linear: x is on {x.device}, weight on {weight.device}; move them to one device")


def _case(shape: tuple[int, ...], n: int, wide: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        weight = torch.randn(n, shape[-1], generator=generator) * shape[-1] ** -0.5
        return torch.randn(shape, generator=generator).to(device, dtype), weight.to(device, dtype), wide

    return Case(name=f"{'x'.join(map(str, shape))}->{n}{' wide' if wide else ''}", make=make)


linear = register(
    Op(
        name="linear",
        schema="(Tensor x, Tensor weight, bool wide) -> Tensor",
        reference=_linear,
        fake=lambda x, weight, wide: x.new_empty(
            (*x.shape[:-1], weight.shape[0]), dtype=torch.float32 if wide else x.dtype
        ),
        kernel="onegraph.ops.linear:_on_gpu",
        check=_check,
        cases=(
            _case((1, 1, 4096), 256, True), _case((1, 72), 131), _case((2, 2, 576), 75), _case((17, 96), 49, True),
            _case((96,), 49, True), _case((1, 40), 17000, True),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda x, weight, wide: (
            nbytes(x, weight) + (4 if wide else x.element_size()) * x.numel() // x.shape[-1] * weight.shape[0]
        ),
        flops=lambda x, weight, wide: 2 * x.numel() * weight.shape[0],
    )
)  # fmt: skip
"""x [..., k], weight [n, k] of one dtype -> [..., n] summed in float32, in x's dtype or (`wide`) in float32. On a CPU
the result passes through x's dtype: torch has no mixed product there, and widening a vocabulary's weight in every step
would cost more."""
