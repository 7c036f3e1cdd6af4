"""Comparisons: masks where tensors meet, identity, membership."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from onegraph.check.source import tensors
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.values import UNKNOWN, Const, Device, Dict, Plain, Seq, Tensor, Unknown, Value, varies

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
    if isinstance(left, Unknown) and isinstance(right, Unknown):
        return UNKNOWN
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
        if isinstance(left, Plain | Unknown) or (isinstance(left, Tensor) and left.optional):
            return Plain("bool", varying=varies(left))
        return Const(not positive)
    if isinstance(left, Const) and isinstance(right, Const):
        return Const((left.value is right.value) is positive)
    return Plain("bool")
