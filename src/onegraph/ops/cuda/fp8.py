"""FP8 (E4M3) linears and routed experts on a GPU: variants of `fp8.cu`, blocks of scales, and which calls it takes."""

from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from onegraph.ops.cuda import build, stream
from onegraph.ops.cuda.stream import GATE, GATE_UP, HALVES, LINEAR, ROWS, SIZES, Footprint, Stream, Variant, Weight

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
        ops=("fp8_linear", "fp8_grouped_linear", "fp8_experts"),
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
takes = STREAM.takes


def weight_of(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Weight | None:
    """codes [n, k] or [matrices, n, k]. None where the kernels do not know such blocks."""
    scaled = blocks(rows, columns, codes.shape[-1])
    if scaled is None:
        return None
    *lead, n, k = codes.shape
    numbers = dict(zip(BLOCKS, (scaled.row_shift, scaled.column_shift, scaled.pitch), strict=True))
    return Weight((prod(lead), n, k), {"codes": codes, "scale": scale}, numbers, {"GRAIN": scaled.grain})


def takes_codes(codes: Tensor) -> bool:
    """Whether they are decoded here."""
    return codes.is_cuda and codes.numel() > 0 and STREAM.source.is_built(codes.device.index)


def reads(rows: int, columns: int, k: int, dtype: torch.dtype, device: int) -> bool:
    """Whether linears with scales of such blocks are computed here from the codes."""
    return blocks(rows, columns, k) is not None and dtype in HALVES and STREAM.source.is_built(device)


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, rows: int, columns: int, float32: bool
) -> Tensor | None:
    """x [..., k] -> [..., n]; see `ops.fp8.fp8_linear`. None: not here."""
    weight = weight_of(codes, scale, rows, columns)
    return None if weight is None else STREAM.linear(x, weight, bias, float32)


def grouped_linear(x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor | None:
    """x [..., G, k] -> [..., G, n]; see `ops.fp8.fp8_grouped_linear`. None: not here."""
    weight = weight_of(codes, scale, rows, columns)
    return None if weight is None else STREAM.grouped_linear(x, weight)


def experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    rows: int,
    columns: int,
    *gate: float,
) -> Tensor | None:
    """x [T, D] -> [T, D]; see `ops.fp8.fp8_experts`. None: not here."""
    first, second = weight_of(gate_up, gate_up_scale, rows, columns), weight_of(down, down_scale, rows, columns)
    if first is None or second is None:
        return None
    return STREAM.experts(x, experts, weights, first, second, gate)


def dequantize(codes: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
    """codes [..., n, k] -> [..., n, k] in bfloat16, float16 or float32, one launch. None: not here."""
    weight = weight_of(codes, scale, rows, columns)
    return None if weight is None else STREAM.decode(weight, dtype)
