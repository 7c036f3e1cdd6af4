"""Python's own functions: some ask a tensor for its value."""

import ast

from onegraph.check.source import binding
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.names import ancestry, attribute, find_member, iterate
from onegraph.check.source.state import Position
from onegraph.check.source.tensor_methods import moving
from onegraph.check.source.values import (
    UNKNOWN,
    Class,
    Const,
    Dict,
    Ext,
    ExtObj,
    Keywords,
    Obj,
    Plain,
    Seq,
    Tensor,
    Unknown,
    Value,
    join,
    kind_of,
    read_at,
    tensors,
    varies,
)

READERS = {"int": "int", "float": "float", "bool": "bool", "complex": "complex", "str": "str", "repr": "str"}
COMPARERS = frozenset(["max", "min", "sorted", "any", "all"])
UNROLLED = 4
"""Rounds of a loop over known numbers that are read one by one."""


def call(machine: Machine, name: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    """Call a builtin."""
    first = args[0] if args else UNKNOWN
    device_args = [a for a in args if isinstance(a, Tensor) and a.on_device]
    if name == "print":
        return _print(machine, args, node)
    if device_args and (name in READERS or name in COMPARERS or name in ("range", "round", "hash", "divmod", "pow")):
        if name == "hash":
            return Plain("int")
        if name in ("round", "divmod", "pow"):
            return machine.tensor(device_args[0].device)
        message = f"`{short(node)}` reads a device tensor on the host"
        machine.report("CG101", node, message, sure=all(t.sure for t in device_args))
        if name in ("max", "min"):
            return machine.tensor(device_args[0].device, sure=device_args[0].sure, rank=0)
        changing = any(moving(machine.at, t) for t in device_args)
        where = f"{machine.at.file.path}:{getattr(node, 'lineno', 1)}"
        return Plain(READERS.get(name, ""), varying=changing, read=where)
    if name in READERS:
        if isinstance(first, Const) and name in ("int", "float", "bool") and isinstance(first.value, int | float):
            return Const({"int": int, "float": float, "bool": bool}[name](first.value))
        changes = moving(machine.at, first) if isinstance(first, Tensor) else varies(first)
        return Plain(READERS[name], varying=changes, read=first.read if isinstance(first, Plain) else "")
    match name:
        case "len":
            if isinstance(first, Seq) and first.items is not None:
                return Const(len(first.items))
            return Plain("int", varying=varies(first) if isinstance(first, Plain) else False)
        case "range":
            return _range(args)
        case "abs" | "round" | "pow" | "divmod" | "sum" if isinstance(first, Tensor):
            return machine.tensor(first.device, sure=first.sure)
        case "sum" if isinstance(first, Seq) and tensors(first):
            return machine.tensor(tensors(first)[0].device, sure=tensors(first)[0].sure)
        case "max" | "min":
            return _extreme(machine, args, node)
        case "list" | "tuple" | "set" | "iter" | "reversed" | "sorted" | "frozenset":
            return _sequence(machine.at, name, args)
        case "enumerate":
            if isinstance(first, Seq) and first.items is not None:
                pairs = tuple(Seq("tuple", (Const(i), v), in_step=True) for i, v in enumerate(first.items))
                return Seq("iterator", pairs, in_step=True)
            return Seq("iterator", None, Seq("tuple", (Plain("int"), iterate(first)), in_step=True), True)
        case "zip":
            if args and all(isinstance(a, Seq) and a.items is not None for a in args):
                columns = [a.items or () for a in args if isinstance(a, Seq)]
                rows = tuple(Seq("tuple", row, in_step=True) for row in zip(*columns, strict=False))
                return Seq("iterator", rows, in_step=True)
            return Seq("zip", None, Seq("tuple", tuple(iterate(a) for a in args), in_step=True), True)
        case "next":
            return _next(machine.at, first)
        case "dict":
            return Dict(tuple(keywords.items()), in_step=machine.at.in_step) if not args else UNKNOWN
        case "isinstance":
            return _isinstance(machine, args)
        case "hasattr":
            if isinstance(first, Obj) and len(args) > 1 and isinstance(args[1], Const):
                known = args[1].value in first.attributes or find_member(machine, first.cls, str(args[1].value))
                return Const(True) if known else Plain("bool")
            return Plain("bool")
        case "getattr" if len(args) > 1 and isinstance(args[1], Const) and isinstance(args[1].value, str):
            value = attribute(machine, first, args[1].value, node)
            return join(value, args[2]) if len(args) > 2 and isinstance(value, Unknown) else value
        case "setattr" if len(args) == 3 and isinstance(args[1], Const) and isinstance(node, ast.Call):
            binding.set_attribute(machine, node, first, str(args[1].value), args[2])
            return Const(None)
        case "type" if isinstance(first, Obj):
            return first.cls
        case "callable" | "issubclass" | "id" | "type" | "ord" | "chr" | "format" | "input" | "hash" | "divmod":
            return Plain(varying=any(varies(a) for a in args))
        case "abs" | "round" | "sum" | "pow":
            return Plain(varying=any(varies(a) for a in args))
    return UNKNOWN


def _print(machine: Machine, args: list[Value], node: ast.AST) -> Value:
    on_device = [t for a in args for t in tensors(a) if t.on_device]
    if on_device:
        machine.report("CG101", node, "`print` reads a device tensor", sure=all(t.sure for t in on_device))
    elif not machine.at.presume:
        machine.report("CG210", node, "`print` in the step: a replay prints nothing")
    return Const(None)


def _extreme(machine: Machine, args: list[Value], node: ast.AST) -> Value:
    found = [t for a in args for t in tensors(a) if t.on_device] if len(args) == 1 else []
    if found and isinstance(args[0], Seq):
        machine.report("CG101", node, f"`{short(node)}` compares device tensors on the host", sure=found[0].sure)
        return found[0]
    return Plain(varying=any(varies(a) for a in args), read=read_at(*args))


def _range(args: list[Value]) -> Value:
    """A short one is known; of one that begins with a constant the number of rounds may change, the numbers do not."""
    numbers = [a.value for a in args if isinstance(a, Const) and isinstance(a.value, int)]
    if len(numbers) == len(args) and all(numbers[2:]) and len(known := range(*numbers)) <= UNROLLED:
        return Seq("range", tuple(map(Const, known)), in_step=True)
    moving = any(varies(a) for a in args)
    return Plain("range" if len(args) == 1 or not varies(args[0]) else "moving range", varying=moving)


def _sequence(at: Position, name: str, args: list[Value]) -> Value:
    kind = {"iter": "iterator", "reversed": "iterator", "sorted": "list", "frozenset": "set"}.get(name, name)
    if not args:
        return Seq(kind, (), in_step=at.in_step)
    first = args[0]
    if isinstance(first, Seq) and first.items is not None:
        items = first.items[::-1] if name == "reversed" else first.items
        return Seq(kind, items, in_step=at.in_step)
    if isinstance(first, Unknown):
        return UNKNOWN
    return Seq(kind, None, iterate(first), at.in_step)


def _next(at: Position, iterator: Value) -> Value:
    """What the step takes from an iterator that outlives it is another value in each step."""
    lasting = at.in_step and not at.presume
    if isinstance(iterator, ExtObj) and iterator.kind == "itertools.count":
        return Plain("int", varying=lasting and not iterator.in_step)
    if not isinstance(iterator, Seq):
        return UNKNOWN
    value = iterator.any
    if lasting and iterator.kind == "iterator" and not iterator.in_step and isinstance(value, Const | Plain):
        several = iterator.items is None or len(set(map(repr, iterator.items))) > 1
        return Plain(kind_of(value), varying=True) if several else value
    return value


def _isinstance(machine: Machine, args: list[Value]) -> Value:
    if len(args) != 2:
        return Plain("bool")
    value, wanted = args
    options = list(wanted.items or ()) if isinstance(wanted, Seq) else [wanted]
    asked = {o.name for o in options if isinstance(o, Ext)}
    if len(asked) != len(options):
        return Plain("bool") if not isinstance(value, Obj) else _obj_is(machine, value, options)
    tensor_asked = any(a.endswith("Tensor") and a.startswith("torch.") for a in asked)
    match value:
        case Tensor() if not value.optional:
            return Const(tensor_asked) if tensor_asked or value.sure else Plain("bool")
        case Const() | Plain() | Seq() | Dict() | ExtObj() if tensor_asked and len(asked) == 1:
            return Const(False)
        case Const():
            return Const("builtins." + type(value.value).__name__ in asked)
        case Plain() if value.kind in ("int", "str", "float", "bool"):
            return Const("builtins." + value.kind in asked)
        case Obj():
            return _obj_is(machine, value, options)
    return Plain("bool")


def _obj_is(machine: Machine, obj: Obj, options: list[Value]) -> Value:
    line = ancestry(machine, obj.cls)
    nodes = {id(v.node) for v in line if isinstance(v, Class)}
    if any(isinstance(o, Class) and id(o.node) in nodes for o in options):
        return Const(True)
    return Plain("bool")
