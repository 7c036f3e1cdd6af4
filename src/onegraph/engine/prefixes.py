"""Prefix caching: which prefixes are cached, on the device or in host memory.

Pages of the cache go by the digest of the tokens up to their end (`engine/pages.py`); snapshots of recurrent states go
with them (`engine/snapshots.py`). What the device evicts is kept in host memory (`engine/offload.py`).
"""

import hashlib
from collections.abc import Sequence as Seq
from typing import Protocol

from onegraph.engine.exact_window import Sizes
from onegraph.engine.offload import HostCopies
from onegraph.engine.pages import PageAllocator, extend_digests
from onegraph.engine.params import Stats
from onegraph.engine.sequence import Sequence
from onegraph.engine.snapshots import Snapshots
from onegraph.runtime.offload import BATCH


class Executor(Protocol):
    """What holds the state: `engine.executor.Executor`, which documents these members."""

    stats: Stats

    @property
    def sizes(self) -> Sizes: ...
    @property
    def prefix_cacheable(self) -> bool: ...
    @property
    def needs_next_token(self) -> bool: ...
    @property
    def snapshot_slots(self) -> Seq[int]: ...
    @property
    def host_pages(self) -> HostCopies: ...
    @property
    def host_states(self) -> HostCopies: ...
    def copy_slot(self, source: int, target: int) -> None: ...


class Prefixes:
    """Of one scheduler.

    Attributes:
        allocator: of pages. snapshots: of state that does not grow with the text, where a prefix is shared together
            with it. sharing: whether prefixes are shared at all.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.allocator = PageAllocator(executor.sizes.pages)
        self.snapshots = Snapshots(executor.snapshot_slots)
        self.sharing = False

    def take(self, count: int, keep: int = 0) -> list[int]:
        """Allocates `count` pages; the caller has checked that they are free. Cached pages that this evicts are copied
        to host memory, and the next ones with them, since a launch for more takes no longer.

        keep: how many of the host copies, those used last, must not be overwritten.
        """
        host = self._executor.host_pages
        if len(host) and any(digest not in host for _, digest in self.allocator.evicted(count)):
            copied = host.save(self.allocator.evicted(count, BATCH), keep)
            self._executor.stats.offloaded_tokens += copied * self._executor.sizes.page_size
        pages = self.allocator.take(count)
        assert pages is not None, "too few pages are free"
        return pages

    def find(self, sequence: Sequence) -> tuple[list[int], list[bytes]]:
        """Pages that hold its beginning, with one user more, of which one token at least is left to read; and what
        follows them in host memory."""
        if not self.sharing:
            return [], []
        self._extend_digests(sequence, sequence.length)  # also where it shares only later, once it is scored
        return ([], []) if sequence.scored else self._find(sequence, host=True)

    def begin(self, sequence: Sequence, shared: list[int], kept: list[bytes], more: list[int]) -> None:
        """Its pages are those that `find` gave and more; what was found in host memory begins to arrive."""
        size, stats = self._executor.sizes.page_size, self._executor.stats
        sequence.pages, sequence.read = shared + more, (len(shared) + len(kept)) * size
        stats.shared_tokens += sequence.read
        if kept:
            sequence.arrivals += self._executor.host_pages.load(kept, more[: len(kept)])
            stats.restored_tokens += len(kept) * size

    def share_more(self, sequence: Sequence) -> None:
        """What others have read of its beginning since it was admitted: of prompts that come together, the first one
        reads for all."""
        if not self.sharing or sequence.scored:
            return
        shared, _ = self._find(sequence, host=False)
        tokens = len(shared) * self._executor.sizes.page_size
        if tokens <= sequence.read:
            self.allocator.give_back(shared)
            return
        self.allocator.give_back(sequence.pages[: len(shared)])
        sequence.pages[: len(shared)] = shared
        self._executor.stats.shared_tokens += tokens - sequence.read
        sequence.read = tokens
        self.restore(sequence)

    def restore(self, sequence: Sequence) -> None:
        """What recurrent layers had made of the beginning that it shares becomes its slot's state."""
        if self.snapshots and sequence.read:
            digest = sequence.digests[sequence.read // self._executor.sizes.page_size - 1]
            if digest in self.snapshots:
                self._executor.copy_slot(self.snapshots.use(digest), sequence.slot)
            else:
                sequence.arrivals += self._executor.host_states.load([digest], [sequence.slot])
            sequence.kept = sequence.read

    def snapshot(self, sequence: Sequence) -> None:
        """Keeps its slot's state for others, where it has read a whole number of pages. A step in flight may have begun
        behind them: tokens are taken back by their position, so the copy still holds the state before it."""
        size = self._executor.sizes.page_size
        if not self.sharing or not self.snapshots or not sequence.read or sequence.read % size:
            return
        self._extend_digests(sequence, sequence.length)
        if (count := sequence.read // size) > len(sequence.digests):
            return  # of its last page the token behind it is not known yet, by which what drafts is shared
        oldest = self.snapshots.oldest
        slot = self.snapshots.take(sequence.digests[count - 1])
        if slot is not None:
            if oldest is not None:
                self._executor.host_states.save([oldest])
            self._executor.copy_slot(sequence.slot, slot)
        sequence.kept = sequence.read

    def remember(self, sequence: Sequence) -> None:
        """Its full pages may be shared from now on."""
        if self.sharing:
            full = sequence.read // self._executor.sizes.page_size
            self._extend_digests(sequence, sequence.read)
            for page, digest in zip(sequence.pages[:full], sequence.digests, strict=False):
                self.allocator.remember(page, digest)

    def forget(self) -> None:
        """Nothing is known any more, and nothing arrives any more."""
        self.allocator.forget()
        self.snapshots.forget()
        self._executor.host_pages.forget()
        self._executor.host_states.forget()

    def _find(self, sequence: Sequence, host: bool) -> tuple[list[int], list[bytes]]:
        digests = sequence.digests[: (sequence.length - 1) // self._executor.sizes.page_size]
        pages = self.allocator.share(digests)
        kept = self._executor.host_pages.find(digests[len(pages) :]) if host else []
        if self.snapshots:
            found, states = len(pages) + len(kept), self._executor.host_states
            known = (n for n in range(found, 0, -1) if digests[n - 1] in self.snapshots or digests[n - 1] in states)
            count = next(known, 0)
            del kept[max(0, count - len(pages)) :]
            self.allocator.give_back(pages[count:])
            del pages[count:]
        return pages, kept

    def _extend_digests(self, sequence: Sequence, length: int) -> None:
        if len(sequence.digests) < length // self._executor.sizes.page_size:
            known, ahead = sequence.tokens(0, length), self._executor.needs_next_token
            apart = (sequence.adapter, sequence.params.cache_salt)
            root = hashlib.sha256(repr(apart).encode()).digest() if any(apart) else b""
            extend_digests(sequence.digests, known, self._executor.sizes.page_size, ahead=int(ahead), root=root)
