"""Findings inside of installed packages, put where the user's own code calls into them.

Nobody edits site-packages, allows a finding there, or has it in a diff: what can be changed is the call. Lines of a
package that the same call leads to are one finding for each code, which names them.
"""

import functools
import linecache
import os
import sysconfig
from dataclasses import replace

from onegraph.check.report import Finding, Frame, Report, ordered

_SITE = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_STDLIB = os.path.realpath(sysconfig.get_paths()["stdlib"])
_MOST_PLACES = 4


@functools.cache
def package_of(filename: str) -> str | None:
    """The installed package that a file belongs to ("" for the standard library), None for the user's own code."""
    for site in _SITE:
        if site in filename:
            return filename.rsplit(site, 1)[1].split(os.sep)[0]
    real = os.path.realpath(filename)
    return "" if real.startswith(_STDLIB + os.sep) else None


def relocate_to_user_code(report: Report) -> Report:
    """The report with each finding of a package at the innermost line of the user's own among its calls.

    A finding without one, as of a step that is a package's module itself, stays where it is. `Finding.calls` still ends
    at the package's line; the message names it.
    """
    moved = [(finding, _moved(finding)) for finding in report.findings]
    new = {old.place: at for old, at in moved}
    groups: dict[tuple[str, int, str], list[tuple[Finding, Finding]]] = {}
    for old, at in moved:
        cause = new.get(old.follows.place) if old.follows is not None else None
        if cause is not None and old.follows is not None:
            at = replace(at, follows=replace(old.follows, path=cause.path, line=cause.line))
        groups.setdefault(at.place, []).append((old, at))
    return replace(report, findings=ordered(f for group in groups.values() for f in _joined(group)))


def _moved(finding: Finding) -> Finding:
    if not package_of(finding.path):
        return finding
    call: Frame | None = next((f for f in reversed(finding.calls) if package_of(f.path) is None), None)
    if call is None:
        return finding
    source = linecache.getline(call.path, call.line).rstrip("\n")
    column = len(source) - len(source.lstrip()) + 1
    return replace(finding, path=call.path, line=call.line, column=column, source=source)


def _joined(group: list[tuple[Finding, Finding]]) -> list[Finding]:
    """One finding of those that have the same code and now the same place, if any of them was moved."""
    apart = [at for old, at in group if old.follows is None or old.follows.place != at.place]
    first = min(apart or [at for _, at in group], key=lambda f: (f.follows is not None, -f.severity.rank))
    inside = list(dict.fromkeys(_named(old) for old, at in group if old is not at and old.place != at.place))
    if not inside:
        return [at for _, at in group]
    inside.sort(key=lambda name: name != _named(next(old for old, at in group if at is first)))
    more = f" and {len(inside) - _MOST_PLACES} lines more" if len(inside) > _MOST_PLACES else ""
    message = f"{first.message}, in {', '.join(inside[:_MOST_PLACES])}{more}"
    return [replace(first, message=message, count=sum(at.count for _, at in group))]


def _named(finding: Finding) -> str:
    """A line of a package, as its file is called below site-packages."""
    path = next((finding.path.rsplit(site, 1)[1] for site in _SITE if site in finding.path), finding.path)
    return f"{path}:{finding.line}"
