"""What orders the work of a program's streams between captures: replays, copies of their outputs, reads on the host.

Each stream has a clock (`simulate.races`); waits, events and synchronisation move them. Watched is the memory that
graphs use, since a replay overwrites it without a word: an output that another stream still copies, an input that
another stream still fills, a result in pinned memory that the host reads before the copy into it is over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onegraph.check.program.world import Capture, ProgramWorld
from onegraph.check.report import relative
from onegraph.check.simulate import frames
from onegraph.check.simulate.device import DeviceTensor, storage_of
from onegraph.check.simulate.races import Clock, Order, Race
from onegraph.check.simulate.records import targets, tensors_in

_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_COPIES = ("aten::copy_", "aten::_to_copy")

Used = dict[int, tuple[int, bool, Tensor]]


@dataclass
class Landing:
    """A copy into pinned memory that no host has waited for: on which stream, until when, of which graph's output."""

    stream: int
    until: Clock
    capture: Capture


class Ordering:
    """The order of work outside of captures, in one program."""

    def __init__(self, world: ProgramWorld) -> None:
        self.world = world
        self.order = Order(forked=True)
        self.used: dict[Capture, Used] = {}
        self.watched: dict[int, Capture] = {}
        self.landed: dict[int, Landing] = {}
        self.bridges: dict[
            int, tuple[Capture, int]
        ] = {}  # what eager work made of a graph's output, after which replay

    def captured(self, capture: Capture) -> None:
        """A graph is there: which memory that others can reach it reads and writes."""
        used: Used = {}
        for op in capture.step.ops:
            if not op.captured or op.kind == "view":
                continue
            for tensor, number in zip(op.tensors, op.externals, strict=False):
                if number != -1:
                    used[number] = number, number in op.writes or used.get(number, (0, False))[1], tensor
            for out, fresh in zip(op.outs, op.fresh, strict=False):
                record = self.world.storages.record(out)
                if fresh and record is not None and record.number in capture.kept:
                    used[record.number] = record.number, True, out
        self.used[capture] = used
        self.watched.update(dict.fromkeys(used, capture))

    def replayed(self, capture: Capture, chain: frames.Chain) -> None:
        """A graph is launched on the current stream."""
        self._across(capture)
        stream = self._stream()
        for race in self.order.launch(stream, self.used.get(capture, {}).values(), chain):
            self._race(capture, race, replay=chain)
        for op in capture.step.ops:
            for key in op.lands if op.captured else ():
                self.landed[key] = Landing(stream, self.order.now(stream), capture)

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, chain: Callable[[], Any]) -> None:
        """An op ran outside of captures, on the current stream."""
        given = list(tensors_in((args, kwargs)))
        device = [t for t in given if isinstance(t, DeviceTensor)]
        writes = {id(t) for t in targets(func, args, kwargs)}
        hosts = [t for t in given if not isinstance(t, DeviceTensor)]
        if self.landed:
            for tensor in hosts:
                if id(tensor) not in writes:
                    self.read(tensor, chain)
        self._bridge(device, writes, out)
        watched = [t for t in device if t.record.number in self.watched]
        outs = [t for t in tensors_in(out) if isinstance(t, DeviceTensor)]
        numbers = {t.record.number for t in device}
        if not watched or (not writes and outs and all(o.record.number in numbers for o in outs)):  # views alone
            return
        stream, name = self._stream(), func._schema.name
        watched = [t for t in watched if id(t) in writes or not self._unlaunched(t.record.number, stream)]
        if not watched:
            return
        used = {t.record.number: (t.record.number, id(t) in writes, t.inner) for t in watched}
        for race in self.order.launch(stream, used.values(), chain()):
            self._race(self.watched[race.number], race)
        landing = [t for t in (*hosts, *tensors_in(out)) if not isinstance(t, DeviceTensor)]
        if name in _COPIES and landing and id(watched[0]) not in writes:
            blocks = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
            made = [t for t in watched if t.record.number in self.world.made_by]
            if blocks or not self.world.storages.is_pinned(landing[0]):
                self.order.host_waits(self.order.now(stream))
            elif made:
                capture = self.world.made_by[made[0].record.number]
                self.landed[storage_of(landing[0])] = Landing(stream, self.order.now(stream), capture)
        elif name in _READS:
            self.order.host_waits(self.order.now(stream))

    def _unlaunched(self, number: int, stream: int) -> bool:
        """Whether a read on `stream` finds no result that a replay could take away: no graph that uses the memory was
        replayed yet. Memory that a graph made holds nothing then. Of other memory that is so on the stream that
        captured, where eager work between two pieces makes the buffers that the next one reads."""
        last = self.watched[number]
        if last.replays or (number not in self.world.made_by and last.stream.id != stream):
            return False
        return not any(capture.replays for capture, used in self.used.items() if number in used)

    def _bridge(self, device: list[DeviceTensor], writes: set[int], out: Any) -> None:
        """Between two pieces, work that is not captured makes the second one's input of the first one's output."""
        world = self.world
        read = [t.record.number for t in device if id(t) not in writes]
        known = [(c, c.replays) for n in read if (c := world.made_by.get(n)) is not None]
        source = next(iter(known), None) or next((self.bridges[n] for n in read if n in self.bridges), None)
        made = [t for t in tensors_in(out) if isinstance(t, DeviceTensor) and t.record.number not in world.made_by]
        for number in {t.record.number for t in (*made, *(t for t in device if id(t) in writes))} - set(read):
            self.bridges.pop(number, None)
            if source is not None:
                self.bridges[number] = source

    def _across(self, capture: Capture) -> None:
        """A piece is replayed: what it reads of an earlier piece has to be of that one's last replay."""
        for op in capture.step.ops if self.bridges else ():
            for number in op.externals:
                source, then = self.bridges.get(number, (capture, 0))
                if source is capture or source.pool != capture.pool or source.replays <= then:
                    continue
                at = f"{relative(source.place.path)}:{source.place.line}"
                text = f"the graph reads what was made of an earlier replay of the piece captured at {at}"
                self.world.flag(capture, "CG205", f"{text}: nothing wrote it since", op.chain)

    def read(self, tensor: Tensor, chain: Callable[[], Any]) -> None:
        """The host reads a tensor of its own memory."""
        known = self.landed.pop(storage_of(tensor), None) if self.landed else None
        if known is None or known.until.get(known.stream, 0) <= self.order.over.get(known.stream, 0):
            return
        text = "a result in pinned memory is read before the copy into it is waited for"
        self.world.flag(known.capture, "CG305", text, chain())

    def _stream(self) -> int:
        world = self.world
        stream = world.streams.current.get(world.device_index)
        return stream.id if stream is not None else 0

    def _race(self, capture: Capture, race: Race, replay: frames.Chain = ()) -> None:
        mine = race.number in self.world.made_by
        at = self.world.roots.place(replay or race.earlier.chain) or frames.CodeLocation("", 0, 0, "")
        where = f"{relative(at.path)}:{at.line}"
        if replay and mine and not race.earlier.writes:
            text = f"an output is read on another stream, and the next replay ({where}) does not wait for that"
            self.world.flag(capture, "CG209", text, race.earlier.chain)
            return
        chain = race.earlier.chain if replay else race.later.chain
        text = f"this work and the replay ({where}) use the same memory on two streams, and nothing orders them"
        self.world.flag(capture, "CG305", text, chain)
