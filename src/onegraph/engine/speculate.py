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
from onegraph.engine.draft import MOST, Drafter, MakeDrafter, Place
from onegraph.engine.params import Stats
from onegraph.engine.sequence import Sequence
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.runtime.transfer import Upload

AUTO = (0, 1, 3, 7)  # drafts of a round that `auto` chooses among: a graph each

DraftTokens = int | Literal["auto"]


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
        if tokens != "auto" and (type(tokens) is not int or not 1 <= tokens <= MOST):
            raise ValueError(f"draft_tokens: got {tokens!r}; allowed are 1 to {MOST}, and 'auto'")
        self.auto = tokens == "auto"
        self.counts = AUTO if tokens == "auto" else (0, tokens)
        slots, most = rows + 1, self.counts[-1]
        self.place = Place(
            rows=rows, pages=pages, page_size=page_size, pages_per_row=pages_per_row, kv=kv, device=device,
            history=torch.zeros(slots, context, dtype=torch.int64, device=device),
            drafts=torch.zeros(slots, most, dtype=torch.int64, device=device),
            found=torch.zeros(slots, dtype=torch.int32, device=device),
        )  # fmt: skip
        self.drafter: Drafter = make(self.place)
        self._text = Upload(torch.zeros(context, dtype=torch.int64, device=device))
        self._seconds: dict[int | None, dict[int, float]] = {}  # of a round, by bucket and count

    # Within a step: the capture contract holds here.

    def draw(self, logits: Tensor, places: Tensor, inputs: Mapping[str, Tensor], *, sampling: bool) -> Tensor:
        """The target's own token at each of places int32 [B, W], from logits [B * W, V] -> int64 [B, W]."""
        wide = {}
        if sampling:
            names = "temperature", "top_k", "top_p", "seed"
            wide = {name: inputs[name].repeat_interleave(places.shape[1]) for name in names}
        return draw(logits, places.view(-1), wide, sampling=sampling).view(places.shape)

    # The host's part, between steps.

    def begin(self, sequence: Sequence) -> None:
        """All that is known of a text, before the first pass over it in its slot."""
        known = sequence.tokens(0, sequence.length)
        text = torch.zeros(self.place.history.shape[1], dtype=torch.int64)
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
            sequence.drafts.waiting = found
        return tokens

    def choose(self, rows: list[Sequence], bucket: int | None) -> int:
        """How many drafts the next round of these rows shall read, and a steady drafter write for the one after."""
        steady = self.drafter.steady
        if not steady and not any(sequence.drafts.waiting for sequence in rows):
            return 0
        if not self.auto:
            return self.counts[-1]
        seconds = self._seconds[bucket]

        def gain(count: int) -> float:
            return (
                sum(s.drafts.tokens(count if steady else min(count, s.drafts.waiting)) for s in rows) / seconds[count]
            )

        return max(self.counts[1:] if steady else self.counts, key=gain)

    def measured(self, bucket: int | None) -> bool:
        """Whether it is known what rounds cost at this batch size."""
        return len(self._seconds.get(bucket, ())) == len(self.counts)

    def measure(self, bucket: int | None, count: int, run: Callable[[], object], wait: Callable[[], object]) -> None:
        """What a round of so many drafts costs: `run` runs one on rows that stand still."""
        run()
        wait()
        started = perf_counter()
        run()
        wait()
        self._seconds.setdefault(bucket, {})[count] = perf_counter() - started

    def reset(self) -> None:
        """After a NaN."""
        self.drafter.reset()
