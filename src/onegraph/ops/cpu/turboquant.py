"""A decode step from TurboQuant codes on a CPU: each row looks at its own tokens alone, and decodes none that its ring
still holds."""

from functools import cache

import torch
from torch import Tensor

from onegraph.formats.turboquant import DRAFTS
from onegraph.formats.turboquant_layout import Coded, TurboQuantLayout, pack_tokens, unpack_pages
from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cpu.attention import attended, turned
from onegraph.ops.turboquant import dequantize, layout_in, quantize
from onegraph.ops.turboquant_attention import eight_bit_levels


def turboquant_decode(call: TurboQuantDecode) -> Tensor:
    """See `ops.turboquant_decode.turboquant_decode`."""
    if call.qkv.shape[1] != 1:
        from onegraph.ops.turboquant_decode import composed

        return composed(call)
    dim, heads, kv_heads = call.turn.shape[0], call.heads, call.cache.shape[1]
    layout = layout_in("turboquant_decode", call, dim)
    batch, dtype = len(call.qkv), call.qkv.dtype
    positions, counts, slots = call.positions.tolist(), call.counts.tolist(), call.slots.tolist()
    reach = call.block_table.shape[1] * layout.page_size
    real = [row for row in range(batch) if counts[row] > 0 and 0 <= positions[row] < reach]
    out = torch.zeros(batch, heads, dim)
    if not real:
        return out.to(dtype).unsqueeze(1)
    whole = torch.cat([vectors.to(dtype).float() for vectors in turned(call, positions, heads, kv_heads, dim)], dim=1)
    rotated = (whole @ call.turn.float()).mul_(dim**-0.5)
    kept = rotated[:, heads:].to(dtype)
    bytes_of = _coded(call, layout, rotated[:, heads:])
    queries = rotated[:, :heads].to(dtype).float()
    pages = call.block_table.tolist()
    for row in real:
        at, own, ring = positions[row], pages[row], call.ring[slots[row]]
        page, place = own[at // layout.page_size], at % layout.page_size
        call.cache[page][:, _offsets(layout)[place]] = bytes_of[row]
        ring[at % len(ring)] = kept[row].view(2, kv_heads, dim)
        out[row] = attended(queries[row], call.scale, *_seen(call, layout, ring, own, at))
    return ((out @ call.rotation.float()) * dim**-0.5).to(dtype).unsqueeze(1)


@cache
def _offsets(layout: TurboQuantLayout) -> Tensor:
    """Where in a page the bytes of the token at each place stand, int64 [page_size, bytes]."""
    return layout.offsets(torch.arange(layout.page_size))


def _coded(call: TurboQuantDecode, layout: TurboQuantLayout, both: Tensor) -> Tensor:
    """Rotated keys and then values, float32 [B, 2 kv_heads, D] -> their bytes, uint8 [B, kv_heads, bytes]."""
    kv_heads = both.shape[1] // 2
    if layout.k_bits == layout.v_bits:
        coded = quantize(both, call.k_codebook, None, call.kind)
        halves = zip(coded.codes.split(kv_heads, 1), coded.norms.split(kv_heads, 1), strict=True)
        keys, values = (Coded(codes, norms) for codes, norms in halves)
    else:
        k, v = both.split(kv_heads, 1)
        keys, values = quantize(k, call.k_codebook, None, call.kind), quantize(v, call.v_codebook, None, call.kind)
    return pack_tokens(layout, keys, values)


def _seen(
    call: TurboQuantDecode, layout: TurboQuantLayout, ring: Tensor, pages: list[int], at: int
) -> tuple[Tensor, Tensor]:
    """Keys and values that the token at `at` sees, float32 [kv_heads, tokens, D]: from codes, then from the ring."""
    first = max(0, at + 1 - call.limit) if call.limit else 0
    older = at + 1 - call.window if at >= call.window + DRAFTS else 0  # tokens before this one are in codes alone
    begin, end = max(first, older) % len(ring), at % len(ring)
    held = ring[begin : end + 1] if begin <= end else torch.cat((ring[begin:], ring[: end + 1]))
    keys, values = held.float().permute(1, 2, 0, 3).unbind(0)
    if older <= first:
        return keys, values
    size = layout.page_size
    begin = first // size
    held = call.cache.index_select(0, torch.tensor(pages[begin : -(-older // size)]))
    both, books = [], (call.k_codebook, call.v_codebook)
    for coded, book, recent in zip(unpack_pages(layout, held), books, (keys, values), strict=True):
        far = dequantize(coded, eight_bit_levels(book)).transpose(0, 1).flatten(1, 2)
        both.append(torch.cat((far[:, first - begin * size : older - begin * size], recent), dim=1))
    return both[0], both[1]
