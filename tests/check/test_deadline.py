"""The bound on code under check, where it rings at an awkward place."""

import time

import pytest

from onegraph.check.deadline import deadline
from onegraph.check.report import CheckError


def endless() -> None:
    while True:
        time.sleep(0.01)


class Stuck:
    def __del__(self) -> None:
        endless()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_that_is_stopped_says_nothing_and_the_next_ring_ends_the_step() -> None:
    def step() -> None:
        Stuck()
        endless()

    with pytest.raises(CheckError, match="still running"), deadline(0.2, "it"):
        step()
