"""The attention of a decode step on every card since Ampere: how `decode_portable.cu` is cut over the GPU.

Which calls it takes, and what it is given: `decode_attention.py`.
"""

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.decode_plan import POINTERS, TILE, DecodeSplit
from onegraph.ops.cuda.workspace import Counters

WARPS = 8  # of a block
SIZES = 16, 8, 4, 2  # blocks that share the keys of a (row, kv head) pair
MAX_GROUPS = 1 << 14  # pairs that may be shared, since their blocks are counted

ARGUMENTS = build.Arguments(
    pointers=(*POINTERS, "partial", "sums", "arrived"),
    ints=("pages", "table_stride", "reach", "max_position", "ahead"),
    floats=("eps", "scale"),
)


def shared(plan: DecodeSplit) -> int:
    """Bytes of `Shared` in the kernel."""
    return -(-(2 * 4 * 8 * plan.warps + 4) // 128) * 128 + plan.warps * 2 * TILE * 2 * plan.dim


EXAMPLE = DecodeSplit(False, 128, 4, 16, False, 128, False, WARPS, 8, 8, 0, 128, 8, 1, 64)
KERNEL = build.Source(
    "decode_portable",
    ops=("paged_decode", "strided_decode"),
    functions=("decode_portable",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("portable",),
    example=EXAMPLE.defines,
    shared=shared(EXAMPLE),
    otherwise="Triton's computes the attention of decode steps",
)
ARRIVED = Counters(MAX_GROUPS)


def share(groups: int, dim: int, device: build.Device) -> tuple[int, int]:
    """(warps of a block, blocks that share the keys of a (row, kv head) pair), of which there are `groups`."""
    at_once = device.sms * (2 if dim <= 64 else 1)
    return WARPS, next((size for size in SIZES if groups <= MAX_GROUPS and groups * size <= at_once), 1)


def workspace(plan: DecodeSplit, groups: int, device: torch.device) -> dict[str, torch.Tensor | None]:
    """What blocks leave for one another; the launch may be under way still when it is given back."""
    if plan.size == 1:
        return {"partial": None, "sums": None}
    heads = groups * plan.size * plan.group
    sizes = {"partial": heads * plan.dim, "sums": heads * 2}
    return {name: torch.empty(size, dtype=torch.float32, device=device) for name, size in sizes.items()}
