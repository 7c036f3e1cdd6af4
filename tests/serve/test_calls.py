"""Answers of every form -> content, thoughts and calls, wherever the text is cut; and what is no call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from serve.call_texts import CALLS, CASES, FUNCTIONS, TOOLS

from onegraph.serve import forms
from onegraph.serve.calls import AnswerReader
from onegraph.serve.forms import THOUGHTS, CallForm, Thought
from onegraph.serve.tools import Tools

HARMONY, GEMMA_THOUGHT, MAGISTRAL, THINK = THOUGHTS
Found = tuple[str, str, list[tuple[str, str]]]


def read(reader: AnswerReader, text: str, cuts: Sequence[int] = ()) -> Found:
    """Content, thoughts, and the calls' names and arguments."""
    content, reasoning, calls = "", "", dict[int, list[str]]()
    bounds = [0, *cuts, len(text)]
    for i, (begin, end) in enumerate(pairwise(bounds)):
        parts = reader.push(text[begin:end], final=i == len(bounds) - 2)
        content, reasoning = content + parts.content, reasoning + parts.reasoning
        for part in parts.calls:
            assert (part.name is None) == (part.index in calls)
            assert (part.id is None) == (part.name is None)
            call = calls.setdefault(part.index, [part.name or "", ""])
            call[1] += part.arguments
    assert list(calls) == list(range(len(calls)))
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


def read_all(
    form: CallForm | None, text: str, tools: Tools | None = TOOLS, thought: Thought | None = None, opened: bool = False
) -> Found:
    """The same for every cut in two, and in single characters."""
    found = read(AnswerReader(form, tools, thought, opened), text)
    for cuts in [[i] for i in range(1, len(text))] + [list(range(1, len(text)))]:
        assert read(AnswerReader(form, tools, thought, opened), text, cuts) == found, cuts
    return found


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_wherever_the_text_is_cut(name: str) -> None:
    case = CASES[name]
    content, reasoning, calls = read_all(case.form, case.text)
    assert (content, reasoning) == (case.said, "")
    assert [(each, json.loads(arguments)) for each, arguments in calls] == (CALLS[:1] if case.one else CALLS)


@pytest.mark.parametrize("name", CASES)
def test_arguments_come_piece_by_piece(name: str) -> None:
    case = CASES[name]
    reader = AnswerReader(case.form, TOOLS)
    pieces = [part for c in case.text for part in reader.push(c, final=False).calls if part.index == 0]
    assert (pieces[0].name, pieces[0].arguments) == ("get_weather", "")
    assert len(pieces) > 10


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_ends_within_a_call_keeps_what_there_is(name: str) -> None:
    """In front of the arguments it is content, behind their beginning a call with a part of them."""
    case = CASES[name]
    whole = read(AnswerReader(case.form, TOOLS), case.text)[2][0][1]
    for end in range(1, len(case.text)):
        content, _, calls = read(AnswerReader(case.form, TOOLS), case.text[:end])
        assert content[: len(case.said)] == case.said[: len(content)]
        assert all(whole.startswith(arguments) for _, arguments in calls[:1])


HERMES, LLAMA, CODER, GLM, KIMI = forms.HERMES, forms.LLAMA, forms.QWEN_CODER, forms.GLM, forms.KIMI
TEXT = "<tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, "no call <tool", "no call <tool", []),
        (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (HERMES, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "now"', '<tool_call>{"name": "now"', []),
        (HERMES, "<tool_call>call now</tool_call>", "<tool_call>call now</tool_call>", []),
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", [("now", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name":"now","arguments":{"a":"</tool_call>}"}}', "", [("now", '{"a":"</tool_call>}"}')]),
        (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call> end', "end", [("other", "{}")]),
        # Arguments that are no JSON are the caller's to see
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": yes}}</tool_call>', "", [("now", '{"a": yes}')]),
        (HERMES, f'a {TEXT} b <tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>',
         f"a {TEXT} b ", [("now", "{}")]),
        (LLAMA, '\n{"name": "now", "parameters": {"a": 1}}', "", [("now", '{"a": 1}')]),
        (LLAMA, '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        (LLAMA, 'Say {"name": "now", "parameters": {}}', 'Say {"name": "now", "parameters": {}}', []),
        (LLAMA, '{"answer": 3}', '{"answer": 3}', []),
        (CODER, "<tool_call>\n<function=>\n</tool_call>", "<tool_call>\n<function=>\n</tool_call>", []),
        (CODER, "<function=now>\n</function>", "", [("now", "{}")]),  # without its first mark
        (CODER, "<tool_call><function=get_weather><parameter=days>x</parameter><parameter=unit>F</parameter>"
         "<parameter=new>3</parameter></function></tool_call>", "",
         [("get_weather", '{"days": "x", "unit": "F", "new": 3}')]),
        (GLM, "<tool_call>now</tool_call> Done", "Done", [("now", "{}")]),
        (GLM, "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", []),
        (KIMI, "<|tool_calls_section_begin|>now<|tool_calls_section_end|>", "now", []),
        (forms.MISTRAL, '[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{"a": 1}', "", [("now", '{"a": 1}')]),
        (forms.MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        (forms.MISTRAL_LIST, '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "123456789"}]', "", [("now", "{}")]),
        (forms.HARMONY, " to=functions.now<|channel|>commentary json<|message|>{}", "", [("now", "{}")]),
        (forms.HARMONY, "<|channel|>commentary<|message|>So.<|end|><|start|>assistant to=functions.now<|channel|>"
         "commentary json<|message|>{}", "So.", [("now", "{}")]),
        (HERMES, '\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", [("now", "{}")]),
        (forms.GEMMA, "<|tool_call>call:now{a:{b:[1.5,true,null,x y]}}", "",
         [("now", '{"a":{"b":[1.5,true,null,"x y"]}}')]),
    ],
)  # fmt: skip
def test_calls_that_are_odd_or_none(form: CallForm, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read_all(form, text) == (content, "", calls)


def test_parallel_calls_may_be_forbidden() -> None:
    one = Tools(TOOLS.defined, (), False, False, False)
    assert len(read_all(HERMES, CASES["hermes"].text, one)[2]) == 1


@pytest.mark.parametrize(
    ("thought", "opened", "text", "reasoning", "content"),
    [
        (THINK, False, "<think>\nHm, 1<2.\n</think>\n\nThree.", "Hm, 1<2.", "Three."),
        (THINK, True, "Hm\n\nso\n</think>\n\nThree.", "Hm\n\nso", "Three."),
        (THINK, True, "Hm, and", "Hm, and", ""),
        (THINK, False, "\n<think>\n\n</think>\n\nThree.", "", "Three."),
        (THINK, False, " Three <think>", "", " Three <think>"),
        (MAGISTRAL, False, "[THINK]a[/THINK]b", "a", "b"),
        (GEMMA_THOUGHT, False, "<|channel>thought\na b<channel|>c", "a b", "c"),
    ],
)
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_thoughts_are_apart(
    thought: Thought, opened: bool, text: str, reasoning: str, content: str, tools: Tools | None
) -> None:
    assert read_all(HERMES, text, tools, thought, opened) == (content, reasoning, [])


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_channels_are_told_apart(tools: Tools | None) -> None:
    text = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>{}"
    final = text.format("final<|message|>Three.")
    assert read_all(forms.HARMONY, final, tools, HARMONY) == ("Three.", "So.", [])
    call = text.format("commentary<|message|>Look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>")
    assert read_all(forms.HARMONY, call, tools, HARMONY) == ("Look.", "So.Hm.", [])
    call = text.format("commentary to=functions.now <|constrain|>json<|message|>{}")
    if tools is not None:
        assert read_all(forms.HARMONY, call, tools, HARMONY) == ("", "So.", [("now", "{}")])


def test_a_thought_and_then_calls() -> None:
    content, reasoning, calls = read_all(HERMES, "<think>\nHm\n</think>\n\n" + CASES["hermes"].text, TOOLS, THINK)
    assert (content, reasoning, len(calls)) == (CASES["hermes"].said, "Hm", 2)


def test_without_tools_marks_of_calls_are_text() -> None:
    text = CASES["hermes"].text
    assert read_all(HERMES, text, None, THINK) == (text, "", [])
    text = '{"name": "now", "parameters": {}}'
    assert read_all(LLAMA, text, None, THINK) == (text, "", [])


@pytest.mark.parametrize(
    ("schema", "value", "wanted"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"$ref": "#/$defs/T"}, "7", "7"),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "array"}, "[1,\n2]", [1, 2]),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "[1]", [1]),
    ],
)
def test_values_between_marks_have_the_type_of_the_schema(schema: Any, value: str, wanted: Any) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"T": {"type": "string"}}}
    tools = Tools(({"type": "function", "function": {"name": "f", "parameters": parameters}},), (), False, True, False)
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = read_all(CODER, text, tools)[2]
    assert json.loads(arguments) == {"a": wanted}


def test_functions_of_the_texts_have_their_schemas() -> None:
    assert [tool["function"] for tool in TOOLS.defined] == FUNCTIONS
