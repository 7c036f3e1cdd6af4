"""The attention layer, and the two ways to attend: through a paged KV cache, or densely over whole sequences.

What differs between serving, calibration and a quantized cache is one call, `attend(attention, qkv)`. The layer brings
the weights and its constants, the strategy brings the state. An engine that must break its graph around attention wraps
that call and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onegraph.nn.state import Pages, SequenceState, StateKind
from onegraph.ops.attention import capped, paged_attention, rope_cache_write, rotate_half
from onegraph.ops.calls import MAX_TOKENS
from onegraph.ops.decode_attention import paged_decode
from onegraph.ops.gate import gate_heads, split_gates
from onegraph.ops.norm import rms_norm
from onegraph.ops.values import normed_values

AT_ONCE = 512  # queries whose scores exist at once where sinks or bounds need a softmax of our own


class Attend(Protocol):
    """A way to attend: qkv [B, Q, (heads + 2 kv_heads) * head_dim], rows of it q heads, then k, then v ->
    [B, Q, heads * head_dim]. Of other kinds of attention and of recurrent layers, what their linears gave."""

    def attend(self, attention: Any, *inputs: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """What a cache has to know of one layer's grouped-query attention: `cache.attend(attention, qkv)`.

    Args:
        index: number of the layer, by which a cache finds its part.
        heads, kv_heads, head_dim: sizes; heads is a multiple of kv_heads.
        q_norm, k_norm: per-head RMSNorm weights [head_dim] (Qwen3) or None; eps: theirs.
        cos, sin: RoPE tables float32 [positions, R / 2] that layers share, R coordinates of each head rotate; None for
            a layer without RoPE.
        query_scale: what queries are multiplied by at each position, float32 [positions] (Ministral 3); None for 1.
        window: number of latest keys that a query sees, 0 for all.
        sinks: a logit of each head that takes part in softmax and has no value (gpt-oss), [heads]; kept as float32.
        scale: of scores, head_dim to the power of -1/2 unless given. softcap: bounds them (Gemma 2), 0 for not.
        gated: each query has a gate of head_dim behind it, so that qkv [B, Q, (2 heads + 2 kv_heads) * head_dim] begins
            with query 0, gate 0, query 1, ...; what a head gives is multiplied by its gate's sigmoid (Qwen3.5).
        borrows: it has queries alone and attends to the keys and values of the layer that is `index` (Gemma 4 E2B);
            lends: it is such a layer.
        value_norm: each head of values goes through RMSNorm without weights; qkv may have no values, which are then the
            keys as their linear gave them (Gemma 4).

    Attributes:
        chained: what follows a call of at most so many tokens is the one launch of a `Chain`, which sets this and
            gains from being started early. Any other linear would need its codes before attention has its keys and
            values.
    """

    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    query_scale: Tensor | None
    sinks: Tensor | None

    def __init__(
        self,
        *,
        index: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        query_scale: Tensor | None = None,
        window: int = 0,
        sinks: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        gated: bool = False,
        borrows: bool = False,
        lends: bool = False,
        value_norm: bool = False,
    ) -> None:
        super().__init__()
        self.index, self.heads, self.kv_heads, self.head_dim = index, heads, kv_heads, head_dim
        self.eps, self.window, self.softcap, self.gated = eps, window, softcap, gated
        self.borrows, self.lends, self.value_norm = borrows, lends, value_norm
        self.scale = head_dim**-0.5 if scale is None else scale
        self.chained = 0
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("k_norm", k_norm)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("query_scale", query_scale, persistent=False)
        self.register_buffer("sinks", None if sinks is None else sinks.float())

    def ungated(self, attend: Callable[[Attention, Tensor], Tensor], qkv: Tensor) -> Tensor:
        """What `attend`, which knows no gates, gives of queries, keys and values that may have them."""
        if not self.gated:
            return attend(self, qkv)
        plain, gates = split_gates(qkv, self.heads, self.head_dim)
        out: Tensor = gate_heads(attend(self, plain), gates)
        return out

    def normed(self, qkv: Tensor) -> Tensor:
        """qkv with normed values, where they are to be."""
        how = self.heads, self.kv_heads, self.head_dim, self.eps
        return normed_values(qkv, *how) if self.value_norm else qkv

    def scaled(self, qkv: Tensor, positions: Tensor | None = None) -> Tensor:
        """qkv [B, Q, ...] with queries scaled by their positions; positions: int [B], of the first token of each row,
        None for 0."""
        if self.query_scale is None:
            return qkv
        at = torch.arange(qkv.shape[1], device=qkv.device)
        at = at.unsqueeze(0) if positions is None else positions.unsqueeze(1) + at
        factors = self.query_scale[at.clamp(max=len(self.query_scale) - 1)].to(qkv.dtype).unsqueeze(2)
        size = self.heads * self.head_dim
        return torch.cat((qkv[..., :size] * factors, qkv[..., size:]), dim=-1)


class PagedCache(SequenceState):
    """Keys and values of all layers in pages, with the device state that says whose they are.

    Everything a step reads is a buffer made here: the host writes `block_table`, `positions` and `counts` between steps
    and never passes a number. Page 0 is the sentinel that no sequence may own: padding is written there.

    Attributes:
        keys, values: per layer [pages, page_size, kv_heads, head_dim], whose last two may be another layer's own.
        block_table: int32 [rows, pages_per_row], zeros at first.
        positions: int32 [rows], where the row's next token stands; counts: int32 [rows], how many of the Q tokens that
            a call brings are real. A row that holds no sequence has count 0.
        tickets: int32 [rows, kv_heads] of zeros, which `paged_decode` counts with.
        fused: attend to a decode step's token, or a round's few, in one launch; False is the other side of an A/B
            comparison.
    """

    prefix_cacheable, setting = True, "exact"  # see `engine.decoder.Cache`

    def __init__(
        self,
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
        fused: bool = True,
        shapes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """shapes: (kv heads, head_dim) of each layer, where they differ from one another."""
        shapes = [(kv_heads, head_dim)] * layers if shapes is None else shapes
        for name, value in (
            ("layers", layers),
            ("page_size", page_size),
            ("rows", rows),
            ("pages_per_row", pages_per_row),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if pages < 2:
            raise ValueError(f"pages is {pages}; it must be at least 2, since page 0 is the sentinel")
        self.page_size, self.fused = page_size, fused
        sizes = [(pages, page_size, *shape) for shape in shapes]
        self.keys = [torch.zeros(size, device=device, dtype=dtype) for size in sizes]
        self.values = [torch.zeros(size, device=device, dtype=dtype) for size in sizes]
        self.block_table = torch.zeros(rows, pages_per_row, device=device, dtype=torch.int32)
        self.positions = torch.zeros(rows, device=device, dtype=torch.int32)
        self.counts = torch.zeros(rows, device=device, dtype=torch.int32)
        most = max(shape[0] for shape in shapes)
        self.tickets = torch.zeros(rows, most, device=device, dtype=torch.int32)

    @property
    def pages(self) -> int:
        return self.keys[0].shape[0]

    @property
    def max_context(self) -> int:
        """Tokens that a row's part of the block table can address."""
        return self.block_table.shape[1] * self.page_size

    @property
    def parts(self) -> list[PagedCache]:
        """One for each stage of a model: this is the only one."""
        return [self]

    @property
    def kinds(self) -> list[StateKind]:
        return [Pages([*self.keys, *self.values])]

    def view(self, rows: slice = slice(None), pages: int | None = None) -> PagedCache:
        """The same storage seen through some rows: a bucket's first rows, or one row to prefill.

        `pages` narrows what attention looks at to each row's first pages. A captured graph never needs it; on a CPU,
        where the reference reads every page it may, it saves that reading while contexts are short.
        """
        other = object.__new__(PagedCache)
        other.page_size, other.fused, other.tickets = self.page_size, self.fused, self.tickets
        other.keys, other.values = self.keys, self.values
        other.block_table = self.block_table[rows, :pages]
        other.positions, other.counts = self.positions[rows], self.counts[rows]
        return other

    def attend(self, attention: Attention, qkv: Tensor) -> Tensor:
        if attention.gated and not (self.fused and qkv.shape[1] <= MAX_TOKENS):
            return attention.ungated(self.attend_plain, qkv)
        return self._attend(attention, qkv, attention.gated)

    def attend_plain(self, attention: Attention, qkv: Tensor) -> Tensor:
        """`attend` of queries without gates, whatever `attention` says."""
        return self._attend(attention, qkv, False)

    def _attend(self, a: Attention, qkv: Tensor, gated: bool) -> Tensor:
        keys, values = self.keys[a.index], self.values[a.index]
        qkv = a.scaled(qkv, self.positions)
        if self.fused and qkv.shape[1] <= MAX_TOKENS and not a.borrows:
            early = qkv.shape[:2].numel() <= a.chained
            out: Tensor = paged_decode(
                qkv, a.q_norm, a.k_norm, a.eps, a.cos, a.sin, self.positions, self.counts, self.block_table,
                keys, values, self.tickets, a.heads, a.scale, a.window, early, a.sinks, a.softcap, gated, a.value_norm,
            )  # fmt: skip
            return out.flatten(2)
        q = rope_cache_write(
            a.normed(qkv), a.q_norm, a.k_norm, a.eps, a.cos, a.sin,
            self.positions, self.counts, self.block_table, keys, values, a.heads,
        )  # fmt: skip
        how = a.scale, a.window, a.sinks, a.softcap, self.counts
        out = paged_attention(q, keys, values, self.block_table, self.positions, *how)
        return out.flatten(2)


class CausalAttention:
    """Whole sequences from position 0, no cache: for calibration and evaluation, qkv [B, T, ...].

    Attributes:
        lent: keys and values [B, T, kv_heads, head_dim] that other layers read too, by `Attention.index`; kept until
            the next sequences come.
    """

    def __init__(self) -> None:
        self.lent: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, attention: Any, *inputs: Tensor) -> Tensor:
        if not isinstance(attention, Attention):
            result: Tensor = attention.whole(*inputs)
            return result
        (qkv,) = inputs
        return attention.ungated(self._plain, qkv)

    def _plain(self, a: Attention, qkv: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        qkv = a.scaled(a.normed(qkv))
        heads = qkv.view(batch, length, -1, a.head_dim)
        own = 0 if a.borrows else a.kv_heads
        q, k, v = heads.split((a.heads, own, own), dim=2)
        if a.q_norm is not None and a.k_norm is not None:
            q = rms_norm(q.contiguous(), a.q_norm, a.eps)
            k = k if a.borrows else rms_norm(k.contiguous(), a.k_norm, a.eps)
        if a.cos is not None and a.sin is not None:
            if length > a.cos.shape[0]:
                raise ValueError(
                    f"a sequence of {length} tokens exceeds the {a.cos.shape[0]} positions that were loaded"
                )
            cos, sin = a.cos[:length].unsqueeze(1), a.sin[:length].unsqueeze(1)
            q, k = (rotate_half(t.float(), cos, sin).to(t.dtype) for t in (q, k))
        if a.lends:
            self.lent[a.index] = k, v
        k, v = self.lent[a.index] if a.borrows else (k, v)
        mask = None
        if 0 < a.window < length:
            step = torch.arange(length, device=qkv.device)
            behind = step.unsqueeze(1) - step
            mask = (behind >= 0) & (behind < a.window)
        if a.sinks is not None or a.softcap:
            return _attended(a, q, k, v, mask).flatten(2)
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=mask, is_causal=mask is None, scale=a.scale, enable_gqa=a.heads != a.kv_heads,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)


def _attended(a: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of q [B, T, heads, D] to k, v [B, T, kv_heads, D] where scores are bounded, or each head has a
    sink; in float32 -> as q.

    `mask` [T, T] is the causal one with a window, None without. Some queries at a time: scores of all of them would be
    T numbers a query and head.
    """
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    keys, values = (t.float().transpose(1, 2).repeat_interleave(group, dim=1) for t in (k, v))
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    parts = []
    for start in range(0, length, AT_ONCE):
        some = slice(start, start + AT_ONCE)
        scores = capped((q[:, some].float() * a.scale).transpose(1, 2) @ keys.transpose(2, 3), a.softcap)
        scores = scores.masked_fill(~mask[some], float("-inf"))
        if a.sinks is not None:
            scores = torch.cat((scores, a.sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
        parts.append((scores.softmax(-1)[..., :length] @ values).transpose(1, 2).to(q.dtype))
    return torch.cat(parts, dim=1)
