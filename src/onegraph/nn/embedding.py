"""Token embeddings, dense or in E8P codes."""

import torch
from torch import Tensor, nn

from onegraph.nn.linear import shared_codebook
from onegraph.ops.e8p import e8p_embedding
from onegraph.ops.embedding import embedding


class Embedding(nn.Module):
    """ids [...] int32 or int64 -> rows [..., D] of weight [V, D]: a fresh tensor that the caller may write to."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class E8PEmbedding(nn.Module):
    """The same from E8P codes int16 [V, D/8] whose output side is not rotated; rows come out in `dtype`."""

    codes: Tensor
    residual: Tensor | None
    in_scale: Tensor
    out_scale: Tensor
    codebook: Tensor

    def __init__(
        self,
        *,
        codes: Tensor,
        residual: Tensor | None,
        in_scale: Tensor,
        out_scale: Tensor,
        bits: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.bits, self.dtype = bits, dtype
        self.register_buffer("codes", codes)
        self.register_buffer("residual", residual)
        self.register_buffer("in_scale", in_scale.float())
        self.register_buffer("out_scale", out_scale.float())
        self.register_buffer("codebook", shared_codebook(codes.device), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = e8p_embedding(ids, self.codes, self.residual, self.codebook, self.in_scale, self.out_scale, self.bits)
        return rows.to(self.dtype)
