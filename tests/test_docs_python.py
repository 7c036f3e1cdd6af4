"""Every block of Python in docs/reference/python.md runs, in order, in one folder that has what the page names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from models import save_hf


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny random model under the name of SmolLM2, its heads as large as TurboQuant needs them, and a text."""
    path = tmp_path / "models" / "SmolLM2-135M-Instruct"
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 1024}
    save_hf("llama", path, vocab_size=len(tiny.TOKENS), **sizes)
    plain = tiny.write_model(tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_bytes((plain / name).read_bytes())
    (tmp_path / "text.txt").write_text("the thing in the inn, and a hat. " * 2000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_runs(repo: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")  # which one of the blocks needs
    page = repo / "docs" / "reference" / "python.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    names: dict[str, Any] = {"__name__": "page"}
    said = []
    for number, block in enumerate(blocks):
        file = folder / f"block{number}.py"  # a real file: the checker shows lines of it
        file.write_text(block)
        exec(compile(block, str(file), "exec"), names)
        said.append(capsys.readouterr().out)
    story = names["story"]
    assert said[1].startswith(story.text)
    assert names["made"].after.total_bytes < names["made"].before.total_bytes
    assert json.loads((folder / "out" / "4bit" / "config.json").read_text())["quantization_config"]["bits"] == 4
    assert re.search(r"^CG\d+ .*block8\.py:12 ", said[8], re.MULTILINE), said[8]
    assert said[7].endswith("True () () quick\n")


def test_the_example_of_the_readme_runs(repo: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (repo / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (example,) = [block for block in blocks if "from onegraph import" in block]
    Path("HuggingFaceTB").symlink_to("models")  # the name of the hub, as a directory here
    quick = example.replace("bits=4", 'bits=4, recipe="quick", calibration=TEXT')  # a GPU's default takes longer
    exec(compile(quick, "README.md", "exec"), {"__name__": "readme", "TEXT": folder / "text.txt"})
    assert len(capsys.readouterr().out) > 10
    assert (folder / "out" / "from-python" / "model.safetensors").is_file()
