"""A bound on the time that code under check may take: a step that never ends must not hang who checks it."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import _exit as end_process  # itself: what code under check calls so raises meanwhile (simulate/calling.py)
from types import FrameType
from typing import Any

from onegraph.check.report import CheckError

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ROOT = os.path.dirname(HERE.rstrip(os.sep))
_OWN = (HERE, os.path.join(_ROOT, "cli") + os.sep, os.path.join(_ROOT, "__main__.py"))
AGAIN = 2.0
"""Seconds between two tries to stop code that catches everything."""

TRIES = 5

_missed = False


class Overdue(BaseException):
    """Time is up. No Exception: the code under check may catch those and go on."""


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raises CheckError, with the line that ran, where the block takes longer; code that cannot be stopped ends the
    process with that line and status 2. Only the main thread can be bounded; elsewhere the block runs as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    rung = 0

    def ring(signum: int, frame: FrameType | None) -> None:
        nonlocal rung
        rung += 1
        if rung > TRIES:
            os.write(2, f"onegraph: error: {_overdue(what, seconds, frame)}\n".encode())
            end_process(2)
        raise Overdue(_overdue(what, seconds, frame))

    def unraisable(about: Any) -> None:  # a finalizer was stopped, which only prints it; it rings again
        if about.exc_type is not Overdue:
            hook(about)

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    before = signal.signal(signal.SIGALRM, ring)
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    except Overdue as error:
        global _missed
        _missed = True
        raise CheckError(str(error)) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, again)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def leave(status: int) -> None:
    """End the process where code under check was overdue: Python would wait for those of its threads that go on."""
    if _missed:
        sys.stdout.flush()
        sys.stderr.flush()
        end_process(status)


def _overdue(what: str, seconds: float, frame: FrameType | None) -> str:
    frame = _theirs(frame)
    if frame is None:  # all of it is over but its threads
        others = (_theirs(other) for other in sys._current_frames().values())
        frame = next((other for other in others if other is not None), None)
    where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{what}: still running{where} after {seconds:g} s; if it is no endless loop, --timeout allows more"


def _theirs(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _ours(path: str) -> bool:
    """Frames of the checker and of libraries, under which the step's own line lies."""
    return path.startswith((*_OWN, sys.prefix + os.sep, sys.base_prefix + os.sep, "<"))
