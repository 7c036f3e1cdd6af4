"""What a CPU runs in place of references: the same numbers, whatever the batch is, and how it is reached."""

import pytest
import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant_layout import BLOCK, Coded, TurboQuantLayout, pack_pages, pack_tokens
from onegraph.ops.cpu import sampling as cpu_sampling
from onegraph.ops.cpu import turboquant as cpu
from onegraph.ops.cpu.norm import rms_norm as cpu_norm
from onegraph.ops.norm import rms_norm
from onegraph.ops.registry import seen_before
from onegraph.ops.sampling import sample_sorted
from onegraph.ops.turboquant import dequantize, quantize
from onegraph.ops.turboquant_attention import eight_bit_levels


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def book_of(codebook: Tensor) -> cpu.Book:
    return cpu.book(tuple(codebook.tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    x, weight = randn(7, 576).to(dtype), 1 + randn(576, seed=1)
    assert torch.equal(torch.cat([cpu_norm(row, weight, 1e-5) for row in x.split(1)]), cpu_norm(x, weight, 1e-5))


@pytest.mark.parametrize("kind", formats.SCALES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codes_and_norms_are_the_references(bits: int, kind: str) -> None:
    """Bit for bit, on the edges between two codes too, for zeros of either sign, and for a vector too long to hold."""
    codebook = formats.codebook(64, bits)
    y = randn(3, 6, 64)
    y[0, 1] = 0.0
    y[0, 2, ::3] = -0.0
    y[2, 5] = 1e6
    assert_same(cpu.coded(y, book_of(codebook), kind), quantize(y, codebook, None, kind))
    sizes = codebook[::2]
    edges = torch.cat(((sizes[1:] + sizes[:-1]) / 2, torch.zeros(1)))
    want = 2 * torch.bucketize(edges, edges[:-1]).int()
    given = book_of(codebook)
    for sign in (1, -1):
        rank = torch.bucketize(sign * edges, given.edges)
        negative = (sign * edges < 0).int()
        assert torch.equal(given.codes.take(rank).int(), want + negative)


def assert_same(found: Coded, wanted: Coded) -> None:
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.norms, wanted.norms)


@pytest.mark.parametrize("books", [(4, 4), (4, 3), (2, 2), (4, -4)], ids=str)
def test_bytes_go_where_the_layout_says(books: tuple[int, int]) -> None:
    """-4: of 4 bits with another codebook."""
    bits = tuple(abs(b) for b in books)
    layout, levels = TurboQuantLayout(64, *bits, page_size=2 * BLOCK), [formats.codebook(64, b) for b in bits]
    levels[1] = levels[1] if books[1] > 0 else 2 * levels[1]
    new, pair = randn(2, 6, 64), (book_of(levels[0]), book_of(levels[1]))
    keys, values = (quantize(y, b, None, "matched") for y, b in zip(new.split(3, 1), levels, strict=True))
    found, want = (torch.zeros(2, 3, layout.page_bytes, dtype=torch.uint8) for _ in range(2))
    place = layout.offsets(torch.tensor(19))
    want[..., place] = pack_tokens(layout, keys, values)
    offsets = cpu._offsets(layout, 3, cpu.joint(pair))[19]
    found.flatten(1).index_copy_(1, offsets, cpu._bytes(layout, new, pair, "matched"))
    assert torch.equal(found, want)


@pytest.mark.parametrize("bits", [(4, 4), (4, 3), (1, 2)])
@pytest.mark.parametrize("page_size", [BLOCK, 3 * BLOCK])
def test_pages_are_read_as_they_are_written(bits: tuple[int, int], page_size: int) -> None:
    layout, books = TurboQuantLayout(64, *bits, page_size=page_size), [formats.codebook(64, b) for b in bits]
    vectors = randn(2, 5, 3, page_size, 64)
    both = [quantize(y, b, None, "matched") for y, b in zip(vectors, books, strict=True)]
    stored, pair = pack_pages(layout, *both), (book_of(books[0]), book_of(books[1]))
    part = cpu._pages(layout, list(range(5)), slice(0, 5 * page_size), torch.empty(3, 1, 5 * page_size))
    cpu._sizes(layout, part, stored)
    found = cpu._decoded(layout, stored, pair)
    wanted = [
        dequantize(c, eight_bit_levels(b)).transpose(0, 1).flatten(1, 2) for c, b in zip(both, books, strict=True)
    ]
    for levels, norms, want in zip(found, part.norms.view(2, 3, -1, 1), wanted, strict=True):
        assert torch.equal(levels * norms, want)
    if bits != (4, 4):
        return
    keys = cpu._levels(layout, pair[0], part, stored, 0).view(3, -1, 64)
    assert torch.equal(keys, found[0])
    pairs = cpu._levels(layout, pair[1], part, stored, 1).view(3, -1, 32, 2, 2)  # of two tokens by turns
    assert torch.equal(pairs.transpose(2, 3).reshape(3, -1, 64), found[1])


@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0], ids=["flat", "usual", "sharp"])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_draw_is_the_references(spread: float, rounded: bool) -> None:
    """Whatever is kept: all, the few that are sorted, more of them, ties on the border, what a mask leaves over."""
    rows = [(t, k, p) for t in (0.0, 0.7, 1.5) for k in (0, 1, 40, 3000) for p in (0.05, 0.9, 0.999, 1.0)]
    logits = spread * randn(len(rows), 5000, seed=4)
    logits = logits.round() if rounded else logits
    logits[1::3, 300:] = -torch.inf
    heat, most, mass = (torch.tensor(column) for column in zip(*rows, strict=True))
    seed = torch.arange(len(rows)) * 977
    given = logits, heat, most.int(), mass, seed, seed.int() // 7
    assert torch.equal(cpu_sampling.sample(*given), sample_sorted(*given))
    one = tuple(tensor[7:8] for tensor in given)
    assert torch.equal(cpu_sampling.sample(*one), sample_sorted(*given)[7:8])


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_broken_row_draws_its_broken_token(damage: float) -> None:
    logits = randn(2, 300)
    logits[1, 77] = damage
    ones = torch.ones(2)
    drawn = cpu_sampling.sample(logits, ones, ones.int(), ones, ones.long(), ones.int())
    assert drawn[1] == 77


def test_a_step_seen_before_runs_the_same_unchecked() -> None:
    """Its ops give what they gave, and do not look at arguments again."""
    x, weight = randn(2, 80), randn(80, seed=1)
    want = rms_norm(x, weight, 1e-5)
    with pytest.raises(ValueError, match="eps is -1"):
        rms_norm(x, weight, -1.0)
    with seen_before(torch.device("cpu")):
        assert torch.equal(rms_norm(x, weight, 1e-5), want)
        rms_norm(x, weight, -1.0)
