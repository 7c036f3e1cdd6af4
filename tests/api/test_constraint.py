"""Constraints of JSON: whitespace has an end, and every common way to write JSON stays allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import tiny
from onegraph.api.constraint import MAX_BLANKS, MAX_NEWLINES, Constraints, GrammarConstraint
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint

pytest.importorskip("llguidance")
SHAPE = {
    "type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"enum": ["x"]}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tiny.write_model(tmp_path_factory.mktemp("constraint") / "m")
    with Checkpoint.open(path) as checkpoint:
        return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    return Constraints(tokenizer, tokenizer.vocab_size)


def allowed(constraint: GrammarConstraint, size: int) -> set[int]:
    words = torch.zeros(-(-size // 32), dtype=torch.int32)
    constraint.fill(words)
    return {i for i in range(size) if int(words[i // 32]) >> (i % 32) & 1}


@pytest.mark.parametrize("likes", ["\n", " ", "\t", "\n "])
def test_a_model_that_writes_only_whitespace_comes_to_an_end(
    constraints: Constraints, tokenizer: Tokenizer, likes: str
) -> None:
    """It takes whitespace wherever it may, in the given order, and else what the JSON needs next."""
    constraint = constraints(SamplingParams(json_schema=SHAPE))
    needed = list('{"a":[1],"b":"x"}')
    text = ""
    while not constraint.done:
        fine = allowed(constraint, tokenizer.vocab_size)
        wanted = [i for c in likes for i in tokenizer.encode(c) if i in fine]
        blank = wanted[len(text) % len(wanted)] if wanted else None
        (token,) = tokenizer.encode(needed[0]) if blank is None else [blank]
        assert token in fine, (text, needed[0])
        if blank is None:
            needed.pop(0)
        text += tokenizer.decode([token])
        constraint.take(token)
        assert len(text) < 2000
    assert json.loads(text) == {"a": [1], "b": "x"}
    runs = "".join(c if c in " \t\r\n" else "." for c in text).split(".")
    assert max(map(len, runs)) <= MAX_BLANKS
    assert max(run.count("\n") for run in runs) <= MAX_NEWLINES
    assert max(map(len, runs)) > 1, "some is allowed"


LETTERS = st.characters(exclude_characters="\x7f", codec="utf-8")  # llguidance wants that one escaped
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.text(LETTERS, max_size=8)
    | st.just(" " * 60 + "\n\n\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=4), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(
    value=st.dictionaries(st.text(LETTERS, max_size=3), VALUES, max_size=4),
    indent=st.sampled_from([None, 1, 2, 4, "\t"]),
)
def test_json_as_people_and_programs_write_it_is_allowed(
    constraints: Constraints, tokenizer: Tokenizer, value: Any, indent: Any
) -> None:
    """Strings may hold any whitespace, quotes and backslashes."""
    constraint = constraints(SamplingParams(json_schema={"type": "object"}))
    for token in tokenizer.encode(json.dumps(value, indent=indent, ensure_ascii=False), special=False):
        assert token in allowed(constraint, tokenizer.vocab_size)
        constraint.take(token)
        assert not constraint.problem


def test_a_regular_expression_may_ask_for_whitespace(constraints: Constraints, tokenizer: Tokenizer) -> None:
    constraint = constraints(SamplingParams(regex="\n{50}"))
    (newline,) = tokenizer.encode("\n")
    for _ in range(50):
        assert newline in allowed(constraint, tokenizer.vocab_size)
        constraint.take(newline)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            {"json_schema": {"type": "array", "minItems": 10**9}},
            "json_schema: it cannot be compiled: ran out of its 512",
        ),
        ({"json_schema": {"enum": [str(i) for i in range(100_000)]}}, "json_schema: "),
        ({"json_schema": {"type": "number", "minimum": 1e-300, "maximum": 1e300}}, "json_schema: Failed to generate"),
        ({"regex": "(" * 2000 + "a" + ")" * 2000}, "regex: "),
    ],
)
def test_what_explodes_is_refused_in_a_line(constraints: Constraints, how: dict[str, Any], says: str) -> None:
    """In a process of its own, that has 512 MiB: this one lives on and compiles the next."""
    with pytest.raises(ArgumentError) as caught:
        constraints(SamplingParams(**how))
    assert str(caught.value).startswith(says), caught.value
    assert "\n" not in str(caught.value)
    assert constraints(SamplingParams(regex="a+")).done is False


def test_further_answers_to_a_request_have_a_state_of_their_own(constraints: Constraints, tokenizer: Tokenizer) -> None:
    params = SamplingParams(regex="ab|ba")
    first, second = constraints(params), constraints(params)
    a, b = (tokenizer.encode(c)[0] for c in "ab")
    first.take(a)
    second.take(b)
    assert (allowed(first, tokenizer.vocab_size), allowed(second, tokenizer.vocab_size)) == ({b}, {a})


def test_a_grammar_may_name_control_tokens_by_id(constraints: Constraints, tokenizer: Tokenizer) -> None:
    mark = tokenizer.control_tokens["<|im_start|>"]
    constraint = constraints(SamplingParams(grammar=f'start: "a" <[{mark}]> "in"\n'))
    for token, text in ((*tokenizer.encode("a"), "a"), (mark, "a mark")):
        assert allowed(constraint, tokenizer.vocab_size) == {token}, text
        constraint.take(token)
    with pytest.raises(ArgumentError, match=r"^grammar: "):
        constraints(SamplingParams(grammar="start: nothing\n"))
    with pytest.raises(
        ArgumentError, match="grammar: got one beside regex; allowed is one of json_schema, regex, grammar"
    ):
        SamplingParams(grammar='start: "a"', regex="a")
    with pytest.raises(ArgumentError, match="a Lark grammar"):
        SamplingParams(grammar=3)  # type: ignore[arg-type]
