"""What a git revision and the working tree differ in: the lines, and the functions that they are part of."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from onegraph.check.report import CheckError, Finding, Report

_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)

# No command of the repository's config runs: a file monitor, a hook, a pager; and its index is not written
_QUIET = ("--no-pager", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")


class Changes:
    """Lines changed since `revision` in the repositories that hold `folders`: committed since, staged or not.

    Counted from where the branch left that revision, so that what others did there meanwhile is no change of ours.
    """

    def __init__(self, revision: str, folders: Sequence[str] = (os.curdir,)) -> None:
        """Raises CheckError without git, for a folder outside of a repository, and for a revision unknown there."""
        self.asked = revision
        self._unfiltered: dict[str, dict[str, str]] = {}
        """Variables that turn the filters of a repository's config off, by its root."""
        self._bases: dict[str, str] = {}
        """The commit to compare with, by the repository's root."""
        for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
            root = os.path.realpath(self._git("rev-parse", "--show-toplevel", folder=folder).rstrip("\n"))
            if root not in self._bases:
                self._unfiltered[root] = self._filters(root)
                self._bases[root] = self._base(root)
        self._known: dict[str, tuple[list[range], list[range]]] = {}

    def _filters(self, root: str) -> dict[str, str]:
        """A filter is a command that git runs on a file before it compares it."""
        names = self._git("config", "--list", "--name-only", "-z", folder=root).split("\0")
        found = sorted({name.rpartition(".")[0] for name in names if name.startswith("filter.")})
        off = [(f"{name}.{key}", "") for name in found for key in ("clean", "smudge", "process")]
        off += [(f"{name}.required", "false") for name in found]
        before = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
        given = {"GIT_CONFIG_COUNT": str(before + len(off))}
        for i, (key, value) in enumerate(off, before):
            given |= {f"GIT_CONFIG_KEY_{i}": key, f"GIT_CONFIG_VALUE_{i}": value}
        return given

    def _base(self, root: str) -> str:
        named = f"{self.asked}^{{commit}}"
        commit = self._git("rev-parse", "--verify", "--quiet", "--end-of-options", named, folder=root).strip()
        try:
            return self._git("merge-base", commit, "HEAD", folder=root).strip()
        except CheckError:  # no commit in common, or a shallow clone that has not got it
            return commit

    def select(self, report: Report) -> tuple[Report, int]:
        """The report with findings on changed lines and in changed functions alone, and how many were left out."""
        kept = tuple(f for f in report.findings if self.has(f))
        return replace(report, findings=kept), len(report.findings) - len(kept)

    def has(self, finding: Finding) -> bool:
        """Whether the finding's line changed, a line of the innermost function around it, or a call to it."""
        _, spans = self._of(finding.path)
        return any(finding.line in span for span in spans) or any(
            frame.line in lines for frame in finding.calls for lines in self._of(frame.path)[0]
        )

    def _of(self, path: str) -> tuple[list[range], list[range]]:
        """The changed lines of a file, and these widened to the functions that they are part of."""
        path = os.path.realpath(path)
        if path not in self._known:
            lines = self._lines(path)
            self._known[path] = lines, [*lines, *_functions(path, lines)]
        return self._known[path]

    def _lines(self, path: str) -> list[range]:
        root = max((root for root in self._bases if path.startswith(root + os.sep)), key=len, default="")
        if not root or not os.path.isfile(path):
            return []
        inside = os.path.relpath(path, root)
        if not self._git("ls-files", "-z", "--", inside, folder=root):
            return [range(1, sys.maxsize)]  # not tracked yet: all of it is new
        plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all", "--unified=0")
        diff = self._git("diff", *plain, self._bases[root], "--", inside, folder=root)
        # Where lines were only taken out, a range without a line marks the seam: it begins at the line behind it.
        hunks = ((int(m[1]), int(m[2]) if m[2] is not None else 1) for m in _HUNK.finditer(diff))
        return [range(first, first + count) if count else range(first + 1, first + 1) for first, count in hunks]

    def _git(self, *args: str, folder: str) -> str:
        command = ["git", *_QUIET, "--literal-pathspecs", *args]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL,
                env=os.environ | {"GIT_NO_LAZY_FETCH": "1"} | self._unfiltered.get(folder, {}),
            )  # fmt: skip
        except FileNotFoundError:
            raise CheckError(f"--changed-since {self.asked}: needs git, which is not on the PATH") from None
        if done.returncode:
            said = done.stderr.strip().splitlines()
            why = said[-1] if said else "unknown revision; allowed a commit, branch or tag of this repository"
            where = "" if folder == os.path.realpath(os.curdir) else f" (git in {folder})"
            raise CheckError(f"--changed-since {self.asked}: {why}{where}")
        return done.stdout


def _functions(path: str, lines: list[range]) -> list[range]:
    """The innermost functions around changed lines, with the functions inside of them: a step sees its factory's names.
    A seam belongs to the function that has lines on both sides of it."""
    try:
        with open(path, "rb") as handle:
            tree = ast.parse(handle.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    spans = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            spans.add(range(first, (node.end_lineno or node.lineno) + 1))
    found = set()
    for change in lines:
        for at in {change.start} if not change else _within(change, spans):
            around = [s for s in spans if at in s and (change or at > s.start)]
            if around:
                found.add(min(around, key=len))
    return sorted(found, key=lambda s: s.start)


def _within(change: range, spans: set[range]) -> set[int]:
    """Lines that stand for all of a change: its own first one, and where a function begins or has just ended in it."""
    borders = {edge for span in spans for edge in (span.start, span.stop)}
    return {change.start, *(edge for edge in borders if edge in change)}
