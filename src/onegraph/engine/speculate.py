"""Rounds that read drafts: their state on the device, their end, and how many drafts the next one shall read.

A round reads each row's newest token and up to `count` drafts behind it in one pass of the target, keeps the drafts
that the target draws too (`ops/draft.py`), and has the drafter write those for the next round: one graph, launched as a
plain step is, one ahead of what the host has read. Nothing is undone: positions go back to the first token that was not
kept, and caches write over what stands there.

The drafter's tokens wait in its slots' state, so a round of any count may follow any other. That lets the host choose a
count for each launch, from what it has read: none where nothing was found, and with `auto` as many as pay.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from onegraph.engine.choice import draw
from onegraph.engine.draft import MOST, UNKNOWN, Drafter, MakeDrafter, Place
from onegraph.engine.params import Stats
from onegraph.engine.sequence import Sequence
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.runtime.transfer import Upload

AUTO = (0, 1, 3, 7)  # drafts of a round that `auto` chooses among: a graph each

RUNS = 3  # of a round that is timed

DraftTokens = int | Literal["auto"]
At = tuple[int | None, bool]  # a batch size, and whether tokens are drawn


def check_draft_tokens(tokens: object) -> None:
    """Raises ValueError for a count that no round takes."""
    if tokens != "auto" and (type(tokens) is not int or not 1 <= tokens <= MOST):
        raise ValueError(f"draft_tokens: got {tokens!r}; allowed are 1 to {MOST}, and 'auto'")


class Speculation:
    """Of one engine.

    Args:
        make: the drafter. tokens: drafts of a round, or "auto".
        context: tokens of a sequence. The rest as `Place`.

    Raises ValueError for a count that no round takes.
    """

    def __init__(
        self,
        make: MakeDrafter,
        tokens: DraftTokens,
        *,
        rows: int,
        context: int,
        pages: int,
        page_size: int,
        pages_per_row: int,
        kv: TurboQuantConfig | None,
        device: torch.device,
    ) -> None:
        check_draft_tokens(tokens)
        self.auto = tokens == "auto"
        self.counts: tuple[int, ...] = AUTO if tokens == "auto" else (0, int(tokens))
        slots, most = rows + 1, self.counts[-1]
        self.place = Place(
            rows=rows, pages=pages, page_size=page_size, pages_per_row=pages_per_row, kv=kv, device=device,
            history=torch.zeros(slots, context, dtype=torch.int64, device=device),
            drafts=torch.zeros(slots, most, dtype=torch.int64, device=device),
            found=torch.zeros(slots, dtype=torch.int32, device=device),
        )  # fmt: skip
        self.drafter: Drafter = make(self.place)
        self.counts = tuple(sorted({min(count, self.drafter.most) for count in self.counts}))
        self._text = Upload(torch.zeros(context, dtype=torch.int64, device=device))
        self._seconds: dict[At, dict[int, float]] = {}  # of a round, by count

    # Within a step: the capture contract holds here.

    def draw(self, logits: Tensor, places: Tensor, inputs: Mapping[str, Tensor], *, sampling: bool) -> Tensor:
        """The target's own token at each of places int32 [B, W], from logits [B * W, V] -> int64 [B, W]."""
        wide = {}
        if sampling:
            names = "temperature", "top_k", "top_p", "seed"
            wide = {name: inputs[name].repeat_interleave(places.shape[1]) for name in names}
        return draw(logits, places.view(-1), wide, sampling=sampling).view(places.shape)

    def following(self, slots: Tensor, positions: Tensor, length: int, new: Tensor) -> Tensor:
        """The tokens int64 [B, length] behind those of a prompt that rows read from positions int32 [B] on: as the text
        knows them, and where it ends the one drawn, new int64 [B]."""
        history = self.place.history
        step = torch.arange(1, length + 1, device=positions.device)
        at = (positions.unsqueeze(1) + step).clamp(max=history.shape[1] - 1)
        known = history[slots.long().unsqueeze(1), at]
        return torch.where(known == UNKNOWN, new.unsqueeze(1), known)

    # The host's part, between steps.

    def begin(self, sequence: Sequence) -> None:
        """All that is known of a text, before the first pass over it in its slot."""
        known = sequence.tokens(0, sequence.length)
        text = torch.full((self.place.history.shape[1],), UNKNOWN)
        text[: len(known)] = torch.tensor(known)
        self._text(text)
        self.place.history[sequence.slot].copy_(self._text.target)
        self.place.found[sequence.slot].zero_()
        sequence.drafts.waiting = 0

    def load(self, inputs: Mapping[str, Tensor], rows: int) -> None:
        """The rows' newest tokens, which the host has just loaded into a step's inputs, are part of their texts."""
        slots, positions = inputs["slots"][:rows].long(), inputs["positions"][:rows].long()
        self.place.history.index_put_((slots, positions), inputs["drawn"][:rows])

    def learn(self, rows: list[Sequence], count: int, report: Tensor, stats: Stats) -> Tensor:
        """From a round's report on the host, int64 [B, W + 1]: its tokens [B, W]; what else it says is remembered."""
        tokens, waiting = report[:, :-1], report[:, -1].tolist()
        taken = (tokens >= 0).sum(dim=1).tolist()
        for sequence, new, found in zip(rows, taken, waiting, strict=True):
            if new:
                drafted = min(count, sequence.drafts.waiting)
                sequence.drafts.learn(drafted, new - 1)
                stats.drafted_tokens += drafted
                stats.accepted_tokens += new - 1
                stats.drafted_at.update(range(drafted))
                stats.accepted_at.update(range(new - 1))
            sequence.drafts.waiting = found
        return tokens

    def choose(self, rows: list[Sequence], at: At) -> int:
        """How many drafts the next round of these rows shall read, and a steady drafter write for the one after."""
        steady = self.drafter.steady
        if not steady and not any(sequence.drafts.waiting for sequence in rows):
            return 0
        if not self.auto:
            return self.counts[-1]
        seconds = self._seconds[at]

        def gain(count: int) -> float:
            return (
                sum(s.drafts.tokens(count if steady else min(count, s.drafts.waiting)) for s in rows) / seconds[count]
            )

        return max(self.counts, key=gain)

    def measured(self, at: At) -> bool:
        """Whether it is known what rounds cost there."""
        return len(self._seconds.get(at, ())) == len(self.counts)

    def measure(self, at: At, count: int, run: Callable[[], object], wait: Callable[[], object]) -> None:
        """What a round of so many drafts costs: `run` runs one on rows that stand still. Attention to long contexts and
        experts that other tokens choose are not in it."""
        run()
        wait()
        found = []
        for _ in range(RUNS):
            started = perf_counter()
            run()
            wait()
            found.append(perf_counter() - started)
        self._seconds.setdefault(at, {})[count] = min(found)

    def reset(self) -> None:
        """After a NaN."""
        self.drafter.reset()
