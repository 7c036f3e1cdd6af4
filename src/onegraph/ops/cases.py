"""What example cases are drawn from: the CPU generator's numbers, moved, so that every device sees the same."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """The three arguments of `Case.make`."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def sinks(self, heads: int) -> Tensor:
        """A logit of each head that no key has, from far below the others to far above, float32."""
        return (4 * torch.randn(heads, generator=self.generator)).to(self.device)

    def pages(self, rows: int, per_row: int) -> Tensor:
        """A block table [rows, per_row] of pages in any order, but for page 0, which is nobody's."""
        order = torch.randperm(rows * per_row, generator=self.generator, dtype=torch.int32)
        return (1 + order.view(rows, per_row)).to(self.device)

    def turns(self, positions: int, dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of RoPE, float32 [positions, dim / 2]."""
        angle = torch.arange(positions).unsqueeze(1) * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        return angle.cos().to(self.device), angle.sin().to(self.device)

    def tokens(
        self, heads: int, kv_heads: int, dim: int, tokens: int, positions: list[int], counts: list[int],
        page_size: int, norm: bool, rope: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The fields of `calls.Tokens`, with pages for all that the rows hold."""
        reach = max(positions) + tokens
        table = self.pages(len(positions), -(-reach // page_size))
        qkv = self.randn(len(positions), tokens, (heads + 2 * kv_heads) * dim)
        norms = [1 + 0.2 * self.randn(dim) if norm else None for _ in range(2)]
        turns = self.turns(reach, dim) if rope else (None, None)
        return qkv, *norms, 1e-6, *turns, self.ints(positions), self.ints(counts), table
