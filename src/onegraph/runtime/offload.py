"""Host memory for entries of device tensors: copies out and back, on a stream of their own; on a CPU plain copies.

An entry is an index of the first dimension: a page, or a slot. All traffic with the host is on one side stream, so that
it keeps the order in which it was launched: a copy is never read before it is complete, and never written over while it
is read. The entries on the device are read on the caller's stream, behind what was launched and before what comes.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from onegraph.ops.cuda import host_memory

STAGING = 32 << 20  # bytes on the device in each direction, unless an entry takes more
BATCH = 32  # entries that are copied at once: of each tensor one launch
UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Arrival:
    """Copies to a device that are under way. event: behind them; None where they are done."""

    def __init__(self, device: torch.device, event: "torch.cuda.Event | None" = None) -> None:
        self._device, self._event = device, event

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def join(self) -> None:
        """What is launched on the current stream from now on comes behind them; the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class HostBuffer:
    """Room for copies of `count` entries of some tensors of one device, all of an entry side by side.

    Args:
        tensors: each [entries, ...], of any dtypes.

    The memory is allocated at once, page-locked where the tensors are on a GPU. Raises ValueError where the system does
    not give so much.
    """

    def __init__(self, tensors: Seq[Tensor], count: int) -> None:
        self.device = tensors[0].device
        unit = copy_unit(tensors)
        self._pieces = [piece for tensor in tensors for piece in _rows(tensor, UNITS[unit])]
        width = sum(piece.shape[1] for piece in self._pieces)
        pinned = self.device.type == "cuda"
        if pinned:
            self._host = host_memory.pinned(count * width * unit, self.device).view(UNITS[unit]).view(count, width)
        else:
            self._host = torch.empty(count, width, dtype=UNITS[unit])
        self._batch = max(1, min(count, BATCH, STAGING // (width * unit)))
        self._out, self._in = (torch.empty(self._batch, width, dtype=UNITS[unit], device=self.device) for _ in range(2))
        self._stream = torch.cuda.Stream(self.device) if pinned else None
        self._out_free = torch.cuda.Event() if pinned else None  # behind the copies out of `_out`

    def save(self, entries: Seq[int], slots: Seq[int]) -> None:
        """Copies entries into slots of the host, in the state behind what is launched on the current stream. On that
        stream they may be overwritten at once."""
        for index, some in self._batches(entries, slots):
            if self._out_free is not None:
                torch.cuda.current_stream(self.device).wait_event(self._out_free)
            for piece, staged in self._staged(self._out, len(some)):
                torch.index_select(piece, 0, index, out=staged)
            self._wait_for_caller()
            with self._on_side_stream():
                for row, slot in zip(self._out, some, strict=False):
                    self._host[slot].copy_(row, non_blocking=True)
                if self._out_free is not None:
                    self._out_free.record(self._stream)

    def load(self, slots: Seq[int], entries: Seq[int]) -> Arrival:
        """Begins to copy slots of the host into entries, behind what is launched on the current stream. Nothing else
        may touch the entries until the arrival is joined."""
        self._wait_for_caller()
        with self._on_side_stream():
            for index, some in self._batches(entries, slots):
                for row, slot in zip(self._in, some, strict=False):
                    row.copy_(self._host[slot], non_blocking=True)
                for piece, staged in self._staged(self._in, len(some)):
                    piece.index_copy_(0, index, staged)
            return self._arrival()

    def join(self) -> None:
        """As `Arrival.join`, of all that was begun."""
        with self._on_side_stream():
            arrival = self._arrival()
        arrival.join()

    def _arrival(self) -> Arrival:
        if self._stream is None:
            return Arrival(self.device)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Arrival(self.device, event)

    def _wait_for_caller(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _on_side_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _batches(self, entries: Seq[int], slots: Seq[int]) -> Iterator[tuple[Tensor, Seq[int]]]:
        """Entries, int64 on the device, and their slots, as many as the staging memory takes at once."""
        if len(entries) != len(slots):
            raise ValueError(f"entries: got {len(entries)} for {len(slots)} slots; give one for each")
        index = torch.tensor(entries, dtype=torch.int64)
        if self._stream is not None:  # on the current stream, without waiting for it
            index = index.pin_memory().to(self.device, non_blocking=True)
        for start in range(0, len(entries), self._batch):
            end = start + self._batch
            yield index[start:end], slots[start:end]

    def _staged(self, staging: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece with its part of the first `count` rows."""
        start = 0
        for piece in self._pieces:
            end = start + piece.shape[1]
            yield piece, staging[:count, start:end]
            start = end


def entry_bytes(tensors: Seq[Tensor]) -> int:
    """Bytes of one entry of tensors [entries, ...]."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)


def copy_unit(tensors: Seq[Tensor]) -> int:
    """The widest integer, in bytes, as which every entry of them can be copied."""
    return math.gcd(8, *(piece.shape[1] * piece.element_size() for tensor in tensors for piece in _rows(tensor)))


def _rows(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """A tensor [entries, ...] as views [entries, N]: one, or several where its entries are not contiguous."""
    try:
        rows = tensor.view(len(tensor), -1)
    except RuntimeError:
        rows = None
    if rows is None or (rows.shape[1] > 1 and rows.stride(1) != 1):
        for part in tensor.unbind(1):
            yield from _rows(part, dtype)
    else:
        yield rows if dtype is None else rows.view(dtype)
