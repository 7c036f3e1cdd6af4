"""Names, attributes and classes: what a name stands for, in the user's code and outside it."""

import ast
import builtins
from dataclasses import replace

from onegraph.check.constructs import last_name
from onegraph.check.source import entropy, tensors
from onegraph.check.source.files import SourceFile, bound_by
from onegraph.check.source.machine import Machine
from onegraph.check.source.state import Call, Knowledge
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
    Scope,
    Seq,
    Super,
    Tensor,
    Value,
)

BUILTINS = frozenset(dir(builtins))


def module_scope(known: Knowledge, file: SourceFile) -> Scope:
    scope = known.modules.get(file.path)
    if scope is None:
        scope = known.modules[file.path] = Scope(file)
    return scope


def lookup(machine: Machine, name: str) -> Value:
    """A name in the current scope, its enclosing ones, the module, the builtins."""
    owner = find_scope(machine.at.scope, name)
    if owner is not None:
        value = owner.variables[name]
        if machine.at.in_step and isinstance(value, Tensor) and not owner.in_step and owner is not machine.at.scope:
            machine.seen(("var", id(owner), name), value)
        return value
    value = module_name(machine, machine.at.scope.file, name)
    if value is UNKNOWN and name in BUILTINS and name not in machine.at.scope.file.names:
        return Ext("builtins." + name)
    return value


def find_scope(scope: Scope | None, name: str) -> Scope | None:
    while scope is not None:
        if name in scope.variables:
            return scope
        scope = scope.parent
    return None


def module_name(machine: Machine, file: SourceFile, name: str) -> Value:
    """A top-level name of a module, evaluated when first asked for."""
    scope = module_scope(machine.known, file)
    if name in scope.variables:
        value = scope.variables[name]
        if machine.at.in_step and isinstance(value, Tensor):
            machine.seen(("var", id(scope), name), value)
        return value
    statements = file.names.get(name)
    key = (file.path, name)
    if not statements or key in machine.known.resolving:
        return _star(machine, file, name) if not statements else UNKNOWN
    machine.known.resolving.add(key)
    try:
        with machine.at.aside(Call("<module>", file, statements[0], scope=scope)):
            value = _bound(machine, next((s for s in statements if not _is_none(s)), statements[0]), name)
    except RecursionError:
        value = UNKNOWN
    finally:
        machine.known.resolving.discard(key)
    scope.variables[name] = value
    return value


def _star(machine: Machine, file: SourceFile, name: str) -> Value:
    for statement in file.names.get("*", ()):
        if isinstance(statement, ast.ImportFrom):
            source = machine.known.project.module(absolute(file, statement), file)
            if source is not None and source is not file and name in source.names:
                return module_name(machine, source, name)
    return UNKNOWN


def _is_none(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Constant) and value.value is None


def _bound(machine: Machine, statement: ast.stmt, name: str) -> Value:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return imported(machine, statement, name)
    machine.block([statement])
    return machine.at.scope.variables.get(name, UNKNOWN)


def absolute(file: SourceFile, statement: ast.ImportFrom) -> str:
    """The dotted name of `from <this> import ...`."""
    if not statement.level:
        return statement.module or ""
    parts = file.module.split(".")
    keep = len(parts) - statement.level + (1 if file.is_package else 0)
    return ".".join([*parts[: max(keep, 0)], *([statement.module] if statement.module else [])])


def imported(machine: Machine, statement: ast.Import | ast.ImportFrom, name: str) -> Value:
    """What an import statement binds `name` to."""
    file = machine.at.file
    for alias in statement.names:
        if bound_by(statement, alias) != name:
            continue
        if isinstance(statement, ast.Import):
            wanted = alias.name if alias.asname else alias.name.split(".")[0]
            module = machine.known.project.module(wanted, file)
            return Module(module) if module else Ext(wanted)
        base = absolute(file, statement)
        module = machine.known.project.module(base, file)
        if module is not None and module is not file and (alias.name in module.names or "*" in module.names):
            value = module_name(machine, module, alias.name)
            if value is not UNKNOWN:
                return value
        inner = machine.known.project.module(f"{base}.{alias.name}", file)
        if inner is not None:
            return Module(inner)
        return UNKNOWN if module is not None or statement.level else Ext(f"{base}.{alias.name}")
    return UNKNOWN


# ---- classes


def bases(machine: Machine, cls: Class) -> list[Value]:
    """The base classes, evaluated in the scope where the class stands."""
    key = id(cls.node)
    if key in machine.known.bases:
        return machine.known.bases[key]
    result: list[Value] = []
    machine.known.bases[key] = result
    with machine.at.aside(Call(cls.node.name, cls.file, cls.node, scope=cls.scope)):
        for node in cls.node.bases:
            while isinstance(node, ast.Subscript):  # Generic[T]
                node = node.value
            result.append(machine.evaluate(node))
    return result


def ancestry(machine: Machine, cls: Class) -> list[Value]:
    """The class and its bases, depth first, each once: close enough to Python's order for reading."""
    if id(cls.node) in machine.known.ancestors:
        return machine.known.ancestors[id(cls.node)]
    order: list[Value] = []
    seen: set[int] = set()

    def walk(value: Value) -> None:
        if isinstance(value, Class):
            if id(value.node) in seen or len(seen) > 60:
                return
            seen.add(id(value.node))
            order.append(value)
            for base in bases(machine, value):
                walk(base)
        else:
            order.append(value)

    walk(cls)
    machine.known.ancestors[id(cls.node)] = order
    return order


def is_module(machine: Machine, cls: Class) -> bool:
    """True where the class derives from torch.nn.Module, as far as can be read."""
    return any(isinstance(v, Ext) and v.name in NN_MODULES for v in ancestry(machine, cls))


def is_record(machine: Machine, cls: Class) -> bool:
    """True for dataclasses and named tuples."""
    known = ancestry(machine, cls)
    return any(
        "dataclass" in decorators(value.node) if isinstance(value, Class) else _names_tuple(value) for value in known
    )


def _names_tuple(value: Value) -> bool:
    return isinstance(value, Ext) and value.name == "typing.NamedTuple"


NN_MODULES = frozenset(
    ["torch.nn.Module", "torch.nn.modules.module.Module", "torch.nn.modules.Module", "transformers.PreTrainedModel"]
    + ["torch.nn." + n for n in ("Linear", "Embedding", "LayerNorm", "RMSNorm", "Conv1d", "Conv2d", "Sequential")]
    + ["torch.nn." + n for n in ("ModuleList", "ModuleDict", "ReLU", "GELU", "SiLU", "Dropout", "BatchNorm1d")]
)


def find_member(machine: Machine, cls: Class, name: str, after: Class | None = None) -> tuple[ast.stmt, Class] | None:
    """Where a class or an ancestor defines `name`; with `after`, only ancestors that follow that class."""
    started = after is None
    for value in ancestry(machine, cls):
        if not isinstance(value, Class):
            continue
        if not started:
            started = after is not None and value.node is after.node
            continue
        found = members(machine.known, value).get(name)
        if found is not None:
            return found, value
    return None


def members(known: Knowledge, cls: Class) -> dict[str, ast.stmt]:
    """Names that a class body binds."""
    if id(cls.node) in known.tables:
        return known.tables[id(cls.node)]
    table: dict[str, ast.stmt] = {}
    known.tables[id(cls.node)] = table
    for statement in cls.node.body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                table.setdefault(statement.name, statement)
                if isinstance(statement, ast.FunctionDef) and any(
                    isinstance(d, ast.Name) and d.id == "property" for d in statement.decorator_list
                ):
                    table[statement.name] = statement
            case ast.Assign():
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        table[target.id] = statement
            case ast.AnnAssign() if isinstance(statement.target, ast.Name):
                table[statement.target.id] = statement
    return table


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Last names of the decorators: `@functools.cache` -> "cache"."""
    return {last_name(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list} - {""}


def member_value(machine: Machine, obj: Value, cls: Class, name: str, after: Class | None = None) -> Value | None:
    """A class member as seen from an instance (or from the class itself, where `obj` is that class)."""
    for known in ancestry(machine, cls) if machine.known.class_values else ():
        if isinstance(known, Class) and (id(known.node), name) in machine.known.class_values:
            return machine.known.class_values[id(known.node), name]
    found = find_member(machine, cls, name, after)
    if found is None:
        return None
    statement, owner = found
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        marks = decorators(statement)
        if "jit" in marks:
            return Ext("triton.kernel." + name)
        bound = None if "staticmethod" in marks or (isinstance(obj, Class) and "classmethod" not in marks) else obj
        if "classmethod" in marks and isinstance(obj, Obj):
            bound = obj.cls
        func = Func(statement, owner.file, owner.scope, bound, owner)
        if marks & {"property", "cached_property"} and isinstance(obj, Obj):
            return machine.call_function(func, [], {}, machine.at.stack[-1].node)
        return func
    if isinstance(statement, ast.ClassDef):
        return Class(statement, owner.file, owner.scope)
    value_node = getattr(statement, "value", None)
    if value_node is None:
        return UNKNOWN
    with machine.at.aside(Call(owner.node.name, owner.file, statement, scope=owner.scope), in_step=machine.at.in_step):
        value = machine.evaluate(value_node)
    return value if not isinstance(value, Func) else UNKNOWN


# ---- what is inside a value


def attribute(machine: Machine, owner: Value, name: str, node: ast.AST) -> Value:
    """`owner.name`."""
    match owner:
        case Obj():
            if name in owner.attributes:
                value = owner.attributes[name]
                if machine.at.in_step and not owner.in_step and isinstance(value, Tensor):
                    machine.seen(("attribute", id(owner), name), value, node)
                return value
            found = member_value(machine, owner, owner.cls, name)
            if found is not None:
                return found
            if name == "__class__":
                return owner.cls
            if is_module(machine, owner.cls):
                return Plain("bool") if name == "training" else Method(owner, name)
            return UNKNOWN
        case Ext():
            return tensors.constant(f"{owner.name}.{name}")
        case Module():
            value = module_name(machine, owner.file, name)
            if value is UNKNOWN and owner.file.is_package:
                inner = machine.known.project.module(f"{owner.file.module}.{name}", owner.file)
                return Module(inner) if inner is not None else UNKNOWN
            return value
        case Tensor():
            return tensors.attribute(owner, name)
        case Class():
            found = member_value(machine, owner, owner, name)
            return found if found is not None else UNKNOWN
        case Super():
            cls = owner.receiver.cls if isinstance(owner.receiver, Obj) else owner.owner
            found = member_value(machine, owner.receiver, cls, name, after=owner.owner)
            return found if found is not None else Method(owner, name)
        case Device():
            if name == "type" and owner.name:
                return Const(owner.name.split(":")[0])
            return Plain()
        case Seq(kind="result", element=Tensor() as element) if name == "indices":
            return replace(element, integer=True)
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
        case Plain(kind="shape" | "range" | "moving range"):
            return Plain("int", varying=value.varying and value.kind != "range")
    return UNKNOWN
