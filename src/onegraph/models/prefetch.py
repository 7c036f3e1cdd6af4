"""Asynchronous prefetch of weights: several threads read blocks of files, each block goes onto its device.

A model is asked for unit by unit (a block of the decoder is one), and a unit is some thousand tensors that lie in
parallel in a file or two. So a unit is read in the order of the file, in blocks of megabytes, whatever order its
tensors are asked for in: threads fill a ring of pinned blocks, the unit after the present one already among them, and
the caller copies block after block onto the device until the tensor is there. The host holds the ring and nothing else;
the device holds, besides the model, what of one unit has come and was not asked for yet.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onegraph.formats.files import CheckpointError, reason

BLOCK_BYTES = 4 << 20  # PCIe and disks are at their rate from a few megabytes on
THREADS = 8  # one copies some 6 GB/s out of the page cache, PCIe 5 takes 50
SLOTS_EACH = (
    4  # blocks of the ring for a thread: some are read, some are sent, some wait for whoever asks to have a moment
)
GAP = 64 << 10  # bytes between two tensors that are read along rather than begin another block
AHEAD_BYTES = 1 << 30  # on the device and not asked for yet, so that disk and PCIe go on while layers are made


class Span(Protocol):
    """Where a tensor lies and what it is, `formats.checkpoint.TensorInfo`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int | None: ...


class Piece(NamedTuple):
    """What of a tensor lies in a block: `size` bytes from byte `start` of the block on, which are the tensor's from its
    byte `first` on."""

    name: str
    start: int
    first: int
    size: int


class Block(NamedTuple):
    """`size` bytes of a file from byte `offset` on."""

    file: Path
    offset: int
    size: int
    pieces: tuple[Piece, ...]


def blocks(spans: Mapping[str, Span], names: Sequence[str], size: int = BLOCK_BYTES) -> Iterator[Block]:
    """The bytes of the tensors `names` in the order of their files, in blocks of at most `size` bytes."""
    ordered = sorted(names, key=lambda name: (spans[name].file, spans[name].offset))
    for file, group in groupby(ordered, key=lambda name: spans[name].file):
        pieces: list[Piece] = []
        start = stop = 0
        for name in group:
            offset, nbytes = spans[name].offset, spans[name].nbytes
            assert offset is not None
            first = 0
            while first < nbytes:
                at = offset + first
                if pieces and (at - stop > GAP or at - start >= size):
                    yield Block(file, start, stop - start, tuple(pieces))
                    pieces = []
                if not pieces:
                    start = at
                stop = min(offset + nbytes, start + size)
                pieces.append(Piece(name, at - start, first, stop - at))
                first += stop - at
        if pieces:
            yield Block(file, start, stop - start, tuple(pieces))


@dataclass(eq=False)
class _Slot:
    """Memory of one block, and when the copies out of it are done."""

    memory: Tensor
    sent: torch.cuda.Event | None = None
    failure: Exception | None = None
    bytes: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = memoryview(self.memory.numpy().data)


class Ring:
    """Threads that read blocks, in the order given, into memory that is used again and again.

    Args:
        pinned: whether the memory is pinned, for copies to a GPU that nobody waits for.
        threads, slots, block_bytes: how many blocks are read at once and held at once, and the size of the largest.
    """

    def __init__(self, *, pinned: bool, threads: int, slots: int, block_bytes: int) -> None:
        memory = torch.empty(slots * block_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._free = deque(_Slot(each) for each in memory.split(block_bytes))
        self._asked: deque[tuple[int, Block]] = deque()
        self._read: dict[int, tuple[Block, _Slot]] = {}
        self._count = self._next = 0
        self._closed = False
        lock = threading.Lock()
        self._work, self._done = threading.Condition(lock), threading.Condition(lock)
        self._threads = [threading.Thread(target=self._run, name=f"read-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def ask(self, more: Iterator[Block]) -> None:
        """Puts blocks behind those asked for already."""
        with self._work:
            for block in more:
                self._asked.append((self._count, block))
                self._count += 1
            self._work.notify_all()

    def next(self) -> tuple[Block, _Slot]:
        """The next block in order, waited for; to be given back. Raises CheckpointError where it cannot be read."""
        with self._done:
            assert self._next < self._count, "nothing was asked for"
            while self._next not in self._read:
                self._done.wait()
            block, slot = self._read.pop(self._next)
            self._next += 1
        if slot.failure is not None:
            raise slot.failure
        return block, slot

    @property
    def ready(self) -> bool:
        """Whether `next` would not wait."""
        return self._next in self._read

    def give_back(self, slot: _Slot) -> None:
        with self._work:
            self._free.append(slot)
            self._work.notify()

    def close(self) -> None:
        """Ends the threads, each after the block that it reads."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._work:
                # A slot and the next block are taken together: the block that is waited for always has one.
                while not self._closed and not (self._asked and self._free):
                    self._work.wait()
                if self._closed:
                    return
                (index, block), slot = self._asked.popleft(), self._free.popleft()
            try:
                if slot.sent is not None:
                    slot.sent.synchronize()
                self._fill(slot.bytes, block)
            except Exception as error:
                slot.failure = error
            with self._done:
                self._read[index] = block, slot
                self._done.notify()

    def _fill(self, memory: memoryview, block: Block) -> None:
        done = 0
        try:
            descriptor = os.open(block.file, os.O_RDONLY)  # for each block: readahead is a matter of the open file
            try:
                while done < block.size:
                    got = os.preadv(descriptor, [memory[done : block.size]], block.offset + done)
                    if not got:
                        raise CheckpointError(
                            f"{block.file}: ends at byte {block.offset + done}, was longer when it was opened "
                            "(truncated meanwhile); fetch it again"
                        )
                    done += got
            finally:
                os.close(descriptor)
        except OSError as error:
            where = block.offset + done
            raise CheckpointError(f"{block.file}: cannot be read at byte {where}: {reason(error)}") from None


@dataclass
class _Landing:
    """A tensor on its way: its bytes on the device, and how many are still to come."""

    target: Tensor
    missing: int


class Prefetch:
    """Tensors of files, each once, on the device that it is asked for.

    Args:
        spans: where every tensor of `units` lies.
        units: names of tensors that are used together, in the order of use. While one unit is asked for, the next is
            read; another order is slower and as right.
        pinned: see `Ring`.
        block_bytes: read at once. threads: that read.
    """

    def __init__(
        self,
        spans: Mapping[str, Span],
        units: Sequence[Sequence[str]],
        *,
        pinned: bool,
        block_bytes: int = BLOCK_BYTES,
        threads: int = THREADS,
    ) -> None:
        self._spans, self._block_bytes = spans, block_bytes
        # Without bytes there is nothing to wait for, without an offset nothing that could be read as it is
        self._units = [
            [name for name in unit if spans[name].nbytes and spans[name].offset is not None] for unit in units
        ]
        most = 1 + sum(spans[name].nbytes for unit in self._units for name in unit) // block_bytes  # blocks, about
        threads = min(threads, most)
        self._ring = Ring(
            pinned=pinned, threads=threads, slots=min(SLOTS_EACH * threads, most), block_bytes=block_bytes
        )
        self._unit = {name: i for i, unit in enumerate(self._units) for name in unit}
        self._begun: set[int] = set()
        self._landing: dict[str, _Landing] = {}
        self._held = 0  # bytes of what is landing
        self._present = -1  # the unit asked for last
        self._done: set[int] = set()
        self._taken: set[str] = set()

    def take(self, name: str, device: torch.device) -> Tensor | None:
        """The tensor as stored, on `device`, its copy under way on the current stream; None where it is in no unit or
        was taken before. Raises CheckpointError where it cannot be read."""
        unit = self._unit.get(name)
        if unit is None or unit in self._done or name in self._taken:
            return None
        self._present = unit
        self._taken.add(name)
        for each in (unit, unit + 1):
            if each < len(self._units) and each not in self._begun:
                self._begun.add(each)
                self._ring.ask(blocks(self._spans, self._units[each], self._block_bytes))
        while name not in self._landing or self._landing[name].missing:
            self._land(device)
        while self._held < AHEAD_BYTES and self._ring.ready:
            self._land(device)
        span, target = self._spans[name], self._landing.pop(name).target
        self._held -= span.nbytes
        return target.to(device).view(span.dtype).view(span.shape)

    def drop(self) -> None:
        """The unit asked for last is done: what came of it and was not asked for is dropped, and None from now on."""
        self._done.add(self._present)
        for name in [name for name in self._landing if self._unit[name] == self._present]:
            del self._landing[name]
            self._held -= self._spans[name].nbytes

    def close(self) -> None:
        """Ends the threads that read. The tensors handed out stay valid."""
        self._ring.close()
        self._landing.clear()

    def _land(self, device: torch.device) -> None:
        """The next block onto the device: the copies are asked for, not waited for."""
        block, slot = self._ring.next()
        gpu = device.type == "cuda"
        for name, start, first, size in block.pieces:
            if self._unit[name] in self._done:  # nobody asked for it
                continue
            if name not in self._landing:
                nbytes = self._spans[name].nbytes
                self._landing[name] = _Landing(torch.empty(nbytes, dtype=torch.uint8, device=device), nbytes)
                self._held += nbytes
            landing = self._landing[name]
            if landing.target.device != device:  # it began to land for another: the slot is told when this one is done
                landing.target = landing.target.to(device)
            landing.target[first : first + size].copy_(slot.memory[start : start + size], non_blocking=gpu)
            landing.missing -= size
        if gpu:
            slot.sent = torch.cuda.Event(blocking=True)  # a thread that waits shall not spin
            slot.sent.record(torch.cuda.current_stream(device))
        self._ring.give_back(slot)
