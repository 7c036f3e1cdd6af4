"""SARIF 2.1.0: what code hosts show beside the line (OASIS Standard, 2020-03-27)."""

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from onegraph import __version__
from onegraph.check.output import LEVELS
from onegraph.check.report import Finding, Report
from onegraph.check.rules import RULES, fix

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render(report: Report, root: str | None = None, *, strict: bool = False) -> str:
    """The report as a SARIF log; paths below `root` (default: the working directory) are relative to it.

    `strict`: as `Report.exit_code` takes it.
    """
    root = os.path.abspath(root or os.getcwd())
    codes = sorted(RULES)
    properties = {
        "target": report.target,
        "verdict": report.verdict.value,
        **{key: report.facts[key] for key in ("unknown",) if key in report.facts},
    }
    invocation: dict[str, Any] = {
        "executionSuccessful": not report.incomplete,
        "exitCode": report.exit_code(strict=strict),
    }
    if report.incomplete:
        invocation |= _notified(*report.incomplete)
    results = [_result(f, root, codes, report.following(f)) for f in report.counted]
    return _log(root, results, invocation, properties)


def _notified(*messages: str) -> dict[str, Any]:
    return {"toolExecutionNotifications": [{"level": "error", "message": {"text": text}} for text in messages]}


def failure(message: str, target: str) -> str:
    """The SARIF log of a check that could not run: no results, and why."""
    invocation = {"executionSuccessful": False, "exitCode": 2} | _notified(message)
    return _log(os.getcwd(), [], invocation, {"target": target})


def _log(root: str, results: list[Any], invocation: dict[str, Any], properties: dict[str, Any]) -> str:
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "onegraph check",
                        "version": __version__,
                        "semanticVersion": __version__,
                        "rules": [_rule(code) for code in sorted(RULES)],
                    }
                },
                "originalUriBaseIds": {"ROOT": {"uri": Path(root).as_uri() + "/"}},
                "columnKind": "unicodeCodePoints",
                "results": results,
                "invocations": [invocation],
                "properties": properties,
            }
        ],
    }
    return json.dumps(log, indent=2)


def _rule(code: str) -> dict[str, Any]:
    rule = RULES[code]
    return {
        "id": code,
        "name": "".join(map(str.capitalize, rule.name.split("-"))),
        "shortDescription": {"text": rule.summary()},
        "fullDescription": {"text": rule.section("Why is this bad").replace("\n", " ")},
        "help": {"text": fix(code), "markdown": rule.page},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def _result(f: Finding, root: str, codes: list[str], following: tuple[Finding, ...]) -> dict[str, Any]:
    text = f.message + (f". Then: {f.happens}" if f.happens else "") + (f". Fix: {f.fix}" if f.fix else "")
    result: dict[str, Any] = {
        "ruleId": f.code,
        "level": LEVELS[f.severity],
        "message": {"text": text},
        "locations": [{"physicalLocation": _place(f.path, f.line, f.column, f.source, root)}],
        "properties": {"origin": f.origin.value, "severity": f.severity.value, "values": list(f.values)},
    }
    if f.code in codes:
        result["ruleIndex"] = codes.index(f.code)
    if following:
        result["relatedLocations"] = [
            {
                "physicalLocation": _place(o.path, o.line, o.column, o.source, root),
                "message": {"text": f"follows from it: {o.code} {o.message}"},
            }
            for o in following
        ]
    if len(f.calls) > 1:
        steps = [
            {
                "location": {
                    "physicalLocation": _place(c.path, c.line, 1, c.source, root),
                    "message": {"text": c.function},
                }
            }
            for c in f.calls
        ]
        result["codeFlows"] = [{"threadFlows": [{"locations": steps}]}]
    return result


def _place(path: str, line: int, column: int, source: str, root: str) -> dict[str, Any]:
    path = os.path.abspath(path)
    artifact: dict[str, Any] = {"uri": Path(path).as_uri()}
    if path.startswith(root + os.sep):
        artifact = {"uri": quote(Path(os.path.relpath(path, root)).as_posix()), "uriBaseId": "ROOT"}
    region: dict[str, Any] = {"startLine": max(line, 1), "startColumn": max(column, 1)}
    if source:
        region["snippet"] = {"text": source}
    return {"artifactLocation": artifact, "region": region}
