"""Attention over a paged KV cache: rotate and write the new keys and values, then attend.

Page 0 is the sentinel: no sequence owns it. What must go nowhere (padding of a chunk, rows of a bucket that hold no
sequence) goes there or is not written at all; what page 0 holds is unspecified. Positions, counts and the block table
live on the device and change between replays of one graph, so both ops have shapes and grids that depend on none of
them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.calls import Heads, PagedAttention, PagedDecode, RopeCacheWrite, Tokens
from onegraph.ops.cases import Draw
from onegraph.ops.checks import FLOATS, check_grouped, check_query, check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.strides import row_stride


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE (Su et al., arXiv 2104.09864; GPT-NeoX's layout): x [..., H, D], tables [..., 1, R/2]. What
    comes after the first R <= D coordinates of a head stays as it is."""
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def capped(scores: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(scores / softcap), which bounds them (Gemma 2, arXiv 2408.00118, section 2); as they are for 0."""
    return scores if softcap == 0 else softcap * torch.tanh(scores / softcap)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def turned(call: Heads, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(queries and keys after norm and RoPE, float32 [B, Q, heads + kv_heads, D]; values as they came; where each token
    stands, [B, Q])."""
    batch, length, _ = call.qkv.shape
    vectors = call.qkv.unflatten(2, (-1, dim))
    both, values = vectors[:, :, : heads + kv_heads].float(), vectors[:, :, heads + kv_heads :]
    if call.q_norm is not None and call.k_norm is not None:
        q, k = both.split((heads, kv_heads), dim=2)
        both = torch.cat((head_norm(q, call.q_norm, call.eps), head_norm(k, call.k_norm, call.eps)), dim=2)
    token = call.positions.unsqueeze(1) + torch.arange(length, dtype=call.positions.dtype, device=call.qkv.device)
    if call.cos is not None and call.sin is not None:
        row, shape = token.flatten().clamp(0, call.cos.shape[0] - 1), (batch, length, 1, call.cos.shape[1])
        both = rotate_half(both, *(t.index_select(0, row).view(shape) for t in (call.cos, call.sin)))
    return both, values, token


def places(token: Tensor, counts: Tensor, block_table: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(page, place in it, whether the token is real) of tokens at `token` [B, Q]; what is not real is in page 0."""
    inside = token.clamp(0, block_table.shape[1] * page_size - 1)
    step = torch.arange(token.shape[1], dtype=torch.int32, device=token.device)
    real = (step < counts.unsqueeze(1)) & (inside == token)
    page = torch.where(real, block_table.gather(1, (inside // page_size).long()), 0)
    return page, inside % page_size, real


def _rope_cache_write(call: RopeCacheWrite) -> Tensor:
    _, page_size, kv_heads, dim = call.k_cache.shape
    if call.queries_alone:
        queries, _, _ = turned(call, call.heads, 0, dim)
        return queries.to(call.qkv.dtype, memory_format=torch.contiguous_format, copy=True)
    both, values, token = turned(call, call.heads, kv_heads, dim)
    both = both.to(call.qkv.dtype)
    q, k = both[:, :, : call.heads], both[:, :, call.heads :]
    if call.slots is None:
        assert call.counts is not None
        assert call.block_table is not None
        page, place, real = places(token, call.counts, call.block_table, page_size)
    else:
        slot = torch.nn.functional.pad(call.slots, (0, len(token) - len(call.slots)), value=-1).unsqueeze(1)
        page, place, real = slot.clamp_min(0) // page_size, slot.clamp_min(0) % page_size, slot >= 0
    if real.numel() == 0:
        return q.contiguous()
    # What is not real writes what the first real token writes: two values for one place land in any order.
    source = torch.where(real.flatten(), torch.arange(real.numel(), device=real.device), real.flatten().int().argmax())
    at = page.flatten()[source].long(), place.flatten()[source].long()
    for cache, new in ((call.k_cache, k), (call.v_cache, values)):
        cache.index_put_(at, torch.where(real.any(), new.flatten(0, 1)[source], cache[at]))
    return q.clone(memory_format=torch.contiguous_format)


def _paged_attention(call: PagedAttention) -> Tensor:
    q, k_cache, v_cache, window = call.q, call.k_cache, call.v_cache, call.window
    batch, length, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group, capacity = heads // kv_heads, call.block_table.shape[1] * page_size
    pages = call.block_table.flatten()
    keys = k_cache.index_select(0, pages).view(batch, capacity, kv_heads, dim)
    values = v_cache.index_select(0, pages).view(batch, capacity, kv_heads, dim)
    key = torch.arange(capacity, dtype=torch.int32, device=q.device)
    step = torch.arange(length, dtype=torch.int32, device=q.device)
    token = (call.positions.unsqueeze(1) + step).clamp(0, capacity - 1).unsqueeze(2)
    hidden = key > token  # [B, Q, L]
    if call.counts is not None:
        hidden = hidden | (key >= (call.positions + call.counts).view(batch, 1, 1))
    # A page may still hold what an earlier sequence left: 0 * NaN would carry it into the sum.
    values.masked_fill_(hidden[:, -1].view(batch, capacity, 1, 1), 0.0)
    if window > 0:
        hidden = hidden | (key <= token - window)

    grouped = (q.float() * call.scale).view(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    products = grouped.reshape(batch, kv_heads, group * length, dim) @ keys.float().permute(0, 2, 3, 1)
    scores = capped(products, call.softcap)
    by_query = scores.view(batch, kv_heads, group, length, capacity)
    by_query.masked_fill_(hidden.view(batch, 1, 1, length, capacity), float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, length, -1)
        scores = torch.cat((by_query, sinks), dim=-1).flatten(2, 3)
    weights = scores.softmax(-1)[..., :capacity]
    if call.counts is not None:  # who sees nothing gets zeros
        blind = hidden.all(2).view(batch, 1, 1, length, 1).expand(-1, -1, group, -1, -1)
        weights = weights.masked_fill(blind.reshape(batch, 1, group * length, 1), 0.0)
    out = weights @ values.float().transpose(1, 2)  # [B, kv_heads, group * Q, D]
    out = out.view(batch, heads, length, dim).transpose(1, 2)
    return out.to(q.dtype, memory_format=torch.contiguous_format, copy=True)


def check_heads(
    op: str, call: Heads, heads: int, kv_heads: int, dim: int, *, partial: bool = False, alone: bool = False
) -> None:
    """qkv and what turns its heads, the whole of each unless `partial`; `alone`: queries without keys and values."""
    qkv = call.qkv
    if qkv.dim() != 3 or qkv.dtype not in FLOATS or row_stride(qkv) is None:
        raise ValueError(
            f"{op}: qkv is {tuple(qkv.shape)} {qkv.dtype} of strides {qkv.stride()}; it must be float32, bfloat16 or "
            "float16 [batch, tokens, (heads + 2 kv_heads) * head_dim], of contiguous rows"
        )
    check_grouped(op, heads, kv_heads)
    if (not alone and qkv.shape[2] != (heads + 2 * kv_heads) * dim) or dim % 2:
        raise ValueError(
            f"{op}: qkv holds {qkv.shape[2]} numbers a token; with {heads} heads, {kv_heads} kv heads of {dim} it must "
            f"hold {(heads + 2 * kv_heads) * dim}, and head_dim must be even"
        )
    q_norm, k_norm, cos, sin = call.q_norm, call.k_norm, call.cos, call.sin
    if (q_norm is None) != (k_norm is None) or (cos is None) != (sin is None):
        raise ValueError(f"{op}: q_norm and k_norm go together, and so do cos and sin: give both or neither")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != (dim,) or weight.dtype not in FLOATS or weight.device != qkv.device):
            raise ValueError(
                f"{op}: {name} is {tuple(weight.shape)} {weight.dtype} on {weight.device}; it must be [{dim}]"
            )
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            continue
        fits = table.dim() == 2 and (1 <= table.shape[1] <= dim // 2 if partial else table.shape[1] == dim // 2)
        if not fits or table.dtype != torch.float32:
            width = f"1 to {dim // 2}" if partial else f"{dim // 2}"
            raise ValueError(f"{op}: {name} is {tuple(table.shape)} {table.dtype}; it must be float32 [max, {width}]")
        if table.stride(1) != 1 or table.device != qkv.device:
            raise ValueError(
                f"{op}: {name} is on {table.device}, of strides {table.stride()}; it must be on {qkv.device}, of "
                "contiguous rows"
            )
    if cos is not None and sin is not None and (cos.shape != sin.shape or cos.stride() != sin.stride()):
        raise ValueError(
            f"{op}: cos is {list(cos.shape)} and sin {list(sin.shape)}; shapes and strides of the two must agree"
        )


def check_tokens(
    op: str, call: Tokens, heads: int, kv_heads: int, dim: int, *, partial: bool = False, alone: bool = False
) -> None:
    """`check_heads`, and the rows of the step."""
    check_heads(op, call, heads, kv_heads, dim, partial=partial, alone=alone)
    rows = call.qkv.shape[0]
    check_tensors(
        op, call.qkv.device, positions=(call.positions, torch.int32, (rows,)),
        counts=(call.counts, torch.int32, (rows,)), block_table=(call.block_table, torch.int32, (rows, -1)),
    )  # fmt: skip


def check_caches(op: str, like: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """[pages, page_size, kv_heads, head_dim] of the dtype and on the device of `like`, of the same strides."""
    for cache in (k_cache, v_cache):
        if (
            cache.dim() != 4
            or cache.shape != k_cache.shape
            or cache.stride() != k_cache.stride()
            or cache.stride(3) != 1
        ):
            raise ValueError(
                f"{op}: the caches are {tuple(k_cache.shape)} and {tuple(v_cache.shape)} of strides {k_cache.stride()} "
                f"and {v_cache.stride()}; both must be [pages, page_size, kv_heads, head_dim] of the same strides, "
                "that of the last dimension 1"
            )
        if cache.dtype != like.dtype or cache.device != like.device:
            raise ValueError(
                f"{op}: a cache is {cache.dtype} on {cache.device}, the input {like.dtype} on {like.device}; make them "
                "in that dtype, on that device"
            )


def _check_write(call: RopeCacheWrite) -> None:
    op, qkv, slots = "rope_cache_write", call.qkv, call.slots
    check_caches(op, qkv, call.k_cache, call.v_cache)
    check_heads(op, call, call.heads, *call.k_cache.shape[2:], partial=True, alone=call.queries_alone)
    rows = qkv.shape[0]
    if slots is None:
        if call.counts is None or call.block_table is None:
            raise ValueError(f"{op}: neither slots nor counts and a block_table are given; tokens need either")
        sizes = call.heads, *call.k_cache.shape[2:]
        how = {"partial": True, "alone": call.queries_alone}
        check_tokens(op, call, *sizes, **how)  # type: ignore[arg-type]  # has what Tokens has
        return
    if qkv.shape[1] != 1 or slots.dim() != 1 or len(slots) > rows:
        raise ValueError(
            f"{op}: slots is {tuple(slots.shape)}, qkv {tuple(qkv.shape)}; slots are for one token a row, of at most "
            f"{rows} rows"
        )
    device = qkv.device
    check_tensors(op, device, positions=(call.positions, torch.int64, (rows,)), slots=(slots, torch.int64, (-1,)))


def _check_attention(call: PagedAttention) -> None:
    op, q, rows = "paged_attention", call.q, call.q.shape[:1]
    check_query(op, q)
    check_caches(op, q, call.k_cache, call.v_cache)
    if len(call.k_cache) and not call.k_cache[0].is_contiguous():
        raise ValueError(f"{op}: the caches have strides {call.k_cache.stride()}; each page must be contiguous")
    heads, dim = q.shape[2:]
    kv_heads, cache_dim = call.k_cache.shape[2:]
    check_grouped(op, heads, kv_heads)
    if dim != cache_dim:
        raise ValueError(f"{op}: q has heads of {dim}, the cache of {cache_dim}; head_dim must agree")
    check_tensors(
        op, q.device, block_table=(call.block_table, torch.int32, (*rows, -1)),
        positions=(call.positions, torch.int32, tuple(rows)), sinks=(call.sinks, torch.float32, (heads,)),
        counts=(call.counts, torch.int32, tuple(rows)),
    )  # fmt: skip
    if call.window < 0:
        raise ValueError(
            f"{op}: window is {call.window}; it must be 0 (no window) or the number of keys that a query sees"
        )
    if not 0 <= call.softcap < math.inf:
        raise ValueError(f"{op}: softcap is {call.softcap}; it must be 0 (none) or a bound of the scores above it")


def _write_case(
    name: str, *, tokens: int, heads: int, kv_heads: int, dim: int, page_size: int, positions: list[int],
    counts: list[int], norm: bool = False, rope: bool = True, turned: int | None = None,
) -> Case:  # fmt: skip
    """turned: coordinates of a head that rotate, all of them unless said; fewer come with norms in float32."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw = Draw(device, dtype, generator)
        brought = list(draw.tokens(heads, kv_heads, dim, tokens, positions, counts, page_size, norm, rope))
        if turned is not None:
            brought[1:3] = (t if t is None else t.float() for t in brought[1:3])
            brought[4:6] = (t[:, : turned // 2].contiguous() for t in brought[4:6])
        cache = 1 + brought[8].numel(), page_size, kv_heads, dim
        return *brought, draw.randn(*cache), draw.randn(*cache), heads, None

    return Case(name=name, make=make)


def _slots_case(name: str, *, tokens: int, heads: int, kv_heads: int, dim: int, slots: list[int]) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw = Draw(device, dtype, generator)
        table = torch.cat(draw.turns(50, dim), dim=1)
        cache = draw.randn(4, kv_heads, 16, 2 * dim)  # as vLLM's FlashAttention has it
        return (
            draw.randn(tokens, 1, (heads + 2 * kv_heads) * dim), None, None, 0.0, *table.chunk(2, dim=1),
            torch.randint(0, 50, (tokens,), generator=generator).to(device), None, None,
            *(half.clone() for half in cache.transpose(1, 2).split(dim, dim=-1)), heads,
            torch.tensor(slots, device=device),
        )  # fmt: skip

    return Case(name=name, make=make)


def _attention_case(
    name: str, *, tokens: int, heads: int, kv_heads: int, dim: int, page_size: int, positions: list[int],
    window: int = 0, spare_pages: int = 1, sinks: bool = False, softcap: float = 0.0, apart: bool = False,
    counts: list[int] | None = None,
) -> Case:  # fmt: skip
    """apart: a page of keys, one of values and one of neither, in turn."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, rows = Draw(device, dtype, generator), len(positions)
        table = draw.pages(rows, -(-(max(positions) + tokens) // page_size) + spare_pages)
        q, cache = draw.randn(rows, tokens, heads, dim), (1 + table.numel(), page_size, kv_heads, dim)
        caches = (
            draw.randn(cache[0], 3, *cache[1:]).unbind(1)[:2] if apart else (draw.randn(*cache), draw.randn(*cache))
        )
        logits = draw.sinks(heads) if sinks else None
        real = None if counts is None else draw.ints(counts)
        return q, *caches, table, draw.ints(positions), dim**-0.5, window, logits, softcap, real

    return Case(name=name, make=make)


_SMOL: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64}
_WRITE_CASES = (
    _write_case("smollm2_decode", tokens=1, page_size=16, positions=[37], counts=[1], **_SMOL),
    _write_case("smollm2_batch", tokens=1, page_size=16, positions=[0, 15, 16, 70], counts=[1, 1, 0, 1], **_SMOL),
    _write_case("smollm2_chunk", tokens=24, page_size=16, positions=[0, 9, 40], counts=[24, 5, 0], **_SMOL),
    _write_case(
        "qwen3", tokens=3, heads=8, kv_heads=2, dim=128, page_size=32, positions=[31, 5], counts=[3, 2], norm=True
    ),
    _write_case(
        "nope_80", tokens=2, heads=4, kv_heads=4, dim=80, page_size=8, positions=[7, 3], counts=[2, 1], rope=False
    ),
    _write_case("gqa_96", tokens=5, heads=6, kv_heads=1, dim=96, page_size=4, positions=[2], counts=[4]),
    _write_case(
        "norm_nope", tokens=1, heads=2, kv_heads=2, dim=32, page_size=16, positions=[3], counts=[1], norm=True,
        rope=False,
    ),
    _write_case(
        "gemma_256", tokens=3, heads=4, kv_heads=1, dim=256, page_size=16, positions=[9], counts=[3], norm=True
    ),
    _write_case(
        "half_turned", tokens=2, heads=4, kv_heads=2, dim=128, page_size=16, positions=[70, 3], counts=[2, 1],
        norm=True, turned=64,
    ),
    _write_case(
        "turned_24_of_80", tokens=5, heads=3, kv_heads=3, dim=80, page_size=8, positions=[2], counts=[5], turned=24
    ),
    _slots_case("slots_llama", tokens=1, heads=8, kv_heads=2, dim=128, slots=[17]),
    _slots_case("slots_padded", tokens=5, slots=[63, -1, 0, 20], **_SMOL),
    _slots_case("slots_mqa_80", tokens=3, heads=4, kv_heads=1, dim=80, slots=[5, 4, 40]),
)  # fmt: skip
_ATTENTION_CASES = (
    _attention_case("smollm2_decode", tokens=1, page_size=16, positions=[137], **_SMOL),
    _attention_case("smollm2_batch", tokens=1, page_size=16, positions=[0, 15, 16, 300], spare_pages=4, **_SMOL),
    _attention_case("smollm2_chunk", tokens=24, page_size=16, positions=[0, 9, 130], **_SMOL),
    _attention_case(
        "window_128", tokens=1, heads=8, kv_heads=2, dim=128, page_size=32, positions=[5, 64, 200], window=33
    ),
    _attention_case("window_chunk", tokens=19, heads=4, kv_heads=2, dim=64, page_size=16, positions=[0, 50], window=7),
    _attention_case("mha_80", tokens=2, heads=4, kv_heads=4, dim=80, page_size=8, positions=[7, 30]),
    _attention_case("mqa_96", tokens=5, heads=6, kv_heads=1, dim=96, page_size=4, positions=[2, 61], spare_pages=0),
    _attention_case("long_context", tokens=1, heads=8, kv_heads=2, dim=128, page_size=64, positions=[4000, 17]),
    _attention_case(
        "gpt_oss", tokens=1, heads=16, kv_heads=2, dim=64, page_size=16, positions=[0, 3, 150], window=128, sinks=True
    ),
    _attention_case("sinks", tokens=1, heads=6, kv_heads=3, dim=80, page_size=16, positions=[0, 300], sinks=True),
    _attention_case(
        "sinks_chunk", tokens=21, heads=8, kv_heads=1, dim=64, page_size=16, positions=[0, 50], window=7, sinks=True
    ),
    _attention_case("gemma_256", tokens=1, heads=8, kv_heads=4, dim=256, page_size=16, positions=[0, 300], window=100),
    _attention_case("gemma_256_chunk", tokens=19, heads=4, kv_heads=1, dim=256, page_size=16, positions=[0, 50]),
    _attention_case("apart", tokens=1, page_size=16, positions=[15, 300], apart=True, **_SMOL),
    _attention_case("apart_chunk", tokens=24, page_size=16, positions=[0, 130], apart=True, counts=[24, 9], **_SMOL),
    _attention_case("apart_idle", tokens=3, page_size=16, positions=[0, 40], apart=True, counts=[0, 2], **_SMOL),
    _attention_case("capped", tokens=1, heads=4, kv_heads=2, dim=96, page_size=16, positions=[3, 300], softcap=0.7),
    _attention_case(
        "capped_chunk", tokens=21, heads=8, kv_heads=2, dim=64, page_size=16, positions=[0, 50], window=7, softcap=2.0
    ),
)
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def keys_read(q: Tensor, call: PagedAttention | PagedDecode) -> int:
    """Cache rows that a perfect kernel reads once; it looks at the positions, so never inside a step."""
    reach = call.positions.long() + q.shape[1]
    return int((reach.clamp(max=call.window + q.shape[1] - 1) if call.window else reach).sum())


rope_cache_write = register(
    Op(
        name="rope_cache_write",
        call=RopeCacheWrite,
        schema="-> Tensor",
        reference=_rope_cache_write,
        fake=lambda call: call.qkv.new_empty((*call.qkv.shape[:2], call.heads, call.k_cache.shape[3])),
        kernel="onegraph.ops.triton.attention:rope_cache_write",
        check=_check_write,
        cases=_WRITE_CASES,
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda call: 2 * nbytes(call.qkv),
        flops=lambda call: 6 * call.qkv.numel(),
    )
)
"""qkv [B, Q, (heads + 2 kv_heads) D] -> q [B, Q, heads, D]; keys and values go to the caches [pages, page_size,
kv_heads, D].

Per head an optional RMSNorm of q and k (Qwen3), then rotate-half RoPE from the float32 tables [max_pos, R/2] of the
first R <= D coordinates of a head (None: of none); float32 inside, rounded once. Row b's tokens stand at positions[b]
+ i; only the first counts[b] are real. The other tokens' q is unspecified. Positions are clamped into the tables; a
real token beyond block_table's reach (P * page_size) is treated as padding, never written over another's page. Rows of
block_table may be apart (stride(0) >= P), so that a caller can pass its first columns.

A qkv of queries alone, [B, Q, heads D], writes nothing: they attend to what another layer wrote.

Another engine says instead which slot of its cache each token has: slots int64 [S], S <= B, of one token a row (Q = 1)
at positions int64 [B]; the places of the first S tokens, page * page_size + place, a negative one for none. Neither
counts nor block_table is needed then. The caches may have any strides, both the same (vLLM's have keys beside values,
heads before tokens), and so may the rows of qkv and of the tables."""

paged_attention = register(
    Op(
        name="paged_attention",
        call=PagedAttention,
        schema="-> Tensor",
        reference=_paged_attention,
        fake=lambda call: torch.empty_like(call.q),
        kernel="onegraph.ops.triton.attention:paged_attention",
        check=_check_attention,
        cases=_ATTENTION_CASES,
        tolerance=_TOLERANCE,
        bytes_moved=lambda call: (
            2 * nbytes(call.q) + 2 * keys_read(call.q, call) * call.k_cache[0, 0].numel() * call.k_cache.element_size()
        ),
        flops=lambda call: 4 * call.q[0].numel() * keys_read(call.q, call),
    )
)
"""q [B, Q, H, D] -> [B, Q, H, D]: query i of row b stands at positions[b] + i and attends the keys j <= that, and
j > that - window if window > 0; softmax in float32. Key j of row b is k_cache[block_table[b, j // page_size],
j % page_size]. The grid depends on shapes only; lengths are read on the device. What lies beyond a row's last position
may be anything, NaN included. Rows of block_table may be apart, and so may pages. counts: int32 [B], how many of the Q
are real: what lies where the others stand may be anything, too, and what they get is anyone's.

sinks: float32 [H], a logit of each head that counts in the softmax beside the scores and that no value belongs to
(gpt-oss): what a query gives to it, its result lacks. softcap: scores s, scaled, become softcap * tanh(s / softcap)
(Gemma 2); 0: they stay."""
