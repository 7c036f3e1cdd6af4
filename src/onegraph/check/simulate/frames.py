"""Where in the user's code something happened: call chains, lines, columns, and the branch that two paths parted at."""

import ast
import dis
import functools
import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from onegraph.check.constructs import Functions, last_name, own_nodes, parsed, walked
from onegraph.check.places import package_of
from onegraph.check.report import Frame, relative

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))

Chain = tuple[tuple[CodeType, int], ...]
"""Frames of torch left out, innermost first: (code object, index of the instruction)."""


class CodeLocation(NamedTuple):
    path: str
    line: int
    column: int
    source: str


@functools.cache
def _skipped(filename: str) -> bool:
    """Frames that no one wants to see: torch and the code that it writes, this package, the import machinery."""
    ours: tuple[str, ...] = (HERE + os.sep, _TORCH + os.sep, "<frozen", "<string>", "<eval_with_key>")
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        ours += (os.path.abspath(cache) + os.sep,)
    return filename.startswith(ours) or filename == warnings.__file__ or os.sep + "torchinductor_" in filename


TWINS: dict[CodeType, tuple[CodeType, dict[int, int]]] = {}
"""Copies of the user's code that run in its place: the code itself, and its instruction for each of the copy's."""

TAILS: dict[CodeType, Chain] = {}
"""Calls that lead to a frame at which chains end, where they are not on the stack."""


def in_thread(work: Callable[[], Any]) -> None:
    """Call chains of a thread of the user's end at this frame."""
    work()


_THREAD = in_thread.__code__


def chain(stop: CodeType, depth: int = 1) -> Chain:
    """The calls between here and the frame whose code is `stop`, which is left out; empty outside of it."""
    return chain_from(sys._getframe(depth), stop)


def chain_of_thread(ident: int, stop: CodeType) -> Chain:
    """What another thread is doing now."""
    return chain_from(sys._current_frames().get(ident), stop)


_WAITS = ("Condition.wait", "Thread.join", "Thread._wait_for_tstate_lock")
"""What all of Python's waits for a thread end in: events, queues, futures, pools."""


def waits_for_thread(ident: int) -> bool:
    """Whether a thread is in one of Python's waits for another one: for a lock, an event, a queue, a result."""
    frame = sys._current_frames().get(ident)
    return frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_qualname in _WAITS


def chain_from(frame: FrameType | None, stop: CodeType) -> Chain:
    """The calls between `frame` and the one whose code is `stop`, or the begin of its thread."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None:
        code = frame.f_code
        if code is stop:
            return (*found, *TAILS.get(stop, ()))
        if code is _THREAD:
            while found and package_of(found[-1][0].co_filename) == "":  # Python's own way to the thread's work
                found.pop()
            return tuple(found)
        if not _skipped(code.co_filename):
            found.append(_own(code, frame.f_lasti))
        frame = frame.f_back
    return ()


_PRECALL = dis.opmap.get("PRECALL", -1)


def _own(code: CodeType, lasti: int) -> tuple[CodeType, int]:
    """The user's own code and instruction, for a copy of it that runs in its place.

    Python 3.11 calls a builtin in PRECALL once the function has run a few times, and in the CALL behind it until then:
    both are one place, else `sum(generator)` looks like a path of its own in later steps.
    """
    if _PRECALL >= 0 and lasti >= 0 and code.co_code[lasti] == _PRECALL:
        lasti += 4
    twin = TWINS.get(code) if TWINS else None
    return (code, lasti) if twin is None else (twin[0], twin[1].get(lasti, -1))


def chain_of_error(error: BaseException, stop: CodeType) -> Chain:
    """The calls between where an error was raised and the frame whose code is `stop`; none where it did not come
    through that."""
    way = _way(error)
    if all(code is not stop for code, _ in way):
        return ()
    found: list[tuple[CodeType, int]] = []
    for code, lasti in way:
        if code is stop:
            found.clear()
        elif not _skipped(code.co_filename):
            found.insert(0, _own(code, lasti))
    return (*found, *TAILS.get(stop, ()))


def raised_by(error: BaseException) -> CodeType | None:
    """The code whose `raise` or `assert` an error comes from; None where an op or a function of Python's raised it."""
    code, lasti = _way(error)[-1]
    return code if opname(code, lasti) == "RAISE_VARARGS" else None


def _way(error: BaseException) -> list[tuple[CodeType, int]]:
    """The frames that an error came through, outermost first."""
    found = []
    at: TracebackType | None = error.__traceback__
    while at is not None:
        found.append((at.tb_frame.f_code, at.tb_lasti))
        at = at.tb_next
    return found


def asks_itself(depth: int = 1) -> bool:
    """Whether the frame that called is the user's own: an optimizer of torch asks for its own sake."""
    return not _skipped(sys._getframe(depth).f_code.co_filename)


def in_file(path: str, depth: int) -> bool:
    """Whether the frame so many calls up is of this file."""
    return sys._getframe(depth).f_code.co_filename == path


def compiled() -> bool:
    """Whether a function that torch compiles is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame is not None


def place(code: CodeType, lasti: int) -> CodeLocation:
    """File, line, column (from 1) and text of the instruction `lasti` of `code`."""
    return _place(code, code.co_filename, lasti)


@functools.lru_cache(maxsize=65536)
def _place(code: CodeType, path: str, lasti: int) -> CodeLocation:
    """`place`; code objects of two files with the same text are equal, so the file's name is part of the key."""
    line, column = code.co_firstlineno, 1
    for index, (start, _, first, _) in enumerate(code.co_positions()):
        if index * 2 == lasti:
            line, column = start or line, (first or 0) + 1
            break
    return CodeLocation(path, line, column, linecache.getline(path, line).rstrip("\n"))


@functools.lru_cache(maxsize=65536)
def opname(code: CodeType, lasti: int) -> str:
    """Name of the bytecode instruction that was running: tells `if t:` from `bool(t)` and `x[i]` from `f(i)`."""
    for instruction in dis.get_instructions(code):
        if instruction.offset == lasti:
            return instruction.opname
    return ""


@functools.lru_cache(maxsize=65536)
def called(code: CodeType, lasti: int) -> str:
    """Name of the function or method that the running instruction calls, dots and all before the last one left out;
    "" where it is no call."""
    at = next((p for i, p in enumerate(code.co_positions()) if i * 2 == lasti), None)
    module = tree(code.co_filename)
    if at is None or module is None:
        return ""
    for node in walked(module):
        here = isinstance(node, ast.Call) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == at
        if isinstance(node, ast.Call) and here:
            return last_name(node.func)
    return ""


class Roots:
    """Which frames are the user's: what lies outside of installed packages, and the packages of the step's modules."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def add(self, cls: type) -> None:
        module = sys.modules.get(cls.__module__)
        path = getattr(module, "__file__", None)
        package = package_of(path) if path else None
        if package and package != "torch":
            self.packages.add(package)

    def owns(self, code: CodeType) -> bool:
        package = package_of(code.co_filename)
        return package is None or package in self.packages

    def where(self, calls: Chain) -> tuple[CodeType, int] | None:
        """The innermost frame of the user; the innermost frame of all where none is."""
        return next((c for c in calls if self.owns(c[0])), calls[0] if calls else None)

    def place(self, calls: Chain) -> CodeLocation | None:
        where = self.where(calls)
        return place(*where) if where else None

    def opname(self, calls: Chain) -> str:
        where = self.where(calls)
        return opname(*where) if where else ""

    def line(self, calls: Chain) -> str:
        """The place as people read it, "path:line"."""
        at = self.place(calls)
        return f"{relative(at.path)}:{at.line}" if at else ""


def frames(calls: Chain, roots: Roots) -> tuple[Frame, ...]:
    """The chain from `step` down to the user's innermost line, as a report shows it."""
    start = next((i for i, c in enumerate(calls) if roots.owns(c[0])), 0)
    shown = []
    for code, lasti in reversed(calls[start:]):
        at = place(code, lasti)
        shown.append(Frame(path=at.path, line=at.line, function=code.co_qualname, source=at.source.strip()))
    return tuple(shown)


@functools.lru_cache(maxsize=512)
def tree(path: str) -> ast.Module | None:
    """The tree of a file, None where it is no Python."""
    return parsed("".join(linecache.getlines(path)))


def parted(common: Chain | None, ours: Chain | None, theirs: Chain | None) -> CodeLocation | None:
    """The branch or loop header at which two runs parted.

    Args:
        common: chain of the last op that both runs did; None at the start of the step.
        ours, theirs: chains of the next op of each run; None where a run had ended, empty for an op of torch's own (a
            thread of the backward pass).
    """
    if not ours:
        ours, theirs = theirs, ours
    if not ours:
        return None
    mine = ours[::-1]
    other = theirs[::-1] if theirs is not None else None
    last = common[::-1] if common is not None else ()
    if other == mine:
        other = None  # the same call, more often in one run
    level = _level(mine, other if other is not None else last)
    if other is not None and last:  # one of the two still is inside of a call that the other has left
        if _level(mine, last) > level:
            level, other = _level(mine, last), None
        elif _level(other, last) > level:
            level, mine, other = _level(other, last), other, None
    again = False  # one run went once more round a loop of a caller
    while other is None and level and _backwards(mine, last, level):
        level, again = level - 1, True
    for depth in [*range(level, len(mine)), *range(level - 1, -1, -1)]:
        if depth < level and last[: depth + 1] == mine[: depth + 1]:
            break  # both runs came through here
        code, lasti = mine[depth]
        at = place(code, lasti)
        end = before = None
        if depth <= level and other is not None and depth < len(other) and other[depth][0] is code:
            end = place(*other[depth]).line
        if depth <= level and not again and depth < len(last) and last[depth][0] is code:
            before = place(*last[depth]).line
        if depth < level and end == at.line:
            end = None
        found = _header(at.path, code, at.line, end, before, early=depth >= level, again=again and depth == level)
        if found is not None:
            line, column = found
            return CodeLocation(at.path, line, column, linecache.getline(at.path, line).rstrip("\n"))
    return place(*mine[level])


def _level(mine: Chain, other: Chain) -> int:
    """Depth of the outermost frame in which two chains (outermost first) are at different places."""
    level = 0
    while level < min(len(mine), len(other)) - 1 and mine[level] == other[level]:
        level += 1
    if level and level < len(other) and mine[level][0] is not other[level][0]:
        level -= 1  # two callees of one line: the caller chose
    return level


def _backwards(mine: Chain, last: Chain, level: int) -> bool:
    """Whether the frame at `level` stands before where it stood, without a loop of its own that could explain it."""
    if level >= min(len(mine), len(last)) or mine[level][0] is not last[level][0] or mine[level][1] >= last[level][1]:
        return False
    code, line, other = mine[level][0], place(*mine[level]).line, place(*last[level]).line
    module = tree(code.co_filename)
    nodes = _inside(module, code) if module is not None else []
    loops = [n for n in nodes if isinstance(n, (ast.For, ast.While, *_COMPREHENSIONS))]
    return not any(n.lineno <= min(line, other) and max(line, other) <= (n.end_lineno or 0) for n in loops)


_BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.Match, ast.Try, ast.AsyncFor)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def _inside(module: ast.Module, code: CodeType) -> list[ast.AST]:
    """Nodes of the function that `code` was compiled from, without those of functions nested in it."""
    root: ast.AST = module
    for node in walked(module):
        if isinstance(node, Functions):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            named = isinstance(node, ast.Lambda) or node.name == code.co_name
            if first == code.co_firstlineno and named and isinstance(node, ast.Lambda) == (code.co_name == "<lambda>"):
                root = node
                break
    return list(own_nodes(ast.iter_child_nodes(root), Functions))


def _header(
    path: str, code: CodeType, line: int, other: int | None, before: int | None, *, early: bool, again: bool = False
) -> tuple[int, int] | None:
    """Header of the innermost compound statement that holds `line` but not `other` in the same arm.

    early: without one, the last `if` before `line` that leaves the function or loop is taken. again: the last one of
    the loop that was gone round once more, if it has any: a loop over a fixed list is left by what its body decides.
    """
    module = tree(path)
    if module is None:
        return None
    nodes = _inside(module, code)
    best: tuple[int, int] | None = None
    for node in nodes:
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) or 0
        if not first <= line <= last:
            continue
        column = getattr(node, "col_offset", 0) + 1
        if isinstance(node, (*_COMPREHENSIONS, ast.IfExp)):
            if other is None or other == line:
                best = max(best or (0, 0), (first, column))
            continue
        if not isinstance(node, _BRANCHES) or _arm(node, line) is None:
            continue
        if other is not None and other != line and _arm(node, line) == _arm(node, other):
            continue  # both inside one arm: something deeper parted them
        if other is not None and other == line and not isinstance(node, ast.For | ast.While):
            continue
        best = max(best or (0, 0), (first, column))
    if (best is None and early) or (best is not None and again):
        start = best[0] if best is not None else before if before is not None else code.co_firstlineno
        for node in nodes:
            leaves = isinstance(node, ast.If) and any(
                isinstance(n, ast.Return | ast.Continue | ast.Break | ast.Raise) for n in ast.walk(node)
            )
            if leaves and isinstance(node, ast.If) and start <= node.lineno < line:
                best = max(best or (0, 0), (node.lineno, node.col_offset + 1))
    return best


def branches_around(calls: Chain) -> list[ast.If]:
    """The `if` statements that lie around the calls of a chain, in the functions that make them."""
    found = []
    for code, lasti in calls:
        module, line = tree(code.co_filename), place(code, lasti).line
        nodes = _inside(module, code) if module is not None else ()
        found += [node for node in nodes if isinstance(node, ast.If) and _arm(node, line) is not None]
    return found


def _arm(node: ast.AST, line: int) -> int | None:
    """Which arm of a compound statement a line is in: 0 body, 1 else, 2... handlers; None for the header or outside."""
    arms = [getattr(node, "body", []), getattr(node, "orelse", [])]
    arms += [h.body for h in getattr(node, "handlers", [])] + [c.body for c in getattr(node, "cases", [])]
    for index, body in enumerate(arms):
        if isinstance(body, list) and body and body[0].lineno <= line <= (body[-1].end_lineno or body[-1].lineno):
            return index
    return None
