"""The attention of a decode step on a CPU: each row looks at its own tokens alone, without a mask."""

import itertools

import torch
from torch import Tensor

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
    vectors = call.qkv.view(batch, heads + 2 * kv_heads, dim)
    both = _turned(call, vectors[:, : heads + kv_heads].float())
    new = both[:, heads:].to(call.k_cache.dtype), vectors[:, heads + kv_heads :]
    pages = call.block_table.tolist()
    for row in real:
        at, own = positions[row], pages[row]
        page, place = own[at // page_size], at % page_size
        for cache, vector in zip((call.k_cache, call.v_cache), new, strict=True):
            cache[page, place] = vector[row]
        first = max(0, at + 1 - call.window) if call.window > 0 else 0
        keys, values = (_seen(cache, own, first, at + 1) for cache in (call.k_cache, call.v_cache))
        out[row, 0] = _attended(call, both[row, :heads], keys, values)
    return out


def _turned(call: PagedDecode, both: Tensor) -> Tensor:
    """float32 [B, heads + kv_heads, D], queries and then keys -> the same after their norms and RoPE."""
    if call.q_norm is not None and call.k_norm is not None:
        q, k = both.split((call.heads, both.shape[1] - call.heads), dim=1)
        q, k = (
            torch.nn.functional.rms_norm(t, (t.shape[-1],), weight.float(), call.eps)
            for t, weight in ((q, call.q_norm), (k, call.k_norm))
        )
        both = torch.cat((q, k), dim=1)
    if call.cos is None or call.sin is None:
        return both
    row = call.positions.clamp(0, call.cos.shape[0] - 1)
    cos, sin = (table.index_select(0, row).unsqueeze(1) for table in (call.cos, call.sin))
    half = cos.shape[-1]
    first, second, rest = both.split((half, half, both.shape[-1] - 2 * half), dim=-1)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat(turned if rest.shape[-1] == 0 else (*turned, rest), dim=-1)


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


def _attended(call: PagedDecode, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q float32 [heads, D], keys and values [kv_heads, tokens, D] -> float32 [heads, D]."""
    heads, dim = q.shape
    grouped = (q * call.scale).view(len(keys), -1, dim)
    scores = torch.bmm(grouped, keys.float().transpose(1, 2))
    if call.softcap:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks.view(len(keys), -1, 1)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.bmm(weights, values.float()).view(heads, dim)
