"""Consequences marked by their cause: what a step does with a number follows from the line that read it.

The way is the one that the calls of both findings took: in the innermost function that they share, the names that the
cause's statement binds are followed to the other's statement, and from there into the functions that it calls. A name
that is bound to something else on the way is followed no further, nor is a number into the tensor that an op makes with
it. Simulation tells of some consequences itself.
"""

import ast
import linecache
from collections.abc import Iterator, Set
from dataclasses import replace

from onegraph.check import constructs
from onegraph.check.report import Cause, Finding, Frame, Report, Severity

Ops = frozenset[tuple[str, int]]

CAUSES = frozenset(["CG101", "CG104", "CG108"])
"""A device value, or a shape that depends on one, comes to the host here."""

FOLLOWING = frozenset(["CG201", "CG202", "CG203", "CG204", "CG208", "CG210"])
"""What a host number can lead to."""

KEPT = frozenset(["CG205", "CG206", "CG209"])
"""A tensor that lives across steps is another one: a branch may decide whether it is bound anew."""

INSIDE = frozenset(["CG202", "CG204", "CG205", "CG206", "CG208", "CG209"])
"""What a stretch of code that only some steps run may do: whoever mends the branch decides about it."""


def mark_consequences(report: Report) -> Report:
    """The report with each consequence marked by its cause (`Finding.follows`)."""
    first = [f for f in report.findings if f.severity is Severity.ERROR and f.follows is None]
    ops = frozenset((event.path, event.line) for event in report.timeline)
    return replace(report, findings=tuple(_with_pick(_marked(f, first, ops), ops) for f in report.findings))


def _with_pick(finding: Finding, ops: Ops) -> Finding:
    """An op that gets another tensor is told with the line that picks the tensor, if there is one (`picked`)."""
    at = picked(finding, ops) if finding.code == "CG205" and finding.follows is None else None
    return finding if at is None else replace(finding, message=f"{finding.message}; line {at.line} picks it")


def _marked(finding: Finding, first: list[Finding], ops: Ops) -> Finding:
    if finding.follows is not None:
        return finding
    causes = (
        *(f for f in first if f.code in CAUSES and _follows(f, finding, ops)),
        *(f for f in first if f.code == "CG201" and finding.code in INSIDE and _inside_of(f, finding)),
        *(f for f in first if f.code == "CG201" and finding.code in INSIDE and _changed_in(f, finding, ops)),
        *(f for f in first if f.code == finding.code == "CG202" and _same_number(f, finding)),
    )
    if not causes:
        return finding
    return replace(finding, follows=Cause(path=causes[0].path, line=causes[0].line, code=causes[0].code))


def _follows(cause: Finding, finding: Finding, ops: Ops) -> bool:
    if finding.code in KEPT:
        return _rebinds(cause, finding)
    if finding.code not in FOLLOWING:
        return False
    return _here(cause, finding) or _parts(cause, finding) or leads(cause.calls, finding.calls, ops)


def _same_number(first: Finding, finding: Finding) -> bool:
    """One call of one function hands the same number, step by step, to an op further up."""
    if first.line >= finding.line or not first.values or first.values != finding.values:
        return False
    here, there = first.calls[-1:], finding.calls[-1:]
    return bool(here) and first.calls[:-1] == finding.calls[:-1] and _place(here[0]) == _place(there[0])


def _place(frame: Frame) -> tuple[str, str]:
    return frame.path, frame.function


def _rebinds(cause: Finding, finding: Finding) -> bool:
    """A branch on a device value binds the attribute that a later step reads at this line."""
    branch, statement = (_statement_at(f.calls[-1]) if f.calls else None for f in (cause, finding))
    if not isinstance(branch, ast.If | ast.While) or statement is None:
        return False
    return any(name.startswith(".") for name in _changed(branch) & _read(statement))


def _parts(cause: Finding, finding: Finding) -> bool:
    """Two runs of a loop part where its body takes a branch on a device value: the loop goes round as often."""
    if finding.code != "CG201" or not cause.calls or cause.path != finding.path:
        return False
    body = _function(finding.path, finding.line, cause.line)
    loop, branch = (_statement(body, f.line) for f in (finding, cause))
    return isinstance(loop, ast.For) and isinstance(branch, ast.If | ast.While) and _inside(loop, branch)


def _inside_of(branch: Finding, finding: Finding) -> bool:
    """Whether one of the finding's calls stands inside of the `if` at which the path parts; or the tensor is one of
    those that the loop goes through."""
    at = _statement(_function(branch.path, branch.line), branch.line)
    if isinstance(at, ast.For) and finding.code == "CG205":
        loop = next((i for i, f in enumerate(branch.calls, 1) if f.path == branch.path and _holds(at, f.line)), 0)
        to_loop = (*branch.calls[: loop - 1], replace(branch.calls[loop - 1], line=at.lineno)) if loop else ()
        return leads(to_loop, finding.calls)
    if not isinstance(at, ast.If):
        return False
    lines = [frame.line for frame in finding.calls if frame.path == branch.path]
    return any(at.body[0].lineno <= line <= (at.end_lineno or 0) for line in lines)


def _changed_in(branch: Finding, finding: Finding, ops: Ops) -> bool:
    """Whether the line reads what the `if` at which the path parts may have bound to something else."""
    at = _statement(_function(branch.path, branch.line), branch.line)
    inside = next((i for i, f in enumerate(branch.calls) if at and f.path == branch.path and _holds(at, f.line)), None)
    if not isinstance(at, ast.If) or inside is None:
        return False
    source = (*branch.calls[:inside], replace(branch.calls[inside], line=branch.line))
    return leads(source, finding.calls, ops, _changed(at) - {"self"})


def decides(condition: Finding, parted: Finding) -> bool:
    """Whether a condition decides about the op without which the path parted (the last of `parted`'s calls): its `if`
    is around one of that op's calls, or it stands in what the loop at which the path parts goes through."""
    shared = _shared(condition.calls, parted.calls)
    if not shared:
        return False
    here, there = condition.calls[shared - 1], parted.calls[shared - 1]
    if shared == len(condition.calls):
        statement = _statement_at(here)
        bodies = (statement.body, statement.orelse) if isinstance(statement, ast.If | ast.While) else ()
        return any(_holds(inner, there.line) for body in bodies for inner in body)
    return (here.path, here.line) == (parted.path, parted.line) and isinstance(_statement_at(here), ast.For)


def _shared(source: tuple[Frame, ...], target: tuple[Frame, ...]) -> int:
    """How many functions two ways through the calls share; in the last of them their lines may differ."""
    shared = 0
    for ours, theirs in zip(source, target, strict=False):
        if (ours.path, _own(ours)) != (theirs.path, _own(theirs)):
            break
        shared += 1
        if ours.line != theirs.line:
            break
    return shared


def _holds(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)


def _statement_at(frame: Frame) -> ast.stmt | None:
    return _statement(_function(frame.path, frame.line), frame.line)


def _here(cause: Finding, finding: Finding) -> bool:
    """Python state that is bound to what the same line reads."""
    return finding.code == "CG210" and (cause.path, cause.line) == (finding.path, finding.line)


def leads(
    source: tuple[Frame, ...], target: tuple[Frame, ...], ops: Ops = frozenset(), changed: Set[str] = frozenset()
) -> bool:
    """Whether a value read at the end of the calls `source` reaches the line at the end of the calls `target`.

    `ops`: places of lines that ran ops: what they bind are tensors, no numbers of the host. `changed`: names and
    attributes that are bound there besides those of the statement itself.
    """
    shared = _shared(source, target)
    if not shared:
        return False
    here, there = source[shared - 1], target[shared - 1]
    body = _function(here.path, here.line, there.line)
    if body is None and here.function == "<module>":  # a script's own lines
        body = _module(here.path)
    first, last = (_statement(body, f.line) for f in (here, there))
    if body is None or first is None or last is None:
        return False
    if first is last and not changed:
        plain = not isinstance(first, ast.For | ast.While | ast.If | ast.With)
        return plain or len(source) > shared == len(target)  # the header calls what reads, and runs the op with it
    names = _bound(first) | _attributes(source[shared:]) | changed
    tensors = frozenset(line for path, line in ops if path == here.path)
    behind = max(_statements(first), key=lambda s: s.lineno, default=first) if changed else first
    names = _flow(body, names, tensors, after=behind, before=last)
    return _reaches(last, names, target[shared:], ops)


def _own(frame: Frame) -> str:
    """A function's name, which reading gives without those of the functions around it."""
    return frame.function.rsplit(".", 1)[-1]


def _reaches(statement: ast.stmt, names: set[str], calls: tuple[Frame, ...], ops: Ops) -> bool:
    """Whether a statement reads one of the names, or hands one to the functions that lead to the line in question."""
    if not calls:
        return bool(_read(statement) & names)
    body = _function(calls[0].path, calls[0].line)
    last = _statement(body, calls[0].line)
    if not isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef) or last is None:
        return False
    handed = _handed(statement, body, names) | {n for n in names if n.startswith(".")}
    tensors = frozenset(line for path, line in ops if path == calls[0].path)
    return _reaches(last, _flow(body, handed, tensors, after=None, before=last), calls[1:], ops)


def _handed(statement: ast.stmt, function: ast.FunctionDef | ast.AsyncFunctionDef, names: set[str]) -> set[str]:
    """Parameters of `function` that its call in `statement` fills with one of the names; `self` of one called on it."""
    parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    found = set()
    for call in ast.walk(statement):
        if not isinstance(call, ast.Call):
            continue
        own = constructs.last_name(call.func) == function.name
        if parameters[:1] == ["self"] and (own or function.name in ("forward", "__call__")):
            given = parameters[1:]
        elif own:
            given = parameters
        else:
            continue
        if given is not parameters and _names(call.func) & names:
            found.add("self")
        pairs = [*zip(given, call.args, strict=False), *((k.arg or "", k.value) for k in call.keywords)]
        starred = next((i for i, value in enumerate(call.args) if isinstance(value, ast.Starred)), None)
        if starred is not None:
            pairs += [(name, call.args[starred]) for name in given[starred:]]
        found |= {name for name, value in pairs if _names(value) & names}
    return found


def _flow(
    body: ast.AST, names: set[str], tensors: frozenset[int], *, after: ast.stmt | None, before: ast.stmt
) -> set[str]:
    """What holds the value when `before` begins, if `names` held it after the statement `after`.

    Statements are read in their order, those of a loop around both twice. `tensors`: lines that bind what ops made.
    """
    names = set(names)
    around = any(isinstance(n, ast.For | ast.While) and _inside(n, before) and (after is None or _inside(n, after))
                 for n in ast.walk(body))  # fmt: skip
    statements = list(_statements(body))
    for loop in statements:
        around_read = isinstance(loop, ast.While) and after is not None and _inside(loop, after)
        if around_read and _read(loop) & names:
            names |= _changed(loop)
    for _ in range(2 if around else 1):
        for statement in statements:
            if not around and after is not None and statement.lineno <= after.lineno:
                continue
            if not around and statement.lineno >= before.lineno:
                break
            bound = _bound(statement)
            made = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign) and not tensors.isdisjoint(
                range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            )
            if _read(statement) & names and not made:
                names |= bound | (_changed(statement) if isinstance(statement, ast.If | ast.While | ast.For) else set())
            elif isinstance(statement, ast.Assign) and not around:
                names -= bound
    return names


def picked(finding: Finding, ops: Ops) -> Frame | None:
    """The line that gives a name to one of several tensors, of a finding that an op got another tensor through that
    name; None where no single line does: an attribute that was bound anew is one that every step reads."""
    names: set[str] | None = None
    for depth in range(len(finding.calls) - 1, -1, -1):
        frame = finding.calls[depth]
        body = _function(frame.path, frame.line)
        last = _statement(body, frame.line)
        if not isinstance(body, ast.FunctionDef) or last is None:
            return None
        names = _read(last) if names is None else names
        bound = {
            name: statement
            for statement in sorted(_statements(body), key=lambda s: s.lineno)
            if isinstance(statement, ast.Assign) and statement.lineno < last.lineno
            for name in _bound(statement) & names
        }
        lines = {line for path, line in ops if path == frame.path}
        picks = [
            each for each in {id(s): s for s in bound.values()}.values()
            if _picks(each.value)
            and lines.isdisjoint(range(each.lineno, (each.end_lineno or each.lineno) + 1))
        ]  # fmt: skip
        if picks:
            return replace(frame, line=picks[0].lineno) if len(picks) == 1 else None
        handed = {a.arg for a in (*body.args.posonlyargs, *body.args.args)} & names - set(bound)
        if not handed or not depth:
            return None
        names = _given(finding.calls[depth - 1], body, handed)
    return None


def _picks(value: ast.expr) -> bool:
    """Whether an expression takes one of several things."""
    taken = isinstance(value, ast.Call) and constructs.last_name(value.func) in ("get", "next", "pop", "popleft")
    return taken or isinstance(value, ast.Subscript | ast.IfExp)


def _given(caller: Frame, function: ast.FunctionDef, parameters: set[str]) -> set[str]:
    """Names that a call of the function, in the caller's line, hands to these parameters."""
    statement = _statement_at(caller)
    if statement is None:
        return set()
    return {name for name in _read(statement) if _handed(statement, function, {name}) & parameters}


def rebinds(frame: Frame) -> bool:
    """Whether a line binds an attribute to something new that is made of what it was."""
    statement = _statement_at(frame)
    return isinstance(statement, ast.Assign) and any(n.startswith(".") for n in _bound(statement) & _read(statement))


def sized(frame: Frame, ops: Ops = frozenset()) -> bool:
    """Whether a line computes with the size of a tensor: it, or what it reads, asks for a shape or a length."""
    body = _function(frame.path, frame.line)
    last = _statement(body, frame.line)
    if body is None or last is None:
        return False
    if _asks_size(last):
        return True
    tensors = frozenset(line for path, line in ops if path == frame.path)
    asked = [s for s in _statements(body) if s.lineno < last.lineno and s.lineno not in tensors and _asks_size(s)]
    return any(_flow(body, _bound(s), tensors, after=s, before=last) & _read(last) for s in asked)


def _asks_size(statement: ast.stmt) -> bool:
    parts = [n for e in _expressions(statement) for n in ast.walk(e)]
    calls = {constructs.last_name(n.func) for n in parts if isinstance(n, ast.Call)}
    shapes = any(isinstance(n, ast.Attribute) and n.attr == "shape" for n in parts)
    return shapes or bool(calls & {"size", "numel", "len"})


def _inside(node: ast.AST, statement: ast.stmt) -> bool:
    return any(child is statement for child in ast.walk(node))


def _statements(body: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a function in their order, without those of functions in it."""
    for child in ast.iter_child_nodes(body):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, constructs.Functions | ast.ClassDef):
            yield from _statements(child)


def _module(path: str) -> ast.Module | None:
    linecache.checkcache(path)
    return constructs.parsed("".join(linecache.getlines(path)))


def _function(path: str, first: int, last: int = 0) -> ast.AST | None:
    """The innermost function of a file that holds a line, or two."""
    module = _module(path)
    return constructs.function_around(module, first, last or first) if module is not None else None


def _statement(body: ast.AST | None, line: int) -> ast.stmt | None:
    """The innermost statement of a function at a line."""
    found = None
    for statement in _statements(body) if body is not None else ():
        if _holds(statement, line):
            found = statement
    return found


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """What a statement itself evaluates: of a branch its test, of a loop what it goes through."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child


def _names(node: ast.AST) -> set[str]:
    """Names that an expression reads; of attributes `.name`, whosever they are."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            found.add(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
            found.add(f".{part.attr}")
    return found


def _read(statement: ast.stmt) -> set[str]:
    found = {name for node in _expressions(statement) for name in _names(node)}
    if isinstance(statement, ast.AugAssign):
        found |= _targets(statement.target)
    return found


def _targets(node: ast.AST | None) -> set[str]:
    if isinstance(node, ast.Tuple | ast.List):
        return {name for item in node.elts for name in _targets(item)}
    if isinstance(node, ast.Starred | ast.Subscript):
        return _targets(node.value)
    return {f".{node.attr}"} if isinstance(node, ast.Attribute) else {node.id} if isinstance(node, ast.Name) else set()


def _bound(statement: ast.stmt) -> set[str]:
    """Names and attributes that a statement itself binds."""
    found = {n.target.id for e in _expressions(statement) for n in ast.walk(e) if isinstance(n, ast.NamedExpr)}
    match statement:
        case ast.Assign():
            found |= {name for target in statement.targets for name in _targets(target)}
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.AsyncFor():
            found |= _targets(statement.target)
        case ast.With() | ast.AsyncWith():
            found |= {name for item in statement.items for name in _targets(item.optional_vars)}
    return found


def _changed(statement: ast.stmt) -> set[str]:
    """Everything that is bound, or told to change, below a branch or loop: which of it is, its condition decides."""
    told = {
        name
        for n in ast.walk(statement)
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and isinstance(n.value.func, ast.Attribute)
        for name in _targets(n.value.func.value)
    }
    return told | {name for n in ast.walk(statement) if isinstance(n, ast.stmt) for name in _bound(n)}


def _attributes(calls: tuple[Frame, ...]) -> set[str]:
    """Attributes that the functions on the way to a read bind to what they read."""
    found = set()
    for frame in calls:
        if (statement := _statement_at(frame)) is not None:
            found |= {name for name in _bound(statement) if name.startswith(".")}
    return found
