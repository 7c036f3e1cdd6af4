"""The abstract interpreter: its state, how it reports, and the entries of its recursion."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from onegraph.check.report import Finding, Origin, Severity
from onegraph.check.rules import RULES, fix
from onegraph.check.source.files import Project
from onegraph.check.source.state import Found, Key, Knowledge, Position, StepState, place
from onegraph.check.source.values import Func, Keywords, Seq, Tensor, Value, sites, tensors


class Machine(ABC):
    """The state in four parts, and the three entries of the recursion, which `Interpreter` fills in."""

    def __init__(self, project: Project, found: Found | None = None) -> None:
        self.known = Knowledge(project)
        self.found = found or Found()
        self.at = Position()
        self.step = StepState()

    # ---- reading goes on: what a module calls that lies above it

    @abstractmethod
    def evaluate(self, node: ast.expr) -> Value:
        """The abstract value of an expression; reports what its evaluation would do inside a step."""

    @abstractmethod
    def block(self, body: Sequence[ast.stmt]) -> bool:
        """Execute statements in order. False where the end is never reached."""

    @abstractmethod
    def call_function(self, func: Func, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
        """Follow a call into the user's code."""

    def capture(self, node: ast.AST, *, begins: bool) -> None:
        """An explicit capture begins or ends here: what is in between is a step."""
        if begins:
            self.found.steps.add((self.at.file.path, place(node)[0]))
        self.at.in_step = self.at.explicit = begins

    def worked(self) -> None:
        """An op ran here: whatever decides about this place decides about work of the step."""
        self.step.tensor_work += self.at.in_step

    def tensor(self, device: str = "", **fields: object) -> Tensor:
        """A new tensor, made here."""
        self.worked()
        second = device.startswith("cuda:") and device != "cuda:0"
        if second and self.at.in_step and self.at.reporting and not self.step.second_device:
            self.step.second_device = True
            text = f"the step works on {device}: capture needs a stream of that device"
            self.report("CG303", self.at.stack[-1].node, text)
        site = self.step.site(self.at.in_step)
        return Tensor(device=device, in_step=self.at.in_step, site=site, **fields)  # type: ignore[arg-type]

    # ---- findings

    def report(
        self, code: str, node: ast.AST, message: str, *, sure: bool = True, values: tuple[str, ...] = ()
    ) -> None:
        """One finding at `node` of the function being read. Behind a condition, or presumed, it is a warning."""
        if not (self.at.reporting and self.at.in_step) or self.at.quiet:
            return
        rule = RULES[code]
        line, column = place(node)
        file = self.at.file
        key = (file.path, line, column, code)
        certain = sure and not self.at.conditions
        severity = rule.severity if certain else Severity.WARNING if rule.severity is Severity.ERROR else rule.severity
        known = self.found.findings.get(key)
        if known is not None and (known.severity is severity or severity is Severity.WARNING):
            return
        self.found.findings[key] = Finding(
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
            calls=self.at.chain(node),
            fix=fix(code, file.path, line, column),
        )

    def path_varies(self, node: ast.AST, since: int, *, rounds: bool = False, leaves: bool = False) -> None:
        """A value that changes from step to step decides which work is done: whether, or in a loop how often.

        Args:
            since: `StepState.tensor_work` before what it decides about. leaves: the function may end there.
        """
        if self.at.in_step and (self.step.tensor_work > since or leaves):
            what = ": so does the number of rounds" if rounds else " and decides which work is done"
            self.report("CG201", node, f"`{short(node)}` changes from step to step{what}")

    def touches_generator(self, node: ast.AST, *, sure: bool = False) -> None:
        """The state of a generator is read or set."""
        self.report("CG302", node, f"`{short(node)}` touches the generator's state in the step", sure=sure)

    # ---- what the step changes from run to run

    def stored(
        self, key: Key, node: ast.AST, old: Value, new: Value, setter: Callable[[Value], None], owner: object,
        moved: bool,
    ) -> None:  # fmt: skip
        """The step bound something that existed before it. Runs 0 and 1 learn, run 2 reports what changes each time.

        Args:
            key: what was bound; `owner` is the object or scope whose identity is in it.
            moved: the statement itself makes another value of it (`+=`, append).
        """
        self.step.bound(key, old, new, setter, owner, moved)
        if not self.at.reporting or key not in self.step.moving:
            return
        name = key[2]
        if tensors(new):
            for tensor in tensors(new):
                if tensor.grown and (later := self.step.cats.get(tensor.site)):
                    later("CG208", f"`{name}` is concatenated anew in every step: its shape grows")
        else:
            self.report("CG210", node, f"`{name}` is changed by Python in every step; a replay does not change it")

    def seen(self, key: Key, value: Value, node: ast.AST | None = None) -> None:
        """The step reads something that existed before it: a finding at its first use, else here."""
        if not self.at.reporting or self.at.quiet or key in self.step.grown or not self.step.carried_over(value):
            return
        text = f"`{key[2]}` is bound to another storage in every step; this reads what the last step left in it"
        for site in sites(value):
            later = self.remember(node or self.at.stack[-1].node)
            self.step.left.setdefault(site, (text, partial(later, "CG205", text)))

    def used(self, values: Iterable[Value], node: ast.AST) -> None:
        """An op takes these arguments: lists that outlive the step, inputs of changing shape among them."""
        for value in values:
            self._used(value, node)

    def _used(self, value: Value, node: ast.AST) -> None:
        if isinstance(value, Seq) and not value.in_step and self.at.reporting and self.step.carried_over(value):
            text = f"`{short(node)}` reads tensors that the last step left in a list"
            self.report("CG205", node, text)
        for tensor in tensors(value):
            text, _ = self.step.left.pop(tensor.site, ("", None))
            if tensor.moving and tensor.on_device:
                text = f"`{short(node)}` takes a tensor that lies somewhere else in every step"
            if text and tensor.site not in self.step.left_seen and self.at.reporting:
                self.step.left_seen |= {tensor.site} - {0}
                self.report("CG205", node, text)
            if tensor.ragged and tensor.site not in self.step.ragged_seen and self.at.reporting:
                self.step.ragged_seen.add(tensor.site)
                self.report("CG208", node, f"`{short(node)}` takes an input whose shape changes from step to step")

    def remember(self, node: ast.AST) -> Callable[[str, str], None]:
        """A way to report at this place later, when it has turned out to be a hazard."""
        stack, conditions = [replace(call) for call in self.at.stack], self.at.conditions

        def later(code: str, message: str) -> None:
            mine = self.at.stack, self.at.conditions
            self.at.stack, self.at.conditions = stack, conditions
            try:
                self.report(code, node, message)
            finally:
                self.at.stack, self.at.conditions = mine

        return later


def short(node: ast.AST, limit: int = 60) -> str:
    """The expression as text, for messages."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "this expression"
    return text if len(text) <= limit else text[: limit - 3] + "..."
