"""Sequences that are exact while they are short, of a cache that is in codes.

Attention to few tokens takes longer from codes than exactly, whose kernel has less to do, and exact tokens of a short
sequence fit into the pages that its codes need later. So a sequence whose prompt is short begins exact and turns into
codes between two steps, where it has so many tokens that codes are worth it. When it turns follows from its own length
alone: what a token sees does not depend on what runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onegraph.engine.decoder import Model
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.nn.turboquant import Held

if TYPE_CHECKING:
    from onegraph.engine.sequence import Sequence

ROWS = 8  # that have room to be exact, whatever their codes take


@dataclass(frozen=True)
class Short:
    """tokens: of a sequence, from which on it is in codes; 0: from the first. places: tokens of a page until then."""

    tokens: int = 0
    places: int = 1

    def holds(self, prompt: int) -> bool:
        """Whether a sequence with so long a prompt is exact at first."""
        return prompt < self.tokens

    def pages(self, tokens: int) -> int:
        """Of a sequence of up to so many tokens, while it is exact."""
        return -(-min(tokens, self.tokens) // self.places)

    def limit(self, sequence: Sequence) -> int:
        """Where it stops, be it to turn into codes."""
        return min(sequence.limit, self.tokens) if sequence.exact else sequence.limit

    def full(self, sequence: Sequence) -> bool:
        """Whether it has to turn before it goes on."""
        return sequence.exact and sequence.read >= self.tokens

    def held(self, rows: Iterable[Sequence]) -> Held:
        found = {sequence.exact for sequence in rows}
        return "mixed" if len(found) == 2 else "exact" if True in found else "coded"

    @property
    def kinds(self) -> tuple[Held, ...]:
        """How rows of a step may be held."""
        return ("exact", "mixed", "coded") if self.tokens else ("coded",)


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

    By default a cache holds a full context of each row in codes, and a few rows exactly while they are short, which is
    more where contexts are so short that they need no codes. Sequences turn earlier where `pages` are fewer.
    """
    page_size = page_size_of(model, kv) if page_size is None else page_size
    coded = -(-context // page_size)
    places = 0 if kv is None else kv.exact_places(page_size, model.dtype.itemsize)
    tokens = 0 if kv is None or not places else min(kv.short_on(model.devices[0].type), context)
    if pages is None:
        pages = 1 + max(rows * coded, min(rows, ROWS) * (-(-tokens // places) if tokens else 0))
    tokens = min(tokens, (pages - 1) // rows * places)
    short = Short(tokens, places) if tokens > 0 else LONG
    return Sizes(page_size, pages, coded, max(coded, short.pages(tokens)), short)
