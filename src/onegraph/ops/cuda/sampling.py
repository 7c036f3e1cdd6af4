"""Launches `sampling.cu`, or for many rows and where there are no clusters `sampling_portable.cu`; torch samples what
neither takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda import sampling_portable as portable
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
    otherwise="another kernel or torch samples",
)


Sample = Callable[..., Tensor]  # of contiguous tensors, logits in float32


class ClusterTiling(NamedTuple):
    """Blocks that share a row, logits of a block, its bytes of shared memory."""

    cluster: int
    part: int
    shared: int


def plan(rows: int, width: int, device: build.Device) -> ClusterTiling:
    """As many blocks as run at once, an SM each."""
    parts = {size: -(-width // (32 * size)) * 32 for size in CLUSTERS}
    fitting = [size for size in CLUSTERS if SHARED_STRUCT + 4 * parts[size] <= device.shared]
    size = max((s for s in fitting if rows <= device.at_once(s)), default=fitting[0])
    return ClusterTiling(size, parts[size], SHARED_STRUCT + 4 * parts[size])


def choose(rows: int, width: int, device: int) -> Sample | None:
    """The launches that draw from so many rows of logits, None where none do.

    Where a row has a largest cluster to itself, one in clusters. With smaller ones two launches without clusters are
    quicker, by a factor where top-p or no filter leaves many tokens, and slower by 1 to 5 us where greedy or a small
    top-k few.
    """
    if rows == 0:
        return None
    clusters = width <= MAX_WIDTH and KERNEL.is_built(device)
    if clusters and rows <= build.device(device).at_once(CLUSTERS[-1]):
        return _in_clusters
    if portable.supports_shape(rows, width) and portable.KERNELS.is_built(device):
        return portable.sample
    return _in_clusters if clusters else None


def _in_clusters(logits: Tensor, **parameters: Tensor) -> Tensor:
    rows, width = logits.shape
    size, part, shared = plan(rows, width, build.device(logits.device.index))
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    each = Launch((rows * size, 1, 1), THREADS, shared, size)
    launch(KERNEL, {}, each, logits=logits, **parameters, out=out, width=width, part=part)
    return out
