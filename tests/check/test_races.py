"""Two streams that use one storage between fork and join: ordered by what, and told by which lines."""

from pathlib import Path

import pytest
import torch

from onegraph.check import check_step
from onegraph.check.output import text
from onegraph.check.simulate.races import Order, Part

cur = torch.cuda.current_stream


def given(i):
    return (torch.full((4, 4), float(i), device="cuda"),)


class Step:
    def __init__(self):
        self.side, self.other = torch.cuda.Stream(), torch.cuda.Stream()
        self.forked, self.joined = torch.cuda.Event(), torch.cuda.Event()
        self.held = torch.zeros(4, 8, device="cuda")


class ReadBeforeJoin(Step):
    def __call__(self, x):
        self.side.wait_stream(cur())
        with torch.cuda.stream(self.side):
            y = x * 2  # writes
        z = y + 1  # races
        cur().wait_stream(self.side)
        return y + z


class WrittenWhileRead(Step):
    def __call__(self, x):
        self.side.wait_stream(cur())
        with torch.cuda.stream(self.side):
            y = self.held * 2  # reads
        self.held.add_(1)  # races
        cur().wait_stream(self.side)
        return y + self.held


class BothWrite(Step):
    def __call__(self, x):
        self.side.wait_stream(cur())
        with torch.cuda.stream(self.side):
            self.held[:, :4].copy_(x)  # writes
        self.held.mul_(2)  # races
        cur().wait_stream(self.side)
        return self.held.clone()


class EventTooEarly(Step):
    def __call__(self, x):
        self.forked.record()
        y = x + 1  # writes
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.forked)
            z = y * 2  # races
            self.joined.record()
        cur().wait_event(self.joined)
        return z


class TwoSides(Step):
    def __call__(self, x):
        self.side.wait_stream(cur())
        self.other.wait_stream(cur())
        with torch.cuda.stream(self.side):
            a = x * 2  # writes
        with torch.cuda.stream(self.other):
            b = a * 2  # races
        cur().wait_stream(self.other)
        cur().wait_stream(self.side)
        return a + b


@pytest.mark.parametrize("step", [ReadBeforeJoin, WrittenWhileRead, BothWrite, EventTooEarly, TwoSides])
def test_a_race_is_an_error_with_both_lines(step):
    report = check_step(lambda: (step(), given))
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = step.__call__.__code__.co_firstlineno
    races = next(i for i in range(first, len(source)) if source[i].endswith("# races")) + 1
    (error,) = report.errors
    assert (error.code, error.line) == ("CG305", races)
    before = next(i for i in range(first, len(source)) if source[i].endswith(("# writes", "# reads"))) + 1
    assert f"test_races.py:{before} " in error.values[0]
    assert f"test_races.py:{error.line} " in error.values[1]


class ForkAndJoin(Step):
    def __call__(self, x):
        self.side.wait_stream(cur())
        with torch.cuda.stream(self.side):
            y = x * 2
        z = x + 1  # both read
        cur().wait_stream(self.side)
        return y + z


class Halves(Step):
    """Columns of one matrix: their bytes lie between each other, and none is shared."""

    def __call__(self, x):
        self.side.wait_stream(cur())
        with torch.cuda.stream(self.side):
            self.held[:, :4].copy_(x)
        self.held[:, 4:].copy_(x * 2)
        cur().wait_stream(self.side)
        return self.held.clone()


class Events(Step):
    def __call__(self, x):
        y = x + 1
        self.forked.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.forked)
            self.held[:, :4].copy_(y)
            self.joined.record()
        z = x * 3
        cur().wait_event(self.joined)
        return self.held[:, :4] + z


class Handed(Step):
    """Order is handed on: the second side waits for the first, the step for the second alone."""

    def __call__(self, x):
        self.side.wait_stream(cur())
        with torch.cuda.stream(self.side):
            a = x * 2
        self.other.wait_stream(self.side)
        with torch.cuda.stream(self.other):
            b = a * 2
        cur().wait_stream(self.other)
        return a + b


class ForkedAgain(Step):
    def __call__(self, x):
        for _ in range(3):
            self.side.wait_stream(cur())
            with torch.cuda.stream(self.side):
                self.held.add_(1)
            cur().wait_stream(self.side)
            self.held.mul_(2)
        return self.held.clone()


@pytest.mark.parametrize("step", [ForkAndJoin, Halves, Events, Handed, ForkedAgain])
def test_what_is_ordered_is_no_race(step):
    report = check_step(lambda: (step(), given))
    assert not report.findings, text.render(report)


def test_clocks_cover_what_was_launched_before_the_event():
    order, held = Order(), torch.zeros(4)
    use = [(1, True, held)]
    assert not order.launch(0, use, ())  # before any fork: over for whoever waits
    early = order.now(0)
    assert not order.launch(0, use, ())
    order.wait(1, early)
    (race,) = order.launch(1, use, ())
    assert (race.number, race.earlier.stream, race.later.stream) == (1, 0, 1)
    order.wait(1, order.now(0))
    assert not order.launch(1, use, ())


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        (lambda m: m[:, :2], lambda m: m[:, 2:], False),
        (lambda m: m[:, :3], lambda m: m[:, 2:], True),
        (lambda m: m[:2], lambda m: m[2:], False),
        (lambda m: m[0:0], lambda m: m, False),
        (lambda m: m.view(torch.int16)[:, :2], lambda m: m[:, :1], True),  # another size of elements: by the bytes
    ],
)
def test_parts_of_a_storage(first, second, meet):
    matrix = torch.zeros(4, 4)
    parts = Part.of(first(matrix)), Part.of(second(matrix))
    assert parts[0].meets(parts[1]) is meet
    assert parts[1].meets(parts[0]) is meet


@pytest.mark.parametrize("wait", ["stream", "event", "device"])
def test_a_host_that_waits_orders_what_it_launches_later(wait):
    def factory():
        side, done = torch.cuda.Stream(), torch.cuda.Event()

        def step(x):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x * 2
                done.record()
            {"stream": side.synchronize, "event": done.synchronize, "device": torch.cuda.synchronize}[wait]()
            return y + 1

        return step, given

    assert [f.code for f in check_step(factory).errors] == ["CG106"]
