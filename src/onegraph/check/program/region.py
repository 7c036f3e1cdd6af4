"""The statements that a program captures: found in its source, and made into a function that can be run again.

Nobody can run the middle of a `with` block again, but its statements are in the source, and the names that they use are
in the frame: compiled into a function of the same lines, over cells that hold what the names held, they do what the
block did. Values are held weakly: what the program frees has to be free.
"""

import ast
import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from onegraph.check.simulate import frames
from onegraph.check.simulate.device import DeviceTensor

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LEAVING = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.AsyncFor, ast.AsyncWith)
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_LOOKED_UP = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_DEEPEST = 8


class Gone(Exception):
    """Something that the statements use is no more."""


@dataclass(eq=False)
class Region:
    """Captured statements of one frame.

    begin: what the names that they use held when the capture began, each behind a function that raises Gone.
    identities: of these values. settled: what the names held when the last capture of the program ended, which bound
    them for its own sake. stored: names that they assign. frame: its identity, as long as it runs.
    """

    code: CodeType
    namespace: dict[str, Any]
    frame: int
    body: list[ast.stmt]
    begin: dict[str, Callable[[], Any]] = field(default_factory=dict)
    identities: dict[str, int] = field(default_factory=dict)
    settled: dict[str, Any] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()
    at_module: bool = False

    @property
    def key(self) -> tuple[CodeType, int]:
        """The same for every capture of these statements."""
        return self.code, self.body[0].lineno

    def current(self, name: str) -> Any:
        """What a name of the frame holds now. Raises Gone where the frame has returned."""
        if self.at_module:
            scope = self.namespace
        else:
            frame = running(self.frame, self.code)
            if frame is None:
                raise Gone(name)
            scope = scope_of(frame)
        if name not in scope:
            raise Gone(name)
        return scope[name]

    def function(self, values: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """The statements as a function over cells of `values`; it returns what they assigned, by the target's text.

        Raises SyntaxError where they cannot be one (`break` out of a loop around them).
        """
        made = _compiled(self, tuple(sorted(values)))
        namespace: dict[str, Any] = {}
        exec(made, self.namespace, namespace)
        body: Callable[[], dict[str, Any]] = namespace["__outer__"](**values)
        return body

    def targets(self) -> dict[str, ast.expr]:
        """What the statements assign, by its text: names, attributes and elements."""
        found: dict[str, ast.expr] = {}
        for node in own_nodes(self.body):
            assigned: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                assigned = node.targets
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                assigned = [node.target]
            for target in (t for a in assigned for t in _leaves(a)):
                if not any(isinstance(n, ast.Call) for n in ast.walk(target)):  # which may do more than to name it
                    found[ast.unparse(target)] = target
        return found

    def results(self, frame: FrameType) -> dict[str, Any]:
        """What the statements have assigned, read in their own frame."""
        found: dict[str, Any] = {}
        scope = scope_of(frame)
        for text in self.targets():
            try:
                found[text] = eval(text, frame.f_globals, scope)  # a name, attribute or element of theirs
            except Exception:  # an index that the statements changed, a property that raises
                continue
        return found


def scope_of(frame: FrameType) -> dict[str, Any]:
    """The names of a frame: a module's own, a copy of a function's."""
    if frame.f_locals is frame.f_globals:
        return frame.f_globals
    names = frame.f_locals
    copy = dict(names)
    if isinstance(names, dict):  # before Python 3.13 the frame keeps them there, and with them what it has deleted
        names.clear()
    return copy


def running(identity: int, code: CodeType) -> FrameType | None:
    """The frame with this identity that still runs `code`, None where it has returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (id(frame) == identity and frame.f_code is code):
        frame = frame.f_back
    return frame


def of_with(frame: FrameType) -> Region | None:
    """The body of the `with` statement that `frame` is about to enter."""
    line, column = _position(frame)
    best: tuple[ast.With, int] | None = None
    for node in _nodes(frame.f_code):
        if not isinstance(node, ast.With):
            continue
        if (node.lineno, node.col_offset) == (line, column):  # what Python 3.11 says of every item
            best = node, min(_entered(frame), len(node.items) - 1)
            continue
        for index, item in enumerate(node.items):
            at = item.context_expr
            inside = at.lineno <= line <= (at.end_lineno or at.lineno)
            if inside and (column is None or at.lineno != line or at.col_offset <= column):
                best = node, index
    if best is None:
        return None
    node, index = best
    later = node.items[index + 1 :]  # entered inside of the capture, as `no_grad()` may be
    own: ast.stmt = ast.copy_location(ast.With(items=later, body=node.body), node)
    return region_of(frame, [own] if later else node.body)


def _entered(frame: FrameType) -> int:
    """How many items of the `with` statement that `frame` is at it has entered before this one."""
    here = _position(frame)
    found = 0
    for instruction in dis.get_instructions(frame.f_code):
        at = instruction.positions
        if instruction.offset < frame.f_lasti and instruction.opname == "BEFORE_WITH" and at is not None:
            found += (at.lineno, at.col_offset) == here
    return found


def suite_of(frame: FrameType) -> tuple[list[ast.stmt], int] | None:
    """(statements of one block, index) of the statement that `frame` runs."""
    line, _ = _position(frame)
    found = None
    for suite in _suites(frame.f_code):
        for index, statement in enumerate(suite):
            here = statement.lineno <= line <= (statement.end_lineno or statement.lineno)
            if here and (found is None or statement.lineno >= found[0][found[1]].lineno):
                found = suite, index
    return found


def between(frame: FrameType, begin: tuple[list[ast.stmt], int] | None) -> list[ast.stmt]:
    """Statements between `begin` and the one that `frame` runs; none where they are not of one block."""
    end = suite_of(frame)
    if begin is None or end is None or begin[0] is not end[0]:
        return []
    return begin[0][begin[1] + 1 : end[1]]


def region_of(frame: FrameType, body: list[ast.stmt]) -> Region | None:
    """These statements of `frame`, None where they cannot be run by themselves."""
    own = list(own_nodes(body))
    if not body or any(isinstance(node, _LEAVING) for node in own):
        return None
    region = Region(frame.f_code, frame.f_globals, id(frame), body)
    region.at_module = frame.f_locals is frame.f_globals
    region.stored = frozenset(_stored(own))
    return region


def remember(region: Region, scope: dict[str, Any]) -> None:
    """Hold what the names that the statements use hold in `scope`, weakly. Functions, classes and imports of a module
    are looked up as the statements would."""
    used = {n.id for statement in region.body for n in ast.walk(statement) if isinstance(n, ast.Name)}
    for name in sorted(used):
        if name not in scope:
            continue
        value = scope[name]
        if region.at_module and name not in region.stored and isinstance(value, _LOOKED_UP):
            continue
        region.begin[name] = hold(value)
        region.identities[name] = id(value)


def identity(value: Any) -> Any:
    """What tells whether a name holds something else: a plain value, or which object it is."""
    return value if isinstance(value, _PLAIN) else id(value)


def settle(region: Region) -> None:
    """Another capture has ended: what the names of this one were bound to for it means nothing to this one."""
    for name in region.begin:
        try:
            region.settled[name] = identity(region.current(name))
        except Gone:
            region.settled.pop(name, None)


def hold(value: Any, depth: int = 0) -> Callable[[], Any]:
    """A function that gives `value`, or raises Gone once the program holds it no more."""
    if isinstance(value, _PLAIN) or depth > _DEEPEST:
        return lambda: value
    if isinstance(value, types.MethodType):
        function, owner = value.__func__, hold(value.__self__, depth + 1)
        return lambda: types.MethodType(function, owner())
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _function(value, depth)
    if isinstance(value, functools.partial):
        inner = hold((value.func, value.args, value.keywords), depth + 1)

        def partial() -> Any:
            function, args, keywords = inner()
            return functools.partial(function, *args, **keywords)

        return partial
    if isinstance(value, DeviceTensor):
        return _tensor(value)
    if type(value) in (tuple, list):
        kind, items = type(value), [hold(item, depth + 1) for item in value]
        return lambda: kind(item() for item in items)
    return _weak(value, depth)


def _weak(value: Any, depth: int) -> Callable[[], Any]:
    if type(value) is dict:
        pairs = [(key, hold(item, depth + 1)) for key, item in value.items()]
        return lambda: {key: item() for key, item in pairs}
    try:
        reference = weakref.ref(value)
    except TypeError:  # a slice, a size: nothing that holds a tensor of the program's
        return lambda: value

    def there() -> Any:
        found = reference()
        if found is None:
            raise Gone
        return found

    return there


def _tensor(value: DeviceTensor) -> Callable[[], Any]:
    """A view dies with the frame that made it; the memory that it showed need not."""
    reference, record, inner = weakref.ref(value), weakref.ref(value.record), value.inner
    world, index, learns = value.world, value.device.index, value.requires_grad

    def there() -> Any:
        found = reference()
        if found is not None:
            return found
        if record() is None or learns:
            raise Gone
        return DeviceTensor(inner, world, index)

    return there


def _function(value: types.FunctionType, depth: int) -> Callable[[], Any]:
    """A function of the frame's own dies with it, what it refers to need not."""
    reference = weakref.ref(value)
    code, names, defaults, keywords = value.__code__, value.__globals__, value.__defaults__, value.__kwdefaults__
    cells: list[Callable[[], Any]] = []
    for cell in value.__closure__ or ():
        try:
            cells.append(hold(cell.cell_contents, depth + 1))
        except ValueError:  # not bound yet
            cells.append(lambda: None)

    def made() -> Any:
        known = reference()
        if known is not None:
            return known
        again = types.FunctionType(code, names, code.co_name, defaults, tuple(types.CellType(c()) for c in cells))
        again.__kwdefaults__ = keywords
        return again

    return made


# the source


@functools.lru_cache(maxsize=256)
def _nodes(code: CodeType) -> tuple[ast.AST, ...]:
    module = frames.tree(code.co_filename)
    return tuple(frames._inside(module, code)) if module is not None else ()


def _suites(code: CodeType) -> Iterator[list[ast.stmt]]:
    """Blocks of statements of the function `code`, those of functions in it left out."""
    seen = {id(node) for node in _nodes(code)}
    module = frames.tree(code.co_filename)
    for node in ast.walk(module) if module is not None else ():
        for name in ("body", "orelse", "finalbody"):
            suite = getattr(node, name, None)
            if isinstance(suite, list) and suite and id(suite[0]) in seen:
                yield suite


def own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Nodes of statements, those inside of functions and classes that they define left out."""
    queue: list[ast.AST] = list(body)
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, _FUNCTIONS):
            queue.extend(ast.iter_child_nodes(node))


def _stored(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def _leaves(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [leaf for item in target.elts for leaf in _leaves(item)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def _position(frame: FrameType) -> tuple[int, int | None]:
    line, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return line or frame.f_lineno, column


def _compiled(region: Region, names: tuple[str, ...]) -> CodeType:
    targets = region.targets()
    told = ", ".join(f"{text!r}: (lambda: {text})" for text in targets)
    text = f"def __outer__({', '.join(names)}):\n def __body__():\n  return {{{told}}}\n return __body__"
    module = ast.parse(text)
    outer = module.body[0]
    assert isinstance(outer, ast.FunctionDef)
    inner = outer.body[0]
    assert isinstance(inner, ast.FunctionDef)
    first = region.body[0]
    for node in (inner, *ast.walk(inner.body[0])):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = first.lineno  # type: ignore[attr-defined]
    shared = sorted(region.stored & set(names))
    head: list[ast.stmt] = [ast.copy_location(ast.Nonlocal(names=shared), first)] if shared else []
    inner.body = [*head, *region.body, inner.body[0]]
    return compile(module, region.code.co_filename, "exec", dont_inherit=True)


def twins(original: CodeType, copy: CodeType) -> dict[CodeType, tuple[CodeType, dict[int, int]]]:
    """For `copy`, and the functions defined in it, the code of the program's own that says the same, with the index of
    the instruction for that of each of the copy's."""
    known: dict[Any, list[int]] = {}
    for instruction in dis.get_instructions(original):
        known.setdefault((instruction.opname, instruction.positions), []).append(instruction.offset)
    pairs: dict[int, int] = {}
    met: dict[Any, int] = {}
    last = 0
    for instruction in dis.get_instructions(copy, show_caches=True):
        if instruction.opname == "CACHE":  # where a frame that calls Python code says that it is
            if last in pairs:
                pairs[instruction.offset] = pairs[last] + instruction.offset - last
            continue
        last, key = instruction.offset, (instruction.opname, instruction.positions)
        offsets, nth = known.get(key, []), met.get(key, 0)
        met[key] = nth + 1
        if nth < len(offsets):
            pairs[last] = offsets[nth]
    found = {copy: (original, pairs)}
    theirs = [c for c in original.co_consts if isinstance(c, CodeType)]
    for code in (c for c in copy.co_consts if isinstance(c, CodeType)):
        other = next((t for t in theirs if _same_place(t, code)), None)
        if other is not None:
            found |= twins(other, code)
    return found


def _same_place(one: CodeType, other: CodeType) -> bool:
    return (one.co_name, list(one.co_positions())[:1]) == (other.co_name, list(other.co_positions())[:1]) or (
        one.co_name == other.co_name and one.co_firstlineno == other.co_firstlineno
    )
