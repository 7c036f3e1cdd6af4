"""A report for people at a terminal: the line, a caret, what happens, which values, the calls, what to do."""

import os
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from onegraph.check.output import plural, verdict_words
from onegraph.check.report import Finding, Report, Severity, Verdict, relative
from onegraph.check.rules import RULES

_COLORS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.UNVERIFIED: "35", Severity.NOTE: "36"}
_MARKS = {
    Verdict.CAPTURABLE: "32",
    Verdict.WARNINGS: "33",
    Verdict.UNVERIFIED: "35",
    Verdict.NOT_CAPTURABLE: "31",
}


def render(report: Report, *, color: bool = False) -> str:
    """The whole report, ending in the verdict: that of each target, then the worst."""
    parts = [finding(f, color=color, following=report.following(f)) for f in report.counted]
    told = [summary(each, color=color) for each in report.each]
    if report.parts:
        whole = replace(report, target=f"{len(report.parts)} targets")
        told.append(summary(whole, color=color, ran="files" in report.facts))
    return "\n".join([*parts, "".join(told)])


def finding(f: Finding, *, color: bool = False, following: Sequence[Finding] = ()) -> str:
    """One finding, with those that only follow from it."""
    paint = _painter(color)
    name = RULES[f.code].name if f.code in RULES else ""
    gutter = " " * len(str(f.line))
    lines = [
        f"{paint(f'{f.code} {f.severity}', _COLORS[f.severity])} {paint(name, '1')}",
        f"{gutter}--> {relative(f.path)}:{f.line}:{f.column}",
    ]
    text = f.source.expandtabs(4)
    if text.strip():
        cut = len(text) - len(text.lstrip())
        lines.append(f"{gutter} |")
        lines.append(f"{f.line} | {text[cut:]}")
        column = max(len(f.source[: f.column - 1].expandtabs(4)) - cut, 0)
        lines.append(f"{gutter} | {' ' * column}{paint('^', _COLORS[f.severity])}")
    lines += _note(gutter, "", f.message)
    if f.happens:
        lines += _note(gutter, "then: ", f.happens)
    for value in f.values[:6]:
        lines += _note(gutter, "  ", value)
    if len(f.values) > 6:
        lines += _note(gutter, "  ", f"... {len(f.values) - 6} more")
    if len(f.calls) > 1:
        chain = " > ".join(f"{_function(c.function)} ({os.path.basename(c.path)}:{c.line})" for c in f.calls)
        lines += _note(gutter, "calls: ", chain)
    if f.count > 1:
        lines += _note(gutter, "", f"reached {f.count} times in the steps that were run")
    if f.fix:
        lines += _note(gutter, "fix: ", f.fix)
    for other in following:
        place = f"line {other.line}" if other.path == f.path else f"{relative(other.path)}:{other.line}"
        lines += _note(gutter, "follows from it: ", f"{place}: {other.code} {other.message}")
    return "\n".join(lines) + "\n"


def summary(report: Report, *, color: bool = False, ran: bool = True) -> str:
    """The verdict and the counts in one or two lines. ran: and how the target was looked at."""
    paint = _painter(color)
    counts = Counter(f.severity for f in report.counted)
    words = [f"{counts[s]} {plural(s, counts[s])}" for s in Severity if counts[s]]
    said = "; ".join(["read in the source"] * ("source" in report.origins) + _ran(report))
    verdict = paint(verdict_words(report), _MARKS[report.verdict])
    follow = len(report.findings) - len(report.counted)
    words += [f"{follow} more that follow{'s' * (follow == 1)}"] * bool(follow)
    line = f"{report.target}: {verdict}"
    if words:
        line += f" ({', '.join(words)})"
    tail = [f"  {said}"] if said and ran else []
    memory = memory_line(report.facts.get("memory", {}))
    if memory and report.verdict is not Verdict.NOT_CAPTURABLE:  # no graph that anybody will hold
        tail.append(f"  {memory}")
    if "source" in report.facts:
        tail.append(f"  source: {report.facts['source']}")
    if "unknown" in report.facts:
        tail += textwrap.wrap(report.facts["unknown"], 110, initial_indent="  ", subsequent_indent="    ")
    for words in report.facts.get("declared", ()):
        tail.append(f"  {words}")
    if "probe ended" in report.facts:
        tail.append("  " + " ".join(report.facts["probe ended"].split()))
    if report.facts.get("allowed"):
        tail.append(f"  {report.facts['allowed']} allowed in the source")
    return "\n".join([line, *tail]) + "\n"


def memory_line(memory: dict[str, Any]) -> str:
    """What a graph holds, in one line; nothing where it holds nothing."""
    if not memory.get("pool"):
        return ""
    told = f"memory of the graph: {size(memory['pool'])}, at its peak {size(memory['peak'])} of tensors"
    if memory.get("at the peak"):
        worst = memory["at the peak"][0]
        told += f" ({size(worst['bytes'])} of line {os.path.basename(worst['path'])}:{worst['line']})"
    if "second graph of the pool" in memory:
        told += f"; a second such graph in its pool adds {size(memory['second graph of the pool'])}"
    return told


def size(nbytes: int) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= step:
            return f"{nbytes / step:.1f} {unit}"
    return f"{nbytes} B"


def _ran(report: Report) -> list[str]:
    told = []
    captures = report.facts.get("captures")
    if captures is not None:
        told.append(_captured(captures, report.facts.get("compiled calls", 0)))
    elif "simulate" in report.origins:
        told.append(f"{report.steps} steps simulated")
    if "live" in report.origins:
        told.append("captured and replayed on a GPU")
    if "files" in report.facts:
        counts = [("files", "file", ""), ("steps found", "step", " found"), ("functions", "function", " read")]
        told.append(", ".join(_some(report.facts[key], what) + end for key, what, end in counts if key in report.facts))
    return told


def _captured(captures: list[dict[str, Any]], calls: int) -> str:
    """What a program captured and replayed, and how much of that was compared with eager."""
    replays, compared = (sum(c[key] for c in captures) for key in ("replays", "compared"))
    words = f"{_some(len(captures), 'capture')}, {_some(replays, 'replay')}"
    told = f"run on the simulated machine: {words}, {compared} compared with eager"
    if calls:
        told += f"; {_some(calls, 'call')} of functions that torch compiles with graphs of its own"
    reasons = sorted({c["not compared"] for c in captures if "not compared" in c})
    return f"{told} (others not: {'; '.join(reasons)})" if reasons else told


def _note(gutter: str, label: str, text: str) -> list[str]:
    body = textwrap.wrap(text, 110, initial_indent=label, subsequent_indent=" " * len(label)) or [label]
    return [f"{gutter} {'=' if i == 0 else ' '} {line}" for i, line in enumerate(body)]


def _function(name: str) -> str:
    return name.rsplit("<locals>.", 1)[-1]


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _painter(color: bool) -> Callable[[str, str], str]:
    return (lambda text, code: f"\x1b[{code}m{text}\x1b[0m") if color else (lambda text, code: text)
