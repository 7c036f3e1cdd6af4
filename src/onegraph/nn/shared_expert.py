"""The expert that every token uses, beside the routed ones."""

import torch
from torch import Tensor, nn

from onegraph.nn.linear import Linear
from onegraph.ops.activation import Gate
from onegraph.ops.weight import weight_ops

FEW = 16  # tokens: so many share one launch of routed and shared experts, sooner than by launches of its own


class SharedExpert(nn.Module):
    """The expert that every token uses: linears around its gate. Few tokens run it as experts of which there is one,
    where its format has experts: the gate is then in the first product's launch."""

    first: Tensor
    ones: Tensor

    def __init__(self, gate_up: nn.Module, down: nn.Module, gate: Gate) -> None:
        super().__init__()
        self.gate_up, self.down, self.gate = gate_up, down, gate
        device = next((b.device for b in down.buffers()), None)  # on a CPU it may have none
        self.register_buffer("first", torch.zeros(FEW, 1, dtype=torch.int32, device=device), persistent=False)
        self.register_buffer("ones", torch.ones(FEW, 1, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flat, gate_up, down = x.flatten(0, -2), self.gate_up, self.down
        tokens = flat.shape[0]
        if tokens <= FEW and isinstance(gate_up, Linear) and isinstance(down, Linear):
            format, plain = gate_up.format, gate_up.bias is None and down.bias is None
            run = weight_ops(format).experts if format.coded and format is down.format and plain else None
            if run is not None:
                # constants of the format are of all experts: only the fields get a dimension in front
                both = (
                    {**layer.kernel_args, **{key: t.unsqueeze(0) for key, t in layer.tensors.items()}}
                    for layer in (gate_up, down)
                )
                return run(format, flat, self.first[:tokens], self.ones[:tokens], *both, self.gate, None).view_as(x)
        result: Tensor = down(self.gate(gate_up(x)))
        return result
