"""Linears of rotated weights for 1 to 64 tokens, 16 at once, on every GPU since Ampere: how the kernels that
`rotated_portable.cuh` is part of are cut over the GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import ROWS, SLICE
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.workspace import Counters

MAX_TOKENS = 64  # in passes over the codes
AT_ONCE = 16  # tokens of a pass
MUST_TURN = 4  # tokens that a launch in front would take longer for
LAUNCH = 5500  # cycles of it
CLASSES = (1, 4, 8, 16)  # tokens that it is compiled for
PARTS = ROWS // 16  # row tiles of 16 in ROWS
MAX_N = 4096 * ROWS  # rows whose arrivals are counted
WARPS = {1: 16, 4: 16, 8: 16, 16: 8}  # of a block at most, by tokens: what registers hold
# What `Shape` of the kernels is made of.
SHAPE = "N", "K", "NORMED", "SILU", "BIASED", "ADDED", "WIDE"
ARRIVED = Counters(MAX_N // ROWS)


@dataclass(frozen=True, order=True)
class PortableTiling:
    """How one shape is cut: `strips` of rows, which begin at multiples of `unit` row tiles, by `parts` of k. A block
    has `across` slices side by side and `down` such rows of warps, `ahead` row tiles of codes a warp under way, and
    room for the sums of `hold` row tiles and `tokens`. It `turns` the activations of its slices itself, or a launch in
    front does. A kind of codes is a subclass."""

    ahead: int
    tokens: int
    turns: bool
    strips: int
    parts: int
    unit: int
    across: int
    down: int
    hold: int

    kept: ClassVar[int]  # bytes of a slice of a token, rotated
    alone_factor: ClassVar[float]  # cycles of an instruction of one warp, where no other one fills the gaps

    @classmethod
    def warps_at_most(cls, bits: int, count: int) -> int:
        """Of a block, for `count` tokens, one of CLASSES."""
        return WARPS[count]

    @classmethod
    def aheads(cls, bits: int, count: int) -> tuple[int, ...]:
        """Row tiles of codes that a warp may have under way, best first."""
        raise NotImplementedError

    def tables(self, bits: int) -> int:
        """Bytes that codes are decoded with, in shared memory."""
        return 0

    def slot(self, bits: int) -> int:
        """Bytes of 16 rows' codes of a slice."""
        raise NotImplementedError

    def issue(self, bits: int) -> int:
        """Instructions of a row tile and slice."""
        raise NotImplementedError

    @property
    def warps(self) -> int:
        return self.across * self.down

    @property
    def whole(self) -> bool:
        """Whether a block ends its rows by itself."""
        return self.parts == 1 and self.unit % PARTS == 0

    def most(self, n: int) -> int:
        """Row tiles of a strip at most."""
        units = -(-(n // 16) // self.unit)
        return -(-units // self.strips) * self.unit

    def shared(self, bits: int) -> int:
        """Bytes of shared memory of a block."""
        kept = self.kept if self.turns else 0
        return self._fixed(bits) + self.across * self.tokens * max(kept, (self.hold * 16 + 8) * 4)

    def _fixed(self, bits: int) -> int:
        return self.tables(bits) + -(-(self.tokens * self.across * 8 + 4) // 128) * 128

    def fitting(self, bits: int, shared: int) -> Self | None:
        """This, which holds the sums of a strip, or with as many as fit and a round may have; None if none do."""
        if self.shared(bits) <= shared:
            return self
        step = math.lcm(self.ahead * self.down, PARTS if self.whole else 1)
        room = ((shared - self._fixed(bits)) // (self.across * self.tokens * 4) - 8) // 16
        fewer = replace(self, hold=room // step * step)
        return fewer if fewer.hold > 0 and fewer.shared(bits) <= shared else None

    def cost(self, n: int, bits: int, device: build.Device) -> float:
        """Estimated cycles, up to what all tilings have in common."""
        blocks = self.strips * self.parts
        waves = -(-blocks // device.sms)
        tiles = self.most(n)
        issue, slot = self.issue(bits), self.slot(bits)
        alone = -(-tiles // self.down) * issue * self.alone_factor  # a warp
        share = min(16, 15 * max(1, device.sms / blocks))  # bytes by clock: idle SMs leave theirs to the others
        memory = tiles * self.across * slot / min(share, self.warps * self.ahead * slot / 1000)
        turns = -(-self.tokens // self.down) * 950 if self.turns else LAUNCH
        rounds = -(-tiles // self.hold) * 350
        if self.whole:
            end = 900 * -(-tiles * self.tokens // (PARTS * self.warps))
        else:  # through the L2, there and back
            end = 3100 + 20 * tiles * self.tokens + 750 * (self.parts // 8) + 30 * self.across
        return waves * (max(tiles * self.across * issue / 4, alone, memory) + turns + rounds + end)

    def defines(self, n: int, k: int, bits: int, half: bool, around: tuple[bool, ...]) -> dict[str, int]:
        """What the kernel is compiled with, but for START. `around`: normed, silu, biased, added, wide."""
        made = {"BITS": bits, "TOKENS": self.tokens, "TURNS": int(self.turns), "HALF": int(half)}
        made |= {"AHEAD": self.ahead, "HOLD": self.hold, "ACROSS": self.across, "DOWN": self.down}
        made |= {"PARTS": self.parts, "STRIPS": self.strips, "UNIT": self.unit}
        return made | dict(zip(SHAPE, (n, k, *map(int, around)), strict=True))

    @classmethod
    def plans(cls, n: int, k: int, bits: int, tokens: int, device: build.Device) -> list[Self]:
        """Every tiling that fits into 99 KB."""
        count, found = next(size for size in CLASSES if size >= tokens), []
        for cut in _cuts(n, k, count, cls.warps_at_most(bits, count), device):
            for ahead in cls.aheads(bits, count):
                if fitting := cls(ahead, count, *cut).fitting(bits, min(device.shared, build.PORTABLE_SHARED)):
                    found.append(fitting)
                    break
        return found

    @classmethod
    @lru_cache(maxsize=2048)
    def plan(cls, n: int, k: int, bits: int, tokens: int, device: build.Device) -> Self:
        """The tiling that costs least."""
        found = cls.plans(n, k, bits, tokens, device)
        return min(found, key=lambda tiling: (tiling.cost(n, bits, device), tiling))

    @classmethod
    @lru_cache(maxsize=2048)
    def like_most(cls, n: int, k: int, bits: int, tokens: int, device: build.Device) -> Self:
        """The tiling of AT_ONCE tokens with room for fewer, whose sums are made in the same order."""
        count = next(size for size in CLASSES if size >= tokens)
        return replace(cls.plan(n, k, bits, AT_ONCE, device), tokens=count)


def _cuts(
    n: int, k: int, count: int, warps: int, device: build.Device
) -> Iterator[tuple[bool, int, int, int, int, int, int]]:
    """Of blocks of so many warps, for `count` tokens: turns, strips, parts, unit, across, down, hold of a
    `PortableTiling`."""
    slices, tiles = -(-k // SLICE), n // 16
    for across in range(1, min(warps, slices) + 1):
        parts = -(-slices // across)
        if -(-slices // parts) < across:
            continue  # warps would have nothing to do
        seen = set[tuple[int, ...]]()
        for unit in (PARTS, 4, 2, 1):
            units = -(-tiles // unit)
            most = -(-units // min(units, max(1, device.sms // parts)))  # units of a strip
            strips, down = -(-units // most), warps // across
            cut = tuple(units * strip // strips * unit for strip in range(strips))
            if cut in seen:
                continue
            seen.add(cut)
            for turns in (True, False) if count > MUST_TURN else (True,):
                yield turns, strips, parts, unit, across, down, most * unit


def passes(call: Any, most: int) -> Iterator[Any]:
    """`call` in parts of up to `most` tokens, as equal as they can be."""
    tokens, count = call.tokens, -(-call.tokens // most)
    if count == 1:
        yield call
        return
    x, out, add = call.x.view(tokens, -1), call.out.view(tokens, -1), call.add
    for i in range(count):
        part = slice(tokens * i // count, tokens * (i + 1) // count)
        added = None if add is None else add.view(tokens, -1)[part]
        yield replace(call, x=x[part], add=added, out=out[part])


def run(kernels: build.Source, kind: type[PortableTiling], call: Any, **more: Any) -> None:
    """`call`, in passes of up to AT_ONCE tokens; `more` are the kernel's arguments of its own, such as codes."""
    for each in passes(call, AT_ONCE):
        _run(kernels, kind, each, more)


def _run(kernels: build.Source, kind: type[PortableTiling], call: Any, more: dict[str, Any]) -> None:
    n, k, bits, tokens, device = call.n, call.k, call.bits, call.tokens, call.out.device
    choose = kind.like_most if call.steady else kind.plan
    chosen = choose(n, k, bits, tokens, build.device(device.index))
    pieces = -(-k // SLICE) * tokens
    kept = 0 if chosen.turns else chosen.kept * pieces
    sums = 0 if chosen.whole else 4 * chosen.parts * tokens * n
    space = torch.empty(sums + kept + 12 * pieces, dtype=torch.uint8, device=device)
    at = space.data_ptr()
    product = Launch((chosen.strips * chosen.parts, 1, 1), 32 * chosen.warps, chosen.shared(bits))
    turn = Launch((-(-pieces // 4), 1, 1), 128, function=kernels.functions[1])
    defines = chosen.defines(n, k, bits, call.half, call.around) | call.defines
    launch(
        kernels, defines, *(() if chosen.turns else (turn,)), product,
        **call.arguments, **more, sums=at, kept=at + sums, scales=at + sums + kept,
        squares=at + sums + kept + 8 * pieces, arrived=0 if chosen.whole else ARRIVED.of(device.index),
        inverse_k=1 / k,
    )  # fmt: skip
