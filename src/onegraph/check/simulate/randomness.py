"""Random numbers that steps draw: of the device's generators, and of the system."""

import weakref
from typing import Any

import torch
from torch import Tensor

from onegraph.check.simulate.records import Step


class Randomness:
    """generators: of the device, `defaults` among them; asked: how often steps asked the system for random bytes."""

    def __init__(self) -> None:
        self.generators: weakref.WeakSet[Any] = weakref.WeakSet()
        self.defaults: tuple[Any, ...] = ()
        self.asked = 0
        self._drawn: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._states: list[Tensor] = []  # of the generator, as the running step has read them

    def begin(self) -> None:
        """A step begins."""
        self._states.clear()

    def drawn(self, generator: Any) -> int:
        """How often an op drew from a generator of the device."""
        return self._drawn.get(generator, 0)

    def draw(self, generator: Any) -> None:
        """An op draws from it."""
        self._drawn[generator] = self.drawn(generator) + 1

    def note(self, step: Step, state: Tensor, *, read: bool) -> None:
        """The generator's state was read, or is set to one that this step read before (`torch.utils.checkpoint` draws
        the same numbers twice). A graph keeps where in its numbers a kernel begins, so a replay does the same. Kept in
        `Step.rng` as (ops before it, -1) of a read, (ops before it, which read) of a return to it."""
        position = len(step.ops)
        if read:
            self._states.append(state.clone())
            step.rng.append((position, -1))
            return
        for index in reversed(range(len(self._states))):
            if torch.equal(self._states[index], state):
                step.rng.append((position, index))
                return


class Returns:
    """What a step did to the generator's state, `Step.rng`, done again in a replay."""

    def __init__(self, step: Step) -> None:
        self._left = list(step.rng)
        self._states: list[Tensor] = []

    def before(self, position: int) -> None:
        """The step's op at this position is next."""
        while self._left and self._left[0][0] <= position:
            _, read = self._left.pop(0)
            if read < 0:
                self._states.append(torch.get_rng_state())
            else:
                torch.set_rng_state(self._states[read])
