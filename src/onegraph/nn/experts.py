"""Routed experts in any format that has them."""

from torch import Tensor, nn

from onegraph.nn.linear import Weight
from onegraph.ops.activation import Gate, parts_of
from onegraph.ops.weight import weight_ops


class Experts(nn.Module):
    """Routed experts: x [T, D], experts int32 [T, K], weights float32 [T, K] -> [T, D]; plus add [T, D] where they
    `take_sum`.

    gate_up: weights of all experts [E, 2F, D], gate rows, then up rows, or [E, F, D] of up rows where the gate is
    `ReLU2`; down: [E, D, F], of the same format. Which
    experts run is read on the device: no counts come to the host. gate: what stands between the two. biases: floats
    [E, 2F] and [E, D], added to the two products; kept as float32. Raises ValueError where sizes disagree, or the
    format has no experts.
    """

    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(self, gate_up: Weight, down: Weight, gate: Gate, biases: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        run = weight_ops(gate_up.format).experts
        if run is None or down.format is not gate_up.format:
            raise ValueError(f"experts of {gate_up.format} and {down.format} cannot be run; give both in one that can")
        parts = parts_of(gate.alpha)
        sizes = gate_up.count, gate_up.in_features, gate_up.out_features // parts
        if gate_up.out_features % parts or (down.count, down.out_features, down.in_features) != sizes:
            raise ValueError(
                f"down is {down.count} x {down.out_features} x {down.in_features}; gate_up {gate_up.count} x "
                f"{gate_up.out_features} x {gate_up.in_features} needs {' x '.join(map(str, sizes))}"
            )
        for name, weight, bias in zip(("gate_up", "down"), (gate_up, down), biases or (None, None), strict=True):
            wanted = gate_up.count, weight.out_features
            if bias is not None and tuple(bias.shape) != wanted:
                raise ValueError(f"the bias of {name} is {tuple(bias.shape)}; its weight needs {wanted}")
            self.register_buffer(f"{name}_bias", None if bias is None else bias.float().contiguous())
        self.gate_up, self.down, self.gate, self._run = gate_up, down, gate, run
        self.take_sum = weight_ops(gate_up.format).experts_add

    @property
    def count(self) -> int:
        return self.gate_up.count

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        if self.gate_up_bias is None or self.down_bias is None:
            return None
        return self.gate_up_bias, self.down_bias

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        both, more = (self.gate_up.kernel_args, self.down.kernel_args), () if add is None else (add,)
        return self._run(self.gate_up.format, x, experts, weights, *both, self.gate, self.biases, *more)
