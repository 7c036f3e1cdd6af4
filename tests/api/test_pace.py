"""A job's estimate, judged again while it runs."""

from onegraph.api.pace import Pace


def lines(seconds: float, steps: list[tuple[float, int]], total: int = 100) -> list[str]:
    """What is told of a job announced with `seconds` whose steps are done at times: (when, how many are done)."""
    said: list[str] = []
    now = [0.0]
    pace = Pace(seconds, said.append, lambda: now[0])
    for now[0], done in steps:
        pace.step(done, total)
    return said


def test_a_job_that_keeps_to_its_estimate_says_nothing() -> None:
    assert lines(100, [(float(i), i) for i in range(1, 101)]) == []
    assert lines(85, [(float(i), i) for i in range(1, 101)]) == []


def test_a_slower_and_a_faster_job_are_told_once() -> None:
    assert lines(100, [(2.0 * i, i) for i in range(1, 101)]) == [
        "new estimate: 3 min in all, 3 min left (announced: 2 min)"
    ]
    assert lines(80, [(0.4 * i, i) for i in range(1, 101)]) == [
        "new estimate: 40 s in all, 37 s left (announced: 80 s)"
    ]
    assert lines(4, [(0.08 * i, i) for i in range(1, 101)]) == [], "4 s are not worth a line"


def test_a_machine_that_becomes_busy_is_told_again() -> None:
    steps = [(float(i), i) for i in range(1, 51)] + [(50 + 4.0 * i, 50 + i) for i in range(1, 51)]
    said = lines(100, steps)
    assert len(said) >= 2
    assert "announced: 2 min" in said[0]


def test_what_an_earlier_job_did_is_no_speed() -> None:
    """Half of the blocks are there at once, and the rest takes a second a step: 51 s, as announced."""
    assert lines(50, [(1.0, 50), *[(1.0 + i, 50 + i) for i in range(1, 51)]]) == []


def test_nothing_is_told_before_there_is_something_to_judge_by() -> None:
    assert lines(1, [(100.0, 0), (200.0, 1), (300.0, 3)]) == []
    assert lines(1, [(100.0, 0)], total=0) == []
