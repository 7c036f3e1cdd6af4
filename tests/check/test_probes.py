"""Values that change, but not between four neighbouring steps: found by running on, or kept as the source told them."""

import gc
import random
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from onegraph.check import check_step
from onegraph.check.output.text import render
from onegraph.check.report import Report
from onegraph.check.simulate.run import FEWEST_STEPS, simulate_step
from onegraph.check.targets import load

HEAD = """
import torch

def X(i):
    return torch.full((4,), float(i + 1), device="cuda")

class Counting:
    def __init__(self, work):
        self.n, self.work = 0, work

    def __call__(self, x):
        self.n += 1
        return self.work(x, self.n)

"""


def checked(folder: Path, text: str) -> Report:
    path = folder / "probed.py"
    path.write_text(HEAD + text)
    target = str(path) + ":factory"
    return check_step(load(target).factory, source=True, target=target)


CHANGES = {
    "page of 16": ("return Counting(lambda x, n: x * (n // 16)), lambda i: (X(i),)", "CG202"),
    "page of 128": ("return Counting(lambda x, n: x * (n // 128)), lambda i: (X(i),)", "CG202"),
    "page of 128 of a layer": ("layer = torch.nn.Linear(4, 4, device='cuda')\n"
             "    return Counting(lambda x, n: layer(x) * (n // 128)), lambda i: (X(i),)", "CG202"),
    "every sixth": ("return Counting(lambda x, n: x * 2 if n % 6 == 0 else x), lambda i: (X(i),)", "CG201"),
    "an input": ("return (lambda x, position: x * (position // 16)), lambda i: (X(i), position(i))", "CG202"),
    "power of two": ("return (lambda x, n: x * n.bit_length()), lambda i: (X(i), i + 4)", "CG202"),
    "rows": ("w = torch.ones(32, 4, device='cuda')\n"
             "    return Counting(lambda x, n: x + w[: n // 16 + 1].sum(0)), lambda i: (X(i),)", "CG202"),
}  # fmt: skip


@pytest.mark.usefixtures("whole_scan")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_past_a_boundary_is_an_error(name: str, tmp_path: Path) -> None:
    body, code = CHANGES[name]
    report = checked(tmp_path, f"def position(i):\n    return i\n\ndef factory():\n    {body}\n")
    assert code in {f.code for f in report.errors}
    assert report.steps > 4


@pytest.mark.usefixtures("whole_scan")
def test_a_value_that_does_not_change_in_all_of_them_stays_a_warning(tmp_path: Path) -> None:
    report = checked(
        tmp_path,
        "class S:\n    def __init__(self):\n        self.n = 0\n    def __call__(self, x):\n        self.n += 1\n"
        "        return x * (self.n // 1000 + 1)\n\ndef factory():\n    return S(), lambda i: (X(i),)\n",
    )
    assert report.errors == ()
    (kept,) = [f for f in report.findings if f.code == "CG202"]
    assert kept.severity == "warning"
    assert kept.message.endswith(f"(in none of the {report.steps} steps that were run did it differ)")
    assert report.steps > 130


def test_a_switch_that_the_caller_turns_late_is_probed_because_the_source_tells_it(tmp_path: Path) -> None:
    report = checked(
        tmp_path,
        "def factory():\n    switch = {'on': False}\n    def step(x):\n"
        "        if switch['on']:\n            x = x + 1\n"
        "        return x * 2\n    def inputs(i):\n        switch['on'] = i >= 9\n        return (X(i),)\n"
        "    return step, inputs\n",
    )
    assert {f.code for f in report.errors} == {"CG201"}


def test_a_condition_that_ran_is_not_said_to_be_unmet(tmp_path: Path) -> None:
    report = checked(
        tmp_path,
        "def factory():\n    st = {'n': 0}\n    def step(x):\n        st['n'] += 1\n"
        "        if st['n'] % 1000 == 999:\n            x = x + 1\n"
        "        return x * 2\n    return step, lambda i: (X(i),)\n",
    )
    (kept,) = [f for f in report.findings if f.code == "CG201"]
    assert kept.message.endswith(f"(in none of the {report.steps} steps that were run did it differ)")


def x(i: int) -> torch.Tensor:
    return torch.full((4,), float(i + 1), device="cuda")


def test_a_step_with_an_error_is_run_no_further() -> None:
    assert check_step(lambda: ((lambda t, n: t * n), lambda i: (x(i), i))).steps == 4


@pytest.mark.usefixtures("whole_scan")
def test_a_step_without_host_state_is_run_on_as_long_as_there_is_time() -> None:
    def factory() -> Any:
        gain = SimpleNamespace(on=False)

        def step(t: torch.Tensor) -> torch.Tensor:
            return t * 2 + 1 if gain.on else t * 2

        def inputs(i: int) -> tuple[torch.Tensor]:
            gain.on = i == 40
            return (x(i),)

        return step, inputs

    (found,) = simulate_step(factory).errors
    assert found.code == "CG201"
    assert found.values == ("step 40 runs 2 ops here where step 1 ran 1",)


def test_steps_that_do_what_the_captured_one_did_are_not_kept() -> None:
    """Their books would grow with their number, and their replays take most of the time."""
    kept: list[weakref.ref[Any]] = []

    class Token:
        pass

    def factory() -> Any:
        def step(t: torch.Tensor) -> torch.Tensor:
            out = t * 2
            out.token = Token()
            kept.append(weakref.ref(out.token))
            return out

        return step, lambda i: (x(i),)

    report = simulate_step(factory)
    gc.collect()
    assert report.steps > 8
    assert sum(reference() is not None for reference in kept) <= 5


def counted(limit: int) -> tuple[list[int], Any]:
    calls: list[int] = []

    def factory() -> Any:
        def step(t: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) > limit:
                t.sum().item()
                raise IndexError("the cache is full")
            return t * 2

        return step, lambda i: (x(i),)

    return calls, factory


def test_a_step_that_was_not_made_for_so_many_ends_the_probe() -> None:
    calls, factory = counted(limit=12)
    report = check_step(factory)
    assert report.steps == 12
    assert len(calls) == 13
    assert {f.code for f in report.findings} == {"CG210"}
    ended = report.facts["probe ended"]
    assert ended.startswith("step 12 raised IndexError: the cache is full")
    assert ended.endswith("judged on the first 12 steps")
    assert ended in render(report)


def test_random_numbers_count_where_the_step_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that `inputs` fills its tensors with are no host state of the step's, whatever generator they come from."""

    def drawn(i: int) -> tuple[torch.Tensor]:
        return (x(i) * random.random() + float(numpy.random.random()),)

    def step(t: torch.Tensor) -> torch.Tensor:
        return t * 2 if random.random() < 2.0 and numpy.random.random() < 2.0 else t

    before = numpy.random.get_bit_generator()
    try:
        for generator in (before, numpy.random.PCG64()):
            numpy.random.set_bit_generator(generator)
            monkeypatch.setattr("onegraph.check.simulate.run.SCAN", 0.0)
            assert simulate_step(lambda: ((lambda t: t * 2), drawn)).steps == 4
            assert simulate_step(lambda: (step, lambda i: (x(i),))).steps == FEWEST_STEPS
    finally:
        numpy.random.set_bit_generator(before)


def test_steps_that_were_asked_for_are_the_steps_that_run() -> None:
    for steps in (3, 7):
        calls, factory = counted(limit=100)
        assert check_step(factory, steps=steps).steps == len(calls) == steps
    calls, factory = counted(limit=100)
    assert simulate_step(factory, probe=False).steps == len(calls) == 4


def test_a_large_step_is_run_a_few_times_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onegraph.check.simulate.run.LONGEST_SCAN", float("inf"))
    monkeypatch.setattr("onegraph.check.simulate.run.SCAN", 0.0)

    def factory(ops: int) -> Any:
        seen = []

        def step(t: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            for _ in range(ops):
                t = t + 1
            return t

        return step, lambda i: (x(i),)

    assert check_step(lambda: factory(1001)).steps == FEWEST_STEPS


def test_a_slow_step_ends_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onegraph.check.simulate.run.LONGEST_SCAN", 0.0)
    _, factory = counted(limit=100)
    assert check_step(factory).steps == 4


def test_what_only_a_later_step_reads_is_a_warning() -> None:
    def factory() -> Any:
        seen: list[float] = []

        def step(t: torch.Tensor) -> torch.Tensor:
            seen.append(0.0)
            if len(seen) == 9:
                seen[0] = t.sum().item()
            return t * 2

        return step, lambda i: (x(i),)

    (read,) = [f for f in check_step(factory).findings if f.code == "CG101"]
    assert read.severity == "warning"
    assert read.message.endswith("(in step 8, in none of the first 4)")


def test_inputs_that_the_checker_holds_are_not_collected_for(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = []
    monkeypatch.setattr("onegraph.check.simulate.run.gc.collect", lambda: collected.append(1))

    def factory() -> Any:
        linear = torch.nn.Linear(4, 4, device="cuda")
        return (lambda t: linear(t)), lambda i: (x(i),)

    simulate_step(factory, probe=True)
    assert not collected
