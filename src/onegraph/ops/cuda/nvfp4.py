"""NVFP4 and MXFP4 linears on a GPU: how `nvfp4.cu` is chosen, and which calls it takes.

Few tokens run straight from the codes: one launch of `nvfp4.cu`, or of `nvfp4_short.cu` where that measured better; a
single one runs on `nvfp4_one.cu`. More of them, and widths that are no multiple of 64, decode the weight once and
multiply through cuBLAS, two launches. What runs how follows from shape, dtype and device alone.

The two formats differ in scales alone: one source serves both (GROUP), and a weight without global_scale is MXFP4.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from onegraph.ops.cuda import build, nvfp4_one
from onegraph.ops.cuda.nvfp4_one import GATE, NO_GATE

ROWS, SLICE, SLOT, PAIRS = 16, 256, 2304, 255  # as in nvfp4.cu
WARPS, PLAIN_WARPS = 16, 12  # of a block at most, and where the portable form runs
PASS, FEW_PASS = 16, 8  # tokens of experts that share a reading: where those of an expert are moved together, and not
DEPTHS = (4, 3, 2)  # steps that a warp has under way: of experts the most that fit,
LINEAR_DEPTHS = (2,)  # of a linear what measured best
FEW_TILES = 4  # row tiles of a block, below which activations of more than 8 tokens cost more than codes
COLUMNS = 64  # of k, whose scales one copy of four bytes brings: k comes in multiples
MAX_TOKENS = 32  # above, decoding once is cheaper than reading the codes again for every 16 tokens
ROUTES = 8 * 1024  # bytes of a block's shared memory that the routes of experts take, rounded up
ALIGNMENT = 16  # bytes, of every pointer
LINEAR, GATE_UP, DOWN = 0, 1, 2  # MODE

LAYER = "x", "codes", "scale", "global_scale", "bias"
ARGUMENTS = build.Arguments(
    pointers=(*LAYER, "experts", "weights", "y"),
    ints=("tokens", "n", "k", "matrices", "top_k", "across", "hold"),
    floats=GATE,
)


def _defines(
    mode: int, half: bool, column_tiles: int, together: bool, depth: int, group: int, *, wide: bool
) -> dict[str, int]:
    flags = {"HALF": int(half), "TOGETHER": int(together), "FLOAT": int(wide)}
    return flags | {"MODE": mode, "TILES": column_tiles, "DEPTH": depth, "GROUP": group}


KERNEL = build.Source(
    "nvfp4",
    ops=(
        "nvfp4_linear",
        "nvfp4_grouped_linear",
        "nvfp4_experts",
        "mxfp4_linear",
        "mxfp4_grouped_linear",
        "mxfp4_experts",
    ),
    functions=("nvfp4_linear",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    example=_defines(LINEAR, False, 1, False, LINEAR_DEPTHS[0], 16, wide=False),
)
SHORT_ARGUMENTS = build.Arguments(pointers=(*LAYER, "y"), ints=("tokens", "n", "k", "matrices"))
SHORT = build.Source(
    "nvfp4_short",
    ops=("nvfp4_linear", "mxfp4_linear"),
    functions=("nvfp4_short",),
    arguments=SHORT_ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    example={"HALF": 0, "TILES": 2, "WARPS": 8, "GROUP": 16, "FLOAT": 0},
)
DEQUANTIZE_ARGUMENTS = build.Arguments(pointers=("codes", "scale", "global_scale", "y"), ints=("n", "k"))
DEQUANTIZE = build.Source(
    "nvfp4_dequantize",
    ops=("nvfp4_linear", "mxfp4_linear"),
    functions=("nvfp4_dequantize",),
    arguments=DEQUANTIZE_ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    example={"HALF": 0, "GROUP": 16},
)


@dataclass(frozen=True)
class Plan:
    """How one shape is cut over the GPU: `blocks` blocks, one on each SM; in each, `across` warps side by side in k,
    `down` times beside one another over the block's row tiles, `hold` of which are added up at a time; `depth` steps of
    each warp are under way."""

    blocks: int
    across: int
    down: int
    hold: int
    depth: int

    def shared(self, sums: int) -> int:
        """Bytes of shared memory: rings, sums (`sums` bytes of a warp's row tile), global scales."""
        rings = self.across * self.down * self.depth * SLOT
        return rings + self.hold * (self.across * sums + ROWS * 4)


def sums(mode: int, column_tiles: int = 1, *, together: bool = False) -> int:
    """Bytes of a warp's sums of a row tile, as in nvfp4.cu."""
    return ROWS * (PASS + 1) * 4 if mode == DOWN and together else column_tiles * 512


@cache
def plan(
    row_tiles: int, slices: int, sums: int, blocks: int, depths: tuple[int, ...], room: int, warps: int = WARPS
) -> Plan:
    """`row_tiles` tiles of 16 rows with `slices` slices of k over at most `blocks` blocks of `warps` warps at most: the
    first of `depths` beside which all sums, `sums` bytes a warp and tile, fit into `room` bytes of shared memory."""
    blocks = min(row_tiles, blocks)
    each = -(-row_tiles // blocks)
    across = -(-slices // -(-slices // warps))
    down = min(warps // across, each)
    found = None
    for depth in depths:
        empty = Plan(blocks, across, down, 0, depth)
        fit = (room - empty.shared(sums)) // (across * sums + ROWS * 4)
        if fit < down:  # of 99 KB; the shortest ring leaves room
            continue
        rounds = -(-each // fit)
        if found is None or (rounds == 1 and found.hold < each):
            found = Plan(blocks, across, down, max(down, -(-each // rounds)), depth)
    assert found is not None
    return found


def takes(x: Tensor) -> bool:
    """Whether a kernel here computes on `x`."""
    return x.is_cuda and x.numel() > 0 and x.dtype in (torch.bfloat16, torch.float16) and available(x.device.index)


def takes_experts(x: Tensor, wide: int, top_k: int) -> bool:
    """The same of routed experts of `wide` hidden numbers."""
    return takes(x) and x.shape[-1] % COLUMNS == 0 and wide % COLUMNS == 0 and top_k * FEW_PASS <= PAIRS


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    return KERNEL.usable(device, "torch computes NVFP4 and MXFP4 linears")


@cache
def _kernel(
    mode: int, half: bool, column_tiles: int, together: bool, depth: int, group: int, wide: bool, device: int
) -> build.Kernel:
    return KERNEL.load(_defines(mode, half, column_tiles, together, depth, group, wide=wide), device)[0]


@cache
def _short_kernel(half: bool, warps: int, group: int, wide: bool, device: int) -> build.Kernel:
    defines = {"HALF": int(half), "TILES": 2, "WARPS": warps, "GROUP": group, "FLOAT": int(wide)}
    return SHORT.load(defines, device)[0]


@cache
def _dequantize_kernel(half: bool, group: int, device: int) -> build.Kernel:
    return DEQUANTIZE.load({"HALF": int(half), "GROUP": group}, device)[0]


def _group(global_scale: Tensor | None) -> int:
    """Columns that share a scale."""
    return 32 if global_scale is None else 16


@cache
def _most(device: int) -> tuple[int, int]:
    """Bytes of shared memory that a plan may take, and warps of a block."""
    portable = KERNEL.portable(torch.cuda.get_device_capability(device))
    return build.device(device).shared - ROUTES, PLAIN_WARPS if portable else WARPS


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def _run(
    mode: int,
    tensors: tuple[Tensor | None, ...],
    y: Tensor,
    sizes: tuple[int, int, int, int, int],
    chosen: Plan,
    *,
    column_tiles: int = 1,
    together: bool = False,
    gate: tuple[float, ...] = NO_GATE,
) -> None:
    """Launches one mode. `tensors`: x, codes, scale, global_scale, bias, experts, weights; `sizes`: tokens, n, k,
    matrices, top_k."""
    tokens, *_, matrices, _ = sizes
    x, _, _, global_scale, *_ = tensors
    assert x is not None
    half, wide = x.dtype == torch.float16, y.dtype == torch.float32
    kernel = _kernel(mode, half, column_tiles, together, chosen.depth, _group(global_scale), wide, y.device.index)
    pointers = dict(zip((*LAYER, "experts", "weights"), tensors, strict=True))
    named = dict(zip(("tokens", "n", "k", "matrices", "top_k"), sizes, strict=True))
    arguments = ARGUMENTS.pack(
        **build.addresses(**pointers, y=y), **named, across=chosen.across, hold=chosen.hold,
        **dict(zip(GATE, gate, strict=True)),
    )  # fmt: skip
    grid = chosen.blocks, matrices if mode == LINEAR else 1, -(-tokens // (PASS if together else 8 * column_tiles))
    with torch.cuda.device(y.device):  # the driver launches in the current context
        stream = torch.cuda.current_stream().cuda_stream
        shared = chosen.shared(sums(mode, column_tiles, together=together))
        kernel.launch(grid, chosen.across * chosen.down * 32, shared, 1, stream, arguments)


def _linear(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, bias: Tensor | None, y: Tensor, groups: int
) -> None:
    """`groups` linears side by side; x [..., groups, k] -> y [..., groups, n]."""
    n, k = codes.shape[-2], codes.shape[-1] * 2
    tokens, sms = x.numel() // (groups * k), build.device(x.device.index).sms
    tiles = 1 if tokens <= 8 else 2
    inputs = (_aligned(x), _aligned(codes), _aligned(scale), global_scale, bias)
    if (
        tokens == 1
        and nvfp4_one.available(x.device.index)
        and (one := nvfp4_one.linear_plan(n, k, groups, build.device(x.device.index), _group(global_scale)))
    ):
        x, codes, scale, *rest = inputs
        nvfp4_one.run(LINEAR, codes, scale, (x, *rest, None, None), y, (1, n, k, groups, 1), one)
        return
    blocks = max(1, sms // groups)
    chosen = plan(-(-n // ROWS), -(-k // SLICE), sums(LINEAR, tiles), blocks, LINEAR_DEPTHS, *_most(x.device.index))
    if tiles == 1 or -(-n // ROWS) >= FEW_TILES * chosen.blocks:
        _run(LINEAR, (*inputs, None, None), y, (tokens, n, k, groups, 1), chosen, column_tiles=tiles)
        return
    warps = 8 if k >= 8 * SLICE else 4 if k >= 4 * SLICE else 2
    half, wide = x.dtype == torch.float16, y.dtype == torch.float32
    kernel = _short_kernel(half, warps, _group(global_scale), wide, y.device.index)
    pointers = dict(zip(LAYER, inputs, strict=True))
    arguments = SHORT_ARGUMENTS.pack(**build.addresses(**pointers, y=y), tokens=tokens, n=n, k=k, matrices=groups)
    grid = -(-n // ROWS), groups, -(-tokens // 16)
    with torch.cuda.device(y.device):
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(grid, warps * 32, warps * 1024, 1, stream, arguments)


def _reads(n: int, k: int, scaled: bool) -> bool:
    """Whether matrices n x k, of NVFP4 where `scaled`, can be read as they are: scales of MXFP4 are copied by the word,
    also the last ones."""
    return k % COLUMNS == 0 and (scaled or n * k % (4 * 32) == 0)


def reads(n: int, k: int, dtype: torch.dtype, device: int, *, scaled: bool) -> bool:
    """Whether linears n x k are computed here from the codes; `scaled`: NVFP4's, else MXFP4's."""
    return _reads(n, k, scaled) and dtype in (torch.bfloat16, torch.float16) and available(device)


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, bias: Tensor | None, float32: bool = False
) -> Tensor:
    """x [..., k] -> [..., n], in float32 where asked; see `ops.nvfp4_linear.nvfp4_linear`, `ops.mxfp4.mxfp4_linear`."""
    n, k = codes.shape[0], codes.shape[1] * 2
    if x.numel() > MAX_TOKENS * k or not _reads(n, k, global_scale is not None):
        weight = dequantize(codes, scale, global_scale, x.dtype)
        if not float32:
            return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
        out = torch.mm(x.reshape(-1, k), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], n)
        return out if bias is None else out + bias
    y = x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if float32 else x.dtype)
    _linear(x, codes, scale, global_scale, None if bias is None else bias.float(), y, 1)
    return y


def grouped_linear(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> Tensor:
    """x [..., G, k] -> [..., G, n]; see `ops.nvfp4_linear.nvfp4_grouped_linear`, `ops.mxfp4.mxfp4_grouped_linear`."""
    groups, n, k = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    tokens = x.numel() // (groups * k)
    if tokens > MAX_TOKENS or not _reads(n, k, global_scale is not None):
        weight = dequantize(codes, scale, global_scale, x.dtype)
        y = torch.bmm(x.reshape(tokens, groups, k).transpose(0, 1), weight.transpose(1, 2))
        return y.transpose(0, 1).reshape(*x.shape[:-1], n)
    y = x.new_empty(*x.shape[:-1], n)
    _linear(x, codes, scale, global_scale, None, y, groups)
    return y


def experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_global: Tensor | None,
    *gate: float,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """x [T, D] -> [T, D]; see `ops.nvfp4_linear.nvfp4_experts` and, with biases, `ops.mxfp4.mxfp4_experts`. Two
    launches: gate, up and SwiGLU; down, weighted and added up in a fixed order. Of up to 16 tokens up to eight share
    one reading of an expert's weights; a single one, which has nothing to share, runs on `nvfp4_one.cu`."""
    (tokens, top_k), matrices, dim, wide = experts.shape, gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2
    # Every copy comes before the first launch: the second reads the experts while the first may still run.
    x, gate_up, gate_up_scale, down, down_scale = map(_aligned, (x, gate_up, gate_up_scale, down, down_scale))
    together = tokens > FEW_PASS and top_k * PASS <= PAIRS
    most = min(min(tokens, PASS if together else FEW_PASS) * top_k, matrices * (1 + together))  # readings of a pass
    sms, most_of, group = build.device(x.device.index).sms, _most(x.device.index), _group(gate_up_global)
    hidden, y = x.new_empty(tokens * top_k, wide), torch.empty_like(x)
    if (
        tokens == 1
        and nvfp4_one.available(x.device.index)
        and (plans := nvfp4_one.experts_plans(tokens, dim, wide, top_k, build.device(x.device.index), group))
    ):
        first = x, gate_up_global, biases[0], experts, weights
        second = hidden, down_global, biases[1], experts, weights
        sizes = (tokens, 2 * wide, dim, matrices, top_k), (tokens, dim, wide, matrices, top_k)
        nvfp4_one.run(GATE_UP, gate_up, gate_up_scale, first, hidden, sizes[0], plans[0], gate)
        nvfp4_one.run(DOWN, down, down_scale, second, y, sizes[1], plans[1])
        return y
    inputs = (x, gate_up, gate_up_scale, gate_up_global, biases[0], experts, weights)
    chosen = plan(most * (wide // 8), -(-dim // SLICE), sums(GATE_UP), sms, DEPTHS, *most_of)
    _run(GATE_UP, inputs, hidden, (tokens, 2 * wide, dim, matrices, top_k), chosen, together=together, gate=gate)
    inputs = (hidden, down, down_scale, down_global, biases[1], experts, weights)
    chosen = plan(-(-dim // ROWS), most * -(-wide // SLICE), sums(DOWN, together=together), sms, DEPTHS, *most_of)
    _run(DOWN, inputs, y, (tokens, dim, wide, matrices, top_k), chosen, together=together)
    return y


def dequantize(codes: Tensor, scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """codes [..., n, k/2] -> [..., n, k] in bfloat16 or float16, one launch."""
    *rows, half = codes.shape
    y = torch.empty(*rows, half * 2, dtype=dtype, device=codes.device)
    codes = _aligned(codes)
    arguments = DEQUANTIZE_ARGUMENTS.pack(
        **build.addresses(codes=codes, scale=scale, global_scale=global_scale, y=y),
        n=y.numel() // (half * 2),
        k=half * 2,
    )
    blocks = min(-(-y.numel() // (8 * 256)), 16 * build.device(y.device.index).sms)
    kernel = _dequantize_kernel(dtype == torch.float16, _group(global_scale), y.device.index)
    with torch.cuda.device(y.device):
        kernel.launch((blocks, 1, 1), 256, 0, 1, torch.cuda.current_stream().cuda_stream, arguments)
    return y
