"""The parts of live mode that need no GPU: what it notes of calls, and how it leaves torch after an error."""

import gc

import corpus_tools
import pytest
import torch

from onegraph.check import check_step
from onegraph.check.live.failure import forget
from onegraph.check.live.recorder import Numbers, Recorder
from onegraph.check.live.watch import calls_noted, recorded
from onegraph.check.simulate import frames
from onegraph.check.simulate.calling import call_step
from onegraph.check.simulate.records import Step

X = torch.arange(6.0).view(2, 3)


def _jacobian() -> torch.Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: (row @ torch.eye(3)).tanh()))(X)


def _breaks_while_printing(around: bool) -> None:
    guard = torch._C._DisableFuncTorch()  # as torch holds one while it makes the text of a tensor
    try:
        raise RuntimeError("operation not permitted when stream is capturing")
    except RuntimeError as error:
        if around:
            raise ValueError("the end of a broken capture raises once more") from error
        raise
    finally:
        assert guard is not None


@pytest.mark.parametrize("around", [False, True])
def test_an_error_that_is_kept_leaves_functorch_on(around):
    kept = None
    try:
        _breaks_while_printing(around)
    except (RuntimeError, ValueError) as error:
        kept = error
    with pytest.raises(NotImplementedError, match="BatchedTensorImpl"):
        _jacobian()
    forget(kept, None)
    torch.testing.assert_close(_jacobian(), torch.diag_embed(1 - X.tanh() ** 2))


def test_what_the_caller_was_handling_is_left_alone():
    def fails(value):
        raise KeyError(value)

    kept = []
    try:
        fails("outer")
    except KeyError as outer:
        try:
            fails("inner")
        except KeyError as inner:
            forget(inner, outer)
            kept += [inner, outer]
    assert [e.__traceback__.tb_next.tb_frame.f_locals for e in kept] == [{}, {"value": "outer"}]


def test_functions_that_torch_compiles_are_noted():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def double(x):
        return x * 2

    compiled = torch.compile(double, backend=backend)
    recorder = Recorder(call_step.__code__, frames.Roots(), Numbers())
    with recorded(recorder) as seen:
        torch.func.vmap(torch.sin)(X)
        assert not seen
        assert torch.equal(compiled(X), X * 2)
        assert seen
    assert not graphs
    assert torch.equal(compiled(X), X * 2)
    assert len(graphs) == 1  # met under a recorder, and compiled all the same


@pytest.mark.parametrize("sign", [1, -1])
def test_an_op_that_calls_functions_runs_where_a_recorder_listens(sign):
    recorder = Recorder(call_step.__code__, frames.Roots(), Numbers())
    with calls_noted(recorder):
        recorder.step = Step(0)
        with recorder:
            found = torch.cond((sign * X).sum() > 0, torch.sin, torch.cos, (X,))
        user = torch.compile(lambda x: x + 1, backend="eager")
    assert torch.equal(found, X.sin() if sign > 0 else X.cos())
    assert hasattr(user, "_torchdynamo_orig_callable")  # the user's own is compiled


@pytest.mark.gpu
def test_a_broken_capture_leaves_the_next_check_as_it_was():
    cases = {c.name: c for folder in corpus_tools.FOLDERS for c in corpus_tools.cases(folder)}
    stream = torch.cuda.current_stream()
    for name in ("h02_to_host:factory_bad_print", "h43_torch_calls:factory_bad_catches_the_error_of_a_capture"):
        assert check_step(cases[name].factory, simulate=False, live=True).errors
        assert torch.cuda.current_stream() == stream
    jacobian = cases["h01_reports:factory_ok_jacobian_of_the_dynamics"]
    assert not check_step(jacobian.factory, simulate=False, live=True).findings


@pytest.mark.gpu
def test_a_collection_inside_a_capture_destroys_no_graph():
    """Graphs of earlier work lie in cycles, and Python may collect whenever objects are made."""

    def garbage():
        graph, x = torch.cuda.CUDAGraph(), torch.ones(1 << 20, device="cuda")
        with torch.cuda.graph(graph):
            y = x + 1
        cycle = [graph, y]
        cycle.append(cycle)

    def factory():
        def step(x):
            for _ in range(2000):
                made = [object() for _ in range(20)]
                made.append(made)
            return x * 2

        return step, lambda i: (torch.full((4,), i + 1.0, device="cuda"),)

    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(10, 2, 2)
        for _ in range(5):
            garbage()
        report = check_step(factory, simulate=False, live=True)
    finally:
        gc.set_threshold(*thresholds)
    assert not report.findings
    assert report.facts["replay equals eager"]
