"""The pieces of a decoder block: what stands in front of a linear and behind it, in its launch where the format can.

A block is `Normed`, attention, `Summed`, and a feed-forward half: `MLP`, or the routed experts of `nn/moe.py`; between
them runs the residual stream. Which of norm, SwiGLU and sum run inside a linear follows from its format and is settled
when the piece is built, so that one forward serves dense and quantized layers.
"""

from typing import NamedTuple

from torch import Tensor, nn

from onegraph.formats.weight import WeightFormat
from onegraph.nn.linear import Linear, Siblings
from onegraph.ops.activation import swiglu
from onegraph.ops.norm import add_rms_norm, rms_norm


class Stream(NamedTuple):
    """The residual stream is value + delta [..., D]. `delta` is what a sublayer gave and nobody has added yet: the norm
    that reads the sum adds it in the same launch."""

    value: Tensor
    delta: Tensor | None = None

    def total(self) -> Tensor:
        return self.value if self.delta is None else self.value + self.delta

    def normed(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(RMSNorm of the sum, the sum)."""
        if self.delta is None:
            return rms_norm(self.value, weight, eps), self.value
        total, x = add_rms_norm(self.value, self.delta, weight, eps)
        return x, total


def norm_inside(format: WeightFormat) -> bool:
    """Whether a linear of this format runs the RMSNorm in front of it."""
    return "norm" in format.fuses


def sum_inside(format: WeightFormat, silu: bool) -> bool:
    """Whether a linear of this format runs the sum behind it and, with `silu`, SwiGLU in front."""
    return "add" in format.fuses and (not silu or "silu" in format.fuses)


class Normed(nn.Module):
    """RMSNorm with weight [D], then a linear.

    fused: False keeps the norm an op of its own, the other side of an A/B comparison.
    """

    norm: Tensor | None

    def __init__(self, norm: Tensor, linear: Linear | Siblings, eps: float, *, fused: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.fused = fused and isinstance(linear, Linear) and norm_inside(linear.format)
        self.linear = linear.after_norm(norm) if self.fused and isinstance(linear, Linear) else linear
        self.register_buffer("norm", None if self.fused else norm)

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """The linear's result [..., n], and the stream added up [..., D]."""
        if self.norm is None:
            total = stream.total()
            return self.linear(total, eps=self.eps), total
        x, total = stream.normed(self.norm, self.eps)
        return self.linear(x), total


class Summed(nn.Module):
    """A linear whose result joins the stream; with `silu` behind SwiGLU, of x [..., 2k] = gate | up."""

    def __init__(self, linear: Linear, *, silu: bool = False, fused: bool = True) -> None:
        super().__init__()
        self.linear, self.silu = linear, silu
        self.fused = fused and sum_inside(linear.format, silu)

    def forward(self, x: Tensor, total: Tensor) -> Stream:
        if self.fused:
            return Stream(self.linear(x, add=total, silu=self.silu))
        return Stream(total, self.linear(swiglu(x) if self.silu else x))


class MLP(nn.Module):
    """The feed-forward half of a block: a norm, gate and up, SwiGLU, down, the sum."""

    def __init__(self, gate_up: Normed, down: Summed) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    @property
    def fused(self) -> bool:
        """Whether norm, SwiGLU and sum all run inside the linears."""
        return self.gate_up.fused and self.down.fused

    def forward(self, stream: Stream) -> Stream:
        gate_up, total = self.gate_up(stream)
        return self.down(gate_up, total)
