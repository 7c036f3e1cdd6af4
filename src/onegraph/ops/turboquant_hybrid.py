"""Attention of a decode step in mode `hybrid`: exact to the latest tokens of a ring, from codes to those before them.

It is `turboquant_attention` and `recent_attention` in one: one softmax, no result between them.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.turboquant import DRAFTS
from onegraph.ops.calls import TurboQuantHybrid
from onegraph.ops.recent_attention import recent_attention
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.turboquant import layout_in
from onegraph.ops.turboquant_attention import case, turboquant_attention


def _older(call: TurboQuantHybrid, positions: Tensor) -> tuple[Any, ...]:
    """The arguments of `turboquant_attention`, for the tokens before the window where `positions` are those."""
    books, limit = (call.k_codebook, call.v_codebook), max(call.limit - call.window, 0)
    return call.q, call.cache, call.block_table, positions, call.counts, None, None, *books, None, call.scale, limit


def _recent(call: TurboQuantHybrid, history: Tensor | None, lse: Tensor | None) -> tuple[Any, ...]:
    """The arguments of `recent_attention`."""
    how = call.rotation, call.scale, call.window, DRAFTS, call.limit
    return call.q, call.ring, call.slots, call.positions, history, lse, *how


def _turboquant_hybrid(call: TurboQuantHybrid) -> Tensor:
    history = turboquant_attention(*_older(call, call.positions - call.window))
    out: Tensor = recent_attention(*_recent(call, *history))
    return out


def _on_gpu(call: TurboQuantHybrid) -> Tensor:
    """The CUDA kernel where it takes the codes, in a decode step of 16 bits the ring as well; else both ops."""
    from onegraph.ops.cuda import turboquant_attention as kernel

    q, window = call.q, call.window
    if not kernel.supports_input(q):
        return _turboquant_hybrid(call)
    state: tuple[Any, ...] = (q, call.cache, call.block_table, call.positions, call.counts, None)
    page_size = layout_in("turboquant_hybrid", call, q.shape[3]).page_size
    older = max(call.limit - window, 0)
    codes: tuple[Any, ...] = (call.k_codebook, call.v_codebook, None, page_size, call.scale, older, window)
    if q.dtype == torch.float32 or q.shape[1] > DRAFTS:
        args = *state, None, *codes
        out: Tensor = recent_attention(*_recent(call, *kernel.attend(*args)))
        return out
    args = *state, call.rotation, *codes, kernel.Near(call.ring, call.slots, DRAFTS, call.limit)
    return kernel.attend(*args)[0]


def _check(call: TurboQuantHybrid) -> None:
    if call.window < 1 or 0 < call.limit <= call.window:
        raise ValueError(
            f"turboquant_hybrid: window is {call.window}, limit {call.limit}; window must be 1 or more and limit 0 or "
            "beyond it (within the window recent_attention is enough)"
        )
    assert turboquant_attention.check is not None
    assert recent_attention.check is not None
    turboquant_attention.check(*_older(call, call.positions))  # a check launches nothing: the step may be captured
    recent_attention.check(*_recent(call, None, None))


def _case(name: str, *, window: int = 64, limit: int = 0, **sizes: Any) -> Case:
    coded = case(name, **sizes)

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        q, cache, table, positions, counts, _, rotation, *books, _, scale, _ = coded.make(device, dtype, generator)
        batch, kv_heads, dim = len(q), cache.shape[1], q.shape[3]
        ring = torch.randn(batch + 2, window + 2 * DRAFTS, 2, kv_heads, dim, generator=generator).to(device, dtype)
        ring[0] = 1e4  # nobody's
        slots = torch.arange(batch, 0, -1, dtype=torch.int32, device=device)
        return (q, cache, table, positions, counts, ring, slots, rotation, *books, scale, window, limit)

    return Case(name=name, make=make)


_SMOL: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64}
_LLAMA: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 128}
_CASES = (
    _case("smollm2", bits=(4, 4), positions=[0, 63, 71, 72, 300], counts=[1, 1, 1, 0, 1], **_SMOL),
    _case("llama", bits=(4, 4), positions=[700, 79, 80, 5], counts=[1, 1, 1, 1], **_LLAMA),
    _case("drafts", bits=(3, 4), tokens=8, positions=[130, 66, 0], counts=[8, 5, 8], window=32, **_LLAMA),
    _case("limit", bits=(4, 3), tokens=3, positions=[200, 90], counts=[3, 3], window=16, limit=50, **_LLAMA),
    _case("many", bits=(2, 2), tokens=8, positions=[90] * 9, counts=[8, 1] + [8] * 7, window=16, **_LLAMA),
    _case("mha_80", bits=(4, 4), heads=4, kv_heads=4, dim=80, positions=[70, 130], counts=[1, 1], window=16),
    _case("gqa_512", bits=(4, 4), heads=8, kv_heads=1, dim=512, positions=[333, 64], counts=[1, 1]),
    _case("mqa_256", bits=(3, 4), heads=16, kv_heads=1, dim=256, positions=[333, 64], counts=[1, 1]),
)  # fmt: skip


def _tokens_read(call: TurboQuantHybrid) -> int:
    """Tokens read from codes; it looks at the positions, so never inside a step."""
    positions, counts = call.positions.long(), call.counts.long()
    stop = (positions - call.window + counts).clamp_min(0)
    first = (positions - call.limit + 1).clamp_min(0) if call.limit else positions * 0
    return int(((stop - first).clamp_min(0) * (counts > 0)).sum())


def _bytes(call: TurboQuantHybrid) -> int:
    """Queries and results, the rows' rings, codes and norms of every older token once, the rotation."""
    codes = _tokens_read(call) * call.cache.shape[1] * layout_in("", call, call.q.shape[3]).bytes_per_token_head
    return 2 * nbytes(call.q) + call.q.shape[0] * nbytes(call.ring[0]) + codes + nbytes(call.rotation)


turboquant_hybrid = register(
    Op(
        name="turboquant_hybrid",
        call=TurboQuantHybrid,
        schema="-> Tensor",
        reference=_turboquant_hybrid,
        fake=lambda call: call.q.new_empty(call.q.shape),
        kernel="onegraph.ops.turboquant_hybrid:_on_gpu",
        check=_check,
        cases=_CASES,
        tolerance={torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3},
        bytes_moved=_bytes,
        flops=lambda call: (
            4 * call.q[0].numel() * _tokens_read(call) + call.q.numel() * (4 * call.ring.shape[1] + 2 * call.q.shape[3])
        ),
    )
)
"""q [B, Q, H, D], rotated -> [B, Q, H, D], turned back.

Query i of row b stands at t = positions[b] + i, of counts[b] that are real. `ring` [rings, size, 2, kv_heads, D] holds
rotated keys and values as `recent_attention` says: of ring slots[b] a query sees the latest `window` tokens, and all of
them while t < window + DRAFTS; from then on it sees the tokens before them from `cache`, as `turboquant_attention`
reads it. With `limit` > window it never sees but the latest `limit`."""
