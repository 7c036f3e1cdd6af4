"""Runs a program as `python script.py args` or `python -m module args` would, with its own output on stderr."""

import builtins
import os
import runpy
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from onegraph.check.report import CheckError
from onegraph.check.simulate import frames
from onegraph.check.simulate.calling import internal, line, raised

FORM = "--run script.py [args] or --run -m module [args]"


class Ended(Exception):
    """The program did not run to its end: why, in one line."""


def named(words: Sequence[str]) -> str:
    """The program as people typed it. Raises CheckError where nothing was named or no such file exists."""
    if not words or (words[0] == "-m" and len(words) < 2):
        raise CheckError(f"--run: got no program, allowed {FORM}")
    if words[0] == "-m":
        return " ".join(words)
    if words[0].startswith("-"):
        raise CheckError(f"--run: got {words[0]!r}, allowed {FORM}; options of check go before --run")
    if not os.path.isfile(words[0]):
        raise CheckError(f"--run: no such file: {words[0]}; allowed {FORM}")
    return " ".join(words)


def call_program(words: Sequence[str]) -> None:
    """Call chains end at this frame. Raises Ended where the program raises or exits with another status than 0."""
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            _run_file(words[0])
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise Ended(f"the program ended with sys.exit({stop.code!r})") from stop
    except CheckError:
        raise
    except Exception as error:
        if internal(error):
            raise  # a fault of this package's
        if isinstance(error, ImportError) and _before_it(error):  # no such module, or one that cannot be run
            raise CheckError(f"--run {' '.join(words[:2])}: {line(error)}") from error
        _show(error)
        raise Ended(f"the program {raised(error)}") from error


def _run_file(path: str) -> None:
    """As Python does: `__file__` is absolute, argv[0] is what was typed."""
    full = os.path.abspath(path)
    module = types.ModuleType("__main__")
    module.__file__ = full
    module.__dict__["__builtins__"] = builtins
    with open(full, "rb") as handle:
        text = handle.read()
    try:
        code = compile(text, full, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        at = getattr(error, "lineno", None) or 1
        raise CheckError(f"--run {path}: {full}:{at}: syntax error: {getattr(error, 'msg', error)}") from error
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _before_it(error: BaseException) -> bool:
    """Whether no line of the program had run yet."""
    return not any(_theirs(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _theirs(path: str) -> bool:
    return not (path.startswith((frames.HERE, "<frozen")) or os.path.basename(path) == "runpy.py")


def _show(error: BaseException) -> None:
    """The program's own traceback, without the frames that stand in for torch and for Python's start."""
    told = traceback.TracebackException.from_exception(error)
    seen: traceback.TracebackException | None = told
    while seen is not None:
        kept = [frame for frame in seen.stack if _theirs(frame.filename)]
        seen.stack = traceback.StackSummary.from_list(kept)
        seen = seen.__cause__ or seen.__context__
    print("".join(told.format()), end="", file=sys.stderr)


@contextmanager
def as_program(words: Sequence[str]) -> Iterator[None]:
    """argv, the import path and standard output as the program expects them; the report alone goes to stdout."""
    argv, path = list(sys.argv), list(sys.path)
    main = sys.modules.get("__main__")
    module = words[0] == "-m"
    sys.argv[:] = list(words[1:] if module else words)
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(words[0])))
    sys.stdout.flush()
    try:
        with _to_stderr(), redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main


@contextmanager
def _to_stderr() -> Iterator[None]:
    """What subprocesses and C code write to the file behind stdout goes to that behind stderr."""
    try:
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)
