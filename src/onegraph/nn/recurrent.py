"""Layers that mix a token with those before it through a state of fixed size: gated delta rule, short convolution.

Such a layer stands in a block where `Attention` does. Its state lies in slots, one a sequence, and goes by positions: a
text at position 0 begins with zeros whatever its slot holds, and to take back tokens is to move the position.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from onegraph.nn.block import Normed, Stream, WholeNorms
from onegraph.nn.linear import Linear
from onegraph.nn.peers import Peer
from onegraph.ops.calls import MAX_TOKENS
from onegraph.ops.gated_delta import gated_delta
from onegraph.ops.linear import linear, normed_linear
from onegraph.ops.mamba2 import mamba2
from onegraph.ops.short_conv import short_conv

WAITING = 8  # records of a gated delta rule that may wait until they are applied to the state


class Rows(Protocol):
    """The sequences of a call: int32 [B] each. `slots` are theirs, 0 for a row without one; `counts` of the call's
    tokens are real, from `positions` on."""

    @property
    def slots(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def counts(self) -> Tensor: ...


class _Rows(NamedTuple):
    slots: Tensor
    positions: Tensor
    counts: Tensor


class Recurrent(nn.Module):
    """Such a layer. `index`: its number, by which a cache finds its state."""

    index: int

    def state(self, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the tensors of one slot, where activations are of `dtype`. Of a decode step's tokens
        `MAX_TOKENS` - 1 can be taken back."""
        raise NotImplementedError

    def run(self, state: Sequence[Tensor], rows: Rows, *inputs: Tensor) -> Tensor:
        """What the block's linears gave [B, Q, ...] -> what its output linear takes [B, Q, n]; the state is written."""
        raise NotImplementedError

    def whole(self, *inputs: Tensor) -> Tensor:
        """`run` of whole sequences from their first token, whose state nobody keeps."""
        batch, length, _ = inputs[0].shape
        device = inputs[0].device
        sizes = self.state(inputs[0].dtype)
        state = [torch.zeros(batch + 1, *shape, device=device, dtype=dtype) for shape, dtype in sizes]
        slots = torch.arange(1, batch + 1, device=device, dtype=torch.int32)
        return self.run(state, _Rows(slots, torch.zeros_like(slots), torch.full_like(slots, length)), *inputs)


class GatedDeltaNet(Recurrent):
    """Gated DeltaNet (Yang et al., arXiv 2412.06464) behind a convolution, with an output norm and gate: see
    `ops.gated_delta.gated_delta`.

    Args:
        heads: of keys and of values. dims: of a key and of a value.
        conv: weight [channels, width]. a_log, dt_bias: float32 [v_heads], of the decay. norm: weight [v_dim]; eps: its.
        beta_scale: multiplies beta. input_eps: of the norm in front of beta and decay.

    It is called with queries | keys | values | output gates and with x, both [B, Q, ...], the weights [2 v_heads, D] by
    which x [B, Q, D] becomes beta | decay, and the weight [D] of an RMSNorm of x in front of them, if there is one.
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor

    def __init__(
        self,
        *,
        index: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        conv: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
        beta_scale: float = 1.0,
        input_eps: float = 0.0,
    ) -> None:
        super().__init__()
        self.index, self.heads, self.dims, self.eps, self.beta_scale = index, heads, dims, eps, beta_scale
        self.input_eps = input_eps
        for name, tensor in (("conv", conv), ("a_log", a_log), ("dt_bias", dt_bias), ("norm", norm)):
            self.register_buffer(name, tensor)

    def state(self, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The convolution's ring; S and the position up to which it is applied; the ring of keys, deltas, decays."""
        (k_heads, v_heads), (k_dim, v_dim), (channels, width) = self.heads, self.dims, self.conv.shape
        depth = WAITING + MAX_TOKENS
        return [
            ((width - 1 + MAX_TOKENS, channels), dtype),
            ((v_heads, v_dim, k_dim), torch.float32),
            ((v_heads,), torch.int32),
            ((depth, k_heads, k_dim), torch.float32),
            ((depth, v_heads, v_dim), torch.float32),
            ((depth, v_heads, 1), torch.float32),
        ]

    def run(self, state: Sequence[Tensor], rows: Rows, *inputs: Tensor) -> Tensor:
        mixed, x, rates, *norm = inputs
        channels = len(self.conv)
        qkv, z = mixed.split((channels, mixed.shape[2] - channels), dim=2)
        out: Tensor = gated_delta(
            qkv, z, None, None, self.conv, self.a_log, self.dt_bias, self.norm, self.eps, *state,
            rows.slots, rows.positions, rows.counts, WAITING, False, self.beta_scale,
            x, rates, norm[0] if norm else None, self.input_eps,
        )  # fmt: skip
        return out


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi Delta Attention (arXiv 2510.26692): `GatedDeltaNet` with a decay for each channel of a key, an output gate
    by sigmoid, and both of low rank.

    dt_bias: float32 [heads * dim]. decay, gate: weights [heads * dim, dim] behind the low ranks.

    It is called with queries | keys | values and with beta | low rank of decays | that of gates.
    """

    decay: Tensor
    gate: Tensor

    def __init__(self, *, decay: Tensor, gate: Tensor, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("decay", decay)
        self.register_buffer("gate", gate)

    def state(self, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        *others, (shape, kind) = super().state(dtype)
        return [*others, ((*shape[:-1], self.dims[0]), kind)]

    def run(self, state: Sequence[Tensor], rows: Rows, *inputs: Tensor) -> Tensor:
        qkv, rates = inputs
        b, low_a, low_z = rates.split((self.heads[1], self.decay.shape[1], self.gate.shape[1]), dim=2)
        a, z = (linear(x.contiguous(), w, False) for x, w in ((low_a, self.decay), (low_z, self.gate)))
        out: Tensor = gated_delta(
            qkv, z, b, a, self.conv, self.a_log, self.dt_bias, self.norm, self.eps, *state,
            rows.slots, rows.positions, rows.counts, WAITING, True,
        )  # fmt: skip
        return out


class Mamba2Mixer(Recurrent):
    """Mamba2 (Dao and Gu, arXiv 2405.21060) behind a convolution, with an output gate and norm: `ops.mamba2.mamba2`.

    Args:
        heads: their number, and the size of x of one. groups: of B and C, and the size of either.
        conv: weight [channels, width]; bias: [channels] or None. a_log, dt_bias, skip: float32 [heads].
        norm: weight [heads size]; eps: its own. dt_min: the least step.
        peer: the heads are one rank's part of those that the norm goes over.

    It is called with gates | x | B | C | steps.
    """

    conv: Tensor
    bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor | None

    def __init__(
        self,
        *,
        index: int,
        heads: tuple[int, int],
        groups: tuple[int, int],
        conv: Tensor,
        bias: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        skip: Tensor,
        norm: Tensor,
        eps: float,
        dt_min: float,
        peer: Peer | None = None,
    ) -> None:
        super().__init__()
        self.index, self.heads, self.groups, self.eps, self.dt_min = index, heads, groups, eps, dt_min
        self.behind = nn.Identity() if peer is None else WholeNorms(norm, norm[:0], eps, peer)
        tensors = {"conv": conv, "bias": bias, "a_log": a_log, "dt_bias": dt_bias, "skip": skip}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.register_buffer("norm", norm if peer is None else None)

    def state(self, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """As `GatedDeltaNet.state`, of B and dt x."""
        (heads, size), (groups, n), (channels, width) = self.heads, self.groups, self.conv.shape
        depth = WAITING + MAX_TOKENS
        return [
            ((width - 1 + MAX_TOKENS, channels), dtype),
            ((heads, size, n), torch.float32),
            ((heads,), torch.int32),
            ((depth, groups, n), torch.float32),
            ((depth, heads, size), torch.float32),
            ((depth, heads, 1), torch.float32),
        ]

    def run(self, state: Sequence[Tensor], rows: Rows, *inputs: Tensor) -> Tensor:
        heads, size = self.heads
        z, xbc, dt = inputs[0].split((heads * size, len(self.conv), heads), dim=2)
        out: Tensor = mamba2(
            xbc, z, dt, self.conv, self.bias, self.a_log, self.dt_bias, self.skip, self.norm, self.eps, *state,
            rows.slots, rows.positions, rows.counts, WAITING, self.dt_min,
        )  # fmt: skip
        result: Tensor = self.behind(out)
        return result


class ShortConvolution(Recurrent):
    """LFM2's gated convolution: of x [B, Q, 3 C] = before | after | input, see `ops.short_conv.short_conv`.

    Args:
        conv: weight [C, width]; bias: [C] or None.
    """

    conv: Tensor
    bias: Tensor | None

    def __init__(self, *, index: int, conv: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.index = index
        self.register_buffer("conv", conv)
        self.register_buffer("bias", bias)

    def state(self, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The ring of its latest inputs."""
        channels, width = self.conv.shape
        return [((width - 1 + MAX_TOKENS, channels), dtype)]

    def run(self, state: Sequence[Tensor], rows: Rows, *inputs: Tensor) -> Tensor:
        (ring,), (x,) = state, inputs
        out: Tensor = short_conv(x, self.conv, self.bias, ring, rows.slots, rows.positions, rows.counts, False, True)
        return out


class Inputs(nn.Module):
    """What stands in front of a `Recurrent`: a norm with one linear or, where beta and decay have one of their own that
    is never rounded and has no bias, with two.

    inside: the second runs in the launch of the `Recurrent`, which is called with its input and weight instead.
    """

    norm: Tensor
    fused = False

    def __init__(self, main: Normed, rates: Linear | None, norm: Tensor, *, inside: bool = False) -> None:
        super().__init__()
        self.main, self.rates, self.inside = main, rates, inside
        self.register_buffer("norm", norm)

    @property
    def linear(self) -> nn.Module:
        """That may be in any format."""
        return self.main.linear

    @property
    def eps(self) -> float:
        return self.main.eps

    def forward(self, stream: Stream) -> tuple[tuple[Tensor, ...], Tensor]:
        """What the `Recurrent` is called with, and the stream added up [..., D]."""
        if self.rates is None or self.main.norm is None:
            given, total = self.main(stream)
            if self.rates is None:
                return (given,), total
            weight = self.rates.tensors["weight"]
            if self.inside:
                return (given, total, weight, self.norm), total
            return (given, normed_linear(total, self.norm, self.eps, weight)), total
        x, total = stream.normed(self.norm, self.eps)
        given = self.main.after(self.main.linear(x))
        return (given, *((x, self.rates.tensors["weight"]) if self.inside else (self.rates(x),))), total


class Reordered(nn.Module):
    """Numbers of a linear's result [..., n] in another order: number i is where `order` [n] says."""

    order: Tensor

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self.order)
