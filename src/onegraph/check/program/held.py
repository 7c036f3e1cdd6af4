"""What names held, held weakly: a comparison needs it later, and what the program frees has to be free until then."""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from onegraph.check import containers
from onegraph.check.simulate.device import DeviceTensor

PLAIN = (int, float, complex, str, bytes, bool, type(None))
_DEEPEST = 8
_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE, of the stable ABI

Held = Callable[[], Any]
"""Gives what was held, or raises Gone."""


class Gone(Exception):
    """Something that is held weakly is no more."""


def hold(value: Any, depth: int = 0) -> Held:
    """A function that gives `value`, or raises Gone once the program holds it no more."""
    if isinstance(value, PLAIN) or depth > _DEEPEST:
        return lambda: value
    if isinstance(value, types.MethodType):
        function, owner = value.__func__, hold(value.__self__, depth + 1)
        return lambda: types.MethodType(function, owner())
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _function(value, depth)
    if isinstance(value, functools.partial):
        inner = hold((value.func, value.args, value.keywords), depth + 1)

        def partial() -> Any:
            function, args, keywords = inner()
            return functools.partial(function, *args, **keywords)

        return partial
    if isinstance(value, DeviceTensor):
        return _tensor(value)
    if isinstance(value, tuple):
        return _tuple(value, depth)
    if type(value) is list:
        items = [hold(item, depth + 1) for item in value]
        return lambda: [item() for item in items]
    if type(value) is dict:
        pairs = [(key, hold(item, depth + 1)) for key, item in value.items()]
        return lambda: {key: item() for key, item in pairs}
    return _weak(value, depth)


def let_go() -> None:
    """Free the objects that nobody but this module refers to any more; to be called before anyone asks what is free."""
    while any(kept.let_go() for kept in list(_KEPT.values())):  # what one of them held may be the next
        pass


def _tuple(value: tuple[Any, ...], depth: int) -> Held:
    """A tuple cannot change: its items are it. Named ones, and what torch returns of max() and the like, too."""
    kind, items = type(value), [hold(item, depth + 1) for item in value]
    if kind is tuple or not kind.__flags__ & _WRITTEN_IN_PYTHON:
        return lambda: kind([item() for item in items])
    return lambda: tuple.__new__(kind, [item() for item in items])


def _weak(value: Any, depth: int) -> Held:
    try:
        reference = weakref.ref(value)
    except TypeError:
        if type(value).__flags__ & _WRITTEN_IN_PYTHON:
            return _Kept.of(value, depth)
        return lambda: value  # a slice, a device, a dtype: nothing that holds a tensor of the program's

    def there() -> Any:
        found = reference()
        if found is None:
            raise Gone
        return found

    return there


class _Kept:
    """An object without weak references (of a class with slots). It is referred to like any other, here alone, until
    that is the last reference; then its attributes are held, and it is made again of what is left of them."""

    def __init__(self, value: Any, depth: int) -> None:
        self.value, self.depth, self.kind = value, depth, type(value)
        self.parts: list[tuple[str, Held]] | None = None

    @classmethod
    def of(cls, value: Any, depth: int) -> "_Kept":
        """The one that holds `value`: a second one would keep what the first one lets go."""
        kept = _KEPT.get(id(value))
        if kept is None:
            kept = _KEPT[id(value)] = cls(value, depth)
        return kept

    def __call__(self) -> Any:
        self.let_go()
        if self.parts is None:
            return self.value
        try:
            made = object.__new__(self.kind)
        except TypeError:  # a dict or a list with slots
            raise Gone from None
        for name, part in self.parts:
            object.__setattr__(made, name, part())
        return made

    def let_go(self) -> bool:
        """Whether this was the last reference, which is given up."""
        if self.parts is not None or sys.getrefcount(self.value) > _ALONE:
            return False
        del _KEPT[id(self.value)]
        self.parts = [(name, hold(item, self.depth + 1)) for name, item in containers.attributes(self.value)]
        self.value = None
        return True


_KEPT: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()


def _alone() -> int:
    """What Python counts where `_Kept` has the only reference; versions count what the call itself takes in their own
    ways."""
    kept = _Kept(object(), 0)
    return sys.getrefcount(kept.value)


_ALONE = _alone()


def _tensor(value: DeviceTensor) -> Held:
    """A view dies with the frame that made it; the memory that it showed need not."""
    reference, record, inner = weakref.ref(value), weakref.ref(value.record), value.inner
    world, index, learns = value.world, value.device.index, value.requires_grad

    def there() -> Any:
        found = reference()
        if found is not None:
            return found
        if record() is None or learns:
            raise Gone
        return DeviceTensor(inner, world, index)

    return there


def _function(value: types.FunctionType, depth: int) -> Held:
    """A function of the frame's own dies with it, what it refers to need not."""
    reference = weakref.ref(value)
    code, names = value.__code__, value.__globals__
    defaults, keywords = hold(value.__defaults__, depth + 1), hold(value.__kwdefaults__, depth + 1)
    cells: list[Held] = []
    for cell in value.__closure__ or ():
        try:
            cells.append(hold(cell.cell_contents, depth + 1))
        except ValueError:  # not bound yet
            cells.append(lambda: None)

    def made() -> Any:
        known = reference()
        if known is not None:
            return known
        again = types.FunctionType(code, names, code.co_name, defaults(), tuple(types.CellType(c()) for c in cells))
        again.__kwdefaults__ = keywords()
        return again

    return made
