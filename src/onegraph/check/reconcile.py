"""Source reading and running disagree: what ran has the last word, but for what so few steps cannot tell."""

import os
from dataclasses import replace

from onegraph.check.causes import decides
from onegraph.check.report import Cause, Finding, Origin, Report, Severity, ordered
from onegraph.check.rules import RULES

VARYING = frozenset(["CG201", "CG202", "CG203", "CG204", "CG208"])
"""Hazards of a host value that changes: reading proves that it does, a few steps only that it did not in them."""


def reconcile(report: Report) -> Report:
    """A merged report in which what the source alone suspects is weighed against the steps that were run.

    A line that ran without showing a hazard which that way of looking sees reliably is cleared: the finding goes; so is
    what may be there by a condition that held in the warm-up alone, as where something is made once and kept. What lies
    on a line that never ran stays, as a warning, and so does a value that changes by what its code says, even if it did
    not in the steps that were run. Where a replay differed and no op told why (CG212), such a value is why, and
    where the path parted around such a condition, the condition is the place.
    """
    ran = [origin for origin in report.origins if origin is not Origin.SOURCE]
    if not ran or Origin.SOURCE not in report.origins:
        return report
    report = replace(report, findings=tuple(_at_its_condition(f, report.findings) for f in report.findings))
    told = {_line(f) for f in report.findings if f.origin is not Origin.SOURCE}
    executed = {(os.path.realpath(event.path), event.line) for event in report.timeline} | told
    once = {(os.path.realpath(path), line) for path, line in report.facts.get("warm-up", ())}
    unexplained = [f for f in report.findings if f.code == "CG212"]
    proven = [f for f in report.findings if _explains(f)] if unexplained else []
    kept = []
    for finding in report.findings:
        if finding in unexplained and proven:
            first = proven[0]
            kept.append(replace(finding, follows=Cause(path=first.path, line=first.line, code=first.code)))
            continue
        if finding.origin is not Origin.SOURCE or finding.code.startswith("CG4") or finding in proven:
            kept.append(finding)
            continue
        reliable = any(RULES[finding.code].seen.get(origin) == "yes" for origin in ran)
        note = f"not seen in the {report.steps} steps that were run"
        if reliable and _line(finding) in executed and (finding.code not in VARYING or _line(finding) in told):
            continue
        if reliable and finding.severity is Severity.WARNING and _line(finding) in once:
            continue
        if reliable and finding.code in VARYING:  # its line may have run without an op: a condition, an index
            note = f"in none of the {report.steps} steps that were run did it differ"
        if finding.severity is Severity.ERROR or finding.code in VARYING:
            finding = replace(finding, severity=Severity.WARNING, message=f"{finding.message} ({note})")
        kept.append(finding)
    return replace(report, findings=ordered(kept))


def _at_its_condition(finding: Finding, findings: tuple[Finding, ...]) -> Finding:
    """What ran shows which op is missing, and so the loop or branch around its calls; reading, which one changes."""
    if finding.code != "CG201" or finding.origin is Origin.SOURCE:
        return finding
    read = (f for f in findings if f.code == "CG201" and f.origin is Origin.SOURCE)
    at = next((f for f in read if decides(f, finding)), None)
    if at is None:
        return finding
    return replace(finding, path=at.path, line=at.line, column=at.column, source=at.source, calls=at.calls, fix=at.fix)


def _explains(finding: Finding) -> bool:
    """Whether reading is sure of a value that changes: why a replay differs that no op explains."""
    return finding.origin is Origin.SOURCE and finding.code in VARYING and finding.severity is Severity.ERROR


def _line(finding: Finding) -> tuple[str, int]:
    return os.path.realpath(finding.path), finding.line
