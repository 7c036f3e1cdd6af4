"""A report as one self-contained HTML page: no network, no other file. The page is `page.html`; this fills in the data:
the report, and where it is of several targets that of each of them.

The page keeps its filters in the address (`#q=item&kind=sync&flagged=1`), so that a link shows what its sender saw.
"""

import json
import os
from pathlib import Path
from typing import Any

from onegraph.check.output import verdict_words
from onegraph.check.report import Finding, Frame, Report, plain, relative
from onegraph.check.rules import RULES

PAGE = Path(__file__).with_name("page.html")


def render(report: Report) -> str:
    """The page as text."""
    data = json.dumps(
        [_data(one) for one in (report, *report.each * bool(report.parts))],
        separators=(",", ":"),
        default=str,
        allow_nan=False,
    )
    # A script element ends at the first "</script"; in JSON "<" stands only inside strings, where it may be escaped.
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    title = _escape(f"{verdict_words(report)}: {report.target}")
    return PAGE.read_text(encoding="utf-8").replace("{{title}}", title).replace("{{data}}", safe)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _data(report: Report) -> dict[str, Any]:
    modules = {(event.path, event.line): event.module for event in report.timeline if event.module}
    counted = {id(f) for f in report.counted}
    used = sorted({f.code for f in report.findings})
    return {
        "target": report.target,
        "verdict": report.verdict.value,
        "words": verdict_words(report),
        "origins": [o.value for o in report.origins],
        "steps": report.steps,
        "facts": {k: v for k, v in plain(report.facts).items() if isinstance(v, str | int | float | bool)},
        "unread": list(report.facts.get("unread", ()))[:200],
        "findings": [
            {
                "code": f.code,
                "name": RULES[f.code].name if f.code in RULES else "",
                "severity": f.severity.value,
                "origin": f.origin.value,
                "file": relative(f.path),
                "line": f.line,
                "column": f.column,
                "source": f.source,
                "message": f.message,
                "happens": f.happens,
                "values": list(f.values),
                "calls": [_frame(c) for c in f.calls],
                "fix": f.fix,
                "count": f.count,
                "follows": _follows(f, counted),
                "module": modules.get((f.path, f.line), ""),
            }
            for f in report.findings
        ],
        "rules": {code: RULES[code].section("Why is this bad") for code in used if code in RULES},
        "timeline": [
            [
                e.index,
                e.name,
                e.kind,
                relative(e.path) if e.path else "",
                e.line,
                e.module,
                list(e.reads),
                list(e.writes),
                list(e.allocates),
                e.bytes,
                list(e.codes),
            ]
            for e in report.timeline
        ],
        "memory": _memory(report),
        "storages": [[s.number, s.kind, s.bytes, s.name] for s in report.storages],
    }


def _follows(f: Finding, counted: set[int]) -> str:
    """Where the cause stands, "" for a finding that counts by itself."""
    if f.follows is None or id(f) in counted:
        return ""
    return f"{f.follows.code} at {relative(f.follows.path)}:{f.follows.line}"


def _memory(report: Report) -> dict[str, Any]:
    """What the graph's pool holds; empty where nothing was run."""
    memory = dict(report.facts.get("memory", {}))
    if memory.get("at the peak"):
        memory["at the peak"] = [line | {"file": relative(line["path"])} for line in memory["at the peak"]]
    return memory


def _frame(call: Frame) -> dict[str, Any]:
    name = call.function.rsplit("<locals>.", 1)[-1]
    return {"file": os.path.basename(call.path), "line": call.line, "function": name, "source": call.source.strip()}
