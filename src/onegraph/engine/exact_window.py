"""Sizes of a cache, and until when its rows are exact where it stores codes.

Attention to few tokens takes longer from codes than exactly, whose kernel has less to do, and the exact tokens of a
short row fit into the pages that its codes need later. So a batch is exact while all its rows are short. It is encoded
between two steps where a row becomes long, where all rows together have so many tokens that codes are faster, or where
pages run short. A step never attends in both ways, which would take longer than codes alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from onegraph.engine.decoder import Model
from onegraph.formats.turboquant import TurboQuantConfig

MAX_EXACT_TOKENS = 16384  # of all rows together; from there on codes are faster


class Row(Protocol):
    """A sequence: whether it is exact now, its known tokens, those in the cache, and those that ever enter it."""

    exact: bool
    read: int

    @property
    def length(self) -> int: ...
    @property
    def limit(self) -> int: ...


@dataclass(frozen=True)
class ExactWindow:
    """tokens: of a row, from which on it is in codes; 0: from the first. places: tokens of a page until then."""

    tokens: int = 0
    places: int = 1

    def pages(self, tokens: int) -> int:
        """Of a row of up to so many tokens, while it is exact."""
        return -(-min(tokens, self.tokens) // self.places)

    def admits(self, row: Row, others: Iterable[Row]) -> bool:
        """Whether a row may be exact in a batch with others, which then all are."""
        rows = [*others]
        return (
            row.length < self.tokens
            and all(other.exact for other in rows)
            and row.length + sum(other.length for other in rows) < MAX_EXACT_TOKENS
        )

    def is_over(self, rows: Iterable[Row]) -> bool:
        """Whether the exact ones of these rows have to be encoded."""
        rows = [*rows]
        exact = [row for row in rows if row.exact]
        full = any(row.read >= self.tokens for row in exact) or sum(row.read for row in exact) >= MAX_EXACT_TOKENS
        return bool(exact) and (full or len(exact) < len(rows))

    def steps(self, rows: Iterable[Row]) -> int:
        """Steps of a token each that exact rows can take together until `is_over`."""
        reads = [row.read for row in rows]
        return min(self.tokens - max(reads), max(1, (MAX_EXACT_TOKENS - sum(reads)) // len(reads)))

    def limit(self, row: Row) -> int:
        """Where a row stops: at its end, or to be encoded."""
        return min(row.limit, self.tokens) if row.exact else row.limit


NEVER_EXACT = ExactWindow()


@dataclass(frozen=True)
class Sizes:
    """Of an engine's cache.

    rows: sequences at once. context: tokens of each. page_size: tokens of a page. pages: in all. coded: pages of a row
    in codes. per_row: of a row in any way. exact_window: when a row is exact.
    """

    rows: int
    context: int
    page_size: int
    pages: int
    coded: int
    per_row: int
    exact_window: ExactWindow

    def needed(self, tokens: int, exact: bool = False) -> int:
        """Pages that hold so many tokens of a row; of an exact one both before and after it is encoded."""
        pages = -(-tokens // self.page_size)
        return max(pages, self.exact_window.pages(tokens)) if exact else pages


def page_size_of(model: Model, kv: TurboQuantConfig | None) -> int:
    """The default page size: where rows may be exact, a page holds a tile of exact tokens."""
    if kv is None or not kv.short_on(model.devices[0].type):
        return model.page_size
    return max(model.page_size, kv.page_size(model.dtype.itemsize))


def sizes_of(
    model: Model, kv: TurboQuantConfig | None, *, rows: int, context: int, page_size: int | None, pages: int | None
) -> Sizes:
    """page_size, pages: None for the default.

    By default a cache holds a full context of each row in codes, and at least MAX_EXACT_TOKENS tokens exactly where
    short rows can be so many, which is more where contexts are so short that they need no codes.
    """
    page_size = page_size_of(model, kv) if page_size is None else page_size
    coded = -(-context // page_size)
    places = 0 if kv is None else kv.exact_places(page_size, model.dtype.itemsize)
    tokens = 0 if kv is None or not places else min(kv.short_on(model.devices[0].type), context)
    window = ExactWindow(tokens, places) if tokens > 0 else NEVER_EXACT
    if pages is None:
        most = MAX_EXACT_TOKENS // window.places + rows  # pages, the last of each row begun
        pages = 1 + max(rows * coded, min(rows * window.pages(tokens), most))
    return Sizes(rows, context, page_size, pages, coded, max(coded, window.pages(tokens)), window)
