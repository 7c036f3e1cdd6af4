"""What is inside a value: its attributes, and what an iteration over it yields."""

import ast

from onegraph.check.source import entropy, names, tensors
from onegraph.check.source.machine import Machine
from onegraph.check.source.values import (
    UNKNOWN,
    Class,
    Const,
    Device,
    Dict,
    Ext,
    ExtObj,
    Func,
    Method,
    Module,
    Obj,
    Plain,
    Seq,
    Super,
    Tensor,
    Value,
)


def attribute(machine: Machine, owner: Value, name: str, node: ast.AST) -> Value:
    """`owner.name`."""
    match owner:
        case Obj():
            if name in owner.attributes:
                value = owner.attributes[name]
                if machine.at.in_step and not owner.in_step and isinstance(value, Tensor):
                    machine.seen(("attribute", id(owner), name), value, node)
                return value
            found = names.member_value(machine, owner, owner.cls, name)
            if found is not None:
                return found
            if name == "__class__":
                return owner.cls
            if names.is_module(machine, owner.cls):
                return Plain("bool") if name == "training" else Method(owner, name)
            return UNKNOWN
        case Ext():
            return tensors.constant(f"{owner.name}.{name}")
        case Module():
            value = names.module_name(machine, owner.file, name)
            if value is UNKNOWN and owner.file.is_package:
                inner = machine.known.project.module(f"{owner.file.module}.{name}", owner.file)
                return Module(inner) if inner is not None else UNKNOWN
            return value
        case Tensor():
            return tensors.attribute(owner, name, node)
        case Class():
            found = names.member_value(machine, owner, owner, name)
            return found if found is not None else UNKNOWN
        case Super():
            cls = owner.receiver.cls if isinstance(owner.receiver, Obj) else owner.owner
            found = names.member_value(machine, owner.receiver, cls, name, after=owner.owner)
            return found if found is not None else Method(owner, name)
        case Device():
            if name == "type" and owner.name:
                return Const(owner.name.split(":")[0])
            return Plain()
        case Seq() if name in ("values", "indices", "keys"):
            return owner.any if owner.kind == "result" else Method(owner, name)
        case Seq() if owner.kind == "result":  # a named tuple of tensors
            return owner.any if name not in ("count", "index") else Method(owner, name)
        case Seq() | Dict() | ExtObj() | Const():
            return Method(owner, name)
        case Plain():
            return owner if owner.kind == entropy.DRAWN else Method(owner, name)
        case Func() if name == "__wrapped__":
            return owner
    return UNKNOWN


def iterate(value: Value) -> Value:
    """One value that stands for each element of an iteration."""
    match value:
        case Seq():
            return value.any
        case Tensor():
            rank = value.rank - 1 if value.rank else None
            return tensors.view(value, rank=rank)
        case Dict():
            return Plain("str") if value.entries else UNKNOWN
        case Plain(kind="shape") | Plain(kind="range"):
            return Plain("int", varying=value.varying)
    return UNKNOWN
