"""The prefix cache in host memory: pages that the device's prefix cache evicts are copied there, and copied back for a
prompt that shares them instead of computing them again.

A copy goes by the digest of the tokens that its content depends on, as pages do (`engine/pages.py`). It stays where it
is when it has been copied back, so that evicting the page again costs nothing.
"""

from collections.abc import Sequence as Seq
from itertools import takewhile

from torch import Tensor

from onegraph.engine.snapshots import Snapshots
from onegraph.engine.steps import Steps
from onegraph.nn.state import Pages, RecurrentSlots
from onegraph.runtime.offload import Arrival, HostBuffer, entry_bytes

GIB = 1 << 30
NOT_SHARED = "prefix caching is unsupported with {}"


class HostCopies:
    """Copies of places of one kind of state; the one used longest ago is written over first.

    Args:
        stores: the memory, of each rank. count: places in each; 0 keeps nothing.
    """

    def __init__(self, stores: Seq[HostBuffer] = (), count: int = 0) -> None:
        self._stores, self._known = list(stores), Snapshots(range(count))

    def __len__(self) -> int:
        """Copies that there may be."""
        return len(self._known)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._known

    @property
    def used(self) -> int:
        return self._known.used

    def find(self, digests: Seq[bytes]) -> list[bytes]:
        """The longest beginning of a chain of digests that is here; all of it counts as used now."""
        found = list(takewhile(self._known.__contains__, digests))
        for digest in reversed(found):  # the end of a text is written over first, as on the device
            self._known.use(digest)
        return found

    def save(self, places: Seq[tuple[int, bytes]], keep: int = 0) -> int:
        """Copies places, with the digests of what they hold, that are not here yet; returns how many.

        keep: how many of the copies, those used last, must not be overwritten.
        """
        new = [(place, digest) for place, digest in places if digest not in self._known][: max(0, len(self) - keep)]
        slots = [slot for _, digest in new if (slot := self._known.take(digest)) is not None]
        try:
            for store in self._stores if new else ():
                store.save([place for place, _ in new], slots)
        except BaseException:
            self._known.forget()  # some slots hold neither what they held nor what they should
            raise
        return len(new)

    def load(self, digests: Seq[bytes], places: Seq[int]) -> list[Arrival]:
        """Begins to copy what is here into places of the device (`HostBuffer.load`)."""
        slots = [self._known.use(digest) for digest in reversed(digests)][::-1]
        return [store.load(slots, places) for store in self._stores]

    def forget(self) -> None:
        """Nothing is here any more, and nothing is under way: the device's work to come is behind it."""
        self._known.forget()
        for store in self._stores:
            store.join()


NOTHING = HostCopies()


def offloading(ranks: Seq[Steps], size: float | None, *, prefix_cacheable: bool) -> tuple[HostCopies, HostCopies]:
    """Copies of pages, and of snapshots of recurrent states, in `size` GiB of host memory of all ranks together; None
    for none. Of a model with both, each has half of it.

    Raises ValueError where prefixes are not shared, or a page or snapshot takes more than there is.
    """
    if size is None:
        return NOTHING, NOTHING
    if not prefix_cacheable:
        setting = ranks[0].cache.setting
        what = "batch_invariant, this model or this draft model" if setting == "exact" else setting
        raise ValueError(f"kv_offloading_size: got {size:g}; {NOT_SHARED.format(what)}: leave it out")
    pages = [_tensors(rank, Pages) for rank in ranks]
    states = [_tensors(rank, RecurrentSlots) for rank in ranks]
    limit = int(size * GIB) // (2 if states[0] else 1)
    return _copies("page", pages, size, limit), _copies("snapshot", states, size, limit) if states[0] else NOTHING


def _tensors(rank: Steps, kind: type) -> list[Tensor]:
    """Of the cache, and of what drafts beside it."""
    caches = [rank.cache]
    if rank.rounds is not None and (own := getattr(rank.rounds.drafter, "cache", None)) is not None:
        caches.append(own)
    return [tensor for cache in caches for each in cache.kinds if isinstance(each, kind) for tensor in each.tensors]


def _copies(what: str, tensors: Seq[Seq[Tensor]], size: float, limit: int) -> HostCopies:
    each = sum(map(entry_bytes, tensors))
    if limit < each:
        least = 1.01 * size * each / max(1, limit)
        raise ValueError(
            f"kv_offloading_size: got {size:g} GiB, which does not hold a {what} of {each / 1e6:.2f} MB; allowed is "
            f"{least:.3g} GiB and more"
        )
    count = limit // each
    return HostCopies([HostBuffer(own, count) for own in tensors], count)
