"""The simulated machine as a whole program sees it: captures come and go, their outputs are read outside of them."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat
from onegraph.check.program.compiled_outputs import CompiledOutputs
from onegraph.check.program.region import Region
from onegraph.check.report import SILENT, Severity
from onegraph.check.rules.errors import PREVIOUS_ERROR
from onegraph.check.simulate import compiled, frames, hazards, memory
from onegraph.check.simulate.device import DeviceTensor, StorageRecord, refuse
from onegraph.check.simulate.graphs import NESTED
from onegraph.check.simulate.machine import Machine
from onegraph.check.simulate.records import RawFinding, Step, tensors_in
from onegraph.check.simulate.replay import REFUSALS
from onegraph.check.simulate.streams import Streams
from onegraph.check.simulate.world import World

OUTSIDE = -1
SEVERAL = -1
"""What stands for the replays after which a line took views of an output, where they are more than one."""

MOST_VALUES = 6

MOST_SIZES = 100_000
"""Storages after which what is kept of those that are gone is dropped."""

UNSAFE = f"{PREVIOUS_ERROR}, or no error: by what else it does then"
_LOOK_AGAIN = 0.1
"""Seconds after which a thread that waits for the end of a capture asks whether the thread of that still lives."""

FUNCTIONS = 500_000
"""Calls of compiled functions are steps numbered from here."""


@dataclass(eq=False)
class Capture:
    """One captured graph.

    Args:
        number: of its step, which no other capture has.
        place, chain: where it begins, and the calls that led there from the program's start.
        outputs: what the region assigned, as plain tensors, by the target's text.
        kept: numbers of the storages that it made and that outlived it.
        spans: where its storages lay in the pool.
        mode: of errors, "global", "thread_local" or "relaxed": what other threads may do meanwhile.
        modes: what torch's modes were, to run the region again as it ran.
        nodes: sequence numbers of the nodes that autograd recorded in it, from and to.
        fresh: leaves whose `.grad` the capture made.
        callable: made by `make_graphed_callables`, each of whose calls hands out new tensors of old memory.
        backward: of such a callable, which cannot be run by itself.
        refusing: positions of ops that raised in a replay: whether because of the values that they found.
        compared: how many replays were; why_not: each reason for which others were not.
    """

    number: int
    step: Step
    place: frames.CodeLocation
    chain: frames.Chain = ()
    region: Region | None = None
    stream: Any = None
    pool: Any = None
    mode: str = "global"
    modes: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    need: memory.Need | None = None
    charged: int = 0
    fresh: list[weakref.ref[Tensor]] = field(default_factory=list)
    asked_capturing: list[frames.Chain] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    nodes: tuple[int, int] = (0, 0)
    callable: bool = False
    backward: bool = False
    replays: int = 0
    last: int = 0
    compared: int = 0
    seconds: float = 0.0
    why_not: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    refusing: dict[int, bool] = field(default_factory=dict)

    def uncompared(self, reason: str, detail: str = "") -> None:
        """A replay is not compared. Of several with one reason, the first one's detail is told."""
        self.why_not.setdefault(reason, reason + detail)

    def release(self) -> None:
        """The graph is gone: nothing will be replayed, and what it held is free. The report needs its ops alone."""
        self.region = None
        self.outputs.clear()
        for op in self.step.ops:
            op.args, op.kwargs, op.outs, op.tensors = (), {}, (), ()
            op.frozen = op.contents = op.evidence = op.again = None


class ProgramStreams(Streams):
    """`Streams` that count what waits outside of captures, too."""

    def wait(self, world: Machine, *given: Any) -> None:
        if isinstance(world, ProgramWorld):
            world.waits += 1
        super().wait(world, *given)


class ProgramWorld(World):
    """`World` of many threads. One of them captures at a time; others may go on meanwhile."""

    builds_at_once = False

    def __init__(self, stop: CodeType, roots: frames.Roots, gpus: int) -> None:
        self.ordering: Any = None  # of work between captures, once there is a recorder
        self.recording = False  # whether a thread captures, or runs a function that torch compiles with graphs
        super().__init__(stop, roots, gpus)
        self.turn = threading.Condition(self.threads.lock)
        self.most_sizes = MOST_SIZES
        self.captured_step = OUTSIDE
        self.captures: list[Capture] = []
        self.running: Capture | None = None
        self.made_by: dict[int, Capture] = {}  # storages that a capture made and the program holds
        self.made_inside: set[int] = set()  # all storages that captures made
        self.pools: dict[Any, memory.Pool] = {}
        self.warm: set[Any] = set()
        self.streams = ProgramStreams()
        self.waits = 0  # how often the program waited for the device or a stream
        self.taken: dict[tuple[frames.Chain, int], int] = {}  # by line and capture: after which replay views were made
        self.flagged: dict[tuple[int, str, str, frames.Chain], RawFinding] = {}
        self.saves = True
        self.functions = 0  # calls of functions that torch compiles with graphs of their own
        self.compiled_outputs = CompiledOutputs()
        self.raised: tuple[Any, tuple[tuple[int, ...], ...]] | None = None  # the last op that did, and given shapes

    # books

    def record_of(self, inner: Tensor) -> StorageRecord:
        if len(self.storages.sizes) > self.most_sizes:
            self._forget()
        return super().record_of(inner)

    def _forget(self) -> None:
        """Drop what is kept of storages that are gone and that no report speaks of: a program may make millions."""
        known: set[int] = set()
        for ops in (*(capture.step.ops for capture in self.captures), *(call.ops for call in self.calls)):
            known.update(n for op in ops for n in (*op.reads, *op.writes, *op.allocates))
        self.storages.forget(known)
        self.most_sizes = max(MOST_SIZES, 2 * len(self.storages.sizes))

    # threads

    @property
    def phase(self) -> str:
        """ "step" in what is captured: for the thread that captures, and those that it gives work to meanwhile."""
        if not self.recording:
            return "build"
        if self.threads.in_main():
            return "step"
        errand = self.threads.errand()
        return "step" if errand is not None and errand.step == self.step else "build"

    @phase.setter
    def phase(self, value: str) -> None:
        self.recording = value == "step"

    def alone(self) -> None:
        """This is a copy of the process: other threads, and whoever holds the lock, are not in it."""
        self.threads.copied, self.recording = True, False
        self.threads.lock = threading.RLock()
        self.turn = threading.Condition(self.threads.lock)

    def take(self) -> None:
        """Wait until no other thread captures: then this one does. Raises RuntimeError inside of a capture."""
        with self.turn:
            while self.recording and self.phase != "step" and _lives(self.threads.main):
                self.turn.wait(_LOOK_AGAIN)
            if self.recording:
                refuse(NESTED)
            self.recording, self.threads.main = True, threading.get_ident()

    def begin(self, step: Step, stream: int) -> None:
        """What this thread does from now on, which has taken its turn, is recorded in `step`."""
        super().begin(step, stream)
        self.reference = None
        self.step = self.captured_step = step.index
        self.reshaped.clear()
        self.first_node = compat.next_node_number()

    def leave(self) -> None:
        """Nothing is recorded any more; the next thread may."""
        with self.turn:
            self.current, self.recording = None, False
            self.step = self.captured_step = OUTSIDE
            self.streams.main, self.streams.reached = None, set()
            if self.ordering is not None:
                self.streams.order = self.ordering.order
            self.turn.notify_all()

    def _meanwhile(self) -> None:
        """A thread works on the device outside of what is captured: late for the capture that gave it that work, or
        during that of another thread, which in mode "global" breaks where this one allocates or waits."""
        errand = self.threads.errand()
        if errand is not None:
            if 0 < errand.step <= len(self.captures):
                text = "work that the capture gave to another thread is launched after it has ended"
                self.flag(self.captures[errand.step - 1], "CG309", text, errand.chain)
            return
        running = self.running
        if running is None or running.mode != "global" or self.threads.in_main():
            return
        if frames.waits_for_thread(self.threads.main):
            chain = frames.chain_of_thread(self.threads.main, self.stop)
            self.flag(running, *hazards.OTHER_THREAD[:2], chain)
        else:
            text = (
                "another thread works on the GPU during a capture in mode 'global', in which none may allocate or wait"
            )
            self.flag(running, "CG309", text, frames.chain(self.stop, 3), severity=Severity.WARNING, happens=UNSAFE)

    def recorded_before(self, node: int) -> bool:
        """A node that was recorded inside of an earlier capture is part of that graph: its backward may be captured."""
        return node < self.first_node and not any(c.nodes[0] <= node < c.nodes[1] for c in self.captures)

    def first_gradient(self, variable: Tensor) -> None:
        if self.running is not None:
            self.running.fresh.append(weakref.ref(variable))

    def unregistered(self, generator: torch.Generator) -> None:
        if self.running is None or not any(known is generator for known in self.running.generators):
            super().unregistered(generator)

    def see(self, code: str, message: str, happens: str, **more: Any) -> None:
        if code == "CG106" and self.phase != "step":
            self.waits += 1  # every wait of the host comes through here
            if not self.muted:
                self._meanwhile()
        super().see(code, message, happens, **more)

    def flag(
        self, capture: Capture, code: str, message: str, chain: frames.Chain, values: tuple[str, ...] = (), *,
        severity: Severity = Severity.ERROR, happens: str = SILENT, construct: str = "",
    ) -> None:  # fmt: skip
        """Something that the program does outside of a capture, with what that gives: noted once, and counted."""
        made = RawFinding(capture.number, code, severity, chain, message, happens, values, construct=construct)
        known = self.flagged.setdefault((capture.number, code, message, chain), made)
        if known is made:
            self.raw_findings.append(made)
        else:
            known.count += 1
            known.values = tuple(dict.fromkeys(known.values + values))[:MOST_VALUES]

    def own_graphs(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Outside of captures such a function is fine: what it does is looked at, and whose outputs it overwrites."""
        if self.phase == "step":
            return function(*args, **kwargs) if self.hosts is not None else super().own_graphs(function, args, kwargs)
        run = self.compiled_outputs.called(function)
        if run > compiled.MOST_CALLS:
            out = function(*args, **kwargs)
        else:
            out = self._as_step(lambda: compiled.watched(self, function, args, kwargs))
        self.compiled_outputs.returned(function, run, out)
        return out

    def _as_step(self, work: Callable[[], Any]) -> Any:
        """Run `work` recorded as a step of its own; what it would do to a capture is none of it."""
        self.take()
        try:
            self.functions += 1
            number, seen = FUNCTIONS + self.functions, len(self.raw_findings)
            current: Any = torch.cuda.current_stream()
            self.begin(Step(number), current.id)
            self.first_node = 0
            return work()
        finally:
            self.leave()
            self.raw_findings[seen:] = [s for s in self.raw_findings[seen:] if s.step != number]

    # what the program does with outputs

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.muted:
            return super().dispatch(func, args, kwargs)
        if self.phase == "step":
            try:
                return super().dispatch(func, args, kwargs)
            except REFUSALS:
                inner = [t.inner for t in tensors_in((args, kwargs)) if isinstance(t, DeviceTensor)]
                known = not self.unknowns.among(inner)
                self.raised = (func, tuple(tuple(t.shape) for t in inner)) if known else None
                raise
        with self.threads.lock, compat.no_torch_function():
            given = [t for t in tensors_in((args, kwargs)) if isinstance(t, DeviceTensor)]
            graphs = [t for t in given if t.record.number in self.made_by] if self.made_by else []
            for tensor in given if self.compiled_outputs.storages else ():
                self._read_compiled(tensor)
            if (self.running or self.threads.errands) and (given or _on_gpu(kwargs.get("device"))):
                self._meanwhile()
        out = super().dispatch(func, args, kwargs)
        with self.threads.lock, compat.no_torch_function():
            if given:
                self.warm.add(func)
            if graphs:
                self._outputs_used(func, args, graphs, out)
            if self.ordering is not None and self.captures:
                self.ordering.ran(func, args, kwargs, out, lambda: frames.chain(self.stop, 4))
        return out

    def _read_compiled(self, tensor: DeviceTensor) -> None:
        self.compiled_outputs.read(tensor, lambda: frames.chain(self.stop, 4), OUTSIDE)

    def host_reads(self, tensor: Tensor) -> None:
        if self.phase != "step" and not self.muted and self.ordering is not None:
            self.ordering.read(tensor, lambda: frames.chain(self.stop, 3))

    def host_read(self, kind: str, message: str, tensor: DeviceTensor) -> None:
        if self.phase != "step" and not self.muted and tensor.record.number in self.made_by:
            self._read(tensor, frames.chain(self.stop, 3))
        if self.phase != "step" and not self.muted:
            self._read_compiled(tensor)
        super().host_read(kind, message, tensor)

    def _outputs_used(self, func: Any, args: tuple[Any, ...], graphs: list[DeviceTensor], out: Any) -> None:
        """An op outside of captures is given tensors of a graph's memory: a view takes on when that was, all else
        reads it."""
        chain = frames.chain(self.stop, 4)
        views = [t for t in tensors_in(out) if isinstance(t, DeviceTensor) and t.record.number in self.made_by]
        for view in views:
            if all(view is not t for t in graphs):
                capture = self.made_by[view.record.number]
                older = [t.__dict__["generation"] for t in graphs if "generation" in t.__dict__]
                view.__dict__["generation"] = min(older, default=capture.replays)
                view.__dict__["line"] = chain[:1]
                key = chain[:1], capture.number
                if self.taken.setdefault(key, capture.replays) != capture.replays:
                    self.taken[key] = SEVERAL
        if views:
            return
        for tensor in {id(t): t for t in graphs}.values():
            self._read(tensor, chain)
        for held in (a for a in args if isinstance(a, list | tuple)):
            self._twice(held, chain)

    def _read(self, tensor: DeviceTensor, chain: frames.Chain) -> None:
        capture = self.made_by[tensor.record.number]
        generation, line = tensor.__dict__.get("generation", capture.replays), tensor.__dict__.get("line", ())
        several = generation > 0 and self.taken.get((line, capture.number)) == SEVERAL
        if generation < capture.replays and (capture.callable or several):
            since = capture.replays - generation
            self.flag(
                capture, "CG209", "an output of an earlier replay is read after a later one has overwritten it", chain,
                (f"taken after replay {generation}, overwritten {since} time" + "s" * (since > 1),),
            )  # fmt: skip
        over = self.overwritten(tensor.record.number)
        if over is not None:
            where = f"{frames.os.path.basename(over.place.path)}:{over.place.line}"
            text = f"an output is read after another graph of its pool, captured earlier ({where}), ran over its memory"
            self.flag(capture, "CG312", text, chain)

    def _twice(self, held: Any, chain: frames.Chain) -> None:
        """A list that has one output several times was meant to have several outputs."""
        counts: dict[int, int] = {}
        for item in held:
            if isinstance(item, DeviceTensor) and item.record.number in self.made_by:
                counts[id(item)] = counts.get(id(item), 0) + 1
        for item in held:
            if counts.pop(id(item), 0) > 1:
                capture = self.made_by[item.record.number]
                if capture.replays > 1:
                    text = "several outputs of a graph are one tensor, which holds the last replay's"
                    self.flag(capture, "CG209", text, chain)

    def overwritten(self, number: int) -> Capture | None:
        """The graph of the same pool that ran over a storage since its own graph did, by the allocator's rules."""
        mine = self.made_by.get(number)
        if mine is None or mine.need is None or number not in mine.need.spans:
            return None
        for other in self.captures:
            if other is mine or other.pool != mine.pool or other.last <= mine.last or other.need is None:
                continue
            if any(_overlap(span, mine.need.spans[number]) for span in other.need.spans.values()):
                return other
        return None


def _lives(ident: int) -> bool:
    return any(thread.ident == ident for thread in threading.enumerate())


def _on_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def share_memory(one: Capture, other: Capture) -> bool:
    """Whether two graphs of one pool use a byte of it both."""
    if one is other or one.need is None or other.need is None:
        return one is other
    spans = other.need.spans.values()
    return any(_overlap(mine, theirs) for mine in one.need.spans.values() for theirs in spans)


def _overlap(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
