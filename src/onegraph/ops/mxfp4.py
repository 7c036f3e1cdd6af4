"""MXFP4 weights: codes to floats; linear, grouped linear and routed experts on them, weights only.

The format is told in `formats/mxfp4.py`. On Hopper few tokens run straight from the codes, by the kernels that NVFP4
has (`ops/cuda/nvfp4.py`). In bfloat16 every weight is exact; in float16 those are that float16 holds.
"""

import math
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.mxfp4 import GROUP, ONE
from onegraph.formats.nvfp4 import E2M1_RMS
from onegraph.formats.weight import WeightFormat
from onegraph.ops.activation import SwiGLU, check_gate, swiglu
from onegraph.ops.checks import FLOATS, check_tensors
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


def _grouped_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return torch.einsum("...gk,gnk->...gn", x.float(), _dequantize(codes, scale)).to(x.dtype).contiguous()


def _experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    limit: float,
    alpha: float,
    shift: float,
) -> Tensor:
    chosen, (tokens, top_k) = experts.flatten(), experts.shape

    def product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.einsum("pnk,pk->pn", _dequantize(*(t.index_select(0, chosen) for t in (codes, scale))), x)
        return y if bias is None else y + bias.index_select(0, chosen)

    hidden = product(x.float().repeat_interleave(top_k, 0), gate_up, gate_up_scale, gate_up_bias)
    hidden = swiglu.reference(hidden, limit, alpha, shift).to(x.dtype).float()  # between the two launches
    out = product(hidden, down, down_scale, down_bias).unflatten(0, (tokens, top_k))
    return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------- on a GPU


def linear_on_gpu(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, float32: bool) -> Tensor:
    from onegraph.ops.cuda import nvfp4

    if not nvfp4.takes(x):
        return _linear(x, codes, scale, bias, float32)
    return nvfp4.linear(x, codes, scale, None, bias, float32)


def grouped_linear_on_gpu(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    from onegraph.ops.cuda import nvfp4

    return nvfp4.grouped_linear(x, codes, scale, None) if nvfp4.takes(x) else _grouped_linear(x, codes, scale)


def experts_on_gpu(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    *gate: float,
) -> Tensor:
    from onegraph.ops.cuda import nvfp4

    if not nvfp4.takes_experts(x, down.shape[2] * 2, experts.shape[1]):
        both = (gate_up, gate_up_scale, gate_up_bias), (down, down_scale, down_bias)
        return _experts(x, experts, weights, *both[0], *both[1], *gate)
    layers = gate_up, gate_up_scale, None, down, down_scale, None
    return nvfp4.experts(x, experts, weights, *layers, *gate, biases=(gate_up_bias, down_bias))


# ------------------------------------------------------------------------------------------------------------- checks


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


def _check_grouped(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    _check_weight(codes, scale)
    if codes.dim() != 3:
        raise ValueError(f"codes is {tuple(codes.shape)}; a grouped linear has uint8 [G, n, k/2]")
    wanted = (codes.shape[0], codes.shape[2] * 2)
    if x.dtype not in FLOATS or tuple(x.shape[-2:]) != wanted or x.device != codes.device:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} on {x.device}; codes {tuple(codes.shape)} ask for a float32, bfloat16 or "
            f"float16 [..., {wanted[0]}, {wanted[1]}] on {codes.device}"
        )


def _check_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    limit: float,
    alpha: float,
    shift: float,
) -> None:
    op = "mxfp4_experts"
    _check_weight(gate_up, gate_up_scale)
    _check_weight(down, down_scale)
    if gate_up.dim() != 3 or gate_up.shape[1] % (2 * GROUP) or x.dtype not in FLOATS or x.dim() != 2:
        raise ValueError(
            f"{op}: x is {x.dtype} {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}; they must be [T, D] of a float "
            "dtype and [E, 2F, D/2], F % 32 == 0"
        )
    (count, dim), (many, width) = x.shape, gate_up.shape[:2]
    check_tensors(
        op, x.device, x=(x, x.dtype, (count, gate_up.shape[2] * 2)), gate_up=(gate_up, torch.uint8, (-1, -1, -1)),
        down=(down, torch.uint8, (many, dim, width // 4)), experts=(experts, torch.int32, (count, -1)),
        weights=(weights, torch.float32, tuple(experts.shape)),
        gate_up_bias=(gate_up_bias, torch.float32, (many, width)), down_bias=(down_bias, torch.float32, (many, dim)),
    )  # fmt: skip
    check_gate(op, limit, alpha, shift)


# -------------------------------------------------------------------------------------------------------------- cases


def random_weight(shape: tuple[int, ...], device: torch.device | str, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """codes and scale of a random weight [..., n, k], of outputs about as large as inputs."""
    *rows, k = shape
    codes = torch.randint(0, 256, (*rows, k // 2), generator=g, dtype=torch.uint8)
    about = ONE - round(math.log2(E2M1_RMS * k**0.5))
    scale = torch.randint(about - 2, about + 2, (*rows, k // GROUP), generator=g, dtype=torch.uint8)
    return codes.to(device), scale.to(device)


def _weight_case(n: int, k: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        return random_weight((n, k), device, generator)

    return Case(name=f"{n}x{k}", make=make)


def _linear_case(tokens: int, n: int, k: int, bias: bool = False, float32: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, k, generator=generator).to(device, dtype)
        b = torch.randn(n, generator=generator).to(device, dtype) if bias else None
        return x, *random_weight((n, k), device, generator), b, float32

    return Case(name=f"{tokens}x{k}->{n}{'+bias' if bias else ''}{'+float32' if float32 else ''}", make=make)


def _grouped_case(tokens: int, groups: int, n: int, k: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, groups, k, generator=generator).to(device, dtype)
        return x, *random_weight((groups, n, k), device, generator)

    return Case(name=f"{tokens}x{groups}x{k}->{n}", make=make)


def _experts_case(
    tokens: int, top_k: int, experts: int, dim: int, wide: int, gate: tuple[float, ...], *, biases: bool
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, dim, generator=g).to(device, dtype)
        chosen = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].int().contiguous().to(device)
        gains = torch.rand(tokens, top_k, generator=g).to(device)
        layers: list[Tensor | None] = []
        for n, k in ((2 * wide, dim), (dim, wide)):
            weight = random_weight((experts, n, k), device, g)
            layers += [*weight, torch.randn(experts, n, generator=g).to(device) if biases else None]
        return x, chosen, gains, *layers, *gate

    name = f"{tokens} tokens, {top_k} of {experts}, {dim}x{wide}" + (" with biases" if biases else "")
    return Case(name=name, make=make)


V4, GPT_OSS = (10.0, 1.0, 0.0), (7.0, 1.702, 1.0)


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
        kernel="onegraph.ops.mxfp4:linear_on_gpu",
        check=_check_linear,
        cases=(
            _linear_case(1, 64, 96),
            _linear_case(5, 48, 64, bias=True),
            _linear_case(2, 32, 32, float32=True),
            _linear_case(1, 1000, 2880, bias=True),
            _linear_case(1, 640, 1024, float32=True),
            _linear_case(4, 128, 4096),
            _linear_case(17, 101, 512, bias=True),
            _linear_case(24, 96, 2880, float32=True),
            _linear_case(40, 64, 256),
            _linear_case(64, 101, 320, bias=True, float32=True),
            _linear_case(0, 32, 64),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda x, codes, scale, bias, float32: (
            nbytes(x, codes, scale, bias) + (4 if float32 else x.element_size()) * x.shape[:-1].numel() * codes.shape[0]
        ),
        flops=lambda x, codes, *rest: 4 * x.shape[:-1].numel() * codes.numel(),
    )
)
"""x [..., k] -> [..., n] in x's dtype, or in float32: y = W x + b with W in MXFP4."""

mxfp4_grouped_linear = register(
    Op(
        name="mxfp4_grouped_linear",
        schema="(Tensor x, Tensor codes, Tensor scale) -> Tensor",
        reference=_grouped_linear,
        fake=lambda x, codes, scale: x.new_empty((*x.shape[:-1], codes.shape[1])),
        kernel="onegraph.ops.mxfp4:grouped_linear_on_gpu",
        check=_check_grouped,
        cases=(_grouped_case(1, 4, 64, 256), _grouped_case(3, 2, 128, 512), _grouped_case(10, 8, 32, 64)),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda x, codes, scale: (
            nbytes(x, codes, scale) + x.shape[:-1].numel() * codes.shape[1] * x.element_size()
        ),
        flops=lambda x, codes, scale: 2 * x.numel() * codes.shape[1],
    )
)
"""x [..., G, k], codes [G, n, k/2], scale [G, n, k/32] -> [..., G, n]: group g of x times group g's weight."""

mxfp4_experts = register(
    Op(
        name="mxfp4_experts",
        schema="(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor? gate_up_bias, "
        "Tensor down, Tensor down_scale, Tensor? down_bias, float limit, float alpha, float shift) -> Tensor",
        reference=_experts,
        fake=lambda x, *rest: torch.empty_like(x),
        kernel="onegraph.ops.mxfp4:experts_on_gpu",
        check=_check_experts,
        cases=(
            _experts_case(1, 6, 16, 256, 128, V4, biases=False),
            _experts_case(1, 4, 8, 320, 192, GPT_OSS, biases=True),
            _experts_case(1, 7, 16, 1024, 512, V4, biases=False),
            _experts_case(3, 2, 4, 128, 64, GPT_OSS, biases=True),
            _experts_case(13, 2, 3, 320, 192, GPT_OSS, biases=True),
            _experts_case(16, 6, 24, 256, 64, V4, biases=False),
            _experts_case(2, 2, 4, 96, 32, GPT_OSS, biases=True),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
        bytes_moved=lambda x, experts, weights, *layers: (
            2 * nbytes(x) + min(experts.numel(), layers[0].shape[0]) * (nbytes(*layers[:6]) // layers[0].shape[0])
        ),
        flops=lambda x, experts, weights, gate_up, *rest: 3 * experts.numel() * x.shape[1] * gate_up.shape[1],
    )
)
"""x [T, D], experts int32 [T, K], weights float32 [T, K], gate_up [E, 2F, D/2], its scale, its bias float32 [E, 2F] or
None, down [E, D, F/2], its scale, its bias [E, D] or None -> [T, D]: sum over k of weights * (down(swiglu(..)) + bias),
limit, alpha and shift as `SwiGLU` has them. Which experts run is read on the device. F % 32 == 0."""


def _run(
    format: WeightFormat, x: Tensor, weight: Given, bias: Tensor | None, add: None, eps: None, silu: bool, float32: bool
) -> Tensor:
    return mxfp4_linear(x, weight["codes"], weight["scale"], bias, float32)


def _run_experts(
    format: WeightFormat,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Given,
    down: Given,
    gate: SwiGLU,
    biases: tuple[Tensor, Tensor] | None,
) -> Tensor:
    first, second = biases or (None, None)
    inner, outer = (gate_up["codes"], gate_up["scale"], first), (down["codes"], down["scale"], second)
    return mxfp4_experts(x, experts, weights, *inner, *outer, *gate.numbers)


def _reads(format: Any, n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    from onegraph.ops.cuda import nvfp4

    return nvfp4.reads(n, k, dtype, device, scaled=False)


WEIGHT = WeightOps(
    linear=_run,
    decode=lambda format, weight: mxfp4_dequantize(weight["codes"], weight["scale"]),
    grouped=lambda format, x, weight: mxfp4_grouped_linear(x, weight["codes"], weight["scale"]),
    experts=_run_experts,
    reads=_reads,
)
