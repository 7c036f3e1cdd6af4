"""Which slots hold copies of recurrent states at the ends of pages, by the digest of the tokens up to there.

Host state, as `engine/pages.py`: pages say what the layers that attend keep of a prefix, a snapshot what the others do.
A prefix is shared up to a page's end of which both are known.
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

    def longest(self, digests: Seq[bytes]) -> int:
        """How many of a chain of digests lead to a snapshot; 0 where none does."""
        return next((n for n in range(len(digests), 0, -1) if digests[n - 1] in self._known), 0)

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
