"""Sampling in two launches on every card since Ampere: how `sampling_portable.cu` is cut over the GPU."""

import torch
from torch import Tensor

from onegraph.ops.cuda import build, launcher
from onegraph.ops.cuda.workspace import Counters

WARPS = 32  # of a block, as in the kernels
LIST = 1024  # keys that a block sorts
BLOCKS = 8, LIST // WARPS  # that share a row: fewer would bound the list badly, more bring too many maxima
ROW, KEY, BIN, LOGIT = 32, 8, 8, 4  # bytes of `Row`, of a key, of a bin, of a logit
MAX_ROWS, MAX_WIDTH = 4096, 1 << 24  # rows have counters; a key has 24 bits of the index

ARGUMENTS = build.Arguments(
    pointers=(
        "logits", "temperature", "top_k", "top_p", "seed", "position", "out", "maxima", "minima", "found",
        "list", "racers", "bins", "arrived",
    ),
    ints=("width", "part", "blocks"),
)  # fmt: skip
KERNELS = build.Source(
    "sampling_portable",
    ops=("sample",),
    functions=("sample_bounds", "sample_draw"),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("portable",),
    otherwise="another kernel or torch samples",
)
ARRIVED = Counters(MAX_ROWS)


def supports_shape(rows: int, width: int) -> bool:
    """Whether the kernels here draw from so many rows of logits."""
    return rows <= MAX_ROWS and width <= MAX_WIDTH


def blocks(rows: int, device: build.Device) -> int:
    """That share a row: as many as run at once, one an SM."""
    least, most = BLOCKS
    return max(least, min(most, device.sms // rows))


def sample(logits: Tensor, **parameters: Tensor) -> Tensor:
    """See `onegraph.ops.sampling.sample`; contiguous tensors, of a shape that `supports_shape` allows."""
    rows, width = logits.shape
    device = logits.device.index
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    shared_by = blocks(rows, build.device(device))
    sizes = {
        "maxima": shared_by * WARPS * KEY,
        "found": ROW,
        "list": LIST * KEY,
        "racers": LIST * KEY,
        "bins": LIST * BIN,
        "minima": shared_by * WARPS * LOGIT,
    }
    space = torch.empty(rows * sum(sizes.values()), dtype=torch.uint8, device=logits.device)
    at, places = space.data_ptr(), {}
    for name, size in sizes.items():
        places[name] = at
        at += rows * size
    each = launcher.Launch((rows * shared_by, 1, 1), WARPS * 32)
    launcher.launch(
        KERNELS, {}, each, each._replace(function="sample_draw"), logits=logits, **parameters, **places, out=out,
        arrived=ARRIVED.of(device), width=width, part=-(-width // (32 * shared_by)) * 32, blocks=shared_by,
    )  # fmt: skip
    return out
