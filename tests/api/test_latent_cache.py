"""Latent caches in FP8 and in TurboQuant's codes by the command line and the API."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz import tiny
from models import save_hf
from onegraph import LLM
from onegraph.api.memory import Memory
from onegraph.cli import main
from onegraph.engine.params import SamplingParams
from onegraph.formats.latent_kv import row_bytes

CODES = [("fp8", 8), ("turboquant:4,mode=full", 4), ("turboquant:3,mode=full", 3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    save_hf("deepseek_v3", folder / "m", vocab_size=tiny.CONFIG["vocab_size"], kv_lora_rank=64)
    plain = tiny.write_model(folder / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "m" / name).write_bytes((plain / name).read_bytes())
    return folder / "m"


@pytest.mark.parametrize(("kv", "bits"), CODES)
def test_what_is_told_is_what_the_cache_takes(path: Path, kv: str, bits: int) -> None:
    told: list[Memory] = []
    sizes: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 96}
    with LLM(path, kv_cache_dtype=kv, on_memory=told.append, **sizes) as llm:
        cache: Any = llm.engine.executor.cache
        assert llm.engine.kv.startswith(kv)
        assert {(pool.dtype, pool.shape[2]) for pool in cache.pools} == {(torch.uint8, row_bytes(64, 8, bits))}
        pages = sum(pool[1:].nbytes for pool in cache.pools)
        layers = [block.attention for block in llm.engine.model.blocks]
        turned = sum(t.nbytes for layer in layers for made in layer.turned.values() for t in made[:2])
        assert (turned > 0) == (kv != "fp8")
        assert told[0].cache == pages + turned
        assert len(llm.generate("the thing", max_tokens=4).token_ids) == 4
        assert llm.engine.executor.prefix_cacheable


def test_evicted_prefixes_of_codes_go_to_host_memory(path: Path) -> None:
    sizes: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 96, "kv_offloading_size": 0.01}
    for kv, _ in CODES[:2]:
        with LLM(path, kv_cache_dtype=kv, **sizes) as llm:
            assert llm.engine.executor.host_pages


def test_commands(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(path), "--prompt", "Hi", "--max-tokens", "5", "--json", "--device", "cpu"]
    for kv, _ in CODES:
        assert main([*command, "--kv-cache-dtype", kv]) == 0
        assert json.loads(capsys.readouterr().out)["kv"].startswith(kv)
    assert main([*command, "--kv-cache-dtype", "turboquant:4"]) == 2
    said = capsys.readouterr().err
    assert "turboquant: got mode=hybrid for a latent" in said
    assert "turboquant:4,mode=full" in said
    assert len(said.splitlines()) == 1


def test_eval_reads_a_cache_as_decoding_does(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its perplexity is that of the log-probabilities that the engine gives the same tokens."""
    text = tmp_path / "text.txt"
    text.write_text("the thing is a thing " * 400)
    measured = ["--text", str(text), "--tokens", "64", "--window", "64", "--device", "cpu", "--json"]
    for kv, bits in CODES[:2]:
        assert main(["eval", str(path), *measured, "--kv-cache-dtype", kv]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["kv"].startswith(kv)
        assert found["kl"] > 0
        assert found["kv_bytes"] == 3 * row_bytes(64, 8, bits)
        assert found["exact_kv_bytes"] == 3 * 72 * 2
        with LLM(path, kv_cache_dtype=kv, device="cpu", max_model_len=96) as llm:
            tokens = llm.tokenizer.encode(text.read_text())[:64]
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (made,) = llm.engine.complete([tokens], params)
        told = [each.logprob for each in made.prompt_logprobs]
        assert found["perplexity"] == pytest.approx(math.exp(-sum(told) / len(told)), rel=1e-5)
    assert main(["eval", str(path.parent / "plain"), *measured, "--kv-cache-dtype", "fp8"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(
        "onegraph: error: --kv-cache-dtype fp8: it is for latent attention, which llama does not"
    )
