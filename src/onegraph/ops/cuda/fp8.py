"""FP8 linears and routed experts on a GPU: how `fp8.cu` is chosen and cut, and which calls it takes.

Few tokens run straight from the codes, in one launch of `fp8.cu` (experts: two). More of them decode the weight once
and multiply through cuBLAS, two launches. What runs how follows from shape, dtype and device alone.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from onegraph.ops.cuda import build

ROWS, PAIRS = 16, 255  # as in fp8.cu, routes.cuh
SLICE = 128  # columns that a warp takes at a time
WARPS = 16  # of a block at most
PASS, FEW_PASS = 16, 8  # tokens of experts that share a reading: where those of an expert are moved together, and not
DEPTHS = (4, 3, 2)  # units that a warp has under way: of experts the most that fit,
LINEAR_DEPTHS = (3, 2)  # of a linear what is expected to be best: activations queue behind the ring's first filling
MOST_TILES = 4  # column tiles of 8 tokens that a linear multiplies in one pass
MAX_TOKENS = 64  # of a linear; above, decoding once is cheaper than reading the codes again for every pass
ROUTES = 8 * 1024  # bytes of a block's shared memory that the routes of experts take, rounded up
ALIGNMENT = 16  # bytes, of every pointer; columns of k that one copy brings: k comes in multiples
WHOLE = 31  # column_shift where all of k shares a scale
LINEAR, GATE_UP, DOWN = 0, 1, 2  # MODE

ARGUMENTS = build.Arguments(
    pointers=("x", "codes", "scale", "bias", "experts", "weights", "y"),
    ints=(
        "tokens", "n", "k", "matrices", "top_k", "row_shift", "column_shift", "scale_pitch", "wide", "across", "hold",
    ),
    floats=("limit", "alpha", "shift"),
)  # fmt: skip
KERNEL = build.Source(
    "fp8",
    functions=("fp8_linear",),
    arguments=ARGUMENTS,
    capabilities=build.EVERY,
    example={"MODE": LINEAR, "HALF": 0, "TILES": 1, "TOGETHER": 0, "SLICE": SLICE, "GRAIN": 128, "DEPTH": 3},
)
DEQUANTIZE_ARGUMENTS = build.Arguments(
    pointers=("codes", "scale", "y"), ints=("matrices", "n", "k", "row_shift", "column_shift", "scale_pitch")
)
DEQUANTIZE = build.Source(
    "fp8_dequantize",
    functions=("fp8_dequantize",),
    arguments=DEQUANTIZE_ARGUMENTS,
    capabilities=build.EVERY,
    example={"OUT": 0},
)
OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


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
    if rows & (rows - 1) or columns & (columns - 1) or 0 < columns < 32 or k % ALIGNMENT:
        return None
    if not columns:
        return Blocks(rows.bit_length() - 1, WHOLE, 1, 128)
    return Blocks(rows.bit_length() - 1, columns.bit_length() - 1, -(-k // columns), 32 if columns < 128 else 128)


@dataclass(frozen=True)
class Plan:
    """How one shape is cut over the GPU: `blocks` blocks, one on each SM; in each, `across` warps side by side in k,
    `down` times beside one another over the block's row tiles, `hold` of which are added up at a time; `depth` units of
    each warp are under way."""

    blocks: int
    across: int
    down: int
    hold: int
    depth: int

    def shared(self, slot: int, sums: int) -> int:
        """Bytes of shared memory: rings of units of `slot` bytes, sums (`sums` bytes of a warp's row tile)."""
        return self.across * (self.down * self.depth * slot + self.hold * sums)


def slot_bytes(grain: int, slice: int = SLICE) -> int:
    """Of a unit in the ring: codes and scales."""
    return ROWS * (slice + slice // grain * 4)


def sums(mode: int, column_tiles: int = 1, *, together: bool = False) -> int:
    """Bytes of a warp's sums of a row tile, as in fp8.cu."""
    return ROWS * (PASS + 1) * 4 if mode == DOWN and together else column_tiles * 512


@cache
def plan(
    row_tiles: int, slices: int, slot: int, sums: int, blocks: int, depths: tuple[int, ...], room: int
) -> Plan | None:
    """`row_tiles` tiles of 16 rows with `slices` slices of k over at most `blocks` blocks: the first of `depths`, with
    the most warps side by side, where all sums fit into `room` bytes of shared memory beside the rings; else what adds
    up as many tiles at a time as fit. None where not one does."""
    blocks = min(row_tiles, blocks)
    each = -(-row_tiles // blocks)
    found = None
    for warps in (WARPS, WARPS // 2):
        across = -(-slices // -(-slices // warps))
        down = min(warps // across, each)
        for depth in depths:
            fit = (room - Plan(blocks, across, down, 0, depth).shared(slot, sums)) // (across * sums)
            if fit < down:
                continue
            rounds = -(-each // fit)
            if found is None or (rounds == 1 and found.hold < each):
                found = Plan(blocks, across, down, max(down, -(-each // rounds)), depth)
    return found


def takes(x: Tensor) -> bool:
    """Whether a kernel here computes on `x`."""
    return x.is_cuda and x.numel() > 0 and x.dtype in (torch.bfloat16, torch.float16) and available(x.device.index)


def takes_codes(codes: Tensor) -> bool:
    """Whether they are decoded here."""
    return codes.is_cuda and codes.numel() > 0 and available(codes.device.index)


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    return KERNEL.usable(device, "torch computes FP8 linears")


@cache
def _kernel(
    mode: int, half: bool, column_tiles: int, together: bool, grain: int, depth: int, slice: int, device: int
) -> build.Kernel:
    defines = {"MODE": mode, "HALF": int(half), "TILES": column_tiles, "TOGETHER": int(together)}
    return KERNEL.load(defines | {"SLICE": slice, "GRAIN": grain, "DEPTH": depth}, device)[0]


@cache
def _dequantize_kernel(dtype: torch.dtype, device: int) -> build.Kernel:
    return DEQUANTIZE.load({"OUT": OUT[dtype]}, device)[0]


def _room(device: int) -> int:
    return build.device(device).shared - ROUTES


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def run(
    mode: int,
    tensors: tuple[Tensor | None, ...],
    y: Tensor,
    sizes: tuple[int, int, int, int, int],
    scaled: Blocks,
    chosen: Plan,
    *,
    column_tiles: int = 1,
    together: bool = False,
    slice: int = SLICE,
    gate: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> None:
    """Launches one mode. `tensors`: x, codes, scale, bias, experts, weights; `sizes`: tokens, n, k, matrices, top_k;
    `gate`: limit, alpha, shift."""
    tokens, *_, matrices, _ = sizes
    x = tensors[0]
    assert x is not None
    half = x.dtype == torch.float16
    kernel = _kernel(mode, half, column_tiles, together, scaled.grain, chosen.depth, slice, y.device.index)
    pointers = dict(zip(("x", "codes", "scale", "bias", "experts", "weights"), tensors, strict=True))
    arguments = ARGUMENTS.pack(
        **build.addresses(**pointers, y=y),
        **dict(zip(("tokens", "n", "k", "matrices", "top_k"), sizes, strict=True)),
        row_shift=scaled.row_shift,
        column_shift=scaled.column_shift,
        scale_pitch=scaled.pitch,
        wide=int(y.dtype == torch.float32),
        across=chosen.across,
        hold=chosen.hold,
        **dict(zip(("limit", "alpha", "shift"), gate, strict=True)),
    )
    grid = chosen.blocks, matrices if mode == LINEAR else 1, -(-tokens // (PASS if together else 8 * column_tiles))
    with torch.cuda.device(y.device):  # the driver launches in the current context
        stream = torch.cuda.current_stream().cuda_stream
        shared = chosen.shared(slot_bytes(scaled.grain, slice), sums(mode, column_tiles, together=together))
        kernel.launch(grid, chosen.across * chosen.down * 32, shared, 1, stream, arguments)


def linear_tiles(tokens: int) -> int:
    """Column tiles of 8 tokens of a pass."""
    return 1 if tokens <= 8 else 2 if tokens <= 16 else MOST_TILES


def _linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor, scaled: Blocks) -> bool:
    """Linears side by side; x [..., groups, k], codes [groups, n, k] -> y [..., groups, n]. Whether that was done."""
    groups, n, k = codes.shape
    tokens, sms, room = x.numel() // (groups * k), build.device(x.device.index).sms, _room(x.device.index)
    tiles = linear_tiles(tokens)
    cut = -(-n // ROWS), -(-k // SLICE), slot_bytes(scaled.grain), sums(LINEAR, tiles), max(1, sms // groups)
    chosen = plan(*cut, LINEAR_DEPTHS, room)
    if chosen is None:
        return False
    inputs = (_aligned(x), _aligned(codes), scale, bias, None, None)
    run(LINEAR, inputs, y, (tokens, n, k, groups, 1), scaled, chosen, column_tiles=tiles)
    return True


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, rows: int, columns: int, float32: bool
) -> Tensor | None:
    """x [..., k] -> [..., n]; see `ops.fp8.fp8_linear`. None: not here."""
    n, k = codes.shape
    scaled = blocks(rows, columns, k)
    if scaled is None:
        return None
    if x.numel() <= MAX_TOKENS * k:
        y = x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if float32 else x.dtype)
        if _linear(x, codes.unsqueeze(0), scale, None if bias is None else bias.float(), y, scaled):
            return y
    weight = _dequantize(codes, scale, scaled, x.dtype)
    if not float32:
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    y = torch.mm(x.reshape(-1, k), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], n)
    return y if bias is None else y.add_(bias)


def grouped_linear(x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor | None:
    """x [..., G, k] -> [..., G, n]; see `ops.fp8.fp8_grouped_linear`. None: not here."""
    groups, n, k = codes.shape
    scaled = blocks(rows, columns, k)
    if scaled is None:
        return None
    tokens = x.numel() // (groups * k)
    if tokens <= MAX_TOKENS:
        y = x.new_empty(*x.shape[:-1], n)
        if _linear(x, codes, scale, None, y, scaled):
            return y
    weight = _dequantize(codes, scale, scaled, x.dtype)
    y = torch.bmm(x.reshape(tokens, groups, k).transpose(0, 1), weight.transpose(1, 2))
    return y.transpose(0, 1).reshape(*x.shape[:-1], n)


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
    limit: float,
    alpha: float,
    shift: float,
) -> Tensor | None:
    """x [T, D] -> [T, D]; see `ops.fp8.fp8_experts`. None: not here. Two launches: gate, up and SwiGLU; down, weighted
    and added up in a fixed order. Of up to 16 tokens up to eight share one reading of an expert's weights."""
    (tokens, top_k), matrices, dim, wide = experts.shape, gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2
    scaled, down_scaled = blocks(rows, columns, dim), blocks(rows, columns, wide)
    if scaled is None or down_scaled is None or top_k * FEW_PASS > PAIRS:
        return None
    together = tokens > FEW_PASS and top_k * PASS <= PAIRS
    most = min(min(tokens, PASS if together else FEW_PASS) * top_k, matrices * (1 + together))  # readings of a pass
    sms, room, slot = build.device(x.device.index).sms, _room(x.device.index), slot_bytes(scaled.grain)
    first = plan(most * (wide // 8), -(-dim // SLICE), slot, sums(GATE_UP), sms, DEPTHS, room)
    down_sums = sums(DOWN, together=together)
    second = plan(-(-dim // ROWS), most * -(-wide // SLICE), slot, down_sums, sms, DEPTHS, room)
    if first is None or second is None:
        return None
    # Every copy comes before the first launch: the second reads the experts while the first may still run.
    x, gate_up, down = map(_aligned, (x, gate_up, down))
    hidden, y = x.new_empty(tokens * top_k, wide), torch.empty_like(x)
    sizes, gate = (tokens, 2 * wide, dim, matrices, top_k), (limit, alpha, shift)
    run(
        GATE_UP, (x, gate_up, gate_up_scale, None, experts, weights), hidden, sizes, scaled, first,
        together=together, gate=gate,
    )  # fmt: skip
    sizes = tokens, dim, wide, matrices, top_k
    run(DOWN, (hidden, down, down_scale, None, experts, weights), y, sizes, down_scaled, second, together=together)
    return y


def dequantize(codes: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
    """codes [..., n, k] -> [..., n, k] in bfloat16, float16 or float32, one launch. None: not here."""
    scaled = blocks(rows, columns, codes.shape[-1])
    return None if scaled is None else _dequantize(codes, scale, scaled, dtype)


def _dequantize(codes: Tensor, scale: Tensor, scaled: Blocks, dtype: torch.dtype) -> Tensor:
    *_, n, k = codes.shape
    y, codes = torch.empty(codes.shape, dtype=dtype, device=codes.device), _aligned(codes)
    arguments = DEQUANTIZE_ARGUMENTS.pack(
        **build.addresses(codes=codes, scale=scale, y=y),
        matrices=y.numel() // (n * k),
        n=n,
        k=k,
        row_shift=scaled.row_shift,
        column_shift=scaled.column_shift,
        scale_pitch=scaled.pitch,
    )
    count = min(-(-y.numel() // (16 * 256)), 16 * build.device(y.device.index).sms)
    kernel = _dequantize_kernel(dtype, y.device.index)
    with torch.cuda.device(y.device):
        kernel.launch((count, 1, 1), 256, 0, 1, torch.cuda.current_stream().cuda_stream, arguments)
    return y
