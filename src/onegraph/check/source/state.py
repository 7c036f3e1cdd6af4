"""What the reader knows and keeps: of the code, of where it is, of the step's storages, and what it has found."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from onegraph.check.report import Finding, Frame
from onegraph.check.source.files import Project, SourceFile
from onegraph.check.source.values import (
    UNKNOWN,
    Const,
    Dict,
    Func,
    Plain,
    Scope,
    Seq,
    Tensor,
    Value,
    kind_of,
    sites,
    tensors,
    varies,
)

DEPTH = 40
"""Calls followed below the root; deeper code is left unread rather than read badly."""

TREE_DEPTH = 14
"""The same below a `forward` of a tree, where each module's own `forward` is a root besides."""

BUDGET = 1_000_000
"""Expressions read per factory, its three steps included: seconds. The largest of the test corpus needs 910."""


class Exhausted(Exception):
    """The root's budget is spent: stop reading it."""


@dataclass
class Call:
    """One frame of the abstract call stack. `node` is what is being read in it; `inside`, of a context manager's
    function, reads the block that its `yield` runs."""

    name: str
    file: SourceFile
    node: ast.AST
    returns: list[Value] = field(default_factory=list)
    scope: Scope | None = None
    extra_conditions: int = 0
    inside: Callable[[Value], None] | None = None


@dataclass
class Found:
    """Findings, the functions that steps reach as (file, first line, last line), and steps by (file, line)."""

    findings: dict[tuple[str, int, int, str], Finding] = field(default_factory=dict)
    read: set[tuple[str, int, int]] = field(default_factory=set)
    steps: set[tuple[str, int]] = field(default_factory=set)


@dataclass
class Knowledge:
    """What is known of modules, classes and functions, by the identity of their nodes. It holds for every root."""

    project: Project
    modules: dict[str, Scope] = field(default_factory=dict)
    resolving: set[tuple[str, str]] = field(default_factory=set)
    memo: dict[tuple, tuple[Value, int]] = field(default_factory=dict)
    summaries: dict[int, Value] = field(default_factory=dict)
    class_values: dict[tuple[int, str], Value] = field(default_factory=dict)  # what the step binds on classes
    bases: dict[int, list[Value]] = field(default_factory=dict)
    ancestors: dict[int, list[Value]] = field(default_factory=dict)
    tables: dict[int, dict[str, ast.stmt]] = field(default_factory=dict)
    generators: dict[int, bool] = field(default_factory=dict)


@dataclass
class Position:
    """Where reading is: a new one for each root.

    `presume`: parameters annotated or used as tensors are taken to lie on the device. `between`: in the caller between
    two steps. `explicit`: in a capture that the code asks for by name; `stacked`: where the ExitStack was made that
    holds it open. `conditions`: how many lie around; `quiet`: how many reasons there are to report nothing.
    `defined`, `entered`: functions that were defined while reading, and the nodes of those entered.
    """

    stack: list[Call] = field(default_factory=list)
    presume: bool = False
    in_step: bool = False
    between: bool = False
    explicit: bool = False
    stacked: str = ""
    reporting: bool = False
    conditions: int = 0
    quiet: int = 0
    default_device: str = ""
    defined: list[Func] = field(default_factory=list)
    entered: set[int] = field(default_factory=set)
    budget: int = BUDGET
    spent: int = 0
    inside: Callable[[Value], None] | None = None  # the block of the `with` whose context manager is being made

    @property
    def scope(self) -> Scope:
        scope = self.stack[-1].scope
        assert scope is not None
        return scope

    @property
    def file(self) -> SourceFile:
        return self.stack[-1].file

    def spend(self) -> None:
        self.spent += 1
        if self.spent > self.budget:
            raise Exhausted

    @contextmanager
    def aside(self, call: Call, *, in_step: bool = False) -> Iterator[None]:
        """While this lasts, reading is elsewhere and reports nothing."""
        outer, self.in_step = self.in_step, in_step
        self.quiet += 1
        self.stack.append(call)
        try:
            yield
        finally:
            self.stack.pop()
            self.quiet -= 1
            self.in_step = outer

    def chain(self, node: ast.AST) -> tuple[Frame, ...]:
        """The calls from the root to `node`."""
        places = [*(call.node for call in self.stack[:-1]), node]
        return tuple(
            Frame(path=call.file.path, line=line, function=call.name, source=call.file.line(line).strip())
            for call, line in zip(self.stack, (place(at)[0] for at in places), strict=True)
            if call.name != "<check>"
        )


Key = tuple[str, int, str]
"""What a step bound that existed before it: its kind, the identity of its owner, its name."""


@dataclass
class StepState:
    """Storages, and what the step binds anew: in which run, how to set it, and whether that goes on in every run."""

    run: int = 0
    tensor_work: int = 0
    given: list[object] = field(default_factory=list)  # objects that `inputs` made
    # those whose host contents the step changes, and hazards that only later ops confirm
    host_written: set[int] = field(default_factory=set)
    cats: dict[int, Callable[[str, str], None]] = field(default_factory=dict)
    pinned_copies: dict[int, Callable[[str, str], None]] = field(default_factory=dict)
    ragged_seen: set[int] = field(default_factory=set)
    # by storage, what the step before left and this one has read but not used: how to say so, and to report the read
    left: dict[int, tuple[str, Callable[[], None]]] = field(default_factory=dict)
    left_seen: set[int] = field(default_factory=set)
    swapped: set[int] = field(default_factory=set)
    second_device: bool = False
    moving: set[Key] = field(default_factory=set)
    grown: set[Key] = field(default_factory=set)
    _sites: int = 0
    _born: dict[int, int] = field(default_factory=dict)
    _changes: dict[int, set[Key]] = field(default_factory=dict)
    _setters: dict[Key, Callable[[Value], None]] = field(default_factory=dict)
    _values: dict[Key, Value] = field(default_factory=dict)
    _found: dict[Key, Value] = field(default_factory=dict)  # what the first step found there
    _numbers: dict[Key, dict[int, float]] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)

    def site(self, in_step: bool) -> int:
        """A number for a new storage."""
        self._sites += 1
        if in_step:
            self._born[self._sites] = self.run
        return self._sites

    def bound(
        self, key: Key, old: Value, new: Value, setter: Callable[[Value], None], owner: object, moved: bool
    ) -> None:
        """The step bound `key` anew: see `Machine.stored`."""
        self._alive.append(owner)
        if self.run == 0:
            self._found.setdefault(key, old)
        self._setters[key] = setter
        self._values[key] = new
        if isinstance(new, Const) and isinstance(new.value, int | float):
            self._numbers.setdefault(key, {})[self.run] = new.value
        if any(t.grown for t in tensors(new)):
            self.grown.add(key)
        if moved or differs(old, new):
            self._changes.setdefault(self.run, set()).add(key)

    def carried_over(self, value: Value) -> bool:
        """True where the value holds a tensor that the step before made: a state bound anew each time."""
        return self.run > 0 and any(self._born.get(site) == self.run - 1 for site in sites(value))

    def next_run(self) -> None:
        """Between two runs of the step: after the second, what changed in both becomes a moving value."""
        for site, (_, report) in self.left.items():
            if site not in self.left_seen:
                report()
        if self.run == 0:  # what a step sets and puts back does not change from step to step
            put_back = {k for k, v in self._found.items() if isinstance(v, Const) and v == self._values[k]}
            self._changes[0] = self._changes.get(0, set()) - put_back
        self.run += 1
        self.pinned_copies.clear()
        if self.run < 2:
            return
        self.moving = self._changes.get(0, set()) & self._changes.get(1, set())
        for key in self.moving:
            value = self._values[key]
            if isinstance(value, Const | Plain):
                first, second = (self._numbers.get(key, {}).get(run) for run in (0, 1))
                grows = first is not None and second is not None and first < second
                self._setters[key](Plain(kind_of(value), varying=True, least=first if grows else None))
            elif isinstance(value, Seq) and isinstance(value.any, Const | Plain):
                self._setters[key](replace(value, items=None, element=Plain("", varying=True)))


def place(node: ast.AST) -> tuple[int, int]:
    """Line and column, from 1: of a method call, those of the method's name, as Python's own tracebacks have it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        func = node.func
        if func.end_lineno and func.end_col_offset:
            return func.end_lineno, max(1, func.end_col_offset - len(func.attr) + 1)
    return getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1


def differs(old: Value, new: Value) -> bool:
    """True where a binding certainly holds something else than before."""
    match old, new:
        case (Const(), Const()):
            return old != new or type(old.value) is not type(new.value)
        case (Const(), Plain()):
            return new.varying
        case (Plain(), Plain() | Const()):
            return isinstance(new, Plain) and new.varying
        case (Tensor(), Tensor()):
            return bool(old.site and new.site and old.site != new.site)
        case (Const(), Tensor() | Seq() | Dict()) | (Tensor() | Seq() | Dict(), Const()):
            return True
        case (Seq(), Seq()) | (Dict(), Dict()):
            return sites(old) != sites(new) or (varies(new) and old != new)
    return old is UNKNOWN and isinstance(new, Tensor)
