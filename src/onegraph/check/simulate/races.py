"""Order of work on several streams: vector clocks, and two uses of one storage that nothing orders.

A stream does its work in order; `wait_stream` and events order what one stream did before what another does next. Each
stream has a clock, which counts what was launched on it, and remembers how far of every other stream it has waited for.
Two uses of the same memory are ordered if the later one's stream has waited for the earlier one. If it has not and one
of them writes, whichever runs first decides the result.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.check.simulate import frames
from onegraph.check.simulate.device import block

Clock = dict[int, int]
"""Per stream how many of its launches are over."""


class Part(NamedTuple):
    """Which elements of a storage a tensor is made of."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Part":
        held = block(tensor)
        return cls(tuple(held.shape), held.stride(), int(held.storage_offset()), held.element_size())

    @property
    def span(self) -> tuple[int, int]:
        """First byte and the end of the last one."""
        if 0 in self.shape:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset * self.size, (last + 1) * self.size

    def meets(self, other: "Part") -> bool:
        """Whether they have an element in common: two columns of a matrix lie between each other and have none."""
        (first, end), (others_first, others_end) = self.span, other.span
        if first >= others_end or others_first >= end:
            return False
        if self.size != other.size:
            return True
        seen = torch.zeros(max(end, others_end) // self.size, dtype=torch.bool)
        seen.as_strided(self.shape, self.stride, self.offset).fill_(True)
        return bool(seen.as_strided(other.shape, other.stride, other.offset).any())


class Use(NamedTuple):
    """One op's use of a part of a storage."""

    stream: int
    time: int
    writes: bool
    part: Part
    chain: frames.Chain


class Race(NamedTuple):
    """Two uses of one storage that nothing orders: the one that was launched first, and the other one."""

    number: int
    earlier: Use
    later: Use


@dataclass(slots=True)
class Order:
    """The clocks of one step's streams, and what its ops used since the first of them waited or was waited for: what
    came before that is over for every stream that the capture reaches."""

    clocks: dict[int, Clock] = field(default_factory=dict)
    uses: dict[int, list[Use]] = field(default_factory=dict)
    forked: bool = False
    over: Clock = field(default_factory=dict)  # what the host has waited for: all that is launched later runs after it

    def wait(self, waiter: int, until: Clock) -> None:
        """What `waiter` is given from now on runs after what `until` covers."""
        self.forked = True
        mine = self.clocks.setdefault(waiter, dict(self.over))
        for stream, time in until.items():
            mine[stream] = max(mine.get(stream, 0), time)

    def host_waits(self, until: Clock) -> None:
        """The host goes on, and launches more, only when what `until` covers is over."""
        for clock in (self.over, *self.clocks.values()):
            for stream, time in until.items():
                clock[stream] = max(clock.get(stream, 0), time)

    def now(self, stream: int) -> Clock:
        """What an event that is recorded now on `stream` stands for."""
        self.forked = True
        return dict(self.clocks.setdefault(stream, dict(self.over)))

    def launch(self, stream: int, used: Iterable[tuple[int, bool, Tensor]], chain: frames.Chain) -> list[Race]:
        """One op goes to `stream`; its races with earlier ones. used: (storage number, whether it is written, the part
        of it, a plain tensor)."""
        if not self.forked:
            return []
        clock = self.clocks.setdefault(stream, dict(self.over))
        clock[stream] = time = clock.get(stream, 0) + 1
        races = []
        for number, writes, tensor in used:
            use = Use(stream, time, writes, Part.of(tensor), chain)
            known = self.uses.setdefault(number, [])
            races += [Race(number, other, use) for other in known if _apart(other, use, clock)]
            # Who waits for this one has waited for the same stream's earlier use of the same part.
            known[:] = [o for o in known if (o.stream, o.writes, o.part) != (stream, writes, use.part)] + [use]
        return races


def _apart(earlier: Use, later: Use, clock: Clock) -> bool:
    if earlier.stream == later.stream or not (earlier.writes or later.writes):
        return False
    return earlier.time > clock.get(earlier.stream, 0) and earlier.part.meets(later.part)
