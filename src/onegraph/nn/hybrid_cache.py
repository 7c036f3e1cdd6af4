"""The state of a model of which some layers attend and others are recurrent: pages beside slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onegraph.nn.attention import PagedCache
from onegraph.nn.latent import LatentCache
from onegraph.nn.recurrent import Recurrent
from onegraph.nn.state import RecurrentSlots, SequenceState, StateKind
from onegraph.nn.turboquant import TurboQuantCache

SNAPSHOTS = 8  # copies of states at most, by which a prefix is shared


class HybridCache(SequenceState):
    """Keys and values of the layers that attend, exact or in codes, or their latents, and slots of the others.

    Args:
        attention: the cache of the former, whose rows and block table are this one's.
        recurrent: the latter.

    Attributes (see `PagedCache` for block_table, positions and counts):
        slots: int32 [rows], the slot that belongs to the row's sequence (at first row i owns slot i + 1); slot 0
            belongs to nobody, and the last `SNAPSHOTS` hold copies.
        states: of each recurrent layer, by its number.
    """

    def __init__(
        self,
        attention: PagedCache | TurboQuantCache | LatentCache,
        recurrent: Sequence[Recurrent],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.attention = attention
        self.block_table, self.positions, self.counts = attention.block_table, attention.positions, attention.counts
        rows = len(self.positions)
        self.slots = torch.arange(1, rows + 1, device=device, dtype=torch.int32)
        kept = SNAPSHOTS if attention.prefix_cacheable else 0
        self.snapshot_slots = range(rows + 1, rows + 1 + kept)
        self.states: dict[int, list[Tensor]] = {}
        self._tensors: list[Tensor] = []  # [slots, layers, ...]: a slot is copied for all layers at once
        alike: dict[tuple[Any, ...], list[int]] = {}
        for layer in recurrent:
            alike.setdefault(tuple(layer.state(dtype)), []).append(layer.index)
        for sizes, layers in alike.items():
            made = [torch.zeros(len(layers), rows + 1 + kept, *shape, device=device, dtype=d) for shape, d in sizes]
            self._tensors += [tensor.transpose(0, 1) for tensor in made]
            self.states |= {layer: [tensor[i] for tensor in made] for i, layer in enumerate(layers)}

    @property
    def setting(self) -> str:
        return self.attention.setting

    @property
    def prefix_cacheable(self) -> bool:
        """Pages of keys and values are, together with snapshots of the other layers' states."""
        return bool(self.snapshot_slots)

    @property
    def parts(self) -> list[HybridCache]:
        """One for each stage of a model: this is the only one."""
        return [self]

    @property
    def kinds(self) -> list[StateKind]:
        return [*self.attention.kinds, RecurrentSlots(self._tensors)]

    @property
    def page_size(self) -> int:
        return self.attention.page_size

    @property
    def pages(self) -> int:
        return self.attention.pages

    @property
    def max_context(self) -> int:
        """Tokens that a row's part of the block table can address."""
        return self.block_table.shape[1] * self.page_size

    @property
    def squares(self) -> Tensor:
        """As `TurboQuantCache.squares`."""
        return self._coded.squares

    @property
    def _coded(self) -> TurboQuantCache:
        assert isinstance(self.attention, TurboQuantCache)
        return self.attention

    def reset(self) -> None:
        super().reset()
        self.attention.reset()

    def view(self, rows: slice = slice(None), pages: int | None = None) -> HybridCache:
        """The same storage seen through some rows, as `PagedCache.view`."""
        other = object.__new__(HybridCache)
        other.__dict__.update(self.__dict__)
        other.block_table = self.block_table[rows, :pages]
        other.positions, other.counts, other.slots = self.positions[rows], self.counts[rows], self.slots[rows]
        return other

    def exactly(self) -> HybridCache:
        """As `TurboQuantCache.exactly`, of the layers that attend."""
        return self._over(self._coded.exactly())

    def as_decoded(self) -> HybridCache:
        """As `TurboQuantCache.as_decoded`; a recurrent layer computes the same either way."""
        assert not isinstance(self.attention, PagedCache)
        return self._over(self.attention.as_decoded())

    def encode(self, pages: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """As `TurboQuantCache.encode`."""
        self._coded.encode(pages, slots, tokens)

    def errors(self) -> list[float]:
        """As `TurboQuantCache.errors`."""
        return self._coded.errors()

    def attend(self, layer: Any, *inputs: Tensor) -> Tensor:
        """As the cache of keys and values does for `Attention`; a recurrent layer's state is read and written."""
        if isinstance(layer, Recurrent):
            return layer.run(self.states[layer.index], self, *inputs)
        seen: Any = self.attention.view()
        seen.block_table, seen.positions, seen.counts = self.block_table, self.positions, self.counts
        seen.slots = self.slots
        result: Tensor = seen.attend(layer, *inputs)
        return result

    def _over(self, attention: TurboQuantCache | LatentCache) -> HybridCache:
        other = self.view()
        other.attention = attention
        return other
