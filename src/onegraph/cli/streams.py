"""The standard streams as they may be: closed, full, of few characters. What goes wrong with one says which."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

STDOUT = "standard output"


class Output:
    """A text stream whose errors carry its name, as those of a file do."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        result: int = self._named(self.stream.write, text)
        return result

    def flush(self) -> None:
        self._named(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _named(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            error.filename = STDOUT
            raise


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """sys.stdout names itself in errors, and writes what its encoding lacks as an escape, \\xe9.

    Descriptors that are closed lead to /dev/null: the next file that is opened would take their number, and be written
    over by a library that reports to descriptor 2. Raises OSError where stdout is closed: what was asked for would be
    lost.
    """
    closed = sys.stdout is None
    if closed or sys.stdin is None or sys.stderr is None:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
            pass
        os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if closed:
        raise OSError(0, "is closed; redirect it to a file, or to /dev/null", STDOUT)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with contextlib.redirect_stdout(Output(sys.stdout)):
        yield


def abandon_stdout() -> None:
    """Nothing more is written to stdout, so that the interpreter does not complain when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stdout without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_utf8(words: list[str]) -> None:
    """Raises ValueError for an argument that is not UTF-8: files are named in JSON and opened by libraries that ask for
    it, so that each would fail somewhere else."""
    for number, word in enumerate(words, 1):
        if any("\ud800" <= c <= "\udfff" for c in word):
            encoding = sys.getfilesystemencoding()
            why = "is not UTF-8" if encoding == "utf-8" else f"cannot be read as {encoding}, the locale's encoding"
            what = "rename the file, or convert the text" if encoding == "utf-8" else "set LC_ALL=C.UTF-8"
            raise ValueError(f"argument {number}, {ascii(word)[:80]}, {why}; {what}")
