"""The tensors in what a step takes and returns, however it wraps them: the one walk that every way of looking uses.

`torch.utils._pytree` takes every object that nobody registered for a leaf, and with it the tensors of a dataclass or of
an object with attributes. Entered here: tuples, lists, deques, mappings (a transformers ModelOutput is one), and any
object by its attributes, unless it is a module, a function or a class.
"""

import copy
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

_DEEPEST = 12
_MOST = 20_000
"""Containers and leaves looked at: a step that hands out its engine has no end of them."""

_LEAVES = (Tensor, int, float, complex, str, bytes, bytearray, bool, type(None), set, frozenset, range, slice, Enum)
_CLOSED = (
    type,
    nn.Module,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.CodeType,
    weakref.ref,
)


class Handed:
    """Objects in the arguments of a step that the caller hands over as they are: nobody copies the tensors in them.

    A record that is made anew for each step (a dataclass, a namespace) holds inputs. One that one step after the other
    is given is state, and so is what is in an object of any other kind: only its own code knows what it holds.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def note(self, tree: Any) -> None:
        """Remember the records in the arguments of a step, without keeping them alive."""
        self._known = {}
        for _, thing, inside in _walk(tree, ()):
            if inside is not None and _is_object(thing) and _is_record(thing):
                try:
                    self._known[id(thing)] = weakref.ref(thing)
                except TypeError:  # cannot be referred to weakly: taken as made anew
                    continue

    def __contains__(self, thing: Any) -> bool:
        known = self._known.get(id(thing))
        return not _is_record(thing) or (known is not None and known() is thing)


def leaves(tree: Any, closed: Any = ()) -> dict[str, Any]:
    """Everything in `tree` that holds nothing else, by its path (`[0].logits`, `['mask']`), in order.

    Args:
        closed: objects that are not entered and hold nothing (`in` is asked).
    """
    return {path: value for path, value, inside in _walk(tree, closed) if inside is None}


def tensors(tree: Any, closed: Any = ()) -> dict[str, Tensor]:
    """The tensors of `leaves`."""
    return {path: value for path, value in leaves(tree, closed).items() if isinstance(value, Tensor)}


def numbers(tree: Any) -> dict[str, Any]:
    """Numbers and texts in plain containers and records, by their path: what a step that returns `tree` tells
    besides its tensors. Objects of other kinds are state that happens to be handed out."""
    return {p: v for p, v in leaves(tree, _Kinds()).items() if isinstance(v, bool | int | float | complex | str)}


class _Kinds:
    def __contains__(self, thing: Any) -> bool:
        return not _is_record(thing)


def mapped(tree: Any, change: Callable[[Tensor], Any], closed: Any = ()) -> Any:
    """The same containers with every tensor changed; what holds none is what it was, and the same tensor twice is
    changed once."""
    return _mapped(tree, change, closed, {}, 0)


def arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What `inputs(i)` gave as arguments of the step: a tuple or list, or a mapping of keywords. None for neither."""
    if isinstance(given, Mapping):
        return (), {str(key): value for key, value in given.items()}
    return (tuple(given), {}) if isinstance(given, tuple | list) else None


Children = list[tuple[str, Any]]


def _walk(tree: Any, closed: Any) -> Iterator[tuple[str, Any, Children | None]]:
    """(path, value, what is in it or None of a leaf), a container before what is in it."""
    seen: set[int] = set()
    left = _MOST

    def walk(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any, Children | None]]:
        nonlocal left
        left -= 1
        inside = _children(value) if depth < _DEEPEST and left > 0 else None
        if inside is not None:
            if id(value) in seen or (_is_object(value) and value in closed):
                return
            seen.add(id(value))
        yield path, value, inside
        for step, child in inside or ():
            yield from walk(path + step, child, depth + 1)

    yield from walk("", tree, 0)


def _is_object(value: Any) -> bool:
    return not isinstance(value, tuple | list | deque | Mapping)


def _is_record(value: Any) -> bool:
    return is_dataclass(value) or isinstance(value, types.SimpleNamespace)


def _children(value: Any) -> Children | None:
    """(step of the path, value) of what is in a container; None of a leaf."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, Mapping):
        return [(f"[{_key(key)}]", item) for key, item in value.items()]
    if isinstance(value, tuple | list | deque):
        names: Collection[str] = getattr(value, "_fields", ())
        if len(names) == len(value):
            return [(f".{name}", item) for name, item in zip(names, value, strict=True)]
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    return [(f".{name}", item) for name, item in attributes(value)] or None


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Names and values that an object holds, in its dictionary and its slots; none of modules, functions and torch's
    own things (devices, streams, generators)."""
    if isinstance(value, _CLOSED) or type(value).__module__.split(".")[0] in ("torch", "builtins", "numpy"):
        return []
    found = list(getattr(value, "__dict__", {}).items())
    return found + [(name, getattr(value, name)) for name in slots(type(value)) if hasattr(value, name)]


def slots(kind: type) -> list[str]:
    """The names that a class's objects have slots for, private ones as they are spelled outside of their class."""
    found = []
    for cls in kind.__mro__:
        named = cls.__dict__.get("__slots__", ())
        for name in (named,) if isinstance(named, str) else named:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                found.append(f"_{cls.__name__.lstrip('_')}{name}" if private else name)
    return found


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, str | int | bool | tuple) else type(key).__name__


def _mapped(value: Any, change: Callable[[Tensor], Any], closed: Any, made: dict[int, Any], depth: int) -> Any:
    if id(value) in made:
        return made[id(value)][1]
    if isinstance(value, Tensor):
        new = change(value)
        made[id(value)] = (value, new)
        return new
    inside = _children(value) if depth < _DEEPEST else None
    if not inside or (_is_object(value) and value in closed):
        return value
    made[id(value)] = (value, value)  # of a cycle, the old one: nothing made here lies in it

    def again(item: Any) -> Any:
        return _mapped(item, change, closed, made, depth + 1)

    new = _rebuilt(value, again)
    made[id(value)] = (value, new)
    return new


def _rebuilt(value: Any, again: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        items = {key: again(item) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return items
        return _with_items(value, items)
    if isinstance(value, tuple | list | deque):
        parts = [again(item) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        if isinstance(value, tuple):
            make = getattr(type(value), "_make", None)
            return make(parts) if make is not None else type(value)(parts)
        return _with_items(value, dict(enumerate(parts)))
    changed = {name: new for name, old in attributes(value) if (new := again(old)) is not old}
    if not changed:
        return value
    new = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # a frozen dataclass has no other way
    return new


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    new = copy.copy(value)
    for key, item in items.items():
        new[key] = item
    return new


def replaced(tree: Any, path: str, new: Any) -> Any:
    """The same containers with `new` in place of what lies at a path of `leaves`."""
    if not path:
        return new
    inside = _children(tree) or []
    at = next(i for i, (step, _) in enumerate(inside) if path.startswith(step) and path[len(step) :][:1] in ("", *"[."))
    order = iter(range(len(inside)))
    step = inside[at][0]
    return _rebuilt(tree, lambda item: replaced(item, path[len(step) :], new) if next(order) == at else item)


def same_places(ours: Collection[str], theirs: Collection[str]) -> str:
    """Empty where two trees hold tensors at the same paths; else the first that only one of them has."""
    other = next((path for path in [*ours, *theirs] if (path in ours) != (path in theirs)), None)
    return "" if other is None else f"{other or 'the tensor'} is there in one step and not in the other"
