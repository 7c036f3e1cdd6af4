"""The bookkeeping of a round that checks drafts: what it reads, what it accepts, and drafts from the text itself.

A round reads a row's newest token and the tokens drafted behind it, draws the target's own token at each of these
places, and keeps the drafts that equal what was drawn. Drawing is a function of (logits, seed, position), see
`ops/sampling.py`; so a kept draft is the very token that a step without drafts would have drawn, and the text does not
depend on who drafted (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative
decoding", arXiv 2408.07978).
"""

import torch
from torch import Tensor

from onegraph.ops.calls import NAN_DRAFTS, NAN_TOKEN, NO_TOKEN
from onegraph.ops.checks import check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register


def _begin(
    positions: Tensor, limits: Tensor, slots: Tensor, drawn: Tensor, drafts: Tensor, found: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    own = slots.long()
    tokens = torch.cat((drawn.unsqueeze(1), drafts[own, : width - 1]), dim=1)
    counts = torch.minimum((limits - positions).clamp(min=0), 1 + found[own].clamp(0, width - 1))
    step = torch.arange(1, width + 1, dtype=torch.int32, device=positions.device)
    return tokens, counts, positions.unsqueeze(1) + step


def _accept(
    tokens: Tensor, logits: Tensor, read: Tensor, counts: Tensor, slots: Tensor, drawn: Tensor, positions: Tensor,
    history: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, width = tokens.shape
    step = torch.arange(width, device=tokens.device)
    best = logits.gather(1, tokens.view(-1, 1)).view(rows, width)
    broken = best.isnan() | best.isposinf()
    real = step < counts.unsqueeze(1)
    # NaN of one token reaches those beside it through attention: with drafts nobody knows whose it was.
    spoiled = (broken & real).any(dim=1) & (counts > 1)
    # The token drawn at a place is the row's next one if all drafts before it were right.
    right = (read[:, 1:] == tokens[:, :-1]) & real[:, 1:]
    taken = 1 + right.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    taken = taken.masked_fill((counts == 0) | spoiled, 0)
    kept = step < taken.unsqueeze(1)
    last = tokens.gather(1, (taken.long() - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    drawn.copy_(torch.where(taken > 0, last, drawn))
    place = (positions.unsqueeze(1) + 1 + step).long()
    fits = kept & (place < history.shape[1])
    own = slots.long().unsqueeze(1).expand(rows, width)
    # What is not kept goes where it stood: the first place of the sentinel's slot.
    at = torch.where(fits, own, 0), torch.where(fits, place, 0)
    history.index_put_(at, torch.where(fits, tokens, history[0, 0]))
    positions.add_(taken)
    report = tokens.masked_fill(broken, NAN_TOKEN).masked_fill(~kept, NO_TOKEN)
    report[:, 0].masked_fill_(spoiled, NAN_DRAFTS)
    return report, taken


def _ngram(
    history: Tensor, slots: Tensor, positions: Tensor, limits: Tensor, drafts: Tensor, found: Tensor, longest: int,
    shortest: int,
) -> Tensor:  # fmt: skip
    rows, count = len(slots), drafts.shape[1]
    own, end = slots.long(), positions.long().unsqueeze(1)
    text = history[own]
    place = torch.arange(text.shape[1], device=text.device).expand(rows, -1)
    same = (place < end).int()  # how many tokens up to each place equal those at the text's end, as far as it goes
    matched = torch.zeros_like(same)
    for back in range(longest):
        inside = (place >= back) & (end >= back)
        before = text.roll(back, dims=1) == text.gather(1, (end - back).clamp(min=0))
        same = same * (before & inside)
        matched = matched + same
    score = (matched.long() << 32 | place).masked_fill(matched < shortest, -1)
    best = score.max(dim=1).values
    at = best & (2**32 - 1)
    period = (positions.long() - at).masked_fill(best < 0, 1)
    step = torch.arange(count, device=text.device)
    # Behind the text's end its own continuation goes on with the period of the match.
    place = at.masked_fill(best < 0, 0).unsqueeze(1) + 1 + step % period.unsqueeze(1)
    some = ((best >= 0) & (positions < limits)).int() * count
    drafts[own] = text.gather(1, place.clamp(max=text.shape[1] - 1)).masked_fill(some.unsqueeze(1) == 0, 0)
    found[own] = some.to(found.dtype)
    return some.long()


def _check_begin(
    positions: Tensor, limits: Tensor, slots: Tensor, drawn: Tensor, drafts: Tensor, found: Tensor, width: int
) -> None:
    rows, state = (positions.numel(),), (found.numel(),)
    check_tensors(
        "begin_round", positions.device, positions=(positions, torch.int32, rows), limits=(limits, torch.int32, rows),
        slots=(slots, torch.int32, rows), drawn=(drawn, torch.int64, rows), found=(found, torch.int32, state),
        drafts=(drafts, torch.int64, (*state, drafts.shape[-1])),
    )  # fmt: skip
    if not 1 <= width <= 1 + drafts.shape[1]:
        raise ValueError(
            f"begin_round: width is {width}; allowed is 1 to {1 + drafts.shape[1]}, a token and its drafts"
        )


def _check_accept(
    tokens: Tensor, logits: Tensor, read: Tensor, counts: Tensor, slots: Tensor, drawn: Tensor, positions: Tensor,
    history: Tensor,
) -> None:  # fmt: skip
    if logits.dim() != 2 or not logits.is_floating_point() or not logits.is_contiguous():
        raise ValueError(
            f"accept_drafts: logits is {logits.dtype} {tuple(logits.shape)}; it must be contiguous floats [rows x "
            "width, vocabulary]"
        )
    if tokens.dim() != 2 or tokens.numel() != len(logits):
        raise ValueError(f"accept_drafts: tokens is {tuple(tokens.shape)} for {len(logits)} rows of logits; one each")
    shape, rows = tuple(tokens.shape), tokens.shape[:1]
    check_tensors(
        "accept_drafts", logits.device, tokens=(tokens, torch.int64, shape), read=(read, torch.int64, shape),
        counts=(counts, torch.int32, rows), slots=(slots, torch.int32, rows), drawn=(drawn, torch.int64, rows),
        positions=(positions, torch.int32, rows), history=(history, torch.int64, tuple(history.shape)),
    )  # fmt: skip


def _check_ngram(
    history: Tensor, slots: Tensor, positions: Tensor, limits: Tensor, drafts: Tensor, found: Tensor, longest: int,
    shortest: int,
) -> None:  # fmt: skip
    rows, state = (slots.numel(),), (len(history),)
    check_tensors(
        "ngram_drafts", history.device, history=(history, torch.int64, (*state, history.shape[-1])),
        slots=(slots, torch.int32, rows), positions=(positions, torch.int32, rows), limits=(limits, torch.int32, rows),
        drafts=(drafts, torch.int64, (*state, drafts.shape[-1])), found=(found, torch.int32, state),
    )  # fmt: skip
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"ngram_drafts: shortest is {shortest} and longest {longest}; allowed is 1 <= shortest <= longest"
        )


def _state(rows: int, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """(positions, limits, slots, drafts, found, history) of rows, the last of which is padding in slot 0."""
    positions = torch.randint(1, length - 1, (rows,), generator=generator).int()
    limits = positions + torch.randint(0, 2 * count + 2, (rows,), generator=generator).int()
    slots = 1 + torch.randperm(rows + 2, generator=generator)[:rows].int()
    if rows > 1:
        positions[-1] = limits[-1] = slots[-1] = 0
    drafts = torch.randint(0, 9, (rows + 3, count), generator=generator)
    found = torch.randint(0, count + 1, (rows + 3,), generator=generator).int()
    # Few tokens that come again and again, as n-grams need them.
    history = torch.randint(0, 3, (rows + 3, length), generator=generator)
    return positions, limits, slots, drafts, found, history


def _begin_case(rows: int, width: int, count: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        positions, limits, slots, drafts, found, _ = _state(rows, count, 50, generator)
        drawn = torch.randint(0, 9, (rows,), generator=generator)
        return *(t.to(device) for t in (positions, limits, slots, drawn, drafts, found)), width

    return Case(name=f"{rows}x{width}of{count}", make=make)


def _accept_case(rows: int, width: int, vocabulary: int, damage: float | None = None) -> Case:
    """Drafts that are right in two places of three, some rows with fewer of them."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        positions, _, slots, _, _, history = _state(rows, width, 60, generator)
        tokens = torch.randint(0, vocabulary, (rows, width), generator=generator)
        wrong = torch.rand(rows, width, generator=generator) < 1 / 3
        read = torch.roll(tokens, 1, dims=1) + wrong.long()
        counts = torch.randint(1, width + 1, (rows,), generator=generator).int()
        logits = torch.randn(rows * width, vocabulary, generator=generator)
        if damage is not None:
            logits[1::3].scatter_(1, tokens.view(-1, 1)[1::3], damage)
        if rows > 1:
            counts[-1] = 0
        drawn = torch.randint(0, vocabulary, (rows,), generator=generator)
        rest = tokens, logits.to(dtype), read, counts, slots, drawn, positions, history
        return tuple(t.to(device) for t in rest)

    return Case(name=f"{rows}x{width}x{vocabulary}{'' if damage is None else f'+{damage}'}", make=make)


def _ngram_case(rows: int, count: int, length: int, shortest: int = 2) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        positions, limits, slots, drafts, found, history = _state(rows, count, length, generator)
        if rows > 3:  # a text without repetition, one that repeats its last token, and one with a single token
            history[slots[0].long()] = torch.arange(length)
            history[slots[1].long()] = 7
            positions[2] = 0
        state = history, slots, positions, limits, drafts, found
        return *(t.to(device) for t in state), 4, shortest

    return Case(name=f"{rows}x{count}x{length}from{shortest}", make=make)


_EXACT = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}

begin_round = register(
    Op(
        name="begin_round",
        schema="(Tensor positions, Tensor limits, Tensor slots, Tensor drawn, Tensor drafts, Tensor found, int width)"
        " -> (Tensor, Tensor, Tensor)",
        reference=_begin,
        fake=lambda positions, limits, slots, drawn, drafts, found, width: (
            drawn.new_empty((len(drawn), width)),
            torch.empty_like(positions),
            positions.new_empty((len(drawn), width)),
        ),
        kernel="onegraph.ops.triton.draft:begin_round",
        check=_check_begin,
        cases=(_begin_case(1, 1, 3), _begin_case(1, 4, 3), _begin_case(6, 3, 7), _begin_case(130, 8, 7)),
        tolerance=_EXACT,
        bytes_moved=lambda positions, limits, slots, drawn, drafts, found, width: (
            nbytes(positions, limits, slots, drawn) * (1 + width)
        ),
        flops=lambda positions, *rest: 3 * positions.numel(),
    )
)
"""What a round reads. positions, limits, slots int32 [B], drawn int64 [B] (each row's newest token, to stand at its
position), and of each slot drafts int64 [S, K], found int32 [S] (how many of them there are) -> (tokens int64 [B, W],
counts int32 [B], places int32 [B, W]): the newest token and W - 1 drafts; how many of these are real, as many as were
found and the row's limit allows, none of a row at its limit; and where the token drawn behind each will stand."""

accept_drafts = register(
    Op(
        name="accept_drafts",
        schema="(Tensor tokens, Tensor logits, Tensor read, Tensor counts, Tensor slots, Tensor(a!) drawn,"
        " Tensor(b!) positions, Tensor(c!) history) -> (Tensor, Tensor)",
        reference=_accept,
        fake=lambda tokens, logits, read, counts, *rest: (torch.empty_like(tokens), torch.empty_like(counts)),
        kernel="onegraph.ops.triton.draft:accept_drafts",
        check=_check_accept,
        cases=(_accept_case(1, 1, 99), _accept_case(1, 4, 99), _accept_case(5, 8, 1009), _accept_case(3, 1, 50),
               _accept_case(4, 4, 33, float("inf")), _accept_case(6, 3, 8, float("inf")), _accept_case(70, 5, 17)),
        tolerance=_EXACT,
        bytes_moved=lambda tokens, logits, read, *rest: 3 * nbytes(tokens, read),
        flops=lambda tokens, *rest: 2 * tokens.numel(),
    )
)  # fmt: skip
"""What a round keeps. tokens int64 [B, W], drawn from logits [B * W, V] behind each of the tokens read int64 [B, W], of
which counts int32 [B] are real -> (report int64 [B, W], taken int32 [B]): the row's new tokens, one more than drafts
were right, NOTHING behind them, and how many they are. A row of count 0 takes none and stays as it is. Where a real
token's own logit is NaN or infinite, a row of one token reports -1, a row with drafts takes none and reports DIRTY: its
cache holds NaN. drawn int64 [B] <- the newest token; positions int32 [B] += as many as were taken; history int64
[S, L], the tokens of each slot's text by position, gets them. Slot 0 is nobody's.
"""

ngram_drafts = register(
    Op(
        name="ngram_drafts",
        schema="(Tensor history, Tensor slots, Tensor positions, Tensor limits, Tensor(a!) drafts, Tensor(b!) found,"
        " int longest, int shortest) -> Tensor",
        reference=_ngram,
        fake=lambda history, slots, positions, limits, drafts, *rest: drafts.new_empty(slots.shape),
        kernel="onegraph.ops.triton.draft:ngram_drafts",
        check=_check_ngram,
        cases=(_ngram_case(1, 3, 40), _ngram_case(6, 7, 200, 3), _ngram_case(9, 1, 3000)),
        tolerance=_EXACT,
        bytes_moved=lambda history, slots, *rest: nbytes(history) * len(slots) // max(1, len(history)),
        flops=lambda history, slots, *rest: 8 * len(slots) * history.shape[1],
    )
)
"""Drafts for each row from its own text: what stood behind the latest place where the text has the same `longest`
tokens as at its end, or the same fewer, down to `shortest` (prompt lookup: Saxena 2023; Yang et al., arXiv 2304.04487).

history int64 [S, L] by slot and position, slots, positions, limits int32 [B]: the newest token stands at its position.
drafts int64 [S, K] and found int32 [S] of the rows' slots are written: K tokens where there is such a place (a match
that reaches to the end goes on with its own period), else none; none for a row at its limit. Returns found, int64 [B].
"""
