"""A paged KV cache of TurboQuant codes: what `PagedCache` is, at a fourth of its size.

A decode step (up to DRAFTS tokens a row) writes its tokens' codes in one launch and attends to codes; in mode `hybrid`
the latest tokens come exact from a ring instead, one softmax over both. A prefill chunk attends to its own tokens
exactly and to what lies before it from codes, which are stored in the same pass.

A row that is short may be held exactly instead, in the bytes of the pages that are to hold its codes: attention to few
exact keys and values takes less time. Whoever calls says when rows are (`exactly`) and when they turn (`encode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant import EXACT, TurboQuantConfig
from onegraph.formats.turboquant_layout import TurboQuantLayout
from onegraph.nn.attention import Attention, PagedCache
from onegraph.nn.state import Pages, Rings, SequenceState, StateKind
from onegraph.ops.calls import TurboQuantAttention, TurboQuantWrite
from onegraph.ops.recent_attention import recent_attention
from onegraph.ops.turboquant import turboquant_write, write_unfused
from onegraph.ops.turboquant_attention import attend_unfused, eight_bit_levels, turboquant_attention
from onegraph.ops.turboquant_decode import turboquant_decode
from onegraph.ops.turboquant_hybrid import turboquant_hybrid

DRAFTS = formats.DRAFTS
AT_ONCE = 512  # queries whose scores exist at once where a whole sequence is read as decoding reads it


@dataclass(frozen=True)
class CodedLayer:
    """One layer's codes and what they are read and written with; see the ops for shapes."""

    config: TurboQuantConfig
    layout: TurboQuantLayout
    rotation: Tensor
    turn: Tensor  # its transpose
    projection: Tensor | None  # of `prod`, which is a composition
    k_codebook: Tensor
    v_codebook: Tensor
    codes: Tensor  # uint8 [pages, kv_heads, page_bytes]
    ring: Tensor | None  # [rings, size, 2, kv_heads, head_dim], rotated keys and values; mode hybrid

    def exact(self, places: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The bytes of the codes as exact keys and values [pages, places, kv_heads, head_dim], keys first in a page."""
        pages, kv_heads, page_bytes = self.codes.shape
        dim, flat = self.layout.head_dim, self.codes.view(-1).view(dtype)
        size = pages, places, kv_heads, dim
        strides = kv_heads * page_bytes // dtype.itemsize, kv_heads * dim, dim, 1
        return flat.as_strided(size, strides), flat.as_strided(size, strides, places * kv_heads * dim)

    def write(self, tokens: tuple[Any, ...], slots: Tensor | None, heads: int, exact: bool) -> tuple[Tensor, Tensor]:
        """`turboquant_write` of `tokens`, its first nine arguments."""
        books = self.k_codebook, self.v_codebook
        args = *tokens, self.turn, *books, self.codes, self.ring, slots, heads, self.config.scale, exact
        if self.projection is not None:
            return write_unfused(TurboQuantWrite(*args), self.layout, self.projection)
        out: tuple[Tensor, Tensor] = turboquant_write(*args)
        return out

    def attend(
        self, q: Tensor, table: Tensor, positions: Tensor, counts: Tensor, ring: Tensor | None, slots: Tensor | None,
        scale: float, limit: int, fused: bool = True,
    ) -> Tensor:  # fmt: skip
        """What rotated queries see that decode: [B, Q, heads, head_dim], turned back."""
        window = self.config.window
        if ring is None:
            return self.history(q, table, positions, counts, None, self.rotation, scale, limit)[0]
        past: tuple[Tensor | None, Tensor | None] = (None, None)
        out: Tensor
        if not 0 < limit <= window:  # else all that the model's window shows is exact
            if fused and self.projection is None:
                state = self.codes, table, positions, counts, ring, slots, self.rotation
                out = turboquant_hybrid(q, *state, self.k_codebook, self.v_codebook, scale, window, limit)
                return out
            past = self.history(q, table, positions - window, counts, None, None, scale, max(limit - window, 0))
        out = recent_attention(q, ring, slots, positions, *past, self.rotation, scale, window, DRAFTS, limit)
        return out

    def history(
        self, q: Tensor, table: Tensor, positions: Tensor, counts: Tensor, ends: Tensor | None,
        rotation: Tensor | None, scale: float, limit: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`turboquant_attention` to the layer's codes."""
        books = self.k_codebook, self.v_codebook
        call = TurboQuantAttention(q, self.codes, table, positions, counts, ends, rotation, *books, None, scale, limit)
        if self.projection is not None:
            return attend_unfused(call, self.layout, self.projection)
        out: tuple[Tensor, Tensor] = turboquant_attention(*call)
        return out


def relative_errors(squares: Tensor) -> list[float]:
    """Of each layer, from sums [layers, 2] as `TurboQuantCache.squares` holds them; 0 where nothing was coded."""
    error, size = squares.double().T.tolist()
    return [(e / s) ** 0.5 if s else 0.0 for e, s in zip(error, size, strict=True)]


class TurboQuantCache(SequenceState):
    """Keys and values of all layers as codes, of some layers in the model's dtype (`config.first`, `last`, `edge`).

    Attributes (see `PagedCache` for block_table, positions and counts):
        slots: int32 [rows], the ring that belongs to the row's sequence. It must stay the sequence's when the sequence
            moves to another row; ring 0 belongs to nobody.
        fused: attend to codes and ring in one op; False is the other side of an A/B comparison.
        squares: float32 [layers, 2], mode shadow: sums of |error|^2 and of |output|^2 since `reset`.
        places: tokens that a page holds exactly where a row is short; 0 where no row may be.

    What a query of a row in codes sees depends on its position and its sequence alone: not on the batch, and in a
    decode step not on how many draft tokens come with it. Rejected drafts need no undoing: positions go back, and the
    next tokens overwrite them.

    Raises ValueError for what does not go together: a head size without codebooks, pages that are no multiple of 16
    tokens, a window larger than the pool.
    """

    prefix_cacheable = False  # a chunk's tokens see each other exactly, later ones through codes and the slot's ring

    def __init__(
        self,
        config: TurboQuantConfig,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        pages_per_row: int,
        device: torch.device | str,
        dtype: torch.dtype,
        shapes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """shapes: as of `PagedCache`."""
        shapes = [(kv_heads, head_dim)] * layers if shapes is None else shapes
        for _, dim in shapes:
            formats.check_head_dim(dim)
        if config.window > (pages - 1) * page_size:
            raise ValueError(
                f"turboquant: window is {config.window} tokens, the pages of the cache hold {(pages - 1) * page_size}; "
                "make the window smaller or the context larger"
            )
        rates = [config.rate(i, layers) for i in range(layers)]
        shadow = config.mode == "shadow"
        exact = [shadow or rate == (EXACT, EXACT) for rate in rates]
        self.config, self.page_size, self.fused, self._stepwise = config, page_size, True, False
        self.places = config.exact_places(page_size, dtype.itemsize) if config.mode == "hybrid" else 0
        # One layer's cache brings the state; then its layers are as many as there are, empty where there are codes.
        self.paged = PagedCache(
            layers=1, pages=2, page_size=page_size, kv_heads=max(shape[0] for shape in shapes), head_dim=head_dim,
            rows=rows, pages_per_row=pages_per_row, device=device, dtype=dtype,
        )  # fmt: skip
        self.block_table, self.positions = self.paged.block_table, self.paged.positions
        self.counts = self.paged.counts
        sizes = [(pages if e else 0, page_size, *shape) for e, shape in zip(exact, shapes, strict=True)]
        self.paged.keys = [torch.zeros(size, device=device, dtype=dtype) for size in sizes]
        self.paged.values = [torch.zeros(size, device=device, dtype=dtype) for size in sizes]

        def ints(count: int, first: int = 0) -> Tensor:
            return torch.arange(first, first + count, device=device, dtype=torch.int32)

        self.slots, self._own = ints(rows, 1), ints(rows)
        self._zeros = torch.zeros_like(self._own)
        prod = "prod" in (config.keys, config.values)
        self.squares = torch.zeros(layers, 2, device=device)

        @cache
        def book(dim: int, bits: int) -> Tensor:
            """One for all layers of this size, by which a CPU sees that they have it in common."""
            return eight_bit_levels(formats.codebook(dim, bits)).to(device)

        @cache
        def turns(dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
            """What turns heads of this size back, what turns them, and the projection of `prod`."""
            turn = formats.rotation(dim, config.rotation, config.seed)
            back, turn = (t.contiguous().to(device, dtype) for t in (turn, turn.T))
            return back, turn, formats.projection(dim, config.seed).to(device, dtype) if prod else None

        def layer(rate: tuple[int, int], kv_heads: int, head_dim: int) -> CodedLayer:
            layout = TurboQuantLayout(head_dim, *rate, config.keys, config.values, page_size)
            k, v = book(head_dim, layout.k_code_bits), book(head_dim, layout.v_code_bits)
            codes = torch.zeros(layout.cache_shape(pages, kv_heads), dtype=torch.uint8, device=device)
            ring = None
            if config.mode == "hybrid":
                ring = torch.zeros(rows + 1, config.ring, 2, kv_heads, head_dim, dtype=dtype, device=device)
            return CodedLayer(config, layout, *turns(head_dim), k, v, codes, ring)

        coded_layers = zip(rates, shapes, strict=True)
        self.layers = [None if rate == (EXACT, EXACT) else layer(rate, *shape) for rate, shape in coded_layers]
        self.pages = pages
        self._exactly = False
        self._short = self.paged.view()  # what short rows look at
        if self.places:
            coded = [None if one is None else one.exact(self.places, dtype) for one in self.layers]
            own = zip(self.paged.keys, self.paged.values, strict=True)
            pairs = [pair if found is None else found for found, pair in zip(coded, own, strict=True)]
            self._short.keys, self._short.values = ([pair[i] for pair in pairs] for i in range(2))

    @property
    def setting(self) -> str:
        """As `parse_kv` reads it."""
        return str(self.config)

    @property
    def max_context(self) -> int:
        """Tokens that a row's part of the block table can address."""
        return self.block_table.shape[1] * self.page_size

    @property
    def parts(self) -> list[TurboQuantCache]:
        """One for each stage of a model: this is the only one."""
        return [self]

    @property
    def kinds(self) -> list[StateKind]:
        coded = [layer for layer in self.layers if layer is not None]
        rings = [layer.ring for layer in coded if layer.ring is not None]
        return [Pages([*self.paged.tensors(), *(layer.codes for layer in coded)]), Rings(rings, DRAFTS - 1)]

    def reset(self) -> None:
        """Forget all sequences, and the sums of mode shadow."""
        super().reset()
        self.squares.zero_()

    def view(self, rows: slice = slice(None), pages: int | None = None) -> TurboQuantCache:
        """See `PagedCache.view`."""
        other = object.__new__(TurboQuantCache)
        other.__dict__.update(self.__dict__)
        other.paged = self.paged.view(rows, pages)
        other.block_table = self.block_table[rows, :pages]
        other.positions, other.counts, other.slots = self.positions[rows], self.counts[rows], self.slots[rows]
        return other

    def as_decoded(self) -> TurboQuantCache:
        """A view in which a chunk of more than DRAFTS tokens that begins its sequence attends as if its tokens had come
        one by one: every query sees exactly and from codes what it would in decoding. For evaluation."""
        other = self.view()
        other._stepwise = True
        return other

    def exactly(self) -> TurboQuantCache:
        """A view whose rows are exact: token t of a row is in place t % places of page t // places of its table, and in
        layers that stay exact where it ever is; there are no codes and no ring yet."""
        other = self.view()
        other._exactly = True
        return other

    @torch.no_grad()
    def encode(self, pages: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Rows that were exact are in codes: the first pages of each hold the codes of all its tokens, its ring the
        latest of them, as if they had been written so from the first; the other pages may go. Between steps.

        pages: int32 [B, n], the rows', zeros behind them; slots: int32 [B]; tokens: int32 [B], how many each has.
        """
        start = torch.zeros_like(tokens)
        for layer, *exact in zip(self.layers, self._short.keys, self._short.values, strict=True):
            if layer is None:
                continue
            keys, values = (
                each.index_select(0, pages.flatten()).unflatten(0, pages.shape).flatten(1, 2) for each in exact
            )
            # Keys are turned already, and rounded as a write rounds them; queries are nobody's.
            qkv = torch.cat((keys, keys, values), dim=2).flatten(2)
            given = qkv, None, None, 0.0, None, None, start, tokens, pages
            layer.write(given, None if layer.ring is None else slots, keys.shape[2], False)

    def errors(self) -> list[float]:
        """Mode shadow: of each layer ‖what codes would have given − the exact output‖ / ‖the exact output‖ so far.

        It reads the device, so never inside a step.
        """
        return relative_errors(self.squares)

    def attend(self, attention: Attention, qkv: Tensor) -> Tensor:
        """qkv [B, Q, (heads + 2 kv_heads) * head_dim] -> [B, Q, heads * head_dim]; with gates as `Attention` says."""
        layer = self.layers[attention.index]
        if layer is None:
            return self._exact(attention, qkv)
        if self._exactly:
            return self._seen_by(self._short).attend(attention, qkv)
        return attention.ungated(self._attend_codes, qkv)

    def _attend_codes(self, attention: Attention, qkv: Tensor) -> Tensor:
        layer = self.layers[attention.index]
        assert layer is not None
        if self.config.mode != "shadow":
            return self._coded(attention, layer, qkv)
        out = self._seen_by(self.paged).attend_plain(attention, qkv)
        error = self._coded(attention, layer, qkv).float() - out.float()
        step = torch.arange(qkv.shape[1], dtype=torch.int32, device=qkv.device)
        padding = (step >= self.counts.unsqueeze(1)).unsqueeze(2)
        sums = [t.masked_fill(padding, 0.0).square().sum() for t in (error, out.float())]
        self.squares[attention.index] += torch.stack(sums)
        return out

    def _exact(self, attention: Attention, qkv: Tensor) -> Tensor:
        return self._seen_by(self.paged).attend(attention, qkv)

    def _seen_by(self, cache: PagedCache) -> PagedCache:
        """Exact keys and values as these rows see them."""
        paged = cache.view()
        paged.block_table, paged.positions, paged.counts = self.block_table, self.positions, self.counts
        return paged

    def _coded(self, a: Attention, layer: CodedLayer, qkv: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        qkv = a.scaled(a.normed(qkv), self.positions)
        ring, chunk, slots = layer.ring, length > DRAFTS, None if layer.ring is None else self.slots
        positions, counts, table = self.positions, self.counts, self.block_table
        tokens = qkv, a.q_norm, a.k_norm, a.eps, a.cos, a.sin, positions, counts, table
        fused = self.fused and layer.projection is None
        if fused and ring is not None and not chunk and not 0 < a.window <= self.config.window:
            state = layer.turn, layer.k_codebook, layer.v_codebook, layer.codes, ring, slots
            how = a.heads, self.config.scale, layer.rotation, a.scale, self.config.window, a.window
            early = batch * length <= a.chained
            out: Tensor = turboquant_decode(*tokens, *state, *how, early)
            return out.flatten(2)
        q, own = layer.write(tokens, slots, a.heads, chunk)
        if not chunk:
            return layer.attend(q, table, positions, counts, ring, slots, a.scale, a.window, fused).flatten(2)
        own_ring, zeros = self._own[:batch], self._zeros[:batch]  # the chunk is a ring of its own
        if not self._stepwise:
            past = layer.history(q, table, positions, counts, positions, None, a.scale, a.window)
            out = recent_attention(q, own, own_ring, zeros, *past, layer.rotation, a.scale, 0, 0, a.window)
            return out.flatten(2)
        size, parts = self.config.window + DRAFTS + AT_ONCE, []
        padded = torch.nn.functional.pad(own, (0, 0, 0, 0, 0, 0, size, 0))
        for start in range(0, length, AT_ONCE):
            stop = min(start + AT_ONCE, length)
            at, real = positions + start, (counts - start).clamp(0, stop - start)
            some = q[:, start:stop].clone()  # after these, which attention may read ahead of the kernel before it
            seen = table[:, : -(-stop // self.page_size)]
            recent = None if ring is None else padded[:, stop : stop + size].roll(stop, dims=1)
            parts.append(layer.attend(some, seen, at, real, recent, own_ring, a.scale, a.window, fused))
        return torch.cat(parts, dim=1).flatten(2)
