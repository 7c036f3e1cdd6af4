"""Pieces of answers -> OpenAI's JSON: a whole answer, or the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import Any

from starlette.responses import Response

from onegraph.serve.calls import CallPart
from onegraph.serve.dialect import AnswerForm
from onegraph.serve.errors import APIError
from onegraph.serve.logprobs import chat_logprobs, completion_logprobs
from onegraph.serve.protocol import CompletionRequest
from onegraph.serve.text import Piece


class Reply:
    """Pieces -> the JSON of a whole answer, or of a stream's events."""

    def __init__(self, asked: CompletionRequest, model: str, prompt_tokens: int, form: AnswerForm) -> None:
        self.asked, self.prompt_tokens, self.tokens = asked, prompt_tokens, 0
        self.chat = chat = asked.messages is not None
        self._readers = {i: form.reader() for i in range(asked.sampling.get("n", 1))} if chat else {}
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """Raises APIError where an answer failed."""
        found: dict[int, list[Piece]] = {}
        async for piece in pieces:
            if piece.error is not None:
                raise APIError(piece.error, status=500)
            self.tokens += piece.tokens
            found.setdefault(piece.index, []).append(piece)
        choices = [self._choice(found[i], "message") for i in sorted(found)]
        if self.asked.best is not None:
            choices = self._best(choices, [_mean(found[i]) for i in sorted(found)], self.asked.best)
        return self.head | {"choices": choices, "usage": self._usage()}

    def _best(self, choices: list[dict[str, Any]], scores: list[float], count: int) -> list[dict[str, Any]]:
        """Of each prompt's answers the `count` likeliest, numbered anew."""
        every = self.asked.sampling["n"]
        kept = []
        for start in range(0, len(choices), every):
            ranked = sorted(range(start, start + every), key=lambda i: -scores[i])
            kept += [choices[i] for i in ranked[:count]]
        return [choice | {"index": i} for i, choice in enumerate(kept)]

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        """Server-sent events: of each choice its role (in a chat), text as it is written, and why it ended."""
        if self.chat:
            self.head["object"] = "chat.completion.chunk"
            for i in range(self.asked.sampling.get("n", 1)):
                yield self._event([self._choice([Piece(i)], "delta")])
        async for piece in pieces:
            if piece.error is not None:
                yield event(APIError(piece.error, status=500).body())
                return
            self.tokens += piece.tokens
            choice = self._choice([piece], "delta", role=False)
            if piece.logprobs or piece.last or choice.get("text") or any(choice.get("delta", {}).values()):
                yield self._event([choice])
        if self.asked.usage:
            yield self._event([], usage=self._usage())
        yield b"data: [DONE]\n\n"

    def _choice(self, pieces: list[Piece], key: str, role: bool = True) -> dict[str, Any]:
        index, last, text = pieces[0].index, pieces[-1], "".join(piece.text for piece in pieces)
        finish: str | None = last.finish
        said: dict[str, Any] = {"role": "assistant"} if role else {}
        if (reader := self._readers.get(index)) is not None:
            parts = reader.push(text, last.last)
            text = parts.content
            said |= {"reasoning_content": parts.reasoning} if parts.reasoning else {}
            if calls := chat_calls(parts.calls, whole=key == "message"):
                said["tool_calls"] = calls
            if reader.count and finish == "stop":
                finish = "tool_calls"
        content = {key: said | {"content": text if text or "tool_calls" not in said else None}}
        tokens = [token for piece in pieces for token in piece.logprobs]
        told = (chat_logprobs if self.chat else completion_logprobs)(tokens) if tokens and self.asked.told else None
        ended = {"finish_reason": finish} | ({} if last.stop is None else {"stop_reason": last.stop})  # vLLM's
        return {"index": index, **(content if self.chat else {"text": text}), "logprobs": told, **ended}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        about = b', "usage": ' + dumps(usage) if self.asked.usage else b""
        return b"data: " + self._begin + dumps(choices) + about + b"}\n\n"

    @cached_property
    def _begin(self) -> bytes:
        """What all events of a stream begin with."""
        return dumps(self.head)[:-1] + b', "choices": '

    def _usage(self) -> dict[str, int]:
        used = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
        return used | {"total_tokens": self.prompt_tokens + self.tokens}


def _mean(pieces: list[Piece]) -> float:
    """The mean log-probability of an answer's own tokens."""
    count = sum(piece.tokens for piece in pieces)
    told = [token.logprob or 0.0 for piece in pieces for token in piece.logprobs]
    return sum(told[-count:]) / max(1, count)


def chat_calls(parts: Sequence[CallPart], *, whole: bool) -> list[dict[str, Any]]:
    """As OpenAI's `tool_calls` has them: of a stream's piece with the number of each call, and what is new of it."""
    found: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = found.setdefault(part.index, ({} if whole else {"index": part.index}) | {"function": {"arguments": ""}})
        if part.name is not None:
            call |= {"id": part.id, "type": "function"}
            call["function"] = {"name": part.name, "arguments": call["function"]["arguments"]}
        call["function"]["arguments"] += part.arguments
    return list(found.values())


def dumps(value: Any) -> bytes:
    """A lone surrogate, which a client may send as an escape, has no UTF-8: it comes back as '?'."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"
