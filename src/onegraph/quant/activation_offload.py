"""Activations of the calibration text, in memory up to a bound and on disk beyond it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from onegraph.formats.files import writing


class ActivationOffload:
    """Where tensors go that do not fit.

    Args:
        directory: of the files, made when the first is written; what an earlier process left there is removed. None:
            everything stays in memory.
        limit: bytes that all `Batches` of this spill hold in memory together.
    """

    def __init__(self, directory: Path | None = None, limit: int = 0) -> None:
        self.directory, self.limit, self.held = directory, limit, 0
        self._names = count()
        self.close()

    @property
    def used(self) -> bool:
        """Whether there is a file."""
        return self.directory is not None and self.directory.exists()

    def batches(self, tensors: Iterable[Tensor] = ()) -> Batches:
        made = Batches(self)
        for tensor in tensors:
            made.append(tensor)
        return made

    def put(self, tensor: Tensor) -> Tensor | _File:
        """The tensor itself where there is room, else a file that holds it."""
        if self.directory is None or self.held + tensor.nbytes <= self.limit:
            self.held += tensor.nbytes
            return tensor
        self.directory.mkdir(parents=True, exist_ok=True)
        return _File(self.directory / f"{next(self._names)}", tensor)

    def drop(self, slot: Tensor | _File) -> None:
        if isinstance(slot, _File):
            slot.path.unlink(missing_ok=True)  # a mapping of it that is still read stays valid
        else:
            self.held -= slot.nbytes

    def close(self) -> None:
        """Removes all files."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


class _File:
    def __init__(self, path: Path, tensor: Tensor) -> None:
        self.path, self.shape, self.dtype, self.device = path, tensor.shape, tensor.dtype, tensor.device
        with writing(path):
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tofile(path)

    def read(self) -> Tensor:
        """The values, mapped: pages are read as they are touched, and the kernel may take them back."""
        flat = torch.from_file(str(self.path), shared=False, size=self.shape.numel(), dtype=self.dtype)
        return flat.view(self.shape).to(self.device)


class Batches:
    """A list of tensors, each in memory or on disk; what it gives out must not be written to."""

    def __init__(self, spill: ActivationOffload) -> None:
        self._spill = spill
        self._slots: list[Tensor | _File] = []

    def append(self, tensor: Tensor) -> None:
        self._slots.append(self._spill.put(tensor))

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, at: int) -> Tensor:
        slot = self._slots[at]
        return slot.read() if isinstance(slot, _File) else slot

    def __setitem__(self, at: int, tensor: Tensor) -> None:
        self._spill.drop(self._slots[at])
        self._slots[at] = self._spill.put(tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[at] for at in range(len(self)))

    def take(self, other: Batches) -> None:
        """Become `other`, which is empty afterwards."""
        self.clear()
        self._slots, other._slots = other._slots, self._slots

    def clear(self) -> None:
        for slot in self._slots:
            self._spill.drop(slot)
        self._slots = []
