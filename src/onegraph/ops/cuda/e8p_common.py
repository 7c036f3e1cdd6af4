"""What the launchers of the E8P kernels share: sizes that the sources have too, and a linear as they are given it."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from onegraph.ops.cuda.exchange import INTS, POINTERS

SLICE, ROWS = 256, 128  # columns whose codes four lanes load at a time; rows of a Hadamard block at most
SLOT = {2: 1024, 3: 1536, 4: 2048}  # bytes of 16 rows' codes of a slice, by bits
TABLES = {2: 65536, 3: 98304, 4: 65536}  # bytes that codes are decoded with, in shared memory
MAX_K = 32768  # of kernels that hold a token's columns in the registers of one block
NO_EXCHANGE = dict.fromkeys((*POINTERS, *INTS), 0)


class Linear(NamedTuple):
    """One call of `onegraph.ops.e8p.e8p_linear`: inputs at multiples of 16 bytes, `residual` None at 2 bits, `eps`
    negative where there is no norm, `out` [tokens, n]. `alike`: its sums are made as those of
    `onegraph.ops.invariant.AT_ONCE` tokens. Of `ranks` it is one, and the result is the sum over them: `exchange` as of
    `exchange.given`."""

    x: Tensor
    codes: Tensor
    residual: Tensor | None
    codebook: Tensor
    in_scale: Tensor
    out_scale: Tensor
    bias: Tensor | None
    add: Tensor | None
    out: Tensor
    bits: int
    tokens: int
    n: int
    k: int
    half: bool
    eps: float
    silu: bool
    wide: bool
    alike: bool = False
    ranks: int = 1
    exchange: Mapping[str, int] = NO_EXCHANGE

    @property
    def norm(self) -> float:
        """Of both Hadamard transforms."""
        return float((block(self.n) * block(self.k)) ** -0.5)


def block(dimension: int) -> int:
    """Of the Hadamard rotation of a dimension that 64 divides."""
    return 64 if dimension % 128 else 128
