"""Kernels that are neither torch's nor Triton's: what launches them is stood in for, and a step runs, unverified."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onegraph.check.places import package_of
from onegraph.check.simulate import aliases, kernels
from onegraph.check.simulate.machine import Machine
from onegraph.check.tables import LAUNCHES, SIMULATED_MAKERS


@contextmanager
def stand_ins(world: Machine) -> Iterator[None]:
    """While this lasts, the launches of libraries that are imported already go to `world`."""
    changes, by_identity = [], {}
    for table, make in ((LAUNCHES, _launcher), (SIMULATED_MAKERS, _maker)):
        for whole in table:
            module, _, name = whole.rpartition(".")
            owner = sys.modules.get(module)
            real = getattr(owner, name, None)
            if real is not None:
                by_identity[id(real)] = stand_in = make(world, whole)
                changes.append((owner, name, stand_in))
    if by_identity:  # `from cuda.core import launch` in modules of the user's
        imported = aliases.holders(by_identity.keys(), aliases.modules_of(_is_users))
        changes += [(module, name, by_identity[id(value)]) for module, name, value in imported]
    with aliases.changed(changes):
        yield


def _is_users(path: str) -> bool:
    return package_of(path) is None


def _launcher(world: Machine, name: str) -> Any:
    def launch(*args: Any, **kwargs: Any) -> tuple[int]:
        kernels.foreign(world, name, name, (*args, *kwargs.values()))
        return (0,)  # what the driver's own functions give: an error code, in a tuple

    return launch


def _maker(world: Machine, name: str) -> Any:
    def make(*args: Any, **_: Any) -> "_Kernel":
        told = next((a for a in reversed(args) if isinstance(a, str) and a.isidentifier()), "")
        return _Kernel(world, f"{name}:{told}" if told else name)

    return make


class _Kernel:
    """A compiled kernel, or what leads to one: its attributes and items are such, to call it is a launch."""

    def __init__(self, world: Machine, name: str) -> None:
        self._world, self._name = world, name

    def __getattr__(self, name: str) -> "_Kernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(self._world, f"{self._name}.{name}")

    def __getitem__(self, grid: Any) -> "_Kernel":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Kernel":
        named = [a for a in args if isinstance(a, str) and a.isidentifier()]
        if self._name.endswith(("get_function", "get_kernel")) and named:
            return _Kernel(self._world, f"{self._name.rsplit('.', 1)[0]}:{named[0]}")
        kernels.foreign(self._world, self._name, self._name, (*args, *kwargs.values()))
        return self
