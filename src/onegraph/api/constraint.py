"""JSON schemas and regular expressions as constraints on the next token, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.params import SamplingParams
from onegraph.formats.extras import install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Constraints:
    """Makes the constraints of a model's rows: `Engine.constrain`.

    llguidance is given the bytes of every token, which the tokenizer's own process tells, never the checkpoint's files.

    Args:
        vocabulary: of the model, which may have more tokens than the tokenizer; those are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._tokens: LLTokenizer | None = None

    def __call__(self, params: SamplingParams) -> GrammarConstraint:
        """Raises ValueError where llguidance is missing or refuses what is asked for, or where no text matches it."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ValueError(
                f"json_schema and regex need llguidance, which is not installed; {install('constraints')}"
            ) from None
        if any("\ud800" <= c <= "\udfff" for c in params.regex or ""):
            raise ArgumentError("regex", "regex: it has a lone surrogate, which no text has; leave it out")
        if (schema := params.json_schema) is not None:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            name, grammar = "json_schema", LLMatcher.grammar_from_json_schema(text)
        else:
            name, grammar = "regex", LLMatcher.grammar_from_regex(params.regex or "")
        if self._tokens is None:
            self._tokens = self._read()
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ArgumentError(name, f"{name}: {_why(matcher)}")
        constraint = GrammarConstraint(name, matcher)
        if constraint.problem:
            raise ArgumentError(name, constraint.problem)
        return constraint

    def _read(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokens, special = self._tokenizer.token_bytes()
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, tokens, special, self._vocabulary)))


class _Vocabulary:
    """What llguidance asks of a tokenizer. Where no token ends an answer, one beyond the vocabulary stands for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: Mapping[int, bytes], special: list[int], size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokens.get(i, b"") for i in range(size)] + [b"<end>"]
        ends = sorted(i for i in tokenizer.stops if i < size) or [size]
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted({*special, *ends, size})

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # it tries whether bytes are taken
            raise TypeError("text is expected")
        return self._tokenizer.encode(text, special=False)


class GrammarConstraint:
    """What may follow in one row. `problem` is what ended it before its time: a grammar that nothing matches, or beyond
    llguidance's limits. What may follow is found as soon as the token before is known, so that a row is never ended by
    looking."""

    def __init__(self, name: str, matcher: LLMatcher) -> None:
        self._name, self._matcher = name, matcher
        self._words = torch.zeros(0, dtype=torch.int32)
        self.problem = ""
        self._look()

    @property
    def done(self) -> bool:
        """Whether nothing may follow: the text is whole and cannot go on."""
        return bool(self._matcher.is_stopped())

    def fill(self, allowed: Tensor) -> None:
        """A bit a token, the lowest first, into int32 [ceil(V / 32)] on the host."""
        allowed.copy_(self._words[: len(allowed)])

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._look()

    def _look(self) -> None:
        if not self.done:
            self._words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        if self._matcher.is_error():
            self.problem = f"{self._name}: {_why(self._matcher)}"


def _why(matcher: LLMatcher) -> str:
    """llguidance's error in a line."""
    error = " ".join(matcher.get_error().split())
    if error.startswith("NoExtensionBias"):  # and its parser's state
        return "no text matches it; give one that some text matches"
    return error[:300]
