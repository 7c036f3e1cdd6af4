"""The attention of a decode step on a CPU: each row looks at its own tokens alone, without a mask."""

import itertools

import torch
from torch import Tensor

from onegraph.ops.attention import turned
from onegraph.ops.calls import PagedDecode


def paged_decode(call: PagedDecode) -> Tensor:
    """See `ops.decode_attention.paged_decode`."""
    _, page_size, kv_heads, dim = call.k_cache.shape
    batch, heads = call.qkv.shape[0], call.heads
    reach = call.block_table.shape[1] * page_size
    counts, positions = call.counts.tolist(), call.positions.tolist()
    real = [row for row in range(batch) if counts[row] > 0 and 0 <= positions[row] < reach]
    out = call.qkv.new_zeros(batch, 1, heads, dim)
    if not real:
        return out
    both, brought = (t.squeeze(1) for t in turned(call, heads, kv_heads, dim)[:2])
    new = both[:, heads:].to(call.k_cache.dtype), brought
    pages = call.block_table.tolist()
    for row in real:
        at, own = positions[row], pages[row]
        page, place = own[at // page_size], at % page_size
        for cache, vector in zip((call.k_cache, call.v_cache), new, strict=True):
            cache[page, place] = vector[row]
        first = max(0, at + 1 - call.window) if call.window > 0 else 0
        keys, values = (_seen(cache, own, first, at + 1) for cache in (call.k_cache, call.v_cache))
        out[row, 0] = attended(both[row, :heads], call.scale, keys, values, call.softcap, call.sinks)
    return out


def _seen(cache: Tensor, pages: list[int], first: int, last: int) -> Tensor:
    """Keys or values of the tokens first..last of a row, [kv_heads, tokens, D]; a view where its pages are in order."""
    size = cache.shape[1]
    begin = first // size
    own = pages[begin : -(-last // size)]
    if all(b == a + 1 for a, b in itertools.pairwise(own)):
        held = cache[own[0] : own[0] + len(own)]
    else:
        held = cache.index_select(0, torch.tensor(own))
    return held.flatten(0, 1)[first - begin * size : last - begin * size].transpose(0, 1)


def attended(
    q: Tensor, scale: float, keys: Tensor, values: Tensor, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """q float32 [heads, D], keys and values [kv_heads, tokens, D] -> float32 [heads, D]."""
    heads, dim = q.shape
    kv_heads = keys.shape[0]
    scores = torch.bmm((q * scale).view(kv_heads, -1, dim), keys.float().transpose(1, 2))
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(kv_heads, -1, 1)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.bmm(weights, values.float()).view(heads, dim)
