"""Where reading starts: the step of a factory, or, in a tree, everything that looks like one."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from onegraph.check import tables
from onegraph.check.report import CheckError
from onegraph.check.source import calls, captures, expressions, names, parameters, statements
from onegraph.check.source.files import SourceFile
from onegraph.check.source.machine import Machine
from onegraph.check.source.state import BUDGET, Call, Exhausted, Position
from onegraph.check.source.values import Class, Const, Dict, Func, Obj, Plain, Scope, Seq, Tensor, Unknown, Value

FORWARD_BUDGET = 30_000
"""Expressions read per `forward` of a tree. Of transformers 5.17's 7,986 the median needs 204, the largest 12,574."""


class Interpreter(Machine):
    """A machine that reads.

    The modules below import one way only; whatever must go back up (a call that runs a body, an index that is an
    expression) goes through the machine. The entries are those modules' functions themselves: no frame lies in between.
    """

    evaluate = expressions.evaluate
    block = statements.block
    call_function = calls.call_function


def _enter(
    machine: Machine, file: SourceFile, node: ast.AST, *, presume: bool = True, budget: int = FORWARD_BUDGET
) -> None:
    """Read from here on as if nothing lay around; what is known of the code stays."""
    stack = [Call("<check>", file, node, scope=Scope(file, {}, None))]
    machine.at = Position(stack, presume=presume, budget=budget)
    machine.step.run = 0
    machine.known.resolving.clear()


def read_factory(machine: Machine, file: SourceFile, name: str) -> str:
    """Read the step of `factory()` three times, as three steps would run it.

    Returns what could not be followed, "" where everything was. Raises CheckError where there is no such factory.
    """
    definitions = file.names.get(name)
    if not definitions:
        raise CheckError(f"{file.path}: no factory {name!r} at the top level of the file")
    _enter(machine, file, definitions[-1], presume=False, budget=BUDGET)
    try:
        made = calls.apply(machine, names.module_name(machine, file, name), [], {}, definitions[-1])
        return _steps(machine, made)
    except Exhausted:
        return "the step is larger than the reader's budget: the rest was left unread"
    except RecursionError:
        return "the step nests too deeply: the rest was left unread"
    except CheckError:
        raise
    except Exception as error:  # the reader's fault; the other ways of looking must still run
        return f"internal error while reading, please report it: {type(error).__name__}: {error}"


def _steps(machine: Machine, made: Value) -> str:
    if not isinstance(made, Seq) or made.items is None or len(made.items) != 2:
        return "what the factory returns could not be followed to (step, inputs)"
    step, inputs = made.items
    if isinstance(step, Unknown):
        return "the step could not be followed from the factory"
    machine.at.between = True
    given = calls.apply(machine, inputs, [Plain("int", varying=True)], {}, machine.at.stack[-1].node)
    machine.at.between = False
    keywords: dict[str, Value] = {}
    if isinstance(given, Dict):
        args, keywords = [], {str(name): _static(machine, value) for name, value in given.entries or ()}
    elif isinstance(given, Seq) and given.items is not None:
        args = [_static(machine, v) for v in given.items]
    elif isinstance(given, Seq):
        args = [_static(machine, given.any)]
    else:
        args = [_static(machine, given)] if isinstance(given, Tensor) else []
    _root(machine, step)
    machine.at.in_step = True
    for run in range(3):
        machine.at.reporting = run == 2
        machine.at.default_device = ""
        frame = machine.at.stack[0]
        machine.at.stack = [Call("<check>", frame.file, frame.node, scope=frame.scope)]
        calls.apply(machine, step, args, keywords, frame.node)
        machine.step.next_run()
        machine.at.conditions = 0
    return ""


def _root(machine: Machine, step: Value) -> None:
    """Let the call chain begin with the step itself."""
    if isinstance(step, Func):
        machine.at.stack[0].node = step.node


def _static(machine: Machine, value: Value) -> Value:
    """An input: whatever made it, the caller copies it into the same buffer."""
    if isinstance(value, Tensor):
        return replace(value, in_step=False, varying=True)
    if isinstance(value, Seq) and value.items is not None:
        return replace(value, items=tuple(_static(machine, v) for v in value.items))
    if isinstance(value, Dict) and value.entries is not None:
        return replace(value, entries=tuple((key, _static(machine, v)) for key, v in value.entries))
    if isinstance(value, Obj):
        # A record that inputs made holds inputs; what is in any other object is handed over as it is.
        fresh = any(value is known for known in machine.step.given)
        record = fresh and names.is_record(machine, value.cls)
        for name, inner in value.attributes.items():
            if record:
                value.attributes[name] = _static(machine, inner)
            elif isinstance(inner, Tensor):
                value.attributes[name] = replace(inner, in_step=False, moving=inner.moving or fresh)
    return value


# ---- a tree of files


def read_file(machine: Machine, file: SourceFile) -> list[str]:
    """Everything in a file that looks like a step. Returns what could not be read."""
    problems = []
    for label, root in _roots(machine, file):
        try:
            root()
        except Exhausted:
            problems.append(f"{file.path}: {label}: larger than the reader's budget, the rest was left unread")
        except RecursionError:
            problems.append(f"{file.path}: {label}: nested too deeply, left unread")
        except Exception as error:  # a fault of the reader must not cost the user the other thousand files
            problems.append(f"{file.path}: {label}: internal error, please report it: {type(error).__name__}: {error}")
    return problems


Root = tuple[str, Callable[[], None]]


def _roots(machine: Machine, file: SourceFile) -> Iterator[Root]:
    found = captures.found_in(file)
    if found.places:
        yield "<module>", partial(_module, machine, file, found)
    for statement in list(captures.statements(file.tree.body)):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            captured = found.within(statement)
            if looks_like_factory(statement, options=not captured):
                yield statement.name, partial(_factory, machine, file, statement)
            elif captured:
                yield statement.name, partial(_capture, machine, file, found, statement, None)
            elif captures.STEP.fullmatch(statement.name):
                yield statement.name, partial(_named, machine, file, statement, None)
        elif isinstance(statement, ast.ClassDef):
            yield from _class_roots(machine, file, statement, found)


def _class_roots(machine: Machine, file: SourceFile, node: ast.ClassDef, found: captures.Captures) -> Iterator[Root]:
    methods = {s.name: s for s in node.body if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)}
    if "forward" in methods:
        yield f"{node.name}.forward", partial(_forward, machine, file, node, methods["forward"])
    for method in methods.values():
        if found.within(method):
            yield f"{node.name}.{method.name}", partial(_capture, machine, file, found, method, node)
        elif captures.STEP_METHOD.fullmatch(method.name):
            yield f"{node.name}.{method.name}", partial(_named, machine, file, method, node)


def looks_like_factory(node: captures.Function, *, options: bool) -> bool:
    """`def factory(): ...; return step, inputs`: a pair is returned. With `options`, parameters that have defaults are
    allowed where the pair begins with a function defined here: a step too may have them and return a pair."""
    last = node.body[-1] if node.body else None
    if not (isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple) and len(last.value.elts) == 2):
        return False
    if not (node.args.args or node.args.kwonlyargs or node.args.vararg):
        return True
    step = last.value.elts[0]
    inner = {statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)}
    return options and accepts(node.args, 0) and isinstance(step, ast.Name) and step.id in inner


def accepts(given: ast.arguments, count: int) -> bool:
    """Whether a call may pass `count` positional arguments and nothing else."""
    positional = len(given.posonlyargs) + len(given.args)
    most = count if given.vararg else positional
    return positional - len(given.defaults) <= count <= most and None not in given.kw_defaults


def _factory(machine: Machine, file: SourceFile, node: captures.Function) -> None:
    reader = Interpreter(machine.known.project, machine.found)
    _enter(reader, file, node, presume=False)
    made = calls.apply(reader, names.module_name(reader, file, node.name), [], {}, node)
    if not isinstance(made, Seq) or made.items is None or len(made.items) != 2:
        return
    step, inputs = made.items
    if isinstance(step, Func | Obj) and isinstance(inputs, Func) and accepts(inputs.node.args, 1):
        reader.found.steps.add((file.path, node.lineno))
        _steps(reader, made)


def _forward(machine: Machine, file: SourceFile, node: ast.ClassDef, method: captures.Function) -> None:
    _enter(machine, file, node)
    cls = names.module_name(machine, file, node.name)
    if not isinstance(cls, Class) or cls.node is not node or not names.is_module(machine, cls):
        return
    obj = calls.summary(machine, cls)
    if not isinstance(obj, Obj):
        return
    machine.at.stack[0].node = method
    machine.at.in_step = machine.at.reporting = True
    machine.found.steps.add((file.path, method.lineno))
    func = Func(method, file, cls.scope, obj, cls)
    machine.call_function(func, parameters.presumed(machine.at, method), {}, method)


def _module(machine: Machine, file: SourceFile, found: captures.Captures) -> None:
    """The statements of a file that captures, as running it would: a capture among them, or in what they call."""
    calling = any(
        isinstance(inner, ast.Call) for s in file.tree.body if isinstance(s, ast.Expr | ast.If) for inner in ast.walk(s)
    )
    if not (calling or captures.own(file.tree.body, found.names)):
        return
    _enter(machine, file, file.tree)
    machine.at.reporting = True
    scope = Scope(file, {"__name__": Const("__main__")}, None)
    machine.at.stack.append(Call("<module>", file, file.tree, scope=scope))
    machine.block(file.tree.body)
    _uncalled(machine, file, found)


def _function(
    machine: Machine, file: SourceFile, node: captures.Function, owner: ast.ClassDef | None
) -> tuple[Func, list[Value]] | None:
    """A function that nobody calls in sight, with what its parameters are presumed to be. None for a method of a class
    that cannot be read."""
    _enter(machine, file, node)
    machine.at.reporting = True
    scope = names.module_scope(machine.known, file)
    receiver: Value | None = None
    cls: Class | None = None
    if owner is not None:
        value = names.module_name(machine, file, owner.name)
        if not isinstance(value, Class) or value.node is not owner:
            return None
        cls, receiver = value, calls.summary(machine, value)
    return Func(node, file, scope, receiver, cls), parameters.presumed(
        machine.at, node, bound=owner is not None, used=tables.IN_STEPS
    )


def _capture(
    machine: Machine, file: SourceFile, found: captures.Captures, node: captures.Function, owner: ast.ClassDef | None
) -> None:
    """A function with an explicit capture in it, or in a function in it: only what is captured is the step."""
    made = _function(machine, file, node, owner)
    if made is None:
        return
    machine.call_function(*made, {}, node)
    _uncalled(machine, file, found)


def _uncalled(machine: Machine, file: SourceFile, found: captures.Captures) -> None:
    """Functions in those that were read that capture, and that nobody called."""
    while machine.at.defined:
        func = machine.at.defined.pop()
        node = func.node
        read = id(node) in machine.at.entered or node in file.tree.body  # which is a root of its own
        if read or isinstance(node, ast.Lambda) or func.scope is None or func.file is not file:
            continue
        if found.within(node):
            machine.at.conditions = machine.at.quiet = 0
            machine.at.in_step = machine.at.explicit = False
            given = parameters.presumed(machine.at, node, bound=False, used=tables.IN_STEPS)
            machine.call_function(func, given, {}, node)


def _named(machine: Machine, file: SourceFile, node: captures.Function, owner: ast.ClassDef | None) -> None:
    """A function that is named as a step is. Whether it is ever captured is not known: what it does is a suspect."""
    made = _function(machine, file, node, owner)
    if made is None or (made[0].owner is not None and names.is_module(machine, made[0].owner)):
        return
    work = machine.step.tensor_work
    machine.at.stack[0].node = node
    machine.at.in_step = True
    machine.at.conditions = 1
    machine.call_function(*made, {}, node)
    if machine.step.tensor_work > work or any(isinstance(value, Tensor) for value in made[1]):
        machine.found.steps.add((file.path, node.lineno))
