"""How long a job takes, judged again while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

WRONG = 1.25  # a new estimate is told where it is so many times the last one told, or less than one part in so many
LEAST = 5.0  # seconds of a difference that is worth a line
LEAST = 5.0  # seconds of a difference that is worth a line
FIRST = 0.05  # share of the work that has to be done before it is judged


class Pace:
    """The announced seconds against the share of the work that is done, from the first step on.

    Args:
        seconds: what was announced. tell: called with a line where that turns out wrong. clock: in seconds.
    """

    def __init__(
        self, seconds: float, tell: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.told, self._tell, self._clock = seconds, tell, clock
        self._begun: tuple[float, float] | None = None  # when the first step was done, and the share done then
        self._started = clock()

    def step(self, done: int, total: int) -> None:
        """`done` of `total` steps are over; steps that an earlier job did come first, and cost nothing."""
        now, share = self._clock(), done / total if total else 0.0
        if self._begun is None:
            if done:
                self._begun = now, share
            return
        begun, before = self._begun
        if share - before < FIRST or share >= 1:
            return
        rest = (now - begun) / (share - before) * (1 - share)
        seconds = now - self._started + rest
        wrong = seconds > WRONG * self.told or seconds < self.told / WRONG
        if wrong and abs(seconds - self.told) > LEAST:
            left = f"{duration(seconds)} in all, {duration(rest)} left"
            self._tell(f"new estimate: {left} (announced: {duration(self.told)})")
            self.told = seconds


def duration(seconds: float) -> str:
    """In seconds below 90, else in minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
