"""The drafter of assistants that read the target's own cache: Gemma 4's.

Nothing is kept from one iteration to the next, and a prompt needs no pass of its own. The drafts of an iteration are
made one after the other from one place: the position of the newest token, of which the cache has no keys yet.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onegraph.engine.choice import draw
from onegraph.engine.decoder import SplitAttention
from onegraph.engine.draft import MOST, DraftState, Pass, Rows, view
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.step import begin_step


class CacheReader(Protocol):
    """Names one token of each row at a time: `models.assistant.Assistant`."""

    def features(self, stream: Any) -> Tensor:
        """Of the target's tokens [B, Q, D], from `TargetOutputs.stream`."""

    def __call__(self, tokens: Tensor, features: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """tokens int64 [B] behind features [B, 1, D] -> features of these, and logits [B, V] of the token behind.
        cache: the target's, in the dtype, at the positions before those of the tokens."""


class AssistantDrafter:
    """Drafts with a `CacheReader`, with the target's random numbers where tokens are drawn."""

    prefix_cacheable, needs_next_token, steady, most = True, False, True, MOST
    layers: Sequence[int] = ()

    def __init__(self, assistant: CacheReader, state: DraftState) -> None:
        self.assistant, self._state = assistant, state
        # Of a cache in codes, the part that is exact: the layers that are read are in it (`Llama.lent`).
        self._cache = state.cache.paged if isinstance(state.cache, TurboQuantCache) else state.cache

    def read(self, passed: Pass) -> None:
        """The target's cache is all there is."""

    def draft(self, rows: Rows) -> Tensor:
        assert rows.read is not None
        assert rows.read.made is not None
        read, slots, newest = rows.read, rows.inputs["slots"], rows.drawn
        last = (read.counts.long() - 1).clamp(min=0)
        features = self.assistant.features(rows.read.made.stream)
        features = features[torch.arange(len(last), device=last.device), last].unsqueeze(1)
        before = (rows.positions - 1).clamp(min=0)
        counts, _ = begin_step(before, rows.inputs["limits"], 1)
        seen = SplitAttention(view(self._cache, before, counts, rows.table, slots))
        drafts: list[Tensor] = []
        for i in range(rows.count):
            features, logits = self.assistant(newest, features, seen)
            newest = draw(logits, rows.positions + 1 + i, rows.inputs, sampling=rows.sampling)
            drafts.append(newest)
        return self._state.write(slots.long(), drafts, rows.found)

    def reset(self) -> None:
        pass
