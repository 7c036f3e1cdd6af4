"""How a model calls and thinks follows from its chat template; other templates get tools as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serve.call_texts import CALLS, CASES, FUNCTIONS, TOOLS

from fuzz import tiny
from onegraph.api.chat import ChatTemplate
from onegraph.api.sandbox import Sandbox
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.arguments import ArgumentError
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve import forms
from onegraph.serve.calls import AnswerReader
from onegraph.serve.dialect import Dialect, find_form
from onegraph.serve.tools import Tools

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
ASK = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def cage() -> Sandbox:
    return Sandbox("templates", 1 << 30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with Checkpoint.open(tiny.write_model(tmp_path_factory.mktemp("dialect") / "tiny")) as checkpoint:
        return Tokenizer(checkpoint)


def template(source: str, cage: Sandbox) -> ChatTemplate:
    """One process renders them all."""
    made = ChatTemplate(source, {})
    made._cage = cage
    return made


def dialect(source: str, tokenizer: Tokenizer, cage: Sandbox, **control: int) -> Dialect:
    tokenizer = tokenizer.copy()
    tokenizer.template = template(source, cage)
    tokenizer._special = tokenizer._special | control
    return Dialect(tokenizer)


@pytest.mark.parametrize("name", CASES)
def test_a_form_is_known_by_what_the_template_makes_of_a_call(name: str, cage: Sandbox) -> None:
    assert find_form(template(CASES[name].template, cage)) is CASES[name].form


@pytest.mark.parametrize("name", [name for name in CASES if "gemma" not in name])
def test_calls_come_back_through_the_template(name: str, tokenizer: Tokenizer, cage: Sandbox) -> None:
    """What a client sends back of an answer is rendered as the model wrote it: it reads as the same calls."""
    case, how = CASES[name], dialect(CASES[name].template, tokenizer, cage)
    told = [
        {"id": f"call_{i}", "type": "function", "function": {"name": each, "arguments": arguments}}
        for i, (each, arguments) in enumerate(CALLS[:1] if case.one else CALLS)
    ]
    turns = [ASK, {"role": "assistant", "content": "", "tool_calls": told}]
    messages, tools = how.messages(turns, TOOLS)
    assert tools == TOOLS.defined
    text = template(case.template, cage).render(messages, tools=tools)
    answer = text.partition("<|im_start|>assistant\n" if case.form is not forms.DEEPSEEK_V4 else "</think>")[2]
    answer = answer.partition("<|im_end|>")[0]
    found: dict[int, list[str]] = {}
    for part in AnswerReader(case.form, TOOLS).push(answer, final=True).calls:
        found.setdefault(part.index, []).extend([part.name or "", part.arguments])
    assert [(each, json.loads("".join(rest))) for each, *rest in found.values()] == CALLS[: len(told)]


def test_ids_are_those_that_templates_insist_on(tokenizer: Tokenizer, cage: Sandbox) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {}}}
    turns = [ASK, {"role": "assistant", "content": "", "tool_calls": [call, call | {"id": "call_2"}]},
             {"role": "tool", "content": "12", "tool_call_id": "call_2"}]  # fmt: skip
    _, said, result = dialect(CASES["mistral_list"].template, tokenizer, cage).messages(turns, None)[0]
    assert [len(each["id"]) for each in said["tool_calls"]] == [9, 9]
    assert result["tool_call_id"] == said["tool_calls"][1]["id"] != said["tool_calls"][0]["id"]
    _, said, result = dialect(CASES["kimi"].template, tokenizer, cage).messages(turns, None)[0]
    assert [each["id"] for each in said["tool_calls"]] == ["functions.now:0", "functions.now:1"]
    assert result["tool_call_id"] == "functions.now:1"
    assert turns[1]["tool_calls"][0]["id"] == "call_1", "the request is not changed"


ODD = CASES["hermes"].template.replace('{"name"', "CALL").replace("tool_call>", "x>")  # a form that is not known
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN


@pytest.mark.parametrize("source", [PLAIN, ODD, NO_SYSTEM])
def test_other_templates_get_tools_as_text(source: str, tokenizer: Tokenizer, cage: Sandbox) -> None:
    how = dialect(source, tokenizer, cage)
    assert (how.form, how.native) == (forms.HERMES, False)
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    turns = [ASK, {"role": "assistant", "content": "So.", "tool_calls": [call]},
             {"role": "tool", "content": "12", "tool_call_id": "call_1"}]  # fmt: skip
    messages, tools = how.messages(turns, TOOLS)
    assert tools is None
    assert [m["role"] for m in messages] == [*([] if source is NO_SYSTEM else ["system"]), "user", "assistant", "user"]
    assert all(json.dumps(tool) in messages[0]["content"] for tool in TOOLS.defined)
    assert messages[0]["content"].endswith("\n\nHi") is (source is NO_SYSTEM)
    assert messages[-2]["content"] == 'So.\n<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    assert messages[-1]["content"] == "<tool_response>\n12\n</tool_response>"
    template(source, cage).render(messages)
    system = [{"role": "system", "content": "Be kind."}, ASK]
    if source is not NO_SYSTEM:
        assert how.messages(system, TOOLS)[0][0]["content"].startswith("Be kind.\n\nYou may call")
    assert how.messages([ASK], None) == ([ASK], None)


THINKS = PLAIN + "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("source", "thinking", "thought", "opened"),
    [
        (PLAIN, None, None, False),
        (THINKS, True, forms.THOUGHTS[3], True),
        (THINKS, False, forms.THOUGHTS[3], False),
        (PLAIN.replace("m.content", "m.content.split('</think>')[-1]"), None, forms.THOUGHTS[3], False),
        (PLAIN + "{# <|channel|>analysis #}", None, forms.THOUGHTS[0], False),
        (PLAIN + "[THINK]{# [/THINK] #}", None, forms.THOUGHTS[2], True),
    ],
)
def test_thoughts_are_known_by_the_template(
    source: str, thinking: bool | None, thought: Any, opened: bool, tokenizer: Tokenizer, cage: Sandbox
) -> None:
    form = dialect(source, tokenizer, cage).answer_form(None, thinking)
    assert (form.thought, form.opened, form.grammar) == (thought, opened, None)
    assert (form.reader() is None) is (thought is None)
    own = dialect(source, tokenizer, cage).answer_form(None, thinking, {"regex": "a"})
    assert (own.grammar is not None) is opened


def test_marks_that_are_control_tokens_stay_text(tokenizer: Tokenizer, cage: Sandbox) -> None:
    control = {"[TOOL_CALLS]": 300, "[ARGS]": 301, "[INST]": 302}
    how = dialect(CASES["mistral"].template, tokenizer, cage, **control)
    assert how.answer_form(TOOLS, None).keep == {300, 301}
    assert how.answer_form(None, None).keep == frozenset()


def test_forced_and_strict_calls_have_grammars(tokenizer: Tokenizer, cage: Sandbox) -> None:
    forced = Tools(TOOLS.defined, tuple(FUNCTIONS), True, True, False)
    strict = Tools(TOOLS.defined, (), False, True, True)
    how = dialect(CASES["hermes"].template, tokenizer, cage)
    assert [bool(how.answer_form(tools, None).grammar) for tools in (TOOLS, forced, strict)] == [False, True, True]
    assert how.answer_form(strict, None, {"regex": "a"}).grammar is None, "the answer's own constraint has no calls"
    how = dialect(CASES["gemma"].template, tokenizer, cage)
    assert how.answer_form(forced, None).form is forms.BARE
    with pytest.raises(ArgumentError, match="leave strict out, or set tool_choice to required"):
        how.answer_form(strict, None)


def test_control_tokens_that_are_kept_are_decoded(tmp_path: Path) -> None:
    with Checkpoint.open(tiny.write_model(tmp_path / "tiny")) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
    start, end = (tokenizer.control_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))
    ids = [*tokenizer.encode("the"), start, *tokenizer.encode(" in"), end]
    for keep, text in ((frozenset(), "the in"), (frozenset({start}), "the<|im_start|> in")):
        stream = tokenizer.stream(keep)
        assert "".join([*map(stream.push, ids), stream.finish()]) == text
