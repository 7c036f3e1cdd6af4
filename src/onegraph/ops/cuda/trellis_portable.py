"""Trellis-coded linear for few tokens, or 1 to 64, 16 at once: what `trellis_portable.cu` adds to
`rotated_portable.py`."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch

from onegraph.ops.cuda import build, rotated_portable
from onegraph.ops.cuda.e8p_common import SLICE
from onegraph.ops.cuda.rotated_portable import MAX_N, MAX_TOKENS, WARPS, PortableTiling
from onegraph.ops.cuda.trellis_common import Linear

MOST_AS_BYTES = 4
ISSUE_BYTES = 450  # instructions of a row tile and slice by bytes
ISSUE = 590, 32  # instructions of a row tile and slice, and for each eight tokens beyond the first


@dataclass(frozen=True, order=True)
class TrellisTiling(PortableTiling):
    """`as_bytes`: up to MOST_AS_BYTES tokens are multiplied with the bytes of weights, not with their sums; not where
    sums must be made as those of AT_ONCE tokens."""

    as_bytes: bool = True

    kept = 544
    alone_factor = 1.5

    @classmethod
    def warps_at_most(cls, bits: int, count: int) -> int:
        return WARPS[count] if bits <= 4 else 8

    @classmethod
    def aheads(cls, bits: int, count: int) -> tuple[int, ...]:
        return (2,) if bits <= 4 else (1,)

    def slot(self, bits: int) -> int:
        return SLICE * 2 * bits

    @property
    def by_bytes(self) -> bool:
        return self.as_bytes and self.tokens <= MOST_AS_BYTES

    def issue(self, bits: int) -> int:
        if self.by_bytes:
            return ISSUE_BYTES
        return ISSUE[0] + ISSUE[1] * (self.tokens // 16)

    def defines(self, n: int, k: int, bits: int, half: bool, around: tuple[bool, ...]) -> dict[str, int]:
        return super().defines(n, k, bits, half, around) | {"AS_BYTES": int(self.by_bytes)}

    @classmethod
    @lru_cache(maxsize=2048)
    def like_most(cls, n: int, k: int, bits: int, tokens: int, device: build.Device) -> Self:
        found: Self = super().like_most(n, k, bits, tokens, device)
        return replace(found, as_bytes=False)


KERNELS = build.Source(
    "trellis_portable",
    ops=("trellis_linear",),
    functions=("trellis_portable", "trellis_portable_turn"),
    arguments=build.Arguments(
        pointers=("x", "codes", "in_scale", "out_scale", "bias", "add", "y", "kept", "scales", "squares", "sums",
                  "arrived"),
        floats=("norm", "eps", "inverse_k"),
        ints=("tokens",),
    ),
    capabilities=build.PORTABLE,
    example=TrellisTiling(2, 4, True, 33, 2, 1, 8, 2, 8).defines(
        4096, 4096, 2, False, (True, False, True, True, False)
    )
    | {"START": 0, "CODE": 0},
    families=("hopper", "portable"),
    shared=build.PORTABLE_SHARED,
    otherwise="more tokens decode the weight, or torch computes trellis-coded linears",
)  # fmt: skip


def supports_shape(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether this kernel computes a shape."""
    fits = 0 < tokens <= MAX_TOKENS and n <= MAX_N and n % 64 == 0 and k % 64 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def run(call: Linear) -> None:
    """`call`, whose shape `supports_shape` allows."""
    rotated_portable.run(KERNELS, TrellisTiling, call, codes=call.codes)
