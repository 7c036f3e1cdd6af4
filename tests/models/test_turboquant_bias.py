"""Keys that are mostly a bias, as some of Qwen2's are: their layers stay exact in a cache in codes, and it is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz import tiny
from models import hf_model, save_hf
from onegraph.cli.__main__ import main
from onegraph.engine.engine import Engine
from onegraph.engine.evaluate import evaluate
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import EXACT, parse_kv
from onegraph.models.llama import BIAS, Llama, biased_layers
from onegraph.models.ranks import Ranks

CODES = parse_kv("turboquant:4,window=16")
assert CODES is not None


def save_biased(path: Path, bias: dict[int, float], **changes: Any) -> None:
    """A Qwen2 whose second head of keys has, in the layers of `bias`, a bias of so many times the power of the rest, in
    two coordinates that RoPE turns slowly."""
    hf = hf_model("qwen2", hidden_size=128, head_dim=64, num_hidden_layers=3, **changes)
    with torch.no_grad():
        for i, layer in enumerate(hf.model.layers):
            keys = layer.self_attn.k_proj
            power = (keys.weight * layer.input_layernorm.weight)[64:].square().sum()
            keys.bias.zero_()
            keys.bias[[64 + 30, 64 + 62]] = (bias.get(i, 0.0) * power / 2).sqrt()
    hf.save_pretrained(path)


def load(path: Path) -> Llama:
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, "cpu")


def test_layers_whose_keys_are_mostly_a_bias_stay_exact(tmp_path: Path) -> None:
    save_biased(tmp_path / "m", {0: BIAS * 0.7, 1: BIAS * 1.4, 2: 3000.0})
    model = load(tmp_path / "m")
    assert biased_layers(model) == [1, 2]
    engine = Engine(model, max_batch=2, max_context=64, kv="turboquant:4,window=16")
    assert engine.kv == "turboquant:4,window=16,exact=1+2"
    assert Engine(model, max_batch=2, max_context=64, kv="turboquant:4,window=16,exact=0").kv.endswith("exact=0+1+2")
    told = parse_kv(engine.kv)
    assert told is not None
    assert [told.rate(i, 3) for i in range(3)] == [(4, 4), (EXACT, EXACT), (EXACT, EXACT)]
    for text in ("turboquant:4,mode=shadow,window=0", "turboquant:4,window=16,biased=coded"):
        assert Engine(model, max_batch=2, max_context=64, kv=text).kv == text, "asked for otherwise"
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        ranks = Ranks.load(checkpoint, ["cpu", "cpu"]).ranks
    assert [biased_layers(rank) for rank in ranks] == [[], [1, 2]], "each looks at its own heads"
    assert [rank.biased for rank in ranks] == [[1, 2], [1, 2]], "and all keep the same layers"


def test_codes_of_a_bias_cost_what_exact_layers_save(tmp_path: Path) -> None:
    save_biased(tmp_path / "m", {1: 3000.0})
    model = load(tmp_path / "m")
    tokens = torch.randint(0, model.config.vocab_size, (256,), generator=torch.Generator().manual_seed(0))
    kept, coded = (evaluate(model, tokens, window=256, kv=kv).kl for kv in (CODES, replace(CODES, biased="coded")))
    assert kept is not None
    assert coded is not None
    assert coded > 3 * kept > 0


def test_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_hf("llama", tmp_path / "m", head_dim=64)
    with pytest.raises(ValueError, match="exact names layer 99; the model has layers 0 to "):
        Engine(load(tmp_path / "m"), max_batch=1, max_context=64, kv="turboquant:4,window=16,exact=99")


def test_models_without_biases_have_no_such_layers(tmp_path: Path) -> None:
    save_hf("llama", tmp_path / "m")
    assert biased_layers(load(tmp_path / "m")) == []


def test_the_command_says_which_layers_stay_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m"
    save_biased(path, {2: 3000.0}, vocab_size=tiny.CONFIG["vocab_size"])
    (path / "tokenizer.json").write_text(json.dumps(tiny.tokenizer_json()))
    command = [
        "generate",
        str(path),
        "--prompt",
        "a",
        "--max-tokens",
        "2",
        "--kv-cache-dtype",
        "turboquant:4,window=16",
        "--json",
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["kv"] == "turboquant:4,window=16,exact=2"
    (tmp_path / "text").write_text("the quick brown fox " * 20)
    assert (
        main(
            [
                "eval",
                str(path),
                "--kv-cache-dtype",
                "turboquant:4,window=16",
                "--text",
                str(tmp_path / "text"),
                "--window",
                "64",
            ]
        )
        == 0
    )
    told = capsys.readouterr()
    assert "kv: layer 2 kept exact" in told.err
    bytes_of = float(told.out.split("KV cache")[1].split()[0])
    assert bytes_of == parse_kv("turboquant:4,window=16,exact=2").token_bytes(layers=3, kv_heads=2, head_dim=64) + (
        2 * 32 * 2 * 2 * 64 * 2 / 64
    ), "two layers in codes, each with a ring of 32 tokens"
    why = "their keys are mostly a bias, or their heads are larger than the kernels read"
    assert f"kv: layer 2 kept exact: {why} (docs/guides/long-context.md)" in said.err
