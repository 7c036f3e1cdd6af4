"""Some of transformers' models, as they are: what the simulation says of each is what torch did with it on an H200."""

import json
from importlib.metadata import version

import pytest
from accuracy import bad

pytest.importorskip("transformers")
import zoo

MEASURED = json.loads(zoo.TRUTH.read_text())
MODELS = MEASURED["models"]
SOME = ["bert", "gpt2", "lfm2", "vit_mae", "gemma2", "mixtral", "mpnet", "opt"]  # clean, stale, and three that break


def test_every_model_was_measured():
    assert set(MODELS) == set(zoo.NAMES)
    assert {row["eager"] for row in MODELS.values()} == {"ok"}


@pytest.mark.parametrize("name", SOME)
def test_the_verdict_is_what_a_gpu_did(name):
    answer = zoo.look(name, live=False)
    assert "error" not in answer
    assert bool(answer["errors"]) == bad(MODELS[name]), (answer, MODELS[name])
    if (at := MODELS[name].get("at")) and version("transformers") == MEASURED["transformers"]:
        assert at[-1] in [places[-1] for _, *places in answer["errors"]]  # the line that broke the capture
