"""What the tests of `onegraph check --run` share."""

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
