"""150 fuzz cases; `make fuzz` runs ten thousand. And quantization, killed where it hurts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fuzz import tiny
from fuzz.killed import kill
from fuzz.run import Failure, Fuzzer, invoke, judge

BLOCKS, EACH = 10, 15
FIRST_SEED = 20_000


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    torch.set_num_threads(1)
    made = Fuzzer(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_case_ends_in_one_line_or_in_success(fuzzer: Fuzzer, block: int) -> None:
    for seed in range(FIRST_SEED + block * EACH, FIRST_SEED + (block + 1) * EACH):
        fuzzer.run(seed)  # raises Failure, which names the seed: python -m tests.fuzz --count 1 --seed N


def test_the_undamaged_models_work(fuzzer: Fuzzer, tmp_path: Path) -> None:
    """Else a fuzzer that only sees errors would pass."""
    for model in (fuzzer.plain, fuzzer.sharded, fuzzer.gguf, fuzzer.quantized):
        for command in (
            ["generate", model, "--raw", "--prompt", "the thing", "--max-tokens", "3"],
            ["eval", model, "--text", fuzzer.text, "--tokens", "100"],
        ):
            status, out, errors = invoke(command)
            assert (status, errors.count("onegraph: ")) == (0, 0), errors
            assert out.strip()


@pytest.mark.parametrize(
    ("status", "errors"),
    [
        (70, "onegraph: internal error: KeyError: 'x'\n"),
        (1, ""),
        (2, ""),
        (2, "onegraph: error: one\nonegraph: error: two\n"),
        (2, "onegraph: error: one\nmore\n"),
        (2, "onegraph: error: 'NoneType' object has no attribute 'x'\n"),
        (2, "onegraph: error: " + "x" * 700 + "\n"),
        (0, "onegraph: error: one\n"),
        (0, "Traceback (most recent call last):\n"),
    ],
)
def test_the_judge_sees_what_it_must(tmp_path: Path, status: int, errors: str) -> None:
    judge(2, "", "onegraph: error: m/config.json: no such file\n", tmp_path)
    with pytest.raises(Failure):
        judge(status, "", errors, tmp_path)


def test_the_judge_sees_half_written_output(tmp_path: Path) -> None:
    (tmp_path / ".out.tmp").mkdir()
    with pytest.raises(Failure, match="half-written"):
        judge(0, "", "", tmp_path)
    (tmp_path / ".out.tmp").rmdir()
    tiny.write_model(tmp_path / "out")
    judge(0, "", "", tmp_path)
    with pytest.raises(Failure, match="yet an output"):
        judge(2, "", "onegraph: error: one\n", tmp_path)


def test_killed_quantization_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Two kills; `make kills` does a hundred of each command that is to go on or start again."""
    tally = kill("quantize", 2, seed=1, folder=tmp_path / "killed")
    assert tally.kills == 2
    assert tally.found == []
