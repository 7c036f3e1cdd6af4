"""Token embeddings in any format that has a look-up."""

from collections.abc import Mapping

import torch
from torch import Tensor

from onegraph.formats.weight import WeightFormat
from onegraph.nn.linear import Weight
from onegraph.ops.weight import weight_ops


class Embedding(Weight):
    """ids [...] int32 or int64 -> rows [..., D] of a weight [V, D] in `dtype`: a fresh tensor that the caller may write
    to. Raises ValueError for a format without a look-up.

    scale: of the rows, which are rounded to `dtype` before and after.
    """

    def __init__(
        self, format: WeightFormat, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, scale: float = 1.0
    ) -> None:
        super().__init__(format, tensors)
        self.dtype, self.factor, self._look_up = dtype, scale, weight_ops(format).embedding
        if self._look_up is None:
            raise ValueError(f"an embedding cannot be stored as {format}; keep it dense")

    def forward(self, ids: Tensor) -> Tensor:
        assert self._look_up is not None
        rows = self._look_up(self.format, ids, self.kernel_args).to(self.dtype)
        return rows if self.factor == 1 else rows * self.factor  # `scale` may be a tensor of the format
