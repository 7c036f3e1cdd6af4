"""OpenAI's JSON: what a request asks, what cannot be asked of us, and the shape of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onegraph.api.chat import THINKING
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.params import MAX_LOGPROBS
from onegraph.serve.text import PARTIAL, TokenText
from onegraph.serve.tools import Tools, parse_call, parse_tools

Json = Any  # what json.loads gives
MAX_CHOICES, MAX_STOPS, MAX_STOP = 128, 16, 1024  # answers and stop strings of a request, characters of one
MAX_DIGITS = 1000  # of an integer
MAX_SEED = (1 << 63) - 1 - MAX_CHOICES  # the i-th answer draws with seed + i


class APIError(Exception):
    """What the client did wrong, as OpenAI's API says it: an HTTP status, one sentence, the field, a code."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> Json:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def overloaded() -> APIError:
    return APIError("too many requests wait already; try again in a second", status=429, code="rate_limit_exceeded")


@dataclass(frozen=True)
class CompletionRequest:
    """A request: `prompts` of /v1/completions, texts or token ids, or the `messages` of a chat.

    sampling: fields of SamplingParams. usage: whether a stream ends with token counts. tools: that the answer may call.
    thinking: as `ChatTemplate.render` takes it. ignore_eos: the model's own stop tokens end nothing. stop_ids: tokens
    that end the answer besides. keep: of longer prompts the last so many tokens; None for all.
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
    thinking: bool | None = None
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    keep: int | None = None

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
    fields = _object(body)
    if "best_of" in fields and _equal(fields["best_of"], fields.get("n", 1)):
        del fields["best_of"]
    for name in [name for name in fields if name in _OFF or name in _IGNORED]:
        if name in _OFF and not any(_equal(fields[name], off) for off in _OFF[name]):
            raise APIError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
        del fields[name]
    _check(fields, {**_FIELDS, **(_CHAT if chat else _COMPLETION)})
    return _asked(fields, chat)


def parse_tokenize(body: bytes) -> tuple[str | None, CompletionRequest, bool]:
    """The model that a body of /tokenize names, its text or conversation, and whether the tokenizer adds its special
    tokens. Raises APIError."""
    fields = _object(body)
    for name in ("add_generation_prompt", "return_token_strs", "continue_final_message"):
        if _equal(fields.get(name, name == "add_generation_prompt"), name == "add_generation_prompt"):
            fields.pop(name, None)
    _check(fields, _TOKENIZE)
    chat = "messages" in fields
    if chat == ("prompt" in fields):
        raise APIError("give either prompt or messages", param="messages" if chat else "prompt")
    model, special = fields.pop("model", None), fields.pop("add_special_tokens", True)
    return model, _asked({"model": model or "", **fields}, chat), special


def parse_detokenize(body: bytes) -> tuple[str | None, list[int]]:
    """The model that a body of /detokenize names, and its tokens. Raises APIError."""
    fields = _object(body)
    _check(fields, _DETOKENIZE)
    if "tokens" not in fields:
        raise APIError("tokens is missing", param="tokens")
    return fields.get("model"), fields["tokens"]


def _object(body: bytes) -> dict[str, Json]:
    """A JSON object without its fields that are null."""
    try:
        fields = json.loads(body, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise APIError(f"the body is not JSON: {what}") from None
    if not isinstance(fields, dict):
        raise APIError(f"the body is {_shown(fields)}; a JSON object is expected")
    return {name: value for name, value in fields.items() if value is not None}


def _check(fields: Mapping[str, Json], known: Mapping[str, _Check]) -> None:
    if unknown := sorted(fields.keys() - known.keys()):
        raise APIError(f"{unknown[0]} is not known here; allowed are {', '.join(sorted(known))}", param=unknown[0])
    for name, value in fields.items():
        fine, allowed = known[name]
        if not fine(value):
            raise APIError(f"{name}: got {_shown(value)}; allowed is {allowed}", param=name)


def chat_logprobs(tokens: Sequence[TokenText]) -> Json:
    """As a choice of a chat has them: a part of a character is its bytes, as in \\xe2\\x82."""

    def one(told: TokenText) -> Json:
        text, data = told.text, told.text.encode()
        if PARTIAL in text and told.data is None:
            return {"token": text, "logprob": told.logprob, "bytes": None}
        if told.data is not None:
            text, data = told.data.decode("utf-8", "backslashreplace"), told.data
        return {"token": text, "logprob": told.logprob, "bytes": list(data)}

    return {"content": [one(told) | {"top_logprobs": list(map(one, told.top))} for told in tokens]}


def completion_logprobs(tokens: Sequence[TokenText]) -> Json:
    """As a choice of /v1/completions has them: the drawn token is among the likeliest, under the name it has beside."""
    named = [_named(told) for told in tokens]
    return {
        "tokens": [names[told.token] for names, told in zip(named, tokens, strict=True)],
        "token_logprobs": [told.logprob for told in tokens],
        "top_logprobs": [
            {names[each.token]: each.logprob for each in (*told.top, told)}
            for names, told in zip(named, tokens, strict=True)
        ],
        "text_offset": [told.offset for told in tokens],
    }


def _named(told: TokenText) -> dict[int, str]:
    """A name of its own for a token and for each of the likeliest in its place: the text, where no other has it and it
    is no part of a character."""
    names: dict[int, str] = {}
    for each in (told, *told.top):
        if each.token not in names:
            clear = PARTIAL not in each.text and each.text not in names.values()
            names[each.token] = each.text if clear else f"token_id:{each.token}"
    return names


def _asked(fields: dict[str, Json], chat: bool) -> CompletionRequest:
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
    return CompletionRequest(
        model=fields["model"],
        prompts=prompt if prompt and isinstance(prompt, list) and not _is_int(prompt[0]) else [prompt],
        messages=[_message(i, message) for i, message in enumerate(fields["messages"])] if chat else None,
        sampling=sampling,
        max_tokens=length,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=fields.get("stream", False),
        usage=bool(options.get("include_usage")),
        tools=tools,
        thinking=next(iter(fields.get("chat_template_kwargs", {}).values()), None),
        ignore_eos=fields.get("ignore_eos", False),
        stop_ids=tuple(fields.get("stop_token_ids", ())),
        keep=fields.get("truncate_prompt_tokens"),
    )


def _tools(fields: dict[str, Json]) -> Tools | None:
    try:
        return parse_tools(fields)
    except ArgumentError as error:
        raise APIError(str(error), param=error.field) from None


def _message(at: int, message: Json) -> dict[str, Any]:
    """Role and text, and what belongs to tools; what an SDK's own message objects bring along is null and left out."""
    where = f"messages[{at}]"
    if not isinstance(message, dict):
        raise APIError(f"{where}: got {_shown(message)}; an object with role and content is expected", param="messages")
    message = {name: value for name, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise APIError(f"{where}: role is {_shown(role)}; allowed are {', '.join(_ROLES)}", param="messages")
    calls = message.get("tool_calls", []) if role == "assistant" else []
    if message.get("annotations") == []:  # of OpenAI's own answers
        del message["annotations"]
    if unknown := sorted(message.keys() - {"role", "content", "name", *_ROLES[role]}):
        raise APIError(f"{where}: {unknown[0]} is not supported; leave it out", param="messages")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [] if calls else content
    for i, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise APIError(
                f"{where}.content[{i}] has type {_shown(part['type'])}; this server takes text only",
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
        raise APIError(f"{where}: tool_calls is {_shown(calls)}; a list of calls is expected", param="messages")
    try:
        return [parse_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    except ValueError as error:
        raise APIError(str(error), param="messages") from None


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; allowed are {MAX_DIGITS}")
    return int(text)


def _equal(a: Json, b: Json) -> bool:
    """As JSON has it, where 0 is not false."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _is_int(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e308 < value < 1e308


def _is_ids(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_int, value))


def _is_prompt(value: Json) -> bool:
    if isinstance(value, str) or _is_ids(value):
        return True
    several = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    return several and all(isinstance(each, str) or _is_ids(each) for each in value)


def _is_stop(value: Json) -> bool:
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= MAX_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP for stop in stops)
    )


def _is_format(value: Json) -> bool:
    if not isinstance(value, dict):
        return False
    if value.get("type") != "json_schema":
        return value in ({"type": "text"}, {"type": "json_object"})
    return isinstance(value.get("json_schema"), dict) and isinstance(value["json_schema"].get("schema"), dict)


_GUIDED: Mapping[str, Callable[[Json], bool]] = {
    "json": lambda v: isinstance(v, dict | str),
    "regex": lambda v: isinstance(v, str),
    "choice": lambda v: isinstance(v, list) and 0 < len(v) <= 1000 and all(isinstance(each, str) for each in v),
}


def _is_guided(value: Json) -> bool:
    return (
        isinstance(value, dict)
        and len(value) == 1
        and all(name in _GUIDED and _GUIDED[name](each) for name, each in value.items())
    )


def _is_thinking(value: Json) -> bool:
    return isinstance(value, dict) and len(value) == 1 and value.keys() <= {*THINKING} and _is_flag(*value.values())


def _is_flag(value: Json) -> bool:
    return isinstance(value, bool)


def _sampling(fields: dict[str, Json], chat: bool) -> dict[str, Json]:
    """Fields of SamplingParams."""
    found = {name: fields[name] for name in _SAMPLING if name in fields}
    if found.get("top_k") == -1:  # vLLM's word for all tokens
        found["top_k"] = 0
    if chat and fields.get("logprobs"):
        found["logprobs"] = fields.get("top_logprobs", 0)
    elif chat and fields.get("top_logprobs"):
        raise APIError("top_logprobs is for logprobs: true alone", param="top_logprobs")
    elif not chat and "logprobs" in fields:
        found["logprobs"] = fields["logprobs"]
    wanted = fields.get("response_format", {"type": "text"})
    if wanted["type"] != "text":
        found["json_schema"] = wanted["json_schema"]["schema"] if "json_schema" in wanted else {"type": "object"}
    guided = [(name, fields[f"guided_{name}"], f"guided_{name}") for name in _GUIDED if f"guided_{name}" in fields]
    guided += [(name, value, "structured_outputs") for name, value in fields.get("structured_outputs", {}).items()]
    for name, value, where in guided:
        if "json_schema" in found or "regex" in found:
            raise APIError(f"{where}: the request constrains the answer in another way too; give one", param=where)
        if name == "choice":
            value = "|".join(map(re.escape, value))
        found["json_schema" if name == "json" else "regex"] = value
    return found


def _shown(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."


_Check = tuple[Callable[[Json], bool], str]
_COUNT: _Check = (lambda v: _is_int(v) and 1 <= v < 1 << 31, "a whole number from 1 to 2147483647")
_NUMBER: _Check = (_is_number, "a number")
_FLAG: _Check = (_is_flag, "true or false")
_FIELDS: Mapping[str, _Check] = {
    "model": (lambda v: isinstance(v, str), "a text"),
    "max_tokens": _COUNT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "response_format": (_is_format, "an object with type text, json_object or json_schema (and its schema)"),
    "regex": (lambda v: isinstance(v, str), "a regular expression"),
    "top_k": (lambda v: _is_int(v) and -1 <= v < 1 << 31, "a whole number up to 2147483647, 0 or -1 for all tokens"),
    "seed": (lambda v: _is_int(v) and -(1 << 63) <= v <= MAX_SEED, f"a whole number from {-(1 << 63)} to {MAX_SEED}"),
    "ignore_eos": _FLAG,
    "stop_token_ids": (lambda v: isinstance(v, list) and len(v) <= 64 and all(map(_is_int, v)), "up to 64 token ids"),
    "truncate_prompt_tokens": _COUNT,
    "guided_json": (_GUIDED["json"], "a JSON schema"),
    "guided_regex": (_GUIDED["regex"], "a regular expression"),
    "guided_choice": (_GUIDED["choice"], "a list of up to 1000 texts"),
    "structured_outputs": (_is_guided, "an object with json, regex or choice"),
    "stop": (_is_stop, f"a text, or up to {MAX_STOPS} texts of at most {MAX_STOP} characters"),
    "n": (lambda v: _is_int(v) and 1 <= v <= MAX_CHOICES, f"1 to {MAX_CHOICES}"),
    "stream": _FLAG,
    "stream_options": (lambda v: isinstance(v, dict), "an object"),
}
_TOP: _Check = (lambda v: _is_int(v) and 0 <= v <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
_COMPLETION: Mapping[str, _Check] = {
    "prompt": (_is_prompt, f"a text or a list of token ids, or a list of up to {MAX_CHOICES} of those"),
    "logprobs": _TOP,
}
_CHAT: Mapping[str, _Check] = {
    "messages": (lambda v: isinstance(v, list) and len(v) > 0, "a list of messages"),
    "max_completion_tokens": _COUNT,
    "logprobs": _FLAG,
    "top_logprobs": _TOP,
    "chat_template_kwargs": (_is_thinking, "an object with enable_thinking or thinking, true or false"),
    "tools": (lambda v: isinstance(v, list), "a list of tools"),
    "tool_choice": (lambda v: isinstance(v, str | dict), "none, auto, required, or an object that names a function"),
    "parallel_tool_calls": _FLAG,
}
_TOKENIZE: Mapping[str, _Check] = {
    "model": _FIELDS["model"],
    "prompt": (lambda v: isinstance(v, str), "a text"),
    "add_special_tokens": _FLAG,
    **{name: _CHAT[name] for name in ("messages", "tools", "chat_template_kwargs")},
}
_DETOKENIZE: Mapping[str, _Check] = {
    "model": _FIELDS["model"],
    "tokens": (lambda v: isinstance(v, list) and all(_is_int(i) and 0 <= i < 1 << 31 for i in v), "token ids"),
}
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES, "seed", "n", "regex")
_THOUGHTS = ("reasoning_content", "reasoning")  # of other servers' answers; models are not shown their old thoughts
# Besides content and name
_ROLES: Mapping[str, tuple[str, ...]] = {
    "system": (), "developer": (), "user": (), "assistant": ("tool_calls", *_THOUGHTS), "tool": ("tool_call_id",),
}  # fmt: skip
# What is not supported, and the values that ask for nothing; clients send those of their own accord.
_OFF: Mapping[str, tuple[Json, ...]] = {
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "prediction": (),
    "modalities": (["text"],),
    "store": (False,),
    # vLLM's and others'
    "min_tokens": (0,),
    "priority": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_logprobs": (False,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "repeat_penalty": (1,),
}
_IGNORED = {
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "cache_salt",
    "cache_prompt",
}  # fmt: skip
