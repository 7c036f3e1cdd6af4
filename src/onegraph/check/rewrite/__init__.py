"""`onegraph check --fix`: mechanical rewrites of what was found, each proven by checking and running the step again."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from onegraph.check.report import CheckError, Finding, Report, Severity, relative
from onegraph.check.rewrite import text as texts
from onegraph.check.rewrite.mechanical import Rewrite, offered
from onegraph.check.rewrite.text import Edit, Text
from onegraph.check.rewrite.verify import Seen, look, same
from onegraph.check.targets import DEFAULTS, Options, has_factory, split

MOST = 200
"""Rewrites of one target: a guard against two that undo each other."""


@dataclass
class Plan:
    """What `--fix` would do to a target. changed: new text by file; before, report: of the target without and with it;
    done: findings that it takes away; left: those that have no mechanical fix, unchanged in the new text."""

    target: str
    before: Report
    report: Report
    files: dict[str, Text] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    done: list[Finding] = field(default_factory=list)

    @property
    def left(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.report.counted if f.severity in (Severity.ERROR, Severity.WARNING))

    def diff(self) -> str:
        """All changes as one unified diff, "" where there are none."""
        return "".join(self.files[path].diff(text) for path, text in sorted(self.changed.items()))

    def told(self, *, written: bool) -> Iterator[str]:
        """What is done and what is left, a line each."""
        count = len(self.done)
        did = "fixed" if written else "would be fixed; --fix --write changes the files"
        if count:
            yield f"{self.target}: {count} finding{'s' * (count != 1)} {did}"
        elif not self.left:
            yield f"{self.target}: nothing to fix"
        if self.left:
            left = len(self.left)
            kind = "" if count else f" finding{'s' * (left != 1)}"
            yield f"{self.target}: {left}{kind} without a mechanical fix:"
        for finding in self.left:
            line = finding.line if written else self._line_now(finding)
            yield f"  {relative(finding.path)}:{line}: {finding.code} {finding.message}; fix: {finding.fix}"

    def _line_now(self, finding: Finding) -> int:
        """Its line in the file as it is: the report is of the copy with all rewrites, which may add lines."""
        file = self.files.get(finding.path)
        return file.line_of(self.changed[finding.path], finding.line) if file is not None else finding.line

    def exit_code(self, *, written: bool, strict: bool) -> int:
        """That of a check of the files as they are now."""
        return self.report.exit_code(strict=strict) if written else self.before.exit_code(strict=strict)

    def write(self) -> None:
        """Change the files. Raises CheckError where one was changed since it was read, or cannot be written."""
        for path in self.changed:
            now = texts.read(path)
            if now is None or now.text != self.files[path].text:
                raise CheckError(f"{path}: changed while it was checked; run --fix again")
        for path, text in self.changed.items():
            texts.write(self.files[path], text)


@dataclass
class _Work:
    """A target while it is rewritten. files, now: the files as they are on the disk, and as they would be."""

    target: str
    root: str
    options: Options
    files: dict[str, Text] = field(default_factory=dict)
    now: dict[str, Text] = field(default_factory=dict)
    refused: set[tuple[tuple[str, str], ...]] = field(default_factory=set)

    def look(self, instead: dict[str, Text]) -> Seen:
        body = {path: text.encoded(text.text) for path, text in {**self.now, **instead}.items()}
        return look(self.target, body, self.root, self.options)

    def file(self, path: str) -> Text | None:
        """A file that may be changed: one below the root, and in no installed package."""
        known = self.now.get(path)
        if known is not None:
            return known
        inside = path.startswith(self.root + os.sep) and not {"site-packages", "dist-packages"} & set(
            path.split(os.sep)
        )
        return texts.read(path) if inside and not os.path.islink(path) else None

    def together(self, seen: Seen) -> tuple[list[Finding], Seen] | None:
        """Take the best form for every finding at once, if they hold so: the findings, and the target with them."""
        edits: dict[str, list[Edit]] = {}
        found: dict[int, Rewrite] = {}
        files = {}
        for rewrite, file in self.offers(seen):
            mine = edits.setdefault(file.path, [])
            apart = all(a.end < b.start or b.end < a.start for a in mine for b in rewrite.edits)
            if id(rewrite.finding) not in found and apart:
                mine += rewrite.edits
                found[id(rewrite.finding)] = rewrite
                files[file.path] = file
        if len(found) < 2:
            return None
        return self._take(seen, {path: (file, edits[path]) for path, file in files.items()}, list(found.values()))

    def one(self, seen: Seen) -> tuple[list[Finding], Seen] | None:
        """Take the first rewrite that holds."""
        for rewrite, file in self.offers(seen):
            taken = self._take(seen, {file.path: (file, list(rewrite.edits))}, [rewrite])
            if taken is not None:
                return taken
        return None

    def _take(
        self, seen: Seen, edits: dict[str, tuple[Text, list[Edit]]], rewrites: list[Rewrite]
    ) -> tuple[list[Finding], Seen] | None:
        try:
            new = {path: texts.of(path, file.edited(made), file.encoding) for path, (file, made) in edits.items()}
            key = tuple((path, text.text) for path, text in sorted(new.items()) if text is not None)
            if len(key) < len(new) or key in self.refused:
                return None
            self.refused.add(key)
            now = {path: text for path, text in new.items() if text is not None}
            after = self.look(now)
        except (CheckError, ValueError):  # it does not run so, or its encoding has no such character
            return None
        rounded = any(r.rounded for r in rewrites)
        if not same(seen, after, [r.finding.code for r in rewrites], rounded=rounded):
            return None
        for path, (file, _) in edits.items():
            self.files.setdefault(path, file)
        self.now.update(now)
        return [r.finding for r in rewrites], after

    def offers(self, seen: Seen) -> Iterator[tuple[Rewrite, Text]]:
        for finding in seen.report.counted:
            file = self.file(finding.path)
            for rewrite in offered(finding, file) if file is not None else ():
                if seen.results is not None or not rewrite.by_running:
                    assert file is not None
                    yield rewrite, file


def plan(target: str, options: Options = DEFAULTS) -> Plan:
    """Find every rewrite of a target (file.py, file.py:factory, module:factory) that is certainly right.

    A rewrite is taken where, checked again, its finding is gone, no other has come, and the steps, run eagerly on the
    simulated machine, return and leave the tensors that they did; of a file alone, where nothing but the text is needed
    to see that. Only files in the target's own folder are changed (of a module: in the working directory).

    Raises CheckError where the target cannot be checked.
    """
    work = _Work(target, root_of(target), options)
    first = seen = work.look({})
    done: list[Finding] = []
    while len(done) < MOST and (taken := work.together(seen) or work.one(seen)) is not None:
        done += taken[0]
        seen = taken[1]
    changed = {path: text.text for path, text in work.now.items()}
    return Plan(target, first.report, seen.report, work.files, changed, done)


def root_of(target: str) -> str:
    """The folder whose files `--fix` may change. Raises CheckError for a folder, and where there is no such file."""
    if os.path.isdir(target):
        raise CheckError(f"{target}: --fix needs a file or a factory; allowed file.py, file.py:factory, module:factory")
    if not has_factory(target):
        if not os.path.isfile(target):
            raise CheckError(f"{target}: no such file")
        return os.path.dirname(os.path.abspath(target))
    path, _ = split(target)
    where = target.rpartition(":")[0]
    return os.path.dirname(path) if where.endswith(".py") or os.sep in where else os.getcwd()
