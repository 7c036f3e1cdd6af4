"""How long kernels may be interpreted: a launch takes a thousand times what it takes on a GPU, and steps have many."""

from dataclasses import dataclass, field

from onegraph.check.simulate.machine import Machine

LONGEST = 3.0
"""Seconds of this thread that a step's kernels may have taken when one that was never run to its end is tried."""

LEAST = 0.1
"""Seconds that such a kernel may take whatever others took; a replay may take as many more than its capture."""

STEP = 10.0
"""Seconds for all launches of a warm-up step, and in a check for all kernels that are given up."""

SLACK = 2.0
"""How much longer the captured step and later ones may take: what fitted into the warm-up fits there too."""

OUTSIDE = 60.0
"""Seconds for all launches outside of steps: by the factory, by inputs, by a program between its captures."""

REPLAY = 4.0
"""How much longer than at its capture a launch may take in a replay, where loops may depend on what it is given."""


@dataclass
class Budget:
    """What of that is used up. spent: seconds by step, -1 outside of them; wasted: on kernels that did not fit."""

    spent: dict[int, float] = field(default_factory=dict)
    wasted: float = 0.0

    def left(self, world: Machine, *, proven: bool) -> float:
        """Seconds for the next launch. `proven`: its kernel was run to its end before."""
        purse = _purse(world)
        spent = self.spent.get(purse, 0.0)
        most = OUTSIDE if purse < 0 else STEP if purse < world.captured_step else STEP * SLACK
        if proven:
            return most - spent
        return max(min(most - spent, LONGEST - spent, STEP - self.wasted), LEAST)

    def took(self, world: Machine, seconds: float) -> None:
        """A launch was interpreted to its end."""
        purse = _purse(world)
        self.spent[purse] = self.spent.get(purse, 0.0) + seconds


def for_replay(captured: float) -> float:
    """Seconds for a launch in a replay that took `captured` seconds at capture."""
    return REPLAY * captured + LEAST


def _purse(world: Machine) -> int:
    return world.step if world.phase == "step" else -1
