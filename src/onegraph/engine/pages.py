"""Which pages of the KV cache are free. Host state: it changes when a sequence comes or goes, never inside a step."""


class PageAllocator:
    """Hands out page numbers of a cache with `pages` pages; page 0 is the sentinel that padding writes to."""

    def __init__(self, pages: int, page_size: int):
        self.page_size = page_size
        self.capacity = pages - 1
        self._free = list(range(pages - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def take(self, tokens: int) -> list[int] | None:
        """Pages for so many tokens, or None while too few are free."""
        count = self.needed(tokens)
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.capacity, "a page was given back twice"
