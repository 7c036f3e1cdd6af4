"""Text to token ids and back, and conversations to token ids."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from onegraph.api.chat import DEEPSEEK_V4, ChatTemplate, TemplateError, Thinking, Tools
from onegraph.api.sandbox import Sandbox, SandboxWorkerError
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError, parse_json, quote

MAX_PENDING = 16  # tokens that may wait for the rest of a character
# What the tokenizer's process may take, far above what published ones do
MEMORY = 2 << 30  # bytes of address space, and so many times the size:
MEMORY_PER_BYTE = {"file": 24, "text": 400}
SECONDS = 5  # of CPU time a call, and a second more for so many bytes:
BYTES_PER_SECOND = 50_000


class TooLong(ValueError):
    """A text that has more bytes than the tokens that it may have can stand for."""


class Tokenizer:
    """The tokenizer of a checkpoint, with its chat template and the ids that end an answer.

    It runs in a process of its own: tokenizer.json is a program as well, whose replacements can double a text forty
    times. Raises CheckpointError where the checkpoint has no tokenizer.json or a damaged one.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        data = checkpoint.sidecar("tokenizer.json")
        if data is None:
            raise CheckpointError(
                f"{self.path}: has no tokenizer.json; copy the model's own there (SentencePiece-only models: load and "
                "save the tokenizer with transformers once, which writes it)"
            )
        try:
            content = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}/tokenizer.json: not a tokenizer: not UTF-8 text at byte {error.start}"
            ) from None
        seconds = SECONDS + len(data) / BYTES_PER_SECOND
        self._size = len(data)
        self._cage = Sandbox("tokenizers", self._memory(0), load={"seconds": seconds, "content": content})
        try:
            self._special: dict[str, int] = self._cage.start()  # control tokens
        except SandboxWorkerError as error:
            raise CheckpointError(f"{self.path}/tokenizer.json: not a tokenizer: {error}") from None
        inside = checkpoint.config.get("text_config")  # of a multimodal model
        told = inside if isinstance(inside, dict) else checkpoint.config
        self.vocab_size = told.get("vocab_size", checkpoint.config.get("vocab_size"))
        self._settings = self._object(checkpoint, "tokenizer_config.json")
        self.template = self._find_template(checkpoint)
        self.stops = self._find_stops(checkpoint)

    def copy(self) -> Tokenizer:
        """The same tokenizer in a process of its own, which starts with the first call."""
        made = copy.copy(self)
        made._cage = self._cage.copy()
        made.template = None if self.template is None else self.template.copy()
        return made

    def interrupt(self) -> None:
        """From any thread: ends the processes. Calls that wait for them raise, and later ones start them again."""
        self._cage.interrupt()
        if self.template is not None:
            self.template.interrupt()

    def encode(self, text: str, special: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Token ids. `special` adds what the tokenizer puts around a text of its own accord (a BOS token, for some).

        Raises ValueError for text that is not Unicode (a lone surrogate), CheckpointError where the tokenizer cannot
        encode it in bounded time and memory, or where tokenizer and model disagree about the vocabulary, and TooLong,
        without encoding it, where its length in bytes shows that it has more than `max_tokens` tokens.
        """
        self._check_size(text, max_tokens)
        return self._encode("encode", text, text=text, special=special)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids; control tokens are left out unless `special`."""
        return self.decode_all([ids], special)[0]

    def decode_all(self, rows: Sequence[Sequence[int]], special: bool = False) -> list[str]:
        """The text of each row of token ids."""
        lists = list(map(list, rows))
        texts: list[str] = self._call("decode", "cannot decode", 8 * sum(map(len, lists)), rows=lists, special=special)
        return texts

    @cached_property
    def bytes_per_token(self) -> int | None:
        """Bytes of text that one token stands for at most; None where the tokenizer may drop text."""
        found: int | None = self._call("longest", "cannot be read", self._size)
        return found

    def token_bytes(self) -> tuple[dict[int, bytes], list[int]]:
        """The bytes of every token by its id, and which are control tokens.

        Raises CheckpointError where the tokenizer's decoder is of a kind whose tokens' bytes are not known.
        """
        found = self._call("token_bytes", "has no bytes for its tokens", self._size)
        return {i: bytes.fromhex(data) for i, data, _ in found}, sorted(i for i, _, special in found if special)

    def bytes_of(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token. Raises CheckpointError as `token_bytes`."""
        found = self._call("bytes_of", "has no bytes for its tokens", 8 * len(ids), ids=list(ids))
        return list(map(bytes.fromhex, found))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: Thinking = None,
        tools: Tools | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer; `thinking` and `tools` as `ChatTemplate.render`
        takes them, `max_tokens` as `encode`.

        Control tokens are those that the template writes: the name of one in any field of a message, a call or a tool
        is text like any other. Raises TemplateError without a chat template, ValueError where a message holds such a
        name and the template or the tokenizer leaves no way to tell it from a control token.
        """
        if self.template is None:
            raise TemplateError(f"{self.path}: has no chat template")
        check_messages(messages)
        rendered = self.template.render(messages, thinking, tools)
        self._check_size(rendered, max_tokens)
        # Joined: a name may lie in two messages that the template puts side by side
        contents = "".join(message["content"] for message in messages)
        names = self._controls("\n".join([contents, *_texts([*messages, *(tools or ())])]))
        if not names:
            return self.encode(rendered, special=False)
        parts = self.template.parts(messages, thinking, tools, names)
        if parts is None:
            raise ValueError(
                f"a message holds {quote(names[0])}, a control token of this model, and the chat template rewrites "
                "messages, so that it would act as one; take it out of the message"
            )
        return self._encode("encode_parts", "".join(parts), parts=parts)

    def _controls(self, text: str) -> list[str]:
        """The control tokens whose names a text holds."""
        found = set(self.encode(text, special=False))
        return [name for name, i in self._special.items() if i in found]

    def _check_size(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None or len(text) <= max_tokens or self.bytes_per_token is None:
            return
        size, most = len(text.encode("utf-8", "replace")), max_tokens * self.bytes_per_token
        if size > most:
            raise TooLong(f"the prompt has {size} bytes; {max_tokens} tokens stand for {most} bytes at most")

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The ids of control tokens by their text."""
        return self._special

    def stream(self, keep: frozenset[int] = frozenset()) -> TextStream:
        """keep: control tokens that are text in this stream; the others are left out."""
        return TextStream(self, keep)

    def _call(self, name: str, failed: str, size: int, **arguments: Any) -> Any:
        """What the tokenizer's process answers; `size`: bytes that it works on."""
        seconds = SECONDS + size / BYTES_PER_SECOND
        try:
            return self._cage.call(name, seconds=seconds, memory=self._memory(size), **arguments)
        except SandboxWorkerError as error:
            raise CheckpointError(f"{self.path}/tokenizer.json: {failed}: {error}") from None

    def _memory(self, size: int) -> int:
        """Bytes for work on `size` bytes, in steps: more than before means another process."""
        work = MEMORY
        while work < MEMORY_PER_BYTE["text"] * size:
            work *= 2
        return work + MEMORY_PER_BYTE["file"] * self._size

    def _encode(self, name: str, whole: str, **arguments: Any) -> list[int]:
        try:
            size = len(whole.encode())
        except UnicodeEncodeError:
            raise ValueError("the text holds bytes that are not UTF-8") from None
        ids: list[int] = self._call(name, "cannot encode this text", size, **arguments)
        if ids and isinstance(self.vocab_size, int) and max(ids) >= self.vocab_size:
            raise CheckpointError(
                f"{self.path}/tokenizer.json: gives token id {max(ids)}, config.json has vocab_size {self.vocab_size}; "
                "they belong to different models"
            )
        return ids

    def _object(self, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
        data = checkpoint.sidecar(name)
        value = parse_json(data, f"{self.path}/{name}", infinite=True) if data is not None else {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}/{name}: holds a JSON {type(value).__name__}, an object is expected")
        return value

    def _find_template(self, checkpoint: Checkpoint) -> ChatTemplate | None:
        data = checkpoint.sidecar("chat_template.jinja")
        template = data.decode("utf-8", "replace") if data is not None else self._settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            entries = [entry for entry in template if isinstance(entry, dict)]
            template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
        if template is None and checkpoint.config.get("model_type") == "deepseek_v4":
            template = DEEPSEEK_V4
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{self.path}: chat_template is a {type(template).__name__}, text is expected")
        if template is None:
            return None
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return ChatTemplate(template, {name: _content(self._settings.get(name)) or "" for name in names})

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
        index = self._call("index", "cannot be read", 0, token=token) if token else None
        return frozenset(found if index is None else {*found, index})


class TextStream:
    """Tokens in, text out as soon as it is whole: a character split over tokens waits for its last byte."""

    def __init__(self, tokenizer: Tokenizer, keep: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self.keep = tokenizer, keep
        self._dropped = frozenset(tokenizer.control_tokens.values()) - keep if keep else frozenset()
        self._ids: list[int] = []
        self._start = self._read = 0  # decoding starts one step back: a token's text may depend on the one before

    def push(self, token: int) -> str:
        """The text that `token` completes, often of the token alone, empty while a character is unfinished."""
        return advance(self._tokenizer, [(self, [token], False)])[0]

    def finish(self) -> str:
        """What is left; an unfinished character comes as U+FFFD."""
        return advance(self._tokenizer, [(self, [], True)])[0]

    def _rows(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Whose texts differ by what `tokens` complete."""
        return self._ids[self._start : self._read], [*self._ids[self._start :], *tokens]

    def _take(self, tokens: Sequence[int], before: str, after: str, final: bool) -> str:
        final = final or len(self._ids) - self._read >= MAX_PENDING
        self._ids += tokens
        if after.endswith("\ufffd") and not final:
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]


def advance(tokenizer: Tokenizer, moves: Sequence[tuple[TextStream, Sequence[int], bool]]) -> list[str]:
    """Of each stream the text that its next tokens complete, all in one call to the tokenizer's process.

    moves: a stream, its next tokens, and whether they are its last. A call that raises changes no stream.
    """
    moves = [(stream, [i for i in tokens if i not in stream._dropped], final) for stream, tokens, final in moves]
    pairs: dict[int, tuple[str, str]] = {}
    for special in (False, True):
        some = [at for at, (stream, _, _) in enumerate(moves) if bool(stream.keep) is special]
        rows = [row for at in some for row in moves[at][0]._rows(moves[at][1])]
        texts = tokenizer.decode_all(rows, special) if rows else []
        pairs |= dict(zip(some, zip(texts[::2], texts[1::2], strict=True), strict=True))
    return [stream._take(tokens, *pairs[at], final) for at, (stream, tokens, final) in enumerate(moves)]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for what is no list of messages, and for a message whose role or content is not a text."""
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f'messages: got {quote(messages)}; allowed is a list of {{"role": ..., "content": ...}}')
    for i, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(value := message.get(name), str):
                raise ValueError(f"messages[{i}]: {name} is {quote(value)}; a text is expected")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _content(token: object) -> str | None:
    """A special token in tokenizer_config.json: its text, or an object that holds it."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None
