"""JSON schemas, regular expressions and grammars as constraints on the next token, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onegraph.api.sandbox import Sandbox, SandboxWorkerError
from onegraph.api.sandbox_worker import grammar
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.params import SamplingParams
from onegraph.formats.extras import install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MEMORY, SECONDS = 512 << 20, 5  # bytes of addresses and seconds of CPU time in which a grammar must compile
MAX_NEWLINES, MAX_BLANKS = 2, 40  # whitespace between two parts of a JSON text: enough for eight levels of indentation
TOO_DEEP = "json_schema: it is nested too deeply; give a simpler one"
QUOTE, BACKSLASH, NEWLINE = b'"\\\n'


class Constraints:
    """Makes the constraints of a model's rows: `Engine.constrain`.

    llguidance is given the bytes of every token, which the tokenizer's own process tells, never the checkpoint's files.

    Args:
        vocabulary: of the model, which may have more tokens than the tokenizer; those are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._tokens: LLTokenizer | None = None
        self._blanks: Blanks | None = None
        self._cage = Sandbox("grammars", MEMORY)
        self._last: tuple[str, str, LLMatcher] | None = None  # compiled, for further answers to the same request
        self._lock = threading.Lock()

    def __call__(self, params: SamplingParams) -> GrammarConstraint:
        """Raises ValueError where llguidance is missing or refuses what is asked for, or where no text matches it."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ValueError(
                f"json_schema, regex and grammar need llguidance, which is not installed; {install('constraints')}"
            ) from None
        name, text = _request(params)
        with self._lock:
            if self._last is None or self._last[:2] != (name, text):
                self._check(name, text)
                if self._tokens is None:
                    self._tokens, self._blanks = self._read()
                self._last = name, text, LLMatcher(self._tokens, grammar(LLMatcher, name, text), log_level=0)
            matcher = self._last[2].deep_copy()
        if matcher.is_error():
            raise ArgumentError(name, f"{name}: {_why(matcher.get_error())}")
        constraint = GrammarConstraint(name, matcher, self._blanks if name == "json_schema" else None)
        if constraint.problem:
            raise ArgumentError(name, constraint.problem)
        return constraint

    def _check(self, name: str, text: str) -> None:
        """Compiles it in a child first: some grammars take all memory there is."""
        try:
            if error := self._cage.call("check", seconds=SECONDS, kind=name, text=text):
                raise ArgumentError(name, f"{name}: {_why(error)}")
        except SandboxWorkerError as error:
            raise ArgumentError(name, f"{name}: it cannot be compiled: {error}; give a simpler one") from None

    def _read(self) -> tuple[LLTokenizer, Blanks]:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokens, special = self._tokenizer.token_bytes()
        vocabulary = _Vocabulary(self._tokenizer, tokens, special, self._vocabulary)
        return LLTokenizer(TokenizerWrapper(vocabulary)), Blanks(vocabulary.tokens)


def _request(params: SamplingParams) -> tuple[str, str]:
    """("json_schema", "regex" or "grammar", its text). Raises ArgumentError for what has no text."""
    for name in ("regex", "grammar"):
        if any("\ud800" <= c <= "\udfff" for c in getattr(params, name) or ""):
            raise ArgumentError(name, f"{name}: it has a lone surrogate, which no text has; leave it out")
    if params.grammar is not None:
        return "grammar", params.grammar
    schema = params.json_schema
    if schema is None:
        return "regex", params.regex or ""
    try:
        return "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
    except RecursionError:
        raise ArgumentError("json_schema", TOO_DEEP) from None


class Blanks:
    """The tokens that are whitespace alone. JSON allows any amount between its parts, and some models write no end of
    it."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        other = np.array([not each or bool(each.strip(b" \t\r\n")) for each in tokens])
        self.others = torch.from_numpy(np.packbits(np.pad(other, (0, -len(other) % 32)), bitorder="little").view("i4"))


class _Place:
    """Where in a JSON text a row is."""

    def __init__(self) -> None:
        self.blanks = self.newlines = 0  # of the whitespace at the end of the text
        self._string = self._escaped = False

    def take(self, data: bytes) -> None:
        for byte in data:
            if self._string:
                self._string = self._escaped or byte != QUOTE
                self._escaped = not self._escaped and byte == BACKSLASH
            elif byte in b" \t\r\n":
                self.blanks, self.newlines = self.blanks + 1, self.newlines + (byte == NEWLINE)
            else:
                self.blanks, self.newlines, self._string = 0, 0, byte == QUOTE


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
    looking. `blanks`: of the vocabulary, for JSON: behind MAX_NEWLINES or MAX_BLANKS, something else must follow."""

    def __init__(self, name: str, matcher: LLMatcher, blanks: Blanks | None = None) -> None:
        self._name, self._matcher, self._blanks, self._place = name, matcher, blanks, _Place()
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
        if self._blanks is not None:
            self._place.take(self._blanks.tokens[token])
        self._look()

    def _look(self) -> None:
        if not self.done:
            self._words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
            if self._blanks is not None and (self._place.newlines >= MAX_NEWLINES or self._place.blanks >= MAX_BLANKS):
                others = self._words & self._blanks.others[: len(self._words)]
                self._words = others if bool(others.any()) else self._words
        if self._matcher.is_error():
            self.problem = f"{self._name}: {_why(self._matcher.get_error())}"


def _why(error: str) -> str:
    """llguidance's error in a line."""
    error = " ".join(error.split())
    if error.startswith("NoExtensionBias"):  # and its parser's state
        return "no text matches it; give one that some text matches"
    return error[:300]
