"""Drafts as users ask for them: the API's and the command line's options, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuzz import tiny
from fuzz.run import invoke
from models import smollm2_gguf
from onegraph import LLM, SamplingParams
from onegraph.api.drafting import drafter
from onegraph.formats.checkpoint import write_checkpoint

PROMPTS = ["the thing the thing the thing", "a"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("drafting") / "plain")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("drafting") / "other", seed=3)


def test_the_text_is_that_without_drafts(model: Path, other: Path) -> None:
    asked = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.0, seed=4)]
    for params in asked:
        with LLM(model, device="cpu", max_context=128) as llm:
            expected = [(c.tokens, c.text) for c in llm.generate(PROMPTS, params)]
        for draft, tokens in (("ngram", "auto"), (other, 2), (str(model), 5)):
            with LLM(model, device="cpu", max_context=128, draft=draft, draft_tokens=tokens) as llm:
                assert [(c.tokens, c.text) for c in llm.generate(PROMPTS, params)] == expected
                stats = llm.stats
        assert stats.drafted_tokens >= stats.accepted_tokens > 0  # the model, which drafts for itself
        assert stats.decode_steps < 19


def test_the_command_line(model: Path) -> None:
    command = ["generate", model, "--raw", "--prompt", "the thing", "--max-tokens", 20, "--device", "cpu"]
    plain = json.loads(invoke([*command, "--json"])[1])
    assert plain["drafted_tokens"] == 0
    status, out, errors = invoke([*command, "--json", "--draft", model, "--draft-tokens", 3])
    assert (status, errors) == (0, "")
    drafted = json.loads(out)
    assert drafted["outputs"] == plain["outputs"]
    assert drafted["drafted_tokens"] >= drafted["accepted_tokens"] > 0
    status, _, errors = invoke([*command, "--draft", model, "--draft-tokens", 1])
    assert status == 0
    assert "drafts right" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--draft-tokens", 3], "--draft-tokens counts what --draft drafts; say who drafts, e.g. --draft ngram"),
        (["--draft", "ngram", "--draft-tokens", 8], "'8' is not an integer from 1 to 7"),
        (["--draft", "ngram", "--draft-tokens", "many"], "'many' is not an integer from 1 to 7"),
        (["--draft", "not-here"], "not-here"),
    ],
)
def test_what_is_refused_in_a_line(model: Path, words: list[object], said: str) -> None:
    status, out, errors = invoke(["generate", model, "--raw", "--prompt", "the", "--device", "cpu", *words])
    assert (status, out) == (2, "")
    assert said in errors
    assert errors.count("\n") == 1


def test_a_drafting_model_of_other_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    words = tiny.write_model(tmp_path / "words")
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"draft: the tokens of .*words are not the model's"):
        LLM(model, device="cpu", draft=words)
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=tiny.CONFIG["vocab_size"]))
    with pytest.raises(ValueError, match=r"draft: .*plain takes texts of 256 tokens, the model is run with .* of 300"):
        drafter(str(model), None, target, model, held=None, max_context=300)
    for wrong, said in (
        ({"draft_tokens": 3}, "draft_tokens: got 3 and no draft"),
        ({"draft": "ngram", "draft_tokens": 9}, "draft_tokens: got 9; allowed are 1 to 7"),
        ({"draft": "ngram", "gpus": 2}, "draft: got one for 2 GPUs"),
    ):
        with pytest.raises(ValueError, match=said):
            LLM(model, device="cpu", **wrong)
    larger = tmp_path / "larger"
    config = json.loads((words / "config.json").read_text())
    tensors = tiny.tensors()
    size = config["vocab_size"]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].repeat(2, 1)[: size + 1]
    write_checkpoint(larger, config | {"vocab_size": size + 1}, tensors.items())
    with pytest.raises(ValueError, match=rf"larger has a vocabulary of {size + 1} tokens, the model has {size}"):
        LLM(model, device="cpu", draft=larger)


@pytest.mark.skipif(smollm2_gguf() is None, reason="SmolLM2 is not here")
def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    """The real model: n-grams of functions that it is asked to go on with, and its own text unchanged."""
    prompt = "def f(a):\n    return a + 1\n\n\ndef g(a):\n    return a + 2\n\n\ndef h(a):"
    params = SamplingParams(max_tokens=24)
    answers, steps = [], []
    for chosen in ({}, {"draft": "ngram", "draft_tokens": 5}):
        with LLM(smollm2_gguf(), device="cpu", max_context=64, **chosen) as llm:
            answers.append(llm.generate(prompt, params).tokens)
            steps.append(llm.stats.decode_steps)
    assert answers[0] == answers[1]
    assert steps[1] < 0.7 * steps[0]
