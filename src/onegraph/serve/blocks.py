"""An answer of a chat as a list of blocks, which is how /v1/responses and /v1/messages tell it: thoughts, text, calls.

Both endpoints ask for a chat, so that they know all that /v1/chat/completions knows, and give its answer another form.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from onegraph.serve.reply import dumps

Json = Any  # what json.loads gives


@dataclass
class Block:
    """text: the thoughts, the text, or the arguments of a call as JSON. call: of a call, its id; name: of its function.
    part: what the latest piece of the stream brought."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""
    call: str = ""
    name: str = ""
    part: str = ""

    @property
    def arguments(self) -> dict[str, Json]:
        """Of a call; of one whose JSON the end of the answer cut, none."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass
class Ending:
    """Why the answer ended, as a chat says it; which stop text did; tokens of prompt and answer."""

    finish: str = "stop"
    stop: str | None = None
    prompt_tokens: int = 0
    tokens: int = 0


class Form(Protocol):
    """What an endpoint makes of a chat's answer."""

    def whole(self, chat: dict[str, Json]) -> dict[str, Json]:
        """The answer's JSON."""

    def events(self, chunks: AsyncIterator[bytes], prompt_tokens: int) -> AsyncIterator[bytes]:
        """The stream's events, from those of the chat."""


def blocks_of(chat: dict[str, Json]) -> tuple[list[Block], Ending]:
    """The first choice of a whole answer."""
    choice, usage = chat["choices"][0], chat["usage"]
    message, found = choice["message"], []
    if message.get("reasoning_content"):
        found.append(Block("thinking", message["reasoning_content"]))
    if message.get("content"):
        found.append(Block("text", message["content"]))
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    found += [Block("call", function["arguments"], name, function["name"]) for name, function in calls]
    stop = choice.get("stop_reason")
    return found, Ending(choice["finish_reason"], stop, usage["prompt_tokens"], usage["completion_tokens"])


class BlockStream:
    """A chat's events as those of its blocks, one after the other: ("begin" | "more" | "end", block). At its end
    `ending` says why it ended; where it failed, `error` is what the client gets in place of it."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.ending = Ending()
        self.error: dict[str, Json] | None = None
        self.blocks: list[Block] = []

    async def events(self) -> AsyncIterator[tuple[str, Block]]:
        current: Block | None = None
        async for chunk in self._chunks:
            if chunk.startswith(b"data: [DONE]"):
                break
            data = json.loads(chunk.removeprefix(b"data: "))
            if "error" in data:
                self.error = data["error"]
                return
            for block, part in self._parts(data, current):
                if block is not current:
                    if current is not None:
                        yield "end", current
                    self.blocks.append(block)
                    current = block
                    yield "begin", block
                block.part = part
                block.text += part
                if part:
                    yield "more", block
        if current is not None:
            yield "end", current

    def _parts(self, data: dict[str, Json], current: Block | None) -> list[tuple[Block, str]]:
        """What a chunk brings, and to which block."""
        if data.get("usage"):
            self.ending.prompt_tokens = data["usage"]["prompt_tokens"]
            self.ending.tokens = data["usage"]["completion_tokens"]
        found: list[tuple[Block, str]] = []
        for choice in data["choices"]:
            self.ending.finish = choice["finish_reason"] or self.ending.finish
            self.ending.stop = choice.get("stop_reason", self.ending.stop)
            delta = choice["delta"]
            kinds: tuple[tuple[Literal["thinking", "text"], str], ...]
            kinds = ("thinking", "reasoning_content"), ("text", "content")
            for kind, name in kinds:
                if delta.get(name):
                    block = current if current is not None and current.kind == kind else Block(kind)
                    found.append((block, delta[name]))
                    current = block
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                if call.get("id"):
                    current = Block("call", call=call["id"], name=function["name"])
                if current is not None:
                    found.append((current, function.get("arguments") or ""))
        return found


def event(kind: str, **data: Json) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind, **data}) + b"\n\n"
