"""The sandbox where the kernel filters no system calls: nothing of a checkpoint runs, unless that is allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import tiny
from onegraph.api import sandbox, sandbox_worker

# Runs a program as on a kernel without seccomp: prctl refuses the filter, as does the system call of that name.
WITHOUT = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
import sandbox_worker
prctl, seccomp, arch = {"x86_64": (157, 317, 0xC000003E), "aarch64": (167, 277, 0xC00000B7)}[os.uname().machine]
load, equal, give = 0x20, 0x15, 0x06
words = [(load, 0, 0, 0), (equal, 0, 2, prctl), (load, 0, 0, 16), (equal, 2, 1, 22), (equal, 1, 0, seccomp)]
words += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050016)]  # allow, EINVAL
made = [sandbox_worker._Instruction(*each) for each in words]
filter_ = sandbox_worker._Program(len(words), (sandbox_worker._Instruction * len(words))(*made))
call = ctypes.CDLL(None).prctl
call.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
if call(38, 1, 0, 0, 0) or call(22, 2, ctypes.addressof(filter_), 0, 0):
    sys.exit(99)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "m")


def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        WITHOUT,
        str(Path(sandbox_worker.__file__).parent),
        "-m",
        "onegraph",
        *map(str, words),
    ]
    environment = {name: value for name, value in os.environ.items() if name != sandbox.VARIABLE} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode == 99:
        pytest.skip("this kernel does not let a process filter its system calls")
    return done


def test_without_seccomp_nothing_of_a_checkpoint_runs(model: Path) -> None:
    """Neither its template nor its tokenizer; the line says how to allow it."""
    words = ["generate", model, "--prompt", "the", "--max-tokens", "2"]
    for how in ("--chat", "--raw"):
        refused = run(*words, how, **{sandbox.VARIABLE: "yes"} if how == "--raw" else {})
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.stderr
        assert "needs seccomp, which this machine does not give" in refused.stderr
        assert refused.stderr.endswith("set ONEGRAPH_SANDBOX=limits\n")
    allowed = run(*words, **{sandbox.VARIABLE: sandbox.LIMITS})
    assert allowed.returncode == 0, allowed.stderr


def test_env_tells_the_state_of_the_sandbox() -> None:
    def state(done: subprocess.CompletedProcess[str]) -> str:
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if line.startswith("sandbox")).split(None, 1)[1]

    assert state(run("env")).startswith("not available: the sandbox of templates")
    assert state(run("env", **{sandbox.VARIABLE: sandbox.LIMITS})) == "resource limits alone (ONEGRAPH_SANDBOX=limits)"
    assert sandbox.state() == "seccomp and resource limits"
