"""Source reading and running disagree: what ran has the last word."""

from dataclasses import replace

from onegraph.check.report import Origin, Report, Severity, ordered
from onegraph.check.rules import RULES


def reconcile(report: Report) -> Report:
    """A merged report in which what the source alone suspects is weighed against the steps that were run.

    A line that ran without showing a hazard which that way of looking sees reliably is cleared: the finding goes. What
    lies on a line that never ran stays, as a warning.
    """
    ran = [origin for origin in report.origins if origin is not Origin.SOURCE]
    if not ran or Origin.SOURCE not in report.origins:
        return report
    executed = {(event.path, event.line) for event in report.timeline}
    executed |= {(f.path, f.line) for f in report.findings if f.origin is not Origin.SOURCE}
    kept = []
    for finding in report.findings:
        if finding.origin is not Origin.SOURCE or finding.code.startswith("CG4"):
            kept.append(finding)
            continue
        reliable = any(RULES[finding.code].seen.get(origin) == "yes" for origin in ran)
        if reliable and (finding.path, finding.line) in executed:
            continue
        if finding.severity is Severity.ERROR:
            finding = replace(
                finding, severity=Severity.WARNING, message=finding.message + " (not met in the steps that were run)"
            )
        kept.append(finding)
    return replace(report, findings=ordered(kept))
