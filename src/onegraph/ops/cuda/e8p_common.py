"""What the launchers of the E8P kernels share: sizes that the sources have too, and a linear as they are given it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.calls import E8PLinear

SLICE, ROWS = 256, 128  # columns whose codes four lanes load at a time; rows of a Hadamard block at most
SLOT = {2: 1024, 3: 1536, 4: 2048}  # bytes of 16 rows' codes of a slice, by bits
TABLES = {2: 65536, 3: 98304, 4: 65536}  # bytes that codes are decoded with, in shared memory
MAX_K = 32768  # of kernels that hold a token's columns in the registers of one block


class Around:
    """What stands around the codes of a rotated linear, as launches are given it; of a call with its `out`."""

    @property
    def half(self: Any) -> bool:
        return bool(self.x.dtype == torch.float16)

    @property
    def norm(self: Any) -> float:
        """Of both Hadamard transforms."""
        return float((block(self.n) * block(self.k)) ** -0.5)

    @property
    def around(self: Any) -> tuple[bool, ...]:
        """What a launch is compiled with: normed, silu, biased, added, wide."""
        return self.eps is not None, self.silu, self.bias is not None, self.add is not None, self.wide

    @property
    def defines(self) -> dict[str, int]:
        """What a launch is compiled with besides, for its codes."""
        return {}

    @property
    def arguments(self: Any) -> dict[str, Any]:
        """What the kernels of few tokens, of many and the portable ones are given alike."""
        return {
            "x": self.x, "in_scale": self.in_scale, "out_scale": self.out_scale, "bias": self.bias, "add": self.add,
            "y": self.out, "tokens": self.tokens, "norm": self.norm, "eps": -1.0 if self.eps is None else self.eps,
        }  # fmt: skip


@dataclass(eq=False, kw_only=True)
class Linear(E8PLinear, Around):
    """A call as the launches take it: inputs contiguous and aligned, the bias float32.

    Attributes:
        out: [tokens, n], which they write.
        steady: sums are made as those of `onegraph.ops.invariant.AT_ONCE` tokens.
        group: ranks over which the result is summed: peer buffers, state, alarm and rank as of `exchange.all_reduce`.
    """

    out: Tensor
    steady: bool = False
    group: tuple[list[Tensor], Tensor, Tensor, int] | None = None

    @property
    def stages(self) -> dict[str, Tensor]:
        """The codes; at 2 bits, where nothing reads the residual's, the same for both."""
        return {"codes": self.codes, "residual": self.codes if self.residual is None else self.residual}


def block(dimension: int) -> int:
    """Of the Hadamard rotation of a dimension that 64 divides."""
    return 64 if dimension % 128 else 128
