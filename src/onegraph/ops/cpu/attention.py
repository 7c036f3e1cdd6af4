"""The attention of a decode step on a CPU: each row looks at its own tokens alone, without a mask."""

import itertools

import torch
from torch import Tensor

from onegraph.ops.attention import head_norm, rotate_half
from onegraph.ops.calls import PagedDecode, TurboQuantDecode


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
    vectors = call.qkv.view(batch, heads + 2 * kv_heads, dim)
    both = turned(call, vectors[:, : heads + kv_heads].float())
    new = both[:, heads:].to(call.k_cache.dtype), vectors[:, heads + kv_heads :]
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


def turned(call: PagedDecode | TurboQuantDecode, both: Tensor) -> Tensor:
    """float32 [B, heads + kv_heads, D], queries and then keys -> the same after their norms and RoPE, bit for bit what
    the references give that write several tokens of a row."""
    if call.q_norm is not None and call.k_norm is not None:
        q, k = both.split((call.heads, both.shape[1] - call.heads), dim=1)
        both = torch.cat((head_norm(q, call.q_norm, call.eps), head_norm(k, call.k_norm, call.eps)), dim=1)
    if call.cos is None or call.sin is None:
        return both
    row = call.positions.clamp(0, call.cos.shape[0] - 1)
    return rotate_half(both, *(table.index_select(0, row).unsqueeze(1) for table in (call.cos, call.sin)))


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
