"""What a step takes from outside of its capture: events and streams, other threads, host tensors, random numbers."""

import multiprocessing.pool
import queue
import random
import sys
import threading
import types
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from onegraph.check import check_step
from onegraph.check.deadline import deadline
from onegraph.check.report import CheckError


def x(i: int) -> torch.Tensor:
    return torch.full((4,), float(i + 1), device="cuda")


def codes(factory: Callable[[], Any]) -> set[tuple[str, str]]:
    return {(f.code, f.severity.value) for f in check_step(factory).findings}


def stepping(step: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    return lambda: (step, lambda i: (x(i),))


def waits_for(how: str) -> Callable[[], Any]:
    def factory() -> Any:
        side, event, buffer = torch.cuda.Stream(), torch.cuda.Event(), x(0)

        def step(given: torch.Tensor) -> torch.Tensor:
            main = torch.cuda.current_stream()
            if how == "event":
                main.wait_event(event)
            elif how == "stream":
                main.wait_stream(side)
            elif how == "fork and join":
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    given = given * 2
                main.wait_stream(side)
            elif how == "own event":
                event.record()
                event.wait(side)
                with torch.cuda.stream(side):
                    given = given * 2
                    event.record()
                event.wait(main)
            return given + buffer

        def inputs(i: int) -> Any:
            if how in ("event", "stream"):
                with torch.cuda.stream(side):
                    buffer.fill_(i)
                    event.record(side)
            return (x(i),)

        return step, inputs

    return factory


@pytest.mark.parametrize("how", ["event", "stream"])
def test_uncaptured_work_that_the_step_waits_for(how: str) -> None:
    assert codes(waits_for(how)) == {("CG305", "error")}


@pytest.mark.parametrize("how", ["fork and join", "own event", "nothing"])
def test_work_of_the_capture_may_be_waited_for(how: str) -> None:
    assert codes(waits_for(how)) == set()


def test_an_event_of_the_step_before_is_outside() -> None:
    def factory() -> Any:
        event = torch.cuda.Event()

        def step(given: torch.Tensor) -> torch.Tensor:
            event.wait()
            given = given * 2
            event.record()
            return given

        return step, lambda i: (x(i),)

    assert codes(factory) == {("CG305", "error")}


def test_work_given_to_a_pool_or_a_thread() -> None:
    buffer: list[torch.Tensor] = []

    def pool() -> Any:
        workers, out = ThreadPoolExecutor(1), x(0)

        def step(given: torch.Tensor) -> torch.Tensor:
            workers.submit(lambda: out.copy_(given)).result()
            return out + 1

        return step, lambda i: (x(i),)

    def thread() -> Any:
        out = x(0)

        def step(given: torch.Tensor) -> torch.Tensor:
            worker = threading.Thread(target=lambda: out.copy_(given))
            worker.start()
            worker.join()
            return out + 1

        return step, lambda i: (x(i),)

    def loading() -> Any:
        with ThreadPoolExecutor(2) as workers:
            weights = list(workers.map(x, range(2)))

        def step(given: torch.Tensor) -> torch.Tensor:
            ThreadPoolExecutor(1).submit(buffer.clear).result()  # no work of the device's
            return given + weights[0]

        return step, lambda i: (x(i),)

    assert ("CG309", "error") in codes(pool)
    assert ("CG309", "error") in codes(thread)
    assert "CG309" not in {code for code, _ in codes(loading)}


def test_where_copies_a_host_scalar_over() -> None:
    host = torch.tensor(3.0)
    device = stepping(lambda t: torch.where(t > 2, t, torch.full((), 3.0, device="cuda")))
    assert codes(stepping(lambda t: torch.where(t > 2, t, host))) == {("CG102", "error")}
    assert codes(stepping(lambda t: torch.where(t > 2, host, t))) == {("CG102", "error")}
    assert codes(stepping(lambda t: torch.where(t > 2, t, 3.0))) == set()
    assert codes(device) == set()
    assert codes(stepping(lambda t: t * host)) == set()  # passed by value


GENERATOR, OWN = np.random.default_rng(7), random.Random(7)

DRAWS: dict[str, Callable[[], int]] = {
    "random": lambda: random.getrandbits(1),
    "Random": lambda: OWN.getrandbits(1),
    "numpy": lambda: int(np.random.randint(2)),
    "numpy generator": lambda: int(GENERATOR.integers(2)),
    "uuid": lambda: uuid.uuid4().int % 2,
}


@pytest.mark.parametrize("source", DRAWS)
def test_a_random_bit_is_found_although_four_may_be_alike(source: str) -> None:
    draw = DRAWS[source]
    for _ in range(4):  # of four steps, one in four has three equal bits to compare
        assert ("CG202", "error") in codes(stepping(lambda t: t * draw()))


def test_randomness_that_decides_nothing_is_no_error() -> None:
    def step(given: torch.Tensor) -> torch.Tensor:
        str(uuid.uuid4())
        random.random()
        return given * 2

    assert codes(stepping(step)) == set()


def test_endless_work_of_a_pool_ends_at_the_deadline() -> None:
    def factory() -> Any:
        def endless() -> None:
            while True:
                pass

        with deadline(0.3, "target"):
            ThreadPoolExecutor(1).submit(endless)
        return (lambda given: given * 2), lambda i: (x(i),)

    with pytest.raises(CheckError, match="still running"):
        check_step(factory)


class Worker:
    """A thread that lives as long as the model and does what it is given."""

    def __init__(self) -> None:
        self.work: queue.Queue[Callable[[], Any]] = queue.Queue()
        self.done: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            self.done.put(self.work.get()())


def test_work_for_threads_that_are_older_than_the_step() -> None:
    def handed() -> Any:
        worker = Worker()

        def step(given: torch.Tensor) -> Any:
            worker.work.put(lambda: given * 2)
            return worker.done.get()

        return step, lambda i: (x(i),)

    def mapped() -> Any:
        pool = multiprocessing.pool.ThreadPool(1)
        return (lambda given: pool.map(lambda by: given * by, [2.0])[0]), lambda i: (x(i),)

    assert ("CG309", "error") in codes(handed)
    assert ("CG309", "error") in codes(mapped)


def test_a_pool_in_a_step_is_a_real_one() -> None:
    """Work that waits for what the step does after it has submitted it; the line that submits is named."""

    def factory() -> Any:
        pool, ready = ThreadPoolExecutor(1), threading.Event()

        def step(given: torch.Tensor) -> Any:
            work = pool.submit(lambda: ready.wait(30) and given * 2)
            ready.set()
            return work.result()

        return step, lambda i: (x(i),)

    with deadline(60, "pool"):
        report = check_step(factory)
    (told,) = [f for f in report.errors if f.code == "CG309"]
    assert "pool.submit" in told.source


def test_threads_of_a_factory_build_on_the_simulated_device() -> None:
    def factory() -> Any:
        made: list[torch.Tensor] = []
        worker = threading.Thread(target=lambda: made.append(torch.ones(4, device="cuda")))
        worker.start()
        worker.join()
        return (lambda given: given * made[0]), lambda i: (x(i),)

    assert codes(factory) == set()


def test_names_taken_from_torch_cuda_are_the_simulated_ones() -> None:
    module = types.ModuleType("onegraph_taken_names")
    module.__file__ = "/taken.py"
    late = "def later():\n    global Event\n    from torch.cuda import Event"
    exec(f"from torch.cuda import ExternalStream, Stream, current_stream\n{late}", module.__dict__)
    sys.modules[module.__name__] = module
    real = module.current_stream

    def factory() -> Any:
        module.later()
        side = module.Stream()

        def step(given: torch.Tensor) -> Any:
            side.wait_stream(module.current_stream())
            with side:
                given = given * 2
            module.current_stream().wait_stream(side)
            return given

        return step, lambda i: (x(i),)

    try:
        assert codes(factory) == set()
        assert module.current_stream is real is torch.cuda.current_stream
        assert module.Stream is torch.cuda.Stream  # one stand-in for both
        assert module.ExternalStream is torch.cuda.ExternalStream
        assert module.Event is torch.cuda.Event  # imported by the factory: the stand-in does not stay
        assert codes(factory) == set()
    finally:
        del sys.modules[module.__name__]
