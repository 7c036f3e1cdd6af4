"""`e8p_encode.c` on the columns of a tensor, shared between torch's number of threads."""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cpu.build import library

SOURCE = Path(__file__).with_name("e8p_encode.c")
LEAST = 128  # columns of a thread: fewer are done before it has begun

Encode = Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor, Tensor]]


def native(bits: int, tables: Sequence[Tensor]) -> Encode | None:
    """The encoder at a rate; None where there is no compiler.

    Args:
        tables: int32 or float32 tensors on the CPU in the order of the source's `Tables`, which are kept.

    It is called with x [8, N] float32, factors of the metric [8, 8] or [B, 8, 8] (of B equal parts of the columns; None
    is the Euclidean one) and the number of candidates, 2 or 8. Returns codes and residual int32 [N], values [8, N].
    """
    found = library(SOURCE, (("BITS", bits),))
    if found is None:
        return None
    function = found.e8p_encode
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4 + [ctypes.c_int32] + [ctypes.c_void_p] * 3
    kept = [table.contiguous() for table in tables]
    addresses = (ctypes.c_void_p * len(kept))(*(table.data_ptr() for table in kept))
    return partial(_encode, function, addresses, kept)


def _encode(
    function: Callable[..., None], addresses: ctypes.Array[ctypes.c_void_p], kept: list[Tensor],
    x: Tensor, metric: Tensor | None, candidates: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert kept, "behind the addresses"
    x, count = x.contiguous(), x.shape[1]
    value = torch.empty_like(x)
    codes, residual = torch.empty(2, count, dtype=torch.int32).unbind()
    factors = None if metric is None else metric.mT.contiguous()
    part = count if factors is None or factors.dim() == 2 else count // len(factors)
    data, under = x.data_ptr(), None if factors is None else factors.data_ptr()

    def run(begin: int, end: int) -> None:
        function(
            addresses, data, under, part, count, begin, end, candidates, codes.data_ptr(), residual.data_ptr(),
            value.data_ptr(),
        )  # fmt: skip

    shares = max(1, min(torch.get_num_threads(), count // LEAST))
    if shares == 1:
        run(0, count)
    else:
        edges = [count * i // shares for i in range(shares + 1)]
        list(pool(shares, os.getpid()).map(run, edges[:-1], edges[1:]))  # ctypes lets go of the interpreter meanwhile
    return codes, residual, value


@cache
def pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Of one process: the threads of another one are not there behind a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="onegraph-encode")
