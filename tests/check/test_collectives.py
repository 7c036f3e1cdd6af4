"""Process groups on the simulated machine: one rank runs, under the names and sizes that were asked for."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onegraph.check import Report, Severity
from onegraph.check.simulate.run import simulate_step


def x(i: int) -> torch.Tensor:
    return torch.full((4,), float(i + 1), device="cuda")


def of_two(step: Callable[[torch.Tensor], Any], backend: str = "nccl", **more: Any) -> Report:
    """The report on a step in rank 0 of two."""

    def factory() -> Any:
        method = f"file://{tempfile.mkdtemp()}/init"
        dist.init_process_group(backend, init_method=method, rank=0, world_size=2, **more)
        return step, lambda i: (x(i),)

    return simulate_step(factory)


def errors(report: Report) -> list[tuple[str, str]]:
    return [(f.code, f.source.strip()) for f in report.errors]


def test_groups_have_the_names_and_sizes_that_were_asked_for_and_end_with_the_simulation() -> None:
    seen: list[Any] = []

    def step(t: torch.Tensor) -> torch.Tensor:
        seen[:] = [dist.get_backend(), dist.get_world_size(), dist.get_rank(), dist.is_nccl_available()]
        return t + 1

    of_two(step)
    assert seen == ["nccl", 2, 0, True]
    assert not dist.is_initialized()
    assert not dist.is_nccl_available()


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_collectives_of_tensors_run_and_warn_that_all_ranks_must_capture_them(name: str) -> None:
    def step(t: torch.Tensor) -> torch.Tensor:
        y = t * 2
        if name == "all_gather_into_tensor":
            out = torch.empty(8, device="cuda")
            dist.all_gather_into_tensor(out, y)
            return out
        if name == "reduce_scatter_tensor":
            out = torch.empty(2, device="cuda")
            dist.reduce_scatter_tensor(out, y)
            return out
        dist.all_reduce(y) if name == "all_reduce" else dist.broadcast(y, 0)
        return y

    report = of_two(step)
    assert errors(report) == []
    (warned,) = report.findings
    assert (warned.code, warned.severity) == ("CG310", Severity.WARNING)
    assert warned.message.startswith(f"{name} in the step: every rank has to capture it")
    assert any(event.name.startswith("c10d.") for event in report.timeline)


def test_a_collective_of_some_ranks_is_an_error() -> None:
    def step(t: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        if rank == 0:
            dist.all_reduce(t)
        return t + 1

    assert errors(of_two(step)) == [("CG310", "dist.all_reduce(t)")]


def test_one_that_every_rank_runs_in_its_own_way_is_none() -> None:
    def step(t: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            dist.broadcast(t, 0)
        else:
            dist.broadcast(torch.empty_like(t), 0)
        return t + 1

    assert errors(of_two(step)) == []


def late(t: torch.Tensor, calls: list[int]) -> torch.Tensor:
    calls.append(1)
    if len(calls) > 1:
        dist.all_reduce(t)
    return t + 1


def test_the_communicator_is_made_by_the_first_use_unless_the_group_has_a_device() -> None:
    calls: list[int] = []
    assert errors(of_two(lambda t: late(t, calls))) == [("CG310", "dist.all_reduce(t)")]
    calls.clear()
    assert errors(of_two(lambda t: late(t, calls), device_id=torch.device("cuda", 0))) == []


def test_gloo_and_mixed_backends() -> None:
    def step(t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t)
        return t + 1

    assert errors(of_two(step, "gloo")) == [("CG310", "dist.all_reduce(t)")]
    assert errors(of_two(step, "cpu:gloo,cuda:nccl")) == []
