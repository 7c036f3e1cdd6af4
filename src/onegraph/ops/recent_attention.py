"""Attention to exact keys and values that are at hand: a ring of the latest tokens, or those of the chunk itself.

It is the other half of a TurboQuant step: older tokens are attended from codes, and the two halves are one softmax by
their log-sum-exp. Everything is in rotated coordinates until the last product.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.ops.calls import RecentAttention
from onegraph.ops.cases import Draw
from onegraph.ops.checks import check_query, check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register


def _recent_attention(call: RecentAttention) -> Tensor:
    q, ring, slots, positions, history, history_lse, rotation, scale, window, spare, limit = call
    batch, length, heads, dim = q.shape
    _, size, _, kv_heads, _ = ring.shape
    group = heads // kv_heads
    keys, values = ring.index_select(0, slots).float().permute(2, 0, 3, 1, 4).unbind(0)  # [B, kv_heads, size, D]
    step = torch.arange(length, dtype=torch.int32, device=q.device)
    token = (positions.unsqueeze(1) + step).unsqueeze(2)  # [B, Q, 1]
    last = positions.view(-1, 1, 1) + (length - 1)
    place = torch.arange(size, dtype=torch.int32, device=q.device)
    key = last - (last - place) % size  # the latest position that a place can hold
    hidden = (key > token) | (key < 0)  # [B, Q, size]
    full = token >= window + spare if window > 0 else token >= 0
    if window > 0:
        hidden = hidden | ((key <= token - window) & full)
    if limit > 0:
        hidden = hidden | (key <= token - limit)
    unseen = hidden.all(1).view(batch, 1, size, 1)
    values = values.masked_fill(unseen, 0.0)  # 0 * NaN would carry an earlier sequence's into the sum

    grouped = (q.float() * scale).view(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(batch, kv_heads, group * length, dim) @ keys.transpose(2, 3)
    scores = scores.view(batch, kv_heads, group, length, size)
    scores = scores.masked_fill(hidden.view(batch, 1, 1, length, size), float("-inf"))
    lse = scores.logsumexp(-1)
    weight = (scores - lse.clamp_min(-1e30).unsqueeze(-1)).exp()
    out = weight.view(batch, kv_heads, group * length, size) @ values
    out = out.view(batch, heads, length, dim).transpose(1, 2)
    if history is not None and history_lse is not None:
        near = lse.view(batch, heads, length).transpose(1, 2)
        far = history_lse.masked_fill(~full, float("-inf"))
        most = torch.maximum(near, far).clamp_min(-1e30)
        a, b = (near - most).exp().unsqueeze(-1), (far - most).exp().unsqueeze(-1)
        past = history.float().masked_fill(b == 0, 0.0)
        out = (out * a + past * b) / (a + b).clamp_min(1e-30)
    turned: Tensor = (out @ rotation.float()) * dim**-0.5
    return turned.to(q.dtype).contiguous()


def _check(call: RecentAttention) -> None:
    op, q, ring, window, spare = "recent_attention", call.q, call.ring, call.window, call.spare
    check_query(op, q)
    batch, length, heads, dim = q.shape
    if ring.dim() != 5 or ring.shape[2] != 2 or ring.shape[4] != dim or heads % ring.shape[3]:
        raise ValueError(
            f"{op}: ring is {tuple(ring.shape)}; for {heads} heads of {dim} it must be"
            f" [rings, size, 2, kv_heads, {dim}] with kv_heads that divide heads"
        )
    if min(window, spare, call.limit) < 0:
        raise ValueError(f"{op}: window {window}, spare {spare}, limit {call.limit}; none may be negative")
    if window > 0 and window + spare + length - 1 > ring.shape[1]:
        raise ValueError(
            f"{op}: a ring of {ring.shape[1]} cannot hold a window of {window}, {spare} spare and {length} new tokens"
        )
    if (call.history is None) != (call.history_lse is None):
        raise ValueError(f"{op}: history and its log-sum-exp go together: give both or neither")
    check_tensors(
        op, q.device,
        ring=(ring, q.dtype, tuple(ring.shape)),
        slots=(call.slots, torch.int32, (batch,)),
        positions=(call.positions, torch.int32, (batch,)),
        history=(call.history, q.dtype, tuple(q.shape)),
        history_lse=(call.history_lse, torch.float32, (batch, length, heads)),
        rotation=(call.rotation, q.dtype, (dim, dim)),
    )  # fmt: skip


def _case(
    name: str, *, heads: int, kv_heads: int, dim: int, positions: list[int], size: int, tokens: int = 1,
    window: int = 0, spare: int = 0, limit: int = 0, history: bool = True,
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, rows = Draw(device, dtype, generator), len(positions)
        lse = torch.randn(rows, tokens, heads, generator=generator) + 3
        lse[0, 0, 0] = float("-inf")  # a query without a history
        return (
            draw.randn(rows, tokens, heads, dim), draw.randn(rows + 2, size, 2, kv_heads, dim),
            draw.ints(list(range(rows, 0, -1))), draw.ints(positions),
            draw.randn(rows, tokens, heads, dim) if history else None, lse.to(device) if history else None,
            formats.rotation(dim, "qr").to(device, dtype), dim**-0.5, window, spare, limit,
        )  # fmt: skip

    return Case(name=name, make=make)


_SMOL: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64}
_CASES = (
    _case("ring_decode", positions=[0, 30, 47, 200], size=48, window=32, spare=8, **_SMOL),
    _case("ring_drafts", tokens=8, positions=[3, 36, 39, 111], size=48, window=32, spare=8, **_SMOL),
    _case("ring_limit", heads=8, kv_heads=2, dim=128, positions=[500, 20], size=80, window=64, spare=8, limit=40),
    _case("chunk", tokens=24, positions=[0, 0], size=24, **_SMOL),
    _case("chunk_limit", tokens=21, heads=4, kv_heads=4, dim=80, positions=[0], size=21, limit=7),
    _case("alone", tokens=3, heads=16, kv_heads=1, dim=256, positions=[9], size=16, history=False),
    _case("mqa_192", heads=6, kv_heads=1, dim=192, positions=[70], size=80, window=64, spare=8),
)


recent_attention = register(
    Op(
        name="recent_attention",
        call=RecentAttention,
        schema="-> Tensor",
        reference=_recent_attention,
        fake=lambda call: torch.empty_like(call.q),
        kernel="onegraph.ops.triton.recent_attention:recent_attention",
        check=_check,
        cases=_CASES,
        tolerance={torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3},
        bytes_moved=lambda call: 3 * nbytes(call.q) + call.q.shape[0] * nbytes(call.ring[0]) + nbytes(call.rotation),
        flops=lambda call: call.q.numel() * (4 * call.ring.shape[1] + 2 * call.q.shape[3]),
    )
)
"""q [B, Q, H, D], rotated -> [B, Q, H, D], turned back: attention to exact vectors, merged with that to the history.

Query i of row b stands at t = positions[b] + i. `ring` [rings, size, 2, kv_heads, D] holds rotated keys and values;
place s of ring slots[b] holds the latest position up to positions[b] + Q - 1 that is s modulo its size. A query sees
positions 0 to t, with `window` > 0 only the latest `window` once t >= window + spare, with `limit` > 0 never but the
latest `limit`. `history` and its log-sum-exp [B, Q, H] are what it sees elsewhere; with `window` they count only from
t = window + spare on, so that what a query sees depends on t alone and not on the tokens that came with it. `rotation`
[D, D] turns the sum back: @ rotation / sqrt(D)."""
