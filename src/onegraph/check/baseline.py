"""A baseline: findings that are known already, so that a check fails on new ones alone.

A finding is known by its file, its code and the text of its line, not by the line's number: code above it may come and
go. The file is JSON, sorted, meant to be committed; paths in it are relative to where it lies.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onegraph.check.report import CheckError, Finding, Report

FORMAT_VERSION = 1

Key = tuple[str, str, str]
"""File as the baseline names it, code, text of the line without the blanks around it."""


@dataclass(frozen=True)
class Baseline:
    """The known findings of the file `path`: how many there are of each."""

    path: str
    known: Counter[Key]

    def without_known(self, report: Report) -> tuple[Report, int]:
        """The report without what is known, and how many that were. Of equal findings, as many as are known go."""
        left = Counter(self.known)
        kept = []
        for finding in report.findings:
            key = key_of(finding, self.path)
            if left[key] > 0:
                left[key] -= 1
            else:
                kept.append(finding)
        return replace(report, findings=tuple(kept)), len(report.findings) - len(kept)

    def stale(self, report: Report, whole: Sequence[str] = ()) -> list[Key]:
        """Entries that nothing answers to any more: their line is gone from the file, or, in the files and folders
        `whole` of which everything was read, the report has no such finding. `report`: before `without_known`."""
        left = self.known - Counter(key_of(f, self.path) for f in report.findings)
        folder = os.path.dirname(os.path.realpath(self.path))
        read = [os.path.realpath(path) for path in whole]
        lines: dict[str, set[str]] = {}
        found = []
        for key in sorted(left):
            path = os.path.realpath(os.path.join(folder, key[0]))
            if path not in lines:
                lines[path] = _lines(path)
            if key[2] not in lines[path] or any(path == r or path.startswith(r + os.sep) for r in read):
                found.append(key)
        return found


def key_of(finding: Finding, path: str) -> Key:
    """How the baseline at `path` knows a finding."""
    folder = os.path.dirname(os.path.realpath(path))
    file = os.path.relpath(os.path.realpath(finding.path), folder).replace(os.sep, "/")
    return file, finding.code, finding.source.strip()


def load(path: str) -> Baseline:
    """Read a baseline. Raises CheckError where there is none, or it is not one."""
    try:
        with open(path, encoding="utf-8") as handle:
            body = json.load(handle)
    except FileNotFoundError:
        raise CheckError(f"--baseline {path}: no such file; write it with --write-baseline") from None
    except OSError as error:
        raise CheckError(f"--baseline {path}: {error.strerror or error}") from None
    except ValueError:
        body = None
    if not isinstance(body, dict) or "format_version" not in body:
        raise CheckError(
            f"--baseline {path}: not a baseline that onegraph wrote; a new one is made by "
            "--baseline capture-baseline.json --write-baseline"
        )
    if body["format_version"] != FORMAT_VERSION:
        raise CheckError(
            f"--baseline {path}: not a baseline of format_version {FORMAT_VERSION}; write it anew with --write-baseline"
        )
    known: Counter[Key] = Counter()
    try:
        for entry in body["findings"]:
            known[str(entry["path"]), str(entry["code"]), str(entry["source"])] += int(entry.get("count", 1))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckError(f"--baseline {path}: an entry needs path, code and source ({error!r})") from None
    return Baseline(path, known)


def dump(report: Report, path: str) -> str:
    """The baseline, to be written to `path`, in which every finding of the report is known."""
    entries: list[dict[str, Any]] = []
    for (file, code, source), count in sorted(Counter(key_of(f, path) for f in report.findings).items()):
        entries.append({"path": file, "code": code, "source": source} | ({"count": count} if count > 1 else {}))
    return json.dumps({"format_version": FORMAT_VERSION, "findings": entries}, indent=2, ensure_ascii=False) + "\n"


def _lines(path: str) -> set[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return {line.strip() for line in handle}
    except OSError:
        return set()
