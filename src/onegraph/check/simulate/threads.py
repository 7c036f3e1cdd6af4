"""Threads of the code under check: the simulated machine is there for all of them, as a GPU is."""

import functools
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from onegraph.check.deadline import Overdue

if TYPE_CHECKING:
    from onegraph.check.simulate.world import World


def start(world: "World", real: Callable[..., Any], modes: Callable[[], AbstractContextManager[Any]]) -> Any:
    """`Thread.start` whose thread has the machine too (modes hold for one thread), and the calls that started it."""

    def start(thread: Any) -> Any:
        if chain := world.chain():
            world.started[thread] = chain
        run = thread.run

        def inside() -> None:
            with modes():
                run()

        thread.run = inside
        return real(thread)

    return start


def submit(world: "World", real: Callable[..., Any]) -> Any:
    """`ThreadPoolExecutor.submit`: in a step as it is, with the calls that submitted. Outside of steps, where many
    threads read weights, the work is done at once: what is made gets the same number in every run."""

    def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        if world.phase == "step":
            work: Future[Any] = real(pool, _told(world, function), *args, **kwargs)
            return work
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except (Overdue, KeyboardInterrupt):  # to whoever checks, not to whoever waits for the work
            raise
        except BaseException as error:
            done.set_exception(error)
        return done

    return submit


def _told(world: "World", function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which while it runs is known to be the work of those who submit it now."""
    chain = world.chain()

    @functools.wraps(function, updated=())
    def work(*args: Any, **kwargs: Any) -> Any:
        with world.working_for(chain):
            return function(*args, **kwargs)

    return work
