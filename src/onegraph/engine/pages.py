"""Which pages of the KV cache are free, and what is known to be in them.

Host state: it changes between steps, never inside one. A full page whose content is a function of the tokens up to its
end alone goes by the digest of those tokens; it stays findable after its last user gave it back, until its memory is
needed.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from itertools import islice


class PageAllocator:
    """Hands out page numbers of a cache with `pages` pages; page 0 is the sentinel that padding writes to.

    users: sequences that have each page."""

    def __init__(self, pages: int) -> None:
        self.capacity = pages - 1
        self._free = list(range(pages - 1, 0, -1))
        self.users = [0] * pages
        self._known: dict[bytes, int] = {}  # digest -> page
        self._digests: dict[int, bytes] = {}  # the same the other way round
        self._unused: OrderedDict[int, None] = OrderedDict()  # known pages without a user, the next to go first

    @property
    def free(self) -> int:
        """Pages without a user."""
        return len(self._free) + len(self._unused)

    def take(self, count: int) -> list[int] | None:
        """So many pages, or None while too few are free. What is known to be in a page goes last."""
        if count > self.free:
            return None
        return [self._take_one() for _ in range(count)]

    def evicted(self, count: int, more: int = 0) -> list[tuple[int, bytes]]:
        """Pages that `take(count)` evicts, with what is known to be in each; then up to `more` that go next."""
        first = max(0, count - len(self._free))
        return [(page, self._digests[page]) for page in islice(self._unused, first + more if first else 0)]

    def share(self, digests: Seq[bytes]) -> list[int]:
        """The pages of the longest known beginning of a chain of digests, with one user more."""
        pages = []
        for digest in digests:
            if (page := self._known.get(digest)) is None:
                break
            self._unused.pop(page, None)
            self.users[page] += 1
            pages.append(page)
        return pages

    def remember(self, page: int, digest: bytes) -> None:
        """From now on this page holds what `digest` stands for; where another does already, that one is found."""
        if digest not in self._known and page not in self._digests:
            self._known[digest], self._digests[page] = page, digest

    def give_back(self, pages: Seq[int]) -> None:
        for page in reversed(pages):  # of known ones the end of a text goes first: its beginning is likelier to return
            self.users[page] -= 1
            assert self.users[page] >= 0, "a page was given back twice"
            if self.users[page] == 0 and page in self._digests:
                self._unused[page] = None
            elif self.users[page] == 0:
                self._free.append(page)

    def forget(self) -> None:
        """Nothing is known any more."""
        self._free.extend(self._unused)
        self._unused.clear()
        self._known.clear()
        self._digests.clear()

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unused.popitem(last=False)
            del self._known[self._digests.pop(page)]
        self.users[page] = 1
        return page


def extend_digests(digests: list[bytes], tokens: Seq[int], page_size: int, ahead: int = 0, root: bytes = b"") -> None:
    """Appends to `digests` so that each full page of `tokens` has its own: of all tokens up to the page's end, and of
    as many behind it as its content depends on (`ahead`). root: what else it depends on.

    SHA-256, not Python's hash: a client that could make two texts collide would read another's keys and values.
    """
    for end in range((len(digests) + 1) * page_size, len(tokens) + 1 - ahead, page_size):
        before = digests[-1] if digests else root
        digests.append(hashlib.sha256(before + array("q", tokens[end - page_size : end + ahead]).tobytes()).digest())
