"""A file as text with the places of its tree, and edits of it that leave everything else as it was."""

import ast
import difflib
import io
import os
import tokenize
from dataclasses import dataclass, field

from onegraph.check.constructs import Placed, end_of
from onegraph.check.report import CheckError, relative


@dataclass(frozen=True, order=True)
class Edit:
    """Characters `start` to `end` of a file become `text`."""

    start: int
    end: int
    text: str


@dataclass
class Text:
    """A Python file. `text` has the file's own line ends, which `encoded` keeps."""

    path: str
    text: str
    encoding: str
    tree: ast.Module
    starts: list[int] = field(default_factory=list)

    @property
    def newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def at(self, line: int, column: int) -> int:
        """Index of a character, given a tree's line (from 1) and column (bytes of UTF-8, from 0)."""
        begin = self.starts[line - 1]
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return begin + len(self.text[begin:end].encode()[:column].decode())

    def begin(self, node: Placed) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: Placed) -> int:
        return self.at(*end_of(node))

    def of(self, node: Placed) -> str:
        """The source of a node, as it is written."""
        return self.text[self.begin(node) : self.end(node)]

    def replaced(self, node: Placed, text: str) -> Edit:
        return Edit(self.begin(node), self.end(node), text)

    def after(self, node: Placed, text: str) -> Edit:
        return Edit(self.end(node), self.end(node), text)

    def line_before(self, statement: ast.stmt, text: str) -> Edit:
        """A line of its own, indented alike, before a statement, its decorators, comments and blank lines."""
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(d.lineno for d in decorators)])
        while self._line(first - 1).startswith("#"):
            first -= 1
        while first > 1 and not self._line(first - 1):
            first -= 1
        start = self.starts[first - 1]
        return Edit(start, start, self._indent(statement) + text + self.newline)

    def _line(self, number: int) -> str:
        """A line without white space around it, "" before the first."""
        if number < 1:
            return ""
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end].strip()

    def line_after(self, statement: ast.stmt, text: str) -> Edit:
        """The same after a statement and what else stands on its last line."""
        last = statement.end_lineno or statement.lineno
        if last < len(self.starts):
            return Edit(self.starts[last], self.starts[last], self._indent(statement) + text + self.newline)
        return Edit(len(self.text), len(self.text), self.newline + self._indent(statement) + text)

    def line_of(self, other: str, line: int) -> int:
        """Where a line of the edited text `other` is in this one; where it was rewritten, a line it was made of."""
        ours, theirs = self.text.split("\n"), other.split("\n")
        for _, first, last, start, stop in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if start < line <= stop:
                return max(min(first + line - start, last), 1)
        return line

    def _indent(self, statement: ast.stmt) -> str:
        start = self.starts[statement.lineno - 1]
        line = self.text[start : self.begin(statement)]
        return line[: len(line) - len(line.lstrip())]

    def edited(self, edits: list[Edit]) -> str:
        """The text with edits that do not overlap applied. Raises ValueError where they do."""
        made, done = [], 0
        for edit in sorted(set(edits)):
            if edit.start < done:
                raise ValueError("edits overlap")
            made += [self.text[done : edit.start], edit.text]
            done = edit.end
        return "".join([*made, self.text[done:]])

    def encoded(self, text: str) -> bytes:
        return text.encode(self.encoding)

    def diff(self, text: str) -> str:
        """What `text` changes, as a unified diff that `git apply` and `patch` read."""
        name = relative(self.path)
        before, after = (t.splitlines(keepends=True) for t in (self.text, text))
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def read(path: str) -> Text | None:
    """A file that can be edited; None where it is no Python, or Python sees other lines in it than this does."""
    try:
        with open(path, "rb") as handle:
            data = handle.read()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (OSError, SyntaxError, ValueError, LookupError):
        return None
    return of(path, text, encoding)


def of(path: str, text: str, encoding: str = "utf-8") -> Text | None:
    """The same of what a file is to hold."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    if "\f" in text or ("\r" in text and text.count("\r") != text.count("\r\n")):
        return None
    starts = [0]
    while (found := text.find("\n", starts[-1])) >= 0:
        starts.append(found + 1)
    return Text(path, text, encoding, tree, starts)


def write(file: Text, text: str) -> None:
    """Replace the file at once, with its mode. Raises CheckError."""
    temporary = f"{file.path}.onegraph"
    try:
        with open(temporary, "xb") as handle:
            handle.write(file.encoded(text))
        os.chmod(temporary, os.stat(file.path).st_mode)
        os.replace(temporary, os.path.realpath(file.path))
    except OSError as error:
        if os.path.exists(temporary) and not isinstance(error, FileExistsError):
            os.unlink(temporary)
        raise CheckError(f"{file.path}: {error.strerror or error}") from None
