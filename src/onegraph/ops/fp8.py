"""FP8 weights: codes to floats, and linears on them: one, one for each group, routed experts.

The format is told in `formats/fp8.py`: codes uint8 [..., n, k], the bits of E4M3; scale float32
[..., ceil(n/rows), ceil(k/columns)], or where `columns` is 0 [..., n], one a row.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.fp8 import E4M3_RMS, NAN, FP8Format
from onegraph.formats.nvfp4 import E4M3
from onegraph.ops.activation import SwiGLU, check_gate, swiglu
from onegraph.ops.checks import FLOATS, check_routes
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.weight import Given, WeightOps

# --------------------------------------------------------------------------------------------------------- references


def _dequantize(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    n, k = codes.shape[-2:]
    if columns:
        scale = scale.unsqueeze(-1).expand(*scale.shape, columns).flatten(-2)[..., :k]
        scale = scale.unsqueeze(-2).expand(*scale.shape[:-1], rows, k).flatten(-3, -2)[..., :n, :]
    else:
        scale = scale.unsqueeze(-1)
    return codes.view(E4M3).float() * scale


def _linear(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, rows: int, columns: int, float32: bool
) -> Tensor:
    y = x.float() @ _dequantize(codes, scale, rows, columns).T
    y = y if bias is None else y + bias.float()
    return y if float32 else y.to(x.dtype)


def _grouped_linear(x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    weight = _dequantize(codes, scale, rows, columns)  # [G, n, k]
    return torch.einsum("...gk,gnk->...gn", x.float(), weight).to(x.dtype).contiguous()


def _experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    rows: int,
    columns: int,
    limit: float,
    alpha: float,
    shift: float,
) -> Tensor:
    wide = x.float()
    if experts.numel() <= gate_up.shape[0]:  # few tokens: the weights that they use
        (tokens, top_k), chosen = experts.shape, experts.flatten()
        first = _dequantize(gate_up.index_select(0, chosen), gate_up_scale.index_select(0, chosen), rows, columns)
        hidden = torch.einsum("pfd,pd->pf", first, wide.repeat_interleave(top_k, 0))
        hidden = swiglu.reference(hidden, limit, alpha, shift).to(x.dtype).float()  # as between two launches
        second = _dequantize(down.index_select(0, chosen), down_scale.index_select(0, chosen), rows, columns)
        out = torch.einsum("pdf,pf->pd", second, hidden).unflatten(0, (tokens, top_k))
        return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)
    total = torch.zeros_like(wide)
    for e in range(gate_up.shape[0]):  # many: every expert on all tokens, weighted by zero where not chosen
        gain = torch.where(experts == e, weights, 0.0).sum(1, keepdim=True)
        hidden = wide @ _dequantize(gate_up[e], gate_up_scale[e], rows, columns).T
        hidden = swiglu.reference(hidden, limit, alpha, shift).to(x.dtype).float()
        total += gain * (hidden @ _dequantize(down[e], down_scale[e], rows, columns).T)
    return total.to(x.dtype)


# ----------------------------------------------------------------------------------------------------------- on a GPU


def dequantize_on_gpu(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    from onegraph.ops.cuda import fp8

    y = fp8.dequantize(codes, scale, rows, columns, torch.float32) if fp8.takes_codes(codes) else None
    return _dequantize(codes, scale, rows, columns) if y is None else y


def linear_on_gpu(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, rows: int, columns: int, float32: bool
) -> Tensor:
    from onegraph.ops.cuda import fp8

    y = fp8.linear(x, codes, scale, bias, rows, columns, float32) if fp8.takes(x) else None
    return _linear(x, codes, scale, bias, rows, columns, float32) if y is None else y


def grouped_linear_on_gpu(x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    from onegraph.ops.cuda import fp8

    y = fp8.grouped_linear(x, codes, scale, rows, columns) if fp8.takes(x) else None
    return _grouped_linear(x, codes, scale, rows, columns) if y is None else y


def experts_on_gpu(x: Tensor, experts: Tensor, weights: Tensor, *layers: Any) -> Tensor:
    from onegraph.ops.cuda import fp8

    y = fp8.experts(x, experts, weights, *layers) if fp8.takes(x) else None
    return _experts(x, experts, weights, *layers) if y is None else y


# ------------------------------------------------------------------------------------------------------------- checks


def check_weight(
    codes: Tensor, scale: Tensor, rows: int, columns: int, dims: int | None = None, name: str = "codes"
) -> None:
    """Sizes of the scales against what a kernel reads: those of another block size are refused here."""
    if codes.dtype != torch.uint8 or codes.dim() < 2 or codes.dim() != (dims or codes.dim()):
        wanted = {2: "[n, k]", 3: "[count, n, k]"}.get(dims or 0, "[..., n, k]")
        raise ValueError(f"{name} is {codes.dtype} {tuple(codes.shape)}; it must be uint8 {wanted}")
    if rows < 1 or columns < 0 or (columns == 0 and rows != 1):
        raise ValueError(f"a block of {rows} x {columns} makes no sense; rows and columns are above 0, or 1 and 0")
    *lead, n, k = codes.shape
    shape = (*lead, -(-n // rows), -(-k // columns)) if columns else (*lead, n)
    if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        raise ValueError(
            f"the scale of {name} is {scale.dtype} {tuple(scale.shape)}; {name} {tuple(codes.shape)} in blocks of "
            f"{rows} x {columns or 'k'} asks for float32 {shape}"
        )
    for what, tensor in ((name, codes), (f"the scale of {name}", scale)):
        if not tensor.is_contiguous() or tensor.device != codes.device:
            raise ValueError(
                f"{what} on {tensor.device} has strides {tensor.stride()}; contiguous on {codes.device} needed"
            )


def _check_x(x: Tensor, codes: Tensor) -> None:
    k = codes.shape[-1]
    if x.dtype not in FLOATS or x.dim() == 0 or x.shape[-1] != k or not x.is_contiguous():
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; codes {tuple(codes.shape)} ask for a contiguous float32, bfloat16 or "
            f"float16 with a last dimension of {k}"
        )
    if x.device != codes.device:
        raise ValueError(f"x is on {x.device} and codes on {codes.device}; move them to one device")


def _check_linear(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, rows: int, columns: int, float32: bool
) -> None:
    check_weight(codes, scale, rows, columns, 2)
    _check_x(x, codes)
    if bias is not None and (bias.dtype not in FLOATS or bias.shape != codes.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; it must be a contiguous float ({codes.shape[0]},)")


def _check_grouped(x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int) -> None:
    check_weight(codes, scale, rows, columns, 3)
    _check_x(x, codes)
    if x.dim() < 2 or x.shape[-2] != codes.shape[0]:
        raise ValueError(f"x has shape {tuple(x.shape)}; codes {tuple(codes.shape)} ask for [..., {codes.shape[0]}, k]")


def _check_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    rows: int,
    columns: int,
    limit: float,
    alpha: float,
    shift: float,
) -> None:
    check_weight(gate_up, gate_up_scale, rows, columns, 3, "gate_up")
    check_weight(down, down_scale, rows, columns, 3, "down")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, D]")
    _check_x(x, gate_up)
    wanted = (gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2)
    if gate_up.shape[1] % 2 or tuple(down.shape) != wanted:
        raise ValueError(f"down is {tuple(down.shape)}; gate_up {tuple(gate_up.shape)} asks for {wanted}")
    check_routes(x, experts, weights)
    check_gate("fp8_experts", limit, alpha, shift)


# -------------------------------------------------------------------------------------------------------------- cases


def random_weight(
    shape: tuple[int, ...], rows: int, columns: int, device: torch.device | str, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random codes and scales of weights [..., n, k] near 1/sqrt(k), every number but NaN among the codes."""
    *lead, n, k = shape
    codes = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    codes = torch.where((codes & NAN) == NAN, codes & ~1, codes)
    grid = (*lead, -(-n // rows), -(-k // columns)) if columns else (*lead, n)
    scale = (0.5 + torch.rand(grid, generator=g)) * k**-0.5 / E4M3_RMS
    return codes.to(device), scale.to(device)


_BLOCKS = {"128": (128, 128), "32": (32, 32), "mx": (1, 32), "rows": (1, 0)}


def _weight_case(kind: str, *shape: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        return *random_weight(shape, *_BLOCKS[kind], device, g), *_BLOCKS[kind]

    return Case(name=f"{kind} {'x'.join(map(str, shape))}", make=make)


def _linear_case(kind: str, batch: tuple[int, ...], n: int, k: int, bias: bool = False, float32: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(*batch, k, generator=g).to(device, dtype)
        b = torch.randn(n, generator=g).to(device, dtype) if bias else None
        return x, *random_weight((n, k), *_BLOCKS[kind], device, g), b, *_BLOCKS[kind], float32

    more = f"{'+bias' if bias else ''}{'+float32' if float32 else ''}"
    return Case(name=f"{kind} {'x'.join(map(str, batch))}x{k}->{n}{more}", make=make)


def _grouped_case(kind: str, batch: tuple[int, ...], groups: int, n: int, k: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(*batch, groups, k, generator=g).to(device, dtype)
        return x, *random_weight((groups, n, k), *_BLOCKS[kind], device, g), *_BLOCKS[kind]

    return Case(name=f"{kind} {'x'.join(map(str, batch))}x{groups}x{k}->{n}", make=make)


def _experts_case(
    kind: str, tokens: int, top_k: int, experts: int, dim: int, wide: int,
    gate: tuple[float, float, float] = (float("inf"), 1.0, 0.0),
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = (3 * torch.randn(tokens, dim, generator=g)).to(device, dtype)
        chosen = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].int().contiguous().to(device)
        gains = torch.rand(tokens, top_k, generator=g).to(device)
        gate_up = random_weight((experts, 2 * wide, dim), *_BLOCKS[kind], device, g)
        down = random_weight((experts, dim, wide), *_BLOCKS[kind], device, g)
        return x, chosen, gains, *gate_up, *down, *_BLOCKS[kind], *gate

    return Case(name=f"{kind} {tokens} tokens, {top_k} of {experts}, {dim}x{wide}", make=make)


# ---------------------------------------------------------------------------------------------------------------- ops

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}

fp8_dequantize = register(
    Op(
        name="fp8_dequantize",
        schema="(Tensor codes, Tensor scale, int rows, int columns) -> Tensor",
        reference=_dequantize,
        fake=lambda codes, scale, rows, columns: codes.new_empty(codes.shape, dtype=torch.float32),
        kernel="onegraph.ops.fp8:dequantize_on_gpu",
        check=check_weight,
        cases=(
            _weight_case("128", 256, 384),
            _weight_case("128", 2, 200, 130),
            _weight_case("32", 40, 72),
            _weight_case("mx", 24, 96),
            _weight_case("rows", 17, 40),
        ),
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
        bytes_moved=lambda codes, scale, rows, columns: nbytes(codes, scale) + 4 * codes.numel(),
        flops=lambda codes, *rest: codes.numel(),
    )
)
"""codes uint8 [..., n, k], scale float32 (see above) -> float32 [..., n, k]: the product of the two as float32 rounds
it, so exact where a scale has 20 significant bits or fewer (E8M0, bfloat16, float16)."""

fp8_linear = register(
    Op(
        name="fp8_linear",
        schema="(Tensor x, Tensor codes, Tensor scale, Tensor? bias, int rows, int columns, bool float32) -> Tensor",
        reference=_linear,
        fake=lambda x, codes, scale, bias, rows, columns, float32: x.new_empty(
            (*x.shape[:-1], codes.shape[0]), dtype=torch.float32 if float32 else x.dtype
        ),
        kernel="onegraph.ops.fp8:linear_on_gpu",
        check=_check_linear,
        cases=(
            _linear_case("128", (1,), 256, 512),
            _linear_case("128", (5,), 200, 328, bias=True),
            _linear_case("32", (1,), 96, 160),
            _linear_case("mx", (2, 3), 64, 96, float32=True),
            _linear_case("rows", (1,), 576, 576),
            _linear_case("rows", (17,), 100, 72, bias=True),
            _linear_case("rows", (0,), 128, 128),
        ),
        tolerance=_TOLERANCE,
        bytes_moved=lambda x, codes, scale, bias, rows, columns, float32: (
            nbytes(x, codes, scale, bias) + (4 if float32 else x.element_size()) * x.shape[:-1].numel() * codes.shape[0]
        ),
        flops=lambda x, codes, *rest: 2 * x.numel() * codes.shape[0],
    )
)
"""`fp8_linear(x [..., k], codes [n, k], scale, bias [n], rows, columns, float32) -> [..., n]` in x's dtype, or with
`float32` in float32."""

fp8_grouped_linear = register(
    Op(
        name="fp8_grouped_linear",
        schema="(Tensor x, Tensor codes, Tensor scale, int rows, int columns) -> Tensor",
        reference=_grouped_linear,
        fake=lambda x, codes, *rest: x.new_empty((*x.shape[:-1], codes.shape[1])),
        kernel="onegraph.ops.fp8:grouped_linear_on_gpu",
        check=_check_grouped,
        cases=(
            _grouped_case("128", (1,), 4, 128, 256),
            _grouped_case("32", (3,), 2, 64, 96),
            _grouped_case("rows", (2, 5), 3, 32, 64),
        ),
        tolerance=_TOLERANCE,
        bytes_moved=lambda x, codes, scale, rows, columns: (
            nbytes(x, codes, scale) + x.numel() // x.shape[-1] * codes.shape[1] * x.element_size()
        ),
        flops=lambda x, codes, *rest: 2 * x.numel() * codes.shape[1],
    )
)
"""`fp8_grouped_linear(x [..., G, k], codes [G, n, k], scale, rows, columns) -> [..., G, n]`: group g of x times group
g's weight."""

fp8_experts = register(
    Op(
        name="fp8_experts",
        schema="(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
        "Tensor down_scale, int rows, int columns, float limit, float alpha, float shift) -> Tensor",
        reference=_experts,
        fake=lambda x, *rest: torch.empty_like(x),
        kernel="onegraph.ops.fp8:experts_on_gpu",
        check=_check_experts,
        cases=(
            _experts_case("128", 1, 6, 16, 256, 128),
            _experts_case("128", 5, 2, 4, 128, 256, (1.0, 1.702, 1.0)),
            _experts_case("32", 2, 3, 8, 96, 64),
            _experts_case("rows", 13, 2, 3, 64, 48, (7.0, 1.0, 0.0)),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
        bytes_moved=lambda x, experts, weights, *layers: (
            2 * nbytes(x) + min(experts.numel(), layers[0].shape[0]) * (nbytes(*layers[:4]) // layers[0].shape[0])
        ),
        flops=lambda x, experts, weights, gate_up, *rest: 3 * experts.numel() * x.shape[1] * gate_up.shape[1],
    )
)
"""`fp8_experts(x [T, D], experts int32 [T, K], weights float32 [T, K], gate_up [E, 2F, D] and its scale, down [E, D, F]
and its scale, rows, columns, limit, alpha, shift) -> [T, D]`: sum over k of weights * down(g * sigmoid(alpha * g) *
(u + shift)), g = min(gate, limit), u = clamp(up, -limit, limit). Gate rows come first, then up rows. Which experts run
is read on the device."""


# --------------------------------------------------------------------------------------------------- as a weight format


def _run(
    format: FP8Format, x: Tensor, weight: Given, bias: Tensor | None, add: None, eps: None, silu: bool, float32: bool
) -> Tensor:
    return fp8_linear(x, *_weight(weight), bias, format.rows, format.columns, float32)


def _weight(given: Given) -> tuple[Tensor, Tensor]:
    return given["codes"], given["scale"]


def _run_experts(
    format: FP8Format,
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
    both = *_weight(gate_up), *_weight(down)
    return fp8_experts(x, experts, weights, *both, format.rows, format.columns, *gate.numbers)


def _reads(format: Any, n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    from onegraph.ops.cuda import fp8

    return fp8.reads(format.rows, format.columns, k, dtype, device)


WEIGHT = WeightOps(
    linear=_run,
    decode=lambda format, weight: fp8_dequantize(*_weight(weight), format.rows, format.columns),
    grouped=lambda format, x, weight: fp8_grouped_linear(x, *_weight(weight), format.rows, format.columns),
    experts=_run_experts,
    reads=_reads,
)
