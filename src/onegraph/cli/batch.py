"""Prompts from a file: a text a line, or in JSON Lines an object a line with sampling fields of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onegraph.api.chat import EFFORTS, Thinking
from onegraph.cli.common import UsageError, one_line, read_text

if TYPE_CHECKING:
    from onegraph.api.token_text import TokenTexts
    from onegraph.engine.params import TokenLogprob

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Request:
    """A text, or the messages of a conversation. `where` is what errors call it; `told`: what its output repeats;
    `fields`: of SamplingParams; `thinking`: as `LLM.chat` takes it."""

    where: str
    prompt: str | list[dict[str, str]]
    told: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    thinking: Thinking = None


def read_batch(path: str) -> tuple[list[Request], bool]:
    """The requests of a file, and whether it holds JSON Lines, not texts: its name says so, or, of standard input, its
    first line. Raises UsageError that names the line, CheckpointError."""
    # Not splitlines, which also cuts at characters that may stand in JSON: U+2028, U+0085
    lines = [(i, line.removesuffix("\r")) for i, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"--batch {path}: holds no prompt; one a line is expected")
    named = [(line, f"--batch {path}, line {i}") for i, line in lines]
    if path.endswith(".jsonl") or (path == "-" and _is_request(lines[0][1])):
        return [_request(line, where) for line, where in named], True
    return [Request(where, line, {"prompt": line}) for line, where in named], False


def _is_request(line: str) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and bool(found.keys() & {"prompt", "messages"})


def _request(line: str, where: str) -> Request:
    from onegraph.engine.params import SamplingParams
    from onegraph.formats.files import parse_json

    found = parse_json(line.encode(), where)
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{where}: got half a character (\\ud800 to \\udfff alone); write both halves, or the character"
        ) from None
    names = [each.name for each in dataclasses.fields(SamplingParams)]
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
        raise UsageError(f'{where}: an object with "prompt" or "messages" is expected')
    own = ["prompt", "messages", "id", "thinking"]
    if unknown := sorted(found.keys() - {*own, *names}):
        raise UsageError(f"{where}: got {', '.join(unknown)}; allowed are {', '.join(own + names)}")
    prompt = found["prompt"] if "prompt" in found else found["messages"]
    if not (isinstance(prompt, str) and prompt if "prompt" in found else _is_conversation(prompt)):
        raise UsageError(f'{where}: a text, or a list of {{"role": ..., "content": ...}}, is expected')
    if (role := next((m["role"] for m in found.get("messages", ()) if m["role"] not in ROLES), None)) is not None:
        raise UsageError(f"{where}: role: got {one_line(role, 60)!r}; allowed are {', '.join(ROLES)}")
    thinking = found.get("thinking")
    if not isinstance(thinking, bool | None) and thinking not in EFFORTS:
        allowed = f"true, false, {', '.join(EFFORTS)}"
        raise UsageError(f"{where}: thinking: got {one_line(json.dumps(thinking), 60)}; allowed are {allowed}")
    told = {name: found[name] for name in ("id", "prompt", "messages") if name in found}
    fields = {name: found[name] for name in names if name in found}
    try:
        SamplingParams(**fields)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from None
    return Request(where, prompt, told, fields, thinking)


def _is_conversation(messages: object) -> bool:
    return isinstance(messages, list) and bool(messages) and all(map(_is_message, messages))


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        return False
    return all(isinstance(text, str) for text in message.values())


def rows(request: Request, completion: Any, texts: TokenTexts) -> Iterator[dict[str, Any]]:
    """What is told of each answer to a request, as JSON."""

    def scored(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """As OpenAI has them, with the ids of the likeliest."""
        found = texts.of([(each.token, each.logprob, each.top, 0) for each in tokens])
        return [told.to_openai() | {"top": each.top} for told, each in zip(found, tokens, strict=True)]

    for made in completion.outputs:
        row = request.told | {
            "text": made.text,
            "tokens": made.token_ids,
            "prompt_tokens": made.prompt_tokens,
            "finish": made.finish_reason,
            "seed": made.seed,
        }
        if made.logprobs is not None:
            row["logprobs"] = scored(made.logprobs)
        if made.prompt_logprobs is not None:
            row["prompt_logprobs"] = scored(made.prompt_logprobs)
        yield row
