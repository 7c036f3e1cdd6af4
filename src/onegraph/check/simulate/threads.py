"""Threads of the code under check: the simulated machine is there for all of them, as a GPU is."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from onegraph.check.deadline import Overdue
from onegraph.check.report import CheckError
from onegraph.check.simulate import frames
from onegraph.check.simulate.machine import Machine


class Errand(NamedTuple):
    """Work that a step gave to a thread: which step, and through which calls."""

    step: int
    chain: frames.Chain


class PerThread:
    """A number that each thread has for itself, as torch has the current GPU; 0 in a thread that begins."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, world: Machine, owner: type) -> int:
        found: int = getattr(world.local, self.name, 0)
        return found

    def __set__(self, world: Machine, value: int) -> None:
        setattr(world.local, self.name, value)


class Threads:
    """The threads of the code under check: one at a time, which has the lock, works on the machine.

    main: the thread that runs the steps; errands: of threads that do what a step asked for; started: all that the user
    started; closed: the machine is gone; ended: the program's last line was run; refused: what cannot be checked, met
    in a thread of the user's; copied: this is a copy of the process, with one thread; apart: in a copy, what does the
    work of a pool's.
    """

    def __init__(self) -> None:
        self.main = threading.get_ident()
        self.lock = threading.RLock()
        self.closed = self.ended = self.copied = False
        self.refused: CheckError | None = None
        self.errands: weakref.WeakKeyDictionary[threading.Thread, Errand] = weakref.WeakKeyDictionary()
        self.started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.apart: list[threading.Thread] = []
        self.executors: weakref.WeakSet[Any] = weakref.WeakSet()

    def in_main(self) -> bool:
        return threading.get_ident() == self.main

    def errand(self) -> Errand | None:
        """What the running thread does for a step."""
        return self.errands.get(threading.current_thread())

    @contextmanager
    def working_for(self, errand: Errand) -> Iterator[None]:
        """The running thread does what a step asked for."""
        thread = threading.current_thread()
        before = self.errands.get(thread)
        self.errands[thread] = errand
        try:
            yield
        finally:
            del self.errands[thread]
            if before is not None:
                self.errands[thread] = before

    def raise_refused(self) -> None:
        """What cannot be checked, met in a thread of the user's, ends the check in this one."""
        if self.refused is not None:
            raise self.refused


def start(world: Machine, real: Callable[..., Any], modes: Callable[[], AbstractContextManager[Any]]) -> Any:
    """`Thread.start` whose thread has the machine too (modes hold for one thread), and the calls that started it."""

    def start(thread: Any) -> Any:
        if not world.submitting and (chain := world.chain()):
            world.threads.errands[thread] = Errand(world.step, chain)
        world.threads.started.add(thread)
        run = thread.run

        def inside() -> None:
            try:
                with modes():
                    frames.in_thread(run)
            except CheckError as error:  # to whoever checks: the thread's own end is not the user's fault
                world.threads.refused = world.threads.refused or error

        thread.run = inside
        return real(thread)

    return start


def submit(world: Machine, real: Callable[..., Any]) -> Any:
    """`ThreadPoolExecutor.submit`: in a step with the calls that submitted. While a factory builds, where many threads
    read weights, the work is done at once: what is made gets the same number in every run."""

    def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        if world.phase == "step":
            work = _told(world, function)
            if world.threads.copied:
                return _apart(world, work, args, kwargs)
            world.submitting += 1
            try:
                given: Future[Any] = real(pool, work, *args, **kwargs)
            finally:
                world.submitting -= 1
            return given
        if world.builds_at_once:
            return _now(function, args, kwargs)
        with world.threads.lock:
            if world.threads.ended:
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            world.threads.executors.add(pool)
        waiting: Future[Any] = real(pool, function, *args, **kwargs)
        return waiting

    return submit


def finish(world: Machine) -> None:
    """What Python does after a program's last line: pools do what they were given, and threads end, but daemons."""
    with world.threads.lock:
        world.threads.ended = True
        executors = list(world.threads.executors)
    for pool in executors:
        pool.shutdown()
    while left := [t for t in threading.enumerate() if t in world.threads.started and not t.daemon]:
        left[0].join()


def _now(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Future[Any]":
    done: Future[Any] = Future()
    try:
        done.set_result(function(*args, **kwargs))
    except (Overdue, KeyboardInterrupt):  # to whoever checks, not to whoever waits for the work
        raise
    except BaseException as error:
        done.set_exception(error)
    return done


def _apart(
    world: Machine, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "Future[Any]":
    """Work in a thread of its own: those of the pool are not in a copy of the process."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(function(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    world.threads.apart.append(thread)
    thread.start()
    return done


def _told(world: Machine, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which while it runs is known to be the work of those who submit it now."""
    errand = Errand(world.step, world.chain())

    @functools.wraps(function, updated=())
    def work(*args: Any, **kwargs: Any) -> Any:
        with world.threads.working_for(errand):
            return function(*args, **kwargs)

    return work
