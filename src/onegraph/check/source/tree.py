"""Reading a whole folder: which files, on how many cores, and what comes back."""

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from onegraph.check.report import CheckError, Finding, Origin, Report, ordered
from onegraph.check.source.files import Project, SourceFile, Unreadable, open_regular
from onegraph.check.source.roots import Interpreter, read_file

SKIPPED = frozenset(
    ["__pycache__", ".git", ".hg", ".venv", "venv", "node_modules", ".tox", ".mypy_cache", "build", "dist"]
)

ALLOWANCE = "onegraph:"
"""What every allowance comment holds; `onegraph.check.allow` reads them."""

RECURSION = 12_000
"""Frames: an expression of 1,000 terms nests 3,000 deep in the reader."""

SERIAL = 60
"""Fewer files than this are read faster by one process than by starting others."""


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Let the reader follow deeply nested code; the limit is put back afterwards."""
    old = sys.getrecursionlimit()
    sys.setrecursionlimit(max(old, RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(old)


TASKS = 32
"""Batches that a process reads before another takes its place: what it never collects ends with it. Measured on
transformers, two processes: 33 CPU seconds and at most 1.2 GB in one; 54 and 0.9 where each batch is collected."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Trees hold few cycles while they grow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def python_files(folder: str) -> list[str]:
    """Python files under a folder, sorted, without caches and virtual environments."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(d for d in folders if d not in SKIPPED)
        found += [os.path.join(root, f) for f in sorted(files) if f.endswith(".py")]
    return found


def check_tree(path: str, *, processes: int | None = None) -> Report:
    """Read every Python file under `path` (or the one file).

    Steps are: what a file captures (`with torch.cuda.graph(...)`, `capture_begin`, `make_graphed_callables`), the
    `forward` of every module, the step of every function that returns `(step, inputs)`, and functions that are named as
    steps are (`decode_step`). What lies only behind a condition, or rests on a presumed device, is a warning. How many
    there are is `facts["steps found"]`, how many functions with those that they call `facts["functions"]`; what
    was left out is told in `facts["unread"]`, files that cannot be read at all in `facts["unreadable"]` besides.
    """
    path = os.path.abspath(path)
    if os.path.isfile(path):
        if not path.endswith(".py"):
            raise CheckError(f"{path}: not a Python file")
        files = [path]
    elif os.path.isdir(path):
        files = python_files(path)
        if not files:
            raise CheckError(f"{path}: no Python file in it")
    else:
        what = "no such file or folder" if not os.path.lexists(path) else "neither a regular file nor a folder"
        raise CheckError(f"{path}: {what}")
    findings: dict[tuple[str, int, int, str], Finding] = {}
    unread: list[str] = []
    unreadable: list[str] = []
    reached: set[tuple[str, int, int]] = set()
    allowing: list[str] = []
    steps: set[tuple[str, int]] = set()
    for found, problems, closed, read, allows, met in _map(files, processes):
        for finding in found:
            key = (finding.path, finding.line, finding.column, finding.code)
            known = findings.get(key)
            if known is None or (known.severity != "error" and finding.severity == "error"):
                findings[key] = finding
        unread += problems + closed
        unreadable += closed
        reached |= read
        allowing += allows
        steps |= met
    if len(files) == 1 and unread and not reached:
        raise CheckError(unread[0])
    inside = path if os.path.isdir(path) else ""
    kept = [f for f in findings.values() if not inside or f.path.startswith(inside + os.sep)]
    return Report(
        target=path,
        findings=ordered(kept),
        origins=(Origin.SOURCE,),
        facts={
            "files": len(files),
            "steps found": len(steps),
            "functions": len(reached),
            "unread": sorted(set(unread)),
            "unreadable": sorted(set(unreadable)),
            "read": sorted(reached),
            "allowing": sorted(allowing),
        },
    )


Batch = tuple[list[Finding], list[str], list[str], set[tuple[str, int, int]], list[str], set[tuple[str, int]]]


def _map(files: list[str], processes: int | None) -> Iterable[Batch]:
    count = processes or min(os.cpu_count() or 1, 8)
    alone = threading.active_count() > 1 or sys.platform != "linux"
    if len(files) < SERIAL or count == 1 or alone:
        yield read_files(files)
        return
    size = min(40, max(8, len(files) // (count * 12)))
    batches = [files[i : i + size] for i in range(0, len(files), size)]
    context = multiprocessing.get_context("fork")
    with context.Pool(count, gc.disable, maxtasksperchild=TASKS) as pool:
        yield from pool.imap_unordered(read_files, batches)


_PROJECT: list[Project] = []


def read_files(files: list[str]) -> Batch:
    """Read some files one after another. Whatever a file holds, the others are read."""
    if not _PROJECT:
        _PROJECT.append(Project())
    machine = Interpreter(_PROJECT[0])
    unread: list[str] = []
    unreadable: list[str] = []
    alive: list[SourceFile] = []  # what the machine remembers of a tree goes by its nodes' identity
    with deep_recursion(), no_collection():
        for path in files:
            try:
                if len(files) > 1 and not _concerns(path):
                    continue
                alive.append(machine.known.project.file(path))
                unread += read_file(machine, alive[-1])
            except Unreadable as error:
                unreadable.append(str(error))
            except RecursionError:
                unread.append(f"{path}: nested too deeply, left unread")
    allowing = [file.path for file in alive if ALLOWANCE in file.text]
    return list(machine.found.findings.values()), unread, unreadable, machine.found.read, allowing, machine.found.steps


def _concerns(path: str) -> bool:
    """False where the text never mentions torch: there is no step in it. (Others may still import it.)"""
    try:
        with open_regular(path) as handle:
            data = handle.read(8_000_000)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from None
    return b"torch" in data
