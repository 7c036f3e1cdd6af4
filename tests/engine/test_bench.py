"""The measuring functions: that they measure what they say, on a tiny model; figures are for a GPU to give."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from onegraph.engine.bench import bench_step
from onegraph.formats.checkpoint import Checkpoint
from tiny_decoder import TinyDecoder


def test_step_rows_count_what_ran() -> None:
    rows = list(bench_step(TinyDecoder(), batches=(1, 3), context=5, steps=8, name="tiny"))
    assert [(row["batch"], row["mode"], row["name"]) for row in rows] == [(1, "eager", "tiny"), (3, "eager", "tiny")]
    for row in rows:
        assert row["steps"] == 8
        assert row["tokens_per_second"] > 0
        assert row["ms_per_step"] == pytest.approx(1e3 * row["batch"] / row["tokens_per_second"], rel=1e-2)
        assert row["torch"] == torch.__version__


def test_a_context_too_long_is_refused() -> None:
    model = TinyDecoder()
    with pytest.raises(ValueError, match="positions; the model has"):
        list(bench_step(model, context=model.max_context, steps=8))


@pytest.mark.parametrize(("bits", "head"), [(16, None), (2, 4), (3, None), (4, 4)])
def test_benchmarks_load_random_weights(repo: Path, monkeypatch: pytest.MonkeyPatch, bits: int, head: int) -> None:
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    monkeypatch.delitem(sys.modules, "step", raising=False)
    from step import SHAPES, random_model

    small = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = random_model(SHAPES["smollm2-135m"] | small | heads, bits, head, 64, device="cpu")
    assert all(row["tokens_per_second"] > 0 for row in bench_step(model, context=16, steps=4))


def test_loading_is_measured_on_a_published_layout(repo: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repo / "benchmarks/load.py"), "--model", "tiny", "--device", "cpu", "--runs", "1"]
    command += ["--context", "128", "--dir", str(tmp_path / "m"), "--out", str(tmp_path / "rows"), "--keep"]
    run = subprocess.run(
        command, check=True, text=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(repo / "src")}
    )
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["run"] for row in rows] == ["disk", "cold", "warm"]
    assert (tmp_path / "rows").read_text() == run.stdout
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        for row in rows[1:]:
            assert row["gb"] == round(checkpoint.nbytes / 1e9, 3) > 0
            assert row["tensors"] == len(checkpoint.names)
    assert {"direct", "cold", "ring", "cached"} <= set(rows[0]["gb_per_second"])


@pytest.fixture
def kernels(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    return importlib.import_module("kernels")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_kernels_are_not_timed_on_a_cpu(kernels: ModuleType) -> None:
    with pytest.raises(ValueError, match="CUDA GPU"):
        next(iter(kernels.bench_linear(device="cpu")))
    with pytest.raises(ValueError, match="none that torch sees"):
        next(iter(kernels.bench_linear(device="cuda")))


@pytest.mark.gpu
def test_linear_rows_stay_under_their_roof(kernels: ModuleType) -> None:
    rows = list(kernels.bench_linear(((1024, 2048),), tokens=(1,), bits=(2, 4)))
    assert [row["bits"] for row in rows] == [16, 2, 4]
    for row in rows:
        assert 0 < row["roof_us"] < row["us"], "faster than the memory: the weights came out of the cache"


def test_what_the_scripts_import_is_there(repo: Path, kernels: ModuleType) -> None:
    """The plugins' modules aside, which need transformers or vLLM."""
    seen = set()
    for script in (repo / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if name.split(".")[0] not in ("onegraph", "tools", "kernels") or "integrations" in name:
                continue
            module = importlib.import_module(name)
            for alias in node.names:
                inside = hasattr(module, "__path__") and importlib.util.find_spec(f"{name}.{alias.name}")
                assert hasattr(module, alias.name) or inside, f"{script.name}: {name} has no {alias.name}"
            seen.add(name)
    assert len(seen) > 15
