"""`onegraph quantize` without a text: calibration on the text of onegraph itself, or on what the model samples."""

import gc
import importlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import tiny
from fuzz.run import invoke
from onegraph.api.calibration import corpus_text
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.quant.quantize import quantize as quantize_blocks

api = importlib.import_module("onegraph.api.quantize")  # the package's `quantize` is the function

LONG = "the thing in the inn, and a hat; it is no cat. " * 100
OPTIONS = ["--num-calibration-tokens", 256, "--calibration-seq-len", 64, "--recipe", "quick", "--bits", 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("self") / "plain")


def made(model: Path, name: str, *more: object) -> bytes:
    status, _, errors = invoke(["quantize", model, model.parent / name, *OPTIONS, *more])
    assert status == 0, errors
    return (model.parent / name / "model.safetensors").read_bytes()


def test_the_bundled_text_is_the_default(model: Path) -> None:
    first = made(model, "default")
    assert made(model, "bundled", "--calibration", "bundled") == first
    assert made(model, "seeded", "--seed", 1) != first


def test_it_shares_no_line_with_what_quality_is_measured_on() -> None:
    from tools.demo import evaluation_text

    lines = {line.strip() for line in corpus_text().splitlines() if len(line.strip()) > 50}
    lines = {line for line in lines if not line.startswith("The above exception was the direct cause")}  # Python's own
    assert not [line for line in evaluation_text().splitlines() if line.strip() in lines]


def test_self_gives_the_same_bytes_for_the_same_seed(model: Path) -> None:
    first = made(model, "first", "--calibration", "self")
    assert made(model, "again", "--calibration", "self") == first
    assert made(model, "other", "--calibration", "self", "--seed", 1) != first


def test_the_model_goes_on_with_a_text_that_is_too_short(model: Path, tmp_path: Path) -> None:
    """Rows of the text are the first, and each of the others begins with a quarter from it."""
    text, long = tmp_path / "short.txt", tmp_path / "long.txt"
    long.write_text(LONG)
    text.write_text(LONG.strip()[:150])
    with Checkpoint.open(model) as checkpoint:
        given = Tokenizer(checkpoint).encode(text.read_text())
    assert 64 <= len(given) < 256, "else nothing is tested"
    seen: list[Tensor] = []

    def watched(source: Any, tokens: Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(tokens)
        return quantize_blocks(source, tokens, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "quantize_blocks", watched)
        plain = made(model, "short", "--calibration", text)
        first = made(model, "extended", "--calibration", text, "--self-generate")
        assert made(model, "extended-again", "--calibration", text, "--self-generate") == first != plain
        enough = made(model, "enough", "--calibration", long)
        assert made(model, "enough-extended", "--calibration", long, "--self-generate") == enough
    few, rows, again, *_ = seen
    assert rows.shape == (4, 64)
    assert torch.equal(rows, again)
    assert torch.equal(rows[: len(few)], few)
    quarters = [given[i : i + 16] for i in range(0, len(given) - 15, 16)]
    assert all(row[:16].tolist() in quarters for row in rows[len(few) :])
    about = json.loads((model.parent / "extended" / "onegraph.json").read_text())["calibration"]
    assert (about["tokens"], about["sampled_behind_it"]) == (256, 256 - few.numel())


def test_extend_is_refused_where_there_is_nothing_to_go_on_with(model: Path) -> None:
    for more, why in (
        (["--calibration", "self"], "with calibration 'self' the model writes all of it"),
        (["--format", "nvfp4"], "nvfp4 reads no text"),
    ):
        status, _, errors = invoke(["quantize", model, model.parent / "no", *more, "--self-generate"])
        assert (status, errors.count("\n")) == (2, 1), errors
        assert why in errors
    status, out, _ = invoke(["quantize", model, model.parent / "no", "--self-generate", "--dry-run"])
    assert status == 0
    assert "tokens of the bundled corpus and of what the model writes behind it" in out


def test_a_model_calibrated_on_itself_generates(model: Path) -> None:
    made(model, "used", "--calibration", "self")
    status, out, errors = invoke(["generate", model.parent / "used", "--prompt", "the", "--raw", "--max-tokens", 4])
    assert status == 0, errors
    assert out.strip()


def test_of_the_model_that_wrote_the_text_nothing_is_left(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Llama]] = []
    load = Llama.load

    def watched(*args: Any, **options: Any) -> Llama:
        made = load(*args, **options)
        loaded.append(weakref.ref(made))
        return made

    monkeypatch.setattr(api.Llama, "load", watched)
    gc.disable()
    try:
        with Checkpoint.open(model) as checkpoint:
            starts, silent = [[5], [6]], lambda *_: None
            text = api.sample_text(checkpoint, Tokenizer(checkpoint), torch.device("cpu"), starts, 8, 0, silent)
        assert text.shape == (2, 8)
        assert [each() for each in loaded] == [None]
    finally:
        gc.enable()
