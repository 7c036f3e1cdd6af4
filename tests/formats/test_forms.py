"""Files written by earlier versions load, and decode to the same bits; files of later ones are refused in a line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import forms
from fuzz import tiny
from onegraph import LLM, verify
from onegraph.cli import main
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8P, E8PConfig
from onegraph.formats.rotated import FORMAT_VERSION
from onegraph.models.load import load_decoder, parse_config
from onegraph.models.loader import Loader

WRITTEN = sorted(path.name for path in forms.FOLDER.iterdir())


def test_every_form_that_is_written_has_a_file_and_every_file_a_form() -> None:
    assert sorted(forms.FORMS) == WRITTEN


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_decodes_to_the_same_bits(name: str) -> None:
    path = forms.FOLDER / name
    assert forms.digests(path) == json.loads((path / forms.DECODED).read_text())
    with Checkpoint.open(path) as checkpoint:
        load_decoder(checkpoint, torch.device("cpu"), torch.float32, max_context=64)
    assert verify(path).problems == ()


def test_the_files_hold_what_their_names_say() -> None:
    found: dict[str, set[str]] = {}
    for name in WRITTEN:
        with Checkpoint.open(forms.FOLDER / name) as checkpoint:
            loader = Loader(checkpoint, parse_config(checkpoint.config), torch.float32)
            found[name] = {loader.format_of(layer).name for layer in loader.layers()}
            found[name] |= {f"stack of {loader.stack(stack)[0].name}" for stack in loader.parts.stacks}
    rates = {bits: E8P[bits].name for bits in (2, 3, 4)}
    assert found["e8p-1"] == {*rates.values(), "dense"}
    assert found["e8p-1-ends"] == {*rates.values()}
    assert found["e8p-1-experts"] == {rates[3], "dense", f"stack of {rates[2]}"}
    assert found["e8p-1-mxfp4-experts"] == {rates[4], "dense", "stack of mxfp4"}
    assert found["nvfp4-1"] == found["nvfp4-1-deepseek"] == {"nvfp4", "dense"}


@pytest.mark.parametrize("name", sorted(path.name for path in forms.HEADS.iterdir()))
def test_a_draft_head_loads_to_the_same_bits_and_drafts(name: str, tmp_path: Path) -> None:
    path, model = forms.HEADS / name, tiny.write_model(tmp_path / "model")
    assert forms.head_digests(path, model) == json.loads((path / forms.DECODED).read_text())
    with LLM(model, device="cpu", max_model_len=64, speculative=f"eagle:{path}", num_speculative_tokens=2) as llm:
        assert len(llm.generate("the thing", max_tokens=8).tokens) == 8
        assert llm.stats.drafted_tokens > 0


def test_a_form_is_written_once() -> None:
    with pytest.raises(SystemExit, match="stands for the files that people have"):
        forms.write("e8p-1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"format_version": FORMAT_VERSION + 1},
            "format_version is 2; this version reads 1: a newer onegraph wrote it",
        ),
        ({"format_version": "2"}, "format_version is '2'; this version reads 1"),
        ({"rotation": "new"}, "unknown key rotation"),
    ],
)
def test_a_file_of_a_later_version_is_refused_in_one_line(
    change: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m"
    shutil.copytree(forms.FOLDER / "e8p-1", path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        E8PConfig.from_dict(config["quantization_config"])
    assert main(["generate", str(path), "--prompt", "w1", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
