"""Calls: into the user's functions and classes, and out to builtins, torch and everything else."""

import ast
from dataclasses import replace

from onegraph.check import constructs, tables
from onegraph.check.source import (
    binding,
    builtin_calls,
    entropy,
    methods,
    names,
    parameters,
    tensor_methods,
    torch_calls,
)
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.state import DEPTH, TREE_DEPTH, Call, Position
from onegraph.check.source.values import (
    UNKNOWN,
    Class,
    Const,
    Dict,
    Ext,
    ExtObj,
    Func,
    Keywords,
    Method,
    Obj,
    Partial,
    Plain,
    Scope,
    Seq,
    Super,
    Tensor,
    Value,
    join_all,
)

MUTATORS = frozenset(["append", "extend", "insert", "pop", "clear", "remove", "update", "setdefault", "add", "popleft"])


def call(machine: Machine, node: ast.Call) -> Value:
    """A call expression."""
    func = machine.evaluate(node.func)
    if isinstance(func, Ext) and func.name == "builtins.super":
        return _super(machine.at, node)
    args, keywords = arguments(machine, node)
    outer = machine.at.stack[-1].node
    machine.at.stack[-1].node = node
    try:
        if isinstance(func, Method) and func.name in MUTATORS and isinstance(func.receiver, Seq | Dict):
            return mutate(machine, node, func, args)
        if machine.at.explicit and func is UNKNOWN and not args and isinstance(node.func, ast.Attribute):
            unknown_read(machine, node, node.func.attr)
        return apply(machine, func, args, keywords, node)
    finally:
        machine.at.stack[-1].node = outer


def unknown_read(machine: Machine, node: ast.Call, name: str) -> None:
    """Inside of an explicit capture, a call by a name that only reads have, of something that is not known."""
    if name in ("item", "tolist", "cpu", "numpy"):
        machine.report("CG101", node, f"`{short(node)}` reads a value on the host, if it is a tensor", sure=False)


def arguments(machine: Machine, node: ast.Call) -> tuple[list[Value], Keywords]:
    args: list[Value] = []
    for item in node.args:
        if isinstance(item, ast.Starred):
            value = machine.evaluate(item.value)
            if isinstance(value, Seq) and value.items is not None:
                args.extend(value.items)
            else:
                break  # how many follow is not known
        else:
            args.append(machine.evaluate(item))
    keywords: Keywords = {}
    for keyword in node.keywords:
        value = machine.evaluate(keyword.value)
        if keyword.arg is not None:
            keywords[keyword.arg] = value
        elif isinstance(value, Dict) and value.entries is not None:
            keywords.update({str(k): v for k, v in value.entries})
    return args, keywords


def apply(machine: Machine, func: Value, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    """Call any value."""
    match func:
        case Func():
            return call_function(machine, func, args, keywords, node)
        case Partial():
            return apply(machine, func.func, [*func.args, *args], {**dict(func.keywords), **keywords}, node)
        case Class() if machine.at.presume and names.is_module(machine, func):
            return summary(machine, func)
        case Class():
            return instantiate(machine, func, args, keywords, node)
        case Ext() if func.name.startswith("builtins."):
            return builtin_calls.call(machine, func.name[len("builtins.") :], args, keywords, node)
        case Ext() if func.name in ("functools.partial",) and args:
            return Partial(args[0], tuple(args[1:]), tuple(keywords.items()))
        case ExtObj() if func.kind.rsplit(".", 1)[-1] in tables.GRAD_MODES and len(args) == 1:
            return args[0]  # torch.no_grad()(step): what it wraps
        case Ext() if func.name.rsplit(".", 1)[-1] == "make_graphed_callables" and func.name.startswith("torch."):
            return _graphed(machine, args, keywords, node)
        case Ext() | ExtObj():
            return torch_calls.call(machine, func, args, keywords, node)
        case Seq(kind="modules", items=tuple()) if len(args) == 1:
            value = args[0]
            for module in func.items or ():
                value = apply(machine, module, [value], {}, node)
            return value
        case Method(receiver=Obj()):
            return _module_method(machine, func.receiver, func.name, args, keywords)
        case Method(receiver=Super()):
            return UNKNOWN
        case Method(receiver=Seq(kind="modules"), name="to" | "cuda"):
            device = tensor_methods.device_argument(args, keywords) if func.name == "to" else "cuda"
            return move(func.receiver, device, set()) if device else func.receiver
        case Method(receiver=Seq(kind="modules") as modules, name="modules" | "children"):
            return replace(modules, kind="iterator")
        case Method(receiver=Seq(kind="modules"), name="eval" | "half" | "bfloat16" | "float" | "requires_grad_"):
            return func.receiver
        case Method():
            return methods.method(machine, func.receiver, func.name, args, keywords, node)
        case Plain(kind=entropy.DRAWN):
            return func  # a method of what was drawn
        case Obj():
            for name in ("__call__", "forward"):
                found = names.member_value(machine, func, func.cls, name)
                if isinstance(found, Func):
                    return apply(machine, found, args, keywords, node)
                if name == "__call__" and "forward" in func.attributes:
                    return apply(machine, func.attributes["forward"], args, keywords, node)
    return UNKNOWN


def _graphed(machine: Machine, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    """`torch.cuda.make_graphed_callables(callables, sample_args)`: captures each on its sample arguments."""
    what = args[0] if args else keywords.get("callables", UNKNOWN)
    samples = args[1] if len(args) > 1 else keywords.get("sample_args", UNKNOWN)
    many = isinstance(what, Seq) and what.items is not None
    functions = what.items if isinstance(what, Seq) and what.items is not None else (what,)
    if machine.at.in_step:
        return what
    for index, function in enumerate(functions):
        given = samples
        if many and isinstance(samples, Seq) and samples.items is not None and index < len(samples.items):
            given = samples.items[index]
        sample = list(given.items) if isinstance(given, Seq) and given.items is not None else []
        machine.capture(node, begins=True)
        try:
            apply(machine, function, sample, {}, node)
        finally:
            machine.capture(node, begins=False)
    return what


def call_function(machine: Machine, func: Func, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    """Follow a call into the user's code."""
    name = id_name(func)
    if machine.at.presume and not machine.at.in_step and func.file is not machine.at.file:
        return UNKNOWN  # a constructor's helpers elsewhere: what they tell is not worth reading them for every class
    if (
        len(machine.at.stack) > (TREE_DEPTH if machine.at.presume else DEPTH)
        or sum(1 for c in machine.at.stack if c.name == name and c.file is func.file) > 1
    ):
        return UNKNOWN  # recursion: one round tells what there is to see
    marks = names.decorators(func.node) if not isinstance(func.node, ast.Lambda) else set()
    key = None
    if machine.at.presume and machine.at.inside is None:
        key = (
            machine.at.in_step,
            id(func.node),
            id(func.receiver) if isinstance(func.receiver, Obj) else 0,
            parameters.signature(args, keywords),
        )
        if key in machine.known.memo:
            value, work = machine.known.memo[key]
            machine.step.tensor_work += work
            return value
    variables: dict[str, Value] = {}
    scope = Scope(func.file, variables, func.scope, machine.at.in_step)
    frame = Call(name, func.file, func.node, scope=scope)
    if "contextmanager" in marks:
        frame.inside, machine.at.inside = machine.at.inside, None
    machine.at.entered.add(id(func.node))
    cached = bool(marks & {"cache", "lru_cache"})
    work = machine.step.tensor_work
    machine.at.stack.append(frame)
    machine.at.quiet += cached  # its body runs once, at warm-up
    try:
        parameters.fill(machine, func, args, keywords, variables)
        if machine.at.in_step:
            machine.found.read.add((func.file.path, func.node.lineno, func.node.end_lineno or func.node.lineno))
        if isinstance(func.node, ast.Lambda):
            result = machine.evaluate(func.node.body)
        else:
            result = _body(machine, func.node, frame)
    finally:
        machine.at.stack.pop()
        machine.at.conditions -= frame.extra_conditions
        machine.at.quiet -= cached
    if key is not None:
        machine.known.memo[key] = (result, machine.step.tensor_work - work)
    return result


def _body(machine: Machine, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Call) -> Value:
    through = machine.block(node.body)
    if id(node) not in machine.known.generators:
        yields = (isinstance(inner, ast.Yield | ast.YieldFrom) for inner in constructs.own_nodes(node.body))
        machine.known.generators[id(node)] = "yield" in frame.file.text and any(yields)
    if machine.known.generators[id(node)]:
        return Seq("iterator", None, UNKNOWN, machine.at.in_step)
    if through:
        frame.returns.append(Const(None))
    return join_all(tuple(frame.returns))


def id_name(func: Func) -> str:
    name = getattr(func.node, "name", "<lambda>")
    return f"{func.owner.node.name}.{name}" if func.owner is not None else name


# ---- classes


def instantiate(
    machine: Machine, cls: Class, args: list[Value], keywords: Keywords, node: ast.AST, *, presumed: bool = False
) -> Value:
    """Make an instance: run `__init__`, or fill the fields of a dataclass or named tuple."""
    obj = Obj(cls, in_step=machine.at.in_step, presumed=presumed)
    if machine.at.between:
        machine.step.given.append(obj)
    found = names.member_value(machine, obj, cls, "__init__")
    if isinstance(found, Func):
        call_function(machine, found, args, keywords, node)
        return obj
    fields = [s for s in cls.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    for position, statement in enumerate(fields):
        name = statement.target.id  # type: ignore[union-attr]
        if position < len(args):
            obj.attributes[name] = args[position]
        elif name in keywords:
            obj.attributes[name] = keywords[name]
        elif presumed:
            obj.attributes[name] = parameters.annotated(machine.at, statement.annotation)
        elif statement.value is not None:
            obj.attributes[name] = _default(machine, statement.value)
    post = names.member_value(machine, obj, cls, "__post_init__")
    if isinstance(post, Func):
        call_function(machine, post, [], {}, node)
    return obj


def _default(machine: Machine, node: ast.expr) -> Value:
    """What a field of a dataclass holds where it is not given."""
    if isinstance(node, ast.Call) and constructs.last_name(node.func) == "field":
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if (maker := given.get("default_factory")) is not None:
            return apply(machine, machine.evaluate(maker), [], {}, node)
        node = given.get("default", node)
    return UNKNOWN if isinstance(node, ast.Call) else machine.evaluate(node)


def summary(machine: Machine, cls: Class) -> Value:
    """One instance that stands for all of a module class: its `__init__`, read once with unknown arguments."""
    known = machine.known.summaries.get(id(cls.node))
    if known is None:
        machine.known.summaries[id(cls.node)] = UNKNOWN  # a class that holds itself
        with machine.at.aside(Call(cls.node.name, cls.file, cls.node, scope=cls.scope)):
            known = instantiate(machine, cls, [], {}, cls.node, presumed=True)
        machine.known.summaries[id(cls.node)] = known
    return known


def _super(at: Position, node: ast.Call) -> Value:
    for frame in reversed(at.stack):
        scope: Scope | None = frame.scope
        while scope is not None:
            receiver = scope.variables.get("self", scope.variables.get("cls"))
            if isinstance(receiver, Obj | Class):
                owner = scope.variables.get("__class__")
                return Super(receiver, owner) if isinstance(owner, Class) else UNKNOWN
            scope = scope.parent
    return UNKNOWN


def _module_method(machine: Machine, obj: Value, name: str, args: list[Value], keywords: Keywords) -> Value:
    """Methods of torch.nn.Module on an instance of the user's class."""
    assert isinstance(obj, Obj)
    node = machine.at.stack[-1].node
    match name:
        case "register_buffer" | "register_parameter" if args and isinstance(args[0], Const):
            value = args[1] if len(args) > 1 else keywords.get("tensor", keywords.get("param", Const(None)))
            if isinstance(value, Tensor):
                value = replace(value, parameter=True)
                if machine.at.presume and not value.on_device:
                    value = replace(value, device="cuda", sure=False)
            obj.attributes[str(args[0].value)] = value
            return Const(None)
        case "add_module" | "register_module" if len(args) == 2 and isinstance(args[0], Const):
            obj.attributes[str(args[0].value)] = args[1]
            return Const(None)
        case "to" | "cuda" | "cpu":
            device = (
                tensor_methods.device_argument(args, keywords) if name == "to" else "cuda" if name == "cuda" else "cpu"
            )
            if device:
                move(obj, device, set())
            return obj
        case "train" | "eval":
            machine.report("CG311", node, f"`.{name}()` in the step changes the mode of modules")
            return obj
        case "half" | "float" | "bfloat16" | "double" | "requires_grad_":
            return obj
        case "register_forward_hook" | "register_forward_pre_hook" | "register_full_backward_hook":
            machine.report("CG311", node, f"`.{name}()` in the step adds a hook on every call")
        case "modules" | "children":
            return Seq("iterator", None, UNKNOWN)
        case "parameters" | "buffers":
            return Seq("iterator", None, Tensor("cuda" if machine.at.presume else "", sure=False))
    return UNKNOWN


def move(value: Value, device: str, seen: set[int]) -> Value:
    """`module.to(device)`: parameters and buffers of a module and of the modules inside."""
    match value:
        case Tensor() if value.parameter:
            return replace(value, device=device)
        case Obj() if id(value) not in seen:
            seen.add(id(value))
            for name, inner in value.attributes.items():
                value.attributes[name] = move(inner, device, seen)
        case ExtObj() if value.kind.startswith("torch.nn."):
            return replace(value, note=device)
        case Seq() if value.kind == "modules":
            items = None if value.items is None else tuple(move(v, device, seen) for v in value.items)
            return replace(value, items=items, element=move(value.element, device, seen))
    return value


# ---- lists and dicts that a call changes


def mutate(machine: Machine, node: ast.Call, func: Method, args: list[Value]) -> Value:
    """`things.append(x)` and its like: the name that holds the list holds another one afterwards."""
    container = func.receiver
    assert isinstance(container, Seq | Dict)
    target = node.func.value if isinstance(node.func, ast.Attribute) else None
    result: Value = Const(None)
    changed: Value = container
    match container, func.name:
        case (Seq(), "append" | "add") if args:
            if container.items is not None and len(container.items) < 16 and not machine.at.conditions:
                changed = replace(container, items=(*container.items, args[0]))
            else:
                # Of a list that outlives the step, what this step appends is what the next one finds.
                known = args[0] if container.items == () or machine.at.in_step else container.any
                changed = replace(container, items=None, element=join_all((known, args[0])))
        case (Seq(), "pop" | "popleft"):
            result = container.any
            if machine.at.in_step and not container.in_step and isinstance(result, Tensor):
                result = replace(result, moving=True)
            changed = replace(container, items=None, element=container.any)
        case (Seq(), "extend" | "insert") if args:
            new = args[-1].any if isinstance(args[-1], Seq) else args[-1]
            known = container.any if container.items != () else new
            changed = replace(container, items=None, element=join_all((known, new)))
        case (Dict(), "setdefault") if args:
            result = UNKNOWN
            changed = replace(container, entries=None)
        case (Dict(), "pop") if args:
            result = container.any
            changed = replace(container, entries=None, element=container.any)
        case (Dict(), "update") if args and isinstance(args[0], Dict):
            changed = replace(container, entries=None, element=join_all((container.any, args[0].any)))
        case (_, "clear"):
            changed = replace(container, items=()) if isinstance(container, Seq) else replace(container, entries=())
    if target is not None and changed is not container:
        if machine.at.in_step and not container.in_step and func.name not in ("setdefault", "update"):
            text = f"`{func.name}` on a list that outlives the step; a replay does not run it"
            machine.report("CG210", node, text)
        binding.hold(machine, target, changed)
    return result
