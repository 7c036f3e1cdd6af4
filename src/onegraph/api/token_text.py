"""The text of single tokens, for log-probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.files import CheckpointError

PARTIAL = "\ufffd"  # what decoding makes of a part of a character, which has no text of its own
Top = Sequence[tuple[int, float]]  # the likeliest tokens and their log-probabilities
Scored = tuple[int, float | None, Top, int]  # a token, its log-probability, the likeliest, its place in the text


@dataclass(frozen=True)
class TokenText:
    """A token, its text alone, its log-probability (None of a prompt's first), and the likeliest in its place. offset:
    characters of the answer in front of it; parts of one character have the same. data: the bytes of a part of a
    character, where they are known.
    """

    token: int
    text: str
    logprob: float | None
    top: tuple[TokenText, ...] = ()
    offset: int = 0
    data: bytes | None = None

    def to_openai(self) -> dict[str, Any]:
        """As an entry of OpenAI's chat has it: a part of a character is its bytes, as in \\xe2\\x82."""

        def one(told: TokenText) -> dict[str, Any]:
            text, data = told.text, told.text.encode()
            if PARTIAL in text and told.data is None:
                return {"token": text, "logprob": told.logprob, "bytes": None}
            if told.data is not None:
                text, data = told.data.decode("utf-8", "backslashreplace"), told.data
            return {"token": text, "logprob": told.logprob, "bytes": list(data)}

        return one(self) | {"top_logprobs": list(map(one, self.top))}


class TokenTexts:
    """Texts of tokens alone, each of which is decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, tuple[str, bytes | None]] = {}  # the bytes of those that are a part of a character

    def of(self, found: Sequence[Scored]) -> tuple[TokenText, ...]:
        """Raises CheckpointError where a token cannot be decoded."""
        self._learn(
            {i for token, _, top, _ in found for i in (token, *(other for other, _ in top))} - self._alone.keys()
        )

        def told(token: int, logprob: float | None, top: Top = (), offset: int = 0) -> TokenText:
            text, data = self._alone[token]
            return TokenText(token, text, logprob, tuple(told(*each) for each in top), offset, data)

        return tuple(told(*each) for each in found)

    def _learn(self, tokens: set[int]) -> None:
        ids = sorted(tokens)
        texts = self._tokenizer.decode_all([[i] for i in ids], special=True) if ids else []
        parts = [i for i, text in zip(ids, texts, strict=True) if PARTIAL in text]
        data: dict[int, bytes] = {}
        with contextlib.suppress(CheckpointError):  # the tokenizer's decoder is of another kind
            data = dict(zip(parts, self._tokenizer.bytes_of(parts) if parts else [], strict=True))
        self._alone |= {i: (text, data.get(i)) for i, text in zip(ids, texts, strict=True)}
