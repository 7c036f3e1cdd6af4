"""What is wrong outside of the program, by its true name: full disks, closed streams, little memory, strange bytes.

Each case is a process of its own, since streams, limits and locales are a process's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph.cli import build_parser
from onegraph.formats.suggestion import suggestion
from tools.__main__ import build_parser as build_tools_parser


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("errors") / "plain")


def run(*words: object, before: Any = None, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """`python -m onegraph words`, which is what is tested too."""
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stdin", subprocess.DEVNULL)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    command = [sys.executable, "-m", "onegraph", *(w if isinstance(w, bytes) else str(w) for w in words)]
    return subprocess.run(command, stderr=subprocess.PIPE, preexec_fn=before, env=environment, timeout=120, **options)


def fails(done: subprocess.CompletedProcess[bytes], *words: str, status: int = 2) -> None:
    """One line on stderr, with the words, and the status."""
    errors = done.stderr.decode()
    said = [line for line in errors.splitlines() if line.startswith("onegraph: ")]
    assert done.returncode == status, errors
    assert len(said) == 1, errors
    assert errors.endswith(said[0] + "\n"), "it is the last line"
    assert "internal error" not in errors
    assert "Traceback" not in errors
    for word in words:
        assert word in said[0], said[0]


def ask(model: Path, *more: object) -> list[object]:
    return ["generate", model, "--raw", "--prompt", "the", "--max-tokens", 3, *more]


# ----------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["rule"], ["rule", "CG101"], ["quantize", "--help"]], ids=" ".join)
def test_a_full_disk_behind_stdout(words: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = run(*words, stdout=full, env={"PYTHONUNBUFFERED": unbuffered})
    fails(done, "error: standard output: No space left on device")


def test_a_full_disk_behind_an_answer(model: Path) -> None:
    for more in ([], ["--json"]):
        with open("/dev/full", "wb") as full:
            fails(run(*ask(model, *more), stdout=full), "error: standard output: No space left on device")


def closed(*descriptors: int) -> Any:
    return lambda: [os.close(descriptor) for descriptor in descriptors]


@pytest.mark.parametrize("words", [["--help"], ["rule"], ["env", "--json"]], ids=" ".join)
def test_stdout_that_is_closed(words: list[str]) -> None:
    fails(run(*words, before=closed(1)), "standard output: is closed; redirect it")


def test_stdin_that_is_closed(model: Path) -> None:
    for words in (["generate", model, "--prompt", "-"], ["eval", model, "--text", "-"]):
        fails(run(*words, before=closed(0)), "standard input is closed, and '-' reads it")
    assert run("rule", before=closed(0)).returncode == 0, "who does not read it does not miss it"


def test_stdin_that_cannot_be_read(model: Path) -> None:
    with open("/dev/null", "wb") as writable:
        done = run("generate", model, "--prompt", "-", stdin=writable)
    fails(done, "standard input: cannot be read: Bad file descriptor")


def test_stderr_that_is_closed(model: Path) -> None:
    """The status says it; nothing of it lands on stdout, or in the file that is opened next."""
    done = run("generate", model / "none", "--prompt", "x", before=closed(2))
    assert (done.returncode, done.stdout) == (2, b"")
    done = run(*ask(model), before=closed(0, 2))
    assert done.returncode == 0
    assert done.stdout


def test_stderr_that_cannot_be_written(model: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "onegraph", "verify", model / "none"], stdout=subprocess.PIPE, stderr=full
        )
    assert (done.returncode, done.stdout) == (2, b"")


# ------------------------------------------------------------------------------------------------ files and memory


def small_files(size: int) -> dict[str, Any]:
    """Writing stops short as on a full disk, with another number. No .pyc: Python would keep a part of one."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return {"before": limit, "env": {"PYTHONDONTWRITEBYTECODE": "1"}}


def test_a_file_that_cannot_be_written_whole(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the thing in the inn, and a hat. " * 100)
    quick = ["--calibration", text, "--num-calibration-tokens", 128, "--calibration-seq-len", 64, "--recipe", "quick"]
    fails(run("quantize", model, tmp_path / "a", *quick, **small_files(4096)), "a.partial/", "File too large")
    fails(run("quantize", model, tmp_path / "b", "--format", "nvfp4", **small_files(4096)), "/.b.tmp/", "File too")
    assert not list(tmp_path.glob(".b*")), "nothing is left"
    (tmp_path / "step.py").write_text(STEPS)
    page = tmp_path / "page.html"
    done = run("check", tmp_path / "step.py", "--allow-no-steps", "--html", page, **small_files(16))
    fails(done, "page.html: File too large")


def test_a_limit_on_addresses() -> None:
    limit = 200 << 20  # Python starts, torch does not
    done = run("env", before=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    fails(done, "error: out of memory: ", "209.7 MB of addresses (ulimit -v); raise the limit")


def test_memory_that_a_model_cannot_have(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    import onegraph.api.verify

    def greedy(*_: Any, **__: Any) -> Any:
        return bytearray(1 << 60)

    monkeypatch.setattr(onegraph.api.verify, "verify", greedy)
    status, out, errors = invoke(["verify", model])
    assert (status, out) == (2, "")
    assert "error: out of memory: " in errors
    assert errors.count("\n") == 1


# --------------------------------------------------------------------------------------------------------- interrupts

PRESSED = """
import signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.linalg":  # torch imports numpy, half of which is there
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell
sys.meta_path.insert(0, Press())
from onegraph.cli import main
sys.exit(main())
"""


def test_an_interrupt_while_torch_is_imported_is_kept(model: Path) -> None:
    """Torch imports numpy from C and drops what is raised there: the command would run on with half of numpy."""
    command = [sys.executable, "-c", PRESSED, "verify", model]
    done = subprocess.run(command, capture_output=True, timeout=120)
    fails(done, "interrupted", status=130)


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    """A shell starts what runs in the background so."""
    code = "import signal; from onegraph.cli import main; main(); print(signal.getsignal(signal.SIGINT))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.stdout.splitlines()[1:] == [str(signal.SIG_IGN).encode()]


# --------------------------------------------------------------------------------------------------------- arguments


def test_an_argument_that_is_not_utf8(model: Path) -> None:
    fails(run("generate", model, "--prompt", b"a\xff"), "argument 4, 'a\\udcff', is not UTF-8")
    fails(run("verify", os.fsencode(model) + b"\xff"), "argument 2, ", "is not UTF-8; rename the file")
    done = run("generate", model, "--prompt", "é", env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    fails(done, "cannot be read as ascii, the locale's encoding; set LC_ALL=C.UTF-8")


def test_a_terminal_of_few_characters(model: Path) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = run("generate", model, "--raw", "--prompt", "the é", "--max-tokens", 3, "--json", env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode("ascii"))["outputs"][0]["prompt"] == "the é"
    (model.parent / "two.txt").write_text("the é\nthe\n")
    done = run("generate", model, "--raw", "--batch", model.parent / "two.txt", "--max-tokens", 1, env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"> the \\xe9\n")
    fails(run("generate", model.parent / "é", "--prompt", "x", env=ascii_only), "/\\xe9: no such model")


def test_did_you_mean(model: Path) -> None:
    cases = [
        (["genrate", model], "invalid choice: 'genrate'; did you mean generate?"),
        (["generate", model, "--promt", "x"], "unrecognized arguments: --promt; did you mean --prompt?"),
        (["generate", model, "--promt=x"], "did you mean --prompt?"),
        (["generate", model, "--prompt", "x", "--max-token", "3"], "--max-token; did you mean --max-tokens?"),
        (["quantize", model, "out", "--recipe", "god"], "'god'; did you mean good? (choose from quick, good, best)"),
        (["check", "--step", "3"], "--step; did you mean --steps?"),
        (["bench", "stop", model], "did you mean step?"),
    ]
    for words, says in cases:
        status, out, errors = invoke(words)
        assert (status, out) == (2, "")
        assert says in errors
    assert "did you mean" not in invoke(["generate", model, "--prompt", "x", "--wat"])[2]
    assert suggestion("--", ["--a", "--b"]) == ""


def test_an_option_has_one_range_in_all_commands() -> None:
    ranges: dict[str, dict[str, object]] = {}
    commands: dict[str, argparse.ArgumentParser] = {}
    for build in (build_parser, build_tools_parser):
        commands |= build()._subparsers._group_actions[0].choices
    parsers = {name: parser for name, parser in commands.items() if name not in ("check", "rule")}
    for form, parser in parsers["bench"]._subparsers._group_actions[0].choices.items():
        parsers[f"bench {form}"] = parser
    for name, parser in parsers.items():
        for action in parser._actions:
            if action.type is not None and action.type.__name__ == "parse":
                ranges.setdefault(action.option_strings[0], {})[name] = bounds(action)
    assert {"--seed", "--steps", "--context", "--batch", "--tokens", "--max-tokens"} <= ranges.keys()
    unequal = {option: found for option, found in ranges.items() if len(set(map(str, found.values()))) > 1}
    assert not unequal


def bounds(action: argparse.Action) -> str:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        action.type("x")
    return str(caught.value)


def test_debug_is_told_of_and_shows_where(tmp_path: Path) -> None:
    assert "--debug" in invoke(["--help"])[1]
    done = run("verify", tmp_path / "none", "--debug")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"no such model" in done.stderr


def test_python_m_onegraph() -> None:
    assert run("--version").stdout.startswith(b"onegraph ")


# ------------------------------------------------------------------------------------------------------------- check

STEPS = """
import torch

def factory(body):
    return lambda: (body, lambda i: (torch.ones(4, device="cuda"),))

def endless(y):
    while True:
        y = y + 1

def stubborn(y):
    while True:
        try:
            y = 1
        except BaseException:
            pass

good, never, deaf = factory(lambda y: y + 1), factory(endless), factory(stubborn)
"""


def test_a_step_without_an_end(tmp_path: Path) -> None:
    file = tmp_path / "step.py"
    file.write_text(STEPS)
    started = time.monotonic()
    fails(run("check", f"{file}:never", "--timeout", 6), "still running at ", "step.py:", "--timeout allows more")
    fails(run("check", f"{file}:deaf", "--timeout", 6), "target", "still running", "after 6 s")
    (tmp_path / "module.py").write_text("while True:\n    pass\n")
    fails(run("check", f"{tmp_path / 'module.py'}:f", "--timeout", 2), "module.py:", "still running", "after 2 s")
    assert time.monotonic() - started < 100
    assert run("check", f"{file}:good").returncode == 0


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--steps", "2", "allowed 3 to 10000"),
        ("--steps", "1000000000", "allowed 3 to 10000"),
        ("--timeout", "nan", "allowed 0.1 to 86400 seconds"),
        ("--timeout", "inf", "allowed 0.1 to 86400 seconds"),
        ("--timeout", "0", "allowed 0.1 to 86400 seconds"),
    ],
)
def test_check_is_bounded(tmp_path: Path, option: str, value: str, says: str) -> None:
    status, out, errors = invoke(["check", f"{tmp_path}/step.py:good", option, value])
    assert (status, out) == (2, "")
    assert says in errors


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    for target, says in ((f"{tmp_path}/pipe.py:f", "not a regular file"), (f"{tmp_path}/pipe.py", "neither a regular")):
        status, _, errors = invoke(["check", target])
        assert status == 2
        assert says in errors
    (tmp_path / "good.py").write_text("import torch\n")
    status, _, errors = invoke(["check", tmp_path, "--allow-no-steps"])
    assert status == 2
    assert "pipe.py: not a regular file" in errors
