"""Function calling: the tools of a request, and calls in its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onegraph.engine.arguments import ArgumentError
from onegraph.serve.schemas import check_schema

Json = Any  # what json.loads gives
MAX_TOOLS = 128
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}  # of a function without parameters
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """`defined` as the request has them, in OpenAI's form. called: functions of which one must be called, none where
    the model decides; `required` says that it may be any, and several. several: whether one answer may call more than
    once. strict: whether calls must hold the schemas where the model decides."""

    defined: tuple[dict[str, Json], ...]
    called: tuple[dict[str, Json], ...]
    required: bool
    several: bool
    strict: bool

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
        _check_tool(f"tools[{i}]", tool)
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
        raise ArgumentError("tool_choice", "tool_choice: the function that it names is not in tools; add it there")
    strict = any(tool["function"].get("strict") for tool in tools)
    return Tools(tuple(tools), () if choice == "auto" else tuple(called), choice == "required", several, strict)


def _check_tool(where: str, tool: Json) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise ArgumentError("tools", f'{where}: an object with type "function" and a function is expected')
    if not isinstance(name := function.get("name"), str) or not _NAME.fullmatch(name):
        raise ArgumentError("tools", f"{where}: function.name is not a name of 1 to 64 letters, digits, _, - and .")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ArgumentError("tools", f"{where}: function.parameters is not a JSON schema")
    try:
        check_schema(function.get("parameters") or {})
    except ValueError as error:
        raise ArgumentError("tools", f"{where}: function.parameters is not a JSON schema: {error}") from None
    if not isinstance(function.get("strict") or False, bool):
        raise ArgumentError("tools", f"{where}: function.strict is neither true nor false")


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
