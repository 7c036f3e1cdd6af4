"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries, one latent a token for all heads.

As in `nn/attention.py` the layer brings weights and the cache brings the state. Served, the up-projections of keys and
values are absorbed: a product per head on each side of `latent_attention`. Whole sequences without a cache, for
calibration and evaluation, go through the up-projection as the model was trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onegraph.formats.latent_kv import code_bits, curve, row_bytes
from onegraph.formats.turboquant import TurboQuantConfig, rotation
from onegraph.nn.block import Normed, Stream
from onegraph.nn.latent_index import Indexer, IndexInputs
from onegraph.nn.linear import Linear
from onegraph.nn.state import Pages, SequenceState, StateKind
from onegraph.ops.attention import places
from onegraph.ops.latent_attention import latent_attention, latent_write, turn
from onegraph.ops.norm import rms_norm


class LatentInputs(nn.Module):
    """In front of the attention of a block, where `Normed` stands: a norm, the down-projections, the queries.

    Args:
        low: the block's norm, then linears of x -> queries' low rank | latent; without q_b of x -> queries | latent.
        latent: numbers of a token's latent and key. q_norm, q_b: RMSNorm of the low rank and what makes queries of it.
        indexer: chooses the tokens of this layer, and of those behind it that have none.
    """

    q_norm: Tensor | None
    fused = False

    def __init__(
        self,
        low: Normed,
        latent: int,
        q_norm: Tensor | None,
        q_b: Linear | None,
        eps: float,
        indexer: Indexer | None = None,
    ) -> None:
        super().__init__()
        self.low, self.latent, self.q_b, self.eps, self.indexer = low, latent, q_b, eps, indexer
        self.register_buffer("q_norm", q_norm)

    @property
    def linear(self) -> nn.Module:
        """What reads x."""
        return self.low.linear

    def forward(self, stream: Stream) -> tuple[tuple[Tensor, ...], Tensor]:
        """((queries [B, Q, heads (nope + rope)], latents [B, Q, rank + rope]; with an indexer its `IndexInputs` too),
        the stream added up [B, Q, D])."""
        x = None
        if self.indexer is None:
            both, total = self.low(stream)
        else:
            x, total = stream.normed(self.low.get_buffer("norm"), self.low.eps)
            both = self.low.linear(x)
        q, latent = both.split((both.shape[-1] - self.latent, self.latent), dim=-1)
        low = q
        if self.q_b is not None and self.q_norm is not None:
            low = rms_norm(q.contiguous(), self.q_norm, self.eps)
            q = self.q_b(low)
        return ((q, latent) if x is None or self.indexer is None else (q, latent, *self.indexer.inputs(x, low))), total


class Products(NamedTuple):
    """What queries are multiplied by to score latents [heads, nope, rank], and what makes heads of sums of latents
    [heads, value, rank]; the norm of the latent [rank]."""

    to_latent: Tensor
    from_latent: Tensor
    norm: Tensor


class LatentAttention(nn.Module):
    """One layer's attention: `cache.attend(attention, queries, latents)`.

    Args:
        index: number of the layer, by which a cache finds its part.
        heads, nope, rope, value: of a rank's heads: their number, the parts of a query, the numbers of a value.
        kv_b: the up-projection of the latent: rows of each head's key (nope), then value. absorbed: keep it as the two
            products of a head; else as the linear, which `whole` alone reads.
        kv_norm: RMSNorm weight [rank] of the latent; eps: its own.
        cos, sin: RoPE tables float32 [positions, rope / 2]; interleaved: pairs are neighbours.
        query_scale: what queries are multiplied by at each position, float32 [positions]; None for 1.
        scale: of scores.
        top_k: tokens that a query attends to, 0 for all; indexer: chooses them, None: those that a layer before chose.

    Attributes:
        before: the last layer before this one that has an indexer, for a layer without; empty where a block is alone.
        turned: the products in the coordinates of TurboQuant's codes, by the seed of the rotation (`turn_products`).
    """

    kv_norm: Tensor
    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None
    to_latent: Tensor | None
    from_latent: Tensor | None
    chained = 0  # see `Attention`: nothing is

    def __init__(
        self,
        *,
        index: int,
        heads: int,
        nope: int,
        rope: int,
        value: int,
        kv_b: Linear,
        absorbed: bool,
        kv_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        query_scale: Tensor | None,
        scale: float,
        dtype: torch.dtype,
        top_k: int = 0,
        indexer: Indexer | None = None,
    ) -> None:
        super().__init__()
        self.index, self.heads, self.nope, self.rope, self.value = index, heads, nope, rope, value
        self.eps, self.interleaved, self.scale, self.rank = eps, interleaved, scale, kv_norm.shape[0]
        self.top_k, self.indexer = top_k, indexer
        self.before: list[LatentAttention] = []
        self._last: Tensor | None = None
        self.turned: dict[int, Products] = {}
        self.kv_b = None if absorbed else kv_b
        up = (kv_b.dense(dtype) if kv_b.format.coded else kv_b).tensors["weight"]
        split = up.unflatten(0, (heads, nope + value)) if absorbed else None
        self.register_buffer("to_latent", None if split is None else split[:, :nope].to(dtype).contiguous())
        self.register_buffer("from_latent", None if split is None else split[:, nope:].to(dtype).contiguous())
        self.register_buffer("kv_norm", kv_norm)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("query_scale", query_scale, persistent=False)

    def scaled(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """q [B, Q, heads (nope + rope)] scaled by position; positions: int [B], of the first token of each row."""
        if self.query_scale is None:
            return q
        at = torch.arange(q.shape[1], device=q.device)
        at = at.unsqueeze(0) if positions is None else positions.unsqueeze(1) + at
        return q * self.query_scale[at.clamp(max=len(self.query_scale) - 1)].to(q.dtype).unsqueeze(2)

    @property
    def products(self) -> Products:
        """In the latent's own coordinates."""
        assert self.to_latent is not None
        assert self.from_latent is not None
        return Products(self.to_latent, self.from_latent, self.kv_norm)

    @torch.no_grad()
    def turn_products(self, seed: int) -> None:
        """Makes `turned` for caches whose rotation has this seed: between steps, since it allocates."""
        if seed in self.turned:
            return
        turn, own = rotation(self.rank, seed=seed).to(self.kv_norm.device), self.products
        to_latent, from_latent = ((w.float() @ turn.T * self.rank**-0.5).to(w.dtype) for w in own[:2])
        norm = own.norm * turn[0].to(own.norm.dtype)  # the matrix's first row is the signs
        self.turned[seed] = Products(to_latent, from_latent, norm)

    def folded(self, q: Tensor, to_latent: Tensor) -> Tensor:
        """Queries [B, Q, heads, nope + rope] -> what scores latents [B, Q, heads, rank], each head a product."""
        by_head = q[..., : self.nope].flatten(0, 1).transpose(0, 1)
        folded: Tensor = (by_head @ to_latent).transpose(0, 1).unflatten(0, q.shape[:2])
        return folded

    def unfolded(self, sums: Tensor, from_latent: Tensor) -> Tensor:
        """Sums of latents [B, Q, heads, rank] -> what heads give [B, Q, heads value]."""
        by_head = sums.flatten(0, 1).transpose(0, 1)
        heads: Tensor = (by_head @ from_latent.transpose(1, 2)).transpose(0, 1)
        given: Tensor = heads.flatten(1).unflatten(0, sums.shape[:2])
        return given

    def angles(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [B, Q, rope / 2] of the tokens of a call, from positions int32 [B] on."""
        token = positions.unsqueeze(1) + torch.arange(length, dtype=positions.dtype, device=positions.device)
        at = token.clamp(0, self.cos.shape[0] - 1).flatten()
        cos, sin = (table.index_select(0, at).unflatten(0, token.shape) for table in (self.cos, self.sin))
        return cos, sin

    def whole(self, q: Tensor, latent: Tensor, *index: Tensor) -> Tensor:
        """Whole sequences from position 0, causal, nothing kept: what `LatentCache.attend` takes and gives."""
        (batch, length, _), rank, rope = q.shape, self.rank, self.rope
        if length > self.cos.shape[0]:
            raise ValueError(
                f"a sequence of {length} tokens exceeds the {self.cos.shape[0]} positions that were loaded"
            )
        cos, sin = self.cos[:length], self.sin[:length]
        mask = self._mask(IndexInputs(*index) if index else None, cos, sin) if 0 < self.top_k < length else None
        heads = self.scaled(q).view(batch, length, self.heads, self.nope + rope)
        turned = turn(heads[..., self.nope :], cos.unsqueeze(1), sin.unsqueeze(1), self.interleaved).to(q.dtype)
        c = rms_norm(latent[..., :rank].contiguous(), self.kv_norm, self.eps)
        k = turn(latent[..., rank:], cos, sin, self.interleaved).to(q.dtype)
        up = self._expanded(c).view(batch, length, self.heads, self.nope + self.value)
        key = torch.cat((up[..., : self.nope], k.unsqueeze(2).expand(-1, -1, self.heads, -1)), dim=-1)
        query = torch.cat((heads[..., : self.nope], turned), dim=-1)
        out = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), up[..., self.nope :].transpose(1, 2),
            attn_mask=None if mask is None else mask.unsqueeze(1), is_causal=mask is None, scale=self.scale,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)

    def _mask(self, given: IndexInputs | None, cos: Tensor, sin: Tensor) -> Tensor:
        """What each query of whole sequences attends to: this layer's choice, or that of the last one before it."""
        if self.indexer is not None and given is not None:
            self._last = self.indexer.mask(given, cos, sin)
            return self._last
        if not self.before or self.before[0]._last is None:
            raise ValueError(
                f"a sequence of {len(cos)} tokens exceeds index_topk {self.top_k}, and this layer takes what one "
                "before it chose, which is not here; take shorter ones"
            )
        return self.before[0]._last

    def _expanded(self, c: Tensor) -> Tensor:
        if self.kv_b is not None:
            up: Tensor = self.kv_b(c)
            return up
        return c @ torch.cat(self.products[:2], dim=1).flatten(0, 1).T


def link_indexers(layers: Iterable[nn.Module]) -> None:
    """Tells layers without an indexer, among the attention layers of a model in order, which one chooses for them."""
    last: LatentAttention | None = None
    for layer in layers:
        if isinstance(layer, LatentAttention) and layer.top_k:
            last = layer if layer.indexer is not None else last
            layer.before = [last] if last is not None and layer.indexer is None else []


class LatentRows(NamedTuple):
    """How a layer's pool holds latents: see `ops.latent_attention.latent_write` for bits, curve and kind. seed: of the
    rotation that they are in, None for their own coordinates."""

    bits: int = 0
    curve: Tensor | None = None
    kind: str = "norm"
    seed: int | None = None


class LatentCache(SequenceState):
    """One latent and one rotated key a token and layer, in pages: see `PagedCache`, whose attributes it has but for
    keys and values. What a query sees of a token is the same whether they come in one call or not, in codes too.

    Args:
        rank, rope: numbers of a latent and of a rotated key.
        kv: TurboQuant's codes of latents; layers may stay exact. fp8: latents in E4M3.
        indexers: numbers of an index key, by the layers that have an indexer; top_k: see `LatentAttention`.

    Attributes:
        pools: per layer [pages, page_size, rank + rope], or uint8 rows of `formats/latent_kv.py`.
        rows: per layer how its pool holds them.
        index_pools: the indexers' keys by layer, [pages, page_size, dim], where a row may hold more tokens than a query
            attends to; the choice is every token else. In the model's dtype.

    Raises ValueError for sizes too small, and for codes that latents do not have (`formats.latent_kv.code_bits`).
    """

    prefix_cacheable = True

    def __init__(
        self, *, layers: int, pages: int, page_size: int, rank: int, rope: int, rows: int, pages_per_row: int,
        device: torch.device | str, dtype: torch.dtype, indexers: Mapping[int, int] | None = None, top_k: int = 0,
        kv: TurboQuantConfig | None = None, fp8: bool = False,
    ) -> None:  # fmt: skip
        least = (
            ("layers", layers, 1),
            ("page_size", page_size, 1),
            ("rows", rows, 1),
            ("pages_per_row", pages_per_row, 1),
        )
        for name, value, bound in (*least, ("pages", pages, 2)):
            if value < bound:
                raise ValueError(f"{name} is {value}; it must be at least {bound}")
        self.page_size, self.setting = page_size, "fp8" if fp8 else "exact" if kv is None else str(kv)

        @cache
        def held(bits: int) -> LatentRows:
            if kv is None or not bits:
                return LatentRows(bits)
            return LatentRows(bits, curve(rank, bits).to(device), kv.scale, kv.seed)

        def pool(bits: int) -> Tensor:
            width, kind = (row_bytes(rank, rope, bits), torch.uint8) if bits else (rank + rope, dtype)
            return torch.zeros(pages, page_size, width, device=device, dtype=kind)

        bits = code_bits(kv, fp8, layers)
        self.pools, self.rows = [pool(each) for each in bits], [held(each) for each in bits]
        chosen = indexers if indexers and pages_per_row * page_size > top_k else {}
        self.index_pools = {
            i: torch.zeros(pages, page_size, dim, device=device, dtype=dtype) for i, dim in chosen.items()
        }
        self._chosen: Tensor | None = None  # by the last indexer, in this call
        self.block_table = torch.zeros(rows, pages_per_row, device=device, dtype=torch.int32)
        self.positions = torch.zeros(rows, device=device, dtype=torch.int32)
        self.counts = torch.zeros(rows, device=device, dtype=torch.int32)

    @property
    def pages(self) -> int:
        return self.pools[0].shape[0]

    @property
    def max_context(self) -> int:
        """Tokens that a row's part of the block table can address."""
        return self.block_table.shape[1] * self.page_size

    @property
    def parts(self) -> list[LatentCache]:
        """One for each stage of a model: this is the only one."""
        return [self]

    @property
    def kinds(self) -> list[StateKind]:
        return [Pages([*self.pools, *self.index_pools.values()])]

    def view(self, rows: slice = slice(None), pages: int | None = None) -> LatentCache:
        """The same storage seen through some rows, as `PagedCache.view`."""
        other = object.__new__(LatentCache)
        other.__dict__.update(self.__dict__)
        other._chosen = None
        other.block_table = self.block_table[rows, :pages]
        other.positions, other.counts = self.positions[rows], self.counts[rows]
        return other

    def as_decoded(self) -> LatentCache:
        """A chunk reads its tokens as decoding does: see `TurboQuantCache.as_decoded`."""
        return self

    def attend(self, attention: LatentAttention, q: Tensor, latent: Tensor, *index: Tensor) -> Tensor:
        """q [B, Q, heads (nope + rope)], latent [B, Q, rank + rope] -> [B, Q, heads value]; the tokens' latents are
        written. index: the `IndexInputs` of a layer with an indexer."""
        a, pool, (bits, levels, kind, seed) = attention, self.pools[attention.index], self.rows[attention.index]
        products = a.products if seed is None else a.turned[seed]
        heads = a.scaled(q, self.positions).unflatten(2, (a.heads, -1))
        rows, coded = (self.positions, self.counts, self.block_table), (bits, levels)
        tokens = heads, latent, products.norm, a.eps, a.cos, a.sin
        turned = latent_write(*tokens, *rows, pool, a.interleaved, *coded, kind)
        folded = a.folded(heads, products.to_latent)
        chosen = self._choice(a, IndexInputs(*index) if index else None, q.shape[1])
        sums = latent_attention(folded, turned, pool, self.block_table, *rows[:2], chosen, a.scale, *coded)
        return a.unfolded(sums, products.from_latent)

    def _choice(self, a: LatentAttention, given: IndexInputs | None, length: int) -> Tensor | None:
        """The tokens that this layer's queries attend to; None for all."""
        if not self.index_pools:
            return None
        if a.indexer is not None and given is not None:
            pool, (cos, sin) = self.index_pools[a.index], a.angles(self.positions, length)
            step = torch.arange(length, dtype=torch.int32, device=self.positions.device)
            place = places(self.positions.unsqueeze(1) + step, self.counts, self.block_table, self.page_size)
            a.indexer.write(given.keys, cos, sin, place, pool)
            rows = self.positions, self.counts, self.block_table
            self._chosen = a.indexer.chosen(given, cos, sin, rows, pool) if self.max_context > a.top_k else None
        return self._chosen
