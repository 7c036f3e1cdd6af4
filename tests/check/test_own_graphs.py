"""Graphs, pools and views that a factory or its step makes itself: a CPU build has dummies of them alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onegraph.check import CheckError, Severity
from onegraph.check.simulate.run import simulate_step

Factory = Callable[[], Any]


def x(i: int) -> torch.Tensor:
    return torch.full((4,), float(i + 1), device="cuda")


def codes(factory: Factory) -> list[str]:
    return [finding.code for finding in simulate_step(factory).errors]


def captured(work: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(graph, its input, its output)."""
    static, graph = x(0), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work(static)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        out = work(static)
    return graph, static, out


def replaying() -> Any:
    graph, static, out = captured(lambda t: t * 2)

    def step(t: torch.Tensor) -> torch.Tensor:
        static.copy_(t)
        graph.replay()
        return out + 1

    return step, lambda i: (x(i),)


def test_a_step_that_replays_a_graph_of_its_own_cannot_be_captured() -> None:
    report = simulate_step(replaying)
    (found,) = report.errors
    assert (found.code, found.source.strip()) == ("CG307", "graph.replay()")
    assert found.happens == "RuntimeError: Cannot prepare for replay during capturing stage"
    assert report.facts["replay equals eager"] is True  # the simulated graph gives what its ops do


def test_a_replay_gives_what_the_graph_computes() -> None:
    seen = []

    def factory() -> Any:
        graph, static, out = captured(lambda t: t * 2)
        for value in (3.0, 5.0):
            static.fill_(value)
            graph.replay()
            seen.append(out.tolist())
        return (lambda t: t + out), lambda i: (x(i),)

    assert codes(factory) == []
    assert seen == [[6.0] * 4, [10.0] * 4]


def test_hazards_of_a_capture_in_the_factory_count() -> None:
    def factory() -> Any:
        graph, _, out = captured(lambda t: t * t.sum().item())
        assert graph is not None
        return (lambda t: t + out), lambda i: (x(i),)

    assert codes(factory) == ["CG101"]


def test_a_capture_in_the_captured_step_is_one_error() -> None:
    def factory() -> Any:
        graph = torch.cuda.CUDAGraph()

        def step(t: torch.Tensor) -> torch.Tensor:
            with torch.cuda.graph(graph):
                y = t * 2
            graph.replay()
            return y

        return step, lambda i: (x(i),)

    assert codes(factory) == ["CG307"]


def test_a_graph_that_only_the_warm_up_captures_is_told_at_its_replay() -> None:
    def factory() -> Any:
        made: list[Any] = []

        def step(t: torch.Tensor) -> torch.Tensor:
            if not made:
                made.append(captured(lambda s: s * 2))
            graph, static, out = made[0]
            static.copy_(t)
            graph.replay()
            return out.clone()

        return step, lambda i: (x(i),)

    (found,) = simulate_step(factory).errors
    assert found.source.strip() == "graph.replay()"


def test_graphed_callables_are_run() -> None:
    def factory() -> Any:
        linear = torch.cuda.make_graphed_callables(torch.nn.Linear(4, 4).cuda(), (x(0),))
        return (lambda t: linear(t)), lambda i: (x(i),)

    report = simulate_step(factory)
    assert [f.code for f in report.errors] == ["CG307"]
    assert not report.of(Severity.UNVERIFIED)


def test_pools_are_there() -> None:
    def factory() -> Any:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            held = torch.zeros(4, device="cuda")
        assert pool.use_count() == 1
        assert pool.snapshot() == []
        assert pool.id != torch.cuda.graph_pool_handle()
        return (lambda t: t + held), lambda i: (x(i),)

    assert codes(factory) == []


def test_names_that_a_module_took_before_are_stood_in_for() -> None:
    def factory() -> Any:
        graph = TAKEN()
        with torch.cuda.graph(graph):
            x(0) * 2
        return (lambda t: t + 1), lambda i: (x(i),)

    assert codes(factory) == []


TAKEN = torch.cuda.CUDAGraph


def test_a_pinned_buffer_may_carry_a_result_out_and_in_again() -> None:
    def factory() -> Any:
        staging = torch.zeros(4, pin_memory=True)

        def step(t: torch.Tensor) -> torch.Tensor:
            staging.copy_(t * 2, non_blocking=True)
            return staging.to("cuda", non_blocking=True) + 1

        return step, lambda i: (x(i),)

    report = simulate_step(factory)
    assert report.findings == ()
    assert report.facts["replay equals eager"] is True


def test_a_pinned_buffer_that_the_host_writes_again_is_still_an_error() -> None:
    def factory() -> Any:
        staging = torch.zeros(4, pin_memory=True)

        def step(t: torch.Tensor) -> torch.Tensor:
            staging.fill_(1.0)
            out = t + staging.to("cuda", non_blocking=True)
            staging.fill_(2.0)
            return out

        return step, lambda i: (x(i),)

    assert codes(factory) == ["CG207"]


class Viewed:
    """What CuPy and numba hand over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def test_a_view_by_cuda_array_interface_shares_its_memory() -> None:
    def factory() -> Any:
        held = torch.zeros(2, 4, device="cuda")
        view = torch.as_tensor(Viewed(held[1]), device="cuda")

        def step(t: torch.Tensor) -> torch.Tensor:
            view.copy_(t)
            return held[1] * 2

        return step, lambda i: (x(i),)

    report = simulate_step(factory)
    assert report.findings == ()
    assert report.facts["replay equals eager"] is True


def test_memory_of_another_library_is_refused_in_one_line() -> None:
    class Foreign:
        __cuda_array_interface__ = {"data": (4096, False), "shape": (4,), "typestr": "<f4", "version": 3}  # noqa: RUF012

    def factory() -> Any:
        other = torch.as_tensor(Foreign(), device="cuda")
        return (lambda t: t + other), lambda i: (x(i),)

    with pytest.raises(CheckError, match="points to memory that no tensor holds: it cannot be simulated"):
        simulate_step(factory)


def test_what_the_simulator_lacks_is_not_told_as_an_error_of_the_step() -> None:
    def factory() -> Any:
        def step(t: torch.Tensor) -> torch.Tensor:
            raise RuntimeError(
                "Could not run 'aten::thing' with arguments from the 'CUDA' backend. This could be\nlong"
            )

        return step, lambda i: (x(i),)

    with pytest.raises(CheckError) as told:
        simulate_step(factory)
    assert "needs what the simulator does not have" in str(told.value)
    assert "raised" not in str(told.value)
    assert "check with --live" in str(told.value)


def test_an_autotuner_that_meets_a_new_key_later_is_told(whole_scan: None) -> None:
    pytest.importorskip("triton")
    from public import tuned

    report = simulate_step(tuned.new_key)
    assert [f.code for f in report.errors] == ["CG202"]
    (again,) = [f for f in report.findings if f.code == "CG307" and "is tuned" in f.message]
    assert again.message.startswith("Triton kernel scale is tuned again in step 6: a replay launches what was captured")
    assert again.line == report.errors[0].line


def test_a_factory_finds_the_versions_and_the_allocator_that_a_gpu_has() -> None:
    seen = []

    def factory() -> Any:
        seen.append((torch.version.cuda, torch.cuda.get_allocator_backend()))
        torch.cuda._sleep(100)
        return (lambda t: t + 1), lambda i: (x(i),)

    before = torch.version.cuda
    assert codes(factory) == []
    assert torch.version.cuda == before
    assert seen == [(before or "13.0", "native")]
