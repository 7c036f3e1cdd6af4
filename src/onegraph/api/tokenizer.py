"""Text to token ids and back. The only file that imports `tokenizers`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onegraph.api.chat import DEEPSEEK_V4, TemplateError, render
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError, parse_json, quote

MAX_PENDING = 16  # tokens that may wait for the rest of a character


class Tokenizer:
    """The tokenizer of a checkpoint, with its chat template and the ids that end an answer.

    Raises CheckpointError where the checkpoint has no tokenizer.json or a damaged one.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        import tokenizers

        self.path = checkpoint.path
        data = checkpoint.sidecar("tokenizer.json")
        if data is None:
            raise CheckpointError(
                f"{self.path}: has no tokenizer.json; copy the model's own there (SentencePiece-only models: load and "
                "save the tokenizer with transformers once, which writes it)"
            )
        with _contained(f"{self.path}/tokenizer.json: not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self.vocab_size = checkpoint.config.get("vocab_size")
        self._settings = self._object(checkpoint, "tokenizer_config.json")
        self.template = self._find_template(checkpoint)
        self.stops = self._find_stops(checkpoint)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids. `special` adds what the tokenizer puts around a text of its own accord (a BOS token, for some).

        Raises ValueError for text that is not Unicode (a lone surrogate), CheckpointError where the tokenizer and the
        model disagree about the vocabulary.
        """
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError("the text holds bytes that are not UTF-8")
        with _contained(f"{self.path}/tokenizer.json: cannot encode this text"):
            ids = self._tokenizer.encode(text, add_special_tokens=special).ids
        if ids and isinstance(self.vocab_size, int) and max(ids) >= self.vocab_size:
            raise CheckpointError(
                f"{self.path}/tokenizer.json: gives token id {max(ids)}, config.json has vocab_size {self.vocab_size}; "
                "they belong to different models"
            )
        return ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids; control tokens are left out unless `special`."""
        with _contained(f"{self.path}/tokenizer.json: cannot decode"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer. Raises TemplateError without a chat template."""
        if self.template is None:
            raise TemplateError(f"{self.path}: has no chat template")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: _content(self._settings.get(name)) or "" for name in names}
        return self.encode(render(self.template, messages, tokens), special=False)

    def stream(self) -> TextStream:
        return TextStream(self)

    def _object(self, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
        data = checkpoint.sidecar(name)
        value = parse_json(data, f"{self.path}/{name}") if data is not None else {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}/{name}: holds a JSON {type(value).__name__}, an object is expected")
        return value

    def _find_template(self, checkpoint: Checkpoint) -> str | None:
        data = checkpoint.sidecar("chat_template.jinja")
        template = data.decode("utf-8", "replace") if data is not None else self._settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if template is None and checkpoint.config.get("model_type") == "deepseek_v4":
            template = DEEPSEEK_V4
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{self.path}: chat_template is a {type(template).__name__}, text is expected")
        return template

    def _find_stops(self, checkpoint: Checkpoint) -> frozenset[int]:
        """Ids that end an answer: generation_config.json's, else config.json's, and the tokenizer's own eos_token."""
        found: set[int] = set()
        generation = self._object(checkpoint, "generation_config.json")
        for where, config in (("generation_config.json", generation), ("config.json", checkpoint.config)):
            value = config.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise CheckpointError(f"{self.path}/{where}: eos_token_id is {quote(value)}, token ids are expected")
            found.update(ids)
            if found:
                break
        token = _content(self._settings.get("eos_token"))
        index = self._tokenizer.token_to_id(token) if token else None
        return frozenset(found if index is None else {*found, index})


class TextStream:
    """Tokens in, text out as soon as it is whole: a character split over tokens waits for its last byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._read = 0  # decoding starts one step back: a token's text may depend on the one before

    def push(self, token: int) -> str:
        """The text that `token` completes, often of the token alone, empty while a character is unfinished."""
        self._ids.append(token)
        return self._take(final=len(self._ids) - self._read > MAX_PENDING)

    def finish(self) -> str:
        """What is left; an unfinished character comes as U+FFFD."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        after = self._tokenizer.decode(self._ids[self._start :])
        if after.endswith("\ufffd") and not final:
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]


@contextlib.contextmanager
def _contained(what: str) -> Iterator[None]:
    """Turns whatever `tokenizers` raises into a CheckpointError that begins with `what`.

    It raises plain Exception; where a damaged tokenizer.json makes its Rust code panic (an expression that backtracks
    without end does), what it raises derives from BaseException, and a backtrace goes to file descriptor 2, past
    sys.stderr: the descriptor points to /dev/null meanwhile.
    """
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {str(error) or type(error).__name__}") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _content(token: object) -> str | None:
    """A special token in tokenizer_config.json: its text, or an object that holds it."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None
