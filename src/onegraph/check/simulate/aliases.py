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
    """While the context lasts, every global of a module that is the first of a pair is the second one. Afterwards none
    is: what a factory imported meanwhile took the stand-in, which belongs to one simulation."""
    _rebind({id(real): (real, stand_in) for real, stand_in in pairs})
    try:
        yield
    finally:
        _rebind({id(stand_in): (stand_in, real) for real, stand_in in pairs})


def _rebind(pairs: dict[int, tuple[Any, Any]]) -> None:
    for module in _modules():
        names = [(name, value) for name, value in vars(module).items() if id(value) in pairs]
        for name, value in names:
            setattr(module, name, pairs[id(value)][1])


def _modules() -> Iterator[ModuleType]:
    """Modules of the user and of libraries, torch's own and this package's left out."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(path, str) and not path.startswith((_TORCH, frames.HERE)):
            yield module
