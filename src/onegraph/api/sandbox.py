"""Where untrusted programs run: a child process that can compute, in bounded time and memory, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Literal

VARIABLE, LIMITS = "ONEGRAPH_SANDBOX", "limits"  # this value allows a sandbox without seccomp
CHILD = Path(__file__).with_name("sandbox_worker.py")
# What the child's Python needs to start and to tell the time; of the rest of the environment it sees nothing.
KEPT = ("LD_LIBRARY_PATH", "TZ")
START = 60  # seconds of the clock in which it must be there
WALL_CLOCK_FACTOR = 4  # a request may take so many times its CPU time, of the clock, on a machine that does other work
MAX_REPLY = 128 << 20  # bytes, and so many times the request:
REPLY_PER_REQUEST = 64


Kind = Literal["templates", "tokenizers", "grammars"]
_started_early: dict[Kind, tuple[int, subprocess.Popen[bytes]]] = {}  # with the process that started each


class SandboxWorkerError(ValueError):
    """What the child said went wrong."""


class Exhausted(SandboxWorkerError):
    """The child took more than it may, or crashed."""


class SandboxError(ValueError):
    """The kernel cannot filter the child's system calls, and nobody has allowed to run without."""


class Sandbox:
    """A child process for one checkpoint's template or tokenizer, or for requests' grammars: started at the first call,
    one for many calls, and again after one that it did not survive. Safe to use from several threads and after a fork.

    memory: bytes of address space. load: what the child's `load` is called with after each start, its `seconds` among
    it.
    """

    def __init__(self, kind: Kind, memory: int, load: dict[str, Any] | None = None) -> None:
        self._kind, self._memory, self._load = kind, memory, load
        self._lock = threading.RLock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self.filtered = False  # whether the kernel filters the child's system calls

    def copy(self) -> Sandbox:
        """One for the same, with a child of its own."""
        return Sandbox(self._kind, self._memory, self._load)

    def interrupt(self) -> None:
        """From any thread: kills the child, so that a call that waits for it raises."""
        child = self._child
        if child is not None and self._owner == os.getpid():
            child.kill()

    def start(self) -> Any:
        """Starts the child and gives what `load` gave, None where it is running already.

        Raises OSError where it cannot start, SandboxError where it cannot be shut in, and what `call` raises.
        """
        with self._lock:
            if self._child is not None and self._owner == os.getpid():  # after a fork, it is the other process's
                return None
            self._child = self._open()
            self._owner = os.getpid()
            try:
                self.filtered = self._exchange(json.dumps({"memory": self._memory}).encode(), START)["result"]
                programs = self._kind != "grammars"  # of a request, not of a file
                if programs and not self.filtered and os.environ.get(VARIABLE) != LIMITS:
                    raise SandboxError(
                        f"the sandbox of {self._kind}, which come with a model and are programs, needs seccomp, which "
                        f"this machine does not give; to run a model that you trust with resource limits alone, set "
                        f"{VARIABLE}={LIMITS}"
                    )
                return None if self._load is None else self._ask("load", **self._load)
            except _Dead:
                self._stop()
                raise OSError(f"cannot start a process for {self._kind}: {sys.executable} {CHILD}") from None
            except BaseException:
                self._stop()
                raise

    def call(self, name: str, *, seconds: float, memory: int = 0, **arguments: Any) -> Any:
        """The child's answer, within `seconds` of CPU time and, where that is more than it has, `memory` bytes.

        Raises SandboxWorkerError with what the child says went wrong, Exhausted where it ran out of time or memory.
        """
        with self._lock:
            if memory > self._memory:
                self._memory = memory
                self._stop()
            self.start()
            return self._ask(name, seconds, **arguments)

    def _ask(self, name: str, seconds: float, **arguments: Any) -> Any:
        request = json.dumps({"call": name, "seconds": seconds, "arguments": arguments}).encode()
        try:
            reply = self._exchange(request, WALL_CLOCK_FACTOR * seconds)
        except _Dead as dead:
            status = self._stop()
            if dead.late or status == -signal.SIGPROF:
                why = f"ran longer than {seconds:.0f} s"
            elif status == -signal.SIGKILL and not dead.refused:
                why = "its process was killed, by a user or for the memory of this machine; try again"
            else:
                why = f"ran out of its {self._memory >> 20} MiB"
            raise Exhausted(why) from None
        except BaseException:  # interrupted, say: what comes next out of the pipe would answer another request
            self._stop()
            raise
        if "error" in reply:
            raise SandboxWorkerError(reply["error"])
        return reply["result"]

    def _open(self) -> subprocess.Popen[bytes]:
        owner, child = _started_early.pop(self._kind, (0, None))
        if child is None or owner != os.getpid():
            child = _spawn(self._kind)
        weakref.finalize(self, _end, child)
        return child

    def _stop(self) -> int | None:
        """Ends the child, if it is there; its exit status."""
        child, self._child = self._child, None
        return None if child is None or self._owner != os.getpid() else _end(child)

    def _exchange(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Writes the request and reads the answer. Raises _Dead where the child ends, or is late."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        deadline = time.monotonic() + seconds
        data = len(request).to_bytes(8, "little") + request
        limit = MAX_REPLY + REPLY_PER_REQUEST * len(data)
        target, source = self._child.stdin.fileno(), self._child.stdout.fileno()
        left = memoryview(data)
        reply = bytearray()
        expected = 8
        try:
            while left:
                _wait(target, select.POLLOUT, deadline)
                left = left[os.write(target, left) :]
            while len(reply) < expected:
                _wait(source, select.POLLIN, deadline)
                if not (more := os.read(source, 1 << 20)):
                    raise _Dead(late=False)
                reply += more
                if expected == 8 and len(reply) >= 8:
                    expected = 8 + int.from_bytes(reply[:8], "little")
                    if expected > limit:
                        raise _Dead(late=False, refused=True)
        except BrokenPipeError:
            raise _Dead(late=False) from None
        found: dict[str, Any] = json.loads(bytes(reply[8:]))
        return found


def start_early(kind: Kind) -> None:
    """Starts the child of this process's next `Sandbox` of the kind, which imports its libraries meanwhile: for a
    command that imports torch before it knows its model. A child that nobody takes ends with this process."""
    owner, _ = _started_early.get(kind, (0, None))
    if owner != os.getpid():
        with contextlib.suppress(OSError):  # the sandbox tries again, and says what is wrong
            _started_early[kind] = os.getpid(), _spawn(kind)


def _spawn(kind: Kind) -> subprocess.Popen[bytes]:
    """A child that waits for the bytes of memory that it may have."""
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    # -I: no environment variable, no user's packages; -S: no site, since the path is given
    command = [sys.executable, "-I", "-S", str(CHILD), kind, *path]
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=environment | {"TOKENIZERS_PARALLELISM": "false"},  # it may not start threads
        start_new_session=True,  # Ctrl-C is for us, and the terminal is not for it
    )
    assert child.stdin is not None
    assert child.stdout is not None
    os.set_blocking(child.stdin.fileno(), False)
    os.set_blocking(child.stdout.fileno(), False)
    return child


def state() -> str:
    """What shuts templates and tokenizers in on this machine, in words."""
    cage = Sandbox("templates", 1 << 30)
    try:
        cage.start()
    except (SandboxError, OSError) as error:
        return f"not available: {error}"
    finally:
        cage._stop()
    return "seccomp and resource limits" if cage.filtered else f"resource limits alone ({VARIABLE}={LIMITS})"


class _Dead(Exception):
    """The child ended, is late, or wants to send more than it may (refused)."""

    def __init__(self, late: bool, refused: bool = False) -> None:
        self.late, self.refused = late, refused


def _wait(descriptor: int, event: int, deadline: float) -> None:
    ready = select.poll()
    ready.register(descriptor, event)
    if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise _Dead(late=True)


def _end(child: subprocess.Popen[bytes]) -> int:
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()
    child.kill()
    return child.wait()
