"""Subscripts as values: of tensors, lists, dicts, shapes, numpy arrays, Triton kernels."""

import ast
from dataclasses import replace

from onegraph.check.source import names, tensors
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.values import (
    UNKNOWN,
    Const,
    Dict,
    Ext,
    ExtObj,
    Func,
    Method,
    Obj,
    Plain,
    Seq,
    Tensor,
    Value,
    varies,
)
from onegraph.check.source.values import tensors as tensors_in


def subscript(machine: Machine, node: ast.Subscript) -> Value:
    """`owner[index]`."""
    owner = machine.evaluate(node.value)
    if isinstance(owner, Tensor):
        return tensors.load_item(machine, node, owner)
    if isinstance(owner, Ext | ExtObj) and "triton" in getattr(owner, "name", getattr(owner, "kind", "")):
        return Method(owner, "launch-moving" if varies(machine.evaluate(node.slice)) else "launch")
    index = machine.evaluate(node.slice) if not isinstance(node.slice, ast.Slice) else _slice(machine, node.slice)
    value = _element(machine, node, owner, index)
    if machine.at.in_step and isinstance(owner, Seq | Dict) and not owner.in_step and tensors_in(value):
        machine.seen(("item", 0, short(node)), value, node)
    return value


def _element(machine: Machine, node: ast.Subscript, owner: Value, index: Value) -> Value:
    match owner, index:
        case (Seq(), Const()) if owner.items is not None and isinstance(index.value, int):
            if -len(owner.items) <= index.value < len(owner.items):
                return owner.items[index.value]
            return UNKNOWN
        case (Seq(), _) if isinstance(node.slice, ast.Slice):
            return Seq(owner.kind, None, owner.any, owner.in_step)
        case (Seq(), _):
            if isinstance(index, Tensor) and index.on_device:
                machine.report("CG101", node.slice, "a device tensor as index of a list is read", sure=index.sure)
            if varies(index) and isinstance(owner.any, Tensor) and not owner.in_step:
                return replace(owner.any, moving=True)
            return owner.any
        case (Dict(), Const()):
            found = owner.get(index.value)
            return found if found is not None else (owner.element if owner.entries is None else UNKNOWN)
        case (Dict(), _):
            return owner.any
        case (ExtObj(kind="numpy.ndarray"), _):
            return Plain("", varying=True) if varies(index) else owner
        case (Plain(kind="shape"), _) if not isinstance(node.slice, ast.Slice):
            return Plain("int", varying=owner.varying)
        case (Plain(), _):
            return Plain("shape" if owner.kind == "shape" else "", varying=owner.varying or varies(index))
        case (Obj(), _):
            found = names.member_value(machine, owner, owner.cls, "__getitem__")
            if isinstance(found, Func):
                return machine.call_function(found, [index], {}, node)
    return UNKNOWN


def _slice(machine: Machine, node: ast.Slice) -> Value:
    for part in (node.lower, node.upper, node.step):
        if part is not None:
            value = machine.evaluate(part)
            if isinstance(value, Tensor) and value.on_device:
                machine.report("CG101", part, "a device tensor as slice bound is read on the host", sure=value.sure)
    return UNKNOWN
