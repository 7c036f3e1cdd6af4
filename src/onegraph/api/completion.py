"""An answer, and how the tokens of one become the text that is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random, SystemRandom
from typing import Literal

from onegraph.api.deprecated import warn
from onegraph.api.tokenizer import TextStream
from onegraph.engine.params import SamplingParams, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the model generated for one prompt. `str()` of it is the text.

    token_ids: with the stop token that ended it, and the tokens of a stop text. finish_reason: "stop" at a stop token
    or a stop text, or where a constraint is complete; "length" at max_tokens. prompt_tokens: number of tokens of the
    prompt. seed: of the random numbers, None for greedy decoding. logprobs: of each token, if requested;
    prompt_logprobs: of the prompt's, from the second on. further: the other answers, if `n` is more than 1.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    seed: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    further: tuple[Completion, ...] = ()

    @property
    def outputs(self) -> list[Completion]:
        """All `n` answers, this one first."""
        return [self, *self.further]

    @property
    def tokens(self) -> list[int]:
        """Deprecated: `token_ids`."""
        warn("Completion.tokens", "token_ids")
        return self.token_ids

    @property
    def others(self) -> tuple[Completion, ...]:
        """Deprecated: `outputs`, which has the first answer too."""
        warn("Completion.others", "outputs")
        return self.further

    def __str__(self) -> str:
        return self.text


def expand_n(params: SamplingParams, random: Random | None = None) -> list[SamplingParams]:
    """The `n` requested answers, one each: the i-th uses seed + i.

    A missing seed comes from `random`, or from the system; it is small enough for `--seed` and for JSON.
    """
    seed = params.seed
    if seed is None and params.sampling:
        seed = (random or SystemRandom()).randrange(2**31 - 1024)
    seeds = [None if seed is None else (seed + i + 2**63) % 2**64 - 2**63 for i in range(params.n)]
    return [replace(params, n=1, seed=each) for each in seeds]


def for_engine(params: SamplingParams) -> SamplingParams:
    """Without what takes a text to see, which is the caller's: stop texts."""
    return replace(params, stop=sorted(params.stop_tokens))


class StopTexts:
    """Passes text on up to the first of `stops`, holding back what may be the beginning of one.

    The first is the one that is complete first: then how the text is cut makes no difference. least: of so many pushes,
    a token's text each, all passes. met: the one that was met.
    """

    def __init__(self, stops: Sequence[str], least: int = 0) -> None:
        self.stops, self._least = tuple(stops), least
        self.met: str | None = None
        self._held = ""

    def push(self, text: str, final: bool) -> tuple[str, bool]:
        """The text that may be shown, and whether a stop was met."""
        if self._least:
            self._least -= 1
            return text, False
        text = self._held + text
        if found := [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]:
            self.met = min(found)[2]
            return text[: min(found)[1]], True
        keep = 0 if final else max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class AnswerText:
    """Tokens in, text out as soon as it is sure to be shown: up to the first stop text, never a part of one. least:
    tokens in whose text none is looked for.

    ended: whether a stop text was met; nothing comes out any more.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str], least: int = 0) -> None:
        self._stream, self._stops = stream, StopTexts(stops, least)
        self.ended = False

    def push(self, token: int) -> str:
        """What `token` adds to the text shown, often nothing yet."""
        return self._show(self._stream.push(token), final=False)

    def finish(self) -> str:
        """What is left where no further token comes."""
        return self._show(self._stream.finish(), final=True)

    def _show(self, text: str, *, final: bool) -> str:
        if self.ended:
            return ""
        shown, self.ended = self._stops.push(text, final)
        return shown
