"""Drafters that go on from what the target made of its text: EAGLE heads, DeepSeek-V4's draft layers.

Beside each of the target's tokens such a head has an entry of its own, made of the target's features of that token and
of the token behind it; the last entry of a text names the token behind the newest one. To name one more, a head reads
what itself returned in place of features. Those entries are written over as soon as the target has read their tokens:
entries lie under the target's positions, in its pages and slots, and are taken back as its own state is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onegraph.engine.choice import draw
from onegraph.engine.decoder import Cache, SplitAttention
from onegraph.engine.draft import MOST, DraftState, Pass, Rows, view
from onegraph.ops.step import begin_step


class Keeper(Protocol):
    """What drafts and has state in a cache of its own, of the target's pages and slots."""

    @property
    def layers(self) -> Sequence[int]: ...  # of the target, whose hidden states it takes
    def new_cache(self, *, rows: int, pages: int, page_size: int, pages_per_row: int, spare: int) -> Cache: ...


class Head(Keeper, Protocol):
    """Names one token at a time: `models.eagle.EagleHead`, `models.deepseek_v4_mtp.DeepseekDraft`.

    vocab_size: V, of the target. vocabulary: int64 [V'], the target's token of each that the head may name; None where
        these are all.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def vocabulary(self) -> Tensor | None: ...

    def features(self, stream: Any, hidden: Mapping[int, Tensor | None]) -> Tensor:
        """Of the target's tokens [B, Q, ...], from `TargetOutputs.stream` and `TargetOutputs.hidden`."""

    def __call__(self, tokens: Tensor, features: Tensor, cache: Any) -> Tensor:
        """tokens int64 [B, Q], the one behind each of features [B, Q, ...] -> features of these."""

    def leave(self, features: Tensor) -> Tensor: ...  # [B, Q, ...] -> hidden [B, Q, D]
    def logits(self, hidden: Tensor) -> Tensor: ...  # [..., D] -> float32 [..., V'] of the token behind


class Block(Keeper, Protocol):
    """Names several tokens in one pass: `models.deepseek_v4_dspark.DSparkDraft`.

    block: how many.
    """

    @property
    def block(self) -> int: ...
    def read(self, taps: Mapping[int, Tensor | None], cache: Any) -> None: ...  # the target's tokens become keys

    # known int64 [B] at the cache's positions -> the tokens int64 [B] behind it, each drawn from its logits float32
    # [B, V] and its place in the block.
    def draft(self, known: Tensor, cache: Any, draw: Callable[[Tensor, int], Tensor]) -> list[Tensor]: ...


def _cache(keeper: Keeper, state: DraftState) -> Cache:
    return keeper.new_cache(**state.cache_sizes)


class HeadDrafter:
    """Drafts one token after the other with a `Head`, with the target's random numbers where tokens are drawn."""

    needs_next_token, steady, most = True, True, MOST

    def __init__(self, head: Head, state: DraftState) -> None:
        self.head, self._state, self.cache = head, state, _cache(head, state)

    @property
    def prefix_cacheable(self) -> bool:
        return self.cache.prefix_cacheable

    @property
    def layers(self) -> Sequence[int]:
        return self.head.layers

    def read(self, passed: Pass) -> None:
        self._read(passed)

    def draft(self, rows: Rows) -> Tensor:
        assert rows.read is not None
        read, slots = rows.read, rows.inputs["slots"]
        features = self._read(read)
        last = (read.counts.long() - 1).clamp(min=0)
        features = features[torch.arange(len(last), device=last.device), last].unsqueeze(1)
        drafts: list[Tensor] = []
        places = rows.positions
        for i in range(rows.count):
            if i:
                counts, after = begin_step(places, rows.inputs["limits"], 1)
                seen = view(self.cache.parts[0], places, counts, rows.table, slots)
                features, places = self.head(drafts[-1].unsqueeze(1), features, SplitAttention(seen)), after
            drafts.append(self._name(features, places + 1, rows))
        return self._state.write(slots.long(), drafts, rows.found)

    def reset(self) -> None:
        self.cache.reset()

    def _read(self, passed: Pass) -> Tensor:
        """Entries of the target's own tokens."""
        assert passed.made is not None
        features = self.head.features(passed.made.stream, passed.made.hidden)
        return self.head(passed.made.following, features, SplitAttention(passed.seen(self.cache.parts[0])))

    def _name(self, features: Tensor, at: Tensor, rows: Rows) -> Tensor:
        """The token int64 [B] that shall stand at positions int32 [B], from features [B, 1, ...]."""
        logits, names = self.head.logits(self.head.leave(features)[:, 0]), self.head.vocabulary
        if names is None:
            return draw(logits, at, rows.inputs, sampling=rows.sampling)
        if not rows.sampling:
            return names[draw(logits, at, rows.inputs, sampling=False)]
        # Random numbers go by the target's tokens.
        wide = logits.new_full((len(logits), self.head.vocab_size), -torch.inf).index_copy_(1, names, logits)
        return draw(wide, at, rows.inputs, sampling=True)


class BlockDrafter:
    """Drafts with a `Block`: as many tokens as it names, no more."""

    needs_next_token, steady = False, True

    def __init__(self, block: Block, state: DraftState) -> None:
        self.block, self._state, self.cache = block, state, _cache(block, state)

    @property
    def prefix_cacheable(self) -> bool:
        return self.cache.prefix_cacheable

    @property
    def layers(self) -> Sequence[int]:
        return self.block.layers

    @property
    def most(self) -> int:
        """More than a block was trained for would spoil all of it."""
        return self.block.block

    def read(self, passed: Pass) -> None:
        assert passed.made is not None
        self.block.read(passed.made.hidden, passed.seen(self.cache.parts[0]))

    def draft(self, rows: Rows) -> Tensor:
        assert rows.read is not None
        self.read(rows.read)
        inputs, slots = rows.inputs, rows.inputs["slots"]
        drafts: list[Tensor] = []
        if rows.count:
            one = torch.ones_like(rows.positions)
            seen = view(self.cache.parts[0], rows.positions, one, rows.table, slots)

            def name(logits: Tensor, i: int) -> Tensor:
                return draw(logits, rows.positions + 1 + i, inputs, sampling=rows.sampling)

            drafts = self.block.draft(rows.drawn, seen, name)[: rows.count]
        return self._state.write(slots.long(), drafts, rows.found)

    def reset(self) -> None:
        self.cache.reset()
