"""Drafters: their interface, and those that need no training.

A drafter names tokens that may follow a row's newest one. Whether they do is the target's to say
(`engine/speculate.py`), so a drafter's mistake costs time and never changes a text. Its part of a round stands in the
same graph as the target's, and obeys the same contract.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from onegraph.engine.choice import draw
from onegraph.engine.decoder import Decoder, SplitAttention
from onegraph.engine.exact_window import Sizes
from onegraph.formats.turboquant import DRAFTS, TurboQuantConfig
from onegraph.nn.state import RecurrentSlots
from onegraph.ops.draft import ngram_drafts
from onegraph.ops.step import begin_step

LONGEST, SHORTEST = 4, 2  # tokens at a text's end that n-gram drafts look for: at most and at least
UNKNOWN = -1  # in a history: no token yet
MOST = DRAFTS - 1  # drafts of a round: a cache in codes takes them with the newest token as one decode step


@dataclass(frozen=True, kw_only=True)
class DraftState:
    """What a drafter works on, of one engine: sizes of a cache like the target's, the last stage's part of that cache,
    and the state of all slots.

    history: int64 [slots, max_context], tokens by position, UNKNOWN behind the newest. drafts: int64 [slots, count],
    found: int32 [slots]: what a drafter writes, and how many of them count. Slot 0 belongs to no sequence.
    """

    sizes: Sizes
    kv: TurboQuantConfig | None
    cache: Any
    device: torch.device
    history: Tensor
    drafts: Tensor
    found: Tensor

    @property
    def count(self) -> int:
        """Drafts of a round at most."""
        return self.drafts.shape[1]

    @property
    def cache_sizes(self) -> dict[str, int]:
        """As `Decoder.new_cache` takes them, for a cache with the target's pages and slots."""
        return {
            "rows": self.sizes.rows,
            "pages": self.sizes.pages,
            "page_size": self.sizes.page_size,
            "pages_per_row": self.sizes.coded,
            "spare": MOST,
        }

    def write(self, slots: Tensor, drafts: Seq[Tensor], found: Tensor) -> Tensor:
        """The drafts, int64 [B] each in their order, are those of the rows' slots int64 [B], and found int32 [B] of
        them count, which are returned as int64 [B]."""
        if drafts:
            self.drafts[slots, : len(drafts)] = torch.stack(list(drafts), dim=1)
        self.found[slots] = found
        return found.long()


def view(cache: Any, positions: Tensor, counts: Tensor, table: Tensor, slots: Tensor) -> Any:
    """A part of a cache as some rows see it."""
    seen = cache.view()
    seen.block_table, seen.positions, seen.counts, seen.slots = table, positions, counts, slots
    return seen


@dataclass(frozen=True, kw_only=True)
class TargetOutputs:
    """What the target made of the tokens that it read, in the basis in which the model itself computes.

    stream: behind its last layer, as `Decoder.run` returns it. hidden: [B, Q, D] behind each layer that was asked for.
    following: int64 [B, Q], the token behind each; behind the last real one, that is the one drawn.
    """

    stream: Any
    hidden: Mapping[int, Tensor | None]
    following: Tensor


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Tokens int64 [B, Q] that the target has read, of which counts int32 [B] are real (of a round: were kept), from
    positions int32 [B] on, with the rows' pages and slots. made: for a drafter that asks for it."""

    tokens: Tensor
    positions: Tensor
    counts: Tensor
    table: Tensor
    slots: Tensor
    made: TargetOutputs | None = None

    def seen(self, cache: Any) -> Any:
        """A part of a cache as these rows see it."""
        return view(cache, self.positions, self.counts, self.table, self.slots)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a drafter sees of a round's rows [B] once their new tokens are taken, all on the device.

    positions: where each row's newest token, `drawn`, stands: nothing has read it yet. inputs: the step's, with
    `limits`, `slots`, `seed` and what sampling needs. table: their pages. count: drafts that are asked for; with 0 a
    drafter only keeps up with the text. read: what the round read and kept, for a drafter that asks for what the
    target made of it.
    """

    positions: Tensor
    drawn: Tensor
    table: Tensor
    inputs: Mapping[str, Tensor]
    sampling: bool
    count: int
    read: Pass | None = None

    @property
    def found(self) -> Tensor:
        """Drafts of each row where all that are asked for can be had, int32 [B]: none for a row at its limit."""
        return (self.inputs["limits"] > self.positions).int() * self.count


class Drafter(Protocol):
    """Made by a call with a `DraftState`.

    prefix_cacheable: as a cache's; True where it keeps nothing of its own. needs_next_token: what it keeps of a token
    depends on the token behind that, too. steady: it always drafts as many tokens as requested, and each costs time, so
    that no more are requested than will be read; else drafts are free. most: drafts of a round that it can name.
    layers: of the target, behind which it asks for hidden states, with each `Pass`; None where it asks for nothing, and
    nothing is computed.
    """

    @property
    def prefix_cacheable(self) -> bool: ...
    @property
    def needs_next_token(self) -> bool: ...
    @property
    def steady(self) -> bool: ...
    @property
    def most(self) -> int: ...
    @property
    def layers(self) -> Seq[int] | None: ...

    def read(self, passed: Pass) -> None:
        """The target has read a part of a prompt."""

    def draft(self, rows: Rows) -> Tensor:
        """Write drafts and found of the rows' slots; returns how many were found of each row, int64 [B]."""

    def reset(self) -> None:
        """Forget everything, after a NaN."""


MakeDrafter = Callable[[DraftState], Drafter]


class NgramDrafter:
    """Drafts from the text itself: see `onegraph.ops.draft.ngram_drafts`. Keeps nothing of its own."""

    prefix_cacheable, needs_next_token, steady, most, layers = True, False, False, MOST, None

    def __init__(self, state: DraftState) -> None:
        self._state = state

    def read(self, passed: Pass) -> None:
        """The host has written all of the prompt into the history."""

    def draft(self, rows: Rows) -> Tensor:
        at, slots, limits = self._state, rows.inputs["slots"], rows.inputs["limits"]
        found: Tensor = ngram_drafts(at.history, slots, rows.positions, limits, at.drafts, at.found, LONGEST, SHORTEST)
        return found

    def reset(self) -> None:
        pass


class ModelDrafter:
    """A second model of the same vocabulary, whose cache has the target's pages: one block table serves both.

    Where tokens are drawn, it draws with the same random numbers as the target: the closer its probabilities, the more
    often both draw the same token.

    Args:
        model: as the engine's, in one stage on the same device.

    Raises ValueError where the two do not go together.
    """

    needs_next_token, steady, most, layers = False, True, MOST, None

    def __init__(self, model: Decoder, state: DraftState) -> None:
        if model.devices != [state.device]:
            raise ValueError(f"draft: the drafting model is on {model.devices}; allowed is the target's {state.device}")
        context = state.history.shape[1]
        if model.max_context < context:
            raise ValueError(
                f"draft: the drafting model was loaded for {model.max_context} tokens; the engine's max_context is "
                f"{context}: load it for as many"
            )
        self.model, self._state = model, state
        try:
            self.cache = model.new_cache(**state.cache_sizes, kv=state.kv)
        except ValueError as error:
            raise ValueError(f"draft: {error}") from None
        # Drafting reads tokens again from before where its last step began, which recurrent state does not allow.
        if any(isinstance(kind, RecurrentSlots) for kind in self.cache.kinds):
            raise ValueError("draft: a draft model with recurrent layers is unsupported; use 'mtp' or 'ngram'")

    @property
    def prefix_cacheable(self) -> bool:
        return self.cache.prefix_cacheable

    def read(self, passed: Pass) -> None:
        self._pass(passed)

    def draft(self, rows: Rows) -> Tensor:
        at, inputs = self._state, rows.inputs
        own, limits = inputs["slots"].long(), inputs["limits"]
        # The token before the newest is read with it: where all drafts were right, nobody has read the last of them.
        before = at.history[own, (rows.positions.long() - 1).clamp(min=0)]
        tokens, places = torch.stack((before, rows.drawn), dim=1), (rows.positions - 1).clamp(min=0)
        drafts: list[Tensor] = []
        for _ in range(max(1, rows.count)):
            counts, after = begin_step(places, limits, tokens.shape[1])
            hidden = self._pass(
                Pass(tokens=tokens, positions=places, counts=counts, table=rows.table, slots=inputs["slots"])
            )
            if not rows.count:
                break
            token = draw(self.model.logits(hidden[:, -1]), after, inputs, sampling=rows.sampling)
            drafts.append(token)
            tokens, places = token.unsqueeze(1), after
        return at.write(own, drafts, rows.found)

    def reset(self) -> None:
        self.cache.reset()

    def _pass(self, passed: Pass) -> Tensor:
        return self.model(passed.tokens, SplitAttention(passed.seen(self.cache.parts[0])))


class OracleDrafter:
    """Knows texts beforehand and names the right token with a set chance: what rounds give at a known acceptance.

    For benchmarks and tests. It tells the text of a row by the row's seed: the text of number seed mod len(texts).

    Args:
        texts: prompt and answer, token ids of each. chance: of a draft to be right, each on its own.
        vocabulary: tokens of the model.
    """

    prefix_cacheable, needs_next_token, steady, most, layers = True, False, False, MOST, None

    def __init__(self, texts: Seq[Seq[int]], chance: float, vocabulary: int, state: DraftState) -> None:
        self._state, self._vocabulary = state, vocabulary
        size = len(texts), state.history.shape[1] + 2 * MOST
        self._right = torch.rand(size, generator=torch.Generator().manual_seed(0)) < chance
        self._names = torch.zeros(size, dtype=torch.int64, device=state.device)
        self.know(texts)

    def know(self, texts: Seq[Seq[int]]) -> None:
        """As many other texts from now on; graphs read them from where they lie."""
        known = torch.zeros(self._names.shape, dtype=torch.int64)
        for row, text in zip(known, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        self._names.copy_(torch.where(self._right, known, (known + 1) % self._vocabulary))

    def read(self, passed: Pass) -> None:
        """It has read everything."""

    def draft(self, rows: Rows) -> Tensor:
        at, own = self._state, rows.inputs["slots"].long()
        text = rows.inputs["seed"] % len(self._names)
        step = torch.arange(1, rows.count + 1, device=own.device)
        names = self._names[text.unsqueeze(1), rows.positions.unsqueeze(1) + step]
        return at.write(own, names.unbind(1), rows.found)

    def reset(self) -> None:
        pass
