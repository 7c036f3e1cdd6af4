"""Tensors from mapped files to a device, without a second copy of them in the host's memory."""

import torch
from torch import Tensor

from onegraph.formats.weight import check_conversion

CHUNK_BYTES = 16 << 20  # of pinned memory, twice: PCIe is at its rate from a few megabytes on


class Stream:
    """Copies host tensors to `device`: file -> pinned chunk -> device, one chunk read while the other is sent.

    A pageable copy of a whole tensor would pass through the driver's own staging, one page at a time, and a conversion
    on the host would hold the tensor twice. On a CPU, where nothing is to be sent, a tensor stays the file's mapping.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device, self.chunk_bytes = device, chunk_bytes
        self._slots: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def __call__(self, value: Tensor, dtype: torch.dtype | None = None, name: str = "") -> Tensor:
        """`value` on the device, as `dtype` (None: as it is), converted there. Raises CheckpointError with the `name`
        where codes would become numbers (`check_conversion`)."""
        dtype = dtype or value.dtype
        check_conversion(name, value.dtype, dtype)
        if value.device.type != "cpu" or self.device.type == "cpu":
            return value.to(device=self.device, dtype=dtype)
        target = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        source = value.contiguous().view(-1)
        step = max(1, self.chunk_bytes // value.element_size())
        for turn, first in enumerate(range(0, source.numel(), step)):
            chunk = source[first : first + step]
            slot, sent = self._slot(turn % 2)
            if sent is not None:
                sent.synchronize()  # the copy out of it two chunks ago
            staged = slot[: chunk.numel() * chunk.element_size()].view(chunk.dtype)
            staged.copy_(chunk)
            target.view(-1)[first : first + step].copy_(staged, non_blocking=True)
            if sent is not None:
                sent.record(torch.cuda.current_stream(self.device))
        for _, sent in self._slots:
            if sent is not None:
                sent.synchronize()  # the next tensor begins with either slot
        return target.to(dtype)

    def _slot(self, turn: int) -> tuple[Tensor, torch.cuda.Event | None]:
        while len(self._slots) <= turn:
            gpu = self.device.type == "cuda"
            memory = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=gpu)
            self._slots.append((memory, torch.cuda.Event() if gpu else None))
        return self._slots[turn]
