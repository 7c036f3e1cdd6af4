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
from onegraph.ops.normed_route import normed_route
from onegraph.ops.route import check_groups


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
        factor: of what routed experts chosen by softmax give; `shared` has its own.

    Attributes:
        fused: False: norm and sum are ops of their own, whatever the experts are stored in.
    """

    norm: Tensor
    gate: Tensor
    bias: Tensor | None
    scales: Tensor | None
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
        factor: float = 1.0,
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
        self.groups, self.peer, self._last = groups, peer, peer is None and latent is None
        if beside is not None:
            norm = _rows(norm, beside.routed_in, beside.router)  # the router reads the last
        self.register_buffer("norm", norm)
        self.register_buffer("gate", gate)
        self.register_buffer("bias", None if bias is None else bias.to(torch.float32))
        scales = None if factor == 1 else torch.full((count,), factor, device=gate.device)
        self.register_buffer("scales", scales, persistent=False)
        self.beside = None if beside is None else _Around(beside, eps)

    def forward(self, stream: Stream) -> Stream:
        if self.beside is not None:
            return self._both(self.beside, stream)
        one = self.together and stream.value.shape[:-1].numel() <= FEW
        (flat, *_), total, experts, weights = self.choose(stream, one or self.gated, self.scales)
        x = flat.view_as(total)
        if self._last and self.experts.take_sum and (one or self.shared is None):
            add = total.flatten(0, -2).contiguous()
            return Stream(self.experts(flat, experts, weights, add).view_as(total))
        own = None
        if self.gated and not one:
            experts, weights, own = experts[:, :-1].contiguous(), weights[:, :-1].contiguous(), weights[:, -1:]
        out = self.back(self.experts(self.into(flat), experts, weights)).view_as(x)
        out = out if one or self.shared is None else out + self.shared(x, own)
        return Stream(total, out) if self.peer is None else Stream(self.peer.all_reduce(out, total))

    def _both(self, around: _Around, stream: Stream) -> Stream:
        assert self.shared is not None
        (flat, routed, _), total, *chosen = self.choose(stream, scales=around.scales)
        routed, dense = self.experts(routed, *chosen).view_as(total), self.shared(flat.view_as(total))
        if self.peer is not None:  # each has a norm of its own, so they are summed apart: in one exchange
            routed, dense = self.peer.all_reduce(torch.stack((routed, dense))).unbind()
        return Stream(total, routed, around.out, beside=dense)

    def choose(
        self, stream: Stream, shared: bool = False, scales: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """What each norm gives [T, D]; the stream added up; which experts each of its T tokens uses, int32 [T, k], and
        their weights, float32 [T, k], those by softmax times `scales` float32 [E]. With `shared` they are [T, k + 1],
        of which the shared expert is the last."""
        if stream.beside is not None or stream.scale is not None:
            stream = Stream(stream.total())
        value, delta = stream.value.flatten(0, -2), stream.delta
        x, residual = (value, None) if delta is None else (delta.flatten(0, -2), value)
        post = None if stream.norm is None else stream.norm.weight
        groups, top_groups, scale = self.groups or (0, 1, 1.0)
        total, normed, experts, weights = normed_route(
            x, self.norm, self.eps, self.gate, self.bias, scales, self.top_k, self.normalise, groups, top_groups, scale,
            shared, self.gated, residual, post,
        )  # fmt: skip
        return normed.unbind(), stream.value if delta is None else total.view_as(delta), experts, weights
