"""The Runner without a GPU: its eager path, and its capture path over a graph that records and re-executes aten ops.

`RecordedGraph` does on a CPU what a CUDA graph does: it replays the same ops with the same frozen scalars on the same
storages, and no Python. What a captured step computes, splits, pads and breaks can so be tested on any machine.
"""

import itertools
import re
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from onegraph.nn.peers import PeerError
from onegraph.ops.norm import rms_norm
from onegraph.runtime import group
from onegraph.runtime.graph import CaptureError, GraphPool, Runner, split_point
from onegraph.runtime.transfer import LONG, Download, Upload, until


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


class RecordedGraph(TorchDispatchMode):
    capturing = False

    def capture_begin(self, pool, capture_error_mode):
        assert not RecordedGraph.capturing, "one capture at a time, as on a stream"
        assert pool == "handle"
        assert capture_error_mode == "thread_local"
        RecordedGraph.capturing = True
        self.calls, self.made, self.given, self.empty = [], {}, set(), True
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        RecordedGraph.capturing = False
        if self.empty:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)
        for tensor in self.made.values():  # a capture runs nothing: what it allocates holds anything until a replay
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {storage(t) for t in tensors_of([*args, *(kwargs or {}).values()])}
        results = tensors_of([out])
        self.given |= given - self.made.keys()
        self.made |= {storage(t): t for t in results if storage(t) not in self.given}
        new = [(i, t) for i, t in enumerate(results) if storage(t) not in given]
        self.empty = False
        if new or func._schema.is_mutable:  # a view, of what keeps its address, is one already
            self.calls.append((func, args, kwargs or {}, new))
        return out

    def replay(self):
        assert not RecordedGraph.capturing
        for func, args, kwargs, new in self.calls:
            results = tensors_of([func(*args, **kwargs)])
            for i, static in new:
                static.copy_(results[i])


def tensors_of(values):
    """What is a tensor of values, and of lists of them, as ops take and give them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


class RecordedPool(GraphPool):
    def __init__(self):
        self.device, self.handle, self.graphs = torch.device("cpu"), "handle", []

    def graph(self):
        self.graphs.append(RecordedGraph())
        return self.graphs[-1]

    def synchronize(self):
        pass

    def running(self):
        return torch.no_grad()


@pytest.fixture(params=["eager", "recorded"])
def pool(request):
    return RecordedPool() if request.param == "recorded" else None


def affine(x, y):
    return {"sum": x + y.sum(1, keepdim=True), "scaled": x * 3}


def affine_inputs(rows=8):
    return {"x": torch.zeros(rows, 3), "y": torch.zeros(rows, 5)}


def batch(rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 3, generator=g), "y": torch.randn(rows, 5, generator=g)}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
def test_each_number_of_rows_runs_in_its_bucket(pool, rows):
    seen = []

    def step(x, y):
        seen.append(len(x))
        return affine(x, y)

    runner = Runner(step, affine_inputs(), buckets=[4, 1, 2, 8], pool=pool)
    assert runner.mode == ("captured" if pool else "eager")
    assert runner.buckets == (1, 2, 4, 8)
    captured = len(seen)
    for seed in range(3):
        values = batch(rows, seed)
        out = runner(**values)
        expected = affine(**values)
        assert out["sum"].equal(expected["sum"])
        assert out["scaled"].equal(expected["scaled"])
    bucket = next(b for b in (1, 2, 4, 8) if b >= rows)
    if pool:
        assert len(seen) == captured, "a replay must not run Python"
        assert seen == [8] * 3 + [4] * 3 + [2] * 3 + [1] * 3, "two warm-ups and one capture, the largest bucket first"
    else:
        assert seen == [bucket] * 3


def test_buckets_share_the_input_buffers(pool):
    inputs = affine_inputs()
    runner = Runner(affine, inputs, buckets=[2, 8], pool=pool)
    for bucket in (2, 8):
        for name, view in runner.views(bucket).items():
            assert view.data_ptr() == inputs[name].data_ptr()
            assert len(view) == bucket


def test_rows_without_a_value_hold_the_padding(pool):
    inputs = affine_inputs() | {"x": torch.full((8, 3), 7.0)}
    runner = Runner(affine, inputs, buckets=[8], pool=pool)
    runner(**batch(8))
    runner(**batch(3))
    assert inputs["x"][3:].eq(7).all()
    assert inputs["x"][:3].equal(batch(3)["x"])


def test_one_shape_without_buckets(pool):
    def step(table, scale):
        return table * scale

    runner = Runner(step, {"table": torch.zeros(4, 3), "scale": torch.zeros(())}, pool=pool)
    table = torch.randn(4, 3)
    assert runner(table=table, scale=torch.tensor(2.0)).equal(table * 2)
    assert runner(table=table, scale=torch.tensor(5.0)).equal(table * 5)
    with pytest.raises(ValueError, match=r"table: got torch.float32 \[2, 3\]; allowed is torch.float32 \[4, 3\]"):
        runner(table=table[:2], scale=torch.tensor(2.0))


def test_steps_chain_through_their_own_buffers(pool):
    def step(position):
        position.add_(1)
        return position * 10

    runner = Runner(step, {"position": torch.zeros(4, dtype=torch.int32)}, buckets=[1, 2, 4], pool=pool)
    assert runner.inputs["position"].tolist() == [0] * 4, "warm-up and capture must leave no trace"
    runner.load(position=torch.tensor([5, 6, 7], dtype=torch.int32))
    for n in range(1, 300):
        out = runner.replay(4)
        assert out.tolist() == [10 * (5 + n), 10 * (6 + n), 10 * (7 + n), 10 * n]


def test_reset_undoes_what_warm_up_did_to_other_state():
    written = torch.zeros(4)

    def step(x):
        written.add_(x)
        return written * 1

    Runner(step, {"x": torch.ones(4)}, pool=RecordedPool())
    assert written.sum() > 0, "without a reset the runs stay visible, as documented"
    written.zero_()
    runner = Runner(step, {"x": torch.ones(4)}, pool=RecordedPool(), reset=written.zero_)
    assert written.sum() == 0
    assert runner(x=torch.full((4,), 2.0)).tolist() == [2.0] * 4


def test_an_op_is_checked_in_the_first_eager_step_of_each_bucket():
    """Its arguments are the same buffers afterwards; outside of a Runner every call is checked."""
    checked = []
    op = replace(rms_norm, check=lambda x, weight, eps: checked.append(len(x)))
    weight = torch.ones(8)
    runner = Runner(lambda x: op(x, weight, 1e-5), {"x": torch.zeros(4, 8)}, buckets=[2, 4])
    for rows in (2, 4, 2, 4, 1):
        runner(x=torch.ones(rows, 8))
    assert sorted(checked) == [2, 4]
    op(torch.ones(3, 8), weight, 1e-5)
    assert sorted(checked) == [2, 3, 4]


def test_no_gradients_are_recorded(pool):
    weight = torch.ones(3, requires_grad=True)
    runner = Runner(lambda x: x * weight, {"x": torch.zeros(2, 3)}, pool=pool)
    assert not runner(x=torch.ones(2, 3)).requires_grad


# split


def split_step(log):
    def middle(x, label):
        log.append(label)
        return x * 2, x.sum(1)

    def step(x):
        h = x + 1
        doubled, total = split_point("middle", middle, h, "label")
        h = doubled + total[:, None]
        return split_point("end", torch.neg, h)

    return step


def truth(x):
    h = x + 1
    return -(h * 2 + h.sum(1)[:, None])


@pytest.mark.parametrize(
    ("split", "graphs", "eager_calls"),
    [((), 1, 0), ("middle", 2, 1), (["end"], 1, 1), (["middle", "end"], 2, 2)],
)
def test_a_split_runs_the_named_part_eagerly(split, graphs, eager_calls):
    log = []
    runner = Runner(split_step(log), {"x": torch.zeros(4, 3)}, buckets=[2, 4], pool=RecordedPool(), split=split)
    assert runner.mode == ("split" if split else "captured")
    for bucket in (2, 4):
        program, _ = runner._programs[bucket]
        kinds = ["graph" if hasattr(part, "__self__") else "eager" for part in program]
        assert (kinds.count("graph"), kinds.count("eager")) == (graphs, eager_calls), "an empty graph is left out"
    log.clear()
    for rows in (1, 2, 3, 4):
        x = torch.randn(rows, 3)
        assert runner(x=x).equal(truth(x))
    assert log == ["label"] * (4 if "middle" in split or split == "middle" else 0)


def test_split_results_keep_their_address():
    runner = Runner(split_step([]), {"x": torch.zeros(4, 3)}, pool=RecordedPool(), split="end")
    first = runner(x=torch.randn(4, 3))
    kept = first.clone()
    second = runner(x=torch.randn(4, 3))
    assert first.data_ptr() == second.data_ptr()
    assert not kept.equal(first), "an output is valid until the next replay, and not longer"


def test_split_points_are_plain_calls_elsewhere():
    x = torch.randn(4, 3)
    assert split_step([])(x).equal(truth(x))
    assert Runner(split_step([]), {"x": torch.zeros(4, 3)}, split="middle")(x=x).equal(truth(x))


def test_split_points_inside_an_eager_part_are_plain_calls():
    def step(x):
        return split_point("outer", lambda h: split_point("inner", torch.neg, h) + 1, x * 2) * 1

    runner = Runner(step, {"x": torch.zeros(3)}, pool=RecordedPool(), split=["outer"])
    assert runner(x=torch.ones(3)).tolist() == [-1.0] * 3


def test_an_eager_part_reads_what_the_graph_before_it_wrote_while_capturing_too():
    seen = []

    def step(x):
        split_point("look", lambda h: seen.append(h.tolist()), x + 1)
        return x * 2

    Runner(step, {"x": torch.zeros(2)}, pool=RecordedPool(), split="look")
    assert seen == [[1, 1]] * 3, "two warm-ups and the capture"


def test_a_split_may_write_in_place():
    cache = torch.zeros(3)

    def step(x):
        split_point("write", cache.copy_, x * 2)
        return cache + 1

    runner = Runner(step, {"x": torch.zeros(3)}, pool=RecordedPool(), split="write")
    assert runner(x=torch.ones(3)).tolist() == [3.0] * 3


@pytest.mark.parametrize(
    "changing",
    [lambda n: n, lambda n: torch.zeros(n), lambda n: torch.zeros(2, dtype=[torch.int32, torch.int64][n % 2])],
)
def test_a_split_result_that_changes_its_kind_is_an_error(changing):
    calls = itertools.count(1)

    def step(x):
        x = x + 1
        split_point("p", lambda: changing(next(calls)))
        return x * 2

    runner = Runner(step, {"x": torch.zeros(3)}, pool=RecordedPool(), split="p")
    with pytest.raises(RuntimeError, match=r"split_point 'p': got .* the capture saw"):
        runner(x=torch.zeros(3))


def test_an_unknown_split_point_names_those_that_exist():
    with pytest.raises(
        ValueError, match=r"split: got \['atention'\]; the step has the split points \['end', 'middle'\]"
    ):
        Runner(split_step([]), {"x": torch.zeros(4, 3)}, pool=RecordedPool(), split=["atention"])


# errors


def test_a_failed_capture_names_the_line_and_leaves_the_device_usable():
    def step(x):
        if RecordedGraph.capturing:
            raise RuntimeError("CUDA error: operation not permitted\nmore lines")  # the culprit
        return x + 1

    with pytest.raises(CaptureError) as caught:
        Runner(step, {"x": torch.zeros(3)}, buckets=[1, 3], pool=RecordedPool())
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(r"step cannot be captured at bucket 3: CUDA error: operation not permitted", message)
    assert f"{__file__}:" in message
    assert "the culprit" in message
    assert "onegraph check" in message
    assert not RecordedGraph.capturing
    assert Runner(torch.neg, {"input": torch.zeros(3)}, pool=RecordedPool())(input=torch.ones(3)).tolist() == [-1.0] * 3


def test_an_empty_graph_is_an_error():
    constant = torch.ones(3)
    with pytest.raises(CaptureError, match="is empty: the step launched no work on cpu"):
        Runner(lambda x: constant, {"x": torch.zeros(3)}, pool=RecordedPool())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_capture_without_a_gpu_says_so():
    with pytest.raises(ValueError, match="got device 'cpu'; allowed is a CUDA device: pass capture=False"):
        Runner(affine, affine_inputs(), capture=True)
    with pytest.raises(ValueError, match="this machine has no GPU"):
        GraphPool("cuda:0")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": torch.zeros(2, 3)}, r"inputs: got \['x'\]; the step takes \['x', 'y'\]"),
        (batch(2) | {"z": torch.zeros(2)}, r"got \['x', 'y', 'z'\]"),
        (batch(2) | {"y": torch.zeros(3, 5)}, "different number of rows {'x': 2, 'y': 3}"),
        (
            batch(2) | {"y": torch.zeros(2, 5).double()},
            r"y: got torch.float64 \[2, 5\]; allowed is torch.float32 \['rows'",
        ),
        (batch(2) | {"y": torch.zeros(2, 6)}, r"y: got torch.float32 \[2, 6\]"),
        (batch(2) | {"y": torch.zeros(2)}, r"y: got torch.float32 \[2\]"),
        (batch(9), r"rows: got 9; the buckets are \[1, 8\]"),
        (batch(0), "rows: got 0"),
    ],
)
def test_wrong_values_say_what_is_allowed(pool, values, message):
    runner = Runner(affine, affine_inputs(), buckets=[1, 8], pool=pool)
    with pytest.raises(ValueError, match=message):
        runner(**values)


@pytest.mark.parametrize(
    ("inputs", "buckets", "message"),
    [
        ({}, [1], "got 0 tensors"),
        (affine_inputs(), [], "buckets: got \\[\\]"),
        (affine_inputs(), [0, 4], "allowed are batch sizes of 1 and more"),
        (affine_inputs(), [16], r"x: got a buffer of shape \[8, 3\]; the largest bucket needs 16 rows"),
        ({"x": torch.zeros(())}, [1], r"x: got a buffer of shape \[\]"),
    ],
)
def test_wrong_buckets_say_what_is_allowed(inputs, buckets, message):
    with pytest.raises(ValueError, match=message):
        Runner(affine, inputs, buckets)


def test_what_is_long_in_coming_is_looked_after():
    """At once where it is there, not before LONG, and again and again; what looking raises ends the wait."""
    looked = []
    until(lambda: True, lambda: looked.append(1))
    assert not looked
    begun = time.monotonic()
    until(lambda: len(looked) == 3, lambda: looked.append(time.monotonic() - begun))
    assert looked[0] > LONG

    def give_up() -> None:
        raise ValueError("the other GPU stopped")

    with pytest.raises(ValueError, match="the other GPU stopped"):
        until(lambda: False, give_up)


def test_a_missing_rank_is_not_waited_for(monkeypatch):
    """Its error goes by the question which GPU still answers: the missing one may never."""
    monkeypatch.setattr(group, "_answers", lambda pool: pytest.fail("it asked"))
    pool = SimpleNamespace(running=nullcontext, device=torch.device("cuda:1"))
    with pytest.raises(PeerError), group.running([pool]):
        raise PeerError("rank 0 waited for rank 1")


def test_transfers_on_a_cpu_are_copies():
    target = torch.zeros(4, 2)
    upload, download = Upload(target), Download(target)
    value = torch.ones(3, 2)
    upload(value)
    value.zero_()
    waiting = download.start(target)
    upload(torch.full((4, 2), 9.0))
    assert waiting().tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    assert tree_map(float, target[0].tolist()) == [9.0, 9.0]
