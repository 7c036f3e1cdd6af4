"""Runs many small looks at a GPU in few processes; one that crashes, hangs or spoils its process costs no other."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

_FORK = multiprocessing.get_context("fork")


def answers(
    look: Callable[..., Any],
    tasks: list[tuple[Any, ...]],
    *,
    workers: int,
    fit: Callable[[], bool] = lambda: True,
    patience: float = 60.0,
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each task with `look(*task)`, as they come; {"error": why} for one that killed its process or took too long.

    Args:
        look: runs in a forked process; what it returns must pickle.
        tasks: its arguments, dealt out to `workers` processes in turn.
        fit: asked after each task; where it says no, the next task gets a fresh process.
        patience: seconds that one task may take.
    """
    lanes = [_Lane(look, tasks[i::workers], fit) for i in range(min(workers, len(tasks)))]
    while lanes:
        wait([lane.connection for lane in lanes], timeout=1.0)
        for lane in list(lanes):
            yield from lane.collect(patience)
            if not lane.tasks:
                lane.process.kill()  # it has answered everything, and CUDA may hang as it ends
                lane.process.join()
                lanes.remove(lane)


class _Lane:
    def __init__(self, look: Callable[..., Any], tasks: list[tuple[Any, ...]], fit: Callable[[], bool]) -> None:
        self.look, self.tasks, self.fit = look, tasks, fit
        self._start()

    def _start(self) -> None:
        self.connection, theirs = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_serve, args=(self.look, self.tasks, self.fit, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.heard = time.monotonic()

    def collect(self, patience: float) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """What the process has answered since; starts another one where it ended before its last task."""
        ended = False
        while self.tasks and not ended and self.connection.poll():
            try:
                answer = self.connection.recv()
            except EOFError:
                ended = True  # the next process starts outside of this block: it would inherit the exception
            else:
                self.heard = time.monotonic()
                yield self.tasks.pop(0), answer
        if ended:
            self.process.join()
            if self.process.exitcode:
                yield self.tasks.pop(0), {"error": f"its process ended with status {self.process.exitcode}"}
            if self.tasks:
                self._start()
        elif self.tasks and time.monotonic() - self.heard > patience:
            self.process.kill()
            yield self.tasks.pop(0), {"error": f"no answer in {patience:.0f} s"}
            if self.tasks:
                self._start()


def _serve(look: Callable[..., Any], tasks: list[tuple[Any, ...]], fit: Callable[[], bool], to: Connection) -> None:
    for task in tasks:
        to.send(look(*task))
        if not fit():
            os._exit(0)  # at once: a broken CUDA may abort as it ends
