"""Grammars of calls: they allow what models of each form write, and no other functions, arguments or schemas."""

from __future__ import annotations

import re
from typing import Any

import pytest
from serve.call_texts import CALLS, CASES, CITY, FUNCTIONS, TOOLS

from onegraph.engine.arguments import ArgumentError
from onegraph.serve import forms
from onegraph.serve.call_grammar import CallGrammar
from onegraph.serve.calls import AnswerReader
from onegraph.serve.forms import THOUGHTS

llguidance = pytest.importorskip("llguidance")
HELD = [name for name, case in CASES.items() if case.form.arguments != "dict"]
HARMONY, *_, THINK = THOUGHTS


class Bytes:
    """A vocabulary of bytes, the end, and control tokens."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self, control: tuple[str, ...]) -> None:
        self.ids = {name: 257 + i for i, name in enumerate(control)}
        self.special_token_ids = list(range(256, 257 + len(control)))
        self.tokens = [*(bytes([i]) for i in range(256)), b"<end>", *(name.encode() for name in control)]
        self._split = re.compile(f"({'|'.join(map(re.escape, sorted(control, key=len, reverse=True))) or '(?!)'})")

    def __call__(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise TypeError
        return list(text.encode())

    def encode(self, text: str) -> list[int]:
        parts = self._split.split(text)
        return [i for part in parts for i in ([self.ids[part]] if part in self.ids else part.encode())]

    def allows(self, grammar: str | None, text: str) -> bool:
        """The whole text, and the end behind it."""
        assert grammar is not None
        tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.encode(text)
        return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def writer(name: str) -> tuple[CallGrammar, Bytes]:
    case = CASES[name]
    vocabulary = Bytes(case.control)
    return CallGrammar(case.form, vocabulary.ids, HARMONY if name == "harmony" else THINK), vocabulary


def calls_of(name: str) -> str:
    """Without the text ahead of them, and without Llama's mark, which is not written where calls are forced."""
    return CASES[name].text.removeprefix(CASES[name].said).lstrip("\n").removeprefix("<|python_tag|>")


@pytest.mark.parametrize("name", HELD)
def test_forced_calls_are_those_of_the_form(name: str) -> None:
    write, vocabulary = writer(name)
    grammar = write.forced(FUNCTIONS, several=True, opened=False, thinking=False)
    text = calls_of(name)
    assert vocabulary.allows(grammar, text)
    for wrong in (text.replace("get_weather", "get_water"), text.replace("city", "town"), f"So: {text}", "No."):
        assert not vocabulary.allows(grammar, wrong), wrong
    if not CASES[name].one:
        one = writer(name)[0].forced(FUNCTIONS, several=False, opened=False, thinking=False)
        assert not vocabulary.allows(one, text)


@pytest.mark.parametrize("name", HELD)
def test_strict_calls_hold_the_schema_and_text_is_free(name: str) -> None:
    write, vocabulary = writer(name)
    grammar = write.allowed(FUNCTIONS, several=True)
    text = CASES[name].text
    assert vocabulary.allows(grammar, text)
    assert vocabulary.allows(grammar, "Nothing to do < here.")
    for wrong in (text.replace("get_weather", "get_water"), text.replace("city", "town")):
        assert not vocabulary.allows(grammar, wrong), wrong


@pytest.mark.parametrize("name", ["hermes", "mistral", "harmony"])
def test_a_thought_may_come_first(name: str) -> None:
    text, (write, vocabulary) = calls_of(name), writer(name)
    grammar = write.forced(FUNCTIONS, several=True, opened=False, thinking=True)
    first = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
        if name == "harmony"
        else "<think>\nHm\n</think>\n\n"
    )
    assert vocabulary.allows(grammar, first + text)
    assert vocabulary.allows(grammar, text)
    if name != "harmony":
        opened = writer(name)[0].forced(FUNCTIONS, several=True, opened=True, thinking=True)
        assert vocabulary.allows(opened, f"Hm\n</think>\n\n{text}")
        assert not vocabulary.allows(opened, text)


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        ({"json_schema": {"enum": [1]}}, "1", "2"),
        ({"json_schema": '{"type": "object", "additionalProperties": false}'}, "{}", "[]"),
        ({"regex": "a/b|c"}, "a/b", "a"),
        ({"regex": r"https:\/\/x\\"}, "https://x\\", r"https:\x2f\x2fx"),
        ({"regex": r"[\/]\\/"}, "/\\/", "\\/"),
        ({"regex": "a\n\\\nb"}, "a\n\nb", r"a\nb"),
    ],
)
def test_an_answer_is_constrained_behind_its_thought(constraint: Any, right: str, wrong: str) -> None:
    write, vocabulary = writer("hermes")
    grammar = write.after_thought(constraint)
    assert vocabulary.allows(grammar, f"Hm\n</think>\n\n{right}")
    assert not vocabulary.allows(grammar, f"Hm\n</think>\n\n{wrong}")
    assert not vocabulary.allows(grammar, right)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"type": "object", "properties": {"a": {"type": ["string", "integer"]}}},
        {"type": "object", "properties": {"a": {}}},
        {"anyOf": [CITY, {"type": "object", "properties": {"a": {"const": "x"}}}]},
        {"type": "object", "properties": {"a": CITY | {"type": "string"}}, "$defs": {"b": {"title": "b" * (1 << 20)}}},
    ],
)
def test_what_fields_cannot_hold_exactly_is_left_to_json(schema: Any) -> None:
    functions = [{"name": "f", "parameters": schema}]
    how: Any = {"several": True, "opened": False, "thinking": False}
    assert CallGrammar(forms.QWEN_CODER, {}).forced(functions, **how) is None
    assert CallGrammar(forms.GEMMA, {}).forced(FUNCTIONS, **how) is None
    grammar = CallGrammar(forms.BARE, {}).forced(functions, **how)
    assert Bytes(()).allows(grammar, '{"name": "f", "arguments": {"a": "x"}}')


def test_texts_of_an_enumeration_between_marks() -> None:
    write, vocabulary = writer("qwen_coder")
    grammar = write.forced(FUNCTIONS, several=False, opened=False, thinking=False)
    text = calls_of("qwen_coder").split("\n<tool_call>")[0].split("<parameter=tags>")[0]
    unit = "<parameter=unit>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert vocabulary.allows(grammar, text + unit.format("F"))
    assert not vocabulary.allows(grammar, text + unit.format("K"))


def test_shared_definitions_reach_a_field() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/P"}}, "required": ["a"],
              "$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                              "additionalProperties": False}}}  # fmt: skip
    write = CallGrammar(forms.MINIMAX, {})
    grammar = write.forced([{"name": "f", "parameters": schema}], several=False, opened=False, thinking=False)
    text = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{}</parameter>\n</invoke></minimax:tool_call>'
    assert Bytes(()).allows(grammar, text.format('{"x": 1}'))
    assert not Bytes(()).allows(grammar, text.format('{"y": 1}'))


@pytest.mark.parametrize("name", HELD)
def test_what_is_allowed_is_read_as_the_calls(name: str) -> None:
    parts = AnswerReader(CASES[name].form, TOOLS).push(calls_of(name), final=True)
    assert [part.name for part in parts.calls if part.name] == [each for each, _ in CALLS][
        : 1 if CASES[name].one else 2
    ]


def test_a_schema_that_is_nested_too_deeply_is_refused_behind_a_thought() -> None:
    """Texts of schemas are read here, and Python reads about a thousand levels."""
    write = CallGrammar(forms.HERMES, {}, THINK)
    deep = '{"properties": {"a": ' * 5000 + "{}" + "}}" * 5000
    with pytest.raises(ArgumentError, match="json_schema: it is nested too deeply; give a simpler one") as refused:
        write.after_thought({"json_schema": deep})
    assert refused.value.field == "json_schema"
    assert '%json {"type": "integer"' in write.after_thought({"json_schema": '{"type": "integer"}'})
