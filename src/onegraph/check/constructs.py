"""Which construct of the code a finding stands at: a slice bound, a branch, a print, recognised in the syntax tree.

Standard library only. A value that is bound to a name is followed to what the function does with that name.
"""

import ast
import functools
import linecache
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from onegraph.check import entropy, tables

_DEEPEST = 3
"""Names followed one into the other: `n = t.item(); m = n + 1; x[:m]`."""

Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

Placed = ast.stmt | ast.expr | ast.excepthandler | ast.arg | ast.keyword | ast.alias | ast.pattern
"""Nodes that have a place in the file."""


@dataclass(frozen=True)
class Spot:
    """A place in a file: the nodes around it, innermost first, up to its statement. code: of the finding there."""

    module: ast.Module
    nodes: tuple[Placed, ...]
    code: str = ""

    @property
    def statement(self) -> Placed:
        return self.nodes[-1]

    @property
    def home(self) -> ast.AST:
        """The definition at the top level of the file that holds the place."""
        line = self.statement.lineno
        return next((n for n in self.module.body if n.lineno <= line <= (n.end_lineno or 0)), self.module)

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Calls around the place with the last part of their names."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                yield last_name(node.func), node

    def inside(self, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> bool:
        return any(isinstance(node, kind) for node in self.nodes)

    def below(self, parent: ast.AST, *fields: str) -> bool:
        """Whether the place lies in one of these fields of a node around it."""
        held = {id(child) for name in fields for child in _listed(getattr(parent, name, None))}
        return any(id(node) in held for node in self.nodes)


def found(constructs: tuple[str, ...], code: str, path: str, line: int, column: int) -> str:
    """The first of `constructs` that stands at a place (line and column from 1); "" where none does."""
    linecache.checkcache(path)
    spot = within("".join(linecache.getlines(path)), line, column)
    return _first(constructs, replace(spot, code=code), _DEEPEST) if spot is not None else ""


def within(text: str, line: int, column: int) -> Spot | None:
    """The nodes at a place of a file's text; None where that is no Python or has no code there."""
    module, lines = parsed(text), text.splitlines(keepends=True)
    if module is None or not 0 < line <= len(lines):
        return None
    offset = len(lines[line - 1][: column - 1].encode())  # the tree counts bytes
    nodes = list(_around(module, (line, offset)))
    statement = max((i for i, node in enumerate(nodes) if isinstance(node, ast.stmt)), default=None)
    return Spot(module, tuple(reversed(nodes[statement:]))) if statement is not None else None


@functools.lru_cache(maxsize=64)
def tree_of(text: str) -> ast.Module:
    """The tree of a file's text, the same one for every reader. Raises what `ast.parse` raises."""
    return ast.parse(text)


def parsed(text: str) -> ast.Module | None:
    """The same; None where it is no Python."""
    try:
        return tree_of(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=64)
def walked(root: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes of a tree in the order of `ast.walk`, which takes longer for a file than a small step to simulate."""
    return tuple(ast.walk(root))


def _around(node: ast.AST, position: tuple[int, int]) -> Iterator[Placed]:
    """Nodes that hold a position, outermost first."""
    inner: ast.AST | None = node
    while inner is not None:
        if isinstance(inner, Placed):
            yield inner
        inner = next((child for child in _placed(inner) if _holds(child, position)), None)


def _placed(node: ast.AST) -> Iterator[Placed]:
    """Children that have a place; of those that have none (arguments, comprehensions), theirs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Placed):
            yield child
        else:
            yield from _placed(child)


def _holds(node: Placed, position: tuple[int, int]) -> bool:
    return (node.lineno, node.col_offset) <= position < end_of(node)


def end_of(node: Placed) -> tuple[int, int]:
    """Line and column behind a node; those of its begin where its maker left them out, which a parser never does."""
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def last_name(node: ast.AST) -> str:
    """`zeros` of `torch.zeros`; "" of what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """`torch.cuda.graph`; "" of what is no chain of names."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def bindings(spot: Spot, name: str) -> list[ast.expr]:
    """Every value bound to a name or an attribute called `name`: around the place, else in the file."""
    return _bound(spot.home).get(name) or _bound(spot.module).get(name, []) if name else []


@functools.lru_cache(maxsize=256)
def _bound(root: ast.AST) -> dict[str, list[ast.expr]]:
    """What a tree binds to names and attributes, by the last part of their names, in the order of `walked`."""
    values: dict[str, list[ast.expr]] = {}
    for node in walked(root):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in {last_name(target) for target in targets}:
                values.setdefault(name, []).append(node.value)
    return values


def own_nodes(roots: Iterable[ast.AST], inner: Any = Functions | ast.ClassDef) -> Iterator[ast.AST]:
    """Nodes from `roots` down, without what is inside of the functions and classes (`inner`) among them."""
    queue = list(roots)
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, inner):
            queue.extend(ast.iter_child_nodes(node))


def targets(node: ast.expr) -> list[ast.expr]:
    """What an assignment to this binds, one by one: `a` and `b.c` of `a, *b.c`."""
    if isinstance(node, ast.Tuple | ast.List):
        return [target for item in node.elts for target in targets(item)]
    return [node.value] if isinstance(node, ast.Starred) else [node]


def function_around(module: ast.AST, first: int, last: int, kinds: Any = Functions) -> ast.AST | None:
    """The innermost function that holds both lines."""
    low, high = min(first, last), max(first, last)
    around = [n for n in walked(module) if isinstance(n, kinds) and n.lineno <= low and high <= (n.end_lineno or 0)]
    return around[-1] if around else None


def function_of(module: ast.Module, node: Placed) -> ast.AST:
    """The innermost function around a node, or the file."""
    around = [n for n in _around(module, (node.lineno, node.col_offset)) if isinstance(n, Functions)]
    return around[-1] if around else module


def _first(constructs: tuple[str, ...], spot: Spot, depth: int) -> str:
    here = next((c for c in constructs if c and TESTS[c](spot)), "")
    if here or not depth:
        return here
    uses = [_first(constructs, use, depth - 1) for use in _uses(spot)]
    return min((u for u in uses if u), key=constructs.index, default="")


def _uses(spot: Spot) -> Iterator[Spot]:
    """Where the function reads the name that the statement binds to the value."""
    statement = spot.statement
    if not (isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets)):
        return
    names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if spot.below(statement, "targets"):
        return
    for node in ast.walk(function_of(spot.module, statement)):
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
            nodes = list(_around(spot.module, (node.lineno, node.col_offset)))
            start = max(i for i, n in enumerate(nodes) if isinstance(n, ast.stmt))
            yield replace(spot, nodes=tuple(reversed(nodes[start:])))


# ---- what each construct looks like

_LOGS = {"print", "debug", "info", "warning", "error", "critical", "exception", "log", "pprint", "add_scalar", "write"}
_REDUCTIONS = {"max", "min", "sum", "any", "all", "sorted", "list", "tuple", "set"}


def _called(*names: str) -> Callable[[Spot], bool]:
    return lambda spot: any(name in names for name, _ in spot.calls())


def _logged(spot: Spot) -> bool:
    logs = any(n in _LOGS and (isinstance(c.func, ast.Name) or n != "write") for n, c in spot.calls())
    return logs or spot.inside((ast.JoinedStr, ast.FormattedValue))


def _header(kinds: type[ast.AST] | tuple[type[ast.AST], ...], *fields: str) -> Callable[[Spot], bool]:
    """In the test of a branch, the iterable of a loop."""
    return lambda spot: any(isinstance(n, kinds) and spot.below(n, *fields) for n in spot.nodes)


def _loop(spot: Spot) -> bool:
    if isinstance(spot.statement, ast.For) and (len(spot.nodes) == 1 or spot.below(spot.statement, "iter")):
        return True
    return any(name == "range" for name, _ in spot.calls())


def _subscript(*, write: bool, sliced: bool) -> Callable[[Spot], bool]:
    def test(spot: Spot) -> bool:
        for node in spot.nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) == write:
                parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                bounds = any(isinstance(p, ast.Slice) and (_moves(p.lower) or _moves(p.upper)) for p in parts)
                single = any(not isinstance(p, ast.Slice | ast.Constant) for p in parts)
                if bounds if sliced else single:
                    return True
        return False

    return test


def _moves(bound: ast.expr | None) -> bool:
    return bound is not None and not isinstance(bound, ast.Constant)


def _list_index(spot: Spot) -> bool:
    """The index of a Python list: for CG103 a list as index, else a list of tensors that is indexed."""
    for node in spot.nodes:
        if not isinstance(node, ast.Subscript):
            continue
        if spot.code == "CG103":
            return isinstance(node.slice, ast.List) or any(
                isinstance(value, ast.List) for value in bindings(spot, last_name(node.slice))
            )
        for value in [node.value, *bindings(spot, last_name(node.value))]:
            if isinstance(value, ast.List | ast.ListComp | ast.Tuple):
                return True
            if isinstance(value, ast.Call) and last_name(value.func) in (
                "list",
                "tuple",
                "ModuleList",
                "ParameterList",
            ):
                return True
    return False


def _write(spot: Spot) -> bool:
    return any(isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) for n in spot.nodes) or (
        isinstance(spot.statement, ast.Assign)
        and any(isinstance(target, ast.Subscript) for target in spot.statement.targets)
    )


def _nonfinite(spot: Spot) -> bool:
    return any(k.arg == "error_if_nonfinite" for name, call in spot.calls() for k in call.keywords if "clip" in name)


def _scaler(spot: Spot) -> bool:
    """`scaler.step(optimizer)`: a step of something that is given what it steps."""
    return any(name == "step" and call.args and _is_made_by(spot, call, "GradScaler") for name, call in spot.calls())


def _optimizer(spot: Spot) -> bool:
    return any(
        name == "step" and (not call.args or _is_made_by(spot, call, "GradScaler"))
        and isinstance(call.func, ast.Attribute)
        for name, call in spot.calls()
    )  # fmt: skip


def _learning_rate(spot: Spot) -> bool:
    """A step of an optimizer that has no `capturable`, or has it set: what changes in it is the learning rate."""
    for name, call in spot.calls():
        if name != "step" or not isinstance(call.func, ast.Attribute):
            continue
        made = [v for v in bindings(spot, last_name(call.func.value)) if isinstance(v, ast.Call)]
        if any(last_name(v.func) == "SGD" or any(k.arg == "capturable" for k in v.keywords) for v in made):
            return True
    return False


def _fill_value(spot: Spot) -> bool:
    """`torch.full(shape, value)`, of which the value is no constant."""
    for name, call in spot.calls():
        if name in ("full", "full_like", "new_full", "fill_"):
            given = [*call.args[name != "fill_" :][:1], *(k.value for k in call.keywords if k.arg == "fill_value")]
            return any(_moves(value) for value in given)
    return False


def _is_made_by(spot: Spot, call: ast.Call, maker: str) -> bool:
    owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    made = [v for v in bindings(spot, owner) if isinstance(v, ast.Call)]
    return any(last_name(v.func) == maker for v in made) or maker.lower().removeprefix("grad") in owner.lower()


def _literal(spot: Spot) -> bool:
    """A tensor made of numbers that stand in the code."""
    for name, call in spot.calls():
        if name in ("tensor", "as_tensor", "asarray") and call.args:
            return _constant(call.args[0])
    return False


def _constant(node: ast.AST) -> bool:
    return not any(isinstance(n, ast.Name | ast.Attribute | ast.Call) for n in ast.walk(node))


def _pinned(spot: Spot) -> bool:
    for name, call in spot.calls():
        if name in ("to", "cuda", "copy_") and isinstance(call.func, ast.Attribute):
            source = call.args[0] if name == "copy_" and call.args else call.func.value
            made = [source, *bindings(spot, last_name(source))]
            return any("pin_memory" in ast.dump(value) for value in made)
    return False


def _random(spot: Spot) -> bool:
    """A random number of the host's, in the statement or in what is bound to a name that it reads."""
    names = entropy.imported(walked(spot.module))
    parts = list(ast.walk(spot.statement))
    read = {n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = [value for name in read for value in bindings(spot, name)]
    return any(_draws(spot, names, node) for node in (*parts, *bound))


def _draws(spot: Spot, names: dict[str, str], node: ast.AST, depth: int = _DEEPEST) -> bool:
    """A call of a module that draws, or of a generator that such a one made."""
    if not isinstance(node, ast.Call):
        return False
    root, _, rest = dotted(node.func).partition(".")
    name = ".".join([names.get(root, root), *filter(None, [rest])])
    if entropy.draws(name):
        return not entropy.reads_clock(name)  # a device has no clock to draw from
    owner = last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return depth > 0 and any(_draws(spot, names, value, depth - 1) for value in bindings(spot, owner))


def _counter(spot: Spot) -> bool:
    """A number that the file counts up: at its `+=`, or where an op takes it."""
    if isinstance(spot.statement, ast.AugAssign):
        return True
    counted = {last_name(n.target) for n in ast.walk(spot.home) if isinstance(n, ast.AugAssign)}
    read = {last_name(n) for n in ast.walk(spot.statement) if isinstance(n, ast.Name | ast.Attribute)}
    return bool((counted - {""}) & read)


def _rebinding(spot: Spot) -> bool:
    """An attribute that is read here, or bound here, and bound to a new tensor by a method or function."""
    held = (ast.Attribute, ast.Subscript)
    bound = {
        last_name(t.value if isinstance(t, ast.Subscript) else t)
        for node in ast.walk(spot.home)
        if isinstance(node, ast.Assign)
        for target in node.targets
        for t in (target.elts if isinstance(target, ast.Tuple) else [target])
        if isinstance(t, held) or _outlives(spot.home, t)
    }
    read = {last_name(n) for n in ast.walk(spot.statement) if isinstance(n, ast.Name | ast.Attribute)}
    return bool((bound - {""}) & read)


def _outlives(home: ast.AST, target: ast.AST) -> bool:
    """Whether a plain name is one that a function declares global or nonlocal."""
    name = last_name(target)
    return any(isinstance(n, ast.Global | ast.Nonlocal) and name in n.names for n in ast.walk(home))


def _product(spot: Spot) -> bool:
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult) for n in spot.nodes) or _called(
        *tables.PRODUCTS
    )(spot)


def _waits(spot: Spot) -> bool:
    """`event.synchronize()`, `stream.synchronize()`; torch.cuda.synchronize() waits for the whole device."""
    return any(
        name == "synchronize" and not dotted(call.func).endswith("cuda.synchronize") for name, call in spot.calls()
    )


def _autocast(spot: Spot) -> bool:
    return any("autocast" in last_name(n) for n in ast.walk(spot.statement) if isinstance(n, ast.Attribute | ast.Name))


def _compile_mode(spot: Spot) -> bool:
    compiles = [n for n in ast.walk(spot.home) if isinstance(n, ast.Call) and last_name(n.func) == "compile"]
    own = {"reduce-overhead", "max-autotune"}
    modes = {k.value.value for c in compiles for k in c.keywords if isinstance(k.value, ast.Constant)}
    return bool(own & modes)


def _converted(spot: Spot) -> bool:
    return _called("numpy", "cpu", "tolist", "asarray", "array")(spot) or any(
        name == "to" and any(isinstance(a, ast.Constant) and a.value == "cpu" for a in call.args)
        for name, call in spot.calls()
    )


def _of_tensors(spot: Spot) -> bool:
    made = any(name in ("tensor", "as_tensor") and call.args for name, call in spot.calls())
    return made and not _literal(spot)


def _reduced(spot: Spot) -> bool:
    named = any(isinstance(call.func, ast.Name) and name in _REDUCTIONS for name, call in spot.calls())
    within = any(isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.In | ast.NotIn) for n in spot.nodes)
    return named or within


def _boolean(spot: Spot) -> bool:
    return any(
        isinstance(n, ast.BoolOp) or (isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not)) for n in spot.nodes
    )


def _mask_write(spot: Spot) -> bool:
    return any(
        isinstance(n, ast.Subscript) and (isinstance(n.ctx, ast.Store) or _target(spot.statement, n))
        for n in spot.nodes
    ) or _called("masked_scatter_", "index_put_")(spot)  # fmt: skip


def _target(statement: ast.AST, node: ast.AST) -> bool:
    return isinstance(statement, ast.AugAssign) and statement.target is node


def _launch(spot: Spot) -> bool:
    """In `kernel[grid](...)`, the grid or an argument, but not the index or bound of a tensor there."""
    for node, parent in zip(spot.nodes, (*spot.nodes[1:], None), strict=True):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            return _is_grid(spot, node.func.slice)
        if isinstance(node, ast.Subscript) and not (isinstance(parent, ast.Call) and parent.func is node):
            return False
    return False


def _is_grid(spot: Spot, index: ast.expr) -> bool:
    """A tuple or a function: other subscripts that are called are of lists of functions."""
    return any(isinstance(v, ast.Tuple | ast.List | ast.Lambda) for v in (index, *bindings(spot, last_name(index))))


_mask_read = _subscript(write=False, sliced=False)

TESTS: dict[str, Callable[[Spot], bool]] = {
    **{construct: _called(*names) for construct, names in tables.CALLS.items()},
    "print or log": _logged,
    "assert": lambda spot: isinstance(spot.statement, ast.Assert),
    "clip_grad_norm_": _nonfinite,
    "GradScaler": _scaler,
    "launch": _launch,
    "loop count": _loop,
    "branch": _header((ast.If, ast.While, ast.IfExp, ast.Match), "test", "subject"),
    "while": _header(ast.While, "test"),
    "and, or, not": _boolean,
    "fill value": _fill_value,
    "slice write": _subscript(write=True, sliced=True),
    "slice bound": _subscript(write=False, sliced=True),
    "list index": _list_index,
    "index write": _subscript(write=True, sliced=False),
    "index": _subscript(write=False, sliced=False),
    "write": _write,
    "size": _called(*tables.SIZED),
    "tensor of tensors": _of_tensors,
    "Python reduction": _reduced,
    "operand": lambda spot: spot.inside((ast.BinOp, ast.Compare, ast.AugAssign)),
    "return": lambda spot: isinstance(spot.statement, ast.Return),
    "numpy": _converted,
    "literal": _literal,
    "host data": _called(*tables.FROM_HOST, "FloatTensor", "LongTensor"),
    "pinned": _pinned,
    "mask write": _mask_write,
    "mask": lambda spot: _mask_read(spot) or _called("masked_select")(spot),
    "product": _product,
    "event or stream": _waits,
    "pinned allocation": lambda spot: "pin_memory" in ast.dump(spot.statement),
    "learning rate": _learning_rate,
    "optimizer": _optimizer,
    "random": _random,
    "counter": _counter,
    "rebinding": _rebinding,
    "cat": _called(*tables.CONCATS),
    "mode": _compile_mode,
    "hook": lambda spot: any("hook" in name for name, _ in spot.calls()),
    "autocast": _autocast,
    "declared": lambda spot: False,  # nothing of the text says so
    "kernel": _launch,
    "raise": lambda spot: isinstance(spot.statement, ast.Raise | ast.Assert),
    "refused values": lambda spot: False,  # this one and the next are seen in what runs, not in the text
    "replay": lambda spot: False,
}
"""How each construct that a rule's Fix names is recognised, given the place and the code of the finding."""
