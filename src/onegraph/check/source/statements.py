"""Statements: execute a block, join what its branches leave behind."""

import ast
import functools
import os
from collections.abc import Sequence
from dataclasses import replace

from onegraph.check.source import expressions, launches, names, tensors, values
from onegraph.check.source.binding import bind
from onegraph.check.source.expressions import condition, decided, evaluate
from onegraph.check.source.files import SourceFile, bound_by
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.names import iterate
from onegraph.check.source.values import (
    UNKNOWN,
    Class,
    Const,
    Ext,
    ExtObj,
    Func,
    Obj,
    Plain,
    Scope,
    Seq,
    Tensor,
    Value,
    is_plain,
    join,
    truth,
    varies,
)


def block(machine: Machine, body: Sequence[ast.stmt]) -> bool:
    """Execute statements in order. False where the end is never reached (return, raise, break, continue)."""
    for statement in body:  # noqa: SIM110  (all() would put a C frame between any two of the reader's)
        if not execute(machine, statement):
            return False
    return True


def execute(machine: Machine, node: ast.stmt) -> bool:
    """One statement. False where what follows it in its block is not reached."""
    machine.at.spend()
    machine.at.stack[-1].node = node
    match node:
        case ast.Expr():
            evaluate(machine, node.value)
        case ast.Assign():
            value = evaluate(machine, node.value)
            for target in node.targets:
                bind(machine, target, value, moved=machine.at.in_step and steps_on(target, node.value, value))
        case ast.AnnAssign():
            if node.value is not None:
                bind(machine, node.target, evaluate(machine, node.value))
        case ast.AugAssign():
            augment(machine, node)
        case ast.Return():
            machine.at.stack[-1].returns.append(evaluate(machine, node.value) if node.value else Const(None))
            return False
        case ast.If():
            return branch(machine, node)
        case ast.For() | ast.AsyncFor():
            loop(machine, node)
        case ast.While():
            while_loop(machine, node)
        case ast.With() | ast.AsyncWith():
            return with_block(machine, node)
        case ast.Try() | ast.TryStar():
            return try_block(machine, node)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            machine.at.scope.variables[node.name] = define(machine, node)
        case ast.ClassDef():
            machine.at.scope.variables[node.name] = Class(node, machine.at.file, machine.at.scope)
        case ast.Assert():
            condition(machine, node.test, "assert")
        case ast.Raise():
            return False  # the text of an error is made only where the step has failed already
        case ast.Break() | ast.Continue():
            return False
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                bound = bound_by(node, alias)
                machine.at.scope.variables[bound] = names.imported(machine, node, bound)
        case ast.Global() | ast.Nonlocal():
            rebind(machine, node)
        case ast.Delete():
            for target in node.targets:
                if isinstance(target, ast.Name):
                    machine.at.scope.variables.pop(target.id, None)
        case ast.Match():
            evaluate(machine, node.subject)
            return branches(machine, [case.body for case in node.cases] + [[]])
    return True


def steps_on(target: ast.expr, expression: ast.expr, value: Value) -> bool:
    """True for `self.n = self.n + 1` and its like: the statement makes another Python value of what it binds."""
    if isinstance(target, ast.Name | ast.Tuple) or isinstance(value, Const) or values.tensors(value):
        return False
    if not (isinstance(value, Plain) or (isinstance(value, Seq) and isinstance(value.any, Plain | Const))):
        return False
    nodes = list(ast.walk(expression))
    wanted = ast.unparse(target)
    return any(isinstance(n, ast.BinOp) for n in nodes) and any(
        type(n) is type(target) and ast.unparse(n) == wanted for n in nodes
    )


def define(machine: Machine, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Value:
    """A function definition; what a compiler of kernels takes is device code, and a name outside the user's own."""
    for mark in node.decorator_list if "jit" in names.decorators(node) or "rawkernel" in names.decorators(node) else ():
        compiler = evaluate(machine, mark.func if isinstance(mark, ast.Call) else mark)
        if isinstance(compiler, Ext) and (kernel := launches.decorated(compiler.name)) is not None:
            return kernel
    made = Func(node, machine.at.file, machine.at.scope)
    machine.at.defined.append(made)
    for mark in reversed(node.decorator_list) if not machine.at.presume else ():
        decorator = evaluate(machine, mark)
        if isinstance(decorator, Func) and decorator.owner is None:
            wrapped = machine.call_function(decorator, [made], {}, mark)
            made = wrapped if isinstance(wrapped, Func) else made
    return made


def rebind(machine: Machine, node: ast.Global | ast.Nonlocal) -> None:
    for name in node.names:
        if isinstance(node, ast.Global):
            names.module_name(machine, machine.at.scope.file, name)
            owner: Scope | None = names.module_scope(machine.known, machine.at.scope.file)
        else:
            owner = names.find_scope(machine.at.scope.parent, name)
        if owner is not None:
            machine.at.scope.rebinds[name] = owner


def augment(machine: Machine, node: ast.AugAssign) -> None:
    """`x += y`: in place for a tensor, a new value for anything else."""
    old = evaluate(machine, node.target)
    operand = evaluate(machine, node.value)
    if isinstance(old, Tensor):
        tensors.binary(machine, node, old, operand)
        tensors.written(machine, old, operand, accumulates=True)
        if isinstance(node.target, ast.Subscript):
            container = evaluate(machine, node.target.value)
            if isinstance(container, Tensor):
                tensors.store_item(machine, node.target, container, UNKNOWN)
        return
    value = expressions.binary_value(machine, node, old, operand, node.op)
    bind(machine, node.target, value, moved=not isinstance(value, Tensor | Seq) and value is not UNKNOWN)


# ---- control flow


def _set_elsewhere(machine: Machine, node: ast.expr, work: Sequence[ast.stmt]) -> None:
    """A test, or what a loop goes through, reads an attribute that code outside of the step assigns: whenever that
    runs, the path changes."""
    if not (machine.at.in_step and machine.at.reporting) or not _matters(list(work)):
        return
    for read in ast.walk(node):
        if not isinstance(read, ast.Attribute) or not isinstance(read.ctx, ast.Load):
            continue
        with machine.at.aside(machine.at.stack[-1], in_step=machine.at.in_step):
            owner = evaluate(machine, read.value)
        value = owner.attributes.get(read.attr, UNKNOWN) if isinstance(owner, Obj) else UNKNOWN
        if not isinstance(owner, Obj) or owner.in_step or not is_plain(value) or varies(value):
            continue
        line = _assigned_at(machine, owner.cls.file, read.attr)
        if line:
            text = f"`{short(node)}` decides which work is done, and code outside of the step assigns .{read.attr}"
            source = owner.cls.file.line(line).strip()
            at = f"{os.path.basename(owner.cls.file.path)}:{line}"
            machine.report("CG201", node, text, sure=False, values=(f"assigned at {at}: {source}",))
            return


def _assigned_at(machine: Machine, file: SourceFile, name: str) -> int:
    """The first line, of a file and the one that is read, in a function that no step enters, that assigns an attribute;
    0 where none does. What makes an object runs before every step."""
    for line, first, function in assignments(file.tree).get(name, ()):
        if (
            first
            and function not in _MAKERS
            and not any(path == file.path and begin <= line <= end for path, begin, end in machine.found.read)
        ):
            return line
    return 0


_MAKERS = ("__init__", "__post_init__", "__new__", "setup", "build", "reset_parameters")


@functools.lru_cache(maxsize=64)
def assignments(tree: ast.Module) -> dict[str, list[tuple[int, bool, str]]]:
    """Where a file assigns attributes: by name (line, whether in a function of a function or of a class, which)."""
    found: dict[str, list[tuple[int, bool, str]]] = {}

    def walk(node: ast.AST, function: str, inner: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", None), ast.Store):
                continue  # most nodes of a file: what is only read
            if isinstance(child, ast.Attribute):
                found.setdefault(child.attr, []).append((child.lineno, inner, function))
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                walk(child, child.name, bool(function) or isinstance(node, ast.ClassDef))
            else:
                walk(child, function, inner)

    walk(tree, "", False)
    return found


def branch(machine: Machine, node: ast.If) -> bool:
    _set_elsewhere(machine, node.test, [*node.body, *node.orelse])
    test = condition(machine, node.test, "if")
    way = decided(machine, test, node.test, matters=_matters(node.body) or _matters(node.orelse))
    if way is not None:
        return block(machine, node.body if way else node.orelse)
    work = machine.step.tensor_work
    variables = machine.at.scope.variables
    machine.at.conditions += 1
    before = dict(variables)
    through = block(machine, node.body)
    after = dict(variables)
    become(variables, before)
    other = block(machine, node.orelse)
    machine.at.conditions -= 1
    moving = varies(test)
    if moving:
        machine.path_varies(node.test, work, leaves=not (through and other))
    if through and other:
        merge(variables, after, moving=moving)
    elif through:
        become(variables, after)
    if through != other and not _raises(node.body if not through else node.orelse):
        machine.at.conditions += 1  # what follows runs only where that branch did not return
        machine.at.stack[-1].extra_conditions += 1
    return through or other


def _matters(body: list[ast.stmt]) -> bool:
    """True where a block does more than check and complain."""
    harmless = ast.Assert | ast.Raise | ast.Pass
    return any(not isinstance(s, harmless) and not (isinstance(s, ast.If) and not _matters(s.body)) for s in body)


def _raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise | ast.Continue | ast.Break)


def merge(variables: dict[str, Value], other: dict[str, Value], *, moving: bool = False) -> None:
    """Join another branch's variables into `variables`."""
    for name, value in other.items():
        mine = variables.get(name)
        if mine is None:
            variables[name] = value
        elif mine is not value:
            joined = join(mine, value)
            if moving and isinstance(joined, Plain) and mine != value:
                joined = replace(joined, varying=True)
            variables[name] = joined


def branches(machine: Machine, bodies: list[list[ast.stmt]]) -> bool:
    """Alternatives of which one runs, not known which."""
    variables = machine.at.scope.variables
    before = dict(variables)
    states = []
    machine.at.conditions += 1
    for body in bodies:
        become(variables, before)
        if block(machine, body):
            states.append(dict(variables))
    machine.at.conditions -= 1
    return _joined(variables, states)


def _joined(variables: dict[str, Value], states: list[dict[str, Value]]) -> bool:
    """The variables after one of several ways, not known which. False where there is none."""
    if states:
        become(variables, states[0])
        for state in states[1:]:
            merge(variables, state)
    return bool(states)


def become(variables: dict[str, Value], others: dict[str, Value]) -> None:
    """The scope's own dictionary, which functions in it hold, with the contents of another."""
    variables.clear()
    variables.update(others)


def loop(machine: Machine, node: ast.For | ast.AsyncFor) -> None:
    if isinstance(node.iter, ast.Call):  # range(self.rounds); an attribute that is a list is the same one in all steps
        _set_elsewhere(machine, node.iter, node.body)
    iterable = evaluate(machine, node.iter)
    element = iterate(iterable)
    work = machine.step.tensor_work
    variables = machine.at.scope.variables
    before = dict(variables)
    if isinstance(iterable, Seq) and iterable.items is not None and 0 < len(iterable.items) <= 4:
        for item in iterable.items:
            bind(machine, node.target, item)
            block(machine, node.body)
    else:
        for _ in range(2):  # the second time with what the first left behind
            bind(machine, node.target, element)
            block(machine, node.body)
            merge(variables, before)
    if expressions.rounds_vary(iterable):
        machine.path_varies(node.iter, work, rounds=True)
    block(machine, node.orelse)


def while_loop(machine: Machine, node: ast.While) -> None:
    variables = machine.at.scope.variables
    before = dict(variables)
    work = machine.step.tensor_work
    _set_elsewhere(machine, node.test, node.body)
    test = condition(machine, node.test, "while")
    if truth(test) is False:
        return
    for _ in range(2):
        block(machine, node.body)
        merge(variables, before)
        test = condition(machine, node.test, "while")
    if varies(test):
        machine.path_varies(node.test, work, rounds=True)
    block(machine, node.orelse)


def with_block(machine: Machine, node: ast.With | ast.AsyncWith) -> bool:
    device, in_step, explicit, conditions = (
        machine.at.default_device,
        machine.at.in_step,
        machine.at.explicit,
        machine.at.conditions,
    )
    entered = False
    wrong: tuple[str, str] | None = None
    through: bool | None = None
    managers: list[tuple[Value, ast.expr]] = []
    depth = len(machine.at.stack)

    def inside(given: Value) -> None:
        """The block of a context manager of the user's, where its function yields."""
        nonlocal through
        manager = machine.at.stack[depth:]
        del machine.at.stack[depth:]
        if (names_ := node.items[-1].optional_vars) is not None:
            bind(machine, names_, given)
        through = _guarded(machine, node.body, wrong)
        machine.at.stack.extend(manager)

    for item in node.items:
        machine.at.inside = inside if item is node.items[-1] and isinstance(item.context_expr, ast.Call) else None
        value = evaluate(machine, item.context_expr)
        machine.at.inside = None
        if through is not None:
            break
        begun = _method(machine, value, "__enter__", item.context_expr)
        if item.optional_vars is not None:
            bind(machine, item.optional_vars, value if isinstance(value, ExtObj) else begun)
        managers.append((value, item.context_expr))
        wrong = tensors.stream_hazard(machine.at, item.context_expr, value) or wrong
        entered = tensors.enter(machine, item.context_expr, value) or entered
    if entered and not machine.at.in_step:
        machine.capture(node, begins=True)
        machine.at.conditions = 0  # whether it is captured or not, what is captured is known
    if through is None:
        through = _guarded(machine, node.body, wrong)
    for value, made in reversed(managers):
        _method(machine, value, "__exit__", made)
    if entered and not in_step:
        machine.at.conditions += conditions
    machine.at.default_device, machine.at.in_step, machine.at.explicit = device, in_step, explicit
    return through


def _method(machine: Machine, value: Value, name: str, node: ast.AST) -> Value:
    """What a method that Python itself calls gives, of an object of the user's."""
    found = names.member_value(machine, value, value.cls, name) if isinstance(value, Obj) else None
    if not isinstance(found, Func):
        return value if isinstance(value, Obj) else UNKNOWN
    machine.at.stack[-1].node = node
    return machine.call_function(found, [Const(None)] * 3 if name == "__exit__" else [], {}, node)


def _guarded(machine: Machine, body: Sequence[ast.stmt], wrong: tuple[str, str] | None) -> bool:
    """The block of a `with`. wrong: (code, message) of the first statement in it that works on the device."""
    for statement in body:
        work = machine.step.tensor_work
        through = execute(machine, statement)
        if wrong is not None and machine.step.tensor_work > work:
            machine.report(wrong[0], getattr(statement, "value", None) or statement, wrong[1])
            wrong = None
        if not through:
            return False
    return True


def try_block(machine: Machine, node: ast.Try | ast.TryStar) -> bool:
    variables = machine.at.scope.variables
    before = dict(variables)
    through = block(machine, node.body) and block(machine, node.orelse)
    states = [dict(variables)] if through else []
    machine.at.conditions += 1
    for handler in node.handlers:
        merge(before, dict(variables))
        become(variables, before)
        if handler.name:
            variables[handler.name] = UNKNOWN
        if block(machine, handler.body):
            states.append(dict(variables))
    machine.at.conditions -= 1
    through = _joined(variables, states)
    return block(machine, node.finalbody) and through
