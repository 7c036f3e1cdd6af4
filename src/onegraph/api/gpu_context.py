"""A GPU's CUDA context, which the driver makes while Python imports torch."""

from __future__ import annotations

import ctypes
import os
import threading

LIBRARY = "libcuda.so.1"


def start_context(device: str, count: int = 1) -> threading.Thread | None:
    """Makes the contexts of the GPUs that `--device` names, `count` from cuda:0 on, in a thread; torch's first call on
    one then finds it. None where no GPU is named.

    It decides nothing and reports nothing: what fails here fails again where torch does it.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or (index and not (index.isascii() and index.isdigit() and len(index) < 4)):
        return None
    first = int(index or 0)
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch sets it before the driver reads it
    thread = threading.Thread(target=_make, args=(range(first, first + count),), name="cuda-context", daemon=True)
    thread.start()
    return thread


def _make(indices: range) -> None:
    try:
        driver = ctypes.CDLL(LIBRARY)  # whose calls hold no lock of Python's
    except OSError:
        return
    if driver.cuInit(0):
        return
    for index in indices:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuDeviceGet(ctypes.byref(device), index):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
