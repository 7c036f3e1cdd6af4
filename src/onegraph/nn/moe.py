"""The feed-forward half of a block whose tokens choose among experts: Qwen3-MoE, Mixtral, gpt-oss."""

import torch
from torch import Tensor, nn

from onegraph.nn.block import Stream
from onegraph.nn.experts import Experts
from onegraph.ops.linear import linear
from onegraph.ops.route import softmax_route


class MoE(nn.Module):
    """A norm, the router, the experts that it chooses, the sum; stands where `MLP` does.

    Args:
        norm: weight [D] of the RMSNorm in front; eps: its own.
        gate: the router [E, D], in its file's dtype or a wider one: what it chooses is not chosen by rounding. bias:
            float32 [E] or None.
        top_k: experts that a token uses. normalise: their weights sum to 1, rather than to what softmax over all
            experts gives them.

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
        experts: Experts,
        top_k: int,
        normalise: bool,
    ) -> None:
        super().__init__()
        if gate.dim() != 2 or gate.shape[0] != experts.count or not 1 <= top_k <= experts.count:
            raise ValueError(
                f"the router is {tuple(gate.shape)} and chooses {top_k} of {experts.count} experts; it must be [E, D] "
                "with a row for each, and choose at least one and no more than there are"
            )
        self.eps, self.experts, self.top_k, self.normalise = eps, experts, top_k, normalise
        self.register_buffer("norm", norm)
        self.register_buffer("gate", gate)
        self.register_buffer("bias", None if bias is None else bias.to(torch.float32))

    def forward(self, stream: Stream) -> Stream:
        x, total = stream.normed(self.norm, self.eps)
        flat = x.flatten(0, -2)
        logits = linear(flat.to(self.gate.dtype), self.gate, True)
        experts, weights = softmax_route(logits, self.bias, self.top_k, self.normalise)
        return Stream(total, self.experts(flat, experts, weights).view_as(x))
