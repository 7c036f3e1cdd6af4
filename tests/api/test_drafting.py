"""Drafts as users ask for them: the API's and the command line's options, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import onegraph.api.llm as llm_module
from eagle import net_of, write_head
from fuzz import tiny
from fuzz.run import invoke
from models import smollm2_gguf
from onegraph import LLM, SamplingParams
from onegraph.api.drafting import drafters
from onegraph.engine.engine import Engine
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models import shares
from onegraph.models.llama import Llama
from onegraph.models.ranks import Ranks

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
        with LLM(model, device="cpu", max_model_len=128) as llm:
            expected = [(c.tokens, c.text) for c in llm.generate(PROMPTS, params)]
        for draft, tokens in (("ngram", "auto"), (other, 2), (str(model), 5)):
            with LLM(model, device="cpu", max_model_len=128, speculative=draft, num_speculative_tokens=tokens) as llm:
                assert [(c.tokens, c.text) for c in llm.generate(PROMPTS, params)] == expected
                stats = llm.stats
        assert stats.drafted_tokens >= stats.accepted_tokens > 0  # the model, which drafts for itself
        assert stats.decode_steps < 19


@pytest.mark.parametrize("shared", [False, True])
def test_every_rank_of_a_model_has_its_drafter(
    shared: bool, model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on a CPU: text, drafts and what is told while a drafting model is read. Models as small as these are
    whole on each, where exchanges take time."""
    if shared:
        monkeypatch.setattr(shares, "EXCHANGE_S", 0.0)
    with Checkpoint.open(model) as checkpoint:
        whole = Llama.load(checkpoint, max_context=128)
        ranks = Ranks.load(checkpoint, ["cpu"] * 2, max_context=128)
    layers, vocabulary = (0, 0, 1), torch.arange(whole.config.vocab_size)
    head = write_head(tmp_path / "head", net_of(whole, layers, vocabulary), layers, vocabulary)
    chosen = ("ngram", str(model), str(other), f"eagle:{head}")
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    found: list[tuple[list[int], int]] = []
    read: list[tuple[int, int]] = []
    for loaded in (whole, ranks):
        monkeypatch.setattr(llm_module, "load_decoder", lambda *_, loaded=loaded, **options: loaded)
        for draft in chosen:
            told = lambda _, done, total: read.append((done, total))  # noqa: E731
            with LLM(
                model, device="cpu", max_model_len=128, speculative=draft, num_speculative_tokens=2, progress=told
            ) as llm:
                found.append((llm.generate(PROMPTS, params)[0].tokens, llm.stats.accepted_tokens))
                for rank in llm.engine.executor.speculation.ranks:
                    if draft != "ngram":
                        module = rank.drafter.head if draft.startswith("eagle:") else rank.drafter.model
                        assert (module.peer is not None) == (shared and loaded is ranks)
    assert found[:4] == found[4:]
    assert all(done <= total for done, total in read)
    assert read[-1][0] == read[-1][1] > read[0][1], "two ranks read twice as much"
    assert {tokens == found[0][0] for tokens, _ in found} == {True}
    assert found[1][1] > 5


def test_the_command_line(model: Path) -> None:
    command = ["generate", model, "--raw", "--prompt", "the thing", "--max-tokens", 20, "--device", "cpu"]
    plain = json.loads(invoke([*command, "--json"])[1])
    assert plain["drafted_tokens"] == 0
    status, out, errors = invoke([*command, "--json", "--speculative", model, "--num-speculative-tokens", 3])
    assert (status, errors) == (0, "")
    drafted = json.loads(out)
    assert drafted["outputs"] == plain["outputs"]
    assert drafted["drafted_tokens"] >= drafted["accepted_tokens"] > 0
    status, _, errors = invoke([*command, "--speculative", model, "--num-speculative-tokens", 1])
    assert status == 0
    assert "drafts accepted" in errors
    status, _, errors = invoke([*command, "--speculative", model, "--presence-penalty", 0.1])
    assert status == 0
    assert "no drafts, " in errors


HEAD = Path(__file__).parents[2] / "heads/smollm2-135m-instruct-4bit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--num-speculative-tokens", 3],
            "--num-speculative-tokens needs --speculative; give a method, e.g. --speculative ngram",
        ),
        (["--speculative", "ngram", "--num-speculative-tokens", 8], "'8' is neither 'auto' nor an integer from 1 to 7"),
        (
            ["--speculative", "ngram", "--num-speculative-tokens", "many"],
            "'many' is neither 'auto' nor an integer from 1 to 7",
        ),
        (["--speculative", "not-here"], "speculative: not-here"),
        (["--speculative", "eagle:not-here"], "speculative: not-here"),
        (["--speculative", HEAD], f"speculative: {HEAD} is an EAGLE head; say 'eagle:{HEAD}'"),
        (["--speculative", "eagle"], "speculative: got 'eagle'; allowed are 'ngram', 'mtp', 'eagle:PATH' of a head"),
        (["--speculative", "EAGLE:x"], "speculative: got 'EAGLE:x'; allowed are"),
        (["--speculative", ""], "speculative: got ''; allowed are"),
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
    with pytest.raises(ValueError, match=r"speculative: the tokens of .*words are not the model's"):
        LLM(model, device="cpu", speculative=words)
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=tiny.CONFIG["vocab_size"]))
    target.ranks = [target]
    with pytest.raises(
        ValueError, match=r"speculative: .*plain takes texts of 256 tokens; the model runs with max_model_len 300"
    ):
        drafters(str(model), None, target, model, held=None, max_context=300)
    for wrong, said in (
        ({"num_speculative_tokens": 3}, "num_speculative_tokens: got 3 without speculative"),
        ({"speculative": 3}, "speculative: got 3; allowed are 'ngram', 'mtp'"),
        ({"speculative": "ngram", "num_speculative_tokens": 9}, "num_speculative_tokens: got 9; allowed are 1 to 7"),
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
        LLM(model, device="cpu", speculative=larger)


@pytest.mark.slow
@pytest.mark.skipif(smollm2_gguf() is None, reason="SmolLM2 is not here")
def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    """The real model: n-grams of functions that it is asked to go on with, and its own text unchanged."""
    prompt = "def f(a):\n    return a + 1\n\n\ndef g(a):\n    return a + 2\n\n\ndef h(a):"
    params = SamplingParams(max_tokens=24, temperature=0)
    with LLM(smollm2_gguf(), device="cpu", max_model_len=64, draft="ngram", draft_tokens=5) as llm:
        answer, steps = llm.generate(prompt, params).tokens, llm.stats.decode_steps
        plain = Engine(llm.engine.model, max_batch=1, max_context=64)
        assert plain.generate([llm.tokenizer.encode(prompt)], params) == [answer]
    assert steps < 0.7 * plain.stats.decode_steps
