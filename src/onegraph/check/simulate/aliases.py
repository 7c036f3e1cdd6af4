"""Attributes that stand for others while a simulation lasts, and the names that modules took from torch before it
began: `from torch.cuda import current_stream`."""

import functools
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from onegraph.check.places import package_of
from onegraph.check.simulate import frames

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

ABSENT = object()
"""What an attribute was that was not there."""


@contextmanager
def changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of modules, classes and objects for the length of a block; those that were not there are removed."""
    changes = list(changes)
    before = [(owner, name, vars(owner).get(name, ABSENT)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            put_back(owner, name, value)


def put_back(owner: Any, name: str, value: Any) -> None:
    """Set an attribute to what it was; remove it where it was not there."""
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@contextmanager
def rebound(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """While the context lasts, every global of a module that is the first of a pair is the second one. Afterwards all
    are what they were; what a factory imported meanwhile took the stand-in, which belongs to one simulation, and gets
    the first name that it stood for."""
    held = _held(pairs)
    before = _rebind({id(real): stand_in for real, stand_in in pairs})
    try:
        yield
    finally:
        ours = {id(stand_in) for _, stand_in in pairs}
        for module, name, value in before:
            if id(vars(module).get(name)) in ours:
                setattr(module, name, value)
        if _held(pairs) != held:  # something took one: to look at every global takes longer than a small step
            _rebind({id(stand_in): real for real, stand_in in reversed(pairs)})


def holders(wanted: Set[int], modules: Iterable[ModuleType]) -> list[tuple[ModuleType, str, Any]]:
    """(module, name, value) of the globals that are objects of these identities."""
    found = []
    for module in modules:
        values = vars(module)
        if not wanted.isdisjoint(map(id, values.values())):  # of fifty thousand globals few are wanted
            found += [(module, name, value) for name, value in values.items() if id(value) in wanted]
    return found


def modules_of(mine: Callable[[str], bool]) -> Sequence[ModuleType]:
    """Imported modules whose file `mine` says yes to."""
    imported = list(sys.modules.values())
    before, found = _LISTED.get(mine, ([], []))
    if len(before) != len(imported) or not all(map(operator.is_, before, imported)):  # of thousands few are new
        found = [module for module in imported if isinstance(path := _file_of(module), str) and mine(path)]
        _LISTED[mine] = imported, found
    return found


_LISTED: dict[Callable[[str], bool], tuple[list[ModuleType], list[ModuleType]]] = {}
"""By `mine`: all modules when it was last asked, and those it said yes to."""


def _file_of(module: Any) -> Any:
    # From its own dict: a module without a file that imports lazily would search for one.
    return vars(module).get("__file__") if isinstance(module, ModuleType) else None


def _held(pairs: Sequence[tuple[Any, Any]]) -> list[int]:
    return [sys.getrefcount(stand_in) for _, stand_in in pairs]


def _rebind(others: dict[int, Any]) -> list[tuple[ModuleType, str, Any]]:
    """Globals by identity become others; what they were."""
    found = holders(others.keys(), modules_of(_may_take))
    for module, name, value in found:
        setattr(module, name, others[id(value)])
    return found


@functools.cache
def _may_take(path: str) -> bool:
    """Whether a file is the user's or a library's: not torch's own, this package's or the standard library's."""
    return not path.startswith((_TORCH, frames.HERE)) and package_of(path) != ""
