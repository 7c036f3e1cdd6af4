"""INT4 linears on a GPU: how the kernels are cut, and which calls each takes.

Few tokens run straight from the codes: up to four on `int4_one.cu`, whose codes come through the copy engine, which
needs k in multiples of 256; more, other k, and all on cards without that engine on `int4_batch.cu`, 16 to a pass.
Above `MAX_TOKENS`, for k that is no multiple of 64 and for groups that are no power of two, the weight is decoded once
and multiplied through cuBLAS, two launches. What runs how follows from shape, dtype and device alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.cuda import build, stream
from onegraph.ops.cuda.launcher import Launch, aligned, launch
from onegraph.ops.cuda.stream import HALVES, LINEAR, ROWS, WARPS, Footprint, Tiling, Variant, Weight
from onegraph.ops.cuda.tensor_map import sliced_tensor_map

SLICE = 256  # columns of a unit, as in the sources
UNIT = ROWS * SLICE // 2  # bytes of its codes
UNITS, PACE = 8, 300  # one: units of a stage; nanoseconds between the first stages
FEW = 4  # one: tokens of a launch, whose upper and lower bytes are the eight columns of a product
ONE_DEPTHS = 8, 6, 4, 2  # stages under way: the first that fit
ROUND = 32 << 10  # bytes of sums that a round of int4_one.cu may hold, unless one tile has more
COLUMNS = 64  # of k, multiples of which int4_batch.cu takes
MAX_TOKENS = 32  # above, decoding once is cheaper than reading the codes again for every 16 tokens
ALL = 31  # the shift that brings every column to group 0

WEIGHT = "scale", "zero"
ONE_ARGUMENTS = build.Arguments(
    maps=("codes",),
    pointers=("x", *WEIGHT, "order", "bias", "y"),
    ints=("tokens", "n", "k", "groups", "shift", "hold", "round", "box"),
)
BATCH_ARGUMENTS = build.Arguments(
    pointers=("x", "codes", *WEIGHT, "bias", "y"), ints=("tokens", "n", "k", "groups", "shift", "across", "hold")
)
DEQUANTIZE_ARGUMENTS = build.Arguments(pointers=("codes", *WEIGHT, "y"), ints=("n", "k", "groups"))
KIND = {"HALF": 0, "SCALE_BF16": 0, "GROUP": 128}
ONE = build.Source(
    "int4_one",
    ops=("int4_linear",),
    functions=("int4_one",),
    arguments=ONE_ARGUMENTS,
    capabilities=build.CLUSTERS,
    otherwise="int4_batch.cu computes few tokens, too",
    example=KIND | {"FLOAT32": 0, "WARPS": WARPS, "DEPTH": ONE_DEPTHS[0], "PACE": PACE},
)
BATCH = build.Source(
    "int4_batch",
    ops=("int4_linear",),
    functions=("int4_batch",),
    arguments=BATCH_ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    otherwise="torch computes INT4 linears",
    example=KIND | {"FLOAT32": 0, "TILES": 2, "DEPTH": 2},
)
DEQUANTIZE = build.Source(
    "int4_dequantize",
    ops=("int4_linear",),
    functions=("int4_dequantize",),
    arguments=DEQUANTIZE_ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    example=KIND,
)


@dataclass(frozen=True)
class One:
    """`int4_one.cu` over `blocks` blocks, one an SM: each owns up to `hold` row tiles and adds up `round` of them at a
    time; `depth` stages are under way, `tokens` tokens a launch. `shared`: bytes of shared memory."""

    blocks: int
    hold: int
    round: int
    depth: int
    tokens: int
    shared: int


def shift_of(k: int, groups: int) -> int | None:
    """By how many bits a column is shifted to its group; None where no shift does."""
    columns = k // groups
    if groups == 1:
        return ALL
    return None if columns & (columns - 1) or columns < 32 else columns.bit_length() - 1


def group_of(shift: int) -> int:
    """GROUP: columns that the lanes of a product have of one group."""
    return 1 << min(shift, 7)


@cache
def one_plan(tokens: int, n: int, k: int, groups: int, device: build.Device) -> One | None:
    """None where k or what a block holds of scales is not for it."""
    shift, tiles, slices = shift_of(k, groups), -(-n // ROWS), k // SLICE
    if shift is None or k % SLICE:
        return None
    hold, parts = -(-tiles // device.sms), SLICE // group_of(shift)
    for count in range(min(tokens, FEW), 0, -1):
        sums = WARPS * count * ROWS * 4
        round = max(1, min(hold, ROUND // sums))
        x = slices * count * (2 * SLICE + parts * 4 + 4)
        for depth in ONE_DEPTHS:
            shared = depth * (UNITS * UNIT + 16) + 16 + x + hold * groups * 64 + round * sums
            if shared <= device.shared:
                return One(device.sms, hold, round, depth, count, shared)
    return None


def footprint(tiles: int, groups: int) -> Footprint:
    """Of `int4_batch.cu`: a row tile has scales and zeros besides."""
    return Footprint(UNIT, Variant(LINEAR, tiles).sums, groups * 64)


@cache
def batch_plan(tiles: int, n: int, k: int, groups: int, device: build.Device, portable: bool = False) -> Tiling | None:
    """For `tiles` column tiles of 8 tokens; None where k is not for it, or a row tile does not fit. `portable`: of the
    portable form, whose blocks have fewer warps."""
    shift = shift_of(k, groups)
    if shift is None or k % COLUMNS:
        return None
    most = WARPS if not portable else 8 if group_of(shift) == 32 else 12
    variant = Variant(LINEAR, tiles, warps=((most,), (most // 2,), (most // 4,)))
    return stream.plan(-(-n // ROWS), -(-k // SLICE), variant, footprint(tiles, groups), device.sms, device.shared)


def _kind(dtype: torch.dtype, scale: Tensor, shift: int = ALL) -> dict[str, int]:
    half, wide_range = int(dtype == torch.float16), int(scale.dtype == torch.bfloat16)
    return {"HALF": half, "SCALE_BF16": wide_range, "GROUP": group_of(shift)}


def _sizes(x: Tensor, weight: Mapping[str, Any]) -> dict[str, int]:
    (n, bytes_), groups = weight["codes"].shape, weight["scale"].shape[1]
    shift = shift_of(2 * bytes_, groups)
    assert shift is not None
    return {"tokens": x.numel() // (2 * bytes_), "n": n, "k": 2 * bytes_, "groups": groups, "shift": shift}


def _defines(x: Tensor, weight: Mapping[str, Any], y: Tensor, sizes: Mapping[str, int], depth: int) -> dict[str, int]:
    kind = _kind(x.dtype, weight["scale"], sizes["shift"])
    return kind | {"FLOAT32": int(y.dtype == torch.float32), "DEPTH": depth}


def _one(x: Tensor, weight: Mapping[str, Any], order: Tensor | None, y: Tensor, plan: One) -> None:
    """`weight`: codes, scale, zero, bias."""
    sizes = _sizes(x, weight)
    n, k, box = sizes["n"], sizes["k"], gcd(sizes["k"] // SLICE, UNITS)
    defines = _defines(x, weight, y, sizes, plan.depth) | {"WARPS": WARPS, "PACE": PACE}
    codes = sliced_tensor_map(weight["codes"].data_ptr(), n, k // 2, (SLICE // 2, ROWS, box), swizzle=True)
    x, y, how = x.view(-1, k), y.view(-1, n), {"hold": plan.hold, "round": plan.round, "box": box}
    for first in range(0, x.shape[0], plan.tokens):
        rows = slice(first, first + plan.tokens)
        given = {**weight, "codes": codes, "x": x[rows], "y": y[rows], "order": order}
        given |= sizes | how | {"tokens": len(x[rows])}
        launch(ONE, defines, Launch((plan.blocks, 1, 1), (WARPS + 1) * 32, plan.shared), **given)


def _batch(x: Tensor, weight: Mapping[str, Any], y: Tensor, tiles: int, tiling: Tiling) -> None:
    """`weight`: codes, scale, zero, bias."""
    sizes = _sizes(x, weight)
    defines = _defines(x, weight, y, sizes, tiling.depth) | {"TILES": tiles}
    grid = tiling.blocks, 1, -(-sizes["tokens"] // (8 * tiles))
    shared = tiling.shared(footprint(tiles, sizes["groups"]))
    how = Launch(grid, tiling.across * tiling.down * 32, shared)
    launch(BATCH, defines, how, x=x, **weight, y=y, **sizes, across=tiling.across, hold=tiling.hold)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [n, k/2] -> [n, k] in bfloat16 or float16, in the order of the groups, one launch."""
    n, k = codes.shape[0], codes.shape[1] * 2
    y = torch.empty(n, k, dtype=dtype, device=codes.device)
    tensors = {"codes": aligned(codes), "scale": scale, "zero": zero}
    return stream.dequantize(DEQUANTIZE, y, 8, _kind(dtype, scale), **tensors, n=n, k=k, groups=scale.shape[1])


class INT4:
    """Linears, by kernels of their own; see `ops.coded.Kernels`."""

    def takes(self, x: Tensor) -> bool:
        return x.is_cuda and x.numel() > 0 and x.dtype in HALVES and BATCH.is_built(x.device.index)

    def weight(
        self, shape: tuple[int, int, int], tensors: Mapping[str, Any], numbers: tuple[int, ...]
    ) -> Weight | None:
        return None if tensors and tensors["scale"].dtype not in HALVES else Weight(shape, tensors)

    def reads_linear(self, weight: Weight, format: Any, dtype: torch.dtype, device: int) -> bool:
        if dtype not in HALVES or not BATCH.is_built(device):
            return False
        _, n, k = weight.shape
        groups, portable = max(1, k // format.columns), BATCH.is_portable(device)
        return batch_plan(1, n, k, groups, build.device(device), portable) is not None

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, float32: bool) -> Tensor:
        """x [..., k] -> [..., n], in float32 where asked."""
        (_, n, k), (codes, scale, zero, order) = weight.shape, weight.tensors.values()
        groups, tokens, index = scale.shape[1], x.numel() // k, x.device.index
        if tokens <= MAX_TOKENS:
            y = x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if float32 else x.dtype)
            given: dict[str, Any] = {"codes": aligned(codes), "scale": aligned(scale), "zero": aligned(zero)}
            given["bias"] = None if bias is None else bias.float()
            device = build.device(index)
            if tokens <= FEW and ONE.is_built(index) and (one := one_plan(tokens, n, k, groups, device)):
                _one(aligned(x), given, None if order is None else aligned(order), y, one)
                return y
            tiles = 1 if tokens <= 8 else 2
            if batch := batch_plan(tiles, n, k, groups, device, BATCH.is_portable(index)):
                _batch(aligned(x) if order is None else x.index_select(-1, order), given, y, tiles, batch)
                return y
        x = x if order is None else x.index_select(-1, order)
        return stream.dense_linear(x, dequantize(codes, scale, zero, x.dtype), bias, float32)


KERNELS = INT4()
