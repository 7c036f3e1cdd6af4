"""Launches `sampling.cu`; what it does not take goes to Triton's kernels."""

import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 1024  # of a block, as in the kernel
CLUSTERS = (4, 8, 16)  # blocks that share a row; 16 has to be asked for
GPCS = 7  # of an H200 that hold a cluster of 16; the kernel takes a whole SM
SHARED_STRUCT = 22296  # bytes of `Shared` in the kernel
SHARED_LIMIT = 227 << 10  # bytes that a block can have on Hopper
MAX_WIDTH = 1 << 19  # logits of a row: a cluster of 16 holds them in shared memory


@cache
def _kernel(device: int) -> build.Kernel:
    return build.load(SOURCE, {}, ("sample",), device, SHARED_LIMIT)[0]


@cache
def available(device: int) -> bool:
    """Whether the kernel can be built for this GPU; warns once where not."""
    return build.usable(lambda: _kernel(device))


def cut(rows: int, width: int) -> tuple[int, int, int]:
    """(blocks that share a row, logits of a block, its bytes of shared memory): as many blocks as run at once."""
    parts = {size: -(-width // (32 * size)) * 32 for size in CLUSTERS}
    fitting = [size for size in CLUSTERS if SHARED_STRUCT + 4 * parts[size] <= SHARED_LIMIT]
    size = max((s for s in fitting if rows <= GPCS * (CLUSTERS[-1] // s)), default=fitting[0])
    return size, parts[size], SHARED_STRUCT + 4 * parts[size]


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """See `onegraph.ops.sampling.sample`."""
    rows, width = logits.shape
    device = logits.device.index
    usable = logits.is_cuda and logits.dtype == torch.float32 and rows > 0 and width <= MAX_WIDTH
    asked = temperature, top_k, top_p, seed, position
    if not usable or not available(device):
        from onegraph.ops.triton.sampling import sample as fallback  # compiled as of its import

        return fallback(logits, *asked)
    tensors = [t.contiguous() for t in (logits, *asked)]
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    size, part, shared = cut(rows, width)
    arguments = struct.pack("7Q2i", *(t.data_ptr() for t in (*tensors, out)), width, part)
    kernel, grid = _kernel(device), (rows * size, 1, 1)
    stream = torch._C._cuda_getCurrentRawStream(device)
    if torch.cuda.current_device() == device:
        kernel.launch(grid, THREADS, shared, size, stream, arguments)
    else:
        with torch.cuda.device(logits.device):  # the driver launches in the current context
            kernel.launch(grid, THREADS, shared, size, stream, arguments)
    return out
