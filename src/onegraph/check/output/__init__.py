"""A report as text, JSON, SARIF or one HTML page."""

from onegraph.check.report import Origin, Report, Severity, Verdict

LEVELS = {severity: "warning" if severity is Severity.UNVERIFIED else severity.value for severity in Severity}
"""Severities by the words that code hosts have."""


def verdict_words(report: Report) -> str:
    """The verdict as people read it. Reading alone never says that a step can be captured, nor does a report whose
    findings were left out."""
    if report.verdict is Verdict.CAPTURABLE and (left := report.facts.get("left out")):
        return f"nothing else found, {left} left out"
    if report.origins and all(origin is Origin.SOURCE for origin in report.origins):
        if not report.findings:
            none = report.facts.get("steps found") == 0
            return "0 steps found in the source" if none else "nothing found in the source"
        if report.verdict is not Verdict.NOT_CAPTURABLE:
            return "suspects in the source"
    return report.verdict.value


def plural(severity: Severity, count: int) -> str:
    """What `count` findings of a severity are called."""
    return severity.value if count == 1 or severity is Severity.UNVERIFIED else f"{severity.value}s"
