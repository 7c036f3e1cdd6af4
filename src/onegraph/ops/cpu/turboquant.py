"""A decode step from TurboQuant codes on a CPU: each row looks at its own tokens alone, and decodes none that its ring
still holds."""

import itertools
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.formats.turboquant import DRAFTS
from onegraph.formats.turboquant_layout import BLOCK, Coded, TurboQuantLayout, pack_tokens, unpack_pages
from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cpu.attention import by_row, turned
from onegraph.ops.turboquant import LARGEST_NORM, layout_in
from onegraph.ops.turboquant_attention import eight_bit_levels


class Book(NamedTuple):
    """What a codebook says of a coordinate: between which `edges` it lies is its rank, and `codes` uint8 and `levels`
    are what a rank has.

    eight_bit: levels by code, as attention reads them. pairs: int64 [256], of codebooks of 16 levels, what a byte's two
    nibbles stand for: two such levels, float32.
    """

    edges: Tensor
    codes: Tensor
    levels: Tensor
    eight_bit: Tensor
    pairs: Tensor | None


class Far(NamedTuple):
    """Keys or values from codes, float32: levels [kv_heads, tokens, D], and norms [kv_heads, tokens] to multiply by."""

    levels: Tensor
    norms: Tensor


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
    if not real:
        return call.qkv.new_zeros(batch, 1, heads, dim)
    whole = turned(call, positions, heads, kv_heads, dim).to(dtype).float()
    rotated = torch.mm(whole.view(-1, dim), call.turn.float()).mul_(dim**-0.5).view_as(whole)
    queries, new = rotated.split((heads, 2 * kv_heads), dim=1)
    queries, kept = queries.to(dtype).float(), new.to(dtype).unflatten(1, (2, kv_heads))
    books = book(tuple(call.k_codebook.tolist())), book(tuple(call.v_codebook.tolist()))
    bytes_of, offsets = _bytes(layout, new, books, call.kind), _offsets(layout, kv_heads, joint(books))
    pages, found = call.block_table.tolist(), {}
    for row in real:
        at, own, ring = positions[row], pages[row], call.ring[slots[row]]
        page, place = own[at // layout.page_size], at % layout.page_size
        call.cache[page].view(-1).index_copy_(0, offsets[place], bytes_of[row])
        ring[at % len(ring)].copy_(kept[row])
        far, near = _seen(call, layout, books, ring, own, at)
        found[row] = _attended(queries[row].view(kv_heads, -1, dim) * call.scale, far, near).view(heads, dim)
    out = by_row(found, batch, heads, dim)
    return torch.mm(out.view(-1, dim), call.rotation.float()).mul_(dim**-0.5).view_as(out).to(dtype)


@lru_cache(maxsize=64)
def book(codebook: tuple[float, ...]) -> Book:
    """Of a codebook in the layout's order: sizes upwards, each of them positive and negative."""
    with torch.inference_mode(False):  # it outlives the caller's mode
        given = torch.tensor(codebook, dtype=torch.float32, device="cpu")
        levels, codes = given.sort()
        sizes = given[::2]
        edges = (sizes[1:] + sizes[:-1]) / 2
        # What is on an edge is of the smaller size: an edge is the last coordinate of the interval below it.
        zero = edges.new_zeros(min(1, len(codebook) - 1))
        below = torch.nextafter(torch.cat((-edges.flip(0), zero)), edges.new_tensor(-torch.inf))
        eight_bit, pairs = eight_bit_levels(given), None
        if len(codebook) == 16:
            byte = torch.arange(256, device="cpu")
            pairs = torch.stack((eight_bit[byte & 15], eight_bit[byte >> 4]), dim=1).view(torch.int64).flatten()
        return Book(torch.cat((below, edges)), codes.to(torch.uint8), levels, eight_bit, pairs)


def coded(y: Tensor, book: Book, kind: str) -> Coded:
    """`ops.turboquant.quantize` of float32 [..., D] in fewer calls, bit for bit."""
    norm = torch.linalg.vector_norm(y, 2, -1, True)
    unit = y / norm.clamp_min(1e-30)
    rank = torch.bucketize(unit, book.edges)
    if kind != "norm":
        level = book.levels.take(rank)
        if kind == "matched":
            norm = norm.div_(torch.linalg.vector_norm(level, 2, -1, True))
        else:
            norm = norm.div_((unit * level).sum(-1, keepdim=True).clamp_min(1e-3))
    return Coded(book.codes.take(rank), norm.squeeze(-1).clamp_(max=LARGEST_NORM).half())


def joint(books: tuple[Book, Book]) -> bool:
    """Whether keys and values are coded in one go: of the same 16 levels."""
    return books[0] is books[1] and books[0].pairs is not None


def _bytes(layout: TurboQuantLayout, new: Tensor, books: tuple[Book, Book], kind: str) -> Tensor:
    """Rotated keys and then values, float32 [B, 2 kv_heads, D] -> their bytes, uint8 [B, kv_heads * bytes], in the
    order of `_offsets`."""
    if joint(books):
        both = coded(new, books[0], kind)
        even, odd = both.codes.view(*new.shape[:2], -1, 2).unbind(3)
        norms = both.norms.unsqueeze(2).view(torch.uint8)
        return torch.cat((torch.add(even, odd, alpha=16), norms), dim=2).flatten(1)
    keys, values = (coded(y, own, kind) for y, own in zip(new.chunk(2, 1), books, strict=True))
    return pack_tokens(layout, keys, values).flatten(1)


@cache
def _offsets(layout: TurboQuantLayout, kv_heads: int, together: bool) -> list[Tensor]:
    """Where in a page the bytes of the token at each place stand, int64 [kv_heads * bytes]: head by head;
    `together`, as of `joint` books, the keys of all heads, each with its norm, and then the values."""
    with torch.inference_mode(False):
        places = layout.offsets(torch.arange(layout.page_size, device="cpu"))
        found = places.unsqueeze(1) + layout.page_bytes * torch.arange(kv_heads, device="cpu").unsqueeze(1)
        if together:
            row = layout.head_dim // 2
            keys, values, *norms = found.split((row, row, 2, 2), dim=2)
            found = torch.cat((torch.cat((keys, norms[0]), 2), torch.cat((values, norms[1]), 2)), dim=1)
        return list(found.flatten(1))


def _seen(
    call: TurboQuantDecode, layout: TurboQuantLayout, books: tuple[Book, Book], ring: Tensor, pages: list[int], at: int
) -> tuple[tuple[Far, Far] | None, tuple[Tensor, Tensor]]:
    """Keys and values that the token at `at` sees: from codes, if any, and from the ring, float32 [kv_heads, tokens,
    D]."""
    first = max(0, at + 1 - call.limit) if call.limit else 0
    older = at + 1 - call.window if at >= call.window + DRAFTS else 0  # tokens before this one are in codes alone
    begin, end = max(first, older) % len(ring), at % len(ring)
    held = ring[begin : end + 1] if begin <= end else torch.cat((ring[begin:], ring[: end + 1]))
    keys, values = held.float().permute(1, 2, 0, 3).unbind(0)
    if older <= first:
        return None, (keys, values)
    size = layout.page_size
    begin = first // size
    own = pages[begin : -(-older // size)]
    if all(b == a + 1 for a, b in itertools.pairwise(own)):
        stored = call.cache[own[0] : own[0] + len(own)]
    else:
        stored = call.cache.index_select(0, torch.tensor(own, device="cpu"))
    span = slice(first - begin * size, older - begin * size)
    far = [Far(each.levels[:, span], each.norms[:, span]) for each in _decoded(layout, stored, books)]
    return (far[0], far[1]), (keys, values)


def _decoded(layout: TurboQuantLayout, pages: Tensor, books: tuple[Book, Book]) -> list[Far]:
    """Keys and values of all tokens of pages [P, kv_heads, page_bytes]."""
    if books[0].pairs is None or books[1].pairs is None:
        both = unpack_pages(layout, pages)
        return [
            Far(
                own.eight_bit.take(each.codes.long()).transpose(0, 1).flatten(1, 2),
                each.norms.float().transpose(0, 1).flatten(1),
            )
            for own, each in zip(books, both, strict=True)
        ]
    rows, dense = len(pages.transpose(0, 1)), torch.contiguous_format
    blocks = pages.unflatten(2, (-1, layout.block_bytes)).transpose(0, 1)  # [kv_heads, pages, blocks, bytes]
    found = []
    for own, codes in zip(books, layout.sections[:2], strict=True):
        assert own.pairs is not None
        part = blocks[..., codes.offset : codes.offset + BLOCK * codes.row]
        if codes.paired:
            part = part.unflatten(3, (BLOCK // 2, codes.row, 2)).transpose(4, 5)
        levels = own.pairs.index_select(0, part.to(torch.int32, memory_format=dense).view(-1)).view(torch.float32)
        found.append(levels.view(rows, -1, layout.head_dim))
    norms = blocks[..., layout.sections[2].offset :].view(torch.float16).unflatten(3, (2, BLOCK))
    sizes = norms.permute(3, 0, 1, 2, 4).to(torch.float32, memory_format=dense).view(2, rows, -1).unbind(0)
    return [Far(*each) for each in zip(found, sizes, strict=True)]


def _attended(q: Tensor, far: tuple[Far, Far] | None, near: tuple[Tensor, Tensor]) -> Tensor:
    """q float32 [kv_heads, group, D], scaled -> float32 [kv_heads, group, D]: one softmax over both."""
    scores = torch.bmm(q, near[0].transpose(1, 2))
    if far is None:
        return torch.bmm(scores.softmax(-1), near[1])
    keys, values = far
    older = torch.bmm(q, keys.levels.transpose(1, 2)).mul_(keys.norms.unsqueeze(1))
    count = older.shape[2]
    weights = torch.cat((older, scores), dim=-1).softmax(-1)
    past = torch.bmm(weights[..., :count] * values.norms.unsqueeze(1), values.levels)
    return past.baddbmm_(weights[..., count:], near[1])
