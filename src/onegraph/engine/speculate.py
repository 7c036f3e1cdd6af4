"""Rounds that read drafts, as the host sees them: what they told, and how many drafts the next one shall read.

A round reads each row's newest token and up to `count` drafts behind it in one pass of the target, keeps the drafts
that the target draws too (`ops/draft.py`), and has the drafter write those for the next round: one graph, launched as a
plain step is, one ahead of what the host has read. Nothing is undone: positions go back to the first token that was not
kept, and caches write over what stands there.

A round of any count may follow any other (`engine/rounds.py`). That lets the host choose a count for each launch, from
what it has read: none where nothing was found, and with `auto` as many as pay.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from onegraph.engine.choice import Choice
from onegraph.engine.decoder import Cache, Decoder
from onegraph.engine.draft import MOST, UNKNOWN, Drafter, DraftState, MakeDrafter
from onegraph.engine.exact_window import Sizes
from onegraph.engine.params import Stats
from onegraph.engine.rounds import RoundState
from onegraph.engine.sequence import Sequence
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.models.chain import ChainedLlama
from onegraph.runtime.group import RankGroup

AUTO = (0, 1, 3, 7)  # drafts of a round that `auto` chooses among: a graph each

RUNS = 3  # of a round that is timed

DraftTokens = int | Literal["auto"]
At = tuple[int | None, Choice, bool]  # a batch size, what its rows need, and whether they are exact for being short


def check_draft_tokens(tokens: object) -> None:
    """Raises ValueError for a count that no round takes."""
    if tokens != "auto" and (type(tokens) is not int or not 1 <= tokens <= MOST):
        raise ValueError(f"draft_tokens: got {tokens!r}; allowed are 1 to {MOST}, and 'auto'")


def draft_counts(tokens: DraftTokens) -> tuple[int, ...]:
    """Drafts that a round may read, ascending from none. Raises ValueError for a count that no round takes."""
    check_draft_tokens(tokens)
    return AUTO if tokens == "auto" else (0, int(tokens))


class Speculation:
    """Of one engine.

    Args:
        ranks: what each keeps on its devices, for as many drafts as `draft_counts(tokens)` has at most.
        tokens: drafts of a round, or "auto", which reads `most` of them at most.

    Attributes:
        counts: `draft_counts`, as far as the drafter goes. seconds: of a round, by count.
    """

    def __init__(self, ranks: Seq[RoundState], tokens: DraftTokens, most: int = MOST) -> None:
        self.ranks, self.auto = list(ranks), tokens == "auto"
        most = min(self.drafter.most, most if self.auto else MOST)
        self.counts = tuple(sorted({min(count, most) for count in draft_counts(tokens)}))
        self.seconds: dict[At, dict[int, float]] = {}

    @classmethod
    def of(
        cls, ranks: Seq[Decoder], caches: Seq[Cache], draft: MakeDrafter | Seq[MakeDrafter], tokens: DraftTokens,
        sizes: Sizes, kv: TurboQuantConfig | None,
    ) -> "Speculation":  # fmt: skip
        """Of a model's ranks and their caches. draft: what makes each one's drafter, or one that makes all of them.

        Raises ValueError for a count of drafters or of drafts that cannot be.
        """
        makes = [draft] * len(ranks) if callable(draft) else list(draft)
        if len(makes) != len(ranks):
            raise ValueError(
                f"draft: got {len(makes)} drafters for {len(ranks)} ranks; give one for each, or one for all of them"
            )
        count = draft_counts(tokens)[-1]
        each = zip(makes, caches, ranks, strict=True)
        states = [RoundState(make, cache, rank.devices, sizes, count=count, kv=kv) for make, cache, rank in each]
        # A round's tokens beyond those that a chain takes make each linear a launch of its own again.
        most = min((rank.most - 1 for rank in ranks if isinstance(rank, ChainedLlama)), default=MOST)
        return cls(states, tokens, most)

    @property
    def state(self) -> DraftState:
        """The first rank's."""
        return self.ranks[0].state

    @property
    def drafter(self) -> Drafter:
        """The first rank's."""
        return self.ranks[0].drafter

    def begin(self, sequence: Sequence) -> None:
        """All that is known of a text, before the first pass over it in its slot."""
        known = sequence.tokens(0, sequence.length)
        text = torch.full(self.state.history.shape[1:], UNKNOWN)
        text[: len(known)] = torch.tensor(known)
        for rank in self.ranks:
            rank.begin(sequence.slot, text)
        sequence.drafts.waiting = 0

    def load(self, runner: RankGroup, rows: int) -> None:
        """The rows' newest tokens, which the host has just loaded into a step's inputs, are part of their texts."""
        for rank, stages in zip(self.ranks, runner.ranks, strict=True):
            rank.load(stages[-1].inputs, rows)

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
        seconds = self.seconds[at]

        def gain(count: int) -> float:
            return (
                sum(s.drafts.tokens(count if steady else min(count, s.drafts.waiting)) for s in rows) / seconds[count]
            )

        return max(self.counts, key=gain)

    def measured(self, at: At) -> bool:
        """Whether the costs of rounds are known there."""
        return len(self.seconds.get(at, ())) == len(self.counts)

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
        self.seconds.setdefault(at, {})[count] = min(found)

    def reset(self) -> None:
        """After a NaN, or where ranks parted."""
        for rank in self.ranks:
            rank.drafter.reset()
