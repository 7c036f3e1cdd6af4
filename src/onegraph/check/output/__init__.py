"""A report as text, JSON, SARIF or one HTML page."""

from onegraph.check.report import Origin, Report, Verdict


def verdict_words(report: Report) -> str:
    """The verdict as people read it. Reading alone never says that a step can be captured."""
    if report.origins and all(origin is Origin.SOURCE for origin in report.origins):
        if not report.findings:
            none = report.facts.get("steps found") == 0
            return "0 steps found in the source" if none else "nothing found in the source"
        if report.verdict is not Verdict.NOT_CAPTURABLE:
            return "suspects in the source"
    return report.verdict.value
