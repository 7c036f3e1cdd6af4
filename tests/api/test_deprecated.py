"""Names that another has replaced: they work until the release that the warning names, which says what to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph import LLM, SamplingParams, __version__, plan, quantize
from onegraph.api.deprecated import REMOVED_IN
from onegraph.cli.common import DEPRECATED

TEXT = "the thing in the inn, and a hat. " * 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("deprecated") / "m")


def test_no_deprecated_name_outlives_the_release_that_removes_it() -> None:
    released, removed = (tuple(map(int, version.split("."))) for version in (__version__, REMOVED_IN))
    assert released < removed, "remove the deprecated names, their warnings and their tests"


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("kv", "exact", "kv_cache_dtype"),
        ("max_batch", 2, "max_num_seqs"),
        ("max_context", 64, "max_model_len"),
        ("cache_tokens", 4096, "kv_cache_tokens"),
        ("draft", "ngram", "speculative"),
    ],
)
def test_an_old_argument_of_llm_is_the_new_one(model: Path, old: str, value: object, new: str) -> None:
    with (
        pytest.warns(DeprecationWarning, match=f"^{old} is deprecated .*; use {new}$"),
        LLM(model, device="cpu", **{old: value}) as llm,
    ):
        told = str(llm.generate("the thing", max_tokens=3))
    with LLM(model, device="cpu", **{new: value}) as llm:
        assert str(llm.generate("the thing", max_tokens=3)) == told
    both = {old: value, new: value}
    with pytest.raises(TypeError, match=f"got {old} and {new}, which are one argument"):
        LLM(model, device="cpu", **both)


def test_old_ways_to_name_gpus_and_the_model(model: Path) -> None:
    with pytest.warns(DeprecationWarning, match="gpus, split is deprecated"), LLM(model, device="cpu", gpus=1) as llm:
        assert len(llm.engine.executor.devices) == 1
    with pytest.warns(DeprecationWarning, match="path is deprecated"):
        llm = LLM(path=model, device="cpu")
    with llm, pytest.warns(DeprecationWarning, match=r"LLM.max_context is deprecated .*; use max_model_len"):
        assert llm.max_context == llm.max_model_len


def test_old_names_of_a_completion(model: Path) -> None:
    with LLM(model, device="cpu", seed=3) as llm:
        found = llm.generate(["the thing"], SamplingParams(max_tokens=4, temperature=1.0, n=2))[0]
    assert [each.text for each in found.outputs] == [found.text, found.outputs[1].text]
    assert found.outputs[0].token_ids == found.token_ids
    with pytest.warns(DeprecationWarning, match="use token_ids"):
        assert found.tokens == found.token_ids
    with pytest.warns(DeprecationWarning, match="use outputs"):
        assert list(found.others) == found.outputs[1:]


def test_old_arguments_of_quantize_and_plan(model: Path, tmp_path: Path) -> None:
    how = {"calibration": TEXT, "recipe": "quick", "device": "cpu"}
    old = {"tokens": 128, "sequence": 64, "extend": False, "activations": 1 << 20}
    new = {"num_calibration_tokens": 128, "calibration_seq_len": 64, "self_generate": False}
    new |= {"activation_memory": 1 << 20}
    with pytest.warns(DeprecationWarning, match="is deprecated and will be removed") as warned:
        before = plan(model, **how, **old)
    assert {str(each.message).split()[0] for each in warned} == old.keys()
    assert before.after == plan(model, **how, **new).after
    said: list[str] = []
    with pytest.warns(DeprecationWarning, match="remark is deprecated .*; use on_message"):
        quantize(source=model, out=tmp_path / "old", remark=said.append, **how, **old)
    assert said
    quantize(model, tmp_path / "new", **how, **new)
    assert (tmp_path / "old/model.safetensors").read_bytes() == (tmp_path / "new/model.safetensors").read_bytes()


def test_old_options_are_the_new_ones_and_not_in_the_help(model: Path) -> None:
    base = ["generate", model, "--prompt", "the", "--raw", "--max-tokens", 3, "--device", "cpu"]
    status, out, errors = invoke([*base, "--kv", "exact", "--draft=ngram", "--draft-tokens", 2])
    assert status == 0, errors
    warnings = [line for line in errors.splitlines() if "warning" in line]
    assert warnings == [
        f"onegraph: warning: {old} is deprecated and will be removed in {REMOVED_IN}; use {DEPRECATED[old]}"
        for old in ("--kv", "--draft", "--draft-tokens")
    ]
    new = [*base, "--kv-cache-dtype", "exact", "--speculative", "ngram", "--num-speculative-tokens", 2]
    assert invoke(new)[1] == out
    status, _, errors = invoke([*base, "--gpus", 1])
    assert status == 0
    assert "--gpus (with --split-mode) is deprecated" in errors
    for command in ("generate", "chat", "serve", "quantize"):
        text = invoke([command, "--help"])[1]
        shown = {word.split("=")[0].strip("[],") for word in text.split() if word.startswith(("--", "[--"))}
        assert not shown & ({*DEPRECATED, "--gpus", "--split-mode"} - ({"--tokens"} if command == "eval" else set()))


def test_a_base_seed_gives_the_same_texts_in_the_same_order(model: Path) -> None:
    texts = []
    for seed in (5, 5, 6):
        with LLM(model, device="cpu", seed=seed, max_model_len=64) as llm:
            texts.append([llm.generate("the thing", max_tokens=8, temperature=2.0).token_ids for _ in range(2)])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1], "each request has a seed of its own"
