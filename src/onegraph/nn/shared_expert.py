"""The expert that every token uses, beside the routed ones or as the last of them."""

import torch
from torch import Tensor, nn

from onegraph.nn.expert_cache import CachedExperts
from onegraph.nn.experts import Experts
from onegraph.nn.linear import Linear
from onegraph.ops.activation import Gate
from onegraph.ops.weight import weight_ops

FEW = 16  # tokens: so many share one launch of routed and shared experts, sooner than by launches of its own


class SharedExpert(nn.Module):
    """The expert that every token uses: linears around its gate. Few tokens run it as experts of which there is one,
    where its format has experts: the gate is then in the first product's launch.

    factor: what its results are multiplied by where a token has no weight of its own.
    """

    first: Tensor
    factors: Tensor

    def __init__(self, gate_up: nn.Module, down: nn.Module, gate: Gate, factor: float = 1.0) -> None:
        super().__init__()
        self.gate_up, self.down, self.gate, self.factor = gate_up, down, gate, factor
        device = next((b.device for b in down.buffers()), None)  # on a CPU it may have none
        self.register_buffer("first", torch.zeros(FEW, 1, dtype=torch.int32, device=device), persistent=False)
        self.register_buffer("factors", torch.full((FEW, 1), factor, device=device), persistent=False)

    @classmethod
    def last_of(cls, experts: Experts) -> "SharedExpert":
        """The last expert of a stack in codes, in the same storage."""
        gate_up, down = (Linear(weight.format, weight.at(-1)) for weight in (experts.gate_up, experts.down))
        return cls(gate_up, down, experts.gate)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """x [..., D] -> [..., D]; weights: float32 [T, 1], what each of the T tokens' results is multiplied by."""
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
                weights = self.factors[:tokens] if weights is None else weights.contiguous()
                return run(format, flat, self.first[:tokens], weights, *both, self.gate, None).view_as(x)
        result: Tensor = down(self.gate(gate_up(x)))
        if weights is None:
            return result if self.factor == 1 else result * self.factor
        return result * weights.to(x.dtype).view(*x.shape[:-1], 1)


class RoutedAndShared(nn.Module):
    """What has routed experts and maybe a shared one.

    Args:
        experts: of `count`, or of one more where the last is the shared one, with which few tokens run it.
        shared: that expert as a module of its own, which many tokens run; None where there is none.
    """

    def __init__(self, experts: Experts | CachedExperts, shared: SharedExpert | None, count: int) -> None:
        super().__init__()
        self.experts, self.shared = experts, shared
        self._one = None if experts.count == count else self._parts

    @property
    def _parts(self) -> tuple[nn.Module, ...]:
        return () if self.shared is None else (self.experts, self.shared, self.shared.gate_up, self.shared.down)

    @property
    def together(self) -> bool:
        """Whether `experts` holds the shared expert; not where either of the two was exchanged since."""
        return self._one is not None and self._one == self._parts
