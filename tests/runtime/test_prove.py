"""What `prove` finds: steps whose replays differ from the eager step, on the recorded graphs of test_graph."""

import itertools
import re

import pytest
import torch

from onegraph.runtime.graph import Runner
from onegraph.runtime.prove import prove
from test_graph import RecordedGraph, RecordedPool, affine, affine_inputs, batch


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


def written_by_the_host(dtype):
    """A step whose output only host code writes, which no replay repeats; before the first proof it is right."""
    out = torch.zeros(4, dtype=dtype)

    def step(x):
        out.numpy()[:] = x.to(dtype).numpy()
        return out, x + 1

    return step


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32])
def test_an_output_that_a_replay_leaves_unwritten_is_found_in_every_dtype(dtype):
    runner = Runner(written_by_the_host(dtype), {"x": torch.zeros(4)}, pool=RecordedPool())
    found = prove(runner, [{"x": torch.ones(4)}, {"x": torch.ones(4)}])
    assert [(d.case, d.what) for d in found] == [(0, "output 0"), (1, "output 0")]


@pytest.mark.parametrize(
    ("captured", "eager", "told"),
    [
        (
            lambda x: x + 1,
            lambda x: x.double() + 1,
            "output 0: eager gives torch.float64 [4], the replay torch.f",
        ),
        (
            lambda x: x + 1,
            lambda x: (x + 1)[:3],
            "output 0: eager gives torch.float32 [3], the replay",
        ),
        (lambda x: x + 1, lambda x: (x + 1, x), "outputs: eager gives 3 values, the replay 2"),
        (lambda x: (x + 1, 7), lambda x: (x + 1, 8), "output 1: eager gives 8, the replay 7"),
        (lambda x: (x + 1, x * 1), lambda x: (x + 1, 8), "output 1: eager gives 8, the replay tensor("),
        (lambda x: x.int() * 1, lambda x: x.int() * 2, "output 0: 4 of 4 values differ, relative error 5.00e-01"),
        (lambda x: x * 1.5, lambda x: x * 1, "output 0: 4 of 4 values differ, relative error 5.00e-01"),
        (
            lambda x: x + x.new_tensor([0, 0, 1, 0]),
            lambda x: x * 1,
            "output 0: 1 of 4 values differ, relative error 2.",
        ),
        (lambda x: x / 0, lambda x: x / -0.0, "output 0: 4 of 4 values differ, relative error inf"),
        (lambda x: x * 1, lambda x: x / 0, "output 0: 4 of 4 values differ, relative error inf"),
        (lambda x: x * 1, lambda x: x * 0, "output 0: 4 of 4 values differ, relative error inf"),
        (
            lambda x: x * torch.nan,
            lambda x: x * 1,
            "output 0: the replay, which left it unwritten or read",
        ),
    ],
)
def test_a_difference_is_told_in_figures(captured, eager, told):
    runner = Runner(
        lambda x: (captured if RecordedGraph.capturing else eager)(x), {"x": torch.ones(4)}, pool=RecordedPool()
    )
    (found,) = prove(runner, [{"x": torch.full((4,), 2.0)}])
    assert str(found).startswith(f"case 0: {told}")


def test_tolerance_is_for_floating_point_alone_and_inclusive():
    def proof(kind, tolerance):
        step = lambda x: kind(x) * (3 if RecordedGraph.capturing else 2)  # noqa: E731
        runner = Runner(step, {"x": torch.ones(4)}, pool=RecordedPool())
        return prove(runner, [{"x": torch.full((4,), 2.0)}], tolerance=tolerance)

    assert proof(torch.Tensor.float, 0.5) == []
    assert proof(torch.Tensor.float, 0.49)
    assert proof(torch.Tensor.int, 0.5)


def test_state_begins_alike_for_the_eager_run_and_for_the_replay():
    log = torch.zeros(4)

    def step(x):
        log.add_(x)
        return log * 1

    runner = Runner(step, {"x": torch.zeros(4)}, pool=RecordedPool())
    case = {"x": torch.ones(4)}
    assert prove(runner, [case], state={"log": log}), "without a reset the replay begins where the eager run ended"
    assert prove(runner, [case, case], state={"log": log}, reset=log.zero_) == []


def test_one_input_that_differs_is_news_enough(pool):
    runner = Runner(affine, affine_inputs(), [1, 8], pool=pool)
    changed = affine_inputs(1) | {"y": torch.ones(1, 5)}
    assert prove(runner, [affine_inputs(8), changed]) == []
