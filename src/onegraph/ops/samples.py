"""Random weights of a format, and the cases of its ops (`ops/coded.py`) that are made of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.weight import Shape
from onegraph.ops.activation import Gate, ReLU2, parts_of
from onegraph.ops.registry import Case

Weights = Callable[[Shape, torch.device | str, torch.Generator], tuple[Tensor | None, ...]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Random weights of one kind, for cases.

    Args:
        make: (shape [..., n, k], device, generator) -> the tensors of a weight.
        numbers: of the format.
    """

    make: Weights
    name: str = ""
    numbers: tuple[int, ...] = ()

    def _case(self, name: str, make: Callable[[torch.device, torch.dtype, torch.Generator], tuple[Any, ...]]) -> Case:
        return Case(name=f"{self.name} {name}".strip(), make=make)

    def weight(self, *shape: int) -> Case:
        return self._case("x".join(map(str, shape)), lambda device, _, g: (*self.make(shape, device, g), *self.numbers))

    def linear(self, batch: Shape, n: int, k: int, *, bias: bool = False, float32: bool = False) -> Case:
        def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
            x = torch.randn(*batch, k, generator=g).to(device, dtype)
            b = torch.randn(n, generator=g).to(device, dtype) if bias else None
            return x, *self.make((n, k), device, g), b, *self.numbers, float32

        name = f"{'x'.join(map(str, batch))}x{k}->{n}{'+bias' if bias else ''}{'+float32' if float32 else ''}"
        return self._case(name, make)

    def grouped(self, batch: Shape, groups: int, n: int, k: int) -> Case:
        def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
            x = torch.randn(*batch, groups, k, generator=g).to(device, dtype)
            return x, *self.make((groups, n, k), device, g), *self.numbers

        return self._case(f"{'x'.join(map(str, batch))}x{groups}x{k}->{n}", make)

    def experts(
        self, tokens: int, top_k: int, experts: int, dim: int, wide: int, gate: Gate, *, biases: bool | None = None
    ) -> Case:
        """biases: None of a format whose experts take none."""

        def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[Any, ...]:
            x = (3 * torch.randn(tokens, dim, generator=g)).to(device, dtype)
            chosen = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].int().contiguous().to(device)
            gains = torch.rand(tokens, top_k, generator=g).to(device)
            layers: list[Tensor | None] = []
            for n, k in ((parts_of(gate.alpha) * wide, dim), (dim, wide)):
                layers += self.make((experts, n, k), device, g)
                if biases is not None:
                    layers.append(torch.randn(experts, n, generator=g).to(device) if biases else None)
            return x, chosen, gains, *layers, *self.numbers, *gate.numbers

        name = f"{tokens} tokens, {top_k} of {experts}, {dim}x{wide}" + (" with biases" if biases else "")
        name += " relu2" if isinstance(gate, ReLU2) else ""
        return self._case(name, make)
