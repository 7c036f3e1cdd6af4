"""The attention of a decode step on a CPU: each row looks at its own tokens alone, without a mask."""

import itertools

import torch
from torch import Tensor

from onegraph.ops.attention import head_norm, paged_attention, rope_cache_write
from onegraph.ops.calls import Heads, PagedDecode
from onegraph.ops.gate import gate_heads, split_gates
from onegraph.ops.values import normed_values


def paged_decode(call: PagedDecode) -> Tensor:
    """See `ops.decode_attention.paged_decode`."""
    call = call.values_normed(normed_values)
    if call.gated:
        return call.ungated(paged_decode, split_gates, gate_heads)
    if call.qkv.shape[1] > 1:
        return call.composed(rope_cache_write, paged_attention)
    _, page_size, kv_heads, dim = call.k_cache.shape
    batch, heads = call.qkv.shape[0], call.heads
    reach = call.block_table.shape[1] * page_size
    counts, positions = call.counts.tolist(), call.positions.tolist()
    real = [row for row in range(batch) if counts[row] > 0 and 0 <= positions[row] < reach]
    if not real:
        return call.qkv.new_zeros(batch, 1, heads, dim)
    queries, *new = turned(call, positions, heads, kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
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


def turned(call: Heads, positions: list[int], heads: int, kv_heads: int, dim: int) -> Tensor:
    """`ops.attention.turned` of one token a row, whose positions are known, bit for bit: queries, keys, and values as
    they came, float32 [B, heads + 2 kv_heads, D]."""
    found = call.qkv.view(len(positions), -1, dim).to(torch.float32, copy=True)
    if call.q_norm is not None and call.k_norm is not None:
        q, k, _ = found.split((heads, kv_heads, kv_heads), dim=1)
        q.copy_(head_norm(q, call.q_norm, call.eps))
        k.copy_(head_norm(k, call.k_norm, call.eps))
    if call.cos is not None and call.sin is not None:
        last, half = call.cos.shape[0] - 1, call.cos.shape[1]
        rows = [min(max(at, 0), last) for at in positions]
        both = found[:, : heads + kv_heads, : 2 * half].unflatten(2, (2, half))
        sines = (both * rope_rows(call.sin, rows)).unbind(2)
        first, second = both.mul_(rope_rows(call.cos, rows)).unbind(2)
        first.sub_(sines[1])
        second.add_(sines[0])
    return found


def rope_rows(table: Tensor, rows: list[int]) -> Tensor:
    """[..., 1, 1, R/2] of a table of angles; of one row a view."""
    if len(rows) == 1:
        return table[rows[0]]
    return table.index_select(0, torch.tensor(rows, device="cpu"))[:, None, None]


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
