"""Python files as trees, and where a module of the user's own code lies. Nothing is imported or run."""

import ast
import io
import os
import stat
import sys
import sysconfig
import tokenize
import warnings
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import BinaryIO

from onegraph.check.constructs import tree_of
from onegraph.check.report import CheckError

PROJECT_FILES = "pyproject.toml", "setup.py", "setup.cfg", ".git"
MAX_BYTES = 4_000_000
"""Larger files are data that somebody wrote as Python; parsing one takes gigabytes."""


class Unreadable(CheckError):
    """A file that cannot be read as Python; the message is one line."""


@dataclass(eq=False)
class SourceFile:
    """One parsed file. `names` maps each top-level name to the statements that bind it, in order."""

    path: str
    text: str
    tree: ast.Module
    module: str = ""
    names: dict[str, list[ast.stmt]] = field(default_factory=dict)
    is_package: bool = False

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def line(self, number: int) -> str:
        """Text of a line, counted from 1, "" outside the file."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""


def open_regular(path: str) -> BinaryIO:
    """The file, open for reading. Raises Unreadable for a pipe or a device, which would be waited for."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Unreadable(f"{path}: not a regular file")
    return open(path, "rb")


def decode(path: str) -> str:
    """Text of a Python file in its declared encoding. Raises Unreadable."""
    try:
        size = os.path.getsize(path)
        if size > MAX_BYTES:
            raise Unreadable(
                f"{path}: too large to read as code: {size / 1e6:.1f} MB, at most {MAX_BYTES / 1e6:.0f} MB"
            )
        with open_regular(path) as handle:
            data = handle.read()
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from None
    if b"\0" in data:
        raise Unreadable(f"{path}: not Python: it holds null bytes")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(f"{path}: not text in its encoding: {_one_line(error)}") from None
    return io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True)


def parse(path: str, module: str = "", text: str | None = None) -> SourceFile:
    """The file as a tree. Raises Unreadable on whatever Python itself would not compile."""
    text = decode(path) if text is None else text
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes are the author's business
            tree = tree_of(text)
    except SyntaxError as error:
        raise Unreadable(f"{path}:{error.lineno or 1}: syntax error: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise Unreadable(f"{path}: nested too deeply to parse") from None
    except ValueError as error:
        raise Unreadable(f"{path}: not Python: {_one_line(error)}") from None
    file = SourceFile(path, text, tree, module, is_package=os.path.basename(path) == "__init__.py")
    _bind(tree.body, file.names)
    return file


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def bound_by(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """The name that an import binds: `torch` of `import torch.nn`."""
    return alias.asname or (alias.name.split(".")[0] if isinstance(statement, ast.Import) else alias.name)


def _bind(body: list[ast.stmt], names: dict[str, list[ast.stmt]]) -> None:
    for statement in body:
        match statement:
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    names.setdefault(bound_by(statement, alias), []).append(statement)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.setdefault(statement.name, []).append(statement)
            case ast.Assign():
                for target in statement.targets:
                    for node in ast.walk(target):
                        if isinstance(node, ast.Name):
                            names.setdefault(node.id, []).append(statement)
            case ast.AnnAssign() if isinstance(statement.target, ast.Name):
                names.setdefault(statement.target.id, []).append(statement)
            case ast.If():
                _bind(statement.body, names)
                _bind(statement.orelse, names)
            case ast.Try() | ast.TryStar():
                for part in (statement.body, *(h.body for h in statement.handlers), statement.orelse):
                    _bind(part, names)
            case ast.With():
                _bind(statement.body, names)


def package_root(path: str) -> str:
    """The folder from which `path` is imported: the first one upwards that is no package."""
    folder = os.path.dirname(os.path.abspath(path))
    while os.path.exists(os.path.join(folder, "__init__.py")) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def module_name(path: str, root: str) -> str:
    """`root/a/b.py` -> "a.b", `root/a/__init__.py` -> "a"."""
    parts = os.path.relpath(os.path.abspath(path), root)[: -len(".py")].split(os.sep)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def project_folders(root: str) -> tuple[str, ...]:
    """Where the modules of the project around `root` are: its own folder, and `src` in it."""
    folder = root
    while not any(os.path.exists(os.path.join(folder, name)) for name in PROJECT_FILES):
        above = os.path.dirname(folder)
        if above == folder:
            return ()
        folder = above
    return folder, os.path.join(folder, "src")


class Project:
    """The user's own code around one file: what may be followed, parsed once.

    Followed: modules beside the file's package, in the working directory, on `sys.path` outside the interpreter's own
    folders, and in the project that the file belongs to, also below its `src`, installed or not. Installed packages are
    not the user's code, except the one the file itself belongs to.
    """

    def __init__(self) -> None:
        self._files: dict[str, SourceFile | None] = {}
        self._found: dict[tuple[str, str], str | None] = {}
        installed = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._installed = tuple(os.path.realpath(folder) + os.sep for folder in installed if folder)
        self._search = [p for p in (os.path.abspath(entry or ".") for entry in sys.path) if not self.is_installed(p)]

    def is_installed(self, path: str) -> bool:
        return (os.path.realpath(path) + os.sep).startswith(self._installed)

    def file(self, path: str) -> SourceFile:
        """The parsed file; not kept, so that a tree of thousands does not stay in memory. Raises Unreadable."""
        path = os.path.abspath(path)
        known = self._files.get(path)
        return known if known is not None else parse(path, module_name(path, package_root(path)))

    def keep(self, file: SourceFile) -> SourceFile:
        """Let imports of this file find this very tree."""
        return self._files.setdefault(file.path, file) or file

    def module(self, name: str, seen_from: SourceFile) -> SourceFile | None:
        """The user's module of that dotted name, or None where it is not theirs or cannot be read."""
        root = package_root(seen_from.path)
        key = (name, root)
        if key not in self._found:
            self._found[key] = self._locate(name, root, seen_from)
        path = self._found[key]
        if path is None:
            return None
        if path not in self._files:
            try:
                self._files[path] = parse(path, name)
            except Unreadable:
                self._files[path] = None
        return self._files[path]

    def _locate(self, name: str, root: str, seen_from: SourceFile) -> str | None:
        if not name or name.split(".")[0] in ("torch", "triton", "numpy"):
            return None
        if self.is_installed(root):
            folders = [root] if name.split(".")[0] == seen_from.module.split(".")[0] else []
        else:
            folders = [root, *self._search, *project_folders(root)]
        for folder in folders:
            base = os.path.join(folder, *name.split("."))
            for path in (base + ".py", os.path.join(base, "__init__.py")):
                if os.path.isfile(path):
                    return path
        return None
