"""What the launchers of the trellis kernels share: a linear as they are given it."""

from dataclasses import dataclass

from torch import Tensor

from onegraph.ops.calls import TrellisLinear
from onegraph.ops.cuda.e8p_common import Around


@dataclass(eq=False, kw_only=True)
class Linear(TrellisLinear, Around):
    """A call as the launches take it: inputs contiguous and aligned, the bias float32.

    Attributes:
        out: [tokens, n], which they write.
        steady: sums are made as those of `onegraph.ops.invariant.AT_ONCE` tokens.
    """

    out: Tensor
    steady: bool = False

    @property
    def defines(self) -> dict[str, int]:
        return {"CODE": self.code}
