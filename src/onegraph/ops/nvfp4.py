"""NVFP4: floats to codes and back, and cache rows. The format is described in `formats/nvfp4.py`; weights and linears
are in `ops/nvfp4_linear.py`.

Scales of groups are the bits of E4M3 numbers as uint8, which every part of torch can copy and compare.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.nvfp4 import E2M1_MAX, E4M3, E4M3_MAX, GROUP
from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register

SMALLEST = 2.0**-126  # a scale is never zero: what is divided by it would not be finite


# -------------------------------------------------------------------------------------------------------- codes


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 of x float32 [..., 2m], ties to even mantissas, saturating at 6, as cvt.rn.satfinite.e2m1x2 rounds;
    packed uint8 [..., m]."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    code |= torch.signbit(x).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode_e2m1(codes: Tensor) -> Tensor:
    """uint8 [..., m] -> float32 [..., 2m], exact."""
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    # A byte whose bits 3..1 are the code's magnitude, seen as the exponent's low bits and the mantissa of a float32,
    # is the value times 2^-126, subnormals included: no table that would have to be made in a captured step.
    bits = (nibbles & 7).int() << 22 | (nibbles >> 3).int() << 31
    return bits.view(torch.float32) * 2.0**126


def quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    grouped = x.float().unflatten(-1, (-1, GROUP))
    # by a tensor: a GPU would multiply by what a number's inverse rounds to
    scale = grouped.abs().amax(-1) / (global_scale * E2M1_MAX)
    scale = scale.clamp(max=E4M3_MAX).to(E4M3)
    unit = (scale.float() * global_scale).clamp(min=SMALLEST).unsqueeze(-1)
    return encode_e2m1((grouped / unit).flatten(-2)), scale.view(torch.uint8)


def global_scale_of(x: Tensor) -> Tensor:
    """A global scale for x, float32 [], from its largest magnitude; stays on the device."""
    return (x.abs().amax().float() / (E2M1_MAX * E4M3_MAX)).clamp(min=SMALLEST)


def times_scales(values: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., k] times the E4M3 numbers of scale uint8 [..., k/16], exact: six bits of mantissa."""
    groups: Tensor = values.unflatten(-1, (-1, GROUP))
    return (groups * scale.view(E4M3).float().unsqueeze(-1)).flatten(-2)


def _quantize_rows(x: Tensor) -> Tensor:
    codes, scale = quantize(x, torch.ones((), device=x.device))
    return torch.cat((codes, scale), dim=-1)


def _dequantize_rows(rows: Tensor, dim: int) -> Tensor:
    codes, scale = rows.split((dim // 2, dim // GROUP), dim=-1)
    return times_scales(decode_e2m1(codes), scale.contiguous())


# -------------------------------------------------------------------------------------------------------- checks


def check_float(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS or x.dim() == 0 or not x.is_contiguous():
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; it must be a contiguous float32, bfloat16 or float16")
    if x.shape[-1] % GROUP:
        raise ValueError(f"{name} has a last dimension of {x.shape[-1]}; NVFP4 has groups of {GROUP}")


def check_scalar(name: str, value: Tensor) -> None:
    if value.shape != () or value.dtype != torch.float32:
        raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}; it must be float32 ()")


def _check_quantize(x: Tensor, global_scale: Tensor) -> None:
    check_float("x", x)
    check_scalar("global_scale", global_scale)


def _check_rows(rows: Tensor, dim: int) -> None:
    if dim % GROUP or rows.dtype != torch.uint8 or rows.dim() == 0 or rows.shape[-1] != dim // 2 + dim // GROUP:
        raise ValueError(
            f"rows is {rows.dtype} {tuple(rows.shape)}; rows of {dim} values are uint8 [..., {dim // 2 + dim // GROUP}]"
        )


# --------------------------------------------------------------------------------------------------------- cases


def _rows_case(shape: tuple[int, ...]) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        return (torch.randn(*shape, generator=g).to(device, dtype),)

    return Case(name="x".join(map(str, shape)), make=make)


def _coded_rows_case(shape: tuple[int, ...]) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        return _quantize_rows(torch.randn(*shape, generator=g)).to(device), shape[-1]

    return Case(name="x".join(map(str, shape)), make=make)


def _quantize_case(shape: tuple[int, ...]) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(*shape, generator=g).to(device, dtype)
        return x, global_scale_of(x)

    return Case(name="x".join(map(str, shape)), make=make)


# ----------------------------------------------------------------------------------------------------------- ops

_EXACT = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}

nvfp4_quantize = register(
    Op(
        name="nvfp4_quantize",
        schema="(Tensor x, Tensor global_scale) -> (Tensor, Tensor)",
        reference=quantize,
        fake=lambda x, global_scale: (
            x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8),
            x.new_empty((*x.shape[:-1], x.shape[-1] // GROUP), dtype=torch.uint8),
        ),
        check=_check_quantize,
        cases=(_quantize_case((3, 64)), _quantize_case((2, 5, 128)), _quantize_case((1, 16))),
        tolerance=_EXACT,
        bytes_moved=lambda x, global_scale: nbytes(x) + x.numel() * 9 // 16,
        flops=lambda x, global_scale: 2 * x.numel(),
    )
)
"""`nvfp4_quantize(x [..., k], global_scale []) -> codes uint8 [..., k/2], scale uint8 [..., k/16]`, to nearest."""

nvfp4_quantize_cache_rows = register(
    Op(
        name="nvfp4_quantize_cache_rows",
        schema="(Tensor x) -> Tensor",
        reference=_quantize_rows,
        fake=lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] * 9 // 16), dtype=torch.uint8),
        check=lambda x: check_float("x", x),
        cases=(_rows_case((3, 128)), _rows_case((2, 3, 16))),
        tolerance=_EXACT,
        bytes_moved=lambda x: nbytes(x) + x.numel() * 9 // 16,
        flops=lambda x: 2 * x.numel(),
    )
)
"""`nvfp4_quantize_cache_rows(x [..., d]) -> uint8 [..., d/2 + d/16]`: codes, then E4M3 scales; no global scale."""

nvfp4_dequantize_cache_rows = register(
    Op(
        name="nvfp4_dequantize_cache_rows",
        schema="(Tensor rows, int dim) -> Tensor",
        reference=_dequantize_rows,
        fake=lambda rows, dim: rows.new_empty((*rows.shape[:-1], dim), dtype=torch.float32),
        check=_check_rows,
        cases=(_coded_rows_case((3, 128)), _coded_rows_case((2, 3, 16))),
        tolerance=_EXACT,
        bytes_moved=lambda rows, dim: nbytes(rows) + rows.numel() // rows.shape[-1] * dim * 4,
        flops=lambda rows, dim: rows.numel(),
    )
)
"""`nvfp4_dequantize_cache_rows(rows uint8 [..., d/2 + d/16], d) -> float32 [..., d]`. Not for weights."""
