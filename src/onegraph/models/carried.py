"""The residual stream of a model whose layers share, as one tensor that a block takes and gives (Gemma 4 E2B, E4B).

Behind the hidden states of a token lie the embeddings that are the next blocks' own, block by block, and then the keys
and values of layers before that later layers read. So a block depends on its input alone, gradients run through what is
shared, and code that takes a stream from block to block need not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onegraph.models.config import LlamaConfig
from onegraph.nn.attention import CausalAttention
from onegraph.nn.block import Stream
from onegraph.nn.per_layer import PerLayer


class CarriedStream:
    """Of a model: what `LlamaSource` runs blocks on.

    Attributes:
        needed: whether layers share anything; else the stream is the hidden states.
        carried: numbers of a token besides these, at most.
    """

    def __init__(self, config: LlamaConfig) -> None:
        self.hidden_size, self.own, self.layers = config.hidden_size, config.per_layer[0], config.layers
        self.index = [config.attention_index(i) for i in range(config.layers)]
        self.read = sorted({heads.source for heads in config.attention if heads.source is not None})
        self.sizes = [config.attention[i][:2] for i in self.read]  # heads of keys, and the size of a head
        self.needed = bool(self.own or self.read)
        self.carried = config.layers * self.own + sum(2 * heads * dim for heads, dim in self.sizes)

    def enter(self, tokens: Tensor, embedded: Tensor, per_layer: PerLayer | None) -> Tensor:
        """tokens int [B, T], embedded [B, T, D] -> the stream in front of the first block."""
        return embedded if per_layer is None else torch.cat((embedded, per_layer(tokens, embedded).flatten(2)), dim=-1)

    def hidden(self, stream: Tensor) -> Tensor:
        """[..., D] of a stream."""
        return stream[..., : self.hidden_size].contiguous()

    def run(self, block: Any, stream: Tensor) -> Tensor:
        """The stream in front of a block -> behind it; the argument is left as it was."""
        i, attend = block.layer, CausalAttention()
        before = [(self.index[at], size) for at, size in zip(self.read, self.sizes, strict=True) if at < i]
        widths = [2 * heads * dim for _, (heads, dim) in before]
        ahead = (self.layers - 1 - i) * self.own
        _, own, rest, *shared = stream.split((self.hidden_size, self.own, ahead, *widths), dim=-1)
        for (index, size), both in zip(before, shared, strict=True):
            keys, values = both.unflatten(-1, (2, *size)).unbind(2)
            attend.lent[index] = keys.contiguous(), values.contiguous()
        out = block(Stream(self.hidden(stream)), attend, own.contiguous() if self.own else None).total()
        if i in self.read:
            shared.append(torch.stack(attend.lent[self.index[i]], dim=2).flatten(2))
        return torch.cat((out, rest, *shared), dim=-1)
