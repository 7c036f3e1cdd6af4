"""NVFP4: floats to codes and back, and linears on the codes. The format is told in `formats/nvfp4.py`.

Weights only (W4A16) is what runs on GPUs without FP4 tensor cores; `nvfp4_linear_w4a4` says what a GPU that has them
computes, exactly. Every `global_scale` of a weight here is float32 [n], one for each row: layers that are fused keep
their own. Scales of groups are the bits of E4M3 numbers as uint8, which every part of torch can copy and compare.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.nvfp4 import E2M1_MAX, E4M3, E4M3_MAX, FLOATS, GROUP
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


def _quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    grouped = x.float().unflatten(-1, (-1, GROUP))
    scale = grouped.abs().amax(-1) / E2M1_MAX / global_scale
    scale = scale.clamp(max=E4M3_MAX).to(E4M3)
    unit = (scale.float() * global_scale).clamp(min=SMALLEST).unsqueeze(-1)
    return encode_e2m1((grouped / unit).flatten(-2)), scale.view(torch.uint8)


def activation_scale(x: Tensor) -> Tensor:
    """The global scale of activations, float32 [], from their largest magnitude; stays on the device."""
    return (x.abs().amax().float() / (E2M1_MAX * E4M3_MAX)).clamp(min=SMALLEST)


def _times_scales(values: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., k] times the E4M3 numbers of scale uint8 [..., k/16], exact: six bits of mantissa."""
    return (values.unflatten(-1, (-1, GROUP)) * scale.view(E4M3).float().unsqueeze(-1)).flatten(-2)


def _dequantize_weight(codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return _times_scales(decode_e2m1(codes), scale) * global_scale.unsqueeze(-1)


def _quantize_rows(x: Tensor) -> Tensor:
    codes, scale = _quantize(x, torch.ones((), device=x.device))
    return torch.cat((codes, scale), dim=-1)


def _dequantize_rows(rows: Tensor, dim: int) -> Tensor:
    codes, scale = rows.split((dim // 2, dim // GROUP), dim=-1)
    return _times_scales(decode_e2m1(codes), scale.contiguous())


# ------------------------------------------------------------------------------------------------------- linears


def _linear(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    y = x.float() @ _dequantize_weight(codes, scale, global_scale).T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _grouped_linear(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    weight = _dequantize_weight(codes, scale, global_scale)  # [G, n, k]
    return torch.einsum("...gk,gnk->...gn", x.float(), weight).to(x.dtype).contiguous()


def _linear_w4a4(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor, input_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Both sides' values times their block scales are exact in float32, their sums in float64: what is rounded is the
    result alone. A tensor core adds the same products in float32, in an order of its own."""
    input_scale = activation_scale(x) if input_scale is None else input_scale
    a_codes, a_scale = _quantize(x, input_scale)
    a = _times_scales(decode_e2m1(a_codes), a_scale).double()
    b = _times_scales(decode_e2m1(codes), scale).double()
    y = (a @ b.T).float() * (input_scale * global_scale)
    return (y if bias is None else y + bias.float()).to(x.dtype)


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
) -> Tensor:
    chosen, (tokens, top_k) = experts.flatten(), experts.shape
    in_weight = _dequantize_weight(*(t.index_select(0, chosen) for t in (gate_up, gate_up_scale, gate_up_global)))
    gate, up = torch.einsum("pfd,pd->pf", in_weight, x.float().repeat_interleave(top_k, 0)).chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    hidden = hidden.to(x.dtype).float()  # between the two launches
    out_weight = _dequantize_weight(*(t.index_select(0, chosen) for t in (down, down_scale, down_global)))
    out = torch.einsum("pdf,pf->pd", out_weight, hidden).unflatten(0, (tokens, top_k))
    return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)


# -------------------------------------------------------------------------------------------------------- checks


def _check_float(name: str, x: Tensor, k: int | None) -> None:
    if x.dtype not in FLOATS or x.dim() == 0 or not x.is_contiguous():
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; it must be a contiguous float32, bfloat16 or float16")
    if k is not None and x.shape[-1] != k:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; codes ask for a last dimension of {k}")
    if x.shape[-1] % GROUP:
        raise ValueError(f"{name} has a last dimension of {x.shape[-1]}; NVFP4 has groups of {GROUP}")


def _check_weight(
    codes: Tensor, scale: Tensor, global_scale: Tensor, dims: int | None = None, name: str = "codes"
) -> None:
    """Sizes of the scales against what a kernel reads: one of another width or layout is refused here."""
    if codes.dtype != torch.uint8 or codes.dim() < 2 or codes.dim() != (dims or codes.dim()) or codes.shape[-1] % 8:
        raise ValueError(
            f"{name} is {codes.dtype} {tuple(codes.shape)}; it must be uint8 [..., n, k/2], k % {GROUP} == 0"
        )
    for what, tensor, shape, dtype in (
        (f"the scale of {name}", scale, (*codes.shape[:-1], codes.shape[-1] * 2 // GROUP), torch.uint8),
        (f"the global scale of {name}", global_scale, codes.shape[:-1], torch.float32),
    ):
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(
                f"{what} is {tensor.dtype} {tuple(tensor.shape)}; {name} {tuple(codes.shape)} asks for {dtype} "
                f"{tuple(shape)}, rows as they are (not padded, not swizzled)"
            )
    for what, tensor in ((name, codes), (f"the scale of {name}", scale), (f"the global scale of {name}", global_scale)):
        if not tensor.is_contiguous() or tensor.device != codes.device:
            raise ValueError(
                f"{what} on {tensor.device} has strides {tensor.stride()}; contiguous on {codes.device} needed"
            )


def _check_scalar(name: str, value: Tensor) -> None:
    if value.shape != () or value.dtype != torch.float32:
        raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}; it must be float32 ()")


def _check_quantize(x: Tensor, global_scale: Tensor) -> None:
    _check_float("x", x, None)
    _check_scalar("global_scale", global_scale)


def _check_rows(rows: Tensor, dim: int) -> None:
    if dim % GROUP or rows.dtype != torch.uint8 or rows.dim() == 0 or rows.shape[-1] != dim // 2 + dim // GROUP:
        raise ValueError(
            f"rows is {rows.dtype} {tuple(rows.shape)}; rows of {dim} values are uint8 [..., {dim // 2 + dim // GROUP}]"
        )


def _check_linear(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> None:
    _check_weight(codes, scale, global_scale, 2)
    _check_float("x", x, codes.shape[1] * 2)
    if bias is not None and (bias.dtype not in FLOATS or bias.shape != codes.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; it must be a contiguous float ({codes.shape[0]},)")


def _check_grouped(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor) -> None:
    _check_weight(codes, scale, global_scale, 3)
    _check_float("x", x, codes.shape[2] * 2)
    if x.dim() < 2 or x.shape[-2] != codes.shape[0]:
        raise ValueError(f"x has shape {tuple(x.shape)}; codes {tuple(codes.shape)} ask for [..., {codes.shape[0]}, k]")


def _check_w4a4(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor, input_scale: Tensor | None, bias: Tensor | None
) -> None:
    _check_linear(x, codes, scale, global_scale, bias)
    if input_scale is not None:
        _check_scalar("input_scale", input_scale)


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
) -> None:
    _check_weight(gate_up, gate_up_scale, gate_up_global, 3, "gate_up")
    _check_weight(down, down_scale, down_global, 3, "down")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, D]")
    _check_float("x", x, gate_up.shape[2] * 2)
    wanted = (gate_up.shape[0], x.shape[1], gate_up.shape[1] // 4)
    if gate_up.shape[1] % 32 or tuple(down.shape) != wanted:
        raise ValueError(f"down is {tuple(down.shape)}; gate_up {tuple(gate_up.shape)} asks for {wanted}")
    if experts.dim() != 2 or experts.shape[0] != x.shape[0] or experts.dtype != torch.int32:
        raise ValueError(f"experts is {experts.dtype} {tuple(experts.shape)}; it must be int32 [{x.shape[0]}, K]")
    if weights.shape != experts.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"weights is {weights.dtype} {tuple(weights.shape)}; it must be float32 {tuple(experts.shape)}"
        )
    if not (experts.is_contiguous() and weights.is_contiguous()):
        raise ValueError("experts and weights must be contiguous: call .contiguous()")
    if not limit > 0:
        raise ValueError(f"limit is {limit}; it must be above 0")


# --------------------------------------------------------------------------------------------------------- cases


def random_weight(shape: tuple[int, ...], device: torch.device | str, g: torch.Generator) -> tuple[Tensor, ...]:
    """Random codes, scales and global scales of weights [..., n, k] near 1/sqrt(k)."""
    *rows, k = shape
    codes = torch.randint(0, 256, (*rows, k // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(40, 127, (*rows, k // GROUP), generator=g, dtype=torch.uint8)
    # E2M1 codes have rms 2.9, these scales some 130
    global_scale = (0.5 + torch.rand(*rows, generator=g)) * k**-0.5 / 380
    return codes.to(device), scale.to(device), global_scale.to(device)


def _linear_case(batch: tuple[int, ...], n: int, k: int, bias: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(*batch, k, generator=g).to(device, dtype)
        b = torch.randn(n, generator=g).to(device, dtype) if bias else None
        return x, *random_weight((n, k), device, g), b

    return Case(name=f"{'x'.join(map(str, batch))}x{k}->{n}{'+bias' if bias else ''}", make=make)


def _w4a4_case(batch: int, n: int, k: int, frozen: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(batch, k, generator=g).to(device, dtype)
        return x, *random_weight((n, k), device, g), torch.tensor(0.002, device=device) if frozen else None, None

    return Case(name=f"{batch}x{k}->{n}{' frozen' if frozen else ''}", make=make)


def _grouped_case(batch: tuple[int, ...], groups: int, n: int, k: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(*batch, groups, k, generator=g).to(device, dtype)
        return x, *random_weight((groups, n, k), device, g)

    return Case(name=f"{'x'.join(map(str, batch))}x{groups}x{k}->{n}", make=make)


def _experts_case(tokens: int, top_k: int, experts: int, dim: int, wide: int, limit: float = 10.0) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = (3 * torch.randn(tokens, dim, generator=g)).to(device, dtype)
        chosen = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].int().contiguous().to(device)
        gains = torch.rand(tokens, top_k, generator=g).to(device)
        gate_up, down = (
            random_weight((experts, 2 * wide, dim), device, g),
            random_weight((experts, dim, wide), device, g),
        )
        return x, chosen, gains, *gate_up, *down, limit

    return Case(name=f"{tokens} tokens, {top_k} of {experts}, {dim}x{wide}", make=make)


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
        return x, activation_scale(x)

    return Case(name="x".join(map(str, shape)), make=make)


def _weight_case(shape: tuple[int, ...]) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        return random_weight(shape, device, g)

    return Case(name="x".join(map(str, shape)), make=make)


# ----------------------------------------------------------------------------------------------------------- ops

_EXACT = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}

nvfp4_quantize = register(
    Op(
        name="nvfp4_quantize",
        schema="(Tensor x, Tensor global_scale) -> (Tensor, Tensor)",
        reference=_quantize,
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

nvfp4_dequantize_weight = register(
    Op(
        name="nvfp4_dequantize_weight",
        schema="(Tensor codes, Tensor scale, Tensor global_scale) -> Tensor",
        reference=_dequantize_weight,
        fake=lambda codes, scale, global_scale: global_scale.new_empty((*codes.shape[:-1], codes.shape[-1] * 2)),
        check=_check_weight,
        cases=(_weight_case((48, 64)), _weight_case((3, 16, 32))),
        tolerance=_EXACT,
        bytes_moved=lambda codes, scale, global_scale: nbytes(codes, scale, global_scale) + codes.numel() * 8,
        flops=lambda codes, scale, global_scale: codes.numel() * 4,
    )
)
"""`nvfp4_dequantize_weight(codes [..., n, k/2], scale, global_scale [..., n]) -> float32 [..., n, k]`. Not for cache
rows, which have no global scale: `nvfp4_dequantize_cache_rows`."""

nvfp4_quantize_cache_rows = register(
    Op(
        name="nvfp4_quantize_cache_rows",
        schema="(Tensor x) -> Tensor",
        reference=_quantize_rows,
        fake=lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] * 9 // 16), dtype=torch.uint8),
        check=lambda x: _check_float("x", x, None),
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

nvfp4_linear = register(
    Op(
        name="nvfp4_linear",
        schema="(Tensor x, Tensor codes, Tensor scale, Tensor global_scale, Tensor? bias) -> Tensor",
        reference=_linear,
        fake=lambda x, codes, *rest: x.new_empty((*x.shape[:-1], codes.shape[0])),
        check=_check_linear,
        cases=(
            _linear_case((1,), 576, 576),
            _linear_case((1,), 4096, 256),
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
        "Tensor gate_up_global, Tensor down, Tensor down_scale, Tensor down_global, float limit) -> Tensor",
        reference=_experts,
        fake=lambda x, *rest: torch.empty_like(x),
        check=_check_experts,
        cases=(
            _experts_case(1, 6, 16, 256, 128),
            _experts_case(3, 2, 4, 128, 64, limit=1.0),
            _experts_case(16, 6, 24, 256, 64),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
        bytes_moved=lambda x, experts, weights, *layers: (
            2 * nbytes(x) + min(experts.numel(), layers[0].shape[0]) * (nbytes(*layers[:6]) // layers[0].shape[0])
        ),
        flops=lambda x, experts, weights, gate_up, *rest: 3 * experts.numel() * x.shape[1] * gate_up.shape[1],
    )
)
"""`nvfp4_experts(x [T, D], experts int32 [T, K], weights float32 [T, K], gate_up [E, 2F, D/2], its scale and global
scale [E, 2F], down [E, D, F/2], its scales, limit) -> [T, D]`: sum over k of weights * down(silu(min(gate, limit)) *
clamp(up, -limit, limit)). Which experts run is read on the device. Gate rows come first, then up rows; F % 16 == 0."""

nvfp4_linear_w4a4 = register(
    Op(
        name="nvfp4_linear_w4a4",
        schema="(Tensor x, Tensor codes, Tensor scale, Tensor global_scale, Tensor? input_scale, Tensor? bias) "
        "-> Tensor",
        reference=_linear_w4a4,
        fake=lambda x, codes, *rest: x.new_empty((*x.shape[:-1], codes.shape[0])),
        check=_check_w4a4,
        cases=(_w4a4_case(3, 48, 64, False), _w4a4_case(5, 64, 256, True)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda x, codes, scale, global_scale, input_scale, bias: (
            nbytes(x, codes, scale, global_scale, bias) + x.numel() // x.shape[-1] * codes.shape[0] * x.element_size()
        ),
        flops=lambda x, codes, *rest: 2 * x.numel() * codes.shape[0],
    )
)
"""`nvfp4_linear_w4a4(x, codes, scale, global_scale [n], input_scale, bias)`: activations in NVFP4 too, their global
scale `input_scale` [] frozen, or None: from x, on the device, each call."""
