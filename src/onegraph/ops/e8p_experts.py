"""Routed experts in E8P: gate-up, SwiGLU, down and the weighted sum. The layout of the codes is told in
`formats/e8p.py`, kernels in `ops/cuda/e8p_experts.py` and `ops/triton/e8p_experts.py`.

Each of an expert's two matrices is a layer as `e8p_linear` knows it: gate rows, then up rows of the first are rotated
together. All scales are the expert's own, those of its inputs too, which its own Hessian says; so a token is rotated
for each expert that it chose. That is a few kilobytes beside the megabytes of an expert's codes.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.e8p import BITS, codebook, residual_dtype
from onegraph.formats.rotated import hadamard_block
from onegraph.ops.activation import GeGLU, ReLU2, between, check_gate, parts_of
from onegraph.ops.calls import E8PExperts
from onegraph.ops.checks import FLOATS, check_routes, check_tensors
from onegraph.ops.e8p import e8p_decode
from onegraph.ops.hadamard import hadamard
from onegraph.ops.registry import Case, Op, nbytes, register


def _product(
    x: Tensor, expert: Tensor, codes: Tensor, residual: Tensor | None, call: E8PExperts, in_scale: Tensor,
    out_scale: Tensor, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """x float32 [.., k] times the matrix of `expert`, int [1] -> [.., n]."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, expert)[0]

    q = e8p_decode.reference(one(codes), None if residual is None else one(residual), call.codebook, call.bits).float()
    n, k = q.shape
    y: Tensor = hadamard.reference(x * one(in_scale), hadamard_block(k)) @ q.T
    y = hadamard.reference(y, hadamard_block(n)) * one(out_scale)
    return y if bias is None else y + one(bias)


def _expert(x: Tensor, expert: Tensor, call: E8PExperts) -> Tensor:
    """x float32 [.., D] through `expert`, int [1] -> [.., D]."""
    hidden = _product(
        x, expert, call.gate_up, call.gate_up_residual, call, call.gate_up_in_scale, call.gate_up_out_scale,
        call.gate_up_bias,
    )  # fmt: skip
    hidden = between(hidden, call.limit, call.alpha, call.shift)
    down = call.down, call.down_residual, call, call.down_in_scale, call.down_out_scale, call.down_bias
    return _product(hidden, expert, *down)


def _experts(call: E8PExperts) -> Tensor:
    x, count, (tokens, top_k) = call.x.float(), call.gate_up.shape[0], call.experts.shape
    total, experts = torch.zeros_like(x), call.experts.clamp(0, count - 1)
    if tokens * top_k <= count:  # few tokens: the experts that they use, one at a time: all would take gigabytes
        for pair in range(tokens * top_k):
            token = pair // top_k
            total[token] += _expert(x[token], experts.view(-1)[pair : pair + 1], call) * call.weights.view(-1)[pair]
        return _added(total, call)
    for expert in torch.arange(count, device=x.device).split(1):  # many: every expert on all tokens, by zero if not its
        gain = torch.where(experts == expert, call.weights, 0.0).sum(1, keepdim=True)
        total += gain * _expert(x, expert, call)
    return _added(total, call)


def _added(total: Tensor, call: E8PExperts) -> Tensor:
    return (total if call.add is None else call.add.float() + total).to(call.x.dtype)


def _check(call: E8PExperts) -> None:
    op, x = "e8p_experts", call.x
    if call.bits not in BITS:
        raise ValueError(f"{op}: bits is {call.bits}; allowed: 2, 3, 4")
    if x.dtype not in FLOATS or x.dim() != 2 or x.shape[1] % 8:
        raise ValueError(
            f"{op}: x is {x.dtype} {tuple(x.shape)}; it must be a float32, bfloat16 or float16 [T, D], D % 8 == 0"
        )
    parts = parts_of(call.alpha)
    if call.gate_up.dim() != 3 or call.gate_up.shape[1] % (8 * parts):
        rows = "2F" if parts == 2 else "F"
        raise ValueError(f"{op}: gate_up is {tuple(call.gate_up.shape)}; it must be [E, {rows}, D/8], F % 8 == 0")
    (tokens, dim), (count, width, _) = x.shape, call.gate_up.shape
    rest = residual_dtype(call.bits)
    for name in ("gate_up_residual", "down_residual"):
        if (getattr(call, name) is None) != (rest is None):
            raise ValueError(f"{op}: {name} must be {'None' if rest is None else rest} at {call.bits} bits")
    inner, outer = (count, width, dim // 8), (count, dim, width // (8 * parts))
    check_tensors(
        op, x.device, x=(x, x.dtype, (tokens, dim)), codebook=(call.codebook, torch.int8, (512, 8)),
        gate_up=(call.gate_up, torch.int16, inner),
        gate_up_residual=(call.gate_up_residual, rest or torch.int16, inner),
        gate_up_in_scale=(call.gate_up_in_scale, torch.float32, (count, dim)),
        gate_up_out_scale=(call.gate_up_out_scale, torch.float32, (count, width)),
        gate_up_bias=(call.gate_up_bias, torch.float32, (count, width)),
        down=(call.down, torch.int16, outer), down_residual=(call.down_residual, rest or torch.int16, outer),
        down_in_scale=(call.down_in_scale, torch.float32, (count, width // parts)),
        down_out_scale=(call.down_out_scale, torch.float32, (count, dim)),
        down_bias=(call.down_bias, torch.float32, (count, dim)), add=(call.add, x.dtype, (tokens, dim)),
    )  # fmt: skip
    check_routes(x, call.experts, call.weights)
    check_gate(op, call.limit, call.alpha, call.shift)


def random_weight(
    experts: int, n: int, k: int, bits: int, device: torch.device | str, g: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """codes, residual, in_scale and out_scale of random experts [experts, n, k]; outputs about as large as inputs."""
    codes = torch.randint(-(2**15), 2**15, (experts, n, k // 8), generator=g, dtype=torch.int16).to(device)
    rest, residual = residual_dtype(bits), None
    if rest is not None:
        info = torch.iinfo(rest)
        residual = torch.randint(info.min, info.max + 1, codes.shape, generator=g, dtype=rest).to(device)

    def scales(size: int) -> Tensor:
        signs = torch.randint(0, 2, (experts, size), generator=g) * 2 - 1
        return (0.5 + torch.rand(experts, size, generator=g)) * signs

    out = scales(n) * (k**-0.5 / (16 if bits == 4 else 4))
    return codes, residual, scales(k).to(device), out.to(device)


def _case(
    tokens: int, top_k: int, experts: int, dim: int, wide: int, bits: int, *,
    gate: tuple[float, float, float] = (float("inf"), 1.0, 0.0), biases: bool = False, crowded: bool = False,
    add: bool = False,
) -> Case:  # fmt: skip
    """crowded: half of the tokens choose the same experts, and the first one of them twice."""

    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, dim, generator=g).to(device, dtype)
        chosen = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].int()
        if crowded:
            chosen[: tokens // 2] = chosen[:1]
            chosen[0, 1] = chosen[0, 0]
        gains = torch.rand(tokens, top_k, generator=g).to(device)
        layers: list[Tensor | None] = []
        for n, k in ((parts_of(gate[1]) * wide, dim), (dim, wide)):
            layers += random_weight(experts, n, k, bits, device, g)
            layers.append(torch.randn(experts, n, generator=g).to(device) if biases else None)
        residual = 2 * torch.randn(tokens, dim, generator=g).to(device, dtype) if add else None
        return x, chosen.contiguous().to(device), gains, codebook(device), *layers, bits, *gate, residual

    name = f"{tokens} tokens, {top_k} of {experts}, {dim}x{wide}@{bits}"
    name += {GELU: " gelu", RELU2: " relu2"}.get(gate, "")
    return Case(
        name=name + (" with biases" if biases else "") + (" crowded" if crowded else "") + (" add" if add else ""),
        make=make,
    )


GPT_OSS = (7.0, 1.702, 1.0)
GELU, RELU2 = GeGLU.numbers, ReLU2.numbers


def _bytes(x: Tensor, experts: Tensor, weights: Tensor, codebook: Tensor, *others: Any) -> int:
    *rest, add = others
    count: int = rest[0].shape[0]
    layers = nbytes(*(t for t in rest if isinstance(t, Tensor)))
    return 2 * nbytes(x) + nbytes(add) + nbytes(codebook) + min(experts.numel(), count) * (layers // count)


e8p_experts = register(
    Op(
        name="e8p_experts",
        call=E8PExperts,
        schema="-> Tensor",
        reference=_experts,
        fake=lambda call: torch.empty_like(call.x),
        kernel="onegraph.ops.cuda.e8p_experts:experts",
        check=_check,
        cases=(
            *(_case(1, 8, 16, 256, 128, bits) for bits in BITS),
            _case(1, 4, 8, 320, 192, 4, gate=GPT_OSS, biases=True),
            _case(1, 9, 12, 320, 128, 4),
            _case(1, 11, 13, 256, 384, 2, biases=True),
            *(_case(5, 3, 7, 192, 256, bits, crowded=True) for bits in BITS),
            _case(17, 2, 3, 320, 64, 2, gate=GPT_OSS, biases=True, crowded=True),
            _case(64, 4, 24, 128, 64, 3, crowded=True),
            _case(3, 2, 5, 576, 256, 3),
            _case(1, 2, 4, 1088, 640, 2, gate=GPT_OSS, biases=True),
            _case(3, 2, 4, 72, 40, 4),
            _case(1, 4, 8, 320, 192, 4, gate=GELU),
            _case(1, 2, 4, 1088, 704, 4, gate=GELU),
            _case(4, 3, 7, 192, 320, 2, gate=GPT_OSS, biases=True, crowded=True),
            _case(5, 2, 5, 192, 256, 2, gate=GELU),
            _case(5, 2, 5, 192, 256, 2, gate=RELU2),
            _case(1, 8, 16, 256, 128, 4, add=True),
            _case(1, 1, 4, 320, 128, 2, add=True),
            _case(3, 2, 5, 192, 256, 3, biases=True, add=True),
            _case(3, 2, 4, 72, 40, 4, add=True),
            _case(0, 2, 4, 64, 64, 2),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: _bytes(*call),
        flops=lambda call: 6 * call.experts.numel() * call.x.shape[1] * (call.gate_up.shape[1] // 2),
    )
)
"""x [T, D], experts int32 [T, K], weights float32 [T, K] -> [T, D] in x's dtype: sum over k of
weights * (down(swiglu(gate_up(x) + bias)) + bias), with limit, alpha and shift as `SwiGLU` has them; with add [T, D]
of x's dtype, that and the sum; rounded once.

codebook as in `e8p_decode`. Of gate_up [E, 2F, D] and of down [E, D, F]: codes int16 [E, n, k/8], residual (None, uint8
or int16), in_scale float32 [E, k], out_scale float32 [E, n], bias float32 [E, n] or None. F % 8 == 0, D % 8 == 0. The
first F rows of gate_up are gate, and rotated apart from the others. Which experts run is read on the device; a number
outside of 0 to E - 1 is the nearest one. An expert's codes come from memory once, however many tokens chose it.
"""
