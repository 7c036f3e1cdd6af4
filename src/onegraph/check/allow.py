"""Allowances in the source: `# onegraph: allow[CG101] reason`, on the line of the finding or the line above it.

It may stand behind another comment (`# noqa: E501  # onegraph: allow[CG101] reason`). Several codes, names or prefixes
of codes (`CG1`) stand in one bracket, separated by commas. An allowance without a reason allows nothing and is a
finding itself (CG402); one that no longer fires is too (CG403), but only where the ways of looking that were run would
have seen it and its line was reached.
"""

import io
import os
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from onegraph.check.report import Finding, Origin, Report, ordered
from onegraph.check.rules import RULES, fix, prefix_of

_ALLOW = re.compile(r"(?<![`'\"\w])(?<![`'\"]#)(?<![`'\"]# )onegraph:\s*allow\b\s*(?:\[([^\]]*)\])?[\s:,-]*")
"""Anywhere in a comment, but not where it is quoted: that speaks about allowances."""

_NO_REASON = re.compile(r"(?:^|\s*)#\s*(?:noqa|type:|pragma|pylint|pyright|mypy|ruff|fmt|isort|nosec)\b.*")
"""What another tool is told behind an allowance."""


@dataclass
class Allowance:
    """One allowance of a comment. `codes`: what the codes that it allows begin with; `unknown`: words that are no rule;
    `lines`: those it speaks for."""

    path: str
    line: int
    column: int
    source: str
    codes: tuple[str, ...]
    unknown: tuple[str, ...]
    reason: str
    lines: tuple[int, ...]
    used: set[str] = field(default_factory=set)


def apply(report: Report) -> Report:
    """The report without the findings that the source allows, with findings about allowances that say too little."""
    files = {f.path for f in report.findings} | {e.path for e in report.timeline if e.path}
    files |= {entry[0] for entry in report.facts.get("read", ())} | set(report.facts.get("allowing", ()))
    allowances = [a for path in sorted(files) for a in read(path)]
    by_place: dict[tuple[str, int], list[Allowance]] = {}
    for allowance in allowances:
        for line in allowance.lines:
            by_place.setdefault((os.path.realpath(allowance.path), line), []).append(allowance)
    kept = []
    allowed = 0
    for finding in report.findings:
        match = None
        for allowance in by_place.get((os.path.realpath(finding.path), finding.line), ()):
            fitting = [code for code in allowance.codes if finding.code.startswith(code)]
            if fitting:
                allowance.used.update(fitting)
                match = allowance if allowance.reason else match
        if match is None:
            kept.append(finding)
        else:
            allowed += 1
    looked = _Looked(report)
    about = [f for a in allowances for f in _about(a, report.origins, looked)]
    facts = {**report.facts, "allowed": allowed} if allowances else report.facts
    return replace(report, findings=ordered([*kept, *about]), facts=facts)


def read(path: str) -> list[Allowance]:
    """Allowances of a file; none if it cannot be read, which the reader has reported."""
    try:
        with tokenize.open(path) as handle:
            text = handle.read()
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return []
    if "onegraph:" not in text:
        return []
    lines = text.splitlines()
    found = []
    for number, column, comment in _comments(text):
        matches = list(_ALLOW.finditer(comment))
        if not matches:
            continue
        covered = [number]
        source = lines[number - 1] if number <= len(lines) else ""
        if not source[:column].strip():
            below = number
            while below < len(lines) and (not lines[below].strip() or lines[below].lstrip().startswith("#")):
                below += 1
            covered.append(below + 1)
        ends = [m.start() for m in matches[1:]] + [len(comment)]
        for match, end in zip(matches, ends, strict=True):
            codes, unknown = _codes(match.group(1) or "")
            reason = _NO_REASON.sub("", comment[match.end() : end]).strip().rstrip("#").strip()
            start = column + max(comment.rfind("#", 0, match.start()), 0)
            found.append(Allowance(path, number, start + 1, source, codes, unknown, reason, tuple(covered)))
    return found


def _codes(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the words in the bracket mean, and those that mean nothing."""
    codes, unknown = [], []
    for word in (w.strip() for w in text.split(",") if w.strip()):
        try:
            codes.append(prefix_of(word))
        except ValueError:
            unknown.append(word)
    return tuple(codes), tuple(unknown)


def _comments(text: str) -> Iterable[tuple[int, int, str]]:
    """(line, column from 0, text) of real comments: not of strings that look like one."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.start[1], token.string
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return


class _Looked:
    """Whether a way of looking that would have seen a hazard has looked at the allowance's line."""

    def __init__(self, report: Report) -> None:
        self._origins = report.origins
        self._read: dict[str, set[tuple[int, int]]] = {}
        for path, first, last in report.facts.get("read", ()):
            self._read.setdefault(os.path.realpath(path), set()).add((first, last))
        self._ran = {(os.path.realpath(e.path), e.line) for e in report.timeline if e.path}
        self._whole = {os.path.realpath(path) for path in report.facts.get("allowing", ())}

    def reached(self, allowance: Allowance) -> bool:
        """Whether the allowance speaks about code that was looked at, not about a neighbour of it in the file."""
        path = os.path.realpath(allowance.path)
        spans = self._read.get(path, ())
        return (
            path in self._whole
            or bool(allowance.used)
            or any(first <= line <= last for first, last in spans for line in allowance.lines)
            or any((path, line) in self._ran for line in allowance.lines)
        )

    def at(self, allowance: Allowance, code: str) -> bool:
        """Source reading knows the functions that it read, a run the lines whose ops it saw. `code`: or a prefix: then
        each of its rules."""
        return all(self._at(allowance, rule.seen) for name, rule in RULES.items() if name.startswith(code))

    def _at(self, allowance: Allowance, seen: dict[Origin, str]) -> bool:
        path = os.path.realpath(allowance.path)
        if Origin.SOURCE in self._origins and seen.get(Origin.SOURCE) == "yes":
            spans = self._read.get(path, ())
            if any(first <= line <= last for first, last in spans for line in allowance.lines):
                return True
        ran = any((path, line) in self._ran for line in allowance.lines)
        return ran and any(seen.get(o) == "yes" for o in self._origins if o is not Origin.SOURCE)


def _about(allowance: Allowance, origins: tuple[Origin, ...], looked: _Looked) -> list[Finding]:
    """What is to be said about the allowance itself."""
    if not looked.reached(allowance):
        return []
    if not allowance.codes and not allowance.unknown:
        return [_finding("CG402", allowance, "the allowance names no rule: write allow[CG101] and the reason", origins)]
    found = []
    if not allowance.reason:
        text = f"allow[{', '.join(allowance.codes + allowance.unknown)}] has no reason after it, so it allows nothing"
        found.append(_finding("CG402", allowance, text, origins))
    for word in allowance.unknown:
        text = f"allow[{word}]: there is no such rule; allowed codes, prefixes and names, as `onegraph rule` lists them"
        found.append(_finding("CG403", allowance, text, origins))
    unused = (code for code in allowance.codes if code not in allowance.used and looked.at(allowance, code))
    told = (f"{code} does not fire here: nothing to allow" for code in unused)
    return [*found, *(_finding("CG403", allowance, text, origins) for text in told)]


def _finding(code: str, allowance: Allowance, message: str, origins: tuple[Origin, ...]) -> Finding:
    rule = RULES[code]
    return Finding(
        code=code,
        severity=rule.severity,
        origin=origins[0] if origins else Origin.SOURCE,
        path=allowance.path,
        line=allowance.line,
        column=allowance.column,
        source=allowance.source,
        message=message,
        happens=rule.happens,
        fix=fix(code),
    )
