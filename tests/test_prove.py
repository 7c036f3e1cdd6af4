"""What `prove` finds: steps whose replays differ from the eager step, on the recorded graphs of test_graph."""

import itertools
import re

import pytest
import torch

from onegraph.runtime.graph import Runner
from onegraph.runtime.prove import prove
from test_graph import RecordedPool, affine, affine_inputs, batch


@pytest.fixture(params=["eager", "recorded"])
def pool(request):
    return RecordedPool() if request.param == "recorded" else None


def proof_cases():
    return [batch(3, 1), batch(8, 2), batch(1, 3)]


def test_a_clean_step_is_proven(pool):
    assert prove(Runner(affine, affine_inputs(), [1, 4, 8], pool=pool), proof_cases()) == []


def host_counter():
    count = itertools.count()
    return lambda x, y: x * next(count)


def frozen_number():
    return lambda x, y: x + y.sum(1, keepdim=True) * float(len({*range(int(x.detach().numpy().sum() * 100) % 7)}))


def rebound_input():
    held = {"sum": torch.zeros(8, 3)}

    def step(x, y):
        held["sum"] = held["sum"] + x  # a new storage each time, where a graph goes on reading the captured one
        return held["sum"] * 1

    return step


def unwritten_output():
    out = torch.zeros(8, 3)

    def step(x, y):
        out.numpy()[: len(x)] = x.numpy()  # host work: a replay does not repeat it
        return out[: len(x)] + 0 * x, out

    return step


@pytest.mark.parametrize("make", [host_counter, frozen_number, rebound_input, unwritten_output])
def test_a_step_that_replays_something_else_is_found(make):
    runner = Runner(make(), affine_inputs(), [8], pool=RecordedPool())
    found = prove(runner, [batch(8, 1), batch(8, 2)])
    assert found
    assert all(re.match(r"case \d: output \d: ", str(f)) for f in found)


def test_differences_in_written_state_are_found():
    log = torch.zeros(4)
    turn = itertools.count()

    def step(x):
        log.add_(x * (1 + next(turn)))
        return x + 1

    runner = Runner(step, {"x": torch.zeros(4)}, pool=RecordedPool(), reset=log.zero_)
    cases = [{"x": torch.ones(4)}, {"x": torch.full((4,), 2.0)}]
    assert prove(runner, cases) == []
    assert {d.what for d in prove(runner, cases, state={"log": log})} == {"state 'log'"}


def test_nan_never_passes(pool):
    runner = Runner(lambda x: x / x, {"x": torch.ones(4)}, pool=pool)
    assert prove(runner, [{"x": torch.full((4,), 2.0)}]) == []
    assert "the eager step itself gives NaN" in str(prove(runner, [{"x": torch.zeros(4)}])[0])


def test_infinities_must_agree_and_tolerance_is_relative():
    turn = itertools.count()
    runner = Runner(lambda x: x + 1e-4 * next(turn), {"x": torch.zeros(3)}, pool=RecordedPool())
    case = {"x": torch.tensor([1.0, 2.0, float("inf")])}
    assert prove(runner, [case])
    assert prove(runner, [case], tolerance=1e-3) == []


def test_a_proof_on_the_captured_input_alone_is_refused(pool):
    runner = Runner(affine, affine_inputs(), [1, 8], pool=pool)
    with pytest.raises(ValueError, match="all equal to what was captured"):
        prove(runner, [affine_inputs(1), affine_inputs(8)])
