"""An answer, and how the tokens of one become the text that is shown."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onegraph.api.tokenizer import TextStream
from onegraph.engine.params import SamplingParams, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the model wrote behind one prompt. `str()` of it is the text.

    tokens: its ids, a stop token that ended it included, and those of a stop text. finish_reason: "stop" at a stop
    token or a stop text, or where a constraint allows nothing more; "length" at max_tokens. prompt_tokens: how many the
    prompt had. seed: what its draws come from, None where nothing is drawn. logprobs: of each token, where they are
    asked for. others: the further answers where `n` asks for several.
    """

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    seed: int | None = None
    logprobs: list[TokenLogprob] | None = None
    others: tuple[Completion, ...] = ()

    def __str__(self) -> str:
        return self.text


def copies(params: SamplingParams) -> list[SamplingParams]:
    """The `n` answers that are asked for, one each: the i-th draws with seed + i.

    A seed that nobody gave is drawn small enough for `--seed` and for JSON to take it back.
    """
    seed = params.seed
    if seed is None and params.sampling:
        seed = secrets.randbelow(2**31 - 1024)
    seeds = [None if seed is None else (seed + i + 2**63) % 2**64 - 2**63 for i in range(params.n)]
    return [replace(params, n=1, seed=each) for each in seeds]


def for_engine(params: SamplingParams) -> SamplingParams:
    """Without what takes a text to see, which is the caller's: stop texts."""
    return replace(params, stop=sorted(params.stop_tokens))


class AnswerText:
    """Tokens in, text out as soon as it is sure to be shown: up to the first stop text, never a part of one.

    ended: whether a stop text was met; nothing comes out any more.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        self.stream, self.stop = stream, tuple(stop)
        self._held = ""
        self.ended = False

    def push(self, token: int) -> str:
        """What `token` adds to the text shown, often nothing yet."""
        return self.take(self.stream.push(token))

    def finish(self) -> str:
        """What is left where no further token comes."""
        return self.take(self.stream.finish(), final=True)

    def take(self, piece: str, final: bool = False) -> str:
        """What `piece` of the stream's text adds to the text shown; `final`: nothing comes behind it."""
        if self.ended:
            return ""
        text = self._held + piece
        if found := [at for at in map(text.find, self.stop) if at >= 0]:
            self.ended = True
            return text[: min(found)]
        held = 0 if final else max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
