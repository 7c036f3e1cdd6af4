"""Routed experts in trellis codes: gate-up, SwiGLU, down and the weighted sum. Each matrix of an expert is a layer as
`trellis_linear` knows it; gate rows, then up rows of the first are rotated together."""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.rotated import MAX_BLOCK
from onegraph.formats.trellis import BITS, MCG, MUL1, OWN, TILE, UNIT
from onegraph.ops.activation import GeGLU, ReLU2, between, check_gate, parts_of
from onegraph.ops.calls import TrellisExperts
from onegraph.ops.checks import FLOATS, check_routes, check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.trellis import check_code, check_codes, trellis_linear


def composed(call: TrellisExperts, linear: Any = trellis_linear) -> Tensor:
    """By a linear of each expert: `trellis_linear` or its reference. Which experts run stays on the device."""

    def one(tensor: Tensor | None, expert: Tensor) -> Tensor | None:
        return None if tensor is None else tensor.index_select(0, expert)[0]

    def product(x: Tensor, *layer: Tensor | None) -> Tensor:
        """x [.., k] times a matrix; times its halves one after the other where each has an in_scale."""
        in_scale = layer[1]
        assert in_scale is not None
        if in_scale.dim() == 1:
            y: Tensor = linear(x, *layer, call.bits, None, None, False, True, call.code)
            return y
        halves = zip(*((None, None) if each is None else each.chunk(2) for each in layer), strict=True)
        return torch.cat([product(x, codes, own[0], *rest) for codes, own, *rest in halves], -1)

    def run(x: Tensor, expert: Tensor) -> Tensor:
        """x [.., D] through `expert`, int [1] -> float32 [.., D]."""
        layers = (
            (call.gate_up, call.gate_up_in_scale, call.gate_up_out_scale, call.gate_up_bias),
            (call.down, call.down_in_scale, call.down_out_scale, call.down_bias),
        )
        for layer in layers:
            x = product(x, *(one(tensor, expert) for tensor in layer))
            if layer is layers[0]:
                x = between(x, call.limit, call.alpha, call.shift).to(call.x.dtype)
        return x

    count, (tokens, top_k) = call.gate_up.shape[0], call.experts.shape
    total, experts = torch.zeros_like(call.x, dtype=torch.float32), call.experts.clamp(0, count - 1)
    if tokens * top_k <= count:  # few tokens: the experts that they use
        for pair in range(tokens * top_k):
            token, expert = slice(pair // top_k, pair // top_k + 1), experts.view(-1)[pair : pair + 1]
            total[token] += run(call.x[token], expert) * call.weights.view(-1)[pair]
        return total.to(call.x.dtype)
    for expert in torch.arange(count, device=call.x.device).split(1):  # many: every expert on all tokens
        gain = torch.where(experts == expert, call.weights, 0.0).sum(1, keepdim=True)
        total += gain * run(call.x, expert)
    return total.to(call.x.dtype)


def experts_on_gpu(call: TrellisExperts) -> Tensor:
    """By the kernels of few tokens, or one linear after the other."""
    from onegraph.ops.cuda import trellis_experts as kernels

    made = kernels.experts(call)
    return composed(call) if made is None else made


def _reference(call: TrellisExperts) -> Tensor:
    return composed(call, trellis_linear.reference)


def _check(call: TrellisExperts) -> None:
    op, x = "trellis_experts", call.x
    check_codes(call.gate_up, call.bits, 3, "gate_up")
    check_codes(call.down, call.bits, 3, "down")
    check_code(call.code)
    if x.dtype not in FLOATS or x.dim() != 2:
        raise ValueError(f"{op}: x is {x.dtype} {tuple(x.shape)}; it must be a float32, bfloat16 or float16 [T, D]")
    (tokens, dim), (count, tiles, _) = x.shape, call.gate_up.shape
    width, parts = tiles * TILE, parts_of(call.alpha)
    both = call.gate_up_in_scale.dim() == 3
    if both and (parts == 1 or width % (2 * MAX_BLOCK)):
        raise ValueError(
            f"{op}: gate_up_in_scale is {tuple(call.gate_up_in_scale.shape)}; allowed: [E, D], or [E, 2, D] for gate "
            f"and up of a multiple of {MAX_BLOCK} rows each"
        )
    check_tensors(
        op, x.device, x=(x, x.dtype, (tokens, dim)),
        gate_up=(call.gate_up, torch.int16, (count, tiles, dim * call.bits)),
        gate_up_in_scale=(call.gate_up_in_scale, torch.float32, (count, 2, dim) if both else (count, dim)),
        gate_up_out_scale=(call.gate_up_out_scale, torch.float32, (count, width)),
        gate_up_bias=(call.gate_up_bias, torch.float32, (count, width)),
        down=(call.down, torch.int16, (count, dim // TILE, width // parts * call.bits)),
        down_in_scale=(call.down_in_scale, torch.float32, (count, width // parts)),
        down_out_scale=(call.down_out_scale, torch.float32, (count, dim)),
        down_bias=(call.down_bias, torch.float32, (count, dim)),
    )  # fmt: skip
    check_routes(x, call.experts, call.weights)
    check_gate(op, call.limit, call.alpha, call.shift)


def _case(
    tokens: int, top_k: int, experts: int, dim: int, wide: int, bits: int, *,
    gate: tuple[float, float, float] = (float("inf"), 1.0, 0.0), biases: bool = False, code: int = OWN,
    crowded: bool = False, apart: bool = False,
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, dim, generator=g).to(device, dtype)
        chosen = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].int().contiguous()
        if crowded:
            chosen[: tokens // 2] = chosen[:1]
            chosen[0, 1] = chosen[0, 0]
        gains, layers = torch.rand(tokens, top_k, generator=g), list[Tensor | None]()

        def scales(size: int) -> Tensor:
            return (0.5 + torch.rand(experts, size, generator=g)) * torch.randn(experts, size, generator=g).sign()

        for n, k in ((parts_of(gate[1]) * wide, dim), (dim, wide)):
            codes = torch.randint(-(2**15), 2**15, (experts, n // TILE, k * bits), generator=g, dtype=torch.int16)
            in_scale = torch.stack((scales(k), scales(k)), 1) if apart and not layers else scales(k)
            layers += [codes, in_scale, scales(n) * (k**-0.5 / (UNIT if code == OWN else 1))]
            layers.append(torch.randn(experts, n, generator=g) if biases else None)
        moved = [None if tensor is None else tensor.to(device) for tensor in (chosen, gains, *layers)]
        return x, *moved, bits, *gate, code

    name = f"{tokens} tokens, {top_k} of {experts}, {dim}x{wide}@{bits}"
    name += {GeGLU.numbers: " gelu", ReLU2.numbers: " relu2"}.get(gate, "") + " with biases" * biases
    name += " apart" * apart
    return Case(name=name + " crowded" * crowded + f" in code {code}" * (code != OWN), make=make)


trellis_experts = register(
    Op(
        name="trellis_experts",
        call=TrellisExperts,
        schema="-> Tensor",
        reference=_reference,
        fake=lambda call: torch.empty_like(call.x),
        kernel="onegraph.ops.trellis_experts:experts_on_gpu",
        check=_check,
        cases=(
            *(_case(1, 4, 8, 256, 128, bits) for bits in BITS[1:4]),
            _case(1, 2, 4, 192, 64, 4, gate=(7.0, 1.702, 1.0), biases=True),
            _case(9, 2, 3, 64, 32, 3),
            _case(5, 3, 7, 192, 256, 2, crowded=True),
            _case(17, 2, 3, 320, 64, 4, gate=(7.0, 1.702, 1.0), biases=True, crowded=True),
            _case(3, 2, 5, 576, 128, 8, gate=GeGLU.numbers),
            _case(2, 3, 4, 128, 192, 1, gate=ReLU2.numbers, biases=True),
            _case(1, 2, 4, 128, 1280, 6, gate=ReLU2.numbers),
            _case(3, 2, 8, 128, 64, 5, code=MCG),
            _case(1, 2, 4, 256, 128, 4, code=MUL1, apart=True),
            _case(6, 2, 3, 128, 256, 3, code=MCG, apart=True, biases=True, crowded=True),
            _case(0, 2, 4, 64, 64, 2),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: (
            2 * nbytes(call.x)
            + min(call.experts.numel(), call.gate_up.shape[0])
            * nbytes(*(each for each in list(call)[3:] if isinstance(each, Tensor)))
            // call.gate_up.shape[0]
        ),
        flops=lambda call: 6 * call.experts.numel() * call.x.shape[1] * (call.gate_up.shape[1] * TILE // 2),
    )
)
"""x [T, D], experts int32 [T, K], weights float32 [T, K] -> [T, D] in x's dtype: sum over k of
weights * (down(swiglu(gate_up(x) + bias)) + bias), with limit, alpha and shift as `SwiGLU` has them.

Of gate_up [E, 2F, D] and of down [E, D, F]: codes int16 [E, n/16, k bits], in_scale float32 [E, k], out_scale float32
[E, n], bias float32 [E, n] or None; `code` as in `trellis_linear`. gate_up_in_scale may be [E, 2, D], gate's and up's,
where F % 128 == 0. An expert's number outside of 0 to E - 1 is the
nearest one.
"""
