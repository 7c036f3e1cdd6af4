"""What the simulated allocator knows: the storages that live, and how many bytes each storage had."""

import weakref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onegraph.check.simulate.device import StorageRecord, block, storage_of, weak


class Storages:
    """records: of living storages of the device, by address; count: of all that there ever were; sizes: bytes, by
    number; made: phase and step in which each was made; weak: of those that a view without ownership refers to; pinned:
    storages of the host that a copy may read without waiting."""

    def __init__(self) -> None:
        self.records: weakref.WeakValueDictionary[int, StorageRecord] = weakref.WeakValueDictionary()
        self.count = 0
        self.sizes: dict[int, int] = {}
        self.made: dict[int, tuple[str, int]] = {}
        self.weak: dict[int, StorageRecord] = {}
        self.pinned: dict[int, StorageWeakRef] = {}

    def record(self, inner: Tensor) -> StorageRecord | None:
        """That of the storage of a plain tensor, None where it is none of the device."""
        key = storage_of(inner)
        return self.records.get(key) or self.weak.get(key)

    def weakly(self, inner: Tensor) -> StorageRecord | None:
        """A record for a view that does not keep its memory: it says which memory that was."""
        known = self.record(inner)
        if known is None:
            return None
        shadow = StorageRecord(known.number, known.nbytes, known.born, known.phase, None)
        return self.weak.setdefault(storage_of(inner), shadow)

    def add(self, inner: Tensor, born: int, phase: str) -> StorageRecord:
        """A storage that is new, made in step `born`."""
        self.count += 1
        self.made[self.count] = phase, born
        nbytes = self.sizes[self.count] = block(inner).untyped_storage().nbytes()
        made = self.records[storage_of(inner)] = StorageRecord(self.count, nbytes, born, phase, None)
        return made

    def alive(self) -> set[int]:
        """Numbers of the storages that some tensor of the user's refers to."""
        return {record.number for record in list(self.records.values())}

    def is_pinned(self, tensor: Tensor) -> bool:
        known = self.pinned.get(storage_of(tensor))
        return known is not None and not known.expired()

    def pin(self, tensor: Tensor) -> None:
        self.pinned[storage_of(tensor)] = weak(tensor)

    def forget(self, known: set[int]) -> None:
        """Drop what is kept of storages that are gone and not among `known`."""
        known = known | self.alive()
        self.sizes = {number: nbytes for number, nbytes in self.sizes.items() if number in known}
        self.made = {number: made for number, made in self.made.items() if number in known}
        self.pinned = {key: storage for key, storage in self.pinned.items() if not storage.expired()}
