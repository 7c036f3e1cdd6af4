"""Acts on a module when it is imported, where importing it beforehand would make every check wait for it."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


@contextmanager
def when_imported(
    name: str, then: Callable[[], object], around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[None]:
    """Call `then` once the module is there: now, or right after its import while this lasts. `around` is entered for
    such an import and for `then`."""
    if name in sys.modules:
        then()
        yield
        return
    hook = _Hook(name, then, around)
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        sys.meta_path.remove(hook)


class _Hook(importlib.abc.MetaPathFinder):
    def __init__(
        self, name: str, then: Callable[[], object], around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.name, self.then, self.around = name, then, around
        self.looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name or self.looking:
            return None
        self.looking = True  # so that the others are asked
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with self.around():
                run(module)
                self.then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader, not of its class
        return spec
