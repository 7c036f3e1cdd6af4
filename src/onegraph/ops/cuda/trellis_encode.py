"""The trellis encoder on a GPU: one launch of `trellis_encode.cu` for all tiles that can be encoded side by side."""

import torch
from torch import Tensor

from onegraph.formats.trellis import TILE, UNIT, WEIGHTS
from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch

THREADS = 512  # as in the kernel
BESIDE = 2 * WEIGHTS * 4 + THREADS * 8 + WEIGHTS * 2 + 16  # bytes of `Shared`, rounded up
ARGUMENTS = build.Arguments(
    pointers=("x", "weights", "outer", "steps", "codes", "value"), floats=("unit",), ints=("tiles", "part", "around")
)
KERNEL = build.Source(
    "trellis_encode",
    functions=("trellis_encode",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=(),
    example={"BITS": 4},
    shared=(1 << 15) + BESIDE,
    otherwise="rounding to the trellis takes torch's calls",
)


def words(bits: int) -> int:
    """Of a thread and step: where its states came from."""
    return 2 if bits <= 3 else 1


def shared(bits: int) -> int:
    """Bytes of shared memory of a block."""
    newest = 1 << bits
    pitch = (1 << (16 - 2 * bits)) + (32 // newest if bits < 6 else 1)
    return max(newest * pitch * 4, 32768) + BESIDE


def supports(bits: int, device: torch.device) -> bool:
    """Whether the kernel runs on a GPU at a rate: 1 bit takes 134 KB of shared memory."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return KERNEL.is_built(index) and shared(bits) <= build.device(index).shared


def encode(x: Tensor, bits: int, weights: Tensor, outer: Tensor | None, around: int) -> tuple[Tensor, Tensor]:
    """See `onegraph.quant.trellis.encode`."""
    x, tiles = x.contiguous(), x.shape[1] // TILE
    value = torch.empty_like(x)
    codes = torch.empty(bits, x.shape[1], dtype=torch.int32, device=x.device)
    if tiles == 0:
        return codes, value
    blocks = min(tiles, build.device(x.device.index).sms)
    steps = torch.empty(blocks * WEIGHTS * words(bits) * THREADS, dtype=torch.int32, device=x.device)
    launch(
        KERNEL, {"BITS": bits}, Launch((blocks, 1, 1), THREADS, shared(bits)),
        x=x, weights=weights.contiguous(), outer=None if outer is None else outer.contiguous(), steps=steps,
        codes=codes, value=value, unit=UNIT, tiles=tiles, part=tiles // len(weights), around=around,
    )  # fmt: skip
    return codes, value
