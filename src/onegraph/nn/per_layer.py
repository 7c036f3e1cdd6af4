"""Per-layer embeddings (Gemma 3n, Gemma 4): each block ends with an embedding of the token that is its own.

`PerLayer` makes those of all blocks at once, from the token and from the embedded token; `PerLayerEnd` is what a block
does with its own.
"""

import torch
from torch import Tensor, nn

from onegraph.nn.block import Norm, Stream
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import Linear
from onegraph.ops.norm import rms_norm


class PerLayer(nn.Module):
    """tokens int [B, Q] and embedded tokens [B, Q, D] -> [B, Q, layers, size]: (table[token] + RMSNorm(projection(x)
    D^-1/2)) / sqrt(2).

    table: of rows of layers * size numbers, multiplied by the root of size. projection: D -> layers * size.
    norm: weight [size] of the RMSNorm.
    """

    norm: Tensor

    def __init__(self, table: Embedding, projection: Linear, norm: Tensor, eps: float) -> None:
        super().__init__()
        self.table, self.projection, self.eps = table, projection, eps
        self.register_buffer("norm", norm)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        size = len(self.norm)
        context = self.projection(embedded) * embedded.shape[-1] ** -0.5
        normed = rms_norm(context.unflatten(-1, (-1, size)), self.norm, self.eps)
        result: Tensor = (normed + self.table(tokens).view_as(normed)) * 2**-0.5
        return result


class PerLayerEnd(nn.Module):
    """stream, own [B, Q, size] -> stream + norm(projection(gelu(gate(stream)) * own)), gelu by tanh."""

    def __init__(self, gate: Linear, projection: Linear, norm: Norm) -> None:
        super().__init__()
        self.gate, self.projection, self.norm = gate, projection, norm

    def forward(self, stream: Stream, own: Tensor) -> Stream:
        total = stream.total()
        hidden = torch.nn.functional.gelu(self.gate(total), approximate="tanh") * own
        return Stream(total, self.norm(self.projection(hidden)))
