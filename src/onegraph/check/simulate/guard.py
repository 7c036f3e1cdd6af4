"""Lets a CPU build of torch hold tensors that say they are on "cuda:0".

torch's C++ code asks a *device guard* before it touches a tensor of another device; a CPU build has none for CUDA and
raises "PyTorch is not linked with support for cuda devices". The guard of the CPU does nothing at all, which is what a
device without hardware needs, so its pointer is lent to the CUDA slot of libc10's registry while a simulation runs and
taken back afterwards. On builds with CUDA the slot is filled already and nothing is changed.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onegraph.check import compat
from onegraph.check.report import CheckError

_CPU, _CUDA = 0, 1  # c10/core/DeviceType.h, fixed for as long as checkpoints of torch are read


@contextmanager
def device_guard() -> Iterator[None]:
    name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    path = os.path.join(os.path.dirname(torch.__file__), "lib", name)
    try:
        registry = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(path), compat.DEVICE_GUARDS)
    except (OSError, ValueError) as error:
        raise CheckError(
            f"simulation: torch {torch.__version__} on {sys.platform} has no {compat.DEVICE_GUARDS} in {name}; "
            "allowed Linux and macOS builds of torch 2.11 or newer"
        ) from error
    if registry[_CUDA]:
        compat.ensure_cuda_device_guard()  # a CUDA build that sees no GPU gets torch's own guard that does nothing
        yield
        return
    registry[_CUDA] = registry[_CPU]
    try:
        yield
    finally:
        registry[_CUDA] = None
