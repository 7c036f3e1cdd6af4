"""Tensors that end where mapped GPU memory ends: a kernel that reads past one fails with an illegal memory access.

In the caching allocator's blocks such a read finds other tensors, or memory that nobody uses, nearly always.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes that a tensor's start is aligned to, as kernels load words of 16; reads of fewer are not found


def _call(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


class _Bytes:
    """Memory as torch.as_tensor takes it, without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class Guard:
    """Makes copies of tensors; `release` unmaps them all."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.mapped: list[tuple[int, int, Any]] = []  # address, bytes, handle
        self.kind = driver.CUmemAllocationProp()
        self.kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.kind.location.id = torch.cuda.current_device()
        self.access = driver.CUmemAccessDesc()
        self.access.location = self.kind.location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(_call(driver.cuMemGetAllocationGranularity(self.kind, least)))

    def copy(self, tensor: Tensor) -> Tensor:
        """The same strides and contents, in a storage of its own that ends at unmapped addresses."""
        if not tensor.is_cuda or not tensor.numel():
            return tensor.clone()
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        whole = -(-size // self.granularity) * self.granularity
        # The address behind is reserved too, so that nothing else comes to stand there.
        address = int(_call(self.driver.cuMemAddressReserve(whole + self.granularity, 0, 0, 0)))
        handle = _call(self.driver.cuMemCreate(whole, self.kind, 0))
        self.driver.cuMemMap(address, whole, 0, handle, 0)
        self.driver.cuMemSetAccess(address, whole, [self.access], 1)
        self.mapped.append((address, whole, handle))
        memory = torch.as_tensor(_Bytes(address + whole - size, size), device=tensor.device)
        memory[: storage.nbytes()].copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def release(self) -> None:
        torch.cuda.synchronize()
        for address, whole, handle in self.mapped:
            self.driver.cuMemUnmap(address, whole)
            self.driver.cuMemRelease(handle)
            self.driver.cuMemAddressFree(address, whole + self.granularity)
        self.mapped.clear()


@contextmanager
def guarded() -> Iterator[Guard]:
    guard = Guard()
    try:
        yield guard
    finally:
        guard.release()
