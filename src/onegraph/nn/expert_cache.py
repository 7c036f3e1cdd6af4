"""Routed experts of a layer in host memory, some of which lie on the device: a cache that each step keeps by itself."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from onegraph.nn.experts import Experts
from onegraph.nn.linear import Weight
from onegraph.ops.calls import MAX_EXPERTS
from onegraph.ops.expert_cache import expert_cache


class CachedExperts(nn.Module):
    """As `Experts`, of which `slots` lie on the device at a time; the others stay in host memory.

    A step copies the chosen experts that are missing (`ops.expert_cache`), on the device and inside the graph: nothing
    comes to the host and no address changes. Results are those of `Experts`, bit by bit.

    Args:
        host: all experts of the layer; for a GPU their tensors are pinned.
        slots: experts on the device, 1 to as many as there are. The first ones are there at first.
        shared: as many as `host` has, on the device, with the same shapes: `sized(host, ..)`. Calls that choose more
            than `slots` experts run from there. Layers that run one after the other share it.

    Raises ValueError where sizes disagree.
    """

    resident: Tensor
    score: Tensor
    arrived: Tensor

    def __init__(self, host: Experts, slots: int, shared: Experts) -> None:
        super().__init__()
        if not 1 <= slots <= host.count or host.count > MAX_EXPERTS or shared.count != host.count:
            raise ValueError(
                f"{slots} slots and {shared.count} shared places for {host.count} experts; a cache takes at most "
                f"{MAX_EXPERTS} experts, 1 slot to one each, and a shared place for each"
            )
        device = next(iter(shared.gate_up.tensors.values())).device
        self.count, self.take_sum = host.count, host.take_sum
        self.cached, self.shared = sized(host, slots, device), shared
        self._host, self._slots, self._shared = (_fields(each) for each in (host, self.cached, shared))
        for slot, source in zip(self._slots, self._host, strict=True):
            slot.copy_(source[:slots])
        state = {"resident": torch.arange(slots), "score": torch.zeros(host.count), "arrived": torch.zeros(1)}
        for name, value in state.items():
            self.register_buffer(name, value.to(device, torch.int32), persistent=False)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        state = self.resident, self.score, self.arrived
        places: Tensor = expert_cache(experts, self._host, self._slots, self._shared, *state)
        run = self.shared if experts.numel() > len(self.resident) else self.cached
        result: Tensor = run(x, places, weights, add)
        return result


def sized(like: Experts, count: int, device: torch.device) -> Experts:
    """`count` experts of the same shapes and format, all zeros, on `device`."""

    def empty(tensor: Tensor) -> Tensor:  # zeros: references multiply what no token chose by a weight of zero
        return torch.zeros((count, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    def weight(given: Weight) -> Weight:
        tensors: Mapping[str, Tensor] = given.tensors
        return Weight(given.format, {key: empty(tensor) for key, tensor in tensors.items()})

    biases = None if like.biases is None else (empty(like.biases[0]), empty(like.biases[1]))
    return Experts(weight(like.gate_up), weight(like.down), like.gate, biases)


def _fields(experts: Experts) -> list[Tensor]:
    """Every tensor [E, ...] of them."""
    return [*experts.gate_up.tensors.values(), *experts.down.tensors.values(), *(experts.biases or ())]
