"""The pieces of a decoder block: what stands in front of a linear and behind it, in its launch where the format can.

A block is `Normed`, attention, `ResidualLinear`, and a feed-forward half: `MLP`, or the routed experts of `nn/moe.py`;
between them runs the residual stream. Which of norm, SwiGLU and sum run inside a linear follows from its format and is
settled when the piece is built, and so is what a family has in front of a linear or behind it: one forward serves them
all.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from onegraph.formats.weight import WeightFormat
from onegraph.nn.linear import ConcatLinear, Linear
from onegraph.nn.lora import LoraLinear
from onegraph.nn.peers import Peer
from onegraph.ops.activation import Gate, SwiGLU
from onegraph.ops.norm import add_rms_norm, rms_norm
from onegraph.ops.qk_norm import qk_mean_squares, qk_norm


class Norm(nn.Module):
    """RMSNorm with weight [D] of what a sublayer gave; or weight [3, D] where it gave two parts, of each of them and of
    the sum of these norms."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", weight)


class Stream(NamedTuple):
    """The residual stream [..., D]: value, value + delta, or (value + norm(delta)) * scale.

    `delta` is what a sublayer gave and nobody has added yet: the norm that reads the sum adds it in the same launch.
    norm: what it goes through before it is added. scale: [1], of the sum. beside: the second part of what a sublayer
    gave. The last two go with `norm` alone.
    """

    value: Tensor
    delta: Tensor | None = None
    norm: Norm | None = None
    scale: Tensor | None = None
    beside: Tensor | None = None

    def scaled(self, scale: Tensor) -> "Stream":
        """The stream times `scale` [1], where a sublayer's norm is still to be added."""
        assert self.norm is not None
        return self._replace(scale=scale)

    def total(self) -> Tensor:
        if self.delta is None:
            return self.value
        if self.norm is None:
            return self.value + self.delta
        norm = self.norm
        result: Tensor = rms_norm(self.delta, norm.weight, norm.eps, self.value, self.scale, self.beside)
        return result

    def normed(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(RMSNorm of the sum, the sum). weight: [D], or [N, D] of as many norms -> [N, ..., D]; eps: theirs, and that
        of `norm`."""
        if self.delta is None:
            return rms_norm(self.value, weight, eps), self.value
        post = None if self.norm is None else self.norm.weight
        total, x = add_rms_norm(self.value, self.delta, weight, eps, post, self.scale, self.beside)
        return x, total


def norm_inside(format: WeightFormat) -> bool:
    """Whether a linear of this format runs the RMSNorm in front of it."""
    return "norm" in format.fuses


def sum_inside(format: WeightFormat, silu: bool) -> bool:
    """Whether a linear of this format runs the sum behind it and, with `silu`, SwiGLU in front."""
    return "add" in format.fuses and (not silu or "silu" in format.fuses)


class Scaled(nn.Module):
    """A factor of what a sublayer gave."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class WholeNorms(nn.Module):
    """RMSNorm of all queries of a token together, with weight [heads * head_dim], and of all keys, if there are any;
    qkv [..., n].

    peer: where the weights, and the heads in front, are one rank's part.
    """

    weight: Tensor

    def __init__(self, q: Tensor, k: Tensor, eps: float, peer: Peer | None = None) -> None:
        super().__init__()
        self.q_size, self.k_size, self.eps, self.peer = len(q), len(k), eps, peer
        self.register_buffer("weight", torch.cat((q, k)))

    def forward(self, qkv: Tensor) -> Tensor:
        ranks = 1 if self.peer is None else self.peer.count
        squares = qk_mean_squares(qkv, self.q_size, self.k_size, ranks)
        if self.peer is not None:
            squares = self.peer.all_reduce(squares)
        result: Tensor = qk_norm(qkv, self.weight, squares, self.q_size, self.eps)
        return result


class Normed(nn.Module):
    """RMSNorm with weight [D], then a linear, then `after`, if there is one.

    fused: False keeps the norm an op of its own, the other side of an A/B comparison.

    Attributes:
        fused: whether the whole is the linear's launch.
    """

    norm: Tensor | None

    def __init__(
        self,
        norm: Tensor,
        linear: Linear | ConcatLinear,
        eps: float,
        *,
        after: nn.Module | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.eps = eps
        inside = fused and isinstance(linear, Linear) and norm_inside(linear.format)
        self.fused, self.after = inside and after is None, after or nn.Identity()
        self.linear = linear.after_norm(norm) if inside and isinstance(linear, Linear) else linear
        self.register_buffer("norm", None if inside else norm)

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """What comes out [..., n], and the stream added up [..., D]."""
        if self.norm is None:
            total = stream.total()
            return self.after(self.linear(total, eps=self.eps)), total
        x, total = stream.normed(self.norm, self.eps)
        return self.after(self.linear(x)), total


class InputLinear(nn.Module):
    """A linear of the stream as it is, then `after`; stands where `Normed` does in blocks that norm behind only."""

    fused = False

    def __init__(self, linear: Linear | ConcatLinear, *, after: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.after = linear, after or nn.Identity()

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """As `Normed`."""
        total = stream.total()
        return self.after(self.linear(total)), total


class ResidualLinear(nn.Module):
    """A linear whose result joins the stream.

    gate: what is in front of the linear, of x [..., 2k] = gate | up, or [..., k] of `ReLU2`. after: what its result
    goes through before it joins, a norm or a factor. peer: where the linear is one rank's part of the inputs, whose
    results add up.
    """

    def __init__(
        self,
        linear: Linear | LoraLinear,
        *,
        gate: Gate | None = None,
        after: nn.Module | None = None,
        fused: bool = True,
        peer: Peer | None = None,
    ) -> None:
        super().__init__()
        self.silu = isinstance(gate, SwiGLU) and gate.plain
        self.linear, self.gate, self.after = linear, gate or nn.Identity(), after
        self.peer = peer
        known = (gate is None or self.silu) and after is None and peer is None
        self.fused = fused and known and sum_inside(linear.format, self.silu)
        self._gated = peer is not None and fused and self.silu and "silu" in linear.format.fuses
        self._crosses = peer is not None and fused and after is None

    def forward(self, x: Tensor, total: Tensor) -> Stream:
        if self.fused:
            return Stream(self.linear(x, add=total, silu=self.silu))
        x = x if self._gated else self.gate(x)
        if self.peer is not None and self._crosses:
            assert isinstance(self.linear, Linear), "adapters are not shared by ranks"
            return Stream(self.linear.summed(x, self.peer, total, silu=self._gated))
        out = self.linear(x, silu=True) if self._gated else self.linear(x)
        if self.peer is not None:
            if self.after is None:
                return Stream(self.peer.all_reduce(out, total))
            out = self.peer.all_reduce(out)
        if isinstance(self.after, Norm):
            return Stream(total, out, self.after)
        return Stream(total, out if self.after is None else self.after(out))


class MLP(nn.Module):
    """The feed-forward half of a block: a norm, gate and up, what stands between, down, the sum."""

    def __init__(self, gate_up: Normed | InputLinear, down: ResidualLinear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    @property
    def fused(self) -> bool:
        """Whether norm, SwiGLU and sum all run inside the linears."""
        return self.gate_up.fused and self.down.fused

    def forward(self, stream: Stream) -> Stream:
        gate_up, total = self.gate_up(stream)
        result: Stream = self.down(gate_up, total)
        return result
