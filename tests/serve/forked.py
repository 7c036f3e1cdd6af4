"""`onegraph` in processes that are copies of one that has imported torch: the import takes most of a server's start."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

COPIES = multiprocessing.get_context("forkserver")
COPIES.set_forkserver_preload(["torch", "onegraph.cli", "onegraph.serve.http"])


def run(words: list[str], environment: dict[str, str], folder: str, stderr: Connection, files: int | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    from onegraph.cli import main

    sys.exit(main(words))


class Forked:
    """`onegraph` with these words, as subprocess.Popen has it, with its stderr in a pipe."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], files: int | None = None) -> None:
        """files: that it may open."""
        read, write = COPIES.Pipe(duplex=False)
        given = list(words), dict(environment), os.getcwd(), write, files
        self.process = COPIES.Process(target=run, args=given, daemon=True)
        self.process.start()
        write.close()
        self.stderr = open(os.dup(read.fileno()))  # noqa: SIM115
        read.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("onegraph", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """("", what is left on stderr), once it has ended."""
        found: list[str] = []
        if not self.stderr.closed:
            reader = threading.Thread(target=lambda: found.append(self.stderr.read()), daemon=True)
            reader.start()
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired("onegraph", timeout or 0.0)
            self.stderr.close()
        self.wait(timeout)
        return "", "".join(found)
