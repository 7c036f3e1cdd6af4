"""The feed-forward half of a DeepSeek-V4 block: routed experts and one shared expert."""

import torch
from torch import Tensor

from onegraph.nn.experts import Experts
from onegraph.nn.shared_expert import FEW, RoutedAndShared, SharedExpert
from onegraph.ops.deepseek_moe import deepseek_route
from onegraph.ops.linear import linear


class DeepseekMoE(RoutedAndShared):
    """x [B, Q, D], tokens int64 [B, Q] -> [B, Q, D]; of a rank, which has some hidden units, its part of the sum.

    Args:
        experts: the routed ones; where they are one more than gate has rows, the last is the shared one, and few
            tokens run all of them together.
        gate: [E, D]. bias: float32 [E], added to scores for the choice only; table: int32 [V, k], the experts of each
            token in a hash layer. At most one of the two.
        top_k, scale: experts a token uses, and the sum of their weights.
    """

    gate: Tensor
    bias: Tensor | None
    table: Tensor | None

    def __init__(
        self,
        *,
        gate: Tensor,
        bias: Tensor | None,
        table: Tensor | None,
        experts: Experts,
        shared: SharedExpert,
        top_k: int,
        scale: float,
    ) -> None:
        super().__init__(experts, shared, gate.shape[0])
        if bias is not None and table is not None:
            raise ValueError("bias and table are both given; a layer routes by scores or by the token, not by both")
        if table is not None and table.numel():
            low, high = torch.aminmax(table)
            if int(low) < 0 or int(high) >= gate.shape[0]:
                raise ValueError(
                    f"table names experts {int(low)} to {int(high)}; the layer has 0 to {gate.shape[0] - 1}"
                )
        self.top_k, self.scale = top_k, scale
        self.register_buffer("gate", gate)
        self.register_buffer("bias", None if bias is None else bias.float())
        self.register_buffer("table", None if table is None else table.to(torch.int32).contiguous())

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        logits = linear(flat, self.gate, True)
        together = self.together and flat.shape[0] <= FEW
        experts, weights = deepseek_route(
            logits, self.bias, self.table, tokens.flatten(), self.top_k, self.scale, together
        )
        out = self.experts(flat, experts, weights).view_as(x)
        assert self.shared is not None
        result: Tensor = out if together else out + self.shared(x)
        return result
