"""MXFP4 weights: codes to floats, and the linear on them. The format is told in `formats/mxfp4.py`."""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.mxfp4 import GROUP
from onegraph.formats.weight import WeightFormat
from onegraph.ops.norm import FLOATS
from onegraph.ops.nvfp4 import decode_e2m1
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.weight import Given, WeightOps


def _dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    # 2^(scale - 127) as the bits of a float32: its exponent field, and for 0, which is subnormal, half of 2^-126
    exponent = scale.int()
    factor = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)
    return (decode_e2m1(codes).unflatten(-1, (-1, GROUP)) * factor.unsqueeze(-1)).flatten(-2)


def _linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, float32: bool) -> Tensor:
    y = x.float() @ _dequantize(codes, scale).T
    y = y if bias is None else y + bias.float()
    return y if float32 else y.to(x.dtype)


def _check_weight(codes: Tensor, scale: Tensor) -> None:
    if codes.dtype != torch.uint8 or codes.dim() < 2 or codes.shape[-1] % (GROUP // 2):
        raise ValueError(f"codes is {codes.dtype} {tuple(codes.shape)}; it must be uint8 [..., n, k/2], k % 32 == 0")
    shape = (*codes.shape[:-1], codes.shape[-1] * 2 // GROUP)
    if scale.dtype != torch.uint8 or tuple(scale.shape) != shape:
        raise ValueError(
            f"scale is {scale.dtype} {tuple(scale.shape)}; codes {tuple(codes.shape)} ask for uint8 {shape}"
        )
    if scale.device != codes.device:
        raise ValueError(f"scale is on {scale.device} and codes on {codes.device}; move them to one device")


def _check_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, float32: bool) -> None:
    _check_weight(codes, scale)
    if codes.dim() != 2:
        raise ValueError(f"codes is {tuple(codes.shape)}; a linear has uint8 [n, k/2]")
    if x.dtype not in FLOATS or x.dim() == 0 or x.shape[-1] != codes.shape[1] * 2:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; codes {tuple(codes.shape)} ask for a float32, bfloat16 or float16 with "
            f"a last dimension of {codes.shape[1] * 2}"
        )
    if x.device != codes.device:
        raise ValueError(f"x is on {x.device} and codes on {codes.device}; move them to one device")
    if bias is not None and (bias.dtype not in FLOATS or bias.shape != codes.shape[:1]):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; it must be a float tensor ({codes.shape[0]},)")


def _random(n: int, k: int, device: torch.device, g: torch.Generator) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    return codes.to(device), torch.randint(118, 124, (n, k // GROUP), generator=g, dtype=torch.uint8).to(device)


def _weight_case(n: int, k: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        return _random(n, k, device, generator)

    return Case(name=f"{n}x{k}", make=make)


def _linear_case(tokens: int, n: int, k: int, bias: bool = False, float32: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, k, generator=generator).to(device, dtype)
        b = torch.randn(n, generator=generator).to(device, dtype) if bias else None
        return x, *_random(n, k, device, generator), b, float32

    return Case(name=f"{tokens}x{k}->{n}{'+bias' if bias else ''}{'+float32' if float32 else ''}", make=make)


mxfp4_dequantize = register(
    Op(
        name="mxfp4_dequantize",
        schema="(Tensor codes, Tensor scale) -> Tensor",
        reference=_dequantize,
        fake=lambda codes, scale: codes.new_empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=torch.float32),
        check=_check_weight,
        cases=(_weight_case(64, 96), _weight_case(1, 32)),
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
        bytes_moved=lambda codes, scale: nbytes(codes, scale) + 8 * codes.numel(),
        flops=lambda codes, scale: 2 * codes.numel(),
    )
)
"""codes uint8 [..., n, k/2], scale uint8 [..., n, k/32] (E8M0, not 255) -> float32 [..., n, k], exact where float32
holds the number."""

mxfp4_linear = register(
    Op(
        name="mxfp4_linear",
        schema="(Tensor x, Tensor codes, Tensor scale, Tensor? bias, bool float32) -> Tensor",
        reference=_linear,
        fake=lambda x, codes, scale, bias, float32: x.new_empty(
            (*x.shape[:-1], codes.shape[0]), dtype=torch.float32 if float32 else x.dtype
        ),
        check=_check_linear,
        cases=(_linear_case(1, 64, 96), _linear_case(5, 48, 64, bias=True), _linear_case(2, 32, 32, float32=True)),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda x, codes, scale, bias, float32: (
            nbytes(x, codes, scale, bias) + (4 if float32 else x.element_size()) * x.shape[:-1].numel() * codes.shape[0]
        ),
        flops=lambda x, codes, *rest: 4 * x.shape[:-1].numel() * codes.numel(),
    )
)
"""x [..., k] -> [..., n] in x's dtype, or in float32: y = W x + b with W in MXFP4. The reference runs on GPUs too."""


def _run(
    format: WeightFormat, x: Tensor, weight: Given, bias: Tensor | None, add: None, eps: None, silu: bool, float32: bool
) -> Tensor:
    return mxfp4_linear(x, weight["codes"], weight["scale"], bias, float32)


WEIGHT = WeightOps(linear=_run, decode=lambda format, weight: mxfp4_dequantize(weight["codes"], weight["scale"]))
