"""Names of the public API that another name has replaced: they work until `REMOVED_IN`, with a warning."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
REMOVED_IN = "0.3.0"


def message(old: str, new: str) -> str:
    return f"{old} is deprecated and will be removed in {REMOVED_IN}; use {new}"


def warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    warnings.warn(message(old, new), DeprecationWarning, stacklevel)


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the keyword `old` (old="new") is passed on as `new`. Raises TypeError where both are given."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{call.__name__}() got {old} and {new}, which are one argument; give {new}")
                warn(old, new)
                kwargs[new] = kwargs.pop(old)
            return call(*args, **kwargs)

        return wrapper

    return decorate


@contextlib.contextmanager
def public_names(names: Mapping[str, str]) -> Iterator[None]:
    """An error of the engine begins with the name of its argument; here it gets the public one."""
    try:
        yield
    except ValueError as error:
        found = re.match(r"\w+", text := str(error))
        if type(error).__name__ not in ("ValueError", "ArgumentError") or found is None or found[0] not in names:
            raise
        raise ValueError(names[found[0]] + text[found.end() :]) from None
