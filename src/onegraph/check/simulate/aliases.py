"""Names that modules took from torch before a simulation began: `from torch.cuda import current_stream`."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from onegraph.check.simulate import frames

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


@contextmanager
def rebound(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """While the context lasts, every global of a module that is the first of a pair is the second one. Afterwards all
    are what they were; what a factory imported meanwhile took the stand-in, which belongs to one simulation, and gets
    the first name that it stood for."""
    before = _rebind({id(real): stand_in for real, stand_in in pairs})
    try:
        yield
    finally:
        ours = {id(stand_in) for _, stand_in in pairs}
        for module, name, value in before:
            if id(vars(module).get(name)) in ours:
                setattr(module, name, value)
        _rebind({id(stand_in): real for real, stand_in in reversed(pairs)})


def _rebind(others: dict[int, Any]) -> list[tuple[ModuleType, str, Any]]:
    """Globals by identity become others; what they were."""
    found = [(m, name, value) for m in _modules() for name, value in vars(m).items() if id(value) in others]
    for module, name, value in found:
        setattr(module, name, others[id(value)])
    return found


def _modules() -> Iterator[ModuleType]:
    """Modules of the user and of libraries, torch's own and this package's left out."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(path, str) and not path.startswith((_TORCH, frames.HERE)):
            yield module
