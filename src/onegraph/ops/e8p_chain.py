"""The linears between two attentions as one op: output, gate and up, down, and the next layer's q, k and v.

Norms, SwiGLU and both additions to the residual stream are inside. On a GPU they are one launch where the model is
small enough (`ops/cuda/e8p_chain.py`), else one for each linear.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.e8p import codebook
from onegraph.ops.checks import FLOATS
from onegraph.ops.e8p import check_codes, check_place, check_scales, e8p_linear, random_codes, random_scales
from onegraph.ops.registry import Case, Op, nbytes, register


def _chain(
    x: Tensor,
    residual: Tensor,
    codes: list[Tensor],
    rests: list[Tensor],
    codebook: Tensor,
    in_scales: list[Tensor],
    out_scales: list[Tensor],
    biases: list[Tensor | None],
    bits: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    def link(i: int, x: Tensor, *around: Any) -> Tensor:
        rest = rests[i] if rests else None
        layer = codes[i], rest, codebook, in_scales[i], out_scales[i], biases[i], bits
        y: Tensor = e8p_linear.reference(x, *layer, *around)
        return y

    residual = link(0, x, residual)
    residual = link(2, link(1, residual, None, eps), residual, None, True)
    return residual, link(3, residual, None, eps) if len(codes) == 4 else x.new_empty((*x.shape[:-1], 0))


def _check(
    x: Tensor,
    residual: Tensor,
    codes: list[Tensor],
    rests: list[Tensor],
    codebook: Tensor,
    in_scales: list[Tensor],
    out_scales: list[Tensor],
    biases: list[Tensor | None],
    bits: int,
    eps: float,
) -> None:
    links = len(codes)
    given = {"rests": len(rests) or links, "in_scales": len(in_scales), "out_scales": len(out_scales)}
    given["biases"] = len(biases)
    if links not in (3, 4) or any(count != links for count in given.values()):
        raise ValueError(f"codes has {links} links and {given}; a chain has 3 or 4 of each, and rests none at 2 bits")
    for i in range(links):
        check_codes(codes[i], rests[i] if rests else None, codebook, bits)
        n, k = codes[i].shape[0], codes[i].shape[1] * 8
        check_scales(in_scales[i], out_scales[i], n, k, codes[0].device)
        check_place("codes", codes[i], codes[0].device)
        bias = biases[i]
        if bias is not None:
            if bias.dtype not in FLOATS or tuple(bias.shape) != (n,):
                raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; it must be a float tensor ({n},)")
            check_place("bias", bias, codes[0].device)
    sizes = [(each.shape[0], each.shape[1] * 8) for each in codes]
    width = sizes[0][0]
    wanted = [(width, sizes[0][1]), (2 * sizes[2][1], width), (width, sizes[2][1]), (sizes[-1][0], width)][:links]
    if sizes != wanted:
        raise ValueError(f"links are (n, k) {sizes}; output, gate-up, down and qkv that fit together are {wanted}")
    if x.dtype not in FLOATS or residual.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and residual {residual.dtype}; both must be float32, bfloat16 or float16")
    if x.dim() == 0 or x.shape != (*residual.shape[:-1], sizes[0][1]) or residual.shape[-1] != width:
        raise ValueError(
            f"x is {tuple(x.shape)} and residual {tuple(residual.shape)}; links need [..., {sizes[0][1]}] and "
            f"[..., {width}]"
        )
    check_place("x", x, codes[0].device)
    check_place("residual", residual, codes[0].device)
    if eps < 0:
        raise ValueError(f"eps is {eps}; it must be 0 or more")


def _case(batch: tuple[int, ...], heads: int, width: int, inner: int, qkv: int, bits: int, *with_: str) -> Case:
    """`with_`: "bias". qkv 0: the last layer's chain, which ends with down."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        sizes = [(width, heads), (2 * inner, width), (width, inner), (qkv, width)][: 4 if qkv else 3]
        x, residual = (torch.randn(*batch, size, generator=generator).to(device, dtype) for size in (heads, width))
        stored = [random_codes(n, k, bits, device, generator) for n, k in sizes]
        scales = [random_scales(n, k, device, generator) for n, k in sizes]
        biases: list[Tensor | None] = [None] * len(sizes)
        if "bias" in with_:
            biases[-1] = torch.randn(sizes[-1][0], generator=generator).to(device)
        codes = [each for each, _ in stored]
        return (
            x, residual, codes, [rest for _, rest in stored if rest is not None], codebook(device),
            [scale for scale, _ in scales], [scale for _, scale in scales], biases, bits, 1e-5,
        )  # fmt: skip

    return Case(name="+".join([f"{'x'.join(map(str, batch))}x{width}x{inner}->{qkv}@{bits}", *with_]), make=make)


e8p_chain = register(
    Op(
        name="e8p_chain",
        schema="(Tensor x, Tensor residual, Tensor[] codes, Tensor[] rests, Tensor codebook, Tensor[] in_scales, "
        "Tensor[] out_scales, Tensor?[] biases, int bits, float eps) -> (Tensor, Tensor)",
        reference=_chain,
        fake=lambda x, residual, codes, *rest: (
            torch.empty_like(residual),
            x.new_empty((*x.shape[:-1], codes[3].shape[0] if len(codes) == 4 else 0)),
        ),
        kernel="onegraph.ops.cuda.e8p_chain:chain",
        check=_check,
        cases=(
            *(_case((1, 1), 576, 576, 1536, 960, bits) for bits in (2, 3, 4)),
            _case((4, 1), 256, 320, 192, 192, 2, "bias"),
            _case((3,), 512, 256, 4160, 384, 4),
            _case((2,), 128, 192, 256, 0, 3),
            _case((5,), 128, 256, 192, 384, 4),
            _case((2, 1), 48, 200, 104, 56, 4),
        ),
        tolerance={torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3},
        bytes_moved=lambda x, residual, codes, rests, codebook, ins, outs, biases, bits, eps: (
            nbytes(x, residual, *codes, *rests, codebook, *ins, *outs, *biases)
            + x.shape[:-1].numel() * x.element_size() * sum(each.shape[0] for each in codes)
        ),
        flops=lambda x, residual, codes, *rest: 16 * x.shape[:-1].numel() * sum(each.numel() for each in codes),
    )
)
"""`e8p_chain(x, residual, ...) -> (residual [..., D], qkv [..., n])`: from one attention to the next.

    residual = residual + o(x);  residual = residual + down(SwiGLU(gate_up(RMSNorm(residual))));  qkv(RMSNorm(residual))

x [..., k] and residual [..., D] of one dtype. codes, in_scales, out_scales, biases: of the four links in this order, as
in `e8p_linear`, norms' weights in in_scales; rests: their residual codes, none at 2 bits. With three links there is no
qkv, and what is returned for it is empty.
"""
