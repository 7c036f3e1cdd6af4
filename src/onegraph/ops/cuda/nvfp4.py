"""NVFP4 linears on a GPU: how `nvfp4.cu` is cut, and which calls it takes.

Few tokens run straight from the codes. More of them decode the weight once and multiply through cuBLAS, two launches.
What is cut how follows from shape, dtype and device alone.
"""

import struct
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_name("nvfp4.cu")
ROWS, SLICE = 16, 256  # as in nvfp4.cu
MAX_TOKENS = 32  # above, decoding once is cheaper than reading the codes again for every 16 tokens
ALIGNMENT = 16  # bytes, of every pointer
LINEAR, GATE_UP, DOWN = 0, 1, 2  # MODE


@dataclass(frozen=True)
class Cut:
    """Warps of a block, which share k out; blocks that share an SM; whether the next slice is fetched ahead."""

    warps: int
    per_sm: int
    ahead: bool


def cut(tiles: int, slices: int, sms: int) -> Cut:
    """What measured best on an H200 (docs/log.md): where row tiles fill every SM four times, 32 warps of few registers;
    below, 16 warps that fetch ahead."""
    warps = next((w for w in (8, 4) if slices >= w), 2)
    if tiles >= 4 * sms:
        return Cut(warps, 32 // warps, False)
    return Cut(warps, 16 // warps, True)


def takes(x: Tensor, k: int) -> bool:
    """Whether `nvfp4.cu` computes a layer of k inputs on `x`."""
    return x.is_cuda and x.numel() > 0 and k % 32 == 0 and x.dtype in (torch.bfloat16, torch.float16) and available(x)


def available(x: Tensor) -> bool:
    return _available(x.device.index)


@cache
def _available(device: int) -> bool:
    try:
        _kernels(LINEAR, False, 1, Cut(4, 4, True), device)
    except build.BuildError as error:
        warnings.warn(f"the CUDA kernels for NVFP4 cannot be built, torch's are used: {error}", stacklevel=2)
        return False
    return True


@cache
def _kernels(mode: int, half: bool, tiles: int, shape: Cut, device: int) -> tuple[build.Kernel, ...]:
    defines = {"MODE": mode, "HALF": int(half), "TILES": tiles, "WARPS": shape.warps, "BLOCKS": shape.per_sm}
    defines["AHEAD"] = int(shape.ahead)
    return build.load(SOURCE, defines, ("nvfp4_linear", "nvfp4_dequantize"), device, 0)


@cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _aligned(tensor: Tensor | None) -> Tensor | None:
    return tensor.clone() if tensor is not None and tensor.data_ptr() % ALIGNMENT else tensor


def _arguments(
    tensors: tuple[Tensor | None, ...], y: Tensor, tokens: int, n: int, k: int, matrices: int, top_k: int, limit: float
) -> bytes:
    pointers = [0 if t is None else t.data_ptr() for t in (*tensors, y)]
    return struct.pack("8Q5if", *pointers, tokens, n, k, matrices, top_k, limit)


def _run(
    mode: int,
    tensors: tuple[Tensor | None, ...],
    y: Tensor,
    grid: tuple[int, int, int],
    sizes: tuple[int, int, int, int, int],
    *,
    column_tiles: int = 1,
    limit: float = 0.0,
    shape: Cut | None = None,
) -> None:
    """Launches one mode. `tensors`: x, codes, scale, global_scale, bias, experts, weights; `sizes`: tokens, n, k,
    matrices, top_k; `grid`: row tiles, matrices or tokens, passes."""
    device = y.device.index
    slices = -(-sizes[2] // SLICE) * (sizes[4] if mode == DOWN else 1)
    shape = shape or cut(grid[0] * grid[1] * grid[2], slices, _sms(device))
    kernel = _kernels(mode, y.dtype == torch.float16, column_tiles, shape, device)[0]
    arguments = _arguments(tuple(_aligned(t) for t in tensors), y, *sizes, limit)
    shared = shape.warps * column_tiles * 32 * 16
    with torch.cuda.device(y.device):  # the driver launches in the current context
        kernel.launch(grid, shape.warps * 32, shared, 1, torch.cuda.current_stream().cuda_stream, arguments)


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None, shape: Cut | None = None
) -> Tensor:
    """x [..., k] -> [..., n]; see `ops.nvfp4_linear.nvfp4_linear`."""
    n, k = codes.shape[0], codes.shape[1] * 2
    tokens = x.numel() // k
    if tokens > MAX_TOKENS:
        weight = dequantize(codes, scale, global_scale, x.dtype)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    y = x.new_empty(*x.shape[:-1], n)
    bias = None if bias is None else bias.float()
    tiles = 1 if tokens <= 8 else 2
    grid = -(-n // ROWS), 1, -(-tokens // (8 * tiles))
    inputs = (x, codes, scale, global_scale, bias, None, None)
    _run(LINEAR, inputs, y, grid, (tokens, n, k, 1, 1), column_tiles=tiles, shape=shape)
    return y


def grouped_linear(x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """x [..., G, k] -> [..., G, n]; see `ops.nvfp4_linear.nvfp4_grouped_linear`."""
    groups, n, k = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    tokens = x.numel() // (groups * k)
    if tokens > MAX_TOKENS:
        weight = dequantize(codes, scale, global_scale, x.dtype)
        y = torch.bmm(x.reshape(tokens, groups, k).transpose(0, 1), weight.transpose(1, 2))
        return y.transpose(0, 1).reshape(*x.shape[:-1], n)
    y = x.new_empty(*x.shape[:-1], n)
    tiles = 1 if tokens <= 8 else 2
    grid = -(-n // ROWS), groups, -(-tokens // (8 * tiles))
    inputs = (x, codes, scale, global_scale, None, None, None)
    _run(LINEAR, inputs, y, grid, (tokens, n, k, groups, 1), column_tiles=tiles)
    return y


def experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
    limit: float,
) -> Tensor:
    """x [T, D] -> [T, D]; see `ops.nvfp4_linear.nvfp4_experts`. Two launches: gate, up and SwiGLU; down, weighted and
    added up in a fixed order. Each pair of a token and an expert reads its weights (the L2 serves repeats)."""
    (tokens, top_k), matrices, dim, wide = experts.shape, gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2
    hidden = x.new_empty(tokens * top_k, wide)
    inputs = (x, gate_up, gate_up_scale, gate_up_global, None, experts, weights)
    sizes = (tokens, 2 * wide, dim, matrices, top_k)
    _run(GATE_UP, inputs, hidden, (wide // 8, tokens * top_k, 1), sizes, limit=limit)
    y = torch.empty_like(x)
    inputs = (hidden, down, down_scale, down_global, None, experts, weights)
    _run(DOWN, inputs, y, (-(-dim // ROWS), tokens, 1), (tokens, dim, wide, matrices, top_k))
    return y


def dequantize(codes: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [..., n, k/2] -> [..., n, k] in bfloat16 or float16, one launch."""
    *rows, half = codes.shape
    y = torch.empty(*rows, half * 2, dtype=dtype, device=codes.device)
    n = y.numel() // (half * 2)
    kernel = _kernels(LINEAR, dtype == torch.float16, 1, Cut(4, 4, True), y.device.index)[1]
    tensors = tuple(_aligned(t) for t in (None, codes, scale, global_scale, None, None, None))
    arguments = _arguments(tensors, y, 0, n, half * 2, 1, 1, 0.0)
    blocks = min(-(-y.numel() // (8 * 256)), 16 * _sms(y.device.index))
    with torch.cuda.device(y.device):
        kernel.launch((blocks, 1, 1), 256, 0, 1, torch.cuda.current_stream().cuda_stream, arguments)
    return y
