"""Which slots hold copies of state, by the digest of the tokens that it depends on.

Host state, as `engine/pages.py`. On the device they are snapshots of recurrent states at the ends of pages: pages say
what the layers that attend keep of a prefix, a snapshot what the others do, and a prefix is shared up to a page's end
of which both are known. In host memory they are copies of pages and snapshots that the device has no room for.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq

EVERY = 8  # pages of a text from one snapshot to the next while it grows


class Snapshots:
    """Of the slots in `slots`; the one used longest ago is written over first."""

    def __init__(self, slots: Seq[int]) -> None:
        self._slots = list(slots)
        self.forget()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._known

    @property
    def used(self) -> int:
        """Slots that hold something."""
        return len(self._known)

    @property
    def oldest(self) -> tuple[int, bytes] | None:
        """The slot, and its digest, that the next one writes over; None while some are free."""
        return None if self._free else next(((slot, digest) for digest, slot in self._known.items()), None)

    def use(self, digest: bytes) -> int:
        """The slot of a known snapshot."""
        self._known.move_to_end(digest)
        return self._known[digest]

    def take(self, digest: bytes) -> int | None:
        """A slot to copy a state to that `digest` stands for from now on; None where it is known already."""
        if digest in self._known:
            self._known.move_to_end(digest)
            return None
        slot = self._free.pop() if self._free else self._known.popitem(last=False)[1]
        self._known[digest] = slot
        return slot

    def forget(self) -> None:
        """Nothing is known any more."""
        self._free = self._slots[::-1]
        self._known: OrderedDict[bytes, int] = OrderedDict()
