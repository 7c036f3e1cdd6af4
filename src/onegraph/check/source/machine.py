"""State of the abstract interpreter: where it is, what it has found, what the step changes from one run to the next."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from onegraph.check.report import Finding, Frame, Origin, Severity
from onegraph.check.rules import RULES, fix
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
    """One frame of the abstract call stack. `node` is what is being read in it."""

    name: str
    file: SourceFile
    node: ast.AST
    returns: list[Value] = field(default_factory=list)
    scope: Scope | None = None
    extra_conditions: int = 0


Key = tuple[str, int, str]


@dataclass
class Machine(ABC):
    """The interpreter's state, and the three entries of its recursion, which `Interpreter` fills in.

    `presume`: parameters annotated or used as tensors are taken to lie on the device.
    """

    project: Project
    presume: bool = False
    # what has been found, and which functions the step reaches: (file, first line, last line)
    findings: dict[tuple[str, int, int, str], Finding] = field(default_factory=dict)
    read: set[tuple[str, int, int]] = field(default_factory=set)
    # the steps that were met, by (file, line); functions that were defined while reading, and nodes of those entered
    steps: set[tuple[str, int]] = field(default_factory=set)
    defined: list[Func] = field(default_factory=list)
    entered: set[int] = field(default_factory=set)
    explicit: bool = False  # in a capture that the code asks for by name
    stacked: str = ""  # where the ExitStack was made that holds that capture open
    # where the interpreter is: in the step, or in the caller between two; behind how many conditions; in which run
    stack: list[Call] = field(default_factory=list)
    in_step: bool = False
    between: bool = False
    given: list[object] = field(default_factory=list)  # objects that `inputs` made
    reporting: bool = False
    conditions: int = 0
    quiet: int = 0
    tensor_work: int = 0
    spent: int = 0
    budget: int = BUDGET
    run: int = 0
    default_device: str = ""
    # what is known of modules, classes and functions, by the identity of their nodes
    modules: dict[str, Scope] = field(default_factory=dict)
    resolving: set[tuple[str, str]] = field(default_factory=set)
    memo: dict[tuple, tuple[Value, int]] = field(default_factory=dict)
    summaries: dict[int, Value] = field(default_factory=dict)
    class_values: dict[tuple[int, str], Value] = field(default_factory=dict)  # what the step binds on classes
    bases: dict[int, list[Value]] = field(default_factory=dict)
    ancestors: dict[int, list[Value]] = field(default_factory=dict)
    tables: dict[int, dict[str, ast.stmt]] = field(default_factory=dict)
    generators: dict[int, bool] = field(default_factory=dict)
    # storages: those whose host contents the step changes, and hazards that only later ops confirm
    host_written: set[int] = field(default_factory=set)
    cats: dict[int, Callable[[str, str], None]] = field(default_factory=dict)
    pinned_copies: dict[int, Callable[[str, str], None]] = field(default_factory=dict)
    ragged_seen: set[int] = field(default_factory=set)
    swapped: set[int] = field(default_factory=set)
    second_device: bool = False
    # what the step binds anew: in which run, how to set it, and whether that goes on in every run
    _site: int = 0
    _born: dict[int, int] = field(default_factory=dict)
    _changes: dict[int, set[Key]] = field(default_factory=dict)
    _setters: dict[Key, Callable[[Value], None]] = field(default_factory=dict)
    _values: dict[Key, Value] = field(default_factory=dict)
    _numbers: dict[Key, dict[int, float]] = field(default_factory=dict)
    moving: set[Key] = field(default_factory=set)
    grown: set[Key] = field(default_factory=set)
    _alive: list[object] = field(default_factory=list)

    # ---- reading goes on: what a module calls that lies above it

    @abstractmethod
    def evaluate(self, node: ast.expr) -> Value:
        """The abstract value of an expression; reports what its evaluation would do inside a step."""

    @abstractmethod
    def block(self, body: Sequence[ast.stmt]) -> bool:
        """Execute statements in order. False where the end is never reached."""

    @abstractmethod
    def call_function(self, func: Func, args: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
        """Follow a call into the user's code."""

    # ---- where we are

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

    def capture(self, node: ast.AST, *, begins: bool) -> None:
        """An explicit capture begins or ends here: what is in between is a step."""
        if begins:
            self.steps.add((self.file.path, place(node)[0]))
        self.in_step = self.explicit = begins

    def site(self) -> int:
        """A number for a new storage."""
        self._site += 1
        if self.in_step:
            self._born[self._site] = self.run
        return self._site

    def tensor(self, device: str = "", **fields: object) -> Tensor:
        """A new tensor, made here."""
        if self.in_step:
            self.tensor_work += 1
            if device.startswith("cuda:") and device != "cuda:0" and not self.second_device and self.reporting:
                self.second_device = True
                text = f"the step works on {device}: capture needs a stream of that device"
                self.report("CG303", self.stack[-1].node, text)
        return Tensor(device=device, in_step=self.in_step, site=self.site(), **fields)  # type: ignore[arg-type]

    # ---- findings

    def report(
        self, code: str, node: ast.AST, message: str, *, sure: bool = True, values: tuple[str, ...] = ()
    ) -> None:
        """One finding at `node` of the function being read. Behind a condition, or presumed, it is a warning."""
        if not (self.reporting and self.in_step) or self.quiet:
            return
        rule = RULES[code]
        line, column = place(node)
        file = self.file
        key = (file.path, line, column, code)
        certain = sure and not self.conditions
        severity = rule.severity if certain else min_severity(rule.severity)
        known = self.findings.get(key)
        if known is not None and (known.severity is severity or severity is Severity.WARNING):
            return
        self.findings[key] = Finding(
            code=code,
            severity=severity,
            origin=Origin.SOURCE,
            path=file.path,
            line=line,
            column=column,
            source=file.line(line),
            message=message,
            happens=rule.happens,
            values=values,
            calls=self.chain(node),
            fix=fix(code, file.path, line, column),
        )

    def chain(self, node: ast.AST) -> tuple[Frame, ...]:
        """The calls from the root to `node`."""
        frames = []
        for depth, call in enumerate(self.stack):
            if call.name == "<check>":
                continue
            at = node if depth == len(self.stack) - 1 else call.node
            line, _ = place(at)
            frames.append(
                Frame(path=call.file.path, line=line, function=call.name, source=call.file.line(line).strip())
            )
        return tuple(frames)

    # ---- what the step changes from run to run

    def stored(
        self,
        key: Key,
        node: ast.AST,
        old: Value,
        new: Value,
        setter: Callable[[Value], None],
        owner: object,
        moved: bool,
    ) -> None:
        """The step bound something that existed before it. Runs 0 and 1 learn, run 2 reports what changes each time.

        Args:
            key: what was bound; `owner` is the object or scope whose identity is in it.
            moved: the statement itself makes another value of it (`+=`, append).
        """
        self._alive.append(owner)
        self._setters[key] = setter
        self._values[key] = new
        if isinstance(new, Const) and isinstance(new.value, int | float):
            self._numbers.setdefault(key, {})[self.run] = new.value
        if any(t.grown for t in tensors(new)):
            self.grown.add(key)
        if moved or differs(old, new):
            self._changes.setdefault(self.run, set()).add(key)
        if not self.reporting or key not in self.moving:
            return
        name = key[2]
        if tensors(new):
            for tensor in tensors(new):
                if tensor.grown and tensor.site in self.cats:
                    self.cats[tensor.site]("CG208", f"`{name}` is concatenated anew in every step: its shape grows")
        else:
            self.report("CG210", node, f"`{name}` is changed by Python in every step; a replay does not change it")

    def seen(self, key: Key, value: Value, node: ast.AST | None = None) -> None:
        """The step reads something that existed before it."""
        if not self.reporting or key in self.grown:
            return
        if self.carried_over(value):
            text = f"`{key[2]}` is bound to another storage in every step; this reads what the last step left in it"
            self.report("CG205", node or self.stack[-1].node, text)

    def carried_over(self, value: Value) -> bool:
        """True where the value holds a tensor that the step before made: a state bound anew each time."""
        return self.run > 0 and any(self._born.get(site) == self.run - 1 for site in sites(value))

    def used(self, value: Value, node: ast.AST) -> None:
        """An op takes this argument: a list that outlives the step, or an input of changing shape."""
        if isinstance(value, Seq) and not value.in_step and self.reporting and self.carried_over(value):
            text = f"`{short(node)}` reads tensors that the last step left in a list"
            self.report("CG205", node, text)
        for tensor in tensors(value):
            if tensor.moving and tensor.on_device:
                self.report("CG205", node, f"`{short(node)}` takes a tensor that lies somewhere else in every step")
            if tensor.ragged and tensor.site not in self.ragged_seen and self.reporting:
                self.ragged_seen.add(tensor.site)
                self.report("CG208", node, f"`{short(node)}` takes an input whose shape changes from step to step")

    def remember(self, node: ast.AST) -> Callable[[str, str], None]:
        """A way to report at this place later, when it has turned out to be a hazard."""
        stack, conditions = [replace(call) for call in self.stack], self.conditions

        def later(code: str, message: str) -> None:
            mine = self.stack, self.conditions
            self.stack, self.conditions = stack, conditions
            try:
                self.report(code, node, message)
            finally:
                self.stack, self.conditions = mine

        return later

    def next_run(self) -> None:
        """Between two runs of the step: after the second, what changed in both becomes a moving value."""
        self.run += 1
        self.pinned_copies.clear()
        if self.run < 2:
            return
        self.moving = self._changes.get(0, set()) & self._changes.get(1, set())
        for key in self.moving:
            value = self._values[key]
            if isinstance(value, Const | Plain):
                kind = type(value.value).__name__ if isinstance(value, Const) else value.kind
                first, second = (self._numbers.get(key, {}).get(run) for run in (0, 1))
                grows = first is not None and second is not None and first < second
                self._setters[key](Plain(kind, varying=True, least=first if grows else None))
            elif isinstance(value, Seq) and isinstance(value.any, Const | Plain):
                self._setters[key](replace(value, items=None, element=Plain("", varying=True)))


def place(node: ast.AST) -> tuple[int, int]:
    """Line and column, from 1: of a method call, those of the method's name, as Python's own tracebacks have it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        func = node.func
        if func.end_lineno and func.end_col_offset:
            return func.end_lineno, max(1, func.end_col_offset - len(func.attr) + 1)
    return getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1


def min_severity(severity: Severity) -> Severity:
    return Severity.WARNING if severity is Severity.ERROR else severity


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


def short(node: ast.AST, limit: int = 60) -> str:
    """The expression as text, for messages."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "this expression"
    return text if len(text) <= limit else text[: limit - 3] + "..."
