"""Trellis-coded linear for 1 to 64 tokens, 16 at once: how `trellis_portable.cu` is cut over the GPU. The cut is that
of `e8p_portable.py`; what differs is what decoding issues, and that it looks up nothing."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import SLICE
from onegraph.ops.cuda.e8p_portable import (
    ARRIVED,
    AT_ONCE,
    CLASSES,
    LAUNCH,
    MAX_N,
    MAX_TOKENS,
    PARTS,
    SHAPE,
    Plan,
    cuts,
)
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.trellis_common import Linear

KEPT = 544  # bytes of a slice of a token, rotated
AHEAD = 2  # row tiles of codes that a warp has under way, up to 4 bits
WARPS = {1: 16, 4: 16, 8: 16, 16: 8}  # of a block, by tokens: what registers hold
ISSUE = 590, 32  # instructions of a row tile and slice, and for each eight tokens beyond the first

ARGUMENTS = build.Arguments(
    pointers=("x", "codes", "in_scale", "out_scale", "bias", "add", "y", "kept", "scales", "squares", "sums",
              "arrived"),
    floats=("norm", "eps", "inverse_k"),
    ints=("tokens",),
)  # fmt: skip


@dataclass(frozen=True, order=True)
class TrellisPlan(Plan):
    """As `Plan`, without tables."""

    kept = KEPT

    def tables(self, bits: int) -> int:
        return 0

    def cost(self, n: int, bits: int, device: build.Device) -> float:
        """Estimated cycles, up to what all plans have in common."""
        blocks = self.strips * self.parts
        waves, tiles = -(-blocks // device.sms), self.most(n)
        issue = ISSUE[0] + ISSUE[1] * (self.tokens // 16)
        slot = SLICE * 2 * bits
        alone = -(-tiles // self.down) * issue * 1.5  # a warp
        share = min(16, 15 * max(1, device.sms / blocks))
        memory = tiles * self.across * slot / min(share, self.warps * self.ahead * slot / 1000)
        turns = -(-self.tokens // self.down) * 950 if self.turns else LAUNCH
        rounds = -(-tiles // self.hold) * 350
        if self.whole:
            end = 900 * -(-tiles * self.tokens // (PARTS * self.warps))
        else:
            end = 3100 + 20 * tiles * self.tokens + 750 * (self.parts // 8) + 30 * self.across
        return float(waves * (max(tiles * self.across * issue / 4, alone, memory) + turns + rounds + end))


def plans(n: int, k: int, bits: int, tokens: int, device: build.Device) -> list[TrellisPlan]:
    """Every plan that fits into 99 KB."""
    count = next(size for size in CLASSES if size >= tokens)
    warps = WARPS[count] if bits <= 4 else 8
    found = []
    for cut in cuts(n, k, count, warps, device):
        whole = TrellisPlan(AHEAD if bits <= 4 else 1, count, *cut)
        if fitting := whole.fitting(bits, min(device.shared, build.PORTABLE_SHARED)):
            found.append(fitting)
    return found


@lru_cache(maxsize=1024)
def plan(n: int, k: int, bits: int, tokens: int, device: build.Device) -> TrellisPlan:
    """The plan that costs least."""
    return min(plans(n, k, bits, tokens, device), key=lambda plan: (plan.cost(n, bits, device), plan))


@lru_cache(maxsize=1024)
def like_most(n: int, k: int, bits: int, tokens: int, device: build.Device) -> TrellisPlan:
    """The plan of AT_ONCE tokens with room for fewer, whose sums are made in the same order."""
    return replace(plan(n, k, bits, AT_ONCE, device), tokens=next(size for size in CLASSES if size >= tokens))


def supports_shape(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether this kernel computes a shape."""
    fits = 0 < tokens <= MAX_TOKENS and n <= MAX_N and n % 64 == 0 and k % 64 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def defines(plan: TrellisPlan, n: int, k: int, bits: int, half: bool, around: tuple[bool, ...]) -> dict[str, int]:
    """What trellis_portable.cu is compiled with, but for START. `around`: normed, silu, biased, added, wide."""
    made = {"BITS": bits, "TOKENS": plan.tokens, "TURNS": int(plan.turns), "HALF": int(half)}
    made |= {"AHEAD": plan.ahead, "HOLD": plan.hold}
    made |= {"ACROSS": plan.across, "DOWN": plan.down, "PARTS": plan.parts, "STRIPS": plan.strips, "UNIT": plan.unit}
    return made | dict(zip(SHAPE, (n, k, *map(int, around)), strict=True))


KERNELS = build.Source(
    "trellis_portable",
    ops=("trellis_linear",),
    functions=("trellis_portable", "trellis_portable_turn"),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    example=defines(TrellisPlan(2, 4, True, 33, 2, 1, 8, 2, 8), 4096, 4096, 2, False, (True, False, True, True, False))
    | {"START": 0},
    families=("hopper", "portable"),
    shared=build.PORTABLE_SHARED,
    otherwise="more tokens decode the weight, or torch computes trellis-coded linears",
)


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
    turn = Launch((-(-pieces // 4), 1, 1), 128, function="trellis_portable_turn")
    launch(
        KERNELS, defines(chosen, n, k, bits, call.half, call.around), *(() if chosen.turns else (turn,)), product,
        **call.arguments, codes=call.codes, sums=at, kept=at + sums, scales=at + sums + kept,
        squares=at + sums + kept + 8 * pieces, arrived=0 if chosen.whole else ARRIVED.of(device.index),
        inverse_k=1 / k,
    )  # fmt: skip
