"""What a function's parameters hold: the arguments, else the defaults, else what annotations and use tell."""

import ast
from dataclasses import replace

from onegraph.check.constructs import last_name
from onegraph.check.source.machine import Machine
from onegraph.check.source.state import Position
from onegraph.check.source.values import (
    UNKNOWN,
    Class,
    Const,
    Dict,
    Func,
    Keywords,
    Method,
    Obj,
    Partial,
    Plain,
    Seq,
    Super,
    Tensor,
    Unknown,
    Value,
)
from onegraph.check.tables import TENSOR_METHODS

TENSOR_NAMES = frozenset(
    ["Tensor", "FloatTensor", "LongTensor", "IntTensor", "BoolTensor", "HalfTensor", "BFloat16Tensor"]
)

PLAIN_NAMES = frozenset(["int", "float", "bool", "str", "bytes"])


def fill(machine: Machine, func: Func, args: list[Value], keywords: Keywords, variables: dict[str, Value]) -> None:
    """Bind the parameters of a call."""
    node = func.node
    spec = node.args
    given = [func.receiver, *args] if func.receiver is not None else list(args)
    positional = [*spec.posonlyargs, *spec.args]
    defaults: dict[str, ast.expr] = {}
    for parameter, default in zip(reversed(positional), reversed(spec.defaults), strict=False):
        defaults[parameter.arg] = default
    for parameter, kw_default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if kw_default is not None:
            defaults[parameter.arg] = kw_default
    for i, parameter in enumerate(positional):
        if i < len(given):
            variables[parameter.arg] = refine(machine.at, parameter, given[i])
    taken = {p.arg for p in positional[: len(given)]}
    for parameter in [*positional, *spec.kwonlyargs]:
        if parameter.arg in taken:
            continue
        if parameter.arg in keywords:
            variables[parameter.arg] = refine(machine.at, parameter, keywords[parameter.arg])
        elif parameter.arg in defaults:
            variables[parameter.arg] = _default(machine, func, defaults[parameter.arg])
        else:
            variables[parameter.arg] = refine(machine.at, parameter, UNKNOWN)
    if spec.vararg is not None:
        rest = tuple(v for v in given[len(positional) :] if v is not None)
        variables[spec.vararg.arg] = Seq("tuple", rest if len(given) >= len(positional) else None, in_step=True)
    if spec.kwarg is not None:
        known = {p.arg for p in [*positional, *spec.kwonlyargs]}
        rest_keywords = tuple((k, v) for k, v in keywords.items() if k not in known)
        variables[spec.kwarg.arg] = Dict(rest_keywords or None, in_step=True)
    if func.owner is not None:
        variables["__class__"] = func.owner


def _default(machine: Machine, func: Func, node: ast.expr) -> Value:
    if isinstance(node, ast.Constant):
        return Const(node.value)
    call = machine.at.stack[-1]
    scope, call.scope = call.scope, func.scope
    machine.at.quiet += 1
    try:
        return machine.evaluate(node)
    finally:
        machine.at.quiet -= 1
        call.scope = scope


def refine(at: Position, parameter: ast.arg, value: Value | None) -> Value:
    """The argument, or what the annotation tells where the argument is not known."""
    if value is None:
        return UNKNOWN
    if isinstance(value, Unknown) and parameter.annotation is not None:
        return annotated(at, parameter.annotation)
    return value


def annotated(at: Position, node: ast.expr | None) -> Value:
    """What an annotation says. A tensor is presumed on the device only where the machine presumes at all."""
    if node is None:
        return UNKNOWN
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return annotated(at, ast.parse(node.value, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError):
            return UNKNOWN
    last = last_name(node)
    if last in TENSOR_NAMES:
        return Tensor("cuda" if at.presume else "", sure=False)
    if last in PLAIN_NAMES:
        return Plain(last)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(at, [node.left, node.right])
    if isinstance(node, ast.Subscript):
        name = last_name(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Optional":
            return _union(at, [*inner, ast.Constant(None)])
        if name == "Union":
            return _union(at, list(inner))
        if name in ("list", "List", "Sequence"):
            return Seq("list", None, annotated(at, inner[0]))
        if name in ("tuple", "Tuple") and not any(isinstance(i, ast.Constant) for i in inner):
            return Seq("tuple", tuple(annotated(at, i) for i in inner))
    return UNKNOWN


def _union(at: Position, parts: list[ast.expr]) -> Value:
    none = any(isinstance(p, ast.Constant) and p.value is None for p in parts)
    rest = [p for p in parts if not (isinstance(p, ast.Constant) and p.value is None)]
    if len(rest) != 1:
        return UNKNOWN
    value = annotated(at, rest[0])
    if isinstance(value, Tensor):
        return replace(value, optional=none)
    return UNKNOWN if none else value


def presumed(
    at: Position,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    *,
    bound: bool = True,
    used: frozenset[str] = TENSOR_METHODS,
) -> list[Value]:
    """Arguments of a function that nobody calls in sight: annotations, else use as a tensor.

    Args:
        bound: the first parameter is the receiver. used: methods and attributes that tell a tensor.
    """
    positional = [*node.args.posonlyargs, *node.args.args][bound:]
    optional = len(positional) - len(node.args.defaults)
    bare = any(p.annotation is None for p in positional)
    tensors = _used_as_tensors(node, used) if bare else set()
    values: list[Value] = []
    for i, parameter in enumerate(positional):
        value = annotated(at, parameter.annotation)
        if isinstance(value, Unknown) and parameter.annotation is None and parameter.arg in tensors:
            value = Tensor("cuda", sure=False, optional=i >= optional)
        elif isinstance(value, Tensor) and i >= optional:
            value = Tensor("cuda", sure=False, optional=True)
        values.append(value)
    return values


def _used_as_tensors(node: ast.AST, used: frozenset[str]) -> set[str]:
    return {
        inner.value.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and inner.attr in used and isinstance(inner.value, ast.Name)
    }


def signature(args: list[Value], keywords: Keywords) -> tuple:
    """What two calls must share for one reading to stand for both: the kinds of the arguments, not their storages."""
    return (*map(_kind, args), *((k, _kind(v)) for k, v in sorted(keywords.items())))


def _kind(value: Value) -> object:
    match value:
        case Tensor():
            return (value.device, value.sure, value.pinned, value.boolean, value.rank, value.varying, value.optional)
        case Obj() | Func() | Class():
            return id(value)
        case Seq():
            items = value.items if value.items is not None else (value.element,)
            return ("seq", value.kind, value.items is None, *map(_kind, items[:8]))
        case Dict():
            return ("dict", *((str(k), _kind(v)) for k, v in (value.entries or ())[:8]))
        case Const():
            return ("const", repr(value.value)[:40])
    return value if not isinstance(value, Method | Partial | Super) else type(value).__name__
