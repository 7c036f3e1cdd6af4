"""How the kernels of this room are launched.

Programmatic dependent launch (PDL, Hopper and later): a kernel is set up while the one before it still runs, and waits
on the device for that kernel's results. What does not depend on them (decoding weights, building a Hadamard matrix)
goes before the wait. Four rules keep it right:

1. Every kernel here waits, in every program and before its first read or write of anything that another kernel touches;
   an early exit comes after the wait. Then "the kernel before has ended" implies that all kernels before it have.
2. Weights, codebooks and scales of a layer are written once, at load: a linear and a norm may read them before the
   wait. (Who makes a layer on the device and runs it in the same breath synchronises in between.)
3. A kernel without the launch attribute (cuBLAS, torch, `begin_step`) waits for the whole kernel before it, as ever.
4. What a decode step writes only at its end (positions) or never (block table, keys of earlier tokens), its attention
   may read before the wait: between two steps lies the border of a graph, or a kernel of rule 3 (`begin_step`).

A kernel that is captured records a programmatic edge, so a replay overlaps as the eager run does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_enabled = True


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """From here on, what earlier kernels wrote is visible and what they read may be overwritten."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may be set up on SMs that have room; it still waits for this one to end.

    Kernels say so in their first line: a program that waits costs its SM little, and several kernels deep the launches
    and the decoding of weights are then out of the way.
    """
    if PDL:
        gdc_launch_dependents()


@lru_cache(maxsize=64)
def _supports_pdl(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def options(x: Tensor) -> dict[str, Any]:
    """Launch keywords for a kernel on x's device; a CPU tensor means Triton's interpreter, which knows no PDL."""
    if x.is_cuda and _enabled and _supports_pdl(x.device.index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@contextmanager
def plain_launches() -> Iterator[None]:
    """Inside this context Triton's kernels run without PDL, the other side of an A/B measurement; CUDA's keep it."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


class on_device:
    """Makes the device of `x` current, since Triton launches on the current one; free if it is already."""

    def __init__(self, x: Tensor) -> None:
        self._index = x.device.index if x.is_cuda else -1

    def __enter__(self) -> None:
        self._before = torch.cuda._exchange_device(self._index) if self._index >= 0 else -1

    def __exit__(self, *_: object) -> None:
        if self._before >= 0:
            torch.cuda._maybe_exchange_device(self._before)
