"""Attention of a decode step in mode `hybrid`: exact to the latest tokens of a ring, from codes to those before them.

It is `turboquant_attention` and `recent_attention` in one: one softmax, no result between them.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.turboquant import DRAFTS
from onegraph.formats.turboquant_layout import TurboQuantLayout, layout_of
from onegraph.ops.recent_attention import recent_attention
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.turboquant_attention import case, turboquant_attention


def _parts(*args: Any, at: Tensor | None = None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of `turboquant_attention`, at positions `at`, else those before the window, and those of
    `recent_attention` without the history."""
    q, cache, table, positions, counts, ring, slots, rotation, projection, *codes, scale, window, spare, limit = args
    older = max(limit - window, 0)
    before = positions - window if at is None else at
    coded = (q, cache, table, before, counts, None, None, projection, *codes[:2], None, *codes[2:])
    return (*coded, scale, older), (q, ring, slots, positions, rotation, scale, window, spare, limit)


def _turboquant_hybrid(*args: Any) -> Tensor:
    coded, recent = _parts(*args)
    history = turboquant_attention(*coded)
    out: Tensor = recent_attention(*recent[:4], *history, *recent[4:])
    return out


def _on_gpu(*args: Any) -> Tensor:
    """The CUDA kernel where it takes the codes, in a decode step of 16 bits the ring as well; else both ops."""
    from onegraph.ops.cuda import turboquant_attention as kernel

    q, cache, table, positions, counts, ring, slots, rotation, _, k_codebook, v_codebook = args[:11]
    k_bits, v_bits, k_variant, v_variant, scale, window, spare, limit = args[11:]
    if (k_variant, v_variant) != ("mse", "mse") or not kernel.takes(q):
        return _turboquant_hybrid(*args)
    page_size = layout_of(q.shape[3], k_bits, v_bits, k_variant, v_variant, cache.shape[2]).page_size
    codes = k_codebook, v_codebook, None, page_size, scale, max(limit - window, 0), window
    if q.dtype == torch.float32 or q.shape[1] > DRAFTS:
        older = kernel.attend(q, cache, table, positions, counts, None, None, *codes)
        out: Tensor = recent_attention(q, ring, slots, positions, *older, rotation, scale, window, spare, limit)
        return out
    near = kernel.Near(ring, slots, spare, limit)
    return kernel.attend(q, cache, table, positions, counts, None, rotation, *codes, near)[0]


def _check(*args: Any) -> None:
    window, limit = args[16], args[18]
    if window < 1 or 0 < limit <= window:
        raise ValueError(
            f"turboquant_hybrid: window is {window}, limit {limit}; window must be 1 or more and limit 0 or beyond it "
            "(within the window recent_attention is enough)"
        )
    coded, recent = _parts(*args, at=args[3])  # a check launches nothing: the step that it stands in may be captured
    assert turboquant_attention.check is not None
    assert recent_attention.check is not None
    turboquant_attention.check(*coded)
    recent_attention.check(*recent[:4], None, None, *recent[4:])


def _case(name: str, *, window: int = 64, limit: int = 0, **sizes: Any) -> Case:
    coded = case(name, **sizes)

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        q, cache, table, positions, counts, _, *rest = coded.make(device, dtype, generator)
        rotation, projection, k_codebook, v_codebook, _, *codes, scale, _ = rest
        batch, kv_heads, dim = len(q), cache.shape[1], q.shape[3]
        ring = torch.randn(batch + 2, window + 2 * DRAFTS, 2, kv_heads, dim, generator=generator).to(device, dtype)
        ring[0] = 1e4  # nobody's
        slots = torch.arange(batch, 0, -1, dtype=torch.int32, device=device)
        state = cache, table, positions, counts, ring, slots, rotation, projection
        return (q, *state, k_codebook, v_codebook, *codes, scale, window, DRAFTS, limit)

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
    _case("mqa_256", bits=(3, 4), heads=16, kv_heads=1, dim=256, positions=[333, 64], counts=[1, 1]),
    _case("prod", bits=(4, 3), positions=[99, 3], counts=[1, 1], variants=("prod", "mse"), window=16, **_LLAMA),
)  # fmt: skip


def _tokens_read(args: tuple[Any, ...]) -> int:
    """Tokens read from codes; it looks at the positions, so never inside a step."""
    positions, counts, window, limit = args[3].long(), args[4].long(), args[16], args[18]
    stop = (positions - window + counts).clamp_min(0)
    first = (positions - limit + 1).clamp_min(0) if limit else positions * 0
    return int(((stop - first).clamp_min(0) * (counts > 0)).sum())


def _bytes(*args: Any) -> int:
    """Queries and results, the rows' rings, codes and norms of every older token once, the rotation."""
    q, cache, ring = args[0], args[1], args[5]
    codes = _tokens_read(args) * cache.shape[1] * TurboQuantLayout(q.shape[3], *args[11:15]).bytes_per_token_head
    return 2 * nbytes(q) + q.shape[0] * nbytes(ring[0]) + codes + nbytes(args[7])


turboquant_hybrid = register(
    Op(
        name="turboquant_hybrid",
        schema=(
            "(Tensor q, Tensor cache, Tensor block_table, Tensor positions, Tensor counts, Tensor ring, Tensor slots, "
            "Tensor rotation, Tensor? projection, Tensor k_codebook, Tensor v_codebook, int k_bits, int v_bits, "
            "str k_variant, str v_variant, float scale, int window, int spare, int limit) -> Tensor"
        ),
        reference=_turboquant_hybrid,
        fake=lambda q, *rest: q.new_empty(q.shape),
        kernel="onegraph.ops.turboquant_hybrid:_on_gpu",
        check=_check,
        cases=_CASES,
        tolerance={torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3},
        bytes_moved=_bytes,
        flops=lambda *args: (
            4 * args[0].shape[1] * args[0].shape[2] * args[0].shape[3] * _tokens_read(args)
            + args[0].numel() * (4 * args[5].shape[1] + 2 * args[0].shape[3])
        ),
    )
)
"""q [B, Q, H, D], rotated -> [B, Q, H, D], turned back.

Query i of row b stands at t = positions[b] + i, of counts[b] that are real. `ring` [rings, size, 2, kv_heads, D] holds
rotated keys and values as `recent_attention` says: of ring slots[b] a query sees the latest `window` tokens, and all of
them while t < window + spare; from then on it sees the tokens before them from `cache`, as `turboquant_attention` reads
it. With `limit` > window it never sees but the latest `limit`."""
