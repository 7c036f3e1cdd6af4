"""Expressions: what a piece of code evaluates to.

One recursion: every kind of expression of Python's grammar, by `evaluate`.
"""

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onegraph.check.source import binding, calls, names, operations, tensors
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.names import attribute, iterate
from onegraph.check.source.values import (
    UNKNOWN,
    Const,
    Dict,
    Func,
    Plain,
    Scope,
    Seq,
    Tensor,
    Value,
    is_plain,
    join,
    join_all,
    kind_of,
    read_at,
    truth,
    varies,
)

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}


def evaluate(machine: Machine, node: ast.expr) -> Value:
    """The abstract value of an expression; reports what its evaluation would do inside a step."""
    machine.at.spend()
    handler = HANDLERS.get(type(node))
    return handler(machine, node) if handler else UNKNOWN


def condition(machine: Machine, node: ast.expr, where: str) -> Value:
    """The value of an expression whose truth Python asks for."""
    if isinstance(node, ast.BoolOp):
        values = []
        for operand in node.values:
            value = condition(machine, operand, where)
            values.append(value)
            known = truth(value)
            if known is not None and known is isinstance(node.op, ast.Or):
                return Const(known)
            if capturing(value) is isinstance(node.op, ast.Or):
                return value  # while capturing, the rest is not evaluated
        return _logical(values, isinstance(node.op, ast.Or))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = condition(machine, node.operand, where)
        known = truth(value)
        asked = capturing(value)
        if asked is not None:
            return Plain("not capturing" if asked else "capturing")
        return Const(not known) if known is not None else Plain("bool", varying=varies(value))
    value = evaluate(machine, node)
    if isinstance(value, Tensor) and value.on_device and not (value.optional and not value.sure):
        machine.report("CG108", node, f"`{where} {short(node)}` asks for the truth of a device tensor", sure=value.sure)
        return Plain("bool")
    return value


def capturing(value: Value) -> bool | None:
    """Truth that a question about capture has while the step is captured."""
    if isinstance(value, Plain) and value.kind in ("capturing", "not capturing"):
        return value.kind == "capturing"
    return None


def decided(machine: Machine, test: Value, node: ast.expr, *, matters: bool = True) -> bool | None:
    """The one way that a test takes; None where that is not known. `matters`: whether the other does anything else."""
    known = truth(test)
    if known is not None and not varies(test):
        return known
    asked = capturing(test)
    if asked is not None and matters:
        machine.report("CG211", node, "the step takes another path while it is captured")
    return asked


def _logical(values: list[Value], either: bool = False) -> Value:
    known = [truth(v) for v in values]
    if all(k is not None for k in known):
        return Const(any(known) if either else all(known))
    if any(k is not None and k is either for k in known):
        return Const(either)
    return Plain("bool", varying=any(varies(v) for v in values))


def _constant(machine: Machine, node: ast.Constant) -> Value:
    return Const(node.value)


def _name(machine: Machine, node: ast.Name) -> Value:
    return names.lookup(machine, node.id)


def _attribute(machine: Machine, node: ast.Attribute) -> Value:
    return attribute(machine, evaluate(machine, node.value), node.attr, node)


def _binary(machine: Machine, node: ast.BinOp) -> Value:
    left, right = evaluate(machine, node.left), evaluate(machine, node.right)
    return binary_value(machine, node, left, right, node.op)


def binary_value(machine: Machine, node: ast.AST, left: Value, right: Value, op: ast.operator) -> Value:
    """`left op right`."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return tensors.binary(machine, node, left, right)
    match left, right:
        case (Const(), Const()) if type(op) in OPERATORS:
            try:
                value = OPERATORS[type(op)](left.value, right.value)
            except (TypeError, ValueError, ArithmeticError):
                return Plain()
            small = not isinstance(value, str) or len(value) < 200
            return Const(value) if isinstance(value, int | float | str) and small else Plain()
        case (Seq(), Seq()) if isinstance(op, ast.Add):
            if left.items is not None and right.items is not None and len(left.items) + len(right.items) <= 32:
                return Seq(left.kind, left.items + right.items, in_step=machine.at.in_step)
            return Seq(left.kind, None, join(left.any, right.any), machine.at.in_step)
        case (Seq(), Const() | Plain()) if isinstance(op, ast.Mult):
            if isinstance(right, Const) and isinstance(right.value, int) and left.items and right.value <= 8:
                return Seq(left.kind, left.items * max(right.value, 0), in_step=machine.at.in_step)
            return Seq(left.kind, None, left.any, machine.at.in_step)
    if isinstance(op, ast.BitOr) and (capturing(left) or capturing(right)):
        return Plain("capturing")
    if is_plain(left) and is_plain(right):
        kinds = {kind_of(v) for v in (left, right)}
        kind = "float" if "float" in kinds or isinstance(op, ast.Div) else kinds.pop() if len(kinds) == 1 else ""
        return Plain(kind, varying=varies(left) or varies(right), read=read_at(left, right))
    return UNKNOWN


def _unary(machine: Machine, node: ast.UnaryOp) -> Value:
    if isinstance(node.op, ast.Not):
        return condition(machine, node, "not")
    value = evaluate(machine, node.operand)
    match value:
        case Tensor():
            return machine.tensor(value.device, sure=value.sure, boolean=value.boolean, rank=value.rank)
        case Const() if isinstance(value.value, int | float) and isinstance(node.op, ast.USub):
            return Const(-value.value)
        case Const():
            return Plain()
    return value


def _bool(machine: Machine, node: ast.BoolOp) -> Value:
    """`a or b` as a value: every operand but the last is tested."""
    values = []
    for i, operand in enumerate(node.values):
        if i == len(node.values) - 1:
            values.append(evaluate(machine, operand))
            break
        value = condition(machine, operand, "or" if isinstance(node.op, ast.Or) else "and")
        known = truth(value)
        if capturing(value) is isinstance(node.op, ast.Or):
            return value
        if known is None:
            values.append(value)
        elif known is isinstance(node.op, ast.Or):
            values.append(value)
            break
    return join_all(tuple(values))


def _conditional(machine: Machine, node: ast.IfExp) -> Value:
    test = condition(machine, node.test, "if")
    way = decided(machine, test, node.test)
    if way is not None:
        return evaluate(machine, node.body if way else node.orelse)
    work = machine.step.tensor_work
    machine.at.conditions += 1
    body, other = evaluate(machine, node.body), evaluate(machine, node.orelse)
    machine.at.conditions -= 1
    moving = varies(test)
    if moving:
        machine.path_varies(node.test, work)
    result = join(body, other)
    if moving and isinstance(result, Plain) and body != other:
        return replace(result, varying=True)
    return result


def _sequence(machine: Machine, node: ast.Tuple | ast.List | ast.Set) -> Value:
    kind = {ast.Tuple: "tuple", ast.List: "list"}.get(type(node), "set")
    items: list[Value] = []
    for element in node.elts:
        if isinstance(element, ast.Starred):
            value = evaluate(machine, element.value)
            if isinstance(value, Seq) and value.items is not None:
                items.extend(value.items)
                continue
            every = join_all((*items, iterate(value)))
            return Seq(kind, None, every, machine.at.in_step)
        items.append(evaluate(machine, element))
    if len(items) > 64:
        return Seq(kind, None, join_all(tuple(items)), machine.at.in_step)
    return Seq(kind, tuple(items), in_step=machine.at.in_step)


def _dict(machine: Machine, node: ast.Dict) -> Value:
    result = Dict((), in_step=machine.at.in_step)
    known = True
    values: list[Value] = []
    for key, value_node in zip(node.keys, node.values, strict=True):
        name = evaluate(machine, key) if key is not None else UNKNOWN
        value = evaluate(machine, value_node)
        values.append(value)
        if isinstance(name, Const) and known and len(values) <= 64:
            result = result.put(name.value, value)
        else:
            known = False
    return result if known else Dict(None, join_all(tuple(values)), machine.at.in_step)


def _comprehension(machine: Machine, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
    call = machine.at.stack[-1]
    outer = call.scope
    call.scope = Scope(machine.at.file, {}, outer, machine.at.in_step)
    conditional = False
    count: int | None = None
    work = machine.step.tensor_work
    try:
        for generator in node.generators:
            iterable = evaluate(machine, generator.iter)
            if len(node.generators) == 1 and isinstance(iterable, Seq) and iterable.items is not None:
                count = len(iterable.items)
                if isinstance(node, ast.ListComp | ast.GeneratorExp) and not generator.ifs and 0 < count <= 4:
                    return _unrolled(machine, node, generator.target, iterable.items)
            binding.bind(machine, generator.target, iterate(iterable))
            for test in generator.ifs:
                condition(machine, test, "if")
                conditional, count = True, None
        machine.at.conditions += conditional
        if isinstance(node, ast.DictComp):
            evaluate(machine, node.key)
            return Dict(None, evaluate(machine, node.value), machine.at.in_step)
        element = evaluate(machine, node.elt)
        if rounds_vary(iterable):
            machine.path_varies(generator.iter, work, rounds=True)
    finally:
        machine.at.conditions -= conditional
        call.scope = outer
    kind = {ast.ListComp: "list", ast.SetComp: "set"}.get(type(node), "iterator")
    if count is not None and count <= 8:
        return Seq(kind, (element,) * count, in_step=machine.at.in_step)
    return Seq(kind, None, element, machine.at.in_step)


def _unrolled(
    machine: Machine, node: ast.ListComp | ast.GeneratorExp, target: ast.expr, items: tuple[Value, ...]
) -> Value:
    made = []
    for item in items:
        binding.bind(machine, target, item)
        made.append(evaluate(machine, node.elt))
    return Seq("list" if isinstance(node, ast.ListComp) else "iterator", tuple(made), in_step=machine.at.in_step)


def rounds_vary(iterable: Value) -> bool:
    """Whether a loop over this runs another number of rounds from step to step; `zip` is as long as its shortest."""
    if isinstance(iterable, Seq) and iterable.kind == "zip" and isinstance(iterable.element, Seq):
        return all(varies(value) for value in iterable.element.items or ())
    return varies(iterable)


def _joined(machine: Machine, node: ast.JoinedStr) -> Value:
    moving = False
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            value = evaluate(machine, part.value)
            moving = moving or varies(value)
            if isinstance(value, Tensor) and value.on_device:
                text = short(part.value)
                machine.report("CG101", part.value, f"formatting `{text}` reads the device tensor", sure=value.sure)
    return Plain("str", varying=moving)


def _lambda(machine: Machine, node: ast.Lambda) -> Value:
    return Func(node, machine.at.file, machine.at.scope)


def _walrus(machine: Machine, node: ast.NamedExpr) -> Value:
    value = evaluate(machine, node.value)
    machine.at.scope.variables[node.target.id] = value
    return value


def _through(machine: Machine, node: Any) -> Value:
    value = evaluate(machine, node.value) if node.value is not None else Const(None)
    frame = machine.at.stack[-1]
    if isinstance(node, ast.Yield) and frame.inside is not None:
        inside, frame.inside = frame.inside, None
        inside(value)
    return UNKNOWN


HANDLERS: dict[type[ast.expr], Callable[[Machine, Any], Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _bool,
    ast.Compare: operations.compare,
    ast.IfExp: _conditional,
    ast.Tuple: _sequence,
    ast.List: _sequence,
    ast.Set: _sequence,
    ast.Dict: _dict,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.JoinedStr: _joined,
    ast.Subscript: operations.subscript,
    ast.Call: calls.call,
    ast.Lambda: _lambda,
    ast.NamedExpr: _walrus,
    ast.Await: _through,
    ast.Yield: _through,
    ast.YieldFrom: _through,
    ast.Starred: _through,
}
