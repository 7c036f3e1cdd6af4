"""Every field of every endpoint, with every kind of JSON: a request is read, or refused with an APIError."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from onegraph.serve import messages, responses
from onegraph.serve.call_grammar import CallGrammar
from onegraph.serve.calls import AnswerReader
from onegraph.serve.errors import APIError
from onegraph.serve.forms import QWEN_CODER
from onegraph.serve.protocol import parse
from onegraph.serve.schemas import MAX_PARTS
from onegraph.serve.tools import Tools

VALUES: list[Any] = [
    None, [], {}, "", "a", 3, -1, 1.5, True, [[]], [{}], [None], {"a": 1}, {"type": "function"}, {"type": []},
    [{"type": []}], [{"type": "message"}], [{"type": "function_call"}], [{"type": "function_call_output"}],
    [{"type": "function", "name": []}], [{"name": "a", "input_schema": 3}], {"type": "tool", "name": []},
    [{"role": "user", "content": [{"type": "text", "text": 3}]}],
    [{"role": "user", "content": [{"type": "tool_result"}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": [], "name": {}, "input": []}]}],
    [{"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}],
    {"type": "json_schema"}, {"format": {"type": "json_schema"}}, {"format": []}, {"effort": []},
    {"type": "enabled", "budget_tokens": "a"},
]  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]
SAMPLING = ("model", "stop", "seed", "n", "logit_bias", "stream", "stream_options", "temperature", "user", "metadata")
CHAT = (
    "messages", "max_tokens", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs",
    "response_format", "guided_json", "guided_regex", "structured_outputs", "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
COMPLETION = (
    "prompt", "echo", "best_of", "logprobs", "suffix", "min_tokens", "stop_token_ids", "priority", "ignore_eos",
    "truncate_prompt_tokens", "skip_special_tokens", "min_p", "repetition_penalty",
)  # fmt: skip
MESSAGES = (
    "messages", "system", "max_tokens", "tools", "tool_choice", "thinking", "stop_sequences", "top_k", "top_p",
    "cache_control", "service_tier", "container", "output_config",
)  # fmt: skip


@pytest.mark.parametrize(
    ("read", "fine", "names"),
    [
        (partial(parse, chat=True), {"model": "m", "messages": HI}, CHAT),
        (partial(parse, chat=False), {"model": "m", "prompt": "Hi"}, COMPLETION),
        (messages.parse, {"model": "m", "max_tokens": 5, "messages": HI}, MESSAGES),
        (lambda body: responses.parse(body, responses.Conversations()), {"model": "m", "input": "Hi"}, responses.OWN),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
def test_a_field_of_any_kind_is_read_or_refused(
    read: Callable[[bytes], object], fine: dict[str, Any], names: tuple[str, ...]
) -> None:
    read(json.dumps(fine).encode())
    statuses = []
    for name in (*names, *SAMPLING):
        for value in VALUES:
            try:
                read(json.dumps(fine | {name: value}).encode())
            except APIError as error:
                statuses.append(error.status)
    assert max(statuses) < 500
    assert len(statuses) > len(VALUES) * len(names) // 2


KEYWORDS = (
    "type", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf", "items", "additionalProperties",
    "$ref", "$defs", "definitions", "title", "default",
)  # fmt: skip
SHAPES: list[Any] = [
    None, [], {}, "x", "string", "#/properties/a", "#/default", 5, True, [1], ["a"], [1, "b"], ["string", "null"],
    [None], {"a": 1}, {"a": {"enum": 5}}, [{"anyOf": 5}], {"a": {"$ref": "#/properties/a"}},
    [{"$ref": "#/properties/a"}] * 2,
]  # fmt: skip
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"


def tools_of(schema: dict[str, Any]) -> Tools:
    """As a request has them. Raises APIError."""
    function = {"name": "f", "parameters": schema, "strict": True}
    fields = {"model": "m", "messages": HI, "tools": [{"type": "function", "function": function}]}
    tools = parse(json.dumps(fields).encode(), chat=True).tools
    assert tools is not None
    return tools


def use(schema: dict[str, Any]) -> tuple[str | None, str]:
    """Grammar and arguments of a call whose values are between marks."""
    tools = tools_of(schema)
    grammar = CallGrammar(QWEN_CODER, {}).forced(
        [each["function"] for each in tools.defined], several=True, opened=False, thinking=False
    )
    return grammar, "".join(part.arguments for part in AnswerReader(QWEN_CODER, tools).push(CALL, final=True).calls)


def test_a_schema_of_any_kind_is_used_or_refused() -> None:
    used, refused, statuses = 0, set(), set()
    for name in KEYWORDS:
        for value in SHAPES:
            own: dict[str, Any] = {name: value}
            for schema in (
                own,
                {"type": "object", "properties": {"a": own}},
                {"type": "object", "properties": {"a": {"type": "string"} | own}},
                {"type": "object", "properties": {"a": {"$ref": "#/default"}}, "default": {"type": "string"} | own},
            ):
                try:
                    _, arguments = use(schema)
                    used += 1
                except APIError as error:
                    statuses.add((error.status, error.param))
                    refused.add(str(error).partition(" schema: ")[2].partition(":")[0])
                else:
                    assert json.loads(arguments)["a"] in (7, "7")
    assert refused == {*KEYWORDS} - {"const", "title", "default"}
    assert statuses == {(400, "tools")}
    assert used > len(KEYWORDS) * len(SHAPES)


@pytest.mark.timeout(20)
def test_a_schema_that_refers_to_itself_again_and_again_is_read_in_no_time() -> None:
    def follow(*names: str) -> list[Any]:
        return [{"$ref": f"#/properties/{name}"} for name in names]

    again = {"anyOf": follow("a", "a")}
    twice = {f"p{i}": {"anyOf": follow(f"p{i + 1}", f"p{i + 1}")} for i in range(60)} | {"p60": {"type": "string"}}
    wide = {"anyOf": [{"const": i} for i in range(MAX_PARTS + 1)]}
    for schema in ({"a": again}, {"a": twice["p0"]} | twice, {"a": wide}):
        grammar, arguments = use({"type": "object", "properties": schema})
        assert grammar is None
        assert json.loads(arguments) == {"a": "7" if len(schema) > 1 else 7}
