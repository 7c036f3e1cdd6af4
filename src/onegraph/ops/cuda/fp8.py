"""FP8 (E4M3) linears and routed experts on a GPU: variants of `fp8.cu`, blocks of scales, and which calls it takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.cuda import build, stream
from onegraph.ops.cuda.stream import GATE, GATE_UP, LINEAR, ROWS, SIZES, Footprint, Stream, Variant, Weight

SLICE = 128  # columns of a unit where a warp does not take 256
MAX_TOKENS = 64
WHOLE = 31  # column_shift where all of k shares a scale
CODES = 16  # of a copy: k comes in multiples
BLOCKS = "row_shift", "column_shift", "scale_pitch"
OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MANY, MORE = ((16, 8),), ((8, 4),)  # warps
PLAIN = Variant(LINEAR, slice=SLICE, warps=MANY)

# Linears of up to so many tokens: where a block has row tiles enough, and where it has few. Longer rings are no quicker
# where activations are loaded: they queue behind the ring's first filling.
ONE_PASS = Variant(LINEAR, ring_x=True, warps=MORE, early=2)
LINEARS = {
    8: (ONE_PASS, ONE_PASS),
    16: (
        Variant(LINEAR, 2, slice=SLICE, warps=MANY, depths=(3, 2)),
        Variant(LINEAR, 2, ring_x=True, slice=SLICE, warps=MORE, depths=(4, 3, 2)),
    ),
    MAX_TOKENS: tuple(
        Variant(LINEAR, 4, ring_x=ring, slice=SLICE, warps=MORE, depths=(4, 3, 2)) for ring in (False, True)
    ),
}
EXPERTS = {  # of one token, and of more
    1: Variant(GATE_UP, warps=MORE),
    2: Variant(GATE_UP, slice=SLICE, warps=MANY, depths=(4, 3, 2)),
}


@dataclass(frozen=True)
class Blocks:
    """Blocks that share a scale, as the kernels are told: 2^row_shift rows by 2^column_shift columns, `pitch` blocks
    side by side; `grain`: columns, from any multiple of them on, that share a scale."""

    row_shift: int
    column_shift: int
    pitch: int
    grain: int


@cache
def blocks(rows: int, columns: int, k: int) -> Blocks | None:
    """Of a weight [.., n, k] in blocks of rows x columns, or of 1 x k where `columns` is 0. None where the kernels do
    not know such blocks: the sides are powers of two, columns 32 or more."""
    if rows & (rows - 1) or columns & (columns - 1) or 0 < columns < 32 or k % CODES:
        return None
    if not columns:
        return Blocks(rows.bit_length() - 1, WHOLE, 1, 128)
    return Blocks(rows.bit_length() - 1, columns.bit_length() - 1, -(-k // columns), 32 if columns < 128 else 128)


class FP8(Stream):
    source = build.Source(
        "fp8",
        ops=(
            *("fp8_linear", "fp8_grouped_linear", "fp8_experts"),
            *("mxfp8_linear", "mxfp8_grouped_linear", "mxfp8_experts"),
        ),
        functions=("fp8_linear",),
        arguments=build.Arguments(
            pointers=("x", "codes", "scale", "bias", "experts", "weights", "y"),
            ints=(*SIZES, *BLOCKS, "wide", "across", "hold"),
            floats=GATE,
        ),
        capabilities=build.PORTABLE,
        families=("hopper", "portable"),
        otherwise="torch computes FP8 linears",
        example={**PLAIN.defines(3), "HALF": 0, "GRAIN": 128},
    )
    dequantizer = build.Source(
        "fp8_dequantize",
        ops=("fp8_dequantize", "mxfp8_dequantize"),
        functions=("fp8_dequantize",),
        arguments=build.Arguments(pointers=("codes", "scale", "y"), ints=("matrices", "n", "k", *BLOCKS)),
        capabilities=build.PORTABLE,
        families=("hopper", "portable"),
        example={"OUT": 0},
    )
    max_tokens = MAX_TOKENS

    def weight(
        self, shape: tuple[int, int, int], tensors: Mapping[str, Any], numbers: tuple[int, ...]
    ) -> Weight | None:
        scaled = blocks(*numbers, shape[2])
        if scaled is None:
            return None
        shifts = dict(zip(BLOCKS, (scaled.row_shift, scaled.column_shift, scaled.pitch), strict=True))
        return Weight(shape, tensors, shifts, {"GRAIN": scaled.grain})

    def linear_variant(self, tokens: int, few: bool, weight: Weight, portable: bool) -> Variant:
        return next(variants for most, variants in LINEARS.items() if tokens <= most)[few]

    def experts_variant(self, tokens: int, portable: bool) -> Variant:
        return EXPERTS[min(tokens, 2)]

    def footprint(self, variant: Variant, weight: Weight) -> Footprint:
        x = variant.ring_x * variant.tiles * variant.slice
        scales = variant.slice // weight.form["GRAIN"] * 4
        return Footprint(ROWS * (variant.slice + scales + x), variant.sums, 0)

    def numbers(self, weight: Weight, y: Tensor) -> dict[str, int]:
        return {**weight.numbers, "wide": int(y.dtype == torch.float32)}

    def decode(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        codes, scale = self._aligned(weight).tensors.values()
        y, sizes = torch.empty_like(codes, dtype=dtype), dict(zip(("matrices", "n", "k"), weight.shape, strict=True))
        return stream.dequantize(
            self.dequantizer, y, 16, {"OUT": OUT[dtype]}, codes=codes, scale=scale, **sizes, **weight.numbers
        )


STREAM = FP8()
