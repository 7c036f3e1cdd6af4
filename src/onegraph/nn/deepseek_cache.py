"""The state of DeepSeek-V4's attention: what a sequence keeps of its latest tokens, and entries in pages.

All of it is made at its final shape. A sequence owns one *slot*, which holds what has a fixed size (the window's keys,
the compressors' latest tokens), and pages, which hold what grows: one entry for 4 or 128 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegraph.formats.deepseek_kv import row_bytes
from onegraph.nn.deepseek_attention import Compressor, DeepseekAttention
from onegraph.nn.state import Pages, Rings, SequenceState, StateKind
from onegraph.ops.deepseek_attention import deepseek_attention, deepseek_qkv
from onegraph.ops.deepseek_index import deepseek_index
from onegraph.ops.deepseek_prepare import deepseek_prepare


class DeepseekCache(SequenceState):
    """State of a number of layers on one device.

    Args:
        layers: the attention layers whose state it holds.
        rows: sequences at once; there is one slot more, since slot 0 belongs to nobody.
        pages: of the pools; page 0 belongs to nobody. page_size: tokens that a page stands for, a multiple of every
            compression ratio. pages_per_row: columns of the block table.
        spare: latest tokens that may be taken back (`truncate`): the rings have so many places more.

    Attributes:
        block_table int32 [rows, pages_per_row], positions, counts and slots int32 [rows]: as in `PagedCache`, and which
            slot each row owns (at first row i owns slot i + 1).
        fp8: keys (windows and entries) are rows of FP8 with a bfloat16 rotary part; what compressors and indexer keep
            stays in `dtype`.
    """

    prefix_cacheable = False  # windows and the compressors' latest tokens lie in slots

    def __init__(
        self,
        layers: list[DeepseekAttention],
        *,
        rows: int,
        pages: int,
        page_size: int,
        pages_per_row: int,
        device: torch.device | str,
        dtype: torch.dtype,
        fp8: bool = False,
        spare: int = 0,
    ) -> None:
        least_of = ("rows", rows, 1), ("pages", pages, 2), ("pages_per_row", pages_per_row, 1), ("spare", spare, 0)
        for name, value, least in least_of:
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        compressors = [c for layer in layers for c in (layer.compressor, layer.indexer) if c is not None]
        for ratio in sorted({c.ratio for c in compressors}):
            if page_size < 1 or page_size % ratio:
                raise ValueError(
                    f"page_size is {page_size}; it must be a multiple of the compression ratio {ratio}, so that an "
                    "entry lies in one page"
                )

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        def keys(a: DeepseekAttention, many: int, each: int) -> Tensor:
            width = row_bytes(a.head_dim, 2 * a.cos.shape[1]) if fp8 else a.head_dim
            return torch.zeros(many, each, width, device=device, dtype=torch.uint8 if fp8 else dtype)

        def ring(c: Compressor | None) -> Tensor | None:
            return None if c is None else zeros(rows + 1, c.reach + spare, c.width)

        self.page_size, self.pages, self.fp8, self.spare = page_size, pages, fp8, spare
        self.windows = {a.index: keys(a, rows + 1, a.window + spare) for a in layers}
        self.rings = {a.index: ring(a.compressor) for a in layers}
        self.entries = {
            a.index: None if a.compressor is None else keys(a, pages, page_size // a.compressor.ratio) for a in layers
        }
        self.index_rings = {a.index: ring(a.indexer) for a in layers}
        self.index_entries = {
            a.index: None if a.indexer is None else zeros(pages, page_size // a.indexer.ratio, a.indexer.dim)
            for a in layers
        }
        self.block_table = torch.zeros(rows, pages_per_row, device=device, dtype=torch.int32)
        self.positions = torch.zeros(rows, device=device, dtype=torch.int32)
        self.counts = torch.zeros(rows, device=device, dtype=torch.int32)
        self.slots = torch.arange(1, rows + 1, device=device, dtype=torch.int32)

    @staticmethod
    def bytes_of(
        a: DeepseekAttention, *, rows: int, pages: int, page_size: int, itemsize: int, fp8: bool = False, spare: int = 0
    ) -> int:
        """What one layer's state takes, without making it."""
        key = row_bytes(a.head_dim, 2 * a.cos.shape[1]) if fp8 else itemsize * a.head_dim
        per_slot, per_page = (a.window + spare) * key, 0
        for c, entry in ((a.compressor, key), (a.indexer, itemsize * (a.indexer.dim if a.indexer else 0))):
            if c is not None:
                per_slot += itemsize * (c.reach + spare) * c.width
                per_page += page_size // c.ratio * entry
        return (rows + 1) * per_slot + pages * per_page

    @property
    def setting(self) -> str:
        return "fp8" if self.fp8 else "exact"

    @property
    def parts(self) -> list[DeepseekCache]:
        """The face of a `PlacedCache` of one stage."""
        return [self]

    @property
    def kinds(self) -> list[StateKind]:
        slots = [t for each in (self.windows, self.rings, self.index_rings) for t in each.values() if t is not None]
        pages = [t for each in (self.entries, self.index_entries) for t in each.values() if t is not None]
        return [Rings(slots, self.spare), Pages(pages)]

    @property
    def max_context(self) -> int:
        """Tokens that a row's part of the block table can address."""
        return self.block_table.shape[1] * self.page_size

    def view(self, rows: slice = slice(None), pages: int | None = None) -> DeepseekCache:
        """The same storage seen through some rows, as `PagedCache.view`."""
        other = object.__new__(DeepseekCache)
        other.__dict__.update(self.__dict__)
        other.block_table = self.block_table[rows, :pages]
        other.positions, other.counts, other.slots = self.positions[rows], self.counts[rows], self.slots[rows]
        return other

    def attend(
        self, attention: DeepseekAttention, q: Tensor, kv: Tensor, states: Tensor | None, index_q: Tensor | None
    ) -> Tensor:
        """q [B, Q, heads head_dim], kv [B, Q, head_dim], states [B, Q, ...], index_q [B, Q, ...], each as its linear
        gives it -> [B, Q, heads, head_dim]; the tokens' part of the state is written."""
        a, i = attention, attention.index
        rows = self.positions, self.counts, self.block_table
        selected = None
        if a.compressor is None or states is None:
            q, kv = deepseek_qkv(q, kv, a.kv_norm, a.eps, a.cos, a.sin, self.positions, self.fp8)
        else:
            main, rest = states.split((a.compressor.width, states.shape[2] - a.compressor.width), dim=2)
            c, indexer, gain = a.compressor, a.indexer, rest
            index: tuple[Tensor | None, ...] = (None,) * 5
            if indexer is not None:
                helper, gain = rest.split((indexer.width, rest.shape[2] - indexer.width), dim=2)
                index = helper, self.index_rings[i], indexer.bias, indexer.norm, self.index_entries[i]
            q, kv = deepseek_prepare(
                q, kv, a.kv_norm, a.eps, a.cos, a.sin, self.fp8, self.slots, *rows,
                main, self.rings[i], c.bias, c.norm, self.entries[i], *index,
            )  # fmt: skip
            if indexer is not None and index_q is not None:
                heads, pool = index_q.unflatten(2, (gain.shape[2], -1)), self.index_entries[i]
                selected = deepseek_index(heads, gain, a.cos, a.sin, *rows, pool, indexer.ratio, a.top_k)
        result: Tensor = deepseek_attention(
            q, kv, self.windows[i], a.sinks, a.cos, a.sin, self.slots, *rows, self.entries[i], selected,
            0 if a.compressor is None else a.compressor.ratio, a.window, a.scale,
        )  # fmt: skip
        return result


class PlacedCache(SequenceState):
    """The caches of a model that is placed over several devices, one for each stage."""

    prefix_cacheable = False

    def __init__(self, parts: list[DeepseekCache]) -> None:
        self.parts = parts

    @property
    def setting(self) -> str:
        return self.parts[0].setting

    @property
    def kinds(self) -> list[StateKind]:
        return [kind for part in self.parts for kind in part.kinds]

    def truncate(self, lengths: Tensor) -> None:
        """As `DeepseekCache.truncate`, on every device."""
        for part in self.parts:
            part.truncate(lengths.to(part.positions.device, non_blocking=True))
