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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from onegraph.check.constructs import own_nodes
from onegraph.check.program.held import PLAIN, Gone, Held, hold
from onegraph.check.program.statements import compiled, outside_of_class, stored, targets
from onegraph.check.simulate import frames

_LEAVING = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.AsyncFor, ast.AsyncWith)
_LOOKED_UP = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


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
    begin: dict[str, Held] = field(default_factory=dict)
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

    def held(self) -> dict[str, Any]:
        """What the names held when the capture began. Raises Gone where that is no more and the statements do not bind
        the name themselves."""
        values = {}
        for name, then in self.begin.items():
            try:
                values[name] = then()
            except Gone:
                if name not in self.stored:
                    raise
        return values

    def function(self, values: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """The statements as a function over cells of `values`; it returns what they assigned, by the target's text.

        A name that is not in `values` is unbound until the statements bind it. Raises SyntaxError where they cannot be
        one (`break` out of a loop around them).
        """
        made = compiled(self.body, self.stored, tuple(sorted(values)), self.code.co_filename)
        namespace: dict[str, Any] = {}
        exec(made, self.namespace, namespace)
        body: Callable[[], dict[str, Any]] = namespace["__outer__"](**values)
        return body

    def results(self, frame: FrameType) -> dict[str, Any]:
        """What the statements have assigned, read in their own frame."""
        found: dict[str, Any] = {}
        scope = scope_of(frame)
        for text in targets(self.body):
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
    if not body or any(isinstance(node, _LEAVING) for node in own_nodes(body)):
        return None
    region = Region(frame.f_code, frame.f_globals, id(frame), outside_of_class(body, frame.f_code))
    region.at_module = frame.f_locals is frame.f_globals
    region.stored = frozenset(stored(list(own_nodes(region.body))))
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
    return value if isinstance(value, PLAIN) else id(value)


def settle(region: Region) -> None:
    """Another capture has ended: what the names of this one were bound to for it means nothing to this one."""
    for name in region.begin:
        try:
            region.settled[name] = identity(region.current(name))
        except Gone:
            region.settled.pop(name, None)


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


def _position(frame: FrameType) -> tuple[int, int | None]:
    line, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return line or frame.f_lineno, column
