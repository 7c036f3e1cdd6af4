"""Nearest E8P codes on a GPU: one launch of `e8p_encode.cu` where torch's calls take some 150."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from onegraph.ops.cuda import build

THREADS = 128  # as in the kernel
ARGUMENTS = build.Arguments(
    pointers=(
        "index", "odd", "absolute", "halves", "half_row", "e81b", "x", "metric", "codes", "residual", "value",
    ),
    ints=("count", "part"),
)  # fmt: skip
KERNEL = build.Source(
    "e8p_encode",
    functions=("e8p_encode",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=(),
    example={"BITS": 4, "CANDIDATES": 8},
)

Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@cache
def available(device: int) -> bool:
    """Whether the kernel can be built for this GPU; warns once where not."""
    return KERNEL.usable(device, "rounding takes torch's calls")


def encoder(tables: Sequence[Tensor], bits: int, candidates: int) -> Encode:
    """The encoder at a rate.

    Args:
        tables: int32 or float32 tensors on the GPU in the order of the kernel's `Tables`, which are kept.
        candidates: 2 or 8 first stages.

    It is called with x [8, N] float32 and factors of the metric [8, 8] or [B, 8, 8] (of B equal parts of the columns),
    and returns codes and residual int32 [N] and values [8, N].
    """
    kept = [table.contiguous() for table in tables]
    device = kept[0].device.index
    (kernel,) = KERNEL.load({"BITS": bits, "CANDIDATES": candidates}, device)
    names = ("index", "odd", "absolute", "halves", "half_row", "e81b")
    addresses = dict(zip(names, (table.data_ptr() for table in kept), strict=True))

    def run(x: Tensor, metric: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert kept, "behind the addresses"
        x, count = x.contiguous(), x.shape[1]
        factors = metric.mT.contiguous()
        value = torch.empty_like(x)
        codes, residual = torch.empty(2, count, dtype=torch.int32, device=x.device).unbind()
        arguments = ARGUMENTS.pack(
            **addresses,
            x=x.data_ptr(),
            metric=factors.data_ptr(),
            codes=codes.data_ptr(),
            residual=residual.data_ptr(),
            value=value.data_ptr(),
            count=count,
            part=count if factors.dim() == 2 else count // len(factors),
        )
        grid = -(-count * candidates // THREADS), 1, 1
        with torch.cuda.device(device):  # the driver launches in the current context
            kernel.launch(grid, THREADS, 0, 1, torch._C._cuda_getCurrentRawStream(device), arguments)
        return codes, residual, value

    return run
