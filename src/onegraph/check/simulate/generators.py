"""Generators of random numbers: those of the simulated device say seed and offset as Philox on a GPU does.

The numbers themselves come from a generator of the CPU. Its state has 5056 bytes where that of a GPU has 16 (seed and
offset), so what a state stands for is kept here, by these 16 bytes.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat
from onegraph.check.report import SILENT, Severity
from onegraph.check.simulate import hazards
from onegraph.check.simulate.world import World

_PER_DRAW = 4
"""How far one draw moves the offset: Philox gives numbers in fours."""

_REFUSED = "RuntimeError: Cannot call CUDAGeneratorImpl::{} while a stream is capturing"


class Generators:
    """The class that stands in for `torch.Generator`, and the default generators of the simulated GPUs."""

    def __init__(self, world: World) -> None:
        self.kind = _kind(world)
        self.defaults = tuple(_Default(self.kind, index) for index in range(world.gpus))
        for made in self.defaults:
            world.randomness.generators.add(made)
        world.randomness.defaults = self.defaults


def _new(cls: Any) -> Any:
    """A generator of the CPU of a class derived from torch's own, whatever stands in for that now."""
    return compat.GeneratorBase.__new__(cls, "cpu")


def _Default(kind: Any, index: int) -> Any:
    made = kind(torch.device("cuda", index))
    made.real = torch.default_generator
    return made


def _kind(world: World) -> Any:
    class Generator(torch.Generator):
        """A generator of the CPU, or one of the simulated device, known to the world by its identity."""

        def __new__(cls, device: Any = "cpu") -> Any:
            virtual = torch.device(device).type == "cuda"
            made: Any = _new(cls if cls is not Generator else Philox if virtual else Plain)
            if virtual:
                index = torch.device(device).index
                made.place = torch.device("cuda", world.device_index if index is None else index)
                world.randomness.generators.add(made)
            return made

    class Plain(Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return _new(cls)

    class Philox(Generator):
        real: Any = None  # the generator that the default one stands for
        moved = 0
        known: dict[bytes, Tensor]

        def _of(self) -> Any:
            return super() if self.real is None else self.real

        @property
        def device(self) -> torch.device:  # type: ignore[override]  # to stubs it can be set
            return self.place  # type: ignore[attr-defined]

        def manual_seed(self, seed: int) -> Any:
            if self.real is None:
                world.see("CG302", "a generator is seeded inside the step", SILENT, severity=Severity.WARNING)
            else:
                world.see(*hazards.SEEDED)
            self.moved = -world.randomness.drawn(self)
            with world.off():
                self._of().manual_seed(int(seed) % 2**64)
            return self

        def seed(self) -> int:
            with world.off():
                value = int(self._of().seed())
            self.manual_seed(value)
            return value

        def initial_seed(self) -> int:
            return int(self._of().initial_seed())

        def _offset(self) -> int:
            return _PER_DRAW * (world.randomness.drawn(self) + self.moved)

        def get_offset(self) -> int:
            world.see("CG302", "the generator's offset is read inside the step", _REFUSED.format("get_offset"))
            return self._offset()

        def set_offset(self, offset: int) -> Any:
            world.see("CG302", "the generator's offset is set inside the step", _REFUSED.format("set_offset"))
            self.moved = offset // _PER_DRAW - world.randomness.drawn(self)
            return self

        def get_state(self) -> Tensor:
            text = "the generator's state is read inside the step"
            world.see("CG302", text, SILENT, severity=Severity.WARNING)
            with compat.no_torch_function(), world.off():
                numbers = torch.tensor([_signed(self.initial_seed()), self._offset()], dtype=torch.int64)
                state = numbers.view(torch.uint8)
                _STATES[bytes(state.tolist())] = self._of().get_state()
                while len(_STATES) > _MOST_STATES:
                    del _STATES[next(iter(_STATES))]
                return state

        def set_state(self, state: Tensor) -> Any:
            text = "the generator's state is set inside the step, once, at capture"
            world.see("CG302", text, SILENT)
            with compat.no_torch_function(), world.off():
                known = _STATES.get(bytes(state.tolist())) if state.numel() == 16 else state
                if state.numel() == 16:
                    seed, offset = state.view(torch.int64).tolist()
                    self.moved = offset // _PER_DRAW - world.randomness.drawn(self)
                    if known is None:
                        self._of().manual_seed((seed + offset) % 2**63)
                if known is not None:
                    self._of().set_state(known)
            return self

        def graphsafe_get_state(self) -> Any:
            return self

        def graphsafe_set_state(self, state: Any) -> Any:
            return self

        def clone_state(self) -> Any:
            made: Any = Philox(self.device)
            with world.off():
                compat.GeneratorBase.set_state(made, self._of().get_state())
            made.moved = self.moved
            return made

    return Generator


_STATES: dict[bytes, Tensor] = {}
"""What states of 16 bytes stand for: the state that the generator of the CPU had."""

_MOST_STATES = 1000


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number
