"""Drafters that go on from what the target made of its text: EAGLE heads, DeepSeek-V4's draft layers.

Beside each of the target's tokens such a head has an entry of its own, made of the target's features of that token and
of the token behind it; the last entry of a text names the token behind the newest one. To name one more, a head reads
what itself returned in place of features. Those entries are written over as soon as the target has read their tokens:
entries lie under the target's positions, in its pages and slots, and are taken back as its own state is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onegraph.engine.choice import draw
from onegraph.engine.decoder import Cache, SplitAttention
from onegraph.engine.draft import MOST, DraftState, Pass, Rows, view
from onegraph.ops.step import begin_step


class Head(Protocol):
    """Names one token at a time: `models.eagle.EagleHead`, `models.deepseek_v4_mtp.DeepseekDraft`.

    Its state is in a cache of its own, of the target's pages and slots.

    vocab_size: V, of the target. vocabulary: int64 [V'], the target's token of each that the head may name; None where
        these are all.
    """

    @property
    def layers(self) -> Sequence[int]: ...  # of the target, whose hidden states it takes
    def new_cache(self, *, rows: int, pages: int, page_size: int, pages_per_row: int, spare: int) -> Cache: ...
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


class HeadDrafter:
    """Drafts one token after the other with a `Head`, with the target's random numbers where tokens are drawn."""

    needs_next_token, steady, most = True, True, MOST

    def __init__(self, head: Head, state: DraftState) -> None:
        self.head, self._state, self.cache = head, state, head.new_cache(**state.cache_sizes)

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
