"""The bookkeeping of a round that checks drafts: a program for each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import NAN_DRAFTS, NO_TOKEN
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit(do_not_specialize=["width", "pitch"])
def _begin(
    positions, limits, slots, drawn, drafts, found, tokens, counts, places, width, pitch,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)  # and the next starts when this has ended: attention may read counts before its own wait
    row = tl.program_id(0)
    step = tl.arange(0, WIDTH)
    position, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    room = tl.maximum(tl.load(limits + row) - position, 0)
    some = tl.minimum(tl.maximum(tl.load(found + slot), 0), width - 1)
    tl.store(counts + row, tl.minimum(room, 1 + some))
    inside = step < width
    draft = tl.load(drafts + slot * pitch + step - 1, mask=inside & (step > 0), other=0)
    token = tl.where(step == 0, tl.load(drawn + row), draft)
    tl.store(tokens + row * width + step, token, mask=inside)
    tl.store(places + row * width + step, position + 1 + step, mask=inside)


@triton.jit(do_not_specialize=["width", "length"])
def _accept(
    tokens, logits, read, counts, slots, drawn, positions, history, report, taken, width, vocabulary, length,
    WIDTH: tl.constexpr, NONE: tl.constexpr, DIRT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    step = tl.arange(0, WIDTH)
    inside = step < width
    at = row * width + step
    token = tl.load(tokens + at, mask=inside, other=0)
    best = tl.load(logits + at.to(tl.int64) * vocabulary + token, mask=inside, other=0.0).to(tl.float32)
    fine = best < float("inf")  # false for NaN as well
    count = tl.load(counts + row)
    # NaN of one token reaches those beside it through attention: with drafts nobody knows whose it was.
    spoiled = (tl.max(tl.where((step < count) & (fine == 0), 1, 0), axis=0) > 0) & (count > 1)
    # A draft is wrong where it is not what was drawn before it; the first wrong one ends what is taken.
    draft = tl.load(read + at + 1, mask=step + 1 < width, other=0)
    wrong = (draft != token) | (step + 1 >= count) | (step + 1 >= width)
    first = tl.min(tl.where(wrong & inside, step, WIDTH), axis=0)
    many = tl.where((count > 0) & (spoiled == 0), first + 1, 0)
    kept = inside & (step < many)
    empty = tl.where(spoiled & (step == 0), DIRT, NONE)
    tl.store(report + at, tl.where(kept, tl.where(fine, token, -1), empty), mask=inside)
    tl.store(taken + row, many)
    position, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    tl.store(history + slot * length + position + 1 + step, token, mask=kept & (position + 1 + step < length))
    tl.store(positions + row, position + many)
    last = tl.sum(tl.where(step == many - 1, token, 0), axis=0)
    tl.store(drawn + row, last, mask=many > 0)


@triton.jit(do_not_specialize=["length", "count"])
def _ngram(
    history, slots, positions, limits, drafts, found, report, length, count,
    COUNT: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    end, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    text = history + slot * length
    best = tl.full((BLOCK,), -1, tl.int64)
    for start in range(0, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        same = (place < end).to(tl.int32)
        matched = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(LONGEST):
            wanted = tl.load(text + end - back, mask=end >= back, other=-1)
            here = tl.load(text + place - back, mask=(place >= back) & (place < end), other=-2)
            same = tl.where(here == wanted, same, 0)
            matched += same
        score = (matched.to(tl.int64) << 32) | place.to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= SHORTEST, score, -1))
    top = tl.max(best, axis=0)
    at = (top & 0xFFFFFFFF).to(tl.int32)
    some = (top >= 0) & (end < tl.load(limits + row))
    period = tl.where(top >= 0, end - at, 1)
    step = tl.arange(0, COUNT)
    place = at + 1 + step % period
    draft = tl.load(text + place, mask=(step < count) & some, other=0)
    tl.store(drafts + slot * count + step, draft, mask=step < count)
    many = tl.where(some, count, 0)
    tl.store(found + slot, many)
    tl.store(report + row, many.to(tl.int64))


def begin_round(
    positions: Tensor, limits: Tensor, slots: Tensor, drawn: Tensor, drafts: Tensor, found: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `onegraph.ops.draft.begin_round`."""
    rows = len(drawn)
    tokens, counts = drawn.new_empty((rows, width)), torch.empty_like(positions)
    places = positions.new_empty((rows, width))
    if rows:
        with on_device(drawn):
            _begin[(rows,)](
                positions, limits, slots, drawn, drafts, found, tokens, counts, places, width, drafts.shape[1],
                WIDTH=triton.next_power_of_2(width), num_warps=1, PDL=options(drawn)["PDL"],
            )  # fmt: skip
    return tokens, counts, places


def accept_drafts(
    tokens: Tensor, logits: Tensor, read: Tensor, counts: Tensor, slots: Tensor, drawn: Tensor, positions: Tensor,
    history: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `onegraph.ops.draft.accept_drafts`."""
    rows, width = tokens.shape
    report, taken = torch.empty_like(tokens), torch.empty_like(counts)
    if rows:
        with on_device(logits):
            _accept[(rows,)](
                tokens, logits, read, counts, slots, drawn, positions, history, report, taken, width,
                logits.shape[1], history.shape[1], WIDTH=triton.next_power_of_2(width), NONE=NO_TOKEN, DIRT=NAN_DRAFTS,
                num_warps=1,
                **options(logits),
            )  # fmt: skip
    return report, taken


def ngram_drafts(
    history: Tensor, slots: Tensor, positions: Tensor, limits: Tensor, drafts: Tensor, found: Tensor, longest: int,
    shortest: int,
) -> Tensor:  # fmt: skip
    """See `onegraph.ops.draft.ngram_drafts`."""
    rows, count = len(slots), drafts.shape[1]
    report = drafts.new_empty((rows,))
    if rows:
        with on_device(history):
            _ngram[(rows,)](
                history, slots, positions, limits, drafts, found, report, history.shape[1], count,
                COUNT=triton.next_power_of_2(count), LONGEST=longest, SHORTEST=shortest, BLOCK=1024, num_warps=4,
                **options(history),
            )  # fmt: skip
    return report
