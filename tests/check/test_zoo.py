"""Some of transformers' models, as they are: what the simulation says of each is what torch did with it on an H200."""

import json

import pytest
from accuracy import bad

pytest.importorskip("transformers")
import zoo

MODELS = json.loads(zoo.TRUTH.read_text())["models"]
SOME = ["bert", "gpt2", "lfm2", "vit_mae", "gemma2", "mixtral", "mpnet", "opt"]  # clean, stale, and three that break


def test_every_model_was_measured():
    assert set(MODELS) == set(zoo.NAMES)
    assert {row["eager"] for row in MODELS.values()} == {"ok"}


@pytest.mark.parametrize("name", SOME)
def test_the_verdict_is_what_a_gpu_did(name):
    answer = zoo.look(name, live=False)
    assert "error" not in answer
    assert bool(answer["errors"]) == bad(MODELS[name]), (answer, MODELS[name])
