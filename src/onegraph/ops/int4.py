"""INT4 weights: codes to floats, and the linear on them. The format is told in `formats/int4.py`."""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.int4 import COLUMNS
from onegraph.formats.weight import WeightFormat
from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.weight import Given, WeightOps


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The weight float32 [..., n, k] in the order of its groups: differences are exact, products rounded once."""
    q = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float().unflatten(-1, (scale.shape[-1], -1))
    return ((q - zero.float().unsqueeze(-1)) * scale.float().unsqueeze(-1)).flatten(-2)


def _dequantize(codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None) -> Tensor:
    weight = dequantize(codes, scale, zero)
    return weight if order is None else torch.empty_like(weight).index_copy_(-1, order.long(), weight)


def in_order(x: Tensor, order: Tensor | None) -> Tensor:
    """x [..., k] as the columns of a weight with act-order stand."""
    return x if order is None else x.index_select(-1, order)


def _linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None, bias: Tensor | None, float32: bool
) -> Tensor:
    y = in_order(x, order).float() @ dequantize(codes, scale, zero).T
    y = y if bias is None else y + bias.float()
    return y if float32 else y.to(x.dtype)


def linear_on_gpu(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None, bias: Tensor | None, float32: bool
) -> Tensor:
    from onegraph.ops.cuda import int4

    if not int4.takes(x, scale):
        return _linear(x, codes, scale, zero, order, bias, float32)
    return int4.linear(x, codes, scale, zero, order, bias, float32)


def _check_weight(codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None) -> None:
    if codes.dtype != torch.uint8 or codes.dim() < 2 or not codes.is_contiguous():
        raise ValueError(f"codes is {codes.dtype} {tuple(codes.shape)}; it must be contiguous uint8 [..., n, k/2]")
    k, groups = codes.shape[-1] * 2, scale.shape[-1] if scale.dim() else 0
    if scale.dtype not in FLOATS or scale.shape[:-1] != codes.shape[:-1] or not groups or k % groups:
        raise ValueError(
            f"scale is {scale.dtype} {tuple(scale.shape)}; codes {tuple(codes.shape)} ask for a float "
            f"{(*codes.shape[:-1], 'k/g')} with k = {k}"
        )
    if groups > 1 and k // groups % COLUMNS:
        raise ValueError(f"scale has {groups} groups of {k // groups} columns; a group is a multiple of {COLUMNS}")
    if zero.dtype != torch.uint8 or zero.shape != scale.shape:
        raise ValueError(f"zero is {zero.dtype} {tuple(zero.shape)}; scale asks for uint8 {tuple(scale.shape)}")
    if order is not None and (order.dtype != torch.int32 or tuple(order.shape) != (k,)):
        raise ValueError(f"order is {order.dtype} {tuple(order.shape)}; codes ask for int32 ({k},)")
    for name, tensor in (("scale", scale), ("zero", zero), ("order", order)):
        if tensor is not None and tensor.device != codes.device:
            raise ValueError(f"{name} is on {tensor.device} and codes on {codes.device}; move them to one device")
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def _check_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None, bias: Tensor | None, float32: bool
) -> None:
    _check_weight(codes, scale, zero, order)
    if codes.dim() != 2:
        raise ValueError(f"codes is {tuple(codes.shape)}; a linear has uint8 [n, k/2]")
    n, k = codes.shape[0], codes.shape[1] * 2
    if x.dtype not in FLOATS or x.dim() == 0 or x.shape[-1] != k or not x.is_contiguous():
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; codes {tuple(codes.shape)} ask for a contiguous float32, bfloat16 or "
            f"float16 with a last dimension of {k}"
        )
    if bias is not None and (bias.dtype not in FLOATS or tuple(bias.shape) != (n,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; it must be a contiguous float ({n},)")
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.device != codes.device:
            raise ValueError(f"{name} is on {tensor.device} and codes on {codes.device}; move them to one device")


def random_weight(
    n: int, k: int, columns: int, device: torch.device | str, g: torch.Generator, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scale and zero of a random weight with groups of `columns`."""
    codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    scale = (0.5 + torch.rand(n, k // columns, generator=g)) * (k**-0.5 / 6.5)
    zero = torch.randint(0, 16, (n, k // columns), generator=g, dtype=torch.uint8)
    return codes.to(device), scale.to(device, dtype), zero.to(device)


def random_order(k: int, device: torch.device | str, g: torch.Generator) -> Tensor:
    """An order of k inputs."""
    return torch.randperm(k, generator=g).int().to(device)


def _weight_case(n: int, k: int, columns: int, order: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        return *random_weight(n, k, columns, device, g), random_order(k, device, g) if order else None

    return Case(name=f"{n}x{k}/{columns}{'+order' if order else ''}", make=make)


def _linear_case(
    batch: tuple[int, ...],
    n: int,
    k: int,
    columns: int,
    *,
    order: bool = False,
    bias: bool = False,
    float32: bool = False,
    bf16: bool = False,
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(*batch, k, generator=g).to(device, dtype)
        weight = random_weight(n, k, columns, device, g, torch.bfloat16 if bf16 else torch.float16)
        b = torch.randn(n, generator=g).to(device, dtype) if bias else None
        return x, *weight, random_order(k, device, g) if order else None, b, float32

    told = {"order": order, "bias": bias, "float32": float32, "bf16 scales": bf16}
    size = "x".join(map(str, batch))
    return Case(name=f"{size}x{k}->{n}/{columns}{''.join(f'+{key}' for key, on in told.items() if on)}", make=make)


int4_dequantize = register(
    Op(
        name="int4_dequantize",
        schema="(Tensor codes, Tensor scale, Tensor zero, Tensor? order) -> Tensor",
        reference=_dequantize,
        fake=lambda codes, *rest: codes.new_empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=torch.float32),
        check=_check_weight,
        cases=(_weight_case(64, 96, 32), _weight_case(1, 64, 64), _weight_case(24, 256, 128, order=True)),
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
        bytes_moved=lambda codes, *rest: nbytes(codes, *rest) + 8 * codes.numel(),
        flops=lambda codes, *rest: 4 * codes.numel(),
    )
)
"""codes uint8 [..., n, k/2], scale [..., n, k/g], zero uint8 [..., n, k/g], order int32 [k] or None -> the weight
float32 [..., n, k], its columns where x has them: (code - zero) * scale, rounded once."""

int4_linear = register(
    Op(
        name="int4_linear",
        schema="(Tensor x, Tensor codes, Tensor scale, Tensor zero, Tensor? order, Tensor? bias, bool float32) "
        "-> Tensor",
        reference=_linear,
        kernel="onegraph.ops.int4:linear_on_gpu",
        fake=lambda x, codes, scale, zero, order, bias, float32: x.new_empty(
            (*x.shape[:-1], codes.shape[0]), dtype=torch.float32 if float32 else x.dtype
        ),
        check=_check_linear,
        cases=(
            _linear_case((1,), 576, 512, 128),
            _linear_case((1,), 1000, 4096, 128, bias=True, order=True),
            _linear_case((1,), 256, 1024, 64, float32=True, bf16=True),
            _linear_case((1,), 40, 768, 32),
            _linear_case((1,), 264, 2048, 2048, bias=True),
            _linear_case((3,), 208, 1280, 128, order=True),
            _linear_case((4,), 64, 11008, 128, bf16=True),
            _linear_case((1,), 48, 96, 32, order=True),
            _linear_case((2, 3), 48, 320, 64, bias=True),
            _linear_case((17,), 100, 512, 32, bias=True, order=True, float32=True),
            _linear_case((64,), 128, 256, 256),
            _linear_case((0,), 128, 128, 128),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda x, codes, scale, zero, order, bias, float32: (
            nbytes(x, codes, scale, zero, order, bias)
            + (4 if float32 else x.element_size()) * x.shape[:-1].numel() * codes.shape[0]
        ),
        flops=lambda x, codes, *rest: 4 * x.shape[:-1].numel() * codes.numel(),
    )
)
"""x [..., k] -> [..., n] in x's dtype, or in float32: y = W x + b with W as `int4_dequantize` gives it."""


def _run(
    format: WeightFormat, x: Tensor, weight: Given, bias: Tensor | None, add: None, eps: None, silu: bool, float32: bool
) -> Tensor:
    return int4_linear(x, weight["codes"], weight["scale"], weight["zero"], weight.get("order"), bias, float32)


def _reads(format: Any, n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    from onegraph.ops.cuda import int4

    return int4.reads(n, k, format.columns, dtype, device)


WEIGHT = WeightOps(
    linear=_run,
    decode=lambda format, weight: int4_dequantize(
        weight["codes"], weight["scale"], weight["zero"], weight.get("order")
    ),
    reads=_reads,
)
