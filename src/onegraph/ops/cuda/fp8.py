"""FP8 linears and routed experts on a GPU: how `fp8.cu` is chosen and cut, and which calls it takes.

Few tokens run straight from the codes, in one launch of `fp8.cu` (experts: two). More of them decode the weight once
and multiply through cuBLAS, two launches. What runs how follows from shape, dtype and device alone.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from onegraph.ops.cuda import build

ROWS, PAIRS = 16, 255  # as in fp8.cu, routes.cuh
SLICE = 128  # columns that a warp takes at a time
WARPS = 16  # of a block at most
PASS, FEW_PASS = 16, 8  # tokens of experts that share a reading: where those of an expert are moved together, and not
MOST_EARLY = 6  # units requested before activations: all
FEW_TILES = 4  # row tiles of a block, below which activations of more than 8 tokens come through the ring
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
DEQUANTIZE_ARGUMENTS = build.Arguments(
    pointers=("codes", "scale", "y"), ints=("matrices", "n", "k", "row_shift", "column_shift", "scale_pitch")
)
DEQUANTIZE = build.Source(
    "fp8_dequantize",
    ops=("fp8_dequantize", "mxfp8_dequantize"),
    functions=("fp8_dequantize",),
    arguments=DEQUANTIZE_ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
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
class Variant:
    """What is set when compiled: `tiles` column tiles of 8 tokens; `together`: experts of up to 16 tokens; `ring_x`:
    activations through the ring; `warps` of a block at most; `slice` columns of a unit; `early` units at most requested
    before the first activations."""

    mode: int
    tiles: int = 1
    together: bool = False
    ring_x: bool = False
    warps: int = WARPS
    slice: int = SLICE
    early: int = MOST_EARLY

    @property
    def tokens(self) -> int:
        """Of a pass."""
        return PASS if self.together else 8 * self.tiles

    @property
    def sums(self) -> int:
        """Bytes of a warp's sums of a row tile."""
        return ROWS * (PASS + 1) * 4 if self.mode == DOWN and self.together else self.tiles * 512

    def slot(self, grain: int) -> int:
        """Bytes of a unit in the ring: codes, scales, activations."""
        return ROWS * (self.slice + self.slice // grain * 4) + self.ring_x * self.tiles * self.slice * 16

    def defines(self, half: bool, grain: int, depth: int) -> dict[str, int]:
        return {
            "MODE": self.mode, "HALF": int(half), "TILES": self.tiles, "TOGETHER": int(self.together),
            "RING_X": int(self.ring_x), "SLICE": self.slice, "GRAIN": grain, "DEPTH": depth, "WARPS": self.warps,
            "EARLY": min(self.early, depth),
        }  # fmt: skip


KERNEL = build.Source(
    "fp8",
    ops=(
        *("fp8_linear", "fp8_grouped_linear", "fp8_experts"),
        *("mxfp8_linear", "mxfp8_grouped_linear", "mxfp8_experts"),
    ),
    functions=("fp8_linear",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example=Variant(LINEAR).defines(half=False, grain=128, depth=3),
)


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

    def shared(self, variant: Variant, grain: int) -> int:
        """Bytes of shared memory: rings and sums."""
        return self.across * (self.down * self.depth * variant.slot(grain) + self.hold * variant.sums)


@cache
def plan(
    row_tiles: int, k: int, readings: int, variant: Variant, grain: int, blocks: int, depths: tuple[int, ...], room: int
) -> Plan | None:
    """`row_tiles` tiles of 16 rows by `readings` times k over at most `blocks` blocks: the first of `depths`, with the
    most warps side by side, where all sums fit into `room` bytes of shared memory beside the rings; else what adds up
    as many tiles at a time as fit. None where not one does."""
    blocks, slices = min(row_tiles, blocks), -(-k // variant.slice) * readings
    each = -(-row_tiles // blocks)
    found = None
    for warps in (variant.warps, variant.warps // 2):
        across = -(-slices // -(-slices // warps))
        down = min(warps // across, each)
        for depth in depths:
            fit = (room - Plan(blocks, across, down, 0, depth).shared(variant, grain)) // (across * variant.sums)
            if fit < down:
                continue
            rounds = -(-each // fit)
            if found is None or (rounds == 1 and found.hold < each):
                found = Plan(blocks, across, down, max(down, -(-each // rounds)), depth)
    return found


def takes(x: Tensor) -> bool:
    """Whether a kernel here computes on `x`."""
    return x.is_cuda and x.numel() > 0 and x.dtype in (torch.bfloat16, torch.float16) and available(x.device.index)


def reads(rows: int, columns: int, k: int, dtype: torch.dtype, device: int) -> bool:
    """Whether linears with scales of such blocks are computed here from the codes."""
    return blocks(rows, columns, k) is not None and dtype in (torch.bfloat16, torch.float16) and available(device)


def takes_codes(codes: Tensor) -> bool:
    """Whether they are decoded here."""
    return codes.is_cuda and codes.numel() > 0 and available(codes.device.index)


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    return KERNEL.usable(device, "torch computes FP8 linears")


@cache
def _kernel(variant: Variant, half: bool, grain: int, depth: int, device: int) -> build.Kernel:
    return KERNEL.load(variant.defines(half, grain, depth), device)[0]


@cache
def _dequantize_kernel(dtype: torch.dtype, device: int) -> build.Kernel:
    return DEQUANTIZE.load({"OUT": OUT[dtype]}, device)[0]


def _room(device: int) -> int:
    return build.device(device).shared - ROUTES


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def run(
    variant: Variant,
    tensors: tuple[Tensor | None, ...],
    y: Tensor,
    sizes: tuple[int, int, int, int, int],
    scaled: Blocks,
    chosen: Plan,
    gate: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> None:
    """Launches one mode. `tensors`: x, codes, scale, bias, experts, weights; `sizes`: tokens, n, k, matrices, top_k;
    `gate`: limit, alpha, shift."""
    tokens, *_, matrices, _ = sizes
    x = tensors[0]
    assert x is not None
    kernel = _kernel(variant, x.dtype == torch.float16, scaled.grain, chosen.depth, y.device.index)
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
    grid = chosen.blocks, matrices if variant.mode == LINEAR else 1, -(-tokens // variant.tokens)
    with torch.cuda.device(y.device):  # the driver launches in the current context
        stream, shared = torch.cuda.current_stream().cuda_stream, chosen.shared(variant, scaled.grain)
        kernel.launch(grid, chosen.across * chosen.down * 32, shared, 1, stream, arguments)


# Linears of up to so many tokens: how, and the depths to try, where a block has row tiles enough, and where it has few.
# Longer rings are no quicker where activations are loaded: they queue behind the ring's first filling.
ONE_PASS = Variant(LINEAR, ring_x=True, warps=8, slice=256, early=2), (2,)
LINEARS = {
    8: (ONE_PASS, ONE_PASS),
    16: ((Variant(LINEAR, 2), (3, 2)), (Variant(LINEAR, 2, ring_x=True, warps=8), (4, 3, 2))),
    MAX_TOKENS: ((Variant(LINEAR, 4, warps=8), (4, 3, 2)), (Variant(LINEAR, 4, ring_x=True, warps=8), (4, 3, 2))),
}
# Experts of one token, and of more: how, and the depths to try.
EXPERTS = {
    1: (Variant(GATE_UP, warps=8, slice=256), (2,)),
    2: (Variant(GATE_UP), (4, 3, 2)),
}


@cache
def linear_cut(
    tokens: int, n: int, k: int, groups: int, grain: int, sms: int, room: int
) -> tuple[Variant, Plan] | None:
    """How linears side by side run, None where they do not fit."""
    row_tiles, blocks = -(-n // ROWS), max(1, sms // groups)
    few = row_tiles < FEW_TILES * min(row_tiles, blocks)
    variant, depths = next(ways for most, ways in LINEARS.items() if tokens <= most)[few]
    chosen = plan(row_tiles, k, 1, variant, grain, blocks, depths, room)
    return None if chosen is None else (variant, chosen)


def _linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor, scaled: Blocks) -> bool:
    """Linears side by side; x [..., groups, k], codes [groups, n, k] -> y [..., groups, n]. Whether that was done."""
    groups, n, k = codes.shape
    tokens, device = x.numel() // (groups * k), x.device.index
    cut = linear_cut(tokens, n, k, groups, scaled.grain, build.device(device).sms, _room(device))
    if cut is None:
        return False
    inputs = (_aligned(x), _aligned(codes), scale, bias, None, None)
    run(cut[0], inputs, y, (tokens, n, k, groups, 1), scaled, cut[1])
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
    sms, room, grain = build.device(x.device.index).sms, _room(x.device.index), scaled.grain
    like, depths = EXPERTS[min(tokens, 2)]
    first_variant, second_variant = (replace(like, mode=mode, together=together) for mode in (GATE_UP, DOWN))
    first = plan(most * (wide // 8), dim, 1, first_variant, grain, sms, depths, room)
    second = plan(-(-dim // ROWS), wide, most, second_variant, grain, sms, depths, room)
    if first is None or second is None:
        return None
    # Every copy comes before the first launch: the second reads the experts while the first may still run.
    x, gate_up, down = map(_aligned, (x, gate_up, down))
    hidden, y = x.new_empty(tokens * top_k, wide), torch.empty_like(x)
    sizes, inputs = (tokens, 2 * wide, dim, matrices, top_k), (x, gate_up, gate_up_scale, None, experts, weights)
    run(first_variant, inputs, hidden, sizes, scaled, first, (limit, alpha, shift))
    sizes, inputs = (tokens, dim, wide, matrices, top_k), (hidden, down, down_scale, None, experts, weights)
    run(second_variant, inputs, y, sizes, down_scaled, second)
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
