"""MXFP8 linears and routed experts on a GPU: variants of FP8 with scales of a byte, by `mxfp8.cu`.

Linears whose k is no multiple of 128 decode the weight once and multiply through cuBLAS; such experts run FP8's kernel,
with their scales as float32.
"""

from math import prod

import torch
from torch import Tensor

from onegraph.ops.cuda import build, fp8, stream
from onegraph.ops.cuda.fp8 import BLOCKS, CODES, FP8, OUT, PLAIN
from onegraph.ops.cuda.stream import GATE, HALVES, ROWS, SIZES, Footprint, Variant, Weight

GROUP = 32  # columns that share a scale
COLUMNS = 128  # of k, whose scales one copy of four bytes brings


class MXFP8(FP8):
    source = build.Source(
        "mxfp8",
        ops=("mxfp8_linear", "mxfp8_grouped_linear", "mxfp8_experts"),
        functions=("mxfp8_linear",),
        arguments=build.Arguments(
            pointers=("x", "codes", "scale", "bias", "experts", "weights", "y"),
            ints=(*SIZES, "wide", "across", "hold"),
            floats=GATE,
        ),
        capabilities=build.PORTABLE,
        families=("hopper", "portable"),
        otherwise="torch computes MXFP8 linears",
        example={**PLAIN.defines(3), "HALF": 0},
    )
    aligned = "codes", "scale"

    def reads(self, weight: Weight) -> bool:
        return weight.shape[2] % COLUMNS == 0

    def footprint(self, variant: Variant, weight: Weight) -> Footprint:
        x = variant.ring_x * variant.tiles * variant.slice
        return Footprint(ROWS * (variant.slice + variant.slice // GROUP + x), variant.sums, 0)

    def decode(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        codes, scale = self._aligned(weight).tensors.values()
        matrices, n, k = weight.shape
        y, blocks = torch.empty_like(codes, dtype=dtype), dict(zip(BLOCKS, (0, 5, -(-k // GROUP)), strict=True))
        arguments = {"codes": codes, "scale": scale, "matrices": matrices, "n": n, "k": k, **blocks}
        return stream.dequantize(self.dequantizer, y, 16, {"OUT": OUT[dtype], "BYTE_SCALES": 1}, **arguments)


STREAM = MXFP8()
takes = STREAM.takes


def weight_of(codes: Tensor, scale: Tensor) -> Weight | None:
    """codes [n, k] or [matrices, n, k]. None where k is no multiple of 16."""
    *lead, n, k = codes.shape
    return None if k % CODES else Weight((prod(lead), n, k), {"codes": codes, "scale": scale})


def takes_codes(codes: Tensor) -> bool:
    """Whether they are decoded here."""
    return codes.is_cuda and codes.numel() > 0 and STREAM.dequantizer.is_built(codes.device.index)


def reads(k: int, dtype: torch.dtype, device: int) -> bool:
    """Whether linears of k inputs are computed here from the codes."""
    return k % COLUMNS == 0 and dtype in HALVES and STREAM.source.is_built(device)


def linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, float32: bool) -> Tensor | None:
    """x [..., k] -> [..., n]; see `ops.mxfp8.mxfp8_linear`. None: not here."""
    weight = weight_of(codes, scale)
    return None if weight is None else STREAM.linear(x, weight, bias, float32)


def grouped_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor | None:
    """x [..., G, k] -> [..., G, n]; see `ops.mxfp8.mxfp8_grouped_linear`. None: not here."""
    weight = weight_of(codes, scale)
    return None if weight is None else STREAM.grouped_linear(x, weight)


def experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    *gate: float,
) -> Tensor | None:
    """x [T, D] -> [T, D]; see `ops.mxfp8.mxfp8_experts`. None: not here."""
    first, second = weight_of(gate_up, gate_up_scale), weight_of(down, down_scale)
    if first is None or second is None:
        return None
    if STREAM.reads(first) and STREAM.reads(second):
        return STREAM.experts(x, experts, weights, first, second, gate)
    scales = gate_up_scale.view(torch.float8_e8m0fnu).float(), down_scale.view(torch.float8_e8m0fnu).float()
    return fp8.experts(x, experts, weights, gate_up, scales[0], down, scales[1], 1, GROUP, *gate)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """codes [..., n, k] -> [..., n, k] in bfloat16, float16 or float32, one launch. None: not here."""
    weight = weight_of(codes, scale)
    return None if weight is None else STREAM.decode(weight, dtype)
