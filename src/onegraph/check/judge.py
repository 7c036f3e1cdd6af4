"""Makes one report of what the readers saw of a target.

Merge, reconcile, causes, places, allowances: each once and in this order, for the command, `check_step`, pytest,
`--run`, `--live` and `--vllm` alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from onegraph.check import allow
from onegraph.check.causes import mark_consequences
from onegraph.check.places import relocate_to_user_code
from onegraph.check.reconcile import reconcile
from onegraph.check.report import Finding, Origin, Report, one_per_place

_KNOWS_MORE = {Origin.LIVE: 0, Origin.SIMULATE: 1, Origin.SOURCE: 2}
_WORKING = frozenset(["read", "allowing", "warm-up"])
"""Facts that readers leave for the judge alone: a tree has thousands of functions that were read."""

_COUNTED = ("files", "steps found", "functions")
_LISTED = ("unread", "unreadable", *sorted(_WORKING))


def judge(target: str, reports: Sequence[Report]) -> Report:
    """One report of the `reports` of all readers that looked at the target; allowances in the source are applied."""
    report = reconcile(merge(target, reports) if len(reports) > 1 else replace(reports[0], target=target))
    report = allow.apply(relocate_to_user_code(mark_consequences(report)))
    return replace(report, facts={key: value for key, value in report.facts.items() if key not in _WORKING})


def join(reports: Sequence[Report]) -> Report:
    """One report of several targets: their findings and counts; facts, timeline and storages stay with each of them."""
    whole = merge(", ".join(report.target for report in reports), reports)
    kept = {key: whole.facts[key] for key in (*_COUNTED, *_LISTED) if key in whole.facts}
    return replace(whole, timeline=(), storages=(), facts=kept, parts=tuple(reports))


def merge(target: str, reports: Sequence[Report]) -> Report:
    """One report of several readers of a target.

    The same code at the same place is said once, by the reader that knows most: live before simulate before source. The
    timeline is the first one present; counts of files, steps and functions are summed, and lists of them are joined.
    """
    timed = next((r for r in reports if r.timeline), None)
    facts: dict[str, Any] = {}
    for report in reports:
        facts.update(report.facts)
    for key in _COUNTED:
        if key in facts:
            facts[key] = sum(report.facts.get(key, 0) for report in reports)
    for key in _LISTED:
        if key in facts:
            facts[key] = sorted({entry for report in reports for entry in report.facts.get(key, ())})
    return Report(
        target=target,
        findings=one_per_place(_all(reports), _better),
        origins=tuple(dict.fromkeys(o for r in reports for o in r.origins)),
        steps=max((r.steps for r in reports), default=0),
        timeline=timed.timeline if timed else (),
        storages=timed.storages if timed else (),
        facts=facts,
    )


def _all(reports: Iterable[Report]) -> list[Finding]:
    return sorted((f for r in reports for f in r.findings), key=lambda f: _KNOWS_MORE[f.origin])


def _better(known: Finding, other: Finding) -> Finding:
    return other if known.origin is other.origin and other.severity.rank > known.severity.rank else known
