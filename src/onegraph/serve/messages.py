"""/v1/messages, Anthropic's interface: a request becomes a chat's, and the chat's answer a message."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from onegraph.serve.blocks import Block, BlockStream, Ending, blocks_of, event
from onegraph.serve.errors import APIError
from onegraph.serve.fields import IGNORED, SAMPLING_FIELDS, check_names, listed, read_object, shown
from onegraph.serve.protocol import CompletionRequest, parse_fields

Json = Any  # what json.loads gives
OWN = (
    "messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config", "output_format",
    "context_management", "container", "mcp_servers",
)  # fmt: skip
HINTS = {  # that change no answer here
    "cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id", "betas",
}  # fmt: skip
OTHERS = {"n": "", "stop": "stop_sequences", "response_format": "output_config"}  # a chat's fields: their names here
THOUGHTS = ("thinking", "redacted_thinking")  # models are not shown their old thoughts
ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def error_body(error: APIError) -> dict[str, Json]:
    """As Anthropic's API says it."""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def parse(body: bytes, *, count: bool = False) -> tuple[CompletionRequest, Message]:
    """count: of /v1/messages/count_tokens, without `max_tokens`. Raises APIError."""
    fields = {name: value for name, value in read_object(body).items() if name not in HINTS}
    own = {name: fields.pop(name) for name in OWN if name in fields}
    for name in ("context_management", "container", "mcp_servers"):
        if own.get(name):
            raise APIError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    check_names(fields, SAMPLING_FIELDS.keys() | IGNORED, OTHERS)
    for name, there in (("max_tokens", "max_tokens" in fields or count), ("messages", "messages" in own)):
        if not there:
            raise APIError(f"{name} is missing", param=name)
    messages = _system(own.get("system", "")) + read_messages(own["messages"])
    if not messages:
        message = "messages: they hold old thoughts alone, which models are not shown; end with a message of the user's"
        raise APIError(message, param="messages")
    if messages[-1]["role"] == "assistant":
        message = "messages: the last one is the assistant's, which this server does not continue; end with the user's"
        raise APIError(message, param="messages", code="unsupported_parameter")
    chat: dict[str, Json] = {"messages": messages, **fields, **_thinking(own.get("thinking", {}))}
    if own.get("stop_sequences"):
        chat["stop"] = own["stop_sequences"]
    if own.get("tools"):
        chat["tools"] = [_tool(i, tool) for i, tool in enumerate(listed(own, "tools"))]
        chat |= _tool_choice(own.get("tool_choice", {"type": "auto"}))
    config = own.get("output_config", {})
    wanted = own.get("output_format", config.get("format") if isinstance(config, dict) else None)
    if wanted is not None:
        if not isinstance(wanted, dict) or not isinstance(wanted.get("schema"), dict):
            raise APIError(f"output_format: got {shown(wanted)}; allowed is json_schema with its schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}
    if fields.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return parse_fields(chat, chat=True), Message(fields.get("model", ""))


def _system(system: Json) -> list[dict[str, Json]]:
    text = system if isinstance(system, str) else _text("system", system)
    return [{"role": "system", "content": text}] if text else []


def _text(where: str, content: Json) -> str:
    """The text of a text, or of a list of text blocks."""
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else [None]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            got = shown(block.get("type") if isinstance(block, dict) else content)
            raise APIError(f"{where}: got {got}; allowed is a text, or text blocks", param=where.partition("[")[0])
    return "".join(block["text"] for block in content)


def read_messages(value: Json) -> list[dict[str, Json]]:
    """The messages of a chat."""
    if not isinstance(value, list) or not value:
        raise APIError(f"messages: got {shown(value)}; allowed is a list of messages", param="messages")
    found: list[dict[str, Json]] = []
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise APIError(f"{where}: got {shown(message)}; allowed are those of user and assistant", param="messages")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise APIError(f"{where}: content is neither a text nor a list of blocks", param="messages")
        role = message["role"]
        calls = [_call(block) for block in blocks if role == "assistant" and block.get("type") == "tool_use"]
        for block in blocks if role == "user" else ():
            if block.get("type") == "tool_result":
                told = _text(where, block.get("content", ""))
                found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": told})
        done = ("tool_use", *THOUGHTS) if role == "assistant" else ("tool_result",)
        rest = [block for block in blocks if block.get("type") not in done]
        if rest or calls or len(blocks) == 0:
            said: dict[str, Json] = {"role": role, "content": _text(where, rest)}
            found.append(said | ({"tool_calls": calls} if calls else {}))
    return found


def _call(block: dict[str, Json]) -> dict[str, Json]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(at: int, tool: Json) -> dict[str, Json]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise APIError(f"tools[{at}]: got {shown(tool)}; allowed are tools with a name and input_schema", param="tools")
    fields = tool | {"parameters": tool.get("input_schema")}
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: fields[name] for name in known if fields.get(name) is not None}}


def _tool_choice(choice: Json) -> dict[str, Json]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        allowed = "an object with type auto, any, tool or none"
        raise APIError(f"tool_choice: got {shown(choice)}; allowed is {allowed}", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    found: dict[str, Json] = {"tool_choice": {"any": "required", "tool": named}.get(kind, kind)}
    return found | ({"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {})


def _thinking(asked: Json) -> dict[str, Json]:
    """On or off, of a model that has a switch for it. How long it may think is the model's own."""
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind not in ("enabled", "disabled"):
        return {}
    return {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}


class Message:
    """The answer to one request."""

    def __init__(self, model: str) -> None:
        self._head: dict[str, Json] = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model,
        }  # fmt: skip

    def whole(self, chat: dict[str, Json]) -> dict[str, Json]:
        blocks, ending = blocks_of(chat)
        about = {"content": [_block(block) for block in blocks], **_end(ending)}
        return self._head | about | {"usage": _usage(ending.prompt_tokens, ending.tokens)}

    async def events(self, chunks: AsyncIterator[bytes], prompt_tokens: int) -> AsyncIterator[bytes]:
        begun: dict[str, Json] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield event("message_start", message=self._head | begun | {"usage": _usage(prompt_tokens, 0)})
        stream, index = BlockStream(chunks), -1
        async for what, block in stream.events():
            if what == "begin":
                index += 1
                empty: Json = {"tool_use": {"input": {}}, "thinking": {"thinking": ""}, "text": {"text": ""}}
                bare = _block(Block(block.kind, "{}" if block.kind == "call" else "", block.call, block.name))
                yield event("content_block_start", index=index, content_block=bare | empty[bare["type"]])
            elif what == "more":
                kind, name = DELTAS[block.kind]
                yield event("content_block_delta", index=index, delta={"type": kind, name: block.part})
            else:
                yield event("content_block_stop", index=index)
        if stream.error is not None:
            yield event("error", error={"type": "api_error", "message": stream.error["message"]})
            return
        ending = stream.ending
        yield event("message_delta", delta=_end(ending), usage=_usage(ending.prompt_tokens, ending.tokens))
        yield event("message_stop")


DELTAS = {
    "thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


def _block(block: Block) -> dict[str, Json]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call, "name": block.name, "input": block.arguments}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _end(ending: Ending) -> dict[str, Json]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if ending.stop is not None else reasons.get(ending.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": ending.stop}


def _usage(prompt_tokens: int, tokens: int) -> dict[str, Json]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt_tokens, "output_tokens": tokens, **cached}
