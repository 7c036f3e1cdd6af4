"""The rewrites that need no judgement: each gives the edits for a finding, or nothing where it is not sure.

A rewrite may be offered in several forms: the one that leaves the results as they are is taken (`verify`). What only a
run can tell, a shape or that an index is a tensor, makes it `by_running`: it is offered where the step is simulated.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onegraph.check import constructs
from onegraph.check.constructs import Spot, last_name
from onegraph.check.report import Finding
from onegraph.check.rewrite.constants import hoisted
from onegraph.check.rewrite.text import Edit, Text

CAPTURABLE = frozenset(["ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"])
"""Optimizers of torch that take `capturable`."""

_KEEPS_WIDTH = frozenset(["to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous"])
_ELEMENTWISE = frozenset(["isnan", "isinf", "isfinite", "isposinf", "isneginf"])


@dataclass(frozen=True)
class Rewrite:
    """Edits of the finding's file. `by_running`: only a simulated run can tell that it is right. `rounded`:
    it computes the same with other roundings."""

    finding: Finding
    edits: tuple[Edit, ...]
    by_running: bool = True
    rounded: bool = False


def offered(finding: Finding, file: Text) -> list[Rewrite]:
    """Every form in which the finding could be rewritten, the best first."""
    spot = constructs.within(file.text, finding.line, finding.column)
    if spot is None:
        return []
    return [rewrite for make in MAKERS.get(finding.code, ()) for rewrite in make(finding, file, spot)]


def _constant(finding: Finding, file: Text, spot: Spot) -> Iterator[Rewrite]:
    for edits, sure in hoisted(file, spot):
        yield Rewrite(finding, edits, by_running=not sure)


def _one_hot(finding: Finding, file: Text, spot: Spot) -> Iterator[Rewrite]:
    """one_hot(ids) @ table: the product has a result only where the width is the table's."""
    for i, node in enumerate(spot.nodes):
        if not (isinstance(node, ast.Call) and last_name(node.func) == "one_hot"):
            continue
        if len(node.args) != 1 or node.keywords:
            return
        at = i
        while at + 1 < len(spot.nodes) and _is_receiver(spot.nodes[at], spot.nodes[at + 1], spot.nodes):
            at += 1
        table = _right_factor(spot.nodes[at], spot.nodes[at + 1] if at + 1 < len(spot.nodes) else None)
        if table is not None and constructs.dotted(table):
            width = f", num_classes={file.of(table)}.shape[-2:][0]"  # of a vector its length, else its rows
            yield Rewrite(finding, (file.after(node.args[0], width),))
        return


def _is_receiver(inner: ast.AST, outer: ast.AST, nodes: tuple[ast.AST, ...]) -> bool:
    """Whether `outer` converts `inner` and leaves its shape: `inner.float`, or the call of that."""
    if isinstance(outer, ast.Attribute):
        return outer.value is inner and outer.attr in _KEEPS_WIDTH
    return isinstance(outer, ast.Call) and outer.func is inner and isinstance(inner, ast.Attribute)


def _right_factor(node: ast.AST, parent: ast.AST | None) -> ast.expr | None:
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.MatMult) and parent.left is node:
        return parent.right
    product = isinstance(parent, ast.Call) and last_name(parent.func) == "matmul" and len(parent.args) == 2
    if isinstance(parent, ast.Call) and product and parent.args[0] is node:
        return parent.args[1]
    return None


def _assigned(spot: Spot) -> tuple[ast.Assign, ast.Subscript] | None:
    """`owner[index] = value`, the statement, with one simple index."""
    statement = spot.statement
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return None
    target = statement.targets[0]
    if not isinstance(target, ast.Subscript) or isinstance(target.slice, ast.Slice | ast.Tuple | ast.List):
        return None
    return statement, target


def _number(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _read_on_host(index: ast.expr) -> ast.expr:
    """The tensor in `index.item()` and `int(index)`; otherwise the index itself."""
    if isinstance(index, ast.Call) and last_name(index.func) == "item" and isinstance(index.func, ast.Attribute):
        return index.func.value if not index.args else index
    if isinstance(index, ast.Call) and last_name(index.func) == "int" and len(index.args) == 1:
        return _read_on_host(index.args[0])
    return index


def _primary(file: Text, node: ast.expr) -> str:
    """The source of an expression as what `.name` or `[...]` can follow."""
    plain = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return file.of(node) if plain else f"({file.of(node)})"


def _index_write(finding: Finding, file: Text, spot: Spot) -> Iterator[Rewrite]:
    """x[i] = number, x[i] = tensor: no number goes to the device or comes from it."""
    found = _assigned(spot)
    if found is None:
        return
    statement, target = found
    owner, index = _primary(file, target.value), _read_on_host(target.slice)
    if _number(statement.value):
        number = file.of(statement.value)
        if not isinstance(index, ast.Constant):
            fill = f"{owner}.index_fill_(0, {_primary(file, index)}.reshape(-1), {number})"
            yield Rewrite(finding, (file.replaced(statement, fill),))
    elif finding.code == "CG101" and not isinstance(index, ast.Constant):
        yield Rewrite(finding, (file.replaced(target.slice, f"{_primary(file, index)}.reshape(1)"),))


def _index_read(finding: Finding, file: Text, spot: Spot) -> Iterator[Rewrite]:
    """x[i] in arithmetic, which makes a new tensor of it."""
    for node, parent in zip(spot.nodes, spot.nodes[1:], strict=False):
        if not (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)):
            continue
        plain = not isinstance(node.slice, ast.Slice | ast.Tuple | ast.Constant | ast.List)
        if plain and isinstance(parent, ast.BinOp):
            index = _primary(file, _read_on_host(node.slice))
            yield Rewrite(finding, (file.replaced(node, f"{_primary(file, node.value)}[{index}.reshape(1)][0]"),))
        return


def _mask(finding: Finding, file: Text, spot: Spot) -> Iterator[Rewrite]:
    """x[x > 0] = value and x[x > 0] *= number, where the mask has the shape of x."""
    statement = spot.statement
    if not isinstance(statement, ast.Assign | ast.AugAssign):
        return
    target = statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0]
    if not isinstance(target, ast.Subscript) or not constructs.dotted(target.value):
        return
    owner, mask = file.of(target.value), target.slice
    made = constructs.bindings(spot, mask.id) if isinstance(mask, ast.Name) else [mask]
    if len(made) != 1 or not _of_its_shape(made[0], owner):
        return
    if isinstance(mask, ast.Name) and len(constructs.bindings(spot, last_name(target.value))) > 1:
        return  # it may be another tensor by now
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        value = file.of(statement.value)
        if _number(statement.value):
            text = f"{owner}.masked_fill_({file.of(mask)}, {value})"
        elif _imports_torch(file):  # masked_fill_ reads a tensor's value on the host
            text = f"{owner}.copy_(torch.where({file.of(mask)}, {value}, {owner}))"
        else:
            return
        yield Rewrite(finding, (file.replaced(statement, text),))
    elif isinstance(statement, ast.AugAssign) and _number(statement.value) and _imports_torch(file):
        sign = file.text[file.end(target) : file.begin(statement.value)].strip().removesuffix("=")
        text = f"{owner}.copy_(torch.where({file.of(mask)}, {owner} {sign} {file.of(statement.value)}, {owner}))"
        yield Rewrite(finding, (file.replaced(statement, text),))


def _of_its_shape(mask: ast.expr, owner: str) -> bool:
    match mask:
        case ast.Compare(left=left, comparators=[right]):
            sides = [constructs.dotted(side) == owner or _number(side) for side in (left, right)]
            return all(sides) and owner in (constructs.dotted(left), constructs.dotted(right))
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return _of_its_shape(operand, owner)
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
            return _of_its_shape(left, owner) and _of_its_shape(right, owner)
        case ast.Call(func=ast.Attribute(attr=name, value=value), args=args) if name in _ELEMENTWISE:
            return constructs.dotted(args[0] if args else value) == owner
    return False


def _imports_torch(file: Text) -> bool:
    return any(isinstance(n, ast.Import) and any(a.name == "torch" for a in n.names) for n in file.tree.body)


def _pinned(finding: Finding, file: Text, spot: Spot) -> Iterator[Rewrite]:
    """A host tensor, bound once and used for copies alone: pinned where it is made, copied without waiting."""
    for name, call in spot.calls():
        if name not in ("to", "cuda", "copy_") or not isinstance(call.func, ast.Attribute):
            continue
        source = call.args[0] if name == "copy_" and call.args else call.func.value
        made = constructs.bindings(spot, last_name(source)) if constructs.dotted(source) else []
        settled = any(k.arg == "non_blocking" for k in call.keywords)
        if settled or len(made) != 1 or not isinstance(made[0], ast.Call) or not _only_copied(spot, source):
            return
        waits = f"{', ' if call.args or call.keywords else ''}non_blocking=True)"
        edits = [Edit(file.end(call) - 1, file.end(call), waits)]
        if "pin_memory" not in ast.dump(made[0]):
            edits.append(file.after(made[0], ".pin_memory()"))
        yield Rewrite(finding, tuple(edits))
        return


def _only_copied(spot: Spot, source: ast.AST) -> bool:
    """Whether every use of the name in the definition around the place is the receiver of `to` or source of `copy_`."""
    name, allowed = last_name(source), set()
    for call in ast.walk(spot.home):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if call.func.attr in ("to", "cuda"):
                allowed.add(id(call.func.value))
            elif call.func.attr == "copy_" and call.args:
                allowed.add(id(call.args[0]))
    uses = [n for n in ast.walk(spot.home) if isinstance(n, ast.Name | ast.Attribute) and last_name(n) == name]
    return all(id(n) in allowed for n in uses if isinstance(n.ctx, ast.Load))


def _capturable(finding: Finding, file: Text, spot: Spot) -> Iterator[Rewrite]:
    for name, call in spot.calls():
        if name != "step" or not isinstance(call.func, ast.Attribute):
            continue
        made = constructs.bindings(spot, last_name(call.func.value)) if constructs.dotted(call.func.value) else []
        if len(made) == 1 and isinstance(made[0], ast.Call) and last_name(made[0].func) in CAPTURABLE:
            given = [*made[0].args, *(k.value for k in made[0].keywords)]
            if given and not any(k.arg in ("capturable", None) for k in made[0].keywords):
                last = max(given, key=file.end)
                yield Rewrite(finding, (file.after(last, ", capturable=True"),), by_running=False, rounded=True)
        return


MAKERS: dict[str, tuple[Callable[[Finding, Text, Spot], Iterator[Rewrite]], ...]] = {
    "CG101": (_one_hot, _index_write, _index_read),
    "CG102": (_constant, _pinned),
    "CG103": (_constant, _index_write),
    "CG104": (_one_hot, _mask),
    "CG202": (_capturable,),
    "CG203": (_capturable,),
}
