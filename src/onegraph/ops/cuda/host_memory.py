"""Host memory that kernels read by its own address, of exactly the size asked for."""

import ctypes
import weakref

import torch
from torch import Tensor

from onegraph.ops.cuda import build


def pinned(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] of pinned host memory, mapped into the address space of every GPU; freed with its last view.

    torch's own pinned allocator rounds up to a power of two, which would waste a quarter of a layer of experts. Raises
    ValueError where the system does not pin so much.
    """
    driver, _ = build.bindings()
    flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        code, address = driver.cuMemHostAlloc(nbytes, flags)
        if int(code):
            raise ValueError(
                f"{nbytes / 1e9:.2f} GB of host memory cannot be pinned ({code!r}); free some, or allow more"
            )
    memory = (ctypes.c_uint8 * nbytes).from_address(int(address))
    weakref.finalize(memory, driver.cuMemFreeHost, address).atexit = False  # the driver is gone by then
    return torch.frombuffer(memory, dtype=torch.uint8)
