"""Launches `sampling.cu`, or for many rows and where there are no clusters `sampling_portable.cu`; the rest goes to
Triton's kernels."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda import sampling_portable as kernels

THREADS = 1024  # of a block, as in the kernel
CLUSTERS = (4, 8, 16)  # blocks that share a row; 16 has to be asked for
SHARED_STRUCT = 22296  # bytes of `Shared` in the kernel
MAX_WIDTH = 1 << 19  # logits of a row: a cluster of 16 holds them in 227 KB each

ARGUMENTS = build.Arguments(
    pointers=("logits", "temperature", "top_k", "top_p", "seed", "position", "out"), ints=("width", "part")
)
KERNEL = build.Source(
    "sampling",
    ops=("sample",),
    functions=("sample",),
    arguments=ARGUMENTS,
    capabilities=build.CLUSTERS,
    shared=SHARED_STRUCT + 4 * MAX_WIDTH // CLUSTERS[-1],
)


class Plan(NamedTuple):
    """Blocks that share a row, logits of a block, its bytes of shared memory."""

    cluster: int
    part: int
    shared: int


@cache
def _kernel(device: int) -> build.Kernel:
    return KERNEL.load({}, device, KERNEL.shared)[0]


@cache
def available(device: int) -> bool:
    """Whether the kernel can be built for this GPU; warns once where not."""
    return KERNEL.usable(device, "Triton's sample")


def plan(rows: int, width: int, device: build.Device) -> Plan:
    """As many blocks as run at once, an SM each."""
    parts = {size: -(-width // (32 * size)) * 32 for size in CLUSTERS}
    fitting = [size for size in CLUSTERS if SHARED_STRUCT + 4 * parts[size] <= device.shared]
    size = max((s for s in fitting if rows <= device.at_once(s)), default=fitting[0])
    return Plan(size, parts[size], SHARED_STRUCT + 4 * parts[size])


def clustered(rows: int, device: int) -> bool:
    """Whether a row has a largest cluster to itself. With smaller ones two launches without clusters are quicker, by a
    factor where top-p or no filter leaves many tokens, and slower by 1 to 5 us where greedy or a small top-k few."""
    return available(device) and rows <= build.device(device).at_once(CLUSTERS[-1])


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """See `onegraph.ops.sampling.sample`."""
    rows, width = logits.shape
    device = logits.device.index
    usable = logits.is_cuda and logits.dtype == torch.float32 and rows > 0 and width <= MAX_WIDTH
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "position": position}
    plain = usable and kernels.takes(rows, width) and not clustered(rows, device) and kernels.available(device)
    if not usable or not (plain or available(device)):
        from onegraph.ops.triton.sampling import sample as fallback  # compiled as of its import

        return fallback(logits, *asked.values())
    read = {name: t.contiguous() for name, t in {"logits": logits, **asked}.items()}  # alive until the launch
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if plain:
        with torch.cuda.device(logits.device):
            kernels.launch(read, out)
        return out
    size, part, shared = plan(rows, width, build.device(device))
    arguments = ARGUMENTS.pack(**build.addresses(**read, out=out), width=width, part=part)
    kernel, grid = _kernel(device), (rows * size, 1, 1)
    stream = torch._C._cuda_getCurrentRawStream(device)
    if torch.cuda.current_device() == device:
        kernel.launch(grid, THREADS, shared, size, stream, arguments)
    else:
        with torch.cuda.device(logits.device):  # the driver launches in the current context
            kernel.launch(grid, THREADS, shared, size, stream, arguments)
    return out
