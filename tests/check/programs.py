"""What the tests of `onegraph check --run` share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

from onegraph.check import Report, Severity
from onegraph.check.program import run_program

Command = Callable[..., "subprocess.CompletedProcess[str]"]
"""What the fixture `here` gives."""

HEAD = """\
import torch
x = torch.ones(4, device="cuda")
w = torch.full((4,), 2.0, device="cuda")
"""


def ran(path: Path, text: str, *words: str) -> Report:
    """The report on a program of this text, which runs to its end."""
    script = path / "program.py"
    script.write_text(dedent(text))
    report = run_program([str(script), *words])
    assert "ended" not in report.facts, report.facts["ended"]
    return report


def lines(report: Report, severity: Severity = Severity.ERROR) -> set[tuple[str, int]]:
    """(code, line) of each finding of one severity."""
    return {(f.code, f.line) for f in report.of(severity)}


def line_of(text: str, part: str) -> int:
    """The number of the first line that `part` is in."""
    return next(i for i, line in enumerate(dedent(text).splitlines(), 1) if part in line)


def cli(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """`onegraph check` in a process of its own."""
    command = [sys.executable, "-m", "onegraph", "check", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


_COPIES = """
import os, sys
import torch
for program, *words in {programs!r}:
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        sys.argv = ["-c", *words]
        exec(compile(program, "<program>", "exec"), {{"__name__": "__main__"}})
        sys.exit()
    _, status = os.waitpid(pid, 0)
    print("== ended with", os.waitstatus_to_exitcode(status))
"""


def in_copies(programs: list[tuple[str, ...]], **environment: str) -> list[str]:
    """What each of (program, its arguments) prints in a copy of one process that has imported torch alone."""
    done = subprocess.run(
        [sys.executable, "-c", _COPIES.format(programs=programs)],
        text=True, capture_output=True, timeout=300, env=os.environ | environment,
    )  # fmt: skip
    *outputs, rest = done.stdout.split("== ended with 0\n")
    assert (len(outputs), rest) == (len(programs), ""), done.stdout + done.stderr
    return outputs
