"""What a model writes: rules that judge answers, repetition and loops, and how long it says what a reference says."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz import tiny
from models import smollm2_gguf
from onegraph.api import generation
from onegraph.api.generation import TASKS, agreeing, compared, evaluate_generation, judged, looping, repetition, write
from onegraph.cli import main

RIGHT = (
    "The capital of France is Paris.", "Tokyo, of course.", "It is **Mercury**.", "H2O", "7", "A spider has 8 legs.",
    "2 + 3 = 5", "42.", "The answer is 99!", "Tuesday comes after Monday.", "Cold", 'The past tense of "go" is "went".',
    "You get Green.", "An elephant is larger.", "Yes.", "no", "Banana", '"HELLO"', "Apple\n- Banana\n\n3. Cherry\n",
    "1, 2, 3, 4, 5", 'Sure: {"name": "Ann", "age": 3}', "def add(a, b):\n    return a + b", "A cat.", "east.",
)  # fmt: skip
WRONG = (
    "London", "Kyoto", "Venus", "CO2", "There are 70 days.", "It has 18.", "25", "420", "199", "Wednesday", "warm",
    "He goes", "purple", "A mouse.", "Yes, it is cold", "yes", "banana banana", "Hello", "Apple\nBanana", "1 2 4 5",
    '{"name": "Ann"}', "add = lambda a, b: a + b", "Catalogue", "west",
)  # fmt: skip


def test_each_rule_takes_what_does_as_told_and_nothing_else() -> None:
    assert len(TASKS) == len(RIGHT) == len(WRONG)
    for task, right, wrong in zip(TASKS, RIGHT, WRONG, strict=True):
        assert task.judge(right), (task.prompt, right)
        assert not task.judge(wrong), (task.prompt, wrong)
        assert not task.judge(""), task.prompt


def test_repetition_and_loops() -> None:
    assert repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([1, 2, 3, 4] * 2) == pytest.approx(1 / 5)
    assert repetition([7] * 13) == pytest.approx(0.9)
    assert repetition([1, 2]) == 0.0
    assert looping([*range(40), *[5, 6, 7] * 12])
    assert not looping([5] * 31), "too short to tell"
    assert not looping([*[5, 6, 7] * 20, 8]), "it got out of it"
    assert not looping(list(range(20)) * 4), "a period of twenty is a refrain"


def test_agreement_ends_at_the_first_other_token() -> None:
    assert agreeing([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert agreeing([1, 2], [1, 2, 3]) == 2
    assert agreeing([], [1]) == 0


TEXT = "the thing in the inn and the hats that think in the night of the thin hen " * 30


HOW: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "progress": lambda *_: None}


def test_a_model_agrees_with_itself_and_not_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SPOKEN", 5)
    a, b = (str(tiny.write_model(tmp_path / name, seed=seed)) for seed, name in enumerate("ab"))
    few: dict[str, Any] = {**HOW, "pieces": 3}
    same = evaluate_generation(a, TEXT, reference=a, kv="exact", **few)
    assert same["same"] == 1.0
    assert same["agreeing"] > 0
    assert same["model"] == same["reference"]
    assert same["model"]["done"] == len(TASKS) - len(same["model"]["failed"])
    other = evaluate_generation(a, TEXT, reference=b, kv="exact", **few)
    assert other["same"] == 0.0
    assert other["agreeing"] < same["agreeing"]
    alone = evaluate_generation(a, TEXT, reference=None, kv="exact", **few)
    assert alone == {key: same[key] for key in ("pieces", "tasks", "model")}


def test_without_a_chat_template_nothing_is_asked(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "m")
    (path / "tokenizer_config.json").write_text("{}")
    written = write(str(path), TEXT, kv="exact", pieces=2, **HOW)
    assert written.answers is None
    assert judged(written)["done"] is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--needle", "64"], "--generation and --needle are separate measurements; give one of them"),
        (["--ab"], "--ab compares components of weights; it takes no --kv-cache-dtype, --needle or --generation"),
        ([], r"tokens; 224 are needed"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_model(tmp_path / "m")
    (tmp_path / "t.txt").write_text("abc")
    assert main(["eval", str(tmp_path / "m"), "--text", str(tmp_path / "t.txt"), "--generation", *more]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in told


@pytest.mark.slow
@pytest.mark.skipif(smollm2_gguf() is None, reason="needs SmolLM2: see CONTRIBUTING.md")
def test_smollm2_follows_some_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SPOKEN", 12)
    monkeypatch.setattr(generation, "ANSWER", 8)
    text, pieces = Path(os.__file__).read_text()[:4000], {"pieces": 1}
    exact = write(str(smollm2_gguf()), text, kv="exact", tasks=TASKS[:2], **pieces, **HOW)
    found = judged(exact, TASKS[:2])
    assert found["done"] == 2, json.dumps(found)
    codes = write(str(smollm2_gguf()), text, kv="turboquant:1", tasks=(), **pieces, **HOW)
    assert compared(codes, exact)["same"] == 0.0, "codes of one bit were not read"
