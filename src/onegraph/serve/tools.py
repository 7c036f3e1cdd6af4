"""Function calling: the tools of a request, how a chat template writes calls, and the calls in a model's text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onegraph.api.chat import ChatTemplate, TemplateError
from onegraph.api.completion import overlap
from onegraph.engine.arguments import ArgumentError

Json = Any  # what json.loads gives
MAX_TOOLS = 128
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}  # of a function without parameters
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class CallForm:
    """How a model writes that it calls a function: JSON with the name and `arguments`, between two tags or, without
    tags, as its whole answer."""

    arguments: str
    tags: tuple[str, str] | None = None


TAGGED = CallForm("arguments", ("<tool_call>", "</tool_call>"))  # Hermes, Qwen 2.5 and 3
BARE = CallForm("parameters")  # Llama 3.1 to 3.3
FORCED = CallForm("arguments")  # what `forced_schema` asks for


@dataclass(frozen=True)
class Tools:
    """`defined` as the request has them, in OpenAI's form. schema: what the answer must be where a call is forced.
    several: whether one answer may call more than once."""

    defined: tuple[dict[str, Json], ...]
    schema: dict[str, Json] | None
    several: bool

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.defined]


def parse_tools(fields: Mapping[str, Json]) -> Tools | None:
    """Of a request's `tools`, `tool_choice` and `parallel_tool_calls`; None where there are none to call.

    Raises ValueError that begins with the field's name.
    """
    tools, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ArgumentError("tools", f"tools: it is no list of at most {MAX_TOOLS} tools")
    for i, tool in enumerate(tools):
        _check_tool(f"tools[{i}]", tool, forced=choice not in ("auto", "none"))
    several = fields.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise ArgumentError("parallel_tool_calls", "parallel_tool_calls: allowed is true or false")
    if choice == "none" or (choice == "auto" and not tools):
        return None
    called = [tool["function"] for tool in tools]
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        called = [function for function in called if function["name"] == choice["function"].get("name")]
    elif choice not in ("auto", "required"):
        raise ArgumentError(
            "tool_choice", "tool_choice: allowed are none, auto, required and an object that names a function"
        )
    if not tools:
        raise ArgumentError(
            "tool_choice",
            "tool_choice: it asks for a call, and there are no tools; give some, or leave tool_choice out",
        )
    if not called:
        raise ArgumentError("tool_choice", "tool_choice: the function that it asks for is not in tools")
    return Tools(tuple(tools), None if choice == "auto" else forced_schema(called), several)


def _check_tool(where: str, tool: Json, *, forced: bool) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise ArgumentError("tools", f'{where}: an object with type "function" and a function is expected')
    if not isinstance(name := function.get("name"), str) or not _NAME.fullmatch(name):
        raise ArgumentError("tools", f"{where}: function.name is not a name of 1 to 64 letters, digits, _, - and .")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ArgumentError("tools", f"{where}: function.parameters is not a JSON schema")
    if function.get("strict") and not forced:
        raise ArgumentError(
            "tools",
            f"{where}: strict holds only where tool_choice is required or names a function; leave it out, or set that",
        )


def forced_schema(functions: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """What a call of one of these functions is as JSON."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or NO_ARGUMENTS,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def parse_call(where: str, call: Json) -> dict[str, Json]:
    """A call in a message of the assistant's, as templates take it: arguments are an object. Raises ValueError."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: an object with id, type and a function of name and arguments is expected")
    try:
        text = function.get("arguments", "missing")
        arguments = {} if text in ("", None) else json.loads(text)  # "" and null: of a function without parameters
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: function.arguments is not the JSON text of an object")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def find_form(template: ChatTemplate | None) -> CallForm | None:
    """How the model of a template calls functions, by what the template makes of a call; None where it knows no tools,
    or writes calls in another form."""
    word = "xprobe"
    function = {"name": word, "description": "xabout", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call00000", "type": "function", "function": {"name": word, "arguments": {"xkey": "xvalue"}}}
    ask = {"role": "user", "content": "Hi"}
    turns: list[dict[str, Json]] = [ask, {"role": "assistant", "content": "", "tool_calls": [call]}, ask]
    try:
        text = "" if template is None else template.render(turns, tools=[{"type": "function", "function": function}])
    except TemplateError:
        return None
    if "xabout" not in text:
        return None
    wanted = [{"name": word, "arguments": {"xkey": "xvalue"}}]
    return next((form for form in (TAGGED, BARE) if wanted in [find_calls(form, part) for part in _parts(text)]), None)


def _parts(text: str) -> list[str]:
    """What may be one call, or the whole answer of one, in a rendered conversation."""
    return [*re.findall(r"<tool_call>.*?</tool_call>", text, re.DOTALL), *re.findall(r"\{\"name\".*\}\}", text)]


def find_calls(form: CallForm, text: str) -> list[dict[str, Json]] | None:
    """The calls that an answer, or its end from the first tag on, consists of: name and arguments of each. None where
    it is anything else."""
    if form.tags is None:
        found = [_call(form, text)]
    else:
        begin, end = map(re.escape, form.tags)
        found = [_call(form, part) for part in re.findall(f"{begin}(.*?){end}", text, re.DOTALL)]
        if re.sub(f"{begin}.*?{end}", "", text, flags=re.DOTALL).strip():
            return None
    calls = [call for call in found if call is not None]
    return calls if calls and len(calls) == len(found) else None


def _call(form: CallForm, text: str) -> dict[str, Json] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get(form.arguments, {} if form.tags else None)
    return {"name": name, "arguments": arguments} if isinstance(arguments, dict) else None


class CallText:
    """Passes an answer's text on up to where calls may begin, and holds the rest back until it is whole."""

    def __init__(self, form: CallForm, tools: Tools) -> None:
        self._form, self._tools = form, tools
        self._held, self._passed = "", False

    def push(self, text: str, final: bool) -> tuple[str, list[dict[str, Json]]]:
        """The text that may be shown, and once all is there the calls, as OpenAI's `tool_calls` has them."""
        self._held += text
        at = self._begin()
        shown, self._held = self._held[:at], self._held[at:]
        self._passed |= bool(shown)
        if not final:
            return shown, []
        calls = find_calls(self._form, self._held) or []
        if not self._form.tags and not {call["name"] for call in calls} <= {*self._tools.names}:
            calls = []  # JSON that an answer is by chance
        if not calls:
            return shown + self._held, []
        return shown, [_told(call) for call in calls[: None if self._tools.several else 1]]

    def _begin(self) -> int:
        """Where in the text that is held a call begins or may begin."""
        if not self._form.tags:
            return 0 if not self._passed and self._held.lstrip()[:1] in ("", "{") else len(self._held)
        tag = self._form.tags[0]
        at = self._held.find(tag)
        return at if at >= 0 else len(self._held) - overlap(self._held, tag)


def _told(call: Mapping[str, Json]) -> dict[str, Json]:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
