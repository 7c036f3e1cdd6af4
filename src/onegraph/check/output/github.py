"""Workflow commands: what GitHub Actions shows beside the lines of a pull request."""

import os

from onegraph.check.output import LEVELS, plural, verdict_words
from onegraph.check.report import Finding, Report, Severity
from onegraph.check.rules import RULES

_LEVELS = LEVELS | {Severity.NOTE: "notice"}


def render(report: Report, root: str | None = None) -> str:
    """One command a finding, then the verdict. Paths are relative to `root`, by default the checked-out repository
    (GITHUB_WORKSPACE), else the working directory."""
    root = os.path.realpath(root or os.environ.get("GITHUB_WORKSPACE") or os.getcwd())
    lines = [_command(finding, root) for finding in report.counted]
    counts = ", ".join(f"{len(report.of(s))} {plural(s, len(report.of(s)))}" for s in Severity if report.of(s))
    return "\n".join([*lines, f"{report.target}: {verdict_words(report)}" + (f" ({counts})" if counts else "")]) + "\n"


def failure(message: str) -> str:
    """The command for a check that could not run."""
    return f"::error title=onegraph check::{_text(message)}\n"


def _command(f: Finding, root: str) -> str:
    path = os.path.realpath(f.path)
    path = os.path.relpath(path, root) if path.startswith(root + os.sep) else path
    name = f"{f.code} {RULES[f.code].name}" if f.code in RULES else f.code
    where = {
        "file": path.replace(os.sep, "/"),
        "line": str(max(f.line, 1)),
        "col": str(max(f.column, 1)),
        "title": name,
    }
    said = [
        f.message,
        *([f"then: {f.happens}"] if f.happens else []),
        *f.values,
        *([f"fix: {f.fix}"] if f.fix else []),
    ]
    fields = ",".join(f"{key}={_property(value)}" for key, value in where.items())
    return f"::{_LEVELS[f.severity]} {fields}::{_text(chr(10).join(said))}"


def _text(value: str) -> str:
    """As the runner reads the text of a command: on one line."""
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _text(value).replace(":", "%3A").replace(",", "%2C")
