"""Rows that are exact while they are short, of a cache that is in codes.

Attention to few tokens takes longer from codes than exactly, whose kernel has less to do, and exact tokens of a short
row fit into the pages that its codes need later. So a batch is exact while all its rows are short, and turns into codes
between two steps where one of them is long, where together they are so many tokens that codes are worth it, or where
pages are wanted. A step never attends in both ways, which would take longer than codes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onegraph.engine.decoder import Model
from onegraph.formats.turboquant import TurboQuantConfig

if TYPE_CHECKING:
    from onegraph.engine.sequence import Sequence

TOGETHER = 16384  # tokens of all rows, from which on codes are worth it


@dataclass(frozen=True)
class Short:
    """tokens: of a row, from which on it is in codes; 0: from the first. places: tokens of a page until then."""

    tokens: int = 0
    places: int = 1

    def pages(self, tokens: int) -> int:
        """Of a row of up to so many tokens, while it is exact."""
        return -(-min(tokens, self.tokens) // self.places)

    def joins(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Whether a sequence may be exact beside others, which then all are."""
        rows = [*others]
        return (
            sequence.length < self.tokens
            and all(other.exact for other in rows)
            and sequence.length + sum(other.length for other in rows) < TOGETHER
        )

    def over(self, rows: Iterable[Sequence]) -> bool:
        """Whether those of these rows that are exact have to turn into codes."""
        rows = [*rows]
        exact = [row for row in rows if row.exact]
        full = any(row.read >= self.tokens for row in exact) or sum(row.read for row in exact) >= TOGETHER
        return bool(exact) and (full or len(exact) < len(rows))

    def steps(self, rows: Iterable[Sequence]) -> int:
        """That rows which are exact can take together, a token each, until they are over."""
        reads = [row.read for row in rows]
        return min(self.tokens - max(reads), max(1, (TOGETHER - sum(reads)) // len(reads)))

    def limit(self, sequence: Sequence) -> int:
        """Where a sequence stops, be it to turn into codes."""
        return min(sequence.limit, self.tokens) if sequence.exact else sequence.limit


LONG = Short()  # nothing is exact for being short


@dataclass(frozen=True)
class Sizes:
    """Of an engine's cache: tokens of a page, pages in all, pages of a row in codes and of a row in any way."""

    page_size: int
    pages: int
    coded: int
    per_row: int
    short: Short


def page_size_of(model: Model, kv: TurboQuantConfig | None) -> int:
    """Tokens of a page where nobody says: so many that one holds a tile of exact tokens, where rows may be exact."""
    if kv is None or not kv.short_on(model.devices[0].type):
        return model.page_size
    return max(model.page_size, kv.page_size(model.dtype.itemsize))


def sizes_of(
    model: Model, kv: TurboQuantConfig | None, *, rows: int, context: int, page_size: int | None, pages: int | None
) -> Sizes:
    """rows, context: of a batch, and tokens of a row. page_size, pages: where somebody says.

    By default a cache holds a full context of each row in codes, and at least TOGETHER tokens exactly where short rows
    can be so many, which is more where contexts are so short that they need no codes.
    """
    page_size = page_size_of(model, kv) if page_size is None else page_size
    coded = -(-context // page_size)
    places = 0 if kv is None else kv.exact_places(page_size, model.dtype.itemsize)
    tokens = 0 if kv is None or not places else min(kv.short_on(model.devices[0].type), context)
    short = Short(tokens, places) if tokens > 0 else LONG
    if pages is None:
        most = TOGETHER // short.places + rows  # pages, the last of each row begun
        pages = 1 + max(rows * coded, min(rows * short.pages(tokens), most))
    return Sizes(page_size, pages, coded, max(coded, short.pages(tokens)), short)
