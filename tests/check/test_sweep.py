"""Variations of metadata: lengths, positions and masks that `inputs` never gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from onegraph.check import CheckError, Report, Severity, containers
from onegraph.check.simulate.run import simulate_step


def x(i: int) -> torch.Tensor:
    return torch.full((8,), float(i + 1), device="cuda")


def checked(step: Callable[..., Any], inputs: Callable[[int], Any]) -> Report:
    return simulate_step(lambda: (step, inputs))


@dataclass
class Batch:
    lengths: torch.Tensor
    max_len: int


def lengths(i: int) -> torch.Tensor:
    return torch.full((8,), 3 + i % 4, device="cuda", dtype=torch.int64)


def paged(t: torch.Tensor, batch: Batch) -> torch.Tensor:
    kept = torch.where(torch.arange(8, device="cuda") < batch.lengths, t, 0)
    return kept * 2 if batch.max_len % 128 == 0 else kept


def test_a_length_that_decides_the_path_is_a_warning_with_the_smallest_that_differs() -> None:
    (found,) = checked(paged, lambda i: (x(i), Batch(lengths(i), 5))).findings
    assert (found.code, found.severity) == ("CG201", Severity.WARNING)
    assert found.message.endswith(", where max_len is 0")
    assert found.values == ("max_len is 0 runs 1 ops here where step 1 ran 0",)


def test_what_the_factory_says_that_occurs_is_an_error() -> None:
    def inputs(i: int) -> Any:
        return x(i), Batch(lengths(i), 5)

    inputs.sweep = {"max_len": range(1, 2048)}  # type: ignore[attr-defined]
    (found,) = checked(paged, inputs).findings
    assert (found.code, found.severity) == ("CG201", Severity.ERROR)
    assert found.message.endswith(", where max_len is 128")


def test_a_sweep_of_what_is_not_given_is_refused_in_one_line() -> None:
    def inputs(i: int) -> Any:
        return (x(i), Batch(lengths(i), 5))

    inputs.sweep = {"depth": range(3)}  # type: ignore[attr-defined]
    with pytest.raises(CheckError, match=r"inputs.sweep: got 'depth', allowed .*: lengths, max_len, t"):
        checked(paged, inputs)


@pytest.mark.parametrize(
    "step",
    [
        lambda t, positions: t[positions] * 2,  # the device alone looks at it; an index past the end is no variation
        lambda t, positions: t * positions.cumsum(0),
    ],
)
def test_metadata_that_only_the_device_reads_is_clean(step: Callable[..., Any]) -> None:
    report = checked(step, lambda i: (x(i), torch.arange(8, device="cuda")))
    assert report.findings == ()
    assert report.facts["replay equals eager"] is True


def test_numbers_that_are_no_metadata_are_not_varied() -> None:
    assert checked(lambda t, scale: t * scale, lambda i: (x(i), 3)).findings == ()


def test_a_number_that_never_changes_is_not_told_to_be_baked_in() -> None:
    """Alone, in a list, in a dict and in an object: a size of the model is as likely as a length."""

    def step(t: torch.Tensor, num_rows: int, lens: list[int], meta: dict[str, int], batch: Batch) -> torch.Tensor:
        return t.view(num_rows, -1).sum(0)[: meta["num_tokens"]] * lens[0] + batch.max_len

    report = checked(step, lambda i: (x(i), 4, [3, 5], {"num_tokens": 2}, Batch(lengths(i), 5)))
    assert report.findings == ()


def test_state_and_steps_are_told_as_without_variations() -> None:
    seen = []

    def step(t: torch.Tensor, num_tokens: int) -> torch.Tensor:
        seen.append(num_tokens)
        if num_tokens > 100:
            raise ValueError("too many")
        return t + 1

    report = checked(step, lambda i: (x(i), 7))
    assert set(seen) > {7, 0, 1, 127}
    assert {f.code for f in report.findings} == {"CG210"}  # the list that the step appends to
    assert report.steps < len(seen)


def test_one_leaf_is_replaced_by_its_path() -> None:
    tree = ((1, [2, 2]), {"a": Batch(torch.zeros(1), 2)})
    assert containers.replaced(tree, "[0][1][1]", 5)[0] == (1, [2, 5])
    assert containers.replaced(tree, "[1]['a'].max_len", 9)[1]["a"].max_len == 9
    assert tree[0] == (1, [2, 2])
    assert tree[1]["a"].max_len == 2


def test_a_value_that_the_step_cannot_be_given_leaves_nothing_behind() -> None:
    cache = []

    def step(t: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if not cache:
            cache.append(torch.zeros(16, 8, device="cuda"))
        cache[0].index_copy_(0, position, t[None])
        return cache[0].sum(0)

    report = checked(step, lambda i: (x(i), torch.full((1,), min(i, 40), device="cuda")))
    assert {f.code for f in report.errors} == set()
