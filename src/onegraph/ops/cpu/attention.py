"""The attention of a decode step on a CPU: each row looks at its own tokens alone, without a mask."""

import itertools

import torch
from torch import Tensor

from onegraph.ops.attention import head_norm, paged_attention, rope_cache_write
from onegraph.ops.calls import Heads, PagedDecode


def paged_decode(call: PagedDecode) -> Tensor:
    """See `ops.decode_attention.paged_decode`."""
    if call.qkv.shape[1] > 1:
        return call.composed(rope_cache_write, paged_attention)
    _, page_size, kv_heads, dim = call.k_cache.shape
    batch, heads = call.qkv.shape[0], call.heads
    reach = call.block_table.shape[1] * page_size
    counts, positions = call.counts.tolist(), call.positions.tolist()
    real = [row for row in range(batch) if counts[row] > 0 and 0 <= positions[row] < reach]
    if not real:
        return call.qkv.new_zeros(batch, 1, heads, dim)
    queries, *new = turned(call, positions, heads, kv_heads, dim)
    pages = call.block_table.tolist()
    found = {}
    for row in real:
        at, own = positions[row], pages[row]
        page, place = own[at // page_size], at % page_size
        for cache, vectors in zip((call.k_cache, call.v_cache), new, strict=True):
            cache[page, place].copy_(vectors[row])
        first = max(0, at + 1 - call.window) if call.window > 0 else 0
        keys, values = (_seen(cache, own, first, at + 1) for cache in (call.k_cache, call.v_cache))
        found[row] = attended(queries[row], call.scale, keys, values, call.softcap, call.sinks)
    return by_row(found, batch, heads, dim).to(call.qkv.dtype)


def turned(call: Heads, positions: list[int], heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.attention.turned` of one token a row, whose positions are known: queries and keys float32 [B, heads, D] and
    [B, kv_heads, D], values [B, kv_heads, D] as they came."""
    vectors = call.qkv.squeeze(1).unflatten(1, (-1, dim))
    both, values = vectors.split((heads + kv_heads, kv_heads), dim=1)
    both = both.float()
    if call.q_norm is not None and call.k_norm is not None:
        q, k = both.split((heads, kv_heads), dim=1)
        both = torch.cat((head_norm(q, call.q_norm, call.eps), head_norm(k, call.k_norm, call.eps)), dim=1)
    if call.cos is not None and call.sin is not None:
        last = call.cos.shape[0] - 1
        rows = [min(max(at, 0), last) for at in positions]
        both = _rotated(both, *(_rows(table, rows) for table in (call.cos, call.sin)))
    queries, keys = both.split((heads, kv_heads), dim=1)
    return queries, keys, values


def _rows(table: Tensor, rows: list[int]) -> Tensor:
    """[..., 1, R/2] of a table of angles; of one row a view."""
    return table[rows[0]] if len(rows) == 1 else table.index_select(0, torch.tensor(rows, device="cpu")).unsqueeze(1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.attention.rotate_half`, bit for bit."""
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    turned = (first * cos).sub_(second * sin), (second * cos).add_(first * sin)
    return torch.cat((*turned, rest) if rest.shape[-1] else turned, dim=-1)


def _seen(cache: Tensor, pages: list[int], first: int, last: int) -> Tensor:
    """Keys or values of the tokens first..last of a row, [kv_heads, tokens, D]; a view where its pages are in order."""
    size = cache.shape[1]
    begin = first // size
    own = pages[begin : -(-last // size)]
    if all(b == a + 1 for a, b in itertools.pairwise(own)):
        held = cache[own[0] : own[0] + len(own)]
    else:
        held = cache.index_select(0, torch.tensor(own, device="cpu"))
    return held.flatten(0, 1)[first - begin * size : last - begin * size].transpose(0, 1)


def attended(
    q: Tensor, scale: float, keys: Tensor, values: Tensor, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """q float32 [heads, D], keys and values [kv_heads, tokens, D] -> float32 [heads, D]."""
    heads, dim = q.shape
    kv_heads = keys.shape[0]
    grouped, keys, values = q.view(kv_heads, -1, dim), keys.float(), values.float()
    if not softcap and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            grouped.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale=scale
        ).view(heads, dim)
    scores = torch.bmm(grouped * scale, keys.transpose(1, 2))
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(kv_heads, -1, 1)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.bmm(weights, values).view(heads, dim)


def by_row(found: dict[int, Tensor], batch: int, heads: int, dim: int) -> Tensor:
    """What rows have [heads, D] as [B, 1, heads, D], zeros of those that have nothing."""
    if batch == 1:
        return found[0].view(1, 1, heads, dim)
    nothing = torch.zeros(heads, dim)
    return torch.stack([found.get(row, nothing) for row in range(batch)]).unsqueeze(1)
