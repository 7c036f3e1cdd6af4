"""Streams and events of the simulated device, as far as a capture cares: who is inside it, who came back."""

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from onegraph.check.report import relative
from onegraph.check.rules.errors import SILENT
from onegraph.check.simulate import frames, hazards
from onegraph.check.simulate.machine import Machine
from onegraph.check.simulate.races import Clock, Order, Race

RACE = "silently wrong: whichever of the two runs first decides the result, in eager too"


class Streams:
    """Which streams a capture has reached (by waiting on it), and which of those hold work nobody waits for."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.first: dict[int, Any] = {}  # the current stream of each GPU, for a thread that begins
        self._local = threading.local()
        self.reached: set[int] = set()
        self.open: dict[int, frames.Chain] = {}
        self.main: int | None = None
        self.order = Order()
        self.strayed: set[int] = set()  # streams that the capture does not see and that the step works on: told already

    @property
    def current(self) -> dict[int, Any]:
        """The current stream of each GPU, which every thread has for itself."""
        mine: dict[int, Any] | None = getattr(self._local, "current", None)
        if mine is None:
            mine = self._local.current = dict(self.first)
        return mine

    def start_on(self, stream: Any, gpus: int) -> None:
        """`stream` is the current one of every GPU, wherever none was chosen."""
        self.first = dict.fromkeys(range(gpus), stream)
        self.current.update(self.first)

    def begin(self, main: int) -> None:
        """A step starts on stream `main`."""
        self.reached, self.open, self.main, self.strayed = {main}, {}, main, set()
        self.order = Order()

    def launch(self, world: Machine, chain: frames.Chain, index: int) -> bool:
        """An op is launched on the current stream of GPU `index`: does the capture see it?"""
        if index != world.device_index:
            world.see(
                "CG303", f"work is launched on GPU {index} while GPU {world.device_index} is captured",
                "the graph does not hold it: empty, partial or an error", chain=chain,
            )  # fmt: skip
            return False
        stream = self.current.get(world.device_index)
        if stream is None:
            return True
        if self.captured(stream):
            if stream.id != self.main:
                self.open[stream.id] = chain
            return True
        self.strayed.add(stream.id)
        if stream.id == 0:
            text = "work is launched on the default stream inside the step: it runs once, at capture"
            world.see("CG304", text, SILENT, chain=chain)
        else:
            world.see(*hazards.ASTRAY, chain=chain)
        return False

    def captured(self, stream: Any) -> bool:
        """Whether what `stream` is given now is part of the capture."""
        return stream.id in self.reached

    def use(self, world: Machine, chain: frames.Chain, used: Iterable[tuple[int, bool, Tensor]]) -> None:
        """An op that the capture sees uses storages: (number, whether it writes, the part of it) each."""
        if not self.order.forked:
            return
        stream = self.current.get(world.device_index)
        for race in self.order.launch(stream.id if stream is not None else self.main or 0, used, chain):
            self._race(world, race)

    def _race(self, world: Machine, race: Race) -> None:
        lines = []
        for use in (race.earlier, race.later):
            at = world.roots.place(use.chain) or frames.CodeLocation("", 0, 0, "")
            lines.append(f"{relative(at.path)}:{at.line} {'writes' if use.writes else 'reads'} it")
        text = (
            f"work on two streams that nothing orders uses the same memory: {lines[0]} on one stream, this line "
            f"{lines[1].split(' ', 1)[1]} on another"
        )
        both = frozenset((race.earlier.stream, race.later.stream))
        world.see("CG305", text, RACE, chain=race.later.chain, values=tuple(lines), note=both)

    def wait(self, world: Machine, waiter: int, reached: bool, source: int, what: str) -> None:
        """`waiter` waits for work of `source`, which the capture had reached or not."""
        if waiter in self.reached and not reached and source not in self.strayed:
            world.see("CG305", f"the step waits for {what}, which is not part of the capture", hazards.ASTRAY.happens)
        if reached:
            self.reached.add(waiter)
        if waiter == self.main or waiter in self.reached:
            self.open.pop(source, None)

    def host_waits(self, source: int, until: Clock) -> None:
        """The host waits for work of `source`: a hazard of its own, and the join that eager has."""
        self.order.host_waits(until)
        self.open.pop(source, None)

    def end(self, world: Machine) -> None:
        """The step is over: work on a side stream that nobody waited for breaks the capture, which is why it races."""
        alone = set(self.open)
        world.raw_findings[:] = [
            raw for raw in world.raw_findings if raw.happens != RACE or raw.step != world.step or not alone & raw.note
        ]
        for chain in self.open.values():
            world.see(*hazards.UNJOINED, chain=chain)


def make(world: Machine) -> dict[str, Any]:
    """Stand-ins for `torch.cuda.Stream`, `Event`, `stream`, ... bound to `world`."""
    streams = world.streams

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, _id: int | None = None, **_: Any) -> None:
            self.id = next(streams.ids) if _id is None else _id
            self.device = torch.device("cuda", _index(device, world))
            self.device_index = self.device.index
            self.cuda_stream = self.stream_id = self.id
            self.priority = priority
            # What was current when it was entered, once for each time, by thread.
            self._before: defaultdict[int, list[Any]] = defaultdict(list)

        def synchronize(self) -> None:
            world.see("CG106", "the host waits for a stream inside the step", hazards.NOT_PERMITTED)
            streams.host_waits(self.id, streams.order.now(self.id))

        def query(self) -> bool:
            world.see("CG107", "a stream is queried inside the step", hazards.NOT_PERMITTED)
            return True

        def wait_stream(self, other: "Stream") -> None:
            if other.id != self.id:
                streams.order.wait(self.id, streams.order.now(other.id))
                streams.wait(world, self.id, other.id in streams.reached, other.id, "work of another stream")

        def wait_event(self, event: "Event") -> None:
            if event.stream >= 0:  # one that was never recorded is waited for by nobody
                now = event.step == world.step and event.phase == world.phase
                if now:
                    streams.order.wait(self.id, event.clock)
                streams.wait(world, self.id, now and event.reached, event.stream, "an event recorded before it")

        def record_event(self, event: "Event | None" = None) -> "Event":
            event = event or Event()
            event.record(self)
            return event

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.id == self.id

        def __hash__(self) -> int:
            return hash(self.id)

        def __enter__(self) -> "Stream":
            self._before[threading.get_ident()].append(streams.current.get(self.device_index, default))
            streams.current[self.device_index] = self
            return self

        def __exit__(self, *_: object) -> None:
            streams.current[self.device_index] = self._before[threading.get_ident()].pop()

    class ExternalStream(Stream):
        """A stream that exists, by its handle."""

        def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
            super().__init__(device, _id=stream_ptr)

    class Event:
        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self.reached, self.stream, self.step, self.phase = False, -1, -1, ""
            self.cuda_event = 1
            self.time = 0.0
            self.clock: dict[int, int] = {}

        def record(self, stream: Stream | None = None) -> None:
            stream = stream or current_stream()
            self.reached, self.stream = stream.id in streams.reached, stream.id
            self.step, self.phase, self.clock = world.step, world.phase, streams.order.now(stream.id)
            self.time = time.perf_counter()

        def wait(self, stream: Stream | None = None) -> None:
            (stream or current_stream()).wait_event(self)

        def query(self) -> bool:
            world.see("CG107", "an event is queried inside the step", hazards.NOT_PERMITTED)
            self._over()
            return True

        def _over(self) -> None:
            """The host has learnt that what came before the event is over."""
            if self.step == world.step and self.phase == world.phase:
                streams.host_waits(self.stream, self.clock)

        def synchronize(self) -> None:
            world.see("CG106", "the host waits for an event inside the step", hazards.NOT_PERMITTED)
            self._over()

        def elapsed_time(self, end: "Event") -> float:
            world.see("CG107", "the time between events is read inside the step", hazards.NOT_PERMITTED)
            return max(end.time - self.time, 1e-6) * 1e3  # of this machine: a program divides by it

    class stream_context:
        def __init__(self, stream: Stream | None) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.stream.__enter__()

        def __exit__(self, *_: object) -> None:
            if self.stream is not None:
                self.stream.__exit__()

    default = Stream(_id=0)
    main = Stream()
    streams.start_on(main, 8)

    def current_stream(device: Any = None) -> Stream:
        return streams.current.get(_index(device, world), main)

    return {
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "StreamContext": stream_context,
        "stream": stream_context,
        "current_stream": current_stream,
        "default_stream": lambda device=None: default,
        "set_stream": lambda s: streams.current.__setitem__(s.device_index, s),
        "main": main,
    }


def _index(device: Any, world: Machine) -> int:
    if device is None:
        return world.device_index
    if isinstance(device, int):
        return world.device_index if device < 0 else device
    index = torch.device(device).index
    return world.device_index if index is None else index
