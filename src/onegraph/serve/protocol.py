"""Bodies of /v1/completions and /v1/chat/completions: what a request asks, and what cannot be asked of us."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onegraph.api.chat import EFFORT, EFFORTS, Thinking
from onegraph.engine.arguments import ArgumentError
from onegraph.serve.errors import APIError
from onegraph.serve.fields import (
    COUNT,
    FLAG,
    GUIDED,
    IGNORED,
    MAX_CHOICES,
    NEUTRAL,
    SAMPLING_FIELDS,
    TOP,
    Check,
    Json,
    check_fields,
    equal,
    is_effort,
    is_int,
    is_prompt,
    is_thinking,
    read_object,
    shown,
)  # fmt: skip
from onegraph.serve.tools import Tools, parse_call, parse_tools


@dataclass(frozen=True)
class CompletionRequest:
    """A request: `prompts` of /v1/completions, texts or token ids, or the `messages` of a chat.

    sampling: fields of SamplingParams. usage: whether a stream ends with token counts. tools: that the answer may call.
    thinking: as `ChatTemplate.render` takes it. ignore_eos: the model's own stop tokens end nothing. stop_ids: tokens
    that end the answer besides. keep: of longer prompts the last so many tokens, -1 for as many as leave room for the
    answer; None for all. echo: the answer begins with the prompt. best: of the `n` answers to a prompt so many are
    given, the likeliest; None for all. told: log-probabilities are in the answer. special: control tokens are in its
    text.
    """

    model: str
    prompts: list[str | list[int]]
    messages: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    tools: Tools | None = None
    thinking: Thinking = None
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    keep: int | None = None
    echo: bool = False
    best: int | None = None
    told: bool = False
    special: bool = False

    @property
    def answers(self) -> int:
        """How many it asks for."""
        count: int = len(self.prompts) * self.sampling.get("n", 1)
        return count

    @property
    def size(self) -> int:
        """Characters of all texts, or token ids."""
        if self.messages is None:
            return sum(map(len, self.prompts))
        return len(json.dumps([self.messages, None if self.tools is None else self.tools.defined]))


def parse(body: bytes, *, chat: bool) -> CompletionRequest:
    """Raises APIError for what is malformed, unknown or not supported."""
    return parse_fields(read_object(body), chat=chat)


def parse_fields(fields: dict[str, Json], *, chat: bool) -> CompletionRequest:
    """`parse` of a body that is read already."""
    known = {**SAMPLING_FIELDS, **(CHAT_FIELDS if chat else COMPLETION_FIELDS)}
    if "best_of" in fields and equal(fields["best_of"], fields.get("n", 1)):
        del fields["best_of"]
    for name in [name for name in fields if name not in known and (name in NEUTRAL or name in IGNORED)]:
        if name in NEUTRAL and not any(equal(fields[name], off) for off in NEUTRAL[name]):
            raise APIError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
        del fields[name]
    check_fields(fields, known)
    return request_of(fields, chat)


def request_of(fields: dict[str, Json], chat: bool) -> CompletionRequest:
    for name in ("model", "messages" if chat else "prompt"):
        if name not in fields:
            raise APIError(f"{name} is missing", param=name)
    options = fields.get("stream_options", {})
    if options and not fields.get("stream"):
        raise APIError("stream_options is for stream: true alone", param="stream_options")
    if unknown := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise APIError(f"stream_options: {unknown[0]} is not known here", param="stream_options")
    stop = fields.get("stop", [])
    length = fields.get("max_completion_tokens", fields.get("max_tokens"))
    prompt: Json = [] if chat else fields["prompt"]
    tools, sampling = _tools(fields) if chat else None, _sampling(fields, chat)
    if tools is not None and tools.called and ("json_schema" in sampling or "regex" in sampling):
        raise APIError("tool_choice: it forces a call, and response_format or regex another form", param="tool_choice")
    if length == 0 and not fields.get("echo"):
        raise APIError("max_tokens: got 0; allowed is that with echo: true alone", param="max_tokens")
    told, best = "logprobs" in sampling, None
    if "best_of" in fields:
        best = _best(fields, sampling)
    if fields.get("echo") and told:
        sampling["prompt_logprobs"] = sampling["logprobs"]
    return CompletionRequest(
        model=fields["model"],
        prompts=prompt if prompt and isinstance(prompt, list) and not is_int(prompt[0]) else [prompt],
        messages=[_message(i, message) for i, message in enumerate(fields["messages"])] if chat else None,
        sampling=sampling,
        max_tokens=length,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=fields.get("stream", False),
        usage=bool(options.get("include_usage")),
        tools=tools,
        thinking=_thinking(fields),
        ignore_eos=fields.get("ignore_eos", False),
        stop_ids=tuple(fields.get("stop_token_ids", ())),
        keep=fields.get("truncate_prompt_tokens"),
        echo=fields.get("echo", False),
        best=best,
        told=told,
        special=not fields.get("skip_special_tokens", True),
    )


def _thinking(fields: Mapping[str, Json]) -> Thinking:
    """As `ChatTemplate.render` takes it."""
    given = [*fields.get("chat_template_kwargs", {}).values(), *([fields[EFFORT]] if EFFORT in fields else [])]
    if len(given) > 1:
        raise APIError(f"{EFFORT}: chat_template_kwargs says how to think too; give one", param=EFFORT)
    return given[0] if given else None


def _best(fields: Mapping[str, Json], sampling: dict[str, Json]) -> int:
    """How many of the `best_of` answers are given, which takes their log-probabilities."""
    count: int = fields.get("n", 1)
    if fields["best_of"] < count:
        raise APIError(f"best_of: got {fields['best_of']}; allowed is n, {count}, and more", param="best_of")
    if fields.get("stream"):
        raise APIError("best_of: which answers are the best is known at their end; leave stream out", param="best_of")
    sampling["n"] = fields["best_of"]
    sampling.setdefault("logprobs", 0)
    return count


def _tools(fields: dict[str, Json]) -> Tools | None:
    try:
        return parse_tools(fields)
    except ArgumentError as error:
        raise APIError(str(error), param=error.field) from None


def _message(at: int, message: Json) -> dict[str, Any]:
    """Role and text, and what belongs to tools; what an SDK's own message objects bring along is null and left out."""
    where = f"messages[{at}]"
    if not isinstance(message, dict):
        raise APIError(f"{where}: got {shown(message)}; an object with role and content is expected", param="messages")
    message = {name: value for name, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise APIError(f"{where}: role is {shown(role)}; allowed are {', '.join(_ROLES)}", param="messages")
    calls = message.get("tool_calls", []) if role == "assistant" else []
    if message.get("annotations") == []:  # of OpenAI's own answers
        del message["annotations"]
    if unknown := sorted(message.keys() - {"role", "content", "name", *_ROLES[role]}):
        raise APIError(f"{where}: {unknown[0]} is not supported; leave it out", param="messages")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [] if calls else content
    for i, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise APIError(
                f"{where}.content[{i}] has type {shown(part['type'])}; this server takes text only",
                param="messages",
                code="unsupported_parameter",
            )
    if not isinstance(parts, list) or not all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts
    ):
        raise APIError(f"{where}: content is neither a text nor a list of text parts", param="messages")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    found["content"] = "".join(part["text"] for part in parts)
    if calls:
        found["tool_calls"] = _calls(where, calls)
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise APIError(f"{where}: tool_call_id is missing", param="messages")
        found["tool_call_id"] = message["tool_call_id"]
    return found


def _calls(where: str, calls: Json) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise APIError(f"{where}: tool_calls is {shown(calls)}; a list of calls is expected", param="messages")
    try:
        return [parse_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    except ValueError as error:
        raise APIError(str(error), param="messages") from None


def _sampling(fields: dict[str, Json], chat: bool) -> dict[str, Json]:
    """Fields of SamplingParams."""
    found = {name: fields[name] for name in _SAMPLING if name in fields}
    if fields.get("logit_bias"):
        found["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    if found.get("top_k") == -1:  # vLLM's word for all tokens
        found["top_k"] = 0
    if chat and fields.get("logprobs"):
        found["logprobs"] = fields.get("top_logprobs", 0)
    elif chat and fields.get("top_logprobs"):
        raise APIError("top_logprobs needs logprobs: true; add it, or leave top_logprobs out", param="top_logprobs")
    elif not chat and "logprobs" in fields:
        found["logprobs"] = fields["logprobs"]
    wanted = fields.get("response_format", {"type": "text"})
    if wanted["type"] != "text":
        found["json_schema"] = wanted["json_schema"]["schema"] if "json_schema" in wanted else {"type": "object"}
    guided = [(name, fields[f"guided_{name}"], f"guided_{name}") for name in GUIDED if f"guided_{name}" in fields]
    guided += [(name, value, "structured_outputs") for name, value in fields.get("structured_outputs", {}).items()]
    for name, value, where in guided:
        if "json_schema" in found or "regex" in found:
            raise APIError(f"{where}: the request constrains the answer in another way too; give one", param=where)
        if name == "choice":
            value = "|".join(map(re.escape, value))
        found["json_schema" if name == "json" else "regex"] = value
    return found


COMPLETION_FIELDS: Mapping[str, Check] = {
    "prompt": (is_prompt, f"a text or a list of token ids, or a list of up to {MAX_CHOICES} of those"),
    "logprobs": TOP,
    "max_tokens": (lambda v: is_int(v) and 0 <= v < 1 << 31, "a whole number from 1 to 2147483647, or 0 with echo"),
    "echo": FLAG,
    "best_of": SAMPLING_FIELDS["n"],
}
CHAT_FIELDS: Mapping[str, Check] = {
    "messages": (lambda v: isinstance(v, list) and len(v) > 0, "a list of messages"),
    "max_completion_tokens": COUNT,
    "logprobs": FLAG,
    "top_logprobs": TOP,
    "chat_template_kwargs": (
        is_thinking,
        "an object with enable_thinking or thinking, true or false, or with reasoning_effort",
    ),
    EFFORT: (is_effort, ", ".join(EFFORTS)),
    "tools": (lambda v: isinstance(v, list), "a list of tools"),
    "tool_choice": (lambda v: isinstance(v, str | dict), "none, auto, required, or an object that names a function"),
    "parallel_tool_calls": FLAG,
}
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", *_PENALTIES, "min_tokens", "priority", "seed", "n", "regex", "cache_salt",
)  # fmt: skip
_THOUGHTS = ("reasoning_content", "reasoning")  # of other servers' answers; models are not shown their old thoughts
# Besides content and name
_ROLES: Mapping[str, tuple[str, ...]] = {
    "system": (), "developer": (), "user": (), "assistant": ("tool_calls", *_THOUGHTS), "tool": ("tool_call_id",),
}  # fmt: skip
