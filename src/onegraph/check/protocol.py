"""The protocol of a check that runs a step: build, warm up, capture, replay, compare with eager.

A backend says how its machine does each part: a simulated GPU (`simulate.run`), the GPU of this machine (`live.run`),
and for a program the statements that it captured, run again in a copy of the process (`program.comparison`). What is
noted of each step, and what follows from it, is the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor

from onegraph.check import compat, containers
from onegraph.check.report import SILENT, CheckError, Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.calling import given_by
from onegraph.check.simulate.compare import StorageTable, differences
from onegraph.check.simulate.findings import Findings, Watched
from onegraph.check.simulate.records import RawFinding, Step, reshaped
from onegraph.check.simulate.replay import Verdict
from onegraph.check.simulate.state import Snapshot, changes, methods

FEWEST_STEPS = 3

GivenTensor = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keywords of a step."""


class Watching(Watched, Protocol):
    """What watches the running step: a simulated world, or the recorder on a GPU."""

    raw_findings: list[RawFinding]
    reshaped: dict[int, tuple[str, frames.Chain]]  # tensors whose shape the running step changed in place
    first_node: int  # sequence number of autograd from which on nodes belong to the running step


@dataclass
class Observed:
    """A step that ran: what it was given and what it returned, tensors by path, and its state before and after."""

    record: Step
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    before: Snapshot
    after: Snapshot


class StepCheck(ABC):
    """What is known of the steps of one factory, from what `watched` them.

    Attributes:
        steps: what each step did; verdicts: what a replay in place of it gave.
        changed: host state that it changed; numbers: Python values that it returned, by path.
        returned: storages that steps returned, each with the first of them; types: of the user's objects.
        last_state: the Python state after the last step of which it was looked at.
    """

    def __init__(self, roots: frames.Roots, watched: Watching) -> None:
        self.roots, self.watched = roots, watched
        self.steps: dict[int, Step] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.changed: dict[int, dict[str, tuple[Any, Any]]] = {}
        self.numbers: dict[int, dict[str, Any]] = {}
        self.returned: dict[int, int] = {}
        self.types: dict[type, None] = {}
        self.handed = containers.Handed()
        self.last_state: Snapshot | None = None

    # what a backend says

    @abstractmethod
    def storage(self, tensor: Tensor, phase: str, index: int) -> int | None:
        """Number of the storage of a device tensor, which step `index` was given or made; None for the host's."""

    @abstractmethod
    def begin(
        self, record: Step, given: GivenTensor, leaves: dict[str, Tensor], before: Snapshot, *, lean: bool
    ) -> None:
        """A step is about to run: on the tensors `leaves` of what it is given. `lean`: as `observe` takes it."""

    @abstractmethod
    def call(self, step: Callable[..., Any], given: GivenTensor, record: Step) -> Any:
        """Run it, watched."""

    @abstractmethod
    def end(self, record: Step) -> None:
        """It ran."""

    def outputs_of(self, result: Any, index: int) -> dict[str, Tensor]:
        """The tensors of what a step returned, by path. Raises CheckError for those that cannot be compared."""
        return containers.tensors(result)

    def qualified(self, raw: RawFinding) -> RawFinding | None:
        """A difference between two steps, with what more is known of the later one; None where it is no finding."""
        return raw

    # the same for all

    def observe(
        self, step: Callable[..., Any], inputs: Callable[[int], Any], index: int, *, lean: bool = False
    ) -> Observed:
        """Run step `index` eagerly and note all that it did. Raises CheckError where it raises.

        lean: without a look at the Python state around it, which takes longer than a small step; that is then what it
        was after the last step that was looked at.
        """
        given = given_by(inputs, index)
        leaves = containers.tensors(given, self.handed)
        self.handed.note(given)
        before = self.last_state if lean and self.last_state is not None else Snapshot(step, self.roots)
        record = Step(index)
        for path, leaf in leaves.items():
            if (number := self.storage(leaf, "inputs", index)) is not None:
                record.inputs[number] = path
        shapes = [list(leaf.shape) for leaf in leaves.values()]
        self.begin(record, given, leaves, before, lean=lean)
        watched = self.watched
        watched.reshaped.clear()
        watched.first_node = compat.next_node_number()
        result = self.call(step, given, record)
        for code, text, chain, values in reshaped(list(leaves.values()), shapes, watched.reshaped):
            watched.raw_findings.append(RawFinding(index, code, Severity.ERROR, chain, text, SILENT, values))
        self.end(record)
        outputs = self.outputs_of(result, index)
        self.numbers[index] = containers.numbers(result)
        after = before
        if not lean:
            after = self.last_state = Snapshot(step, self.roots)
            self.changed[index] = changes(before, after)
            self.types.update(after.types)
        for out in outputs.values():
            if (number := self.storage(out, "step", index)) is not None:
                self.returned.setdefault(number, index)
        self.steps[index] = record
        return Observed(record, leaves, outputs, before, after)

    def conclude(
        self,
        findings: Findings,
        raw: Iterable[RawFinding],
        captured: Step,
        later: list[Step],
        table: StorageTable,
        refreshed: dict[int, set[int]],
        *,
        freed_anyway: bool = True,
        besides: Iterable[tuple[frames.CodeLocation, RawFinding]] = (),
    ) -> None:
        """Tell `findings` all that follows from the captured step, the `later` ones and the verdicts on their replays.

        Args:
            raw: hazards of single ops, seen while running.
            table, refreshed: see `compare.differences`.
            freed_anyway: whether a tensor that was freed is told although its replay was right.
            besides: branches that other runs than the later steps took.
        """
        at = findings.world.captured_step
        at_ops, at_branches = differences(captured, later, self.verdicts, table, refreshed)
        at_ops = [known for raw in at_ops if (known := self.qualified(raw))]
        at_branches = [(place, known) for place, raw in at_branches if (known := self.qualified(raw))]
        findings.of_running(raw)
        findings.of_comparison(s for s in at_ops if freed_anyway or s.code != "CG206" or s.severity is Severity.ERROR)
        findings.of_launches()
        findings.of_branches([*at_branches, *besides])
        findings.of_state({i: c for i, c in self.changed.items() if i >= at}, self._codes(captured))
        findings.of_results(self._changed_numbers(at))
        findings.of_referee(self.verdicts)

    def facts_of_replays(self) -> dict[str, Any]:
        """What a report says of the replays."""
        return {
            "torch": torch.__version__,
            "largest replay error": max((v.worst for v in self.verdicts.values()), default=0.0),
            "replay equals eager": bool(self.verdicts) and not any(v.stale for v in self.verdicts.values()),
        }

    def _codes(self, captured: Step) -> list[CodeType]:
        """Every function of the user that ran an op, and those of objects that the steps reach."""
        steps = {**self.steps, captured.index: captured}
        # Chains by identity first, then codes: to hash a code object is to hash all its constants and names.
        chains = {id(op.chain): op.chain for step in steps.values() for op in step.ops}
        codes = {id(code): code for chain in chains.values() for code, _ in chain}
        return [*dict.fromkeys(codes.values()), *methods(self.types)]

    def _changed_numbers(self, captured: int) -> dict[str, tuple[Any, Any]]:
        """Python values that steps return, by path, that are not what they were at capture: (then, the first other
        one)."""
        found: dict[str, tuple[Any, Any]] = {}
        for index, values in sorted(self.numbers.items()):
            for path, value in values.items():
                known = self.numbers.get(captured, {}).get(path, value)
                if index > captured and repr(known) != repr(value):
                    found.setdefault(path, (known, value))
        return found


def checked_count(steps: int) -> int:
    """How many steps are run. Raises CheckError where they are too few, or no integer."""
    if type(steps) is not int or steps < FEWEST_STEPS:
        raise CheckError(f"steps: got {steps!r}, allowed {FEWEST_STEPS} or more; one warms up, one is captured")
    return steps


def checked_gpus(gpus: int) -> int:
    """How many GPUs the simulated machine has. Raises CheckError where there is none, or this is no integer."""
    if type(gpus) is not int or gpus < 1:
        raise CheckError(f"gpus: got {gpus!r}, allowed 1 or more; it is a count of simulated GPUs")
    return gpus
