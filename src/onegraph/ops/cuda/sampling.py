"""Launches `sampling.cu`, or for many rows and where there are no clusters `sampling_portable.cu`; the rest goes to
Triton's kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda import sampling_portable as kernels
from onegraph.ops.cuda.launcher import Launch, launch

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
    otherwise="Triton's sample",
)


class Plan(NamedTuple):
    """Blocks that share a row, logits of a block, its bytes of shared memory."""

    cluster: int
    part: int
    shared: int


def plan(rows: int, width: int, device: build.Device) -> Plan:
    """As many blocks as run at once, an SM each."""
    parts = {size: -(-width // (32 * size)) * 32 for size in CLUSTERS}
    fitting = [size for size in CLUSTERS if SHARED_STRUCT + 4 * parts[size] <= device.shared]
    size = max((s for s in fitting if rows <= device.at_once(s)), default=fitting[0])
    return Plan(size, parts[size], SHARED_STRUCT + 4 * parts[size])


def clustered(rows: int, device: int) -> bool:
    """Whether a row has a largest cluster to itself. With smaller ones two launches without clusters are quicker, by a
    factor where top-p or no filter leaves many tokens, and slower by 1 to 5 us where greedy or a small top-k few."""
    return KERNEL.is_built(device) and rows <= build.device(device).at_once(CLUSTERS[-1])


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """See `onegraph.ops.sampling.sample`."""
    rows, width = logits.shape
    device = logits.device.index
    usable = logits.is_cuda and logits.dtype == torch.float32 and rows > 0 and width <= MAX_WIDTH
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "position": position}
    plain = usable and kernels.supports_shape(rows, width) and not clustered(rows, device)
    plain = plain and kernels.KERNELS.is_built(device)
    if not usable or not (plain or KERNEL.is_built(device)):
        from onegraph.ops.triton.sampling import sample as fallback  # compiled as of its import

        return fallback(logits, *asked.values())
    read = {name: t.contiguous() for name, t in {"logits": logits, **asked}.items()}  # alive until the launch
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if plain:
        kernels.launch(read, out)
        return out
    size, part, shared = plan(rows, width, build.device(device))
    launch(
        KERNEL, {}, Launch((rows * size, 1, 1), THREADS, shared, size), **read, out=out, width=width, part=part
    )  # fmt: skip
    return out
