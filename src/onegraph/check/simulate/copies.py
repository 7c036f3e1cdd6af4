"""Work in a forked copy of this process: nothing that it does to Python's state, tensors or a driver outlives it."""

import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

STUCK = 120.0
"""Seconds after which a copy that does not end is ended."""

_CANNOT = "this machine cannot copy the process ({})"
RAISE = "run by themselves, its statements raise"


def in_a_copy(work: Callable[[], Any]) -> Any:
    """What `work` gives in a copy of this process; a text where there is none, it raises or does not end."""
    try:
        read, write = os.pipe()
    except OSError as error:
        return _CANNOT.format(error.strerror or error)
    # Of forking beside threads: the copy uses none of them.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        try:
            child = os.fork()
        except OSError as error:
            os.close(read)
            os.close(write)
            return _CANNOT.format(error.strerror or error)
    if child == 0:
        os.close(read)
        _child(work, write)
    os.close(write)
    try:
        data = _all(read)
    finally:
        os.close(read)
        if not _ended(child):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    try:
        return pickle.loads(data)
    except (EOFError, pickle.UnpicklingError):  # nothing, or the half that was written when it died
        return "its copy did not end"


def _child(work: Callable[[], Any], write: int) -> None:
    """Runs in the copy, and never returns: nothing of the program's own endings runs twice."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            answer = work()
        except BaseException as error:
            answer = f"{RAISE} {type(error).__name__}"
        with os.fdopen(write, "wb") as out:
            out.write(pickle.dumps(answer))
    finally:
        os._exit(0)


def _all(read: int) -> bytes:
    parts: list[bytes] = []
    until = time.monotonic() + STUCK
    while True:
        ready, _, _ = select.select([read], [], [], max(until - time.monotonic(), 0))
        if not ready:
            return b""
        part = os.read(read, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _ended(child: int) -> bool:
    """Whether it has; one that has told everything is about to."""
    for _ in range(200):
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    return False
