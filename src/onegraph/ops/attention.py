"""Attention over a paged KV cache: rotate and write the new keys and values, then attend.

Page 0 is the sentinel: no sequence owns it. What must go nowhere (padding of a chunk, rows of a bucket that hold no
sequence) goes there or is not written at all; what page 0 holds is unspecified. Positions, counts and the block table
live on the device and change between replays of one graph, so both ops have shapes and grids that depend on none of
them.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE (Su et al., arXiv 2104.09864; GPT-NeoX's layout): x [B, Q, H, D], tables [B, Q, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rope_cache_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
) -> Tensor:
    batch, length, _ = qkv.shape
    _, page_size, kv_heads, dim = k_cache.shape
    vectors = qkv.view(batch, length, -1, dim)
    turned, values = vectors[:, :, : heads + kv_heads].float(), vectors[:, :, heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = turned.split((heads, kv_heads), dim=2)
        turned = torch.cat((_head_norm(q, q_norm, eps), _head_norm(k, k_norm, eps)), dim=2)
    step = torch.arange(length, dtype=torch.int32, device=qkv.device)
    token = positions.unsqueeze(1) + step
    if cos is not None and sin is not None:
        row, shape = token.flatten().clamp(0, cos.shape[0] - 1), (batch, length, 1, dim // 2)
        turned = _rope(turned, cos.index_select(0, row).view(shape), sin.index_select(0, row).view(shape))

    capacity = block_table.shape[1] * page_size
    inside = token.clamp(0, capacity - 1)
    real = (step < counts.unsqueeze(1)) & (inside == token)
    page = torch.where(real, block_table.gather(1, (inside // page_size).long()), 0)
    slot = (page * page_size + inside % page_size).flatten().long()
    q, k = turned.to(qkv.dtype).split((heads, kv_heads), dim=2)
    k_cache.view(-1, kv_heads, dim).index_copy_(0, slot, k.flatten(0, 1))
    v_cache.view(-1, kv_heads, dim).index_copy_(0, slot, values.flatten(0, 1))
    return q.clone(memory_format=torch.contiguous_format)


def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    batch, length, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group, capacity = heads // kv_heads, block_table.shape[1] * page_size
    pages = block_table.flatten()
    keys = k_cache.index_select(0, pages).view(batch, capacity, kv_heads, dim)
    values = v_cache.index_select(0, pages).view(batch, capacity, kv_heads, dim)
    key = torch.arange(capacity, dtype=torch.int32, device=q.device)
    step = torch.arange(length, dtype=torch.int32, device=q.device)
    token = (positions.unsqueeze(1) + step).clamp(0, capacity - 1).unsqueeze(2)
    hidden = key > token  # [B, Q, L]
    # A page may still hold what an earlier sequence left: 0 * NaN would carry it into the sum.
    values.masked_fill_(hidden[:, -1].view(batch, capacity, 1, 1), 0.0)
    if window > 0:
        hidden = hidden | (key <= token - window)

    grouped = (q.float() * scale).view(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(batch, kv_heads, group * length, dim) @ keys.float().permute(0, 2, 3, 1)
    by_query = scores.view(batch, kv_heads, group, length, capacity)
    by_query.masked_fill_(hidden.view(batch, 1, 1, length, capacity), float("-inf"))
    out = scores.softmax(-1) @ values.float().transpose(1, 2)  # [B, kv_heads, group * Q, D]
    out = out.view(batch, heads, length, dim).transpose(1, 2)
    return out.to(q.dtype, memory_format=torch.contiguous_format, copy=True)


def _check_cache(
    op: str, like: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, positions: Tensor
) -> None:
    if like.dtype not in FLOATS:
        raise ValueError(f"{op}: input is {like.dtype}; allowed are float32, bfloat16 and float16")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"{op}: k_cache is {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}; "
            "both must be [pages, page_size, kv_heads, head_dim]"
        )
    if k_cache.dtype != like.dtype or v_cache.dtype != like.dtype:
        raise ValueError(
            f"{op}: caches are {k_cache.dtype} and {v_cache.dtype}, the input {like.dtype}; make them in that dtype"
        )
    batch = like.shape[0]
    if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.dtype != torch.int32:
        raise ValueError(
            f"{op}: block_table is {tuple(block_table.shape)} {block_table.dtype}; it must be int32 [{batch}, pages]"
        )
    if positions.shape != (batch,) or positions.dtype != torch.int32:
        raise ValueError(
            f"{op}: positions is {tuple(positions.shape)} {positions.dtype}; it must be int32 [{batch}], one per row"
        )
    if not (like.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"{op}: the input and both caches must be contiguous")
    if block_table.stride(1) != 1 or not positions.is_contiguous():
        raise ValueError(f"{op}: rows of block_table, and positions, must be contiguous (rows may be apart)")
    for name, other in (
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("block_table", block_table),
        ("positions", positions),
    ):
        if other.device != like.device:
            raise ValueError(f"{op}: {name} is on {other.device}, the input on {like.device}; move them to one device")


def _check_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
) -> None:
    op = "rope_cache_write"
    if qkv.dim() != 3:
        raise ValueError(
            f"{op}: qkv is {tuple(qkv.shape)}; it must be [batch, tokens, (heads + 2 kv_heads) * head_dim]"
        )
    _check_cache(op, qkv, k_cache, v_cache, block_table, positions)
    _, _, kv_heads, dim = k_cache.shape
    if heads < 1 or heads % kv_heads or qkv.shape[2] != (heads + 2 * kv_heads) * dim:
        raise ValueError(
            f"{op}: qkv holds {qkv.shape[2]} numbers a token; with {heads} heads, {kv_heads} kv heads of {dim} it must "
            f"hold {(heads + 2 * kv_heads) * dim}, and heads must be a multiple of kv heads"
        )
    if dim % 2:
        raise ValueError(f"{op}: head_dim is {dim}; rotate-half RoPE needs an even one")
    if counts.shape != positions.shape or counts.dtype != torch.int32 or counts.device != qkv.device:
        raise ValueError(
            f"{op}: counts is {tuple(counts.shape)} {counts.dtype} on {counts.device}; "
            f"it must be int32 [{qkv.shape[0]}] on {qkv.device}"
        )
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
        if table.dim() != 2 or table.shape[1] != dim // 2 or table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {tuple(table.shape)} {table.dtype}; it must be contiguous float32 [max, {dim // 2}]"
            )
        if table.device != qkv.device:
            raise ValueError(f"{op}: {name} is on {table.device}, qkv on {qkv.device}; move them to one device")
    if cos is not None and sin is not None and cos.shape != sin.shape:
        raise ValueError(f"{op}: cos has {cos.shape[0]} positions, sin {sin.shape[0]}; they must agree")


def _check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, positions: Tensor, scale: float, window: int
) -> None:
    op = "paged_attention"
    if q.dim() != 4:
        raise ValueError(f"{op}: q is {tuple(q.shape)}; it must be [batch, tokens, heads, head_dim]")
    _check_cache(op, q, k_cache, v_cache, block_table, positions)
    _, _, heads, dim = q.shape
    _, _, kv_heads, cache_dim = k_cache.shape
    if dim != cache_dim or heads % kv_heads:
        raise ValueError(
            f"{op}: q has {heads} heads of {dim}, the cache {kv_heads} of {cache_dim}; head_dim must agree and heads "
            "be a multiple of kv heads"
        )
    if window < 0:
        raise ValueError(f"{op}: window is {window}; it must be 0 (no window) or the number of keys that a query sees")


def _layout(generator: torch.Generator, batch: int, pages_per_row: int, device: torch.device) -> tuple[Tensor, int]:
    """A block table whose pages are shuffled and start at 1, and the number of pages that a cache for it has."""
    pages = 1 + batch * pages_per_row
    table = 1 + torch.randperm(pages - 1, generator=generator, dtype=torch.int32).view(batch, pages_per_row)
    return table.to(device), pages


def _write_case(
    name: str,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    positions: list[int],
    counts: list[int],
    norm: bool = False,
    rope: bool = True,
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        batch = len(positions)
        reach = max(positions) + tokens
        table, pages = _layout(generator, batch, -(-reach // page_size), device)
        angle = torch.arange(reach).unsqueeze(1) * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        return (
            randn(batch, tokens, (heads + 2 * kv_heads) * dim),
            1 + 0.2 * randn(dim) if norm else None,
            1 + 0.2 * randn(dim) if norm else None,
            1e-6,
            angle.cos().to(device) if rope else None,
            angle.sin().to(device) if rope else None,
            torch.tensor(positions, dtype=torch.int32, device=device),
            torch.tensor(counts, dtype=torch.int32, device=device),
            table,
            randn(pages, page_size, kv_heads, dim),
            randn(pages, page_size, kv_heads, dim),
            heads,
        )

    return Case(name=name, make=make)


def _attention_case(
    name: str,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    positions: list[int],
    window: int = 0,
    spare_pages: int = 1,
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        batch = len(positions)
        per_row = -(-(max(positions) + tokens) // page_size) + spare_pages
        table, pages = _layout(generator, batch, per_row, device)
        return (
            randn(batch, tokens, heads, dim),
            randn(pages, page_size, kv_heads, dim),
            randn(pages, page_size, kv_heads, dim),
            table,
            torch.tensor(positions, dtype=torch.int32, device=device),
            dim**-0.5,
            window,
        )

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
        "norm_nope",
        tokens=1,
        heads=2,
        kv_heads=2,
        dim=32,
        page_size=16,
        positions=[3],
        counts=[1],
        norm=True,
        rope=False,
    ),
)
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
)
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def _keys_read(q: Tensor, positions: Tensor, window: int) -> int:
    """Cache rows that a perfect kernel reads once; it looks at the positions, so never inside a step."""
    reach = positions.long() + q.shape[1]
    return int((reach.clamp(max=window + q.shape[1] - 1) if window else reach).sum())


rope_cache_write = register(
    Op(
        name="rope_cache_write",
        schema=(
            "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? cos, Tensor? sin, Tensor positions, "
            "Tensor counts, Tensor block_table, Tensor(a!) k_cache, Tensor(b!) v_cache, int heads) -> Tensor"
        ),
        reference=_rope_cache_write,
        fake=lambda qkv, qn, kn, eps, cos, sin, positions, counts, table, k_cache, v_cache, heads: qkv.new_empty(
            (qkv.shape[0], qkv.shape[1], heads, k_cache.shape[3])
        ),
        kernel="onegraph.ops.triton.attention:rope_cache_write",
        check=_check_write,
        cases=_WRITE_CASES,
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda qkv, *rest: 2 * nbytes(qkv),
        flops=lambda qkv, *rest: 6 * qkv.numel(),
    )
)
"""qkv [B, Q, (heads + 2 kv_heads) D] -> q [B, Q, heads, D]; keys and values go to the caches [pages, page_size,
kv_heads, D].

Per head an optional RMSNorm of q and k (Qwen3), then rotate-half RoPE from the float32 tables [max_pos, D/2] (None:
none of it); float32 inside, rounded once. Row b's tokens stand at positions[b] + i; only the first counts[b] are real.
The other tokens' q is unspecified. Positions are clamped into the tables; a real token beyond block_table's reach
(P * page_size) is treated as padding, never written over another's page. Rows of block_table may be apart
(stride(0) >= P), so that a caller can pass its first columns."""

paged_attention = register(
    Op(
        name="paged_attention",
        schema=(
            "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor positions, float scale, int window) "
            "-> Tensor"
        ),
        reference=_paged_attention,
        fake=lambda q, *rest: torch.empty_like(q),
        kernel="onegraph.ops.triton.attention:paged_attention",
        check=_check_attention,
        cases=_ATTENTION_CASES,
        tolerance=_TOLERANCE,
        bytes_moved=lambda q, k_cache, v_cache, table, positions, scale, window: (
            2 * nbytes(q) + 2 * _keys_read(q, positions, window) * k_cache[0, 0].numel() * k_cache.element_size()
        ),
        flops=lambda q, k_cache, v_cache, table, positions, scale, window: (
            4 * q[0].numel() * _keys_read(q, positions, window)
        ),
    )
)
"""q [B, Q, H, D] -> [B, Q, H, D]: query i of row b stands at positions[b] + i and attends the keys j <= that, and
j > that - window if window > 0; softmax in float32. Key j of row b is k_cache[block_table[b, j // page_size],
j % page_size]. The grid depends on shapes only; lengths are read on the device. What lies beyond a row's last position
may be anything, NaN included. Rows of block_table may be apart."""
