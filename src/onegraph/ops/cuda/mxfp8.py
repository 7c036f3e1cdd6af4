"""MXFP8 linears and routed experts on a GPU: variants of FP8 with scales of a byte, by `mxfp8.cu`.

Linears whose k is no multiple of 128 decode the weight once and multiply through cuBLAS; such experts run FP8's kernel,
with their scales as float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.cuda import build, fp8, stream
from onegraph.ops.cuda.fp8 import BLOCKS, CODES, FP8, OUT, PLAIN
from onegraph.ops.cuda.stream import GATE, ROWS, SIZES, Footprint, Variant, Weight

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

    def weight(
        self, shape: tuple[int, int, int], tensors: Mapping[str, Any], numbers: tuple[int, ...]
    ) -> Weight | None:
        return None if shape[2] % CODES else Weight(shape, tensors)

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

    def experts(
        self, x: Tensor, experts: Tensor, weights: Tensor, gate_up: Weight, down: Weight, gate: tuple[float, ...],
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor | None:  # fmt: skip
        if self.reads(gate_up) and self.reads(down):
            return super().experts(x, experts, weights, gate_up, down, gate, biases)
        first, second = _as_fp8(gate_up), _as_fp8(down)
        return None if first is None or second is None else fp8.STREAM.experts(x, experts, weights, first, second, gate)


def _as_fp8(weight: Weight) -> Weight | None:
    """With scales as float32."""
    codes, scale = weight.tensors.values()
    scales = scale.view(torch.float8_e8m0fnu).float()
    return fp8.STREAM.weight(weight.shape, {"codes": codes, "scale": scales}, (1, GROUP))


STREAM = MXFP8()
