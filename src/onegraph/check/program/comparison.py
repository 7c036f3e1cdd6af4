"""A replay beside eager: the captured statements run again in a copy of the process, which then replays and compares.

Python state that they change, files that they write to in memory, tensors: all of it belongs to the copy, which ends.
The program itself goes on with what a replay gives.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat, containers
from onegraph.check.places import package_of
from onegraph.check.program.held import Gone
from onegraph.check.program.region import Region, identity
from onegraph.check.program.replays import refreshed
from onegraph.check.program.statements import twins
from onegraph.check.program.world import Capture, ProgramWorld
from onegraph.check.protocol import GivenTensor, StepCheck
from onegraph.check.report import SILENT, Finding, Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.compare import StorageTable
from onegraph.check.simulate.copies import RAISE, STUCK, in_a_copy
from onegraph.check.simulate.device import DeviceTensor, plain_of
from onegraph.check.simulate.findings import Findings
from onegraph.check.simulate.records import RawFinding, Step, same
from onegraph.check.simulate.replay import Verdict, replay, told
from onegraph.check.simulate.state import Snapshot

ALWAYS = 2
"""Replays of each graph that are compared whatever it takes."""

LONGEST = 10.0
"""Seconds for the comparisons of one graph, then for all of them ten times as much."""

PATIENCE = 1.0
"""Seconds that a thread of the copy has, which the statements started and did not wait for."""

AGAIN = 1_000_000
"""Steps that are run beside replays are numbered from here."""

GONE = "what its statements use is no more"
ALONE = "its statements cannot be run by themselves"
BACKWARD = "the backward of a graphed callable"
OVER = f"comparing took {LONGEST:.0f} seconds, or {10 * LONGEST:.0f} in all"

GUARD = "these statements raise here now, and a replay, which runs no Python, goes on"
OP = "eager raises here now, and a replay, which has other values, goes on"


@dataclass
class Raised:
    """The statements, run beside a replay, raised: what for, and what that says."""

    reason: str
    detail: str
    findings: list[Finding]


class EagerComparison:
    """Compares replays; `findings` by capture, each as (number of the replay, finding)."""

    def __init__(self, world: ProgramWorld) -> None:
        self.world = world
        self.findings: dict[int, list[tuple[int, Finding]]] = {}
        self.spent = 0.0
        self.regions: Counter[Any] = Counter()  # how often the same statements were captured

    def compare(self, capture: Capture, dead: set[int]) -> None:
        """One replay against the region run again, if it can be and there is time for it."""
        pinned = refreshed(capture)
        if capture.region is None or not hasattr(os, "fork"):
            capture.uncompared(BACKWARD if capture.backward else ALONE)
            return
        if capture.replays >= ALWAYS and (capture.seconds > LONGEST or self.spent > 10 * LONGEST):
            capture.uncompared(OVER)
            return
        if capture.seconds >= STUCK:  # a second copy would not end either
            return
        begin = time.perf_counter()
        try:
            body = self._body(capture, capture.region)
        except (Gone, SyntaxError) as error:
            capture.uncompared(GONE if isinstance(error, Gone) else "its statements cannot stand alone")
            return
        answer = in_a_copy(lambda: self._look(capture, body, dead, pinned))
        capture.seconds += time.perf_counter() - begin
        self.spent += time.perf_counter() - begin
        if isinstance(answer, str):
            capture.uncompared(answer)
            return
        if isinstance(answer, Raised):
            capture.uncompared(answer.reason, answer.detail)
            answer = answer.findings
        else:
            capture.compared += 1
        self.findings.setdefault(capture.number, []).extend((capture.replays + 1, f) for f in answer)

    def _body(self, capture: Capture, region: Region) -> Callable[[], dict[str, Any]]:
        """The region as a function, over what its names held then or, where the program means that, hold now."""
        values = {}
        alone = self.regions[region.key] == 1
        for name in region.begin:
            try:
                values[name] = _value(region, name, alone=alone)
            except Gone:
                if name not in region.stored:  # else what the warm-up bound it to, which the capture did away with
                    raise
        return region.function(values)

    # in the copy

    def _look(self, capture: Capture, body: Callable[[], dict[str, Any]], dead: set[int], pinned: set[int]) -> Any:
        world, region = self.world, capture.region
        assert region is not None
        torch.set_num_threads(1)  # the threads of the pool are not in the copy
        code = body.__code__
        frames.TWINS.update(twins(region.code, code))
        own = next((i for i, (known, _) in enumerate(capture.chain) if known is region.code), None)
        frames.TAILS[call_body.__code__] = capture.chain if own is None else capture.chain[own + 1 :]
        world.stop = call_body.__code__
        _without_gradients(capture)
        _ungraphed(body)
        eager = _Eager(world, capture)
        try:
            seen = eager.observe(body, lambda index: (), eager.number)
        except _StatementsRaised as raised:
            error = raised.error
            if isinstance(error, UnboundLocalError) and not region.begin.keys() <= set(code.co_freevars):
                return GONE  # it is read before it is bound, after all
            return self._raised(capture, raised.record, error)
        names = {**capture.names, **seen.before.storages, **seen.after.storages}
        alive = world.storages.alive() - dead
        with compat.no_torch_function(), world.off(), torch.inference_mode():
            for generator, state in eager.generators:
                generator.set_state(state)
            plain = {path: plain_of(t) for path, t in seen.outputs.items() if path in capture.outputs}
            verdict = replay(world, capture.step, seen.record, capture.outputs, {}, {}, plain, dead, eager.rng)
        return eager.findings(seen.record, verdict, StorageTable(names, alive, eager.made, {}), pinned)

    def _raised(self, capture: Capture, record: Step, error: Exception) -> Raised:
        """Statements that captured well raise now. That is an error of the program where they were run beside an
        earlier replay, and a `raise` of its own, or an op that the replay has too, refuses what changed since. Other
        errors may come from running them a second time."""
        world = self.world
        chain = frames.chain_of_error(error, call_body.__code__)
        findings = findings_of(world, capture)
        place = world.roots.place(chain)
        where = f" at {os.path.basename(place.path)}:{place.line}" if place is not None else ""
        reason, detail = f"{RAISE} {type(error).__name__}{where}", told(error).removeprefix(type(error).__name__)
        code = "CG201" if self._guards(capture, error) else "CG212" if self._refuses(capture, record, chain) else ""
        if code and place is not None:
            findings.of_running([
                RawFinding(
                    capture.number, code, Severity.ERROR, chain, GUARD if code == "CG201" else OP, SILENT,
                    (f"replay {capture.replays + 1}: {told(error)}",),
                    construct="raise" if code == "CG201" else "",
                )
            ])  # fmt: skip
        return Raised(reason, detail, list(findings.found.values()))

    def _guards(self, capture: Capture, error: Exception) -> bool:
        """Whether a `raise` or `assert` outside of torch and Python's own library refuses to go on."""
        code = frames.raised_by(error)
        if code is None or capture.compared == 0 or self.world.asked_capturing:
            return False
        own = not frames._skipped(code.co_filename) and package_of(code.co_filename) != ""
        return own and not isinstance(error, AttributeError | StopIteration)  # which Python itself asks for

    def _refuses(self, capture: Capture, record: Step, chain: frames.Chain) -> bool:
        """Whether the op that raised is the one that the graph has there, on tensors of the same shapes."""
        at = len(record.ops)
        if self.world.raised is None or record.parted or at >= len(capture.step.ops):
            return False
        op = capture.step.ops[at]
        return (op.func, op.shapes) == self.world.raised and op.chain == chain


class _StatementsRaised(Exception):
    """The statements raised `error`, after the ops in `record`."""

    def __init__(self, error: Exception, record: Step) -> None:
        self.error, self.record = error, record


class _Eager(StepCheck):
    """The captured statements as a backend: one step of them, eagerly, which `number` of a step stands for."""

    def __init__(self, world: ProgramWorld, capture: Capture) -> None:
        super().__init__(world.roots, world)
        self.world, self.capture = world, capture
        self.number = AGAIN + capture.replays + 1
        self.made: dict[int, tuple[str, int]] = {}
        self.seen = 0  # raw findings before it ran
        self.rng: Any = None
        self.generators: list[tuple[Any, Any]] = []

    def storage(self, tensor: Tensor, phase: str, index: int) -> int | None:
        return None  # it is given nothing, and what it returned is known by name

    def begin(
        self, record: Step, given: GivenTensor, leaves: dict[str, Tensor], before: Snapshot, *, lean: bool
    ) -> None:
        world, capture = self.world, self.capture
        self.made = dict.fromkeys(world.storages.alive(), ("build", -1))
        world.alone()
        world.streams.current[world.device_index] = capture.stream
        world.take()
        world.begin(record, capture.stream.id)
        world.captured_step, world.reference = capture.number, capture.step
        world.asked_capturing = []
        world.running = capture
        self.seen, self.rng = len(world.raw_findings), torch.get_rng_state()
        with world.off():
            self.generators = [(g, g.get_state()) for g in world.randomness.generators]

    def call(self, step: Callable[..., Any], given: GivenTensor, record: Step) -> Any:
        with _modes(self.capture):
            try:
                return call_body(step)
            except Exception as error:
                raise _StatementsRaised(error, record) from error

    def end(self, record: Step) -> None:
        world = self.world
        for thread in world.threads.apart:  # what they do counts, and must not come in between the comparison
            thread.join(PATIENCE)
        world.end(record)
        world.phase = "build"

    def outputs_of(self, result: Any, index: int) -> dict[str, Tensor]:
        return containers.tensors(_assigned(result))

    def findings(self, record: Step, verdict: Verdict, table: StorageTable, pinned: set[int]) -> list[Finding]:
        """What this step and the replay in its place show. `pinned`: positions of copies that read fresh memory."""
        capture, number = self.capture, self.number
        findings = findings_of(self.world, capture, {number: record}, table.names)
        stored = capture.region.stored if capture.region is not None else ()
        self.changed = {number: {n: c for n, c in self.changed[number].items() if n not in stored}}
        self.steps, self.verdicts = {}, {number: verdict}  # code of the record is a twin of what was captured
        raw = self.world.raw_findings[self.seen :]
        self.conclude(findings, raw, capture.step, [record], table, {number: pinned})
        return list(findings.found.values())


def _value(region: Region, name: str, *, alone: bool) -> Any:
    """What a replay should find under a name. `alone`: nothing else captures these statements. Raises Gone."""
    then = region.begin[name]
    try:
        now = region.current(name)
    except Gone:
        return then()
    if region.identities[name] == id(now) and name not in region.stored:
        return now
    free = alone and name not in region.stored and region.settled.get(name) != identity(now)
    try:
        before = then()
    except Gone:
        if not free:
            raise
        return now
    return now if free and _newer(before, now) else before


def call_body(body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call chains end at this frame; the captured ones' own outer calls are put behind it."""
    return body()


def _assigned(results: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """What the statements left, without what they deleted again."""
    found = {}
    for path, value in results.items():
        try:
            found[path] = value()
        except Exception:
            continue
    return found


def _newer(before: Any, now: Any) -> bool:
    """Whether a number or a tensor bound to a name since the capture is one that a replay should have seen. A tensor
    that was copied into the one before is."""
    if isinstance(now, DeviceTensor) and isinstance(before, DeviceTensor):
        alike = now.shape == before.shape and now.dtype is before.dtype
        return alike and not same(before.inner.detach(), now.inner.detach())
    return type(now) is type(before) and isinstance(now, int | float | complex)


def findings_of(
    world: ProgramWorld, capture: Capture, others: dict[int, Step] | None = None, names: dict[int, str] | None = None
) -> Findings:
    """Collects what is found of a capture, and of `others`: steps that its replays stand for."""
    steps = {capture.number: capture.step, **(others or {})}
    return Findings(_Watched(world, capture), world.roots, steps, names or capture.names, capture.place)


class _Watched:
    """What `Findings` asks of whatever watched a capture."""

    def __init__(self, world: ProgramWorld, capture: Capture) -> None:
        self.captured_step, self.sizes = capture.number, world.sizes
        self.asked_capturing = capture.asked_capturing


def _without_gradients(capture: Capture) -> None:
    """Where the capture found no gradient it set one, and a replay sets it again: eager must not add to that."""
    for reference in capture.fresh:
        leaf = reference()
        if leaf is not None and isinstance(leaf.grad, DeviceTensor) and leaf.grad.record.number in capture.kept:
            leaf.grad = None


def _ungraphed(body: Callable[[], Any]) -> None:
    """`make_graphed_callables` puts the graph in place of a module's forward: here it is the forward that is wanted."""
    for cell in getattr(body, "__closure__", None) or ():
        module = cell.cell_contents
        forward = module.__dict__.get("forward") if isinstance(module, torch.nn.Module) else None
        code = getattr(forward, "__code__", None)
        if forward is not None and code is not None and code.co_filename == torch.cuda.graphs.__file__:
            names = dict(zip(code.co_freevars, forward.__closure__, strict=True))
            module.forward = names["orig_fwd"].cell_contents


def _modes(capture: Capture) -> ExitStack:
    modes, stack = capture.modes, ExitStack()
    stack.enter_context(torch.inference_mode(modes["inference"]))
    if not modes["inference"]:
        stack.enter_context(torch.set_grad_enabled(modes["grad"]))
    stack.enter_context(torch.autocast("cuda", modes["dtype"], modes["autocast"], modes["cache"]))
    return stack
