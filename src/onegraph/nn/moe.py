"""The feed-forward half of a block whose tokens choose among experts: Qwen-MoE, Mixtral, gpt-oss, GLM, OLMoE."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from onegraph.nn.block import Norm, Stream
from onegraph.nn.expert_cache import CachedExperts
from onegraph.nn.experts import Experts
from onegraph.nn.linear import Linear
from onegraph.nn.peers import Peer
from onegraph.nn.shared_expert import FEW, RoutedAndShared, SharedExpert
from onegraph.ops.linear import linear
from onegraph.ops.route import check_groups, sigmoid_route, softmax_route


class Beside(NamedTuple):
    """What stands around an MLP and experts that read the stream beside each other (Gemma 4).

    Args:
        router: weight [D] of the RMSNorm in front of the router; routed_in: of that in front of the experts.
        scales: float32 [E], which the weights of chosen experts are multiplied by.
        routed_out, dense_out: weights [D] of the norms of what either gives; out: of that of their sum.
    """

    router: Tensor
    routed_in: Tensor
    scales: Tensor
    routed_out: Tensor
    dense_out: Tensor
    out: Tensor


class _Around(nn.Module):
    """What of `Beside` is behind the router."""

    scales: Tensor

    def __init__(self, given: Beside, eps: float) -> None:
        super().__init__()
        self.register_buffer("scales", given.scales)
        self.out = Norm(_rows(given.routed_out, given.dense_out, given.out), eps)


def _rows(*weights: Tensor) -> Tensor:
    """Weights of norms that one launch has."""
    return torch.stack([weight.float() for weight in weights])


class MoE(RoutedAndShared):
    """A norm, the router, the experts that it chooses, the sum; stands where `MLP` does.

    Args:
        norm: weight [D] of the RMSNorm in front; eps: its own.
        gate: the router [E, D], in its file's dtype or a wider one: what it chooses is not chosen by rounding; with
            `gated` [E + 1, D]. bias: float32 [E] or None.
        top_k: experts that a token uses. normalise: their weights sum to 1, rather than to what softmax over all
            experts gives them.
        groups: (of how many, how many are chosen, sum of weights) where scores are by sigmoid and `bias` is for the
            choice alone: see `ops.route.sigmoid_route`. None: by softmax.
        experts, shared: E routed ones and an expert that every token uses besides, of which a token's sigmoid with the
            last row of `gate` is the weight where it is `gated`: see `RoutedAndShared`.
        peer: where all experts are one rank's part of their hidden units, whose results add up.
        beside: `norm` is the shared expert's alone, the block's MLP; router and experts have norms of their own, and
            the buffer `norm` has the three as rows.
        latent: linears in front of the routed experts and behind their sum, which work at a size of their own.

    Attributes:
        fused: False: norm and sum are ops of their own, whatever the experts are stored in.
    """

    norm: Tensor
    gate: Tensor
    bias: Tensor | None
    fused = False

    def __init__(
        self,
        *,
        norm: Tensor,
        eps: float,
        gate: Tensor,
        bias: Tensor | None,
        experts: Experts | CachedExperts,
        top_k: int,
        normalise: bool,
        groups: tuple[int, int, float] | None = None,
        shared: SharedExpert | None = None,
        gated: bool = False,
        peer: Peer | None = None,
        beside: Beside | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        count, more = gate.shape[0] - gated if gate.dim() == 2 else 0, shared is not None
        if gated > more or experts.count - count not in (0, more) or not 1 <= top_k <= count:
            raise ValueError(
                f"the router is {tuple(gate.shape)} and chooses {top_k} of {experts.count} experts; it must be [E, D] "
                "with a row for each, the shared one apart, and a row for the gate that this one may have, and choose "
                "at least one and no more than there are"
            )
        super().__init__(experts, shared, count)
        self.into: nn.Module = nn.Identity() if latent is None else latent[0]
        self.back: nn.Module = nn.Identity() if latent is None else latent[1]
        if groups is not None:
            if bias is None:
                raise ValueError("groups are given and no bias; scores by sigmoid need one for the choice: give zeros")
            check_groups("groups", count, top_k, *groups[:2])
        self.eps, self.top_k, self.normalise, self.gated = eps, top_k, normalise, gated
        self.groups, self.peer = groups, peer
        if beside is not None:
            norm = _rows(norm, beside.router, beside.routed_in)
        self.register_buffer("norm", norm)
        self.register_buffer("gate", gate)
        self.register_buffer("bias", None if bias is None else bias.to(torch.float32))
        self.beside = None if beside is None else _Around(beside, eps)

    def forward(self, stream: Stream) -> Stream:
        if self.beside is not None:
            return self._both(self.beside, stream)
        x, total = stream.normed(self.norm, self.eps)
        flat = x.flatten(0, -2)
        one = self.together and flat.shape[0] <= FEW
        experts, weights = self.choose(linear(flat, self.gate, True), one or self.gated)
        own = None
        if self.gated and not one:
            experts, weights, own = experts[:, :-1].contiguous(), weights[:, :-1].contiguous(), weights[:, -1:]
        out = self.back(self.experts(self.into(flat), experts, weights)).view_as(x)
        out = out if one or self.shared is None else out + self.shared(x, own)
        return Stream(total, out) if self.peer is None else Stream(self.peer.all_reduce(out, total))

    def _both(self, around: _Around, stream: Stream) -> Stream:
        assert self.shared is not None
        normed, total = stream.normed(self.norm, self.eps)
        x, *others = normed.unbind()
        routed, flat = (each.flatten(0, -2) for each in others)
        chosen = self.choose(linear(routed, self.gate, True), scales=around.scales)
        routed, dense = self.experts(flat, *chosen).view_as(x), self.shared(x)
        if self.peer is not None:  # each has a norm of its own, so they are summed apart: in one exchange
            routed, dense = self.peer.all_reduce(torch.stack((routed, dense))).unbind()
        return Stream(total, routed, around.out, beside=dense)

    def choose(self, logits: Tensor, shared: bool = False, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """float32 [T, E], or [T, E + 1] where `gated` -> which experts each token uses, int32 [T, k], and their
        weights, float32 [T, k], those by softmax times `scales` float32 [E]; with `shared` [T, k + 1], of which the
        shared expert is the last."""
        chosen: tuple[Tensor, Tensor]
        if self.groups is None:
            chosen = softmax_route(logits, self.bias, self.top_k, self.normalise, shared, self.gated, scales)
        else:
            assert self.bias is not None
            groups, top_groups, scale = self.groups
            given = self.top_k, groups, top_groups, self.normalise, scale, shared, self.gated
            chosen = sigmoid_route(logits, self.bias, *given)
        return chosen
