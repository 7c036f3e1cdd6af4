"""Routed experts in any format that has them."""

from torch import Tensor, nn

from onegraph.nn.linear import Weight
from onegraph.ops.weight import weight_ops


class Experts(nn.Module):
    """Routed SwiGLU experts: x [T, D], experts int32 [T, K], weights float32 [T, K] -> [T, D].

    gate_up: weights of all experts [E, 2F, D], gate rows, then up rows; down: [E, D, F], of the same format. Which
    experts run is read on the device: no counts come to the host. limit: bound of gate and up in front of SwiGLU.
    """

    def __init__(self, gate_up: Weight, down: Weight, limit: float) -> None:
        super().__init__()
        run = weight_ops(gate_up.format).experts
        if run is None or down.format is not gate_up.format:
            raise ValueError(f"experts of {gate_up.format} and {down.format} cannot be run; give both in one that can")
        sizes = gate_up.count, gate_up.in_features, gate_up.out_features // 2
        if gate_up.out_features % 2 or (down.count, down.out_features, down.in_features) != sizes:
            raise ValueError(
                f"down is {down.count} x {down.out_features} x {down.in_features}; gate_up {gate_up.count} x "
                f"{gate_up.out_features} x {gate_up.in_features} asks for {' x '.join(map(str, sizes))}"
            )
        self.gate_up, self.down, self.limit, self._run = gate_up, down, limit, run

    @property
    def count(self) -> int:
        return self.gate_up.count

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return self._run(self.gate_up.format, x, experts, weights, self.gate_up.given, self.down.given, self.limit)
