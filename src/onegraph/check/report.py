"""What a check found: the data model that source reading, simulation, the GPU and every output format share.

Standard library only. Paths are absolute as Python saw them; `relative` shortens them for people.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

FORMAT_VERSION = 1


class Severity(StrEnum):
    """How sure and how bad.

    error: capture fails, or a replay differs from eager (the referee saw it, or CUDA said so).
    warning: a hazard that did not change the result in the steps that were run, or that source reading suspects.
    unverified: nothing could look inside (a Triton launch, a custom op, ctypes); never to be read as safe.
    note: worth knowing, never counted.
    """

    ERROR = "error"
    WARNING = "warning"
    UNVERIFIED = "unverified"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """From 0, a note, to 3, an error: the worse, the larger."""
        return ("note", "warning", "unverified", "error").index(self)


class Origin(StrEnum):
    SOURCE = "source"
    SIMULATE = "simulate"
    LIVE = "live"


class Verdict(StrEnum):
    CAPTURABLE = "capturable"
    WARNINGS = "capturable with warnings"
    UNVERIFIED = "unverified"
    NOT_CAPTURABLE = "not capturable"


SILENT = "silently stale"
"""`Finding.happens` of a hazard that captures without an error and replays old data."""


class CheckError(ValueError):
    """The check could not run (bad target, a factory or step that raises): one line for people, exit code 2."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One call on the way from `step` to the finding: `function` at `path`:`line`, whose text is `source`."""

    path: str
    line: int
    function: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The finding that another one follows from: its code at `path`:`line`."""

    path: str
    line: int
    code: str

    @property
    def place(self) -> tuple[str, int, str]:
        return (os.path.realpath(self.path), self.line, self.code)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One hazard at one place.

    Args:
        code: rule code, e.g. "CG101".
        path, line, column: the user's code; line and column count from 1.
        source: that line's text, without the line break.
        message: what the code does here, one sentence, no full stop.
        happens: the error CUDA gives, or `SILENT`, or "" where nothing happens by itself (CG4xx).
        values: what differs between steps, one entry a line, e.g. "step 0: 3", "step 1: 4".
        calls: chain of calls from `step` (first) to the line itself (last); empty where unknown (source reading).
        fix: what to do.
        count: how often the place was reached in the steps that were run.
        follows: the finding that this one only follows from; where the report has that, this one is not counted.
    """

    code: str
    severity: Severity
    origin: Origin
    path: str
    line: int
    column: int = 1
    source: str = ""
    message: str
    happens: str = ""
    values: tuple[str, ...] = ()
    calls: tuple[Frame, ...] = ()
    fix: str = ""
    count: int = 1
    follows: Cause | None = None

    @property
    def place(self) -> tuple[str, int, str]:
        """Two findings of the same place and code are one finding, whoever found it."""
        return (os.path.realpath(self.path), self.line, self.code)

    @property
    def silent(self) -> bool:
        return self.happens == SILENT


@dataclass(frozen=True, kw_only=True)
class Event:
    """One op of the step's timeline, as the first step ran it.

    Args:
        name: e.g. "aten::add.Tensor", "cuda:synchronize", "h2d", "triton:my_kernel".
        kind: "op", "sync" (the host waits), "h2d", "d2h", "alloc", "launch" (unverified) or "break".
        reads, writes, allocates: storage numbers; those below `external` in `Report.storages` existed before the step.
        bytes: newly allocated bytes.
        codes: rule codes of the findings raised by this event.
    """

    index: int
    name: str
    kind: str
    path: str
    line: int
    module: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()
    bytes: int = 0
    codes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StorageInfo:
    """A storage of the timeline. kind: "input", "external" (parameter, buffer, cache) or "graph" (made in the step)."""

    number: int
    kind: str
    bytes: int
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a check says about one target, or about several.

    Args:
        target: what was asked for, as typed.
        origins: which ways of looking were run.
        steps: steps simulated or replayed (0 for source reading alone).
        facts: versions, timings and figures, e.g. {"torch": "2.13.0", "replay error": 0.0}.
        parts: the targets' own reports, where these are several: then facts, timeline and storages are theirs.
    """

    target: str
    findings: tuple[Finding, ...] = ()
    origins: tuple[Origin, ...] = ()
    steps: int = 0
    timeline: tuple[Event, ...] = ()
    storages: tuple[StorageInfo, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    parts: tuple["Report", ...] = ()

    def __str__(self) -> str:
        """The report as `onegraph check` prints it."""
        from onegraph.check.output import text

        return text.render(self).rstrip("\n")

    @property
    def each(self) -> tuple["Report", ...]:
        """A report for each target, with those of its findings that are left in this one."""
        left = {f.place for f in self.findings}
        kept = (replace(p, findings=tuple(f for f in p.findings if f.place in left)) for p in self.parts)
        return tuple(kept) or (self,)

    @property
    def counted(self) -> tuple[Finding, ...]:
        """Findings without those that follow from another one of the report."""
        places = {f.place for f in self.findings}
        return tuple(f for f in self.findings if f.follows is None or f.follows.place not in places)

    def following(self, finding: Finding) -> tuple[Finding, ...]:
        """The findings that follow from this one."""
        return tuple(f for f in self.findings if f.follows is not None and f.follows.place == finding.place)

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(f for f in self.counted if f.severity is severity)

    @property
    def errors(self) -> tuple[Finding, ...]:
        return self.of(Severity.ERROR)

    @property
    def codes(self) -> frozenset[str]:
        return frozenset(f.code for f in self.findings)

    @property
    def verdict(self) -> Verdict:
        if self.of(Severity.ERROR):
            return Verdict.NOT_CAPTURABLE
        if self.of(Severity.UNVERIFIED):
            return Verdict.UNVERIFIED
        if self.of(Severity.WARNING):
            return Verdict.WARNINGS
        return Verdict.CAPTURABLE

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Why not everything was looked at: a program that ended early, files that cannot be read, targets that could
        not be checked."""
        why = [f"{self.target}: {self.facts['ended']}"] if "ended" in self.facts else []
        if files := self.facts.get("unreadable"):
            why.append(f"{self.target}: {len(files)} of the files could not be read")
        return (*why, *self.facts.get("failed", ()))

    def exit_code(self, *, strict: bool = False) -> int:
        """0 without errors, 1 with, 2 where the report is `incomplete`; `strict` counts warnings and unverified
        launches as errors."""
        if self.incomplete:
            return 2
        counted = {Severity.ERROR, Severity.WARNING, Severity.UNVERIFIED} if strict else {Severity.ERROR}
        return int(any(f.severity in counted for f in self.counted))

    def select(self, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> "Report":
        """Only findings whose code starts with one of `select` (all, if empty) and with none of `ignore`."""
        kept = tuple(
            f
            for f in self.findings
            if (not select or f.code.startswith(tuple(select))) and not (ignore and f.code.startswith(tuple(ignore)))
        )
        return replace(self, findings=kept)

    def to_json(self, *, indent: int | None = 2) -> str:
        """One JSON object; `format_version` changes when a reader would have to."""
        body = asdict(self)
        for report, told in ((self, body), *zip(self.parts, body["parts"], strict=True)):
            told["facts"] = plain(report.facts)
            told["verdict"] = report.verdict
        body["format_version"] = FORMAT_VERSION
        body["counts"] = {severity.value: len(self.of(severity)) for severity in Severity}
        return json.dumps(body, indent=indent, default=str, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report that `to_json` wrote. Raises ValueError on another format version."""
        body = json.loads(text)
        if body.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"report format: got {body.get('format_version')!r}, allowed {FORMAT_VERSION}; write it again"
            )
        return cls._of(body)

    @classmethod
    def _of(cls, body: dict[str, Any]) -> "Report":
        return cls(
            target=body["target"],
            findings=tuple(_finding(f) for f in body["findings"]),
            origins=tuple(Origin(o) for o in body["origins"]),
            steps=body["steps"],
            timeline=tuple(Event(**{k: _tuple(v) for k, v in e.items()}) for e in body["timeline"]),
            storages=tuple(StorageInfo(**s) for s in body["storages"]),
            facts=body["facts"],
            parts=tuple(cls._of(part) for part in body.get("parts", ())),
        )


def one_per_place(findings: Iterable[Finding], joined: Callable[[Finding, Finding], Finding]) -> tuple[Finding, ...]:
    """The findings in reading order, with one for each code and place: `joined(first, later)` of those there are."""
    found: dict[tuple[str, int, str], Finding] = {}
    for finding in findings:
        known = found.get(finding.place)
        found[finding.place] = finding if known is None else joined(known, finding)
    return ordered(found.values())


def plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts as JSON can hold them: it has no word for the error of a replay that gives another shape, infinity."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """By severity, then file, line and code: the order in which people read them."""
    return tuple(sorted(findings, key=lambda f: (-f.severity.rank, f.path, f.line, f.column, f.code)))


def relative(path: str) -> str:
    """`path` as seen from the working directory, absolute where it lies elsewhere."""
    try:
        short = os.path.relpath(path)
    except ValueError:  # another drive
        return path
    return path if short.startswith("..") else short


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _finding(body: dict[str, Any]) -> Finding:
    body = dict(body)
    body["severity"] = Severity(body["severity"])
    body["origin"] = Origin(body["origin"])
    body["calls"] = tuple(Frame(**frame) for frame in body["calls"])
    body["values"] = tuple(body["values"])
    body["follows"] = Cause(**body["follows"]) if body.get("follows") else None
    return Finding(**body)
