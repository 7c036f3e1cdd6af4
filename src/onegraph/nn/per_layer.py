"""Per-layer embeddings (Gemma 3n, Gemma 4): each block ends with an embedding of the token that is its own.

`PerLayer` makes those of all blocks at once, from the token and from the embedded token; `PerLayerEnd` is what a block
does with its own.
"""

import torch
from torch import Tensor, nn

from onegraph.nn.block import Norm, Stream
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import Linear
from onegraph.ops.activation import geglu
from onegraph.ops.norm import rms_norm


class PerLayer(nn.Module):
    """tokens int [B, Q] and embedded tokens [B, Q, D] -> [B, Q, layers, size]: (table[token] + RMSNorm(projection(x)
    D^-1/2)) / sqrt(2).

    table: of rows of layers * size numbers, multiplied by the root of size. projection: D -> layers * size.
    norm: weight [size] of the RMSNorm.
    """

    norm: Tensor
    factor: Tensor

    def __init__(self, table: Embedding, projection: Linear, norm: Tensor, eps: float) -> None:
        super().__init__()
        # RMSNorm of c x with eps is that of x with eps / c^2, and here c is D^-1/2
        self.table, self.projection, self.eps = table, projection, eps * projection.in_features
        self.register_buffer("norm", norm)
        factor = torch.full((1,), 2**-0.5, dtype=torch.float32, device=norm.device)
        self.register_buffer("factor", factor, persistent=False)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        size = len(self.norm)
        context = self.projection(embedded).unflatten(-1, (-1, size))
        result: Tensor = rms_norm(context, self.norm, self.eps, self.table(tokens).view_as(context), self.factor)
        return result


class PerLayerEnd(nn.Module):
    """stream, own [B, Q, size] -> stream + norm(projection(gelu(gate(stream)) * own)), gelu by tanh."""

    def __init__(self, gate: Linear, projection: Linear, norm: Norm) -> None:
        super().__init__()
        self.gate, self.projection, self.norm = gate, projection, norm

    def forward(self, stream: Stream, own: Tensor) -> Stream:
        total = stream.total()
        return Stream(total, self.projection(geglu(self.gate(total), own)), self.norm)
