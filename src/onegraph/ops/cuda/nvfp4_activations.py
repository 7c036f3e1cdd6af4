"""Activations to NVFP4 in one launch, with scales in the order of FP4 tensor cores; and scales of weights into it."""

from functools import cache

import torch
from torch import Tensor

from onegraph.ops.cuda import build

THREADS, ALIGNMENT = 256, 16
GROUP = 16  # columns that share a scale
Shape = tuple[int, int]
ARGUMENTS = build.Arguments(pointers=("x", "unit", "codes", "tiles"), ints=("rows", "k"))
KERNELS = build.Source(
    "nvfp4_activations",
    ops=("nvfp4_quantize_tiled",),
    functions=("nvfp4_activations", "nvfp4_tiles"),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example={"HALF": 0, "FLOAT": 0},
)


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    return KERNELS.usable(device, "torch rounds activations to NVFP4")


@cache
def _kernels(dtype: torch.dtype, device: int) -> tuple[build.Kernel, ...]:
    return KERNELS.load({"HALF": int(dtype == torch.float16), "FLOAT": int(dtype == torch.float32)}, device)


def _run(kernel: build.Kernel, tiles: Tensor, rows: int, k: int, **tensors: Tensor | None) -> None:
    arguments = ARGUMENTS.pack(**build.addresses(**tensors, tiles=tiles), rows=rows, k=k)
    with torch.cuda.device(tiles.device):
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch((-(-tiles.numel() // THREADS), 1, 1), THREADS, 0, 1, stream, arguments)


def quantize(x: Tensor, unit: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """x [T, k], unit float32 [] -> codes uint8 [T, k/2], scales uint8 as `formats.nvfp4.swizzle_scales` has them, which
    gives them this shape."""
    rows, k = x.shape
    x = x.clone() if x.data_ptr() % ALIGNMENT else x
    codes = torch.empty(rows, k // 2, dtype=torch.uint8, device=x.device)
    tiles = torch.empty(shape, dtype=torch.uint8, device=x.device)
    _run(_kernels(x.dtype, x.device.index)[0], tiles, rows, k, x=x, unit=unit, codes=codes)
    return codes, tiles


def tiled(scale: Tensor, shape: Shape) -> Tensor:
    """scale uint8 [n, g] as `formats.nvfp4.swizzle_scales` has it."""
    rows, groups = scale.shape
    tiles = torch.empty(shape, dtype=torch.uint8, device=scale.device)
    kernel = _kernels(torch.bfloat16, scale.device.index)[1]
    _run(kernel, tiles, rows, groups * GROUP, x=scale, unit=None, codes=None)
    return tiles
