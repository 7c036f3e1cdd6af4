"""Launches the CUDA C++ kernels of this package: the one way from tensors to the driver.

A variant (a `build.Source` and what it is compiled with) is built and loaded once a process and GPU. Its kernels share
one parameter, which is packed by name; they run on the current stream of the tensors' GPU, also where that GPU is not
the current one.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onegraph.ops.cuda import build

ALIGNMENT = 16  # bytes that kernels read at once
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as numbers.cuh numbers them


class Launch(NamedTuple):
    """One launch of a kernel: `function` of its source, the first one by default; `shared` bytes of shared memory a
    block, `cluster` blocks a cluster."""

    grid: tuple[int, int, int]
    threads: int
    shared: int = 0
    cluster: int = 1
    function: str = ""


def launch(source: build.Source, defines: Mapping[str, int], *launches: Launch, **arguments: Any) -> None:
    """Launches kernels of a variant, one after the other, with programmatic dependent launch where the GPU has it. In a
    dry run (`ops/ahead.py`) it begins to compile them and launches nothing.

    Args:
        arguments: the fields of `source.arguments`: tensors (None: a null pointer), addresses, numbers, tensor maps.

    Raises BuildError where the variant cannot be built, RuntimeError where it would be built inside a capture.
    """
    device = next(value.device.index for value in arguments.values() if isinstance(value, Tensor))
    ahead = build.AHEAD.get()
    if ahead is not None and ahead.is_dry:
        ahead.want(source, defines, device)
        return
    found = kernels(source, device, *defines.items())
    assert source.arguments is not None
    packed = source.arguments.pack(**arguments)
    stream = raw_stream(device)
    with on_device(device):
        for each in launches:
            kernel = found[each.function or source.functions[0]]
            kernel.launch(each.grid, each.threads, each.shared, each.cluster, stream, packed)


@cache
def kernels(source: build.Source, device: int, *defines: tuple[str, int]) -> dict[str, build.Kernel]:
    """The kernels of a variant on a GPU, by name. Not for the first time inside a capture."""
    return build.load(source, dict(defines), device)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy at an address that kernels can read `ALIGNMENT` bytes at.

    Of several launches the copies come before the first: the later ones may read their inputs while it still runs.
    """
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def raw_stream(device: int) -> int:
    """The GPU's current stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def on_device(device: int) -> AbstractContextManager[object]:
    """Makes a GPU current: the driver launches in the current context."""
    return nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)
