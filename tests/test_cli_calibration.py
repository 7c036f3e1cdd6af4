"""`onegraph quantize` without a text: calibration on what the model itself samples, which is the default."""

from pathlib import Path

import pytest

from fuzz import tiny
from fuzz.run import invoke

OPTIONS = ["--tokens", 256, "--sequence", 64, "--recipe", "quick", "--bits", 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("self") / "plain")


def made(model: Path, name: str, *more: object) -> bytes:
    status, _, errors = invoke(["quantize", model, model.parent / name, *OPTIONS, *more])
    assert status == 0, errors
    return (model.parent / name / "model.safetensors").read_bytes()


def test_self_is_the_default_and_same_seed_gives_same_bytes(model: Path) -> None:
    first = made(model, "first")
    assert made(model, "named", "--calibration", "self") == first
    assert made(model, "again") == first
    assert made(model, "other", "--seed", 1) != first


def test_a_model_calibrated_on_itself_generates(model: Path) -> None:
    made(model, "used")
    status, out, errors = invoke(["generate", model.parent / "used", "--prompt", "the", "--raw", "--max-tokens", 4])
    assert status == 0, errors
    assert out.strip()
