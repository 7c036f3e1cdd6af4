"""A few hundred fuzz cases; `make fuzz` runs ten thousand. And quantization, killed where it hurts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuzz import tiny
from fuzz.run import Failure, Fuzzer, invoke, judge

BLOCKS, EACH = 12, 25
FIRST_SEED = 20_000

# For each line of stdin, which holds seconds and the words of a command: a process, forked when imports are done, runs
# onegraph and dies without a word after so many seconds. Its status is a line of stdout.
KILLED = """
import json, os, signal, sys, threading, time
import onegraph.cli, onegraph.api.quantize
def die(seconds):
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
for line in sys.stdin:
    seconds, words = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(2, 1)
        threading.Thread(target=die, args=[seconds], daemon=True).start()
        sys.exit(onegraph.cli.main(words))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    torch.set_num_threads(1)
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


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


def test_quantization_killed_at_random_points_resumes_to_the_same_bytes(fuzzer: Fuzzer, tmp_path: Path) -> None:
    """SIGKILL, again and again, then once to the end: file by file the bytes of a run that nothing disturbed."""

    def content(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "stderr").open("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-c", KILLED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def run(output: Path, seconds: float) -> int:
            command = ["quantize", str(fuzzer.plain), str(output), "--bits", "3", "--lm-head", "4", "--calibration"]
            command += [str(fuzzer.text), "--tokens", "1024", "--sequence", "64", "--recipe", "good"]
            process.stdin.write(json.dumps([seconds, command]) + "\n")
            process.stdin.flush()
            status = process.stdout.readline()
            assert status in ("0\n", f"{-signal.SIGKILL}\n"), (status, errors.seek(0), errors.read()[-500:])
            return int(status)

        assert run(tmp_path / "whole", 1000) == 0
        rng, killed = random.Random(7), 0
        for _ in range(6):
            if run(tmp_path / "killed", rng.uniform(0.05, 1.0)) == 0:
                break
            killed += 1
            assert not (tmp_path / "killed").exists()
        if not (tmp_path / "killed").exists():
            assert run(tmp_path / "killed", 1000) == 0
    assert killed, "it was never killed"
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob(".*"))
