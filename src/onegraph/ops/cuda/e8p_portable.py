"""E8P linear for 1 to 64 tokens, 16 at once, on every card since Ampere: how `e8p_portable.cu` is cut over the GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import ROWS, SLICE, SLOT, Linear
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.workspace import Counters

MAX_TOKENS = 64  # in passes over the codes
AT_ONCE = 16  # tokens of a pass
MUST_TURN = 4  # tokens that a launch in front would take longer for
LAUNCH = 5500  # cycles of it
CLASSES = (1, 4, 8, 16)  # tokens that it is compiled for
PARTS = ROWS // 16  # row tiles of 16 in ROWS
TABLES = {2: 65536, 3: 65536 + 16384, 4: 65536}  # bytes that codes are decoded with, in shared memory
KEPT = 512  # bytes of a slice of a token, rotated
MAX_N = 4096 * ROWS  # rows whose arrivals are counted
# Row tiles of codes that a warp has under way (more are slower: each is a copy of the loop, which the first turn has to
# fetch), of AT_ONCE tokens by bits, and warps of a block at most, by tokens: what registers hold.
AHEAD = 2
AHEAD_AT_ONCE = {2: 3, 3: 2, 4: 1}
WARPS = {1: 16, 4: 16, 8: 16, 16: 8}
# What `Shape` of e8p_portable.cu is made of.
SHAPE = "N", "K", "NORMED", "SILU", "BIASED", "ADDED", "WIDE"

ARGUMENTS = build.Arguments(
    pointers=("x", "codes", "residual", "codebook", "in_scale", "out_scale", "bias", "add", "y", "kept", "scales",
              "squares", "sums", "arrived"),
    floats=("norm", "eps", "inverse_k"),
    ints=("tokens",),
)  # fmt: skip


@dataclass(frozen=True, order=True)
class PortableTiling:
    """How one shape is cut: `strips` of rows, which begin at multiples of `unit` row tiles, by `parts` of k. A block
    has `across` slices side by side and `down` such rows of warps, `ahead` row tiles of codes a warp under way, and
    room for the sums of `hold` row tiles and `tokens`. It `turns` the activations of its slices itself, or a launch in
    front does."""

    ahead: int
    tokens: int
    turns: bool
    strips: int
    parts: int
    unit: int
    across: int
    down: int
    hold: int

    kept = KEPT  # of a slice of a token; not a field

    def tables(self, bits: int) -> int:
        """Bytes that codes are decoded with."""
        return TABLES[bits]

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
        """Estimated cycles, up to what all plans have in common."""
        blocks = self.strips * self.parts
        waves = -(-blocks // device.sms)
        tiles = self.most(n)
        issue = {2: 129, 3: 223, 4: 240}[bits] + 15 * (1 if bits == 2 else 2) * (self.tokens // 4)  # of a row tile
        alone = -(-tiles // self.down) * issue * 3.5  # a warp
        share = min(16, 15 * max(1, device.sms / blocks))  # bytes by clock: idle SMs leave theirs to the others
        memory = tiles * self.across * SLOT[bits] / min(share, self.warps * self.ahead * SLOT[bits] / 1000)
        turns = -(-self.tokens // self.down) * 950 if self.turns else LAUNCH
        rounds = -(-tiles // self.hold) * 350
        if self.whole:
            end = 900 * -(-tiles * self.tokens // (PARTS * self.warps))
        else:  # through the L2, there and back
            end = 3100 + 20 * tiles * self.tokens + 750 * (self.parts // 8) + 30 * self.across
        return waves * (max(tiles * self.across * issue / 4, alone, memory) + turns + rounds + end)


def cuts(
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


def plans(n: int, k: int, bits: int, tokens: int, device: build.Device) -> list[PortableTiling]:
    """Every plan that fits into 99 KB."""
    count, found = next(size for size in CLASSES if size >= tokens), []
    for cut in cuts(n, k, count, WARPS[count], device):
        for ahead in range(AHEAD_AT_ONCE[bits] if count == AT_ONCE else AHEAD, 0, -1):
            if fitting := PortableTiling(ahead, count, *cut).fitting(bits, min(device.shared, build.PORTABLE_SHARED)):
                found.append(fitting)
                break
    return found


@lru_cache(maxsize=1024)
def plan(n: int, k: int, bits: int, tokens: int, device: build.Device) -> PortableTiling:
    """The plan that costs least."""
    return min(plans(n, k, bits, tokens, device), key=lambda plan: (plan.cost(n, bits, device), plan))


@lru_cache(maxsize=1024)
def like_most(n: int, k: int, bits: int, tokens: int, device: build.Device) -> PortableTiling:
    """The plan of AT_ONCE tokens with room for fewer, whose sums are made in the same order."""
    return replace(plan(n, k, bits, AT_ONCE, device), tokens=next(size for size in CLASSES if size >= tokens))


def supports_shape(tokens: int, n: int) -> bool:
    """Whether this kernel computes a shape that `e8p.supports_shape` allows."""
    return tokens <= MAX_TOKENS and n <= MAX_N


def defines(plan: PortableTiling, n: int, k: int, bits: int, half: bool, around: tuple[bool, ...]) -> dict[str, int]:
    """What e8p_portable.cu is compiled with, but for START. `around`: normed, silu, biased, added, wide."""
    made = {"BITS": bits, "TOKENS": plan.tokens, "TURNS": int(plan.turns), "HALF": int(half)}
    made |= {"AHEAD": plan.ahead, "HOLD": plan.hold}
    made |= {"ACROSS": plan.across, "DOWN": plan.down, "PARTS": plan.parts, "STRIPS": plan.strips, "UNIT": plan.unit}
    return made | dict(zip(SHAPE, (n, k, *map(int, around)), strict=True))


KERNELS = build.Source(
    "e8p_portable",
    ops=("e8p_linear", "e8p_chain"),  # whose linears are launches of their own without clusters
    functions=("e8p_portable", "e8p_portable_turn"),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    example=defines(
        PortableTiling(4, 4, True, 33, 2, 1, 8, 2, 8), 4096, 4096, 2, False, (True, False, True, True, False)
    )
    | {"START": 0},
    families=("portable",),
    shared=build.PORTABLE_SHARED,
    otherwise="another kernel runs 1 to 64 tokens of an E8P linear",
)
ARRIVED = Counters(MAX_N // ROWS)


def run(call: Linear) -> None:
    """`call`, whose shape `supports_shape` allows, in passes of up to AT_ONCE tokens."""
    if call.tokens <= AT_ONCE:
        return _run(call)
    tokens, count = call.tokens, -(-call.tokens // AT_ONCE)
    x, out, add = call.x.view(tokens, -1), call.out.view(tokens, -1), call.add
    for i in range(count):
        part = slice(tokens * i // count, tokens * (i + 1) // count)
        more = None if add is None else add.view(tokens, -1)[part]
        _run(replace(call, x=x[part], add=more, out=out[part]))


def _run(call: Linear) -> None:
    n, k, bits, tokens, device = call.n, call.k, call.bits, call.tokens, call.out.device
    chosen = (like_most if call.steady else plan)(n, k, bits, tokens, build.device(device.index))
    pieces = -(-k // SLICE) * tokens
    kept = 0 if chosen.turns else KEPT * pieces
    sums = 0 if chosen.whole else 4 * chosen.parts * tokens * n
    space = torch.empty(sums + kept + 12 * pieces, dtype=torch.uint8, device=device)
    at = space.data_ptr()
    product = Launch((chosen.strips * chosen.parts, 1, 1), 32 * chosen.warps, chosen.shared(bits))
    turn = Launch((-(-pieces // 4), 1, 1), 128, function="e8p_portable_turn")
    launch(
        KERNELS, defines(chosen, n, k, bits, call.half, call.around), *(() if chosen.turns else (turn,)), product,
        **call.arguments, **call.stages, codebook=call.codebook, sums=at, kept=at + sums, scales=at + sums + kept,
        squares=at + sums + kept + 8 * pieces, arrived=0 if chosen.whole else ARRIVED.of(device.index),
        inverse_k=1 / k,
    )  # fmt: skip
