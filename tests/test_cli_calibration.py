"""`onegraph quantize` without a text: calibration on the text of onegraph itself, or on what the model samples."""

from pathlib import Path

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph.api.quantize import BUNDLED

OPTIONS = ["--tokens", 256, "--sequence", 64, "--recipe", "quick", "--bits", 2]


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
    assert made(model, "file", "--calibration", BUNDLED) == first
    assert made(model, "seeded", "--seed", 1) != first


def test_the_bundled_text_is_varied_and_says_its_licence(repo: Path) -> None:
    text = BUNDLED.read_text(encoding="utf-8")
    assert 30_000 < len(text) < 60_000
    paragraphs = [part for part in text.split("\n\n") if len(part) > 60]
    assert len(paragraphs) == len(set(paragraphs)) > 60
    assert "Apache-2.0" in (BUNDLED.parent / "README.md").read_text()
    assert BUNDLED.is_relative_to(repo / "src") or "site-packages" in str(BUNDLED)


def test_it_shares_no_line_with_what_quality_is_measured_on() -> None:
    from onegraph.cli.demo import evaluation_text

    lines = {line.strip() for line in BUNDLED.read_text().splitlines() if len(line.strip()) > 50}
    assert not [line for line in evaluation_text().splitlines() if line.strip() in lines]


def test_self_gives_the_same_bytes_for_the_same_seed(model: Path) -> None:
    first = made(model, "first", "--calibration", "self")
    assert made(model, "again", "--calibration", "self") == first
    assert made(model, "other", "--calibration", "self", "--seed", 1) != first


def test_a_model_calibrated_on_itself_generates(model: Path) -> None:
    made(model, "used", "--calibration", "self")
    status, out, errors = invoke(["generate", model.parent / "used", "--prompt", "the", "--raw", "--max-tokens", 4])
    assert status == 0, errors
    assert out.strip()
