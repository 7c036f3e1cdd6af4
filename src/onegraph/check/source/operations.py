"""Subscripts and comparisons as values: elements, masks where tensors meet, identity, membership."""

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onegraph.check.source import names, tensors, values
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.values import (
    UNKNOWN,
    Const,
    Device,
    Dict,
    Ext,
    ExtObj,
    Func,
    Method,
    Obj,
    Plain,
    Seq,
    Tensor,
    Unknown,
    Value,
    varies,
)


def subscript(machine: Machine, node: ast.Subscript) -> Value:
    """`owner[index]`."""
    owner = machine.evaluate(node.value)
    if isinstance(owner, Tensor):
        return tensors.load_item(machine, node, owner)
    if isinstance(owner, Ext | ExtObj) and "triton" in getattr(owner, "name", getattr(owner, "kind", "")):
        return Method(owner, "launch-moving" if varies(machine.evaluate(node.slice)) else "launch")
    index = machine.evaluate(node.slice) if not isinstance(node.slice, ast.Slice) else _slice(machine, node.slice)
    value = _element(machine, node, owner, index)
    if machine.at.in_step and isinstance(owner, Seq | Dict) and not owner.in_step and values.tensors(value):
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


# ---- comparisons

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def compare(machine: Machine, node: ast.Compare) -> Value:
    """A chain of comparisons."""
    named = isinstance(node.left, ast.Name | ast.Attribute) and isinstance(node.ops[0], ast.Is | ast.IsNot)
    machine.at.quiet += named  # asking whether a name is None reads nothing
    left = machine.evaluate(node.left)
    machine.at.quiet -= named
    result: Value = UNKNOWN
    for i, (op, right_node) in enumerate(zip(node.ops, node.comparators, strict=True)):
        right = machine.evaluate(right_node)
        result = _compared(machine, node, left, op, right)
        if i < len(node.ops) - 1 and isinstance(result, Tensor) and result.on_device:
            machine.report("CG108", node, f"`{short(node)}` chains comparisons of a device tensor", sure=result.sure)
        left = right
    return result


def _compared(machine: Machine, node: ast.Compare, left: Value, op: ast.cmpop, right: Value) -> Value:
    if isinstance(op, ast.Is | ast.IsNot):
        return _identity(left, right, isinstance(op, ast.Is))
    if isinstance(op, ast.In | ast.NotIn):
        if isinstance(right, Tensor) and right.on_device:
            machine.report("CG101", node, f"`{short(node)}` reads the device tensor to search it", sure=right.sure)
        elif isinstance(left, Tensor) and left.on_device and isinstance(right, Seq):
            machine.report("CG101", node, f"`{short(node)}` compares a device tensor on the host", sure=left.sure)
        elif isinstance(left, Const) and isinstance(right, Dict) and right.entries is not None:
            return Const((right.get(left.value) is not None) is isinstance(op, ast.In))
        return Plain("bool", varying=varies(left) or varies(right))
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        result = tensors.binary(machine, node, left, right)
        if isinstance(result, Tensor):
            return tensors.as_mask(result)
        return result
    if isinstance(left, Device):
        left = Const(left.name) if left.name else Plain()
    if isinstance(right, Device):
        right = Const(right.name) if right.name else Plain()
    match left, right:
        case (Const(), Const()) if type(op) in COMPARISONS:
            try:
                return Const(bool(COMPARISONS[type(op)](left.value, right.value)))
            except TypeError:
                return Plain("bool")
        case (Plain(least=float() | int()), Const(value=float() | int())):
            known = _beyond(op, left.least, right.value)
            if known is not None:
                return Const(known)
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return UNKNOWN
    return Plain("bool", varying=varies(left) or varies(right))


def _beyond(op: ast.cmpop, least: Any, number: Any) -> bool | None:
    """A counter against a number that it has passed when the warm-up is over: one answer from then on."""
    match op:
        case ast.Eq() | ast.NotEq() if number < least:
            return isinstance(op, ast.NotEq)
        case ast.Lt() | ast.GtE() if number <= least:
            return isinstance(op, ast.GtE)
        case ast.LtE() | ast.Gt() if number < least:
            return isinstance(op, ast.Gt)
    return None


def _identity(left: Value, right: Value, positive: bool) -> Value:
    if isinstance(right, Const) and right.value is None:
        if isinstance(left, Const):
            return Const((left.value is None) is positive)
        unsure = isinstance(left, Plain) and left.kind not in ("int", "float", "shape")
        if unsure or isinstance(left, Unknown) or (isinstance(left, Tensor) and left.optional):
            return Plain("bool", varying=varies(left))
        return Const(not positive)
    if isinstance(left, Const) and isinstance(right, Const):
        return Const((left.value is right.value) is positive)
    return Plain("bool")
