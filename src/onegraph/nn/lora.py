"""LoRA: linears with low-rank additions, of which each sequence of a batch has its own or none (Hu et al. 2021,
arXiv:2106.09685; several at once as in Punica, arXiv:2310.18547).

A slot of the device holds one adapter; slot 0 holds zeros, for sequences without one. Which slot a sequence has is a
number on the device, so that one captured step serves every mixture.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from onegraph.formats.dense import DENSE
from onegraph.nn.linear import ConcatLinear, Linear

LowRank = tuple[Tensor, Tensor]  # of a layer: A [r, k], and B [n, r] times the adapter's scale


class Adapters:
    """Those that a model is loaded with.

    Args:
        layers: of each adapter by its name, what it adds to which layer.

    Attributes:
        names: slot by name, from 1 on. slots: int64 [B], of the rows of the step that runs; None outside of steps,
            where linears run without adapters.
    """

    def __init__(self, layers: Mapping[str, Mapping[str, LowRank]]) -> None:
        self._layers = list(layers.values())
        self.names = {name: i + 1 for i, name in enumerate(layers)}
        self.slots: Tensor | None = None
        self._used: set[str] = set()

    def changes(self, layer: str) -> bool:
        """Whether any adapter adds to the layer."""
        return any(layer in adapter for adapter in self._layers)

    def wrap(
        self, linear: Linear | ConcatLinear, layers: Sequence[tuple[str, int]], device: torch.device, dtype: torch.dtype
    ) -> "LoraLinear | None":
        """The linear with what adapters add to `layers`, which are its outputs in order: name and number of outputs of
        each. None where they add nothing. Raises ValueError for an adapter of another size."""
        self._used.update(name for name, _ in layers)
        found = [name for name, _ in layers if self.changes(name)]
        if not found:
            return None
        n, k = sum(size for _, size in layers), _inputs(linear)
        rank = {name: max(len(a[name][0]) for a in self._layers if name in a) for name in found}
        down = torch.zeros(len(self._layers) + 1, sum(rank.values()), k)
        up = torch.zeros(len(self._layers) + 1, n, sum(rank.values()))
        for slot, adapter in enumerate(self._layers, 1):
            row = column = 0
            for name, size in layers:
                if name in adapter:
                    a, b = adapter[name]
                    if a.shape[1] != k or len(b) != size:
                        raise ValueError(
                            f"adapter {self._name(slot)!r}: {name} is {len(b)} x {a.shape[1]}; the model's is {size} x "
                            f"{k}: it belongs to another model"
                        )
                    down[slot, column : column + len(a)] = a
                    up[slot, row : row + size, column : column + len(a)] = b
                row, column = row + size, column + rank.get(name, 0)
        return LoraLinear(linear, down.to(device, dtype), up.to(device, dtype), self)

    def check(self) -> None:
        """After all layers are made: raises ValueError for a layer that no linear was wrapped for."""
        for slot, adapter in enumerate(self._layers, 1):
            if left := sorted(adapter.keys() - self._used):
                raise ValueError(
                    f"adapter {self._name(slot)!r} changes {left[0]}; allowed are linears of attention and of dense "
                    "MLPs: train it without that layer"
                )

    def _name(self, slot: int) -> str:
        return next(name for name, found in self.names.items() if found == slot)


@contextmanager
def adapted(adapters: Adapters | None, slots: Tensor | None) -> Iterator[None]:
    """What runs inside is of rows with these slots, int64 [B] on the device. A captured step reads them from there."""
    if adapters is not None:
        adapters.slots = slots
    try:
        yield
    finally:
        if adapters is not None:
            adapters.slots = None


class LoraLinear(ConcatLinear):
    """x [B, Q, k] -> base(x) + B A x of each row's slot [B, Q, n].

    Nothing is fused into it: norms, SwiGLU and sums around it are ops of their own.
    """

    format = DENSE
    down: Tensor
    up: Tensor

    def __init__(self, base: Linear | ConcatLinear, down: Tensor, up: Tensor, adapters: Adapters) -> None:
        """down: [slots, r, k]. up: [slots, n, r], of joined layers with zeros beside their own r."""
        super().__init__([base])  # type: ignore[list-item]  # one part, of whatever kind
        self.register_buffer("down", down)
        self.register_buffer("up", up)
        self._adapters = adapters

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts[0](x)
        if (slots := self._adapters.slots) is None:
            return out
        inner = torch.bmm(x.to(self.down.dtype), self.down.index_select(0, slots).transpose(1, 2))
        added = torch.bmm(inner, self.up.index_select(0, slots).transpose(1, 2))
        return out + added.to(out.dtype)


def _inputs(linear: Linear | ConcatLinear) -> int:
    first = linear if isinstance(linear, Linear) else linear.parts[0]
    assert isinstance(first, Linear)
    return first.in_features
