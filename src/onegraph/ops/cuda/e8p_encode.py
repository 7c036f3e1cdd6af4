"""Nearest E8P codes on a GPU: one launch of `e8p_encode.cu` where torch's calls take some 150."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch

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
    otherwise="rounding takes torch's calls",
)

Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def encoder(tables: Sequence[Tensor], bits: int, candidates: int) -> Encode:
    """The encoder at a rate.

    Args:
        tables: int32 or float32 tensors on the GPU in the order of the kernel's `Tables`, which are kept.
        candidates: 2 or 8 first stages.

    It is called with x [8, N] float32 and factors of the metric [8, 8] or [B, 8, 8] (of B equal parts of the columns),
    and returns codes and residual int32 [N] and values [8, N].
    """
    names = ("index", "odd", "absolute", "halves", "half_row", "e81b")
    kept = dict(zip(names, (table.contiguous() for table in tables), strict=True))

    def run(x: Tensor, metric: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, count = x.contiguous(), x.shape[1]
        factors = metric.mT.contiguous()
        value = torch.empty_like(x)
        codes, residual = torch.empty(2, count, dtype=torch.int32, device=x.device).unbind()
        launch(
            KERNEL, {"BITS": bits, "CANDIDATES": candidates},
            Launch((-(-count * candidates // THREADS), 1, 1), THREADS),
            **kept, x=x, metric=factors, codes=codes, residual=residual, value=value, count=count,
            part=count if factors.dim() == 2 else count // len(factors),
        )  # fmt: skip
        return codes, residual, value

    return run
