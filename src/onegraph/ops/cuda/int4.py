"""INT4 linears on a GPU: how the kernels are cut, and which calls each takes.

Few tokens run straight from the codes: up to four on `int4_one.cu`, whose codes come through the copy engine, which
asks for k in multiples of 256; more, other k, and all on cards without that engine on `int4_batch.cu`, 16 to a pass.
Above `MAX_TOKENS`, for k that is no multiple of 64 and for groups that are no power of two, the weight is decoded once
and multiplied through cuBLAS, two launches. What runs how follows from shape, dtype and device alone.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.tensor_map import sliced_tensor_map

ROWS, SLICE = 16, 256  # of a unit, as in the sources
UNIT = ROWS * SLICE // 2  # bytes of its codes
WARPS = 16  # of a block, that multiply
UNITS, PACE = 8, 300  # one: units of a stage; nanoseconds between the first stages
FEW = 4  # one: tokens of a launch, whose upper and lower bytes are the eight columns of a product
ONE_DEPTHS, BATCH_DEPTHS = (8, 6, 4, 2), (2,)  # stages, or steps of a warp, under way: the first that fit
ROUND = 32 << 10  # bytes of sums that a round of int4_one.cu may hold, unless one tile has more
COLUMNS = 64  # of k, multiples of which int4_batch.cu takes
MAX_TOKENS = 32  # above, decoding once is cheaper than reading the codes again for every 16 tokens
ALIGNMENT = 16  # bytes, of every pointer
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
    example=KIND | {"FLOAT32": 0, "TILES": 2, "DEPTH": BATCH_DEPTHS[0]},
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


@dataclass(frozen=True)
class Batch:
    """`int4_batch.cu` over `blocks` blocks, one an SM; in each, `across` warps side by side in k, `down` times beside
    one another over the block's row tiles, `hold` to a round; `depth` steps of each warp are under way."""

    blocks: int
    across: int
    down: int
    hold: int
    depth: int
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


@cache
def batch_plan(tiles: int, n: int, k: int, groups: int, device: build.Device, portable: bool = False) -> Batch | None:
    """For `tiles` column tiles of 8 tokens; None where k is not for it, or a row tile does not fit. `portable`: of the
    portable form, whose blocks have fewer warps."""
    shift = shift_of(k, groups)
    if shift is None or k % COLUMNS:
        return None
    most = WARPS if not portable else 8 if group_of(shift) == 32 else 12
    row_tiles, slices = -(-n // ROWS), -(-k // SLICE)
    blocks = min(row_tiles, device.sms)
    each = -(-row_tiles // blocks)
    for depth, warps in product(BATCH_DEPTHS, (most, most // 2, most // 4)):
        across = -(-slices // -(-slices // warps))
        down = min(warps // across, each)
        held = groups * 64 + across * tiles * 512  # bytes of a row tile
        rings = across * down * depth * UNIT
        fit = (device.shared - rings) // held
        if fit < down:
            continue
        hold = max(down, -(-each // -(-each // fit)))
        return Batch(blocks, across, down, hold, depth, rings + hold * held)
    return None


def takes(x: Tensor, scale: Tensor) -> bool:
    """Whether a kernel here computes on `x`, with scales of this dtype."""
    kinds = (torch.bfloat16, torch.float16)
    return x.is_cuda and x.numel() > 0 and x.dtype in kinds and scale.dtype in kinds and available(x.device.index)


def reads(n: int, k: int, columns: int, dtype: torch.dtype, device: int) -> bool:
    """Whether linears with scales by groups of so many columns are computed here from the codes."""
    if dtype not in (torch.bfloat16, torch.float16) or not available(device):
        return False
    return batch_plan(1, n, k, max(1, k // columns), build.device(device), _portable(device)) is not None


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    return BATCH.usable(device, "torch computes INT4 linears")


@cache
def one_available(device: int) -> bool:
    """Whether few tokens have a kernel of their own on this GPU."""
    return ONE.usable(device, "int4_batch.cu computes few tokens, too")


@cache
def _portable(device: int) -> bool:
    """Whether this GPU runs the portable form of `int4_batch.cu`."""
    return BATCH.portable(torch.cuda.get_device_capability(device))


def _kind(dtype: torch.dtype, scale: Tensor, shift: int = ALL) -> dict[str, int]:
    half, wide_range = int(dtype == torch.float16), int(scale.dtype == torch.bfloat16)
    return {"HALF": half, "SCALE_BF16": wide_range, "GROUP": group_of(shift)}


@cache
def _kernel(source: build.Source, device: int, *defines: tuple[str, int]) -> build.Kernel:
    return source.load(dict(defines), device)[0]


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None, bias: Tensor | None, float32: bool
) -> Tensor:
    """x [..., k] -> [..., n]; see `ops.int4.int4_linear`."""
    n, k, groups = codes.shape[0], codes.shape[1] * 2, scale.shape[1]
    tokens, device = x.numel() // k, build.device(x.device.index)
    if tokens <= MAX_TOKENS:
        y = torch.empty(*x.shape[:-1], n, dtype=torch.float32 if float32 else x.dtype, device=x.device)
        scale, zero = _aligned(scale), _aligned(zero)
        wide_bias = None if bias is None else bias.float()
        few = tokens <= FEW and one_available(x.device.index)
        if few and (one := one_plan(tokens, n, k, groups, device)):
            aligned = None if order is None else _aligned(order)
            _one(_aligned(x), _aligned(codes), scale, zero, aligned, wide_bias, y, one)
            return y
        if batch := batch_plan(1 if tokens <= 8 else 2, n, k, groups, device, _portable(x.device.index)):
            x = _aligned(x) if order is None else x.index_select(-1, order)
            _batch(x, _aligned(codes), scale, zero, wide_bias, y, batch)
            return y
    x = x if order is None else x.index_select(-1, order)
    weight = dequantize(codes, scale, zero, x.dtype)
    if not float32:
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    y = torch.mm(x.view(-1, k), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], n)
    return y if bias is None else y.add_(bias)


def _one(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    plan: One,
) -> None:
    n, k, groups = codes.shape[0], codes.shape[1] * 2, scale.shape[1]
    shift, box = shift_of(k, groups), gcd(k // SLICE, UNITS)
    assert shift is not None
    defines = _kind(x.dtype, scale, shift) | {"FLOAT32": int(y.dtype == torch.float32)}
    defines |= {"WARPS": WARPS, "DEPTH": plan.depth, "PACE": PACE}
    kernel = _kernel(ONE, y.device.index, *defines.items())
    codes_map = sliced_tensor_map(codes.data_ptr(), n, k // 2, (SLICE // 2, ROWS, box), swizzle=True)
    x, y = x.view(-1, k), y.view(-1, n)
    with torch.cuda.device(y.device):  # the driver launches in the current context
        stream = torch.cuda.current_stream().cuda_stream
        for first in range(0, x.shape[0], plan.tokens):
            rows, out = x[first : first + plan.tokens], y[first : first + plan.tokens]
            arguments = ONE_ARGUMENTS.pack(
                codes=codes_map,
                **build.addresses(x=rows, scale=scale, zero=zero, order=order, bias=bias, y=out),
                tokens=rows.shape[0],
                n=n,
                k=k,
                groups=groups,
                shift=shift,
                hold=plan.hold,
                round=plan.round,
                box=box,
            )
            kernel.launch((plan.blocks, 1, 1), (WARPS + 1) * 32, plan.shared, 1, stream, arguments)


def _batch(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, y: Tensor, plan: Batch) -> None:
    n, k, groups = codes.shape[0], codes.shape[1] * 2, scale.shape[1]
    tokens, shift = x.numel() // k, shift_of(k, groups)
    assert shift is not None
    tiles = 1 if tokens <= 8 else 2
    defines = _kind(x.dtype, scale, shift) | {
        "FLOAT32": int(y.dtype == torch.float32),
        "TILES": tiles,
        "DEPTH": plan.depth,
    }
    kernel = _kernel(BATCH, y.device.index, *defines.items())
    arguments = BATCH_ARGUMENTS.pack(
        **build.addresses(x=x, codes=codes, scale=scale, zero=zero, bias=bias, y=y),
        tokens=tokens,
        n=n,
        k=k,
        groups=groups,
        shift=shift,
        across=plan.across,
        hold=plan.hold,
    )
    with torch.cuda.device(y.device):
        stream = torch.cuda.current_stream().cuda_stream
        threads = plan.across * plan.down * 32
        kernel.launch((plan.blocks, 1, -(-tokens // (8 * tiles))), threads, plan.shared, 1, stream, arguments)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [n, k/2] -> [n, k] in bfloat16 or float16, in the order of the groups, one launch."""
    n, k = codes.shape[0], codes.shape[1] * 2
    y = torch.empty(n, k, dtype=dtype, device=codes.device)
    codes = _aligned(codes)
    arguments = DEQUANTIZE_ARGUMENTS.pack(
        **build.addresses(codes=codes, scale=scale, zero=zero, y=y), n=n, k=k, groups=scale.shape[1]
    )
    blocks = min(-(-y.numel() // (8 * 256)), 16 * build.device(y.device.index).sms)
    kernel = _kernel(DEQUANTIZE, y.device.index, *_kind(dtype, scale).items())
    with torch.cuda.device(y.device):
        kernel.launch((blocks, 1, 1), 256, 0, 1, torch.cuda.current_stream().cuda_stream, arguments)
    return y
