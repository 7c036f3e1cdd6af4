"""The Python state that a step can reach: names for its storages, and what it changes that a replay would not."""

import ast
import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.check.constructs import last_name, targets, walked
from onegraph.check.containers import slots
from onegraph.check.places import package_of
from onegraph.check.simulate import frames
from onegraph.check.simulate.device import DeviceTensor, block

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_MODULE_INTERNALS = frozenset(
    name for name in nn.Module().__dict__ if name not in ("training", "_parameters", "_buffers", "_modules")
)
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_LIMIT = 200_000
_LONG = 64


class Snapshot:
    """Plain values, lengths and tensors' storages by name, as they are now."""

    def __init__(self, step: Callable[..., Any], roots: frames.Roots) -> None:
        self.values: dict[str, Any] = {}
        self.storages: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.types: dict[type, None] = {}  # of the user's objects that are no modules
        self.seen: set[int] = set()
        self.keep: list[Any] = []
        queue: deque[tuple[str, Any]] = deque(_reach(step, roots))
        while queue and len(self.values) < _LIMIT:
            name, value = queue.popleft()
            queue.extend(self._visit(name, value, roots))

    def _visit(self, name: str, value: Any, roots: frames.Roots) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _PLAIN):
            self.values[name] = value
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if (state := _state_of(value)) is not None:
            self.values[f"{name} (random state)"] = state
            return
        if isinstance(value, DeviceTensor):
            self.storages.setdefault(value.record.number, name)
            return
        if isinstance(value, Tensor):
            if not (torch.nn.parameter.is_lazy(value) or value.is_nested):  # no storage yet, or no one shape
                self.tensors[name] = block(value)
            return
        if isinstance(value, type | types.ModuleType | types.CodeType | torch.dtype | torch.device):
            return
        if isinstance(value, list | tuple | deque):
            self.values[name + " (length)"] = len(value)
            fields = getattr(value, "_fields", ())  # of a named tuple
            for index, item in enumerate(value):
                if index == _LONG:
                    break
                yield f"{name}.{fields[index]}" if index < len(fields) else f"{name}[{index}]", item
            return
        if isinstance(value, set | frozenset):
            self.values[name + " (length)"] = len(value)
            return
        if isinstance(value, dict):
            self.values[name + " (length)"] = len(value)
            for index, (key, item) in enumerate(value.items()):
                if index == _LONG:
                    break
                yield f"{name}[{key!r}]", item
            return
        if isinstance(value, types.FunctionType | types.MethodType):
            yield from _reach(value, roots, name)
            return
        if isinstance(value, nn.Module):
            roots.add(type(value))
            for key, item in value.__dict__.items():
                if key in _HOOKS:
                    self.values[f"{name}.{key} (length)"] = len(item)
                elif key in ("_parameters", "_buffers", "_modules"):
                    for child, thing in item.items():
                        yield f"{name}.{child}", thing
                elif key not in _MODULE_INTERNALS:
                    yield f"{name}.{key}", item
            return
        if hasattr(value, "__dict__") and _of_user(type(value), roots):
            self.types[type(value)] = None
            for key, item in vars(value).items():
                yield f"{name}.{key}", item
        for key in slots(type(value)):
            if hasattr(value, key) and _of_user(type(value), roots):
                yield f"{name}.{key}", getattr(value, key)


def random_state() -> int:
    """What tells whether the host's random numbers went on: those of `random` and of numpy, where it is loaded."""
    numpy = sys.modules.get("numpy")
    drawn = _hashable(numpy.random.get_state(legacy=False)) if numpy is not None else ()
    return hash((random.getstate(), drawn))


def _hashable(state: Any) -> Any:
    """The state of one of numpy's bit generators: nested dicts, of whatever the generator keeps."""
    if isinstance(state, dict):
        return tuple((key, _hashable(value)) for key, value in state.items())
    return state.tobytes() if hasattr(state, "tobytes") else state


def _state_of(value: Any) -> int | None:
    """The same of a generator of one's own."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return hash(value.getstate())
    if type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return hash(repr(value.bit_generator.state))
    return None


def changes(before: Snapshot, after: Snapshot) -> dict[str, tuple[Any, Any]]:
    """Names whose plain value or length is not what it was, with both; new names count, vanished ones do not."""
    found = {}
    for name, value in after.values.items():
        old = before.values.get(name, "(absent)")
        if type(old) is not type(value) or old != value:
            if isinstance(old, float) and isinstance(value, float) and old != old and value != value:
                continue
            found[name] = (old, value)
    return found


def _reach(step: Any, roots: frames.Roots, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values that a callable refers to: its object, closure, defaults, and globals that its code names."""
    dot = f"{prefix}." if prefix else ""
    if isinstance(step, types.MethodType):
        yield prefix or "self", step.__self__
        step = step.__func__
    inner = getattr(step, "__wrapped__", None)
    if inner is not None:
        yield from _reach(inner, roots, prefix)
        if getattr(getattr(step, "__code__", None), "co_filename", "").startswith(frames.HERE):
            return  # a stand-in of the checker's own: nothing else of it is the user's
    if not isinstance(step, types.FunctionType):
        if inner is None and step is not None:
            yield prefix or "step", step
        return
    for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=False):
        try:
            yield dot + name, cell.cell_contents
        except ValueError:
            continue
    for index, value in enumerate(step.__defaults__ or ()):
        yield f"{dot}default {index}", value
    for key, value in vars(step).items():
        yield f"{dot}{step.__name__}.{key}", value
    if roots.owns(step.__code__):
        for name in _global_names(step.__code__):
            value = step.__globals__.get(name)
            if not isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
                yield name, value


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _of_user(cls: type, roots: frames.Roots) -> bool:
    path = _file(cls)
    if path is None:
        return cls.__module__ in ("types", "__main__") or cls.__module__.startswith("onegraph_target_")
    if path.startswith(frames.HERE + os.sep):
        return False  # a stand-in of the checker's own for a stream or an event
    package = package_of(path)
    return package is None or package in roots.packages


def _file(cls: type) -> str | None:
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def methods(types_: Iterable[type]) -> list[types.CodeType]:
    """Code of the classes' own methods: those that work on the host alone run no op that would name them."""
    found = [f for cls in types_ for name, f in vars(cls).items() if name != "__init__"]
    return [f.__code__ for f in found if isinstance(f, types.FunctionType)]


_MUTATORS = {"append", "extend", "add", "insert", "pop", "popleft", "appendleft", "update", "clear", "remove",
             "setdefault", "discard", "popitem", "train", "eval", "register_forward_hook", "__next__", "reverse",
             "sort"}  # fmt: skip


def assignment_of(name: str, codes: list[types.CodeType]) -> frames.CodeLocation | None:
    """The line, among the functions that ran, that changes the state called `name`: an attribute through an attribute,
    a variable where it is none of the function's own; else through another name that is spelled alike."""
    last = name.removesuffix(" (length)")
    while last.endswith("]"):
        last = last[: last.rindex("[")]
    owner, _, last = last.rpartition(".")
    alike = None
    for code in codes:
        module = frames.tree(code.co_filename)
        if module is None:
            continue
        end = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
        for node in walked(module):
            line = getattr(node, "lineno", 0)
            for changed in _changed(node, last) if code.co_firstlineno <= line <= end else ():
                at = frames.CodeLocation(
                    code.co_filename,
                    line,
                    getattr(node, "col_offset", 0) + 1,
                    frames.linecache.getline(code.co_filename, line).rstrip("\n"),
                )
                own = isinstance(changed, ast.Name) and changed.id in (*code.co_varnames, *code.co_cellvars)
                if isinstance(changed, ast.Attribute) == bool(owner) and not own:
                    return at
                bound = isinstance(node, ast.Assign | ast.AnnAssign | ast.Delete) and changed in _bound(node)
                if not bound:  # to bind a name anew changes nothing that another one holds
                    alike = alike or at
    return alike


def _changed(node: ast.AST, name: str) -> list[ast.expr]:
    """Names and attributes spelled `name` that the node changes, or whose items."""
    if isinstance(node, ast.AugAssign | ast.Assign | ast.AnnAssign | ast.Delete):
        return [found for target in _bound(node) for found in _named(target, name)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        if node.func.attr in ("train", "eval") and name == "training":
            return [node.func]
        return _named(node.func.value, name)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next":
        return [found for argument in node.args for found in _named(argument, name)]
    return []


def _bound(node: ast.AugAssign | ast.Assign | ast.AnnAssign | ast.Delete) -> list[ast.expr]:
    bound = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
    return [t for target in bound for t in targets(target)]


def _named(node: ast.expr, name: str) -> list[ast.expr]:
    while isinstance(node, ast.Subscript):
        node = node.value
    return [node] if name and last_name(node) == name else []
