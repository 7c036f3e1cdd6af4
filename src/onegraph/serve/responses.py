"""/v1/responses, OpenAI's newer interface: a request becomes a chat's, and the chat's answer a response.

A response may be the beginning of another's conversation (`previous_response_id`): the server keeps the latest ones, in
bounded memory.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from onegraph.api.chat import EFFORT, EFFORTS
from onegraph.serve.blocks import Block, BlockStream, Ending, blocks_of, event
from onegraph.serve.errors import APIError
from onegraph.serve.fields import IGNORED, SAMPLING_FIELDS, check_names, equal, is_effort, listed, read_object, shown
from onegraph.serve.protocol import CompletionRequest, parse_fields

Json = Any  # what json.loads gives
KEPT_BYTES = 64 << 20  # of conversations, as JSON
OWN = (
    "input", "instructions", "max_output_tokens", "previous_response_id", "store", "text", "tools", "tool_choice",
    "reasoning", "include", "truncation", "background", "max_tool_calls", "stream_options",
)  # fmt: skip
# A chat's fields: their names here
OTHERS = {"n": "", "max_tokens": "max_output_tokens", "response_format": "text.format"}
TEXTS = ("input_text", "output_text", "text")  # types of parts of a message


class Conversations:
    """What was said up to each of the latest responses, as a chat's messages; the oldest used are dropped."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._kept: OrderedDict[str, tuple[list[Json], int]] = OrderedDict()

    def find(self, name: Json) -> list[Json]:
        """Raises APIError."""
        if not isinstance(name, str) or name not in self._kept:
            message = f"previous_response_id: {shown(name)} is not known; it was not stored, or newer ones replaced it"
            raise APIError(message, status=404, param="previous_response_id", code="previous_response_not_found")
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def keep(self, name: str, messages: list[Json]) -> None:
        size = len(json.dumps(messages))
        self._kept[name] = messages, size
        self._bytes += size
        while self._bytes > self._limit and self._kept:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= dropped


def parse(body: bytes, kept: Conversations) -> tuple[CompletionRequest, Response]:
    """Raises APIError for what is malformed, unknown or not supported."""
    fields = read_object(body)
    own = {name: fields.pop(name) for name in OWN if name in fields}
    for name, neutral in (("truncation", "disabled"), ("background", False), ("include", [])):
        if name in own and not equal(own[name], neutral) and own[name] != ["reasoning.encrypted_content"]:
            raise APIError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    check_names(fields, SAMPLING_FIELDS.keys() | IGNORED | {"parallel_tool_calls", "top_logprobs"}, OTHERS)
    if "input" not in own:
        raise APIError("input is missing", param="input")
    if fields.pop("top_logprobs", 0):
        raise APIError("top_logprobs is not supported here; use /v1/chat/completions", param="top_logprobs")
    messages = list(kept.find(own["previous_response_id"])) if "previous_response_id" in own else []
    messages += read_input(own["input"])
    said = [{"role": "system", "content": own["instructions"]}] if own.get("instructions") else []
    chat: dict[str, Json] = {"messages": said + messages, **fields, **_reasoning(own.get("reasoning", {}))}
    if "max_output_tokens" in own:
        chat["max_tokens"] = own["max_output_tokens"]
    chat |= _format(own.get("text", {}))
    if own.get("tools"):
        chat["tools"] = [_tool(i, tool) for i, tool in enumerate(listed(own, "tools"))]
        choice = own.get("tool_choice", "auto")
        named = isinstance(choice, dict) and choice.get("type") == "function"
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}} if named else choice
    if fields.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return parse_fields(chat, chat=True), Response(own | fields, messages, kept)


def read_input(value: Json) -> list[dict[str, Json]]:
    """The messages of a chat that `input` is: a text, or a list of messages, calls, and what calls gave."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise APIError(f"input: got {shown(value)}; allowed is a text or a list of messages", param="input")
    found: list[dict[str, Json]] = []
    for i, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            found.append({"role": item.get("role"), "content": _content(f"input[{i}]", item.get("content"))})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function"}
            call["function"] = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(f"input[{i}]", item.get("output"))
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":  # models are not shown their old thoughts
            what = f"type {shown(kind)}" if isinstance(item, dict) else shown(item)
            raise APIError(
                f"input[{i}]: got {what}; allowed are message, function_call, function_call_output and reasoning",
                param="input",
            )
    return found


def _content(where: str, content: Json) -> Json:
    """Text, or a chat's parts of it."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS:
            raise APIError(f"{where}: content has a part of type {shown(kind)}; this server takes text", param="input")
    return [{"type": "text", "text": part.get("text")} for part in content]


def _format(text: Json) -> dict[str, Json]:
    """A chat's response_format."""
    wanted = text.get("format", {"type": "text"}) if isinstance(text, dict) else None
    if not isinstance(wanted, dict):
        raise APIError(f"text: got {shown(text)}; allowed is an object with a format", param="text")
    if wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}
    return {"response_format": wanted}


def _tool(at: int, tool: Json) -> dict[str, Json]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise APIError(f"tools[{at}]: got {shown(tool)}; allowed are tools of type function", param="tools")
    known = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": known}


def _reasoning(asked: Json) -> dict[str, Json]:
    effort = asked.get("effort") if isinstance(asked, dict) else None
    if effort is None:
        return {}
    if not is_effort(effort):
        allowed = ", ".join(EFFORTS)
        raise APIError(f"reasoning: effort: got {shown(effort)}; allowed are {allowed}", param="reasoning")
    return {EFFORT: effort}


class Response:
    """The answer to one request. asked: its fields. messages: the conversation, without instructions."""

    def __init__(self, asked: Mapping[str, Json], messages: list[Json], kept: Conversations) -> None:
        self._asked, self._messages, self._kept = asked, messages, kept
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, chat: dict[str, Json]) -> dict[str, Json]:
        blocks, ending = blocks_of(chat)
        items = [_item(block) for block in blocks] or [_item(Block("text"))]
        self._remember(blocks)
        return self._object(_status(ending), items, ending)

    async def events(self, chunks: AsyncIterator[bytes], prompt_tokens: int) -> AsyncIterator[bytes]:
        count = 0

        def made(kind: str, **data: Json) -> bytes:
            nonlocal count
            count += 1
            return event(f"response.{kind}", sequence_number=count - 1, **data)

        yield made("created", response=self._object("in_progress", []))
        yield made("in_progress", response=self._object("in_progress", []))
        stream, items = BlockStream(chunks), list[dict[str, Json]]()
        async for what, block in stream.events():
            if what == "begin":
                items.append(_item(block, "in_progress"))
            at: dict[str, Json] = {"item_id": items[-1]["id"], "output_index": len(items) - 1}
            if block.kind != "call":
                at |= {"content_index": 0}
            if what == "begin":
                bare = items[-1] | ({"content": []} if block.kind != "call" else {})
                yield made("output_item.added", output_index=len(items) - 1, item=bare)
                if block.kind != "call":
                    yield made("content_part.added", part=items[-1]["content"][0], **at)
            elif what == "more":
                yield made(f"{EVENTS[block.kind]}.delta", delta=block.part, **at, **_logprobs(block))
            else:
                items[-1] = _item(block) | {"id": items[-1]["id"]}
                names = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
                yield made(f"{EVENTS[block.kind]}.done", **names, **at, **_logprobs(block))
                if block.kind != "call":
                    yield made("content_part.done", part=items[-1]["content"][0], **at)
                yield made("output_item.done", output_index=len(items) - 1, item=items[-1])
        if stream.error is not None:
            error = {"code": "server_error", "message": stream.error["message"]}
            yield made("failed", response=self._object("failed", items) | {"error": error})
            return
        self._remember(stream.blocks)
        status = _status(stream.ending)
        yield made(status, response=self._object(status, items, stream.ending))

    def _remember(self, blocks: list[Block]) -> None:
        if not self._asked.get("store", True):
            return
        text = "".join(block.text for block in blocks if block.kind == "text")
        said: dict[str, Json] = {"role": "assistant", "content": text}
        calls = [block for block in blocks if block.kind == "call"]
        if calls:
            functions = [{"name": each.name, "arguments": json.dumps(each.arguments)} for each in calls]
            said["tool_calls"] = [
                {"id": each.call, "type": "function", "function": function}
                for each, function in zip(calls, functions, strict=True)
            ]
        self._kept.keep(self._id, [*self._messages, said])

    def _object(self, status: str, output: list[Json], ending: Ending | None = None) -> dict[str, Json]:
        asked = self._asked
        usage = None
        if ending is not None:
            usage = {
                "input_tokens": ending.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": ending.tokens, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": ending.prompt_tokens + ending.tokens,
            }  # fmt: skip
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.get("instructions"), "max_output_tokens": asked.get("max_output_tokens"),
            "model": asked["model"], "output": output, "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": asked.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None}, "store": asked.get("store", True),
            "temperature": asked.get("temperature"), "text": asked.get("text", {"format": {"type": "text"}}),
            "tool_choice": asked.get("tool_choice", "auto"), "tools": asked.get("tools", []),
            "top_p": asked.get("top_p"), "truncation": "disabled", "usage": usage,
            "metadata": asked.get("metadata", {}),
        }  # fmt: skip


EVENTS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _logprobs(block: Block) -> dict[str, Json]:
    """That there are none, which clients expect to be said."""
    return {"logprobs": []} if block.kind == "text" else {}


def _status(ending: Ending) -> str:
    return "incomplete" if ending.finish == "length" else "completed"


def _item(block: Block, status: str = "completed") -> dict[str, Json]:
    """An item of `output`."""
    if block.kind == "call":
        about = {"type": "function_call", "call_id": block.call, "name": block.name, "arguments": block.text}
        return {"id": f"fc_{uuid.uuid4().hex}", "status": status, **about}
    if block.kind == "thinking":
        thoughts = [{"type": "reasoning_text", "text": block.text}]
        name = f"rs_{uuid.uuid4().hex}"
        return {"id": name, "type": "reasoning", "summary": [], "content": thoughts, "status": status}
    part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
    name = f"msg_{uuid.uuid4().hex}"
    return {"id": name, "status": status, "type": "message", "role": "assistant", "content": [part]}
