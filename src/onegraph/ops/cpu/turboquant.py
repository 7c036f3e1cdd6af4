"""A decode step from TurboQuant codes on a CPU: each row looks at its own tokens alone, and decodes none that its ring
still holds.

A call of torch's takes a microsecond or more, as long as what it does here. So what the layers of a step have in common
is made once a step, a ring that wraps around is read whole under a mask, and a byte of codes is looked up as what its
two nibbles mean, in the order in which bytes are stored.
"""

import itertools
import threading
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onegraph.formats.turboquant import DRAFTS
from onegraph.formats.turboquant_layout import BLOCK, Coded, TurboQuantLayout, pack_tokens, unpack_pages
from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cpu.attention import by_row, rope_rows, turned
from onegraph.ops.cpu.turboquant_native import Native, native
from onegraph.ops.turboquant import LARGEST_NORM, layout_in
from onegraph.ops.turboquant_attention import eight_bit_levels

_ZERO = torch.zeros(1, 1, 1, device="cpu")
AT_ONCE = 1 << 18  # numbers that are decoded at a time: as float32 they stay in a core's cache


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


class Span(NamedTuple):
    """A row with a token, at `at` of its sequence, which sees tokens from `first` on, of which those before `older` are
    in codes alone."""

    row: int
    slot: int
    at: int
    first: int
    older: int
    pages: list[int]


class Pages(NamedTuple):
    """Pages of a row that are decoded at once, and where to. The query does not see all of their tokens.

    own: a slice where pages are in order, else int64 numbers.
    numbers: int32 [kv_heads, pages, blocks, bytes], a section of codes as indices; levels: int64, what these mean.
    norms: float32 [2, kv_heads, pages, blocks, BLOCK], of keys and of values; hidden: those of tokens not seen.
    mask: [1, 1, tokens], -inf for those. scores: [kv_heads, group, tokens], a part of the row's.
    """

    own: slice | Tensor
    numbers: Tensor
    levels: Tensor
    norms: Tensor
    hidden: list[Tensor]
    mask: Tensor
    scores: Tensor


class Row(NamedTuple):
    """A row with a token, and what that sees.

    row: of the batch. slot: of the rings. place: the token's. begin, length: places that it looks at, under `mask` [1,
    1, length], zeros where it sees all of them. older: what it sees from codes.
    scores: [kv_heads, group, tokens of `older`, then places], to be filled; near: the places'.
    """

    row: int
    slot: int
    place: int
    begin: int
    length: int
    mask: Tensor
    older: list[Pages]
    scores: Tensor
    near: Tensor


class Common(NamedTuple):
    """What layers have in common in a step: all but queries, keys and values.

    angles: cos and sin for every head [B, heads + 2 kv_heads, 1, D / 2]; None where RoPE is not of whole heads, or
        norms come first.
    turn, back: float32 [D, D], what turns vectors, and what turns the result back.
    native: does the rest in one call of C; then at and rows are empty.
    at: int64, where in a cache the bytes of the rows' tokens stand, in the order of `_bytes`. rows: with a token.
    """

    layout: TurboQuantLayout
    books: tuple[Book, Book]
    angles: tuple[Tensor, Tensor] | None
    turn: Tensor
    back: Tensor
    native: Native | None
    at: Tensor
    rows: list[Row]


class StepLayout:
    """What is known of a step whose tokens stand where these tensors say, as long as nobody writes to them."""

    def __init__(self, *given: Tensor) -> None:
        self.given, self.versions = given, [_version(t) for t in given]
        self.positions, counts, self.slots, self.pages = (t.tolist() for t in given)
        self.taken = [row for row, count in enumerate(counts) if count > 0]
        self.known: dict[tuple[Any, ...], tuple[Common, tuple[Tensor | None, ...]]] = {}

    def holds(self, *given: Tensor) -> bool:
        pairs = zip(given, self.given, self.versions, strict=True)
        return all(new is old and version is not None and new._version == version for new, old, version in pairs)

    def common(self, call: TurboQuantDecode) -> Common:
        """Of the layer that `call` is of, and of all that are like it."""
        of = call.cos, call.sin, call.turn, call.rotation, call.k_codebook, call.v_codebook
        how = call.cache.shape, call.ring.shape, call.ring.stride(), call.qkv.dtype, call.heads, call.scale, call.kind
        key = *map(id, of), *how, call.window, call.limit
        if key not in self.known:
            self.known[key] = _common(call, self), of  # an id is a tensor's as long as that exists
        return self.known[key][0]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class _Local(threading.local):
    """A thread's latest plan, and memory to decode into: fresh memory of that size costs more than its use."""

    def __init__(self) -> None:
        self.plan: StepLayout | None = None
        self.index = torch.empty(0, dtype=torch.int32, device="cpu")
        self.levels = torch.empty(0, dtype=torch.int64, device="cpu")

    def scratch(self, count: int) -> tuple[Tensor, Tensor]:
        """int32 and int64 [count]."""
        if len(self.index) < count:
            with torch.inference_mode(False):  # they outlive the caller's mode
                self.index, self.levels = self.index.new_empty(count), self.levels.new_empty(count)
        return self.index[:count], self.levels[:count]


_LOCAL = _Local()


def turboquant_decode(call: TurboQuantDecode) -> Tensor:
    """See `ops.turboquant_decode.turboquant_decode`."""
    if call.qkv.shape[1] != 1:
        from onegraph.ops.turboquant_decode import composed

        return composed(call)
    plan, state = _LOCAL.plan, (call.positions, call.counts, call.slots, call.block_table)
    if plan is None or not plan.holds(*state):
        plan = _LOCAL.plan = StepLayout(*state)
    common = plan.common(call)
    vectors = _turned(call, plan, common)
    if common.native is not None:
        return common.native.run(call, vectors)
    batch, heads, dim, rows = len(call.qkv), call.heads, common.layout.head_dim, common.rows
    if not rows:
        return call.qkv.new_zeros(batch, 1, heads, dim)
    queries, new = vectors[:, :heads].to(call.qkv.dtype).float(), vectors[:, heads:]
    found = {own.row: _attended(call, common, own, queries[own.row], new[own.row]) for own in rows}
    new = new if len(rows) == batch else new[[own.row for own in rows]]
    written = _bytes(common.layout, new, common.books, call.kind)
    call.cache.view(-1).index_copy_(0, common.at, written.view(-1))
    out = torch.mm(by_row(found, batch, heads, dim).view(-1, dim), common.back)
    return out.view(batch, 1, heads, dim).to(call.qkv.dtype)


def _common(call: TurboQuantDecode, plan: StepLayout) -> Common:
    dim, kv_heads = call.turn.shape[0], call.cache.shape[1]
    layout = layout_in("turboquant_decode", call, dim)
    books = book(tuple(call.k_codebook.tolist())), book(tuple(call.v_codebook.tolist()))
    angles, size = _angles(call, plan), layout.page_size
    turn, back = (t.float() * dim**-0.5 for t in (call.turn, call.rotation))
    spans = []
    for row in plan.taken:
        at, pages = plan.positions[row], plan.pages[row]
        if 0 <= at < len(pages) * size:
            first = max(0, at + 1 - call.limit) if call.limit else 0
            older = at + 1 - call.window if at >= call.window + DRAFTS else 0
            spans.append(Span(row, plan.slots[row], at, first, older, pages))
    if joint(books):
        given = books[0].codes, books[0].levels, books[0].edges, books[0].eight_bit
        found = native(call, back, size, *given, spans)
        if found is not None:
            return Common(layout, books, angles, turn, back, found, torch.empty(0, device="cpu"), [])
    offsets, at = _offsets(layout, kv_heads, joint(books)), [torch.empty(0, dtype=torch.int64, device="cpu")]
    for span in spans:
        page, place = span.pages[span.at // size], span.at % size
        at.append(offsets[place] + page * kv_heads * layout.page_bytes)
    rows = [_row(call, layout, span) for span in spans]
    return Common(layout, books, angles, turn, back, None, torch.cat(at), rows)


def _angles(call: TurboQuantDecode, plan: StepLayout) -> tuple[Tensor, Tensor] | None:
    """See `Common.angles`."""
    dim = call.turn.shape[0]
    if call.q_norm is not None or call.cos is None or call.sin is None or 2 * call.cos.shape[1] < dim:
        return None
    shape = len(plan.positions), call.heads + 2 * call.cache.shape[1], 1, dim // 2
    found = torch.ones(shape, device="cpu"), torch.zeros(shape, device="cpu")  # as values are not rotated
    for all_heads, table in zip(found, (call.cos, call.sin), strict=True):
        all_heads[:, : -call.cache.shape[1]] = rope_rows(table, plan.positions)
    return found


def _row(call: TurboQuantDecode, layout: TurboQuantLayout, span: Span) -> Row:
    row, slot, at, first, older, pages = span
    size = call.ring.shape[1]
    begin, end, hidden = max(first, older) % size, at % size, slice(0)
    count = end + 1 - begin
    if count <= 0:  # it wraps around, so by now every place holds a token of this sequence
        hidden, begin, count = slice(end + 1, begin), 0, size
    mask = torch.zeros(1, 1, count, device="cpu")
    mask[..., hidden] = -torch.inf

    kv_heads, page = call.cache.shape[1], layout.page_size
    start, stop = (first // page, -(-older // page)) if older > first else (0, 0)
    length = (stop - start) * page
    scores = torch.empty(kv_heads, call.heads // kv_heads, length + count, device="cpu")
    step = max(1, AT_ONCE // (kv_heads * page * layout.head_dim))
    parts = []
    for i in range(start, stop, step):
        own, base = pages[i : min(i + step, stop)], i * page
        seen = slice(max(0, first - base), older - base)
        parts.append(_pages(layout, own, seen, scores.narrow(2, base - start * page, len(own) * page)))
    return Row(row, slot, at % size, begin, count, mask, parts, scores, scores[..., length:])


def _pages(layout: TurboQuantLayout, own: list[int], seen: slice, scores: Tensor) -> Pages:
    kv_heads, _, tokens = scores.shape
    in_order = all(b == a + 1 for a, b in itertools.pairwise(own))
    which = slice(own[0], own[-1] + 1) if in_order else torch.tensor(own, device="cpu")
    blocks = kv_heads, len(own), layout.page_size // BLOCK
    index, levels = _LOCAL.scratch(kv_heads * tokens * layout.head_dim // 2)
    norms = torch.empty(2, *blocks, BLOCK, device="cpu")
    by_token, hidden = norms.view(2, kv_heads, tokens), []
    mask = torch.full((1, 1, tokens), -torch.inf, device="cpu")
    mask[..., seen] = 0.0
    if seen.start > 0:
        hidden.append(by_token[..., : seen.start])
    if seen.stop < tokens:
        hidden.append(by_token[..., seen.stop :])
    return Pages(which, index.view(*blocks, -1), levels, norms, hidden, mask, scores)


def _turned(call: TurboQuantDecode, plan: StepLayout, common: Common) -> Tensor:
    """Queries, keys and values, rotated and turned, float32 [B, heads + 2 kv_heads, D]."""
    dtype, dim, heads = call.qkv.dtype, common.layout.head_dim, call.heads
    if common.angles is None:
        whole = turned(call, plan.positions, heads, call.cache.shape[1], dim)
    else:
        cos, sin = common.angles
        halves = call.qkv.view(len(call.qkv), -1, 2, dim // 2)
        whole, sines = halves * cos, (halves * sin).unbind(2)
        first, second = whole.unbind(2)
        first.sub_(sines[1])
        second.add_(sines[0])
    return torch.mm(whole.to(dtype).float().view(-1, dim), common.turn).view(len(call.qkv), -1, dim)


def _attended(call: TurboQuantDecode, common: Common, own: Row, q: Tensor, new: Tensor) -> Tensor:
    """What the queries of a row [heads, D] see, float32 [heads, D], after its keys and values have gone to its ring."""
    heads, dim = q.shape
    (kv_heads, group, _), row = own.scores.shape, len(new) * dim
    first = call.ring.storage_offset() + own.slot * call.ring.shape[1] * row
    call.ring.as_strided((len(new), dim), (dim, 1), first + own.place * row).copy_(new)
    ring, first = call.ring, first + own.begin * row
    if ring.dtype != torch.float32:
        ring, first = ring[own.slot].float(), own.begin * row
    keys = ring.as_strided((kv_heads, dim, own.length), (dim, 1, row), first)
    values = ring.as_strided((kv_heads, own.length, dim), (dim, row, 1), first + row // 2)
    q = q.view(kv_heads, group, dim)
    near = torch.baddbmm(own.mask, q, keys, alpha=call.scale)
    if not own.older:
        return torch.bmm(near.softmax(-1), values).view(heads, dim)
    own.near.copy_(near)
    decoded = [_score(call, common, part, q) for part in own.older]
    weights = own.scores.softmax(-1)
    out, start = torch.bmm(weights.narrow(2, weights.shape[2] - own.length, own.length), values), 0
    for part, (stored, far) in zip(own.older, decoded, strict=True):
        tokens = part.scores.shape[2]
        some = weights.narrow(2, start, tokens) * part.norms[1].view(kv_heads, 1, tokens)
        start += tokens
        if far is not None:
            out.baddbmm_(some, far)
            continue
        # A row of values is the bytes of tokens 2p and 2p + 1 in turn: [.., D / 2, token, number of the byte].
        pairs = some.view(kv_heads, group, -1, 2).transpose(2, 3).reshape(kv_heads, 2 * group, -1)
        levels = _levels(common.layout, common.books[1], part, stored, 1).view(kv_heads, -1, 2 * dim)
        both = torch.bmm(pairs, levels)
        shape, strides = (kv_heads, group, dim // 2, 2), (4 * group * dim, 4 * dim, 4, 1)
        for token in (0, 2 * dim + 2):
            out.view(shape).add_(both.as_strided(shape, strides, token))
    return out.view(heads, dim)


def _score(call: TurboQuantDecode, common: Common, part: Pages, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """Fills in scores and norms of pages: (these, as stored; their values without norms, where keys do not come without
    them)."""
    layout, kv_heads = common.layout, len(q)
    stored, far = call.cache[part.own], None
    _sizes(layout, part, stored)
    if common.books[0].pairs is not None and common.books[1].pairs is not None:
        keys = _levels(layout, common.books[0], part, stored, 0).view(kv_heads, -1, layout.head_dim)
    else:
        keys, far = _decoded(layout, stored, common.books)
    scores = torch.baddbmm(_ZERO, q, keys.transpose(1, 2), beta=0, alpha=call.scale)
    torch.addcmul(part.mask, scores, part.norms[0].view(kv_heads, 1, -1), out=part.scores)
    return stored, far


def _sizes(layout: TurboQuantLayout, part: Pages, stored: Tensor) -> None:
    """Fills in the norms of pages [P, kv_heads, page_bytes]."""
    _, kv_heads, page = stored.shape
    strides = BLOCK, page // 2, kv_heads * page // 2, layout.block_bytes // 2, 1
    halves = stored.view(torch.float16)
    first = halves.storage_offset() + layout.sections[-2].offset // 2
    part.norms.copy_(halves.as_strided(part.norms.shape, strides, first))
    for hidden in part.hidden:
        hidden.zero_()  # what an earlier sequence left may be NaN


def _levels(layout: TurboQuantLayout, book: Book, part: Pages, stored: Tensor, which: int) -> Tensor:
    """What the codes of keys (0) or values (1) in pages [P, kv_heads, page_bytes] mean, float32, in their bytes' order;
    valid until the next ones are asked for."""
    _, kv_heads, page = stored.shape
    assert book.pairs is not None
    strides = page, kv_heads * page, layout.block_bytes, 1
    first = stored.storage_offset() + layout.sections[which].offset
    part.numbers.copy_(stored.as_strided(part.numbers.shape, strides, first))
    return torch.index_select(book.pairs, 0, part.numbers.view(-1), out=part.levels).view(torch.float32)


def _decoded(layout: TurboQuantLayout, pages: Tensor, books: tuple[Book, Book]) -> tuple[Tensor, Tensor]:
    """Keys and values without norms of all tokens of pages [P, kv_heads, page_bytes], float32 [kv_heads, tokens, D]."""
    keys, values = (
        own.eight_bit.take(each.codes.long()).transpose(0, 1).flatten(1, 2)
        for own, each in zip(books, unpack_pages(layout, pages), strict=True)
    )
    return keys, values


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
