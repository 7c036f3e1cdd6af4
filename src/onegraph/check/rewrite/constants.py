"""A tensor of numbers that stand in the code, made anew in each step: made once, where the step is built."""

import ast
from collections.abc import Iterator

from onegraph.check import constructs
from onegraph.check.constructs import Spot, last_name
from onegraph.check.rewrite.text import Edit, Text

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_ONLY_READS = frozenset(
    ["add", "bucketize", "clamp", "copy_", "div", "gather", "index_add_", "index_copy_", "index_fill_", "index_select",
     "isin", "masked_fill", "masked_fill_", "matmul", "maximum", "minimum", "mul", "scatter_", "scatter_add_",
     "searchsorted", "sub", "take", "where"]
)  # fmt: skip
"""Calls whose result is no view of an argument: of what they are called on some are, which is not asked here."""


def hoisted(file: Text, spot: Spot) -> Iterator[tuple[tuple[Edit, ...], bool]]:
    """Edits that move the constant at a place to where the step is built, and whether they are right without a run."""
    found = _tensor(spot) or _listed(spot)
    if found is None:
        return
    node, device = found
    if not _only_read(spot, node):
        return
    builds = _builder(file, spot)
    if builds is None:
        return
    where, own, module = builds
    name = _free_name(file, spot, node)
    value = file.of(node)
    if isinstance(node, ast.List):
        device = "" if module else _one_device(spot)
        if not device and not module:
            return
        where_to = f', device="{device}"' if device else ""
        value = f"torch.tensor({value}{where_to})"
    elif not device:
        return
    if module:
        line = f'self.register_buffer("{name}", {value}, persistent=False)'
    else:
        line = f"{'self.' if own else ''}{name} = {value}"
    insert = file.line_after(where, line) if own else file.line_before(where, line)
    yield (insert, file.replaced(node, f"{'self.' if own else ''}{name}")), isinstance(node, ast.Call)


def _tensor(spot: Spot) -> tuple[ast.expr, str] | None:
    """torch.tensor([...], device="cuda"), or what `.to("cuda")` or `.cuda()` makes of it, with its device."""
    at = next(
        (
            i
            for i, n in enumerate(spot.nodes)
            if isinstance(n, ast.Call) and constructs.dotted(n.func) == "torch.tensor"
        ),
        None,
    )
    if at is None:
        return None
    call = spot.nodes[at]
    assert isinstance(call, ast.Call)
    plain = len(call.args) == 1 and _of_numbers(call.args[0])
    if not plain or any(k.arg not in ("dtype", "device") or not _fixed(k.value) for k in call.keywords):
        return None
    device = next((k.value.value for k in call.keywords if k.arg == "device" and isinstance(k.value, ast.Constant)), "")
    around = spot.nodes[at + 2] if at + 2 < len(spot.nodes) and isinstance(spot.nodes[at + 1], ast.Attribute) else None
    if not device and isinstance(around, ast.Call) and around.func is spot.nodes[at + 1] and not around.keywords:
        name, given = last_name(around.func), around.args
        if name == "cuda" and not given:
            return around, "cuda"
        if name == "to" and len(given) == 1 and isinstance(given[0], ast.Constant):
            return around, str(given[0].value)
    return (call, str(device)) if device else None


def _listed(spot: Spot) -> tuple[ast.expr, str] | None:
    """[0, 2] of x[[0, 2]]."""
    for node in spot.nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.List):
            numbers = all(type(getattr(n, "value", None)) is int or _number(n) for n in node.slice.elts)
            return (node.slice, "") if numbers and node.slice.elts else None
    return None


def _number(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _of_numbers(node: ast.AST) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(_of_numbers(item) for item in node.elts)
    return _number(node)


def _fixed(node: ast.AST) -> bool:
    """A string, or a name of torch's (torch.int64)."""
    return isinstance(node, ast.Constant) or constructs.dotted(node).startswith("torch.")


def _only_read(spot: Spot, node: ast.expr) -> bool:
    """Whether nobody can write the tensor or keep it: it is an operand, an index, an argument of an op."""
    at = spot.nodes.index(node) if node in spot.nodes else -1
    if isinstance(node, ast.List):
        return True  # an index
    parent = spot.nodes[at + 1] if at + 1 < len(spot.nodes) else None
    if _reads(node, parent):
        return True
    if not (isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name)):
        return False
    name, function = parent.targets[0].id, constructs.function_of(spot.module, parent)
    parents = {id(child): n for n in ast.walk(function) for child in ast.iter_child_nodes(n)}
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name and n is not parent.targets[0]]
    return bool(uses) and all(isinstance(n.ctx, ast.Load) and _reads(n, parents.get(id(n))) for n in uses)


def _reads(node: ast.AST, parent: ast.AST | None) -> bool:
    match parent:
        case ast.BinOp() | ast.Compare() | ast.UnaryOp():
            return True
        case ast.AugAssign():
            return parent.value is node
        case ast.Subscript():
            return parent.slice is node
        case ast.Call():
            return last_name(parent.func) in _ONLY_READS and any(a is node for a in parent.args)
    return False


def _builder(file: Text, spot: Spot) -> tuple[ast.stmt, bool, bool] | None:
    """Where the step is built: (a statement, whether that is the last one of `__init__`, whether of a module).

    The statement in a function that holds the step's function, before which the constant goes; or the last statement of
    the `__init__` of the step's class.
    """
    owners = [n for n in ast.walk(spot.module) if isinstance(n, _Definition) and _holds(n, spot.statement)]
    owners.sort(key=lambda n: (n.lineno, n.col_offset))
    function = next((i for i in reversed(range(len(owners))) if isinstance(owners[i], constructs.Functions)), None)
    if spot.inside(ast.Lambda):
        inside = owners[-1] if owners and isinstance(owners[-1], ast.FunctionDef) else None
        return (spot.statement, False, False) if inside is not None and isinstance(spot.statement, ast.stmt) else None
    if not function:
        return None
    step, outer = owners[function], owners[function - 1]
    if isinstance(outer, ast.FunctionDef) and step in outer.body and isinstance(step, ast.stmt):
        return step, False, False
    if not isinstance(outer, ast.ClassDef) or getattr(step, "decorator_list", None):
        return None
    init = next((n for n in outer.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is None or init is step or any(isinstance(n, ast.Return) for n in ast.walk(init)):
        return None
    if not (init.args.args and init.args.args[0].arg == "self" and _first_argument(step) == "self"):
        return None
    return init.body[-1], True, any(last_name(base) == "Module" for base in outer.bases)


def _first_argument(function: ast.AST) -> str:
    arguments = getattr(function, "args", None)
    return arguments.args[0].arg if arguments is not None and arguments.args else ""


def _holds(node: ast.AST, statement: ast.AST) -> bool:
    return node is not statement and any(n is statement for n in ast.walk(node))


def _one_device(spot: Spot) -> str:
    """The device that the definition around the place names, if it names one only."""
    named = {
        k.value.value
        for call in ast.walk(spot.home)
        if isinstance(call, ast.Call)
        for k in call.keywords
        if k.arg == "device" and isinstance(k.value, ast.Constant) and isinstance(k.value.value, str)
    }
    return named.pop() if len(named) == 1 else ""


def _free_name(file: Text, spot: Spot, node: ast.expr) -> str:
    """The name that the step gives the constant, or `constant`, with a number where the file uses it."""
    statement = spot.statement
    target = statement.targets[0] if isinstance(statement, ast.Assign) and statement.value is node else None
    stem = f"{target.id}_constant" if isinstance(target, ast.Name) else "constant"
    used = {n.id for n in ast.walk(file.tree) if isinstance(n, ast.Name)}
    used |= {n.attr for n in ast.walk(file.tree) if isinstance(n, ast.Attribute)}
    used |= {n.arg for n in ast.walk(file.tree) if isinstance(n, ast.arg)}
    used |= {n.value for n in ast.walk(file.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return next(name for i in range(1000) if (name := stem + (f"_{i}" if i else "")) not in used)
