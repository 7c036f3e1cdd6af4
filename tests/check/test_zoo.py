"""Some of transformers' models, as they are: what the simulation says of each is what torch did with it on an H200."""

import json
from importlib.metadata import version

import pytest
from accuracy import bad

pytest.importorskip("transformers")
import zoo

SETS = [json.loads(zoo.TRUTH.with_name(name).read_text()) for name in ("zoo.json", "zoo2.json")]
MODELS = SETS[0]["models"] | SETS[1]["models"]
SOME = [
    "bert",
    "gpt2",
    "lfm2",
    "vit_mae",
    "gemma2",
    "mixtral",
    "mpnet",
    "opt",
    "qwen2",
    "olmo3",
    "canine",
    "jetmoe",
]  # clean, stale, and some that break


def test_every_model_was_measured():
    assert [set(body["models"]) for body in SETS] == [set(zoo.NAMES), set(zoo.MORE)]
    assert {row["eager"] for row in MODELS.values()} == {"ok"}


@pytest.mark.parametrize("name", SOME)
def test_the_verdict_is_what_a_gpu_did(name):
    answer = zoo.look(name, live=False)
    assert "error" not in answer
    assert bool(answer["errors"]) == bad(MODELS[name]), (answer, MODELS[name])
    if (at := MODELS[name].get("at")) and version("transformers") == SETS[0]["transformers"]:
        assert at[-1] in [places[-1] for _, *places in answer["errors"]]  # the line that broke the capture
