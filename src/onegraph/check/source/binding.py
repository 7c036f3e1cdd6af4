"""Assignment: to names, attributes and items, and what it means when the bound thing outlives the step."""

import ast
from collections.abc import Callable
from dataclasses import replace

from onegraph.check.source import names, tensors
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.names import iterate
from onegraph.check.source.values import (
    UNKNOWN,
    Class,
    Const,
    Dict,
    ExtObj,
    Method,
    Obj,
    Scope,
    Seq,
    Tensor,
    Value,
    join,
    varies,
)


def bind(machine: Machine, target: ast.expr, value: Value, *, moved: bool = False) -> None:
    """Assign to a name, an attribute, a subscript, or unpack."""
    match target:
        case ast.Name():
            owner = machine.at.scope.rebinds.get(target.id, machine.at.scope)
            set_variable(machine, target, owner, target.id, value, moved=moved)
        case ast.Tuple() | ast.List():
            unpack(machine, target.elts, value)
        case ast.Starred():
            bind(machine, target.value, Seq("list", None, value.any if isinstance(value, Seq) else UNKNOWN))
        case ast.Attribute():
            set_attribute(machine, target, machine.evaluate(target.value), target.attr, value, moved=moved)
        case ast.Subscript():
            set_item(machine, target, value, moved=moved)


def unpack(machine: Machine, targets: list[ast.expr], value: Value) -> None:
    items: list[Value] | None = None
    if isinstance(value, Seq) and value.items is not None and not any(isinstance(t, ast.Starred) for t in targets):
        items = list(value.items) if len(value.items) == len(targets) else None
    for i, target in enumerate(targets):
        if items is not None:
            bind(machine, target, items[i])
        elif isinstance(target, ast.Starred):
            bind(machine, target.value, Seq("list", None, iterate(value)))
        else:
            bind(machine, target, iterate(value))


def set_variable(
    machine: Machine, node: ast.AST, owner: Scope, name: str, value: Value, *, moved: bool = False
) -> None:
    old = owner.variables.get(name, UNKNOWN)
    if machine.at.in_step and not owner.in_step and owner is not machine.at.scope:

        def setter(new: Value) -> None:
            owner.variables[name] = new

        machine.stored(("var", id(owner), name), node, old, value, setter, owner, moved)
    owner.variables[name] = value


def set_attribute(
    machine: Machine, node: ast.expr, obj: Value, name: str, value: Value, *, moved: bool = False
) -> None:
    if isinstance(obj, Tensor) and name == "data" and machine.at.in_step and not obj.in_step:
        # Harmless where the step reads what it has just bound, and nothing of the step before.
        text = f"`{short(node)} = ...` gives a tensor that the graph reads another storage"
        machine.report("CG205", node, text, sure=False)
        return
    part = obj.receiver if isinstance(obj, Method) else obj  # `layer.weight.data = ...`, `layer.weight = ...`
    if isinstance(part, ExtObj) and part.serial and (name == "data" or isinstance(value, Tensor)):
        if machine.at.in_step:
            machine.report(
                "CG205", node, f"`{short(node)} = ...` gives a parameter another storage", sure=name != "data"
            )
        elif machine.at.between:
            machine.step.swapped.add(part.serial)
    if isinstance(obj, Class) and machine.at.in_step and not machine.at.presume:
        _set_on_class(machine, node, obj, name, value, moved)
    if not isinstance(obj, Obj):
        return
    old = obj.attributes.get(name, UNKNOWN)
    if isinstance(value, Tensor) and isinstance(old, Tensor) and old.parameter and not value.parameter:
        value = replace(value, parameter=True)
    if machine.at.in_step and not obj.in_step and not machine.at.presume:

        def setter(new: Value) -> None:
            obj.attributes[name] = new

        machine.stored(("attribute", id(obj), name), node, old, value, setter, obj, moved)
    record = names.is_record(machine, obj.cls) and any(obj is known for known in machine.step.given)
    if machine.at.between and isinstance(value, Tensor) and isinstance(old, Tensor) and not record:
        value = replace(value, moving=True)
    if machine.at.conditions and machine.at.in_step and name in obj.attributes:
        value = join(old, value)
    obj.attributes[name] = value


def _set_on_class(machine: Machine, node: ast.expr, cls: Class, name: str, value: Value, moved: bool) -> None:
    """`Step.count = ...`: a class outlives the step."""
    key = (id(cls.node), name)
    old = machine.known.class_values.get(key) or names.member_value(machine, cls, cls, name) or UNKNOWN

    def setter(new: Value) -> None:
        machine.known.class_values[key] = new

    machine.stored(("attribute", *key), node, old, value, setter, cls.node, moved)
    machine.known.class_values[key] = value


def set_item(machine: Machine, target: ast.Subscript, value: Value, *, moved: bool = False) -> None:
    container = machine.evaluate(target.value)
    match container:
        case Tensor():
            tensors.store_item(machine, target, container, value)
        case Seq() | Dict():
            index = machine.evaluate(target.slice)
            if machine.at.in_step and not container.in_step and not machine.at.presume:
                _stored_item(machine, target, container, index, value, moved)
            hold(machine, target.value, put(container, index, value))
        case ExtObj(kind="numpy.ndarray"):
            machine.evaluate(target.slice)
            if machine.at.in_step and varies(value):
                machine.step.host_written.add(int(container.note or 0))
        case _:
            machine.evaluate(target.slice)


def _stored_item(
    machine: Machine, target: ast.Subscript, container: Seq | Dict, index: Value, value: Value, moved: bool
) -> None:
    """`things[key] = value` where `things` outlives the step."""

    where = binding(machine, target.value)
    if where is None:
        return
    get, set_ = where

    def setter(new: Value) -> None:
        now = get()
        if isinstance(now, Seq | Dict):
            set_(put(now, index, new))

    old: Value = UNKNOWN
    if isinstance(container, Dict) and isinstance(index, Const):
        old = container.get(index.value) or Const(None)
    elif isinstance(container, Seq) and container.items is not None and isinstance(index, Const):
        at = index.value if isinstance(index.value, int) else 0
        old = container.items[at] if -len(container.items) <= at < len(container.items) else UNKNOWN
    else:
        old = container.any
    machine.stored(("item", 0, short(target)), target, old, value, setter, container, moved)


def hold(machine: Machine, node: ast.expr, value: Value) -> None:
    """Put a changed list or dict back where the expression `node` found it."""
    where = binding(machine, node)
    if where is not None:
        where[1](value)


def binding(machine: Machine, node: ast.expr) -> tuple[Callable[[], Value], Callable[[Value], None]] | None:
    """How to read and to replace what an expression names, whatever scope is current by then."""
    match node:
        case ast.Name():
            scope = names.find_scope(machine.at.scope, node.id) or names.module_scope(
                machine.known, machine.at.scope.file
            )
            return _slot(scope.variables, node.id)
        case ast.Attribute():
            obj = machine.evaluate(node.value)
            return _slot(obj.attributes, node.attr) if isinstance(obj, Obj) else None
        case ast.Subscript():
            outer = binding(machine, node.value)
            if outer is None:
                return None
            get, set_ = outer
            index = machine.evaluate(node.slice)

            def inner_get() -> Value:
                now = get()
                if isinstance(now, Dict) and isinstance(index, Const):
                    return now.get(index.value) or UNKNOWN
                return now.any if isinstance(now, Seq | Dict) else UNKNOWN

            def inner_set(value: Value) -> None:
                now = get()
                if isinstance(now, Seq | Dict):
                    set_(put(now, index, value))

            return inner_get, inner_set
    return None


def _slot(table: dict[str, Value], name: str) -> tuple[Callable[[], Value], Callable[[Value], None]]:
    def get() -> Value:
        return table.get(name, UNKNOWN)

    def set_(value: Value) -> None:
        table[name] = value

    return get, set_


def put(container: Seq | Dict, index: Value, value: Value) -> Seq | Dict:
    """The container after `container[index] = value`."""
    if isinstance(container, Dict):
        if isinstance(index, Const) and container.entries is not None and len(container.entries) < 64:
            return container.put(index.value, value)
        return replace(container, entries=None, element=join(container.any, value) if container.entries else value)
    if isinstance(index, Const) and isinstance(index.value, int) and container.items is not None:
        items = list(container.items)
        if -len(items) <= index.value < len(items):
            items[index.value] = value
            return replace(container, items=tuple(items))
    return replace(container, items=None, element=value)  # a loop writes them all: the new value stands for each
