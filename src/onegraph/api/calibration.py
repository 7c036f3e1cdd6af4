"""The text that quantizing calibrates on: the corpus of the package, files, directories, chats, datasets of the hub.

A source is a list of documents with a weight. `draw` takes whole documents; those of the corpus are never cut. At each
step it takes the one that exceeds the share of its source the least (the finish tag of weighted fair queueing, Demers,
Keshav and Shenker, SIGCOMM 1989). The order is fixed, so fewer tokens are the beginning of more.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from onegraph.api.chat import ChatTemplate, TemplateError
from onegraph.api.text import MAX_TEXT, decode, read_text
from onegraph.engine.arguments import is_number
from onegraph.formats.files import CheckpointError, quote, read_bytes

CORPUS = Path(__file__).parents[1] / "data" / "calibration.jsonl.xz"
PART = 2048  # characters; a user's text is cut at ends of lines or words into such documents, so that weights hold
HUB = "hub:"
# KL grows with tokens ** -LOSS: SmolLM2, 8,192 to 131,072 tokens (docs/log.md, Calibration text)
LOSS = 0.16
ENOUGH = 0.75  # of the recipe's tokens; less is warned of

Item = str | Path
Calibration = Item | Sequence[Item] | Mapping[Item, float]


class _Tokenizer(Protocol):
    @property
    def template(self) -> ChatTemplate | None: ...

    def encode(self, text: str, special: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Document:
    """A text, or a conversation of {"role", "content"} messages and the tools that it may call. `first` is False for a
    later part of a text."""

    text: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    first: bool = True

    @property
    def size(self) -> int:
        """Bytes, without the blank line behind a text."""
        if self.messages:
            return len(json.dumps(list(self.messages), ensure_ascii=False).encode())
        return len(self.text.rstrip("\n").encode())


@dataclass(frozen=True)
class Source:
    """Documents under a name, and the share of the tokens that they get relative to other sources. `given` is False for
    a kind of the corpus."""

    name: str
    documents: Sequence[Document]
    weight: float
    given: bool = True

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(document.size for document in self.documents)


@dataclass(frozen=True)
class Drawn:
    """Calibration tokens in order, how many are of each source, and what one should know, a line each."""

    ids: list[int]
    counts: Mapping[str, int]
    notes: list[str] = field(default_factory=list)


def kind_of(calibration: Calibration) -> str:
    """ "self", "bundled" or "text"."""
    return calibration if calibration in ("self", "bundled") else "text"


def check(calibration: object) -> None:
    """Raises ValueError for what `sources` has no form for."""
    allowed = "a text, a pathlib.Path, 'bundled', 'hub:ORG/NAME', several of them, {one: weight}, or 'self' alone"
    items = _items(calibration)
    if not items or not all(isinstance(item, Item) for item, _ in items):
        raise ValueError(f"calibration: got {quote(calibration)}; allowed is {allowed}")
    if len(items) > 1 and any(item == "self" for item, _ in items):
        raise ValueError(
            f"calibration: got 'self' among {len(items)} sources; 'self' allows no other source, or use a text"
        )
    weights = [weight for _, weight in items]
    given = [weight for weight in weights if weight is not None]
    if len(given) not in (0, len(items)):
        raise ValueError(f"calibration: {len(given)} of {len(items)} sources have a weight; give one to each, or none")
    for weight in given:
        if not (is_number(weight) and weight > 0):
            raise ValueError(f"calibration: got the weight {quote(weight)}; allowed is a number above 0")


def sources(calibration: Calibration, least: int = 1) -> list[Source]:
    """What `calibration` stands for, read; none for "self". Without weights, each source counts by its size.

    least: tokens of one sequence. Raises CheckpointError for what cannot be read, ValueError where all of it has fewer
    bytes than `least`: a token stands for a byte or more, but for one that a tokenizer puts in front.
    """
    if calibration == "self":
        return []
    found: dict[str, Source] = {}
    for item, weight in _items(calibration):
        for each in _read(item, weight):
            name = each.name
            while name in found:
                name += "'"
            found[name] = replace(each, name=name)
    size = sum(source.size for source in found.values())
    if size + 1 < least:
        raise ValueError(
            f"calibration: the text has {size} bytes, fewer than the {least} tokens of one sequence; give about 4000 "
            "tokens or more, or use shorter sequences"
        )
    return list(found.values())


def draw(tokenizer: _Tokenizer, sources: Sequence[Source], tokens: int) -> Drawn:
    """At most `tokens` tokens of `sources`, document by document, in proportion to their weights; what a source does
    not have the others fill."""
    ids: list[int] = []
    counts = dict.fromkeys((source.name for source in sources), 0)
    ahead = {source.name: _encoded(tokenizer, source) for source in sources}
    following = {name: next(documents, None) for name, documents in ahead.items()}
    weights = {source.name: source.weight for source in sources}
    given = {source.name for source in sources if source.given} if len(sources) > 1 else set()
    while len(ids) < tokens:
        ready = {name: found for name, found in following.items() if found is not None}
        if not ready:
            break
        name = min(ready, key=lambda name: (counts[name] + len(ready[name])) / weights[name])
        taken = ready[name][: tokens - len(ids)]
        ids += taken
        counts[name] += len(taken)
        following[name] = next(ahead[name], None)
    total = sum(weights.values())
    short = {
        name: round(tokens * weight / total)
        for name, weight in weights.items()
        if following[name] is None and name in given and counts[name] < 0.9 * tokens * weight / total
    }
    notes = [f"{name} has {counts[name]:,} tokens; its share is {share:,}" for name, share in short.items()]
    return Drawn(ids, counts, notes)


def estimated(sources: Sequence[Source], tokens: int, bytes_per_token: float = 4.0) -> dict[str, int]:
    """Tokens of each source, about, where there is no tokenizer to count them."""
    total, found = sum(source.weight for source in sources), {}
    for source in sources:
        found[source.name] = min(round(tokens * source.weight / total), round(source.size / bytes_per_token))
    return found


def shortage(calibration: Calibration, tokens: int, limit: int, wanted: int) -> str | None:
    """A warning where `tokens`, of a text of at most `limit`, are far fewer than the recipe's `wanted`, with what that
    costs. Of the corpus, which is as long as it is, the limit alone counts."""
    if (limit if calibration == "bundled" else tokens) >= ENOUGH * wanted:
        return None
    more = 100 * ((wanted / max(tokens, 1)) ** LOSS - 1)
    return (
        f"warning: {tokens:,} calibration tokens; the recipe takes {wanted:,}, and with so few expect about "
        f"{more:.0f} % more KL; give more text, or add 'bundled' to yours"
    )


def told(counts: Mapping[str, int]) -> str:
    """How many tokens are of which source, in a line."""
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    return f"calibration: {sum(counts.values()):,} tokens: {parts}"


def recorded(counts: Mapping[str, int]) -> dict[str, int]:
    """Tokens of each source as a checkpoint says it: files by their names without directories, those of one name
    together; datasets of the hub by their whole names."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        short = name if name.startswith(HUB) else Path(name).name
        found[short] = found.get(short, 0) + count
    return found


@cache
def corpus() -> tuple[Mapping[str, float], Mapping[str, Sequence[Document]]]:
    """Shares and documents of the package's corpus, by kind, as `tools/corpus.py` packed them."""
    header, *lines = lzma.decompress(CORPUS.read_bytes()).decode().splitlines()
    documents: dict[str, list[Document]] = {}
    for line in lines:
        row = json.loads(line)
        whole = Document(text=row["text"] + "\n\n") if "text" in row else next(_documents_of(row))
        documents.setdefault(row["kind"], []).append(whole)
    return json.loads(header)["shares"], documents


def corpus_text() -> str:
    """The texts of the corpus without its conversations."""
    return "".join(document.text for kind in corpus()[1].values() for document in kind)


def _items(calibration: Any) -> list[tuple[Any, Any]]:
    if isinstance(calibration, Mapping):
        return list(calibration.items())
    several = isinstance(calibration, Sequence) and not isinstance(calibration, str | bytes)
    return [(item, None) for item in (calibration if several else [calibration])]


def _read(item: Item, weight: float | None) -> Iterator[Source]:
    if item == "bundled":
        shares, kinds = corpus()
        size = sum(document.size for kind in kinds.values() for document in kind)
        for name, share in shares.items():
            yield Source(name, kinds[name], share * (size if weight is None else weight), given=False)
        return
    if isinstance(item, Path):
        name, documents = str(item), list(_directory(item) if item.is_dir() else _file(item))
    elif item.startswith(HUB) and len(item.split()) == 1:
        from onegraph.api.hub import dataset

        name, documents = item, [document for file in dataset(item.removeprefix(HUB)) for document in _file(file)]
    else:
        name, documents = "text", list(_documents_of({"text": item}))
    size = sum(document.size for document in documents)
    yield Source(name, documents, weight or max(1, size))


def _directory(path: Path) -> Iterator[Document]:
    """Of every UTF-8 file below it, sorted by name; hidden ones and those of bytes are passed over."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    visible = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    texts, size = 0, 0
    for file in visible:
        try:
            text = decode(data := read_bytes(file, MAX_TEXT), str(file))
        except CheckpointError:
            continue
        if "\0" in text:
            continue
        texts, size = texts + 1, size + len(data)
        if size > MAX_TEXT:
            raise CheckpointError(f"{path}: its files have more than {MAX_TEXT} bytes; give fewer of them")
        yield from _lines(text, file) if file.suffix == ".jsonl" else _documents_of({"text": text})
    if not texts:
        raise CheckpointError(f"{path}: holds no UTF-8 text file")


def _file(path: Path) -> Iterator[Document]:
    text = read_text(path)
    return _lines(text, path) if path.suffix == ".jsonl" else _documents_of({"text": text})


def _lines(text: str, path: Path) -> Iterator[Document]:
    """Of JSON lines."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        try:
            yield from _documents_of(row)
        except ValueError as error:
            raise CheckpointError(f"{path}:{number}: {error}") from None


def _documents_of(row: Any) -> Iterator[Document]:
    """{"text": ...} or {"messages": [...]}. Raises ValueError for anything else, and for half of a surrogate pair."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has {error.object[error.start]!a}, half of a surrogate pair; remove it") from None
    except RecursionError:
        row = None
    if isinstance(row, dict) and isinstance(text := row.get("text"), str):
        text = text.strip("\n") + "\n\n"
        at = 0
        while at < len(text):
            end = len(text)
            if end - at > PART:
                end = next((cut for mark in "\n " if (cut := text.rfind(mark, at, at + PART) + 1)), at + PART)
            yield Document(text=text[at:end], first=at == 0)
            at = end
        return
    messages, tools = (row.get("messages"), row.get("tools")) if isinstance(row, dict) else (None, None)
    fine = isinstance(messages, list) and messages
    if not fine or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages or ()):
        raise ValueError('allowed is {"text": ...} or {"messages": [{"role": ..., "content": ...}, ...]}')
    yield Document(
        messages=[message | {"content": _content(message.get("content"))} for message in messages or ()],
        tools=tools if isinstance(tools, list) and tools else None,
    )


def _content(content: Any) -> str:
    """A message's text; of content in parts, as multimodal chats have it, its texts."""
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and part.get("text") is not None]
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a part of a message has the text {quote(text)}; a string is expected")
        return "\n".join(texts)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def _encoded(tokenizer: _Tokenizer, source: Source) -> Iterator[list[int]]:
    for document in source.documents:
        if document.messages:
            text, special = _conversation(tokenizer.template, document)
        else:
            text, special = document.text, document.first
        if ids := tokenizer.encode(text, special):
            yield ids


def _conversation(template: ChatTemplate | None, document: Document) -> tuple[str, bool]:
    """The conversation as the model's template writes it, and whether the tokenizer adds its own tokens around it.

    For templates without a system or tool role these are part of a user's turn; for a model without a template, or one
    that renders neither form, it is a transcript.
    """
    messages = document.messages
    if template is not None:
        for form in (messages, _user_and_assistant(messages)):
            try:
                return template.render(form, tools=document.tools, complete=True), False
            except TemplateError:
                continue
    turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages if message["content"]]
    return "\n\n".join(turns) + "\n\n", True


def _user_and_assistant(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The same words in turns of two roles that alternate."""
    found: list[dict[str, str]] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if found and found[-1]["role"] == role:
            found[-1]["content"] += f"\n\n{message['content']}"
        else:
            found.append({"role": role, "content": message["content"]})
    return found
