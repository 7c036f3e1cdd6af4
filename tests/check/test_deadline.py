"""The bound on code under check, where it rings at an awkward place."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from onegraph.check.deadline import deadline
from onegraph.check.report import CheckError


def endless() -> None:
    while True:
        time.sleep(0.01)


class Stuck:
    def __del__(self) -> None:
        endless()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_that_is_stopped_says_nothing_and_the_next_ring_ends_the_step() -> None:
    def step() -> None:
        Stuck()
        endless()

    with pytest.raises(CheckError, match="still running"), deadline(0.2, "it"):
        step()


STUBBORN = """
import time
from pathlib import Path
from onegraph.check import deadline
from onegraph.check.simulate.calling import guarded

def step():
    while True:
        try:
            time.sleep(10)
        except BaseException:
            pass

deadline.AGAIN = 0.05
with deadline.deadline(0.2, "it"):
    guarded("step 0", step)
"""


def test_code_that_catches_everything_ends_with_the_process() -> None:
    """Although `os._exit` is kept from code under check."""
    done = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("onegraph: error: it: still running")
    assert done.stderr.count("\n") == 1


CRASHES = """
import ctypes
import torch

def decode():
    def step(x):
        ctypes.string_at(0)
        return x
    return step, lambda i: (torch.ones(4, device="cuda"),)
"""


def test_a_crash_names_the_line_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(CRASHES)
    command = [sys.executable, "-m", "onegraph.cli", "check", "crash.py:decode"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode < 0
    assert 'crash.py", line 7 in step' in ended.stderr
