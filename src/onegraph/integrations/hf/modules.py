"""E8P layers in the place of transformers' own: buffers are the checkpoint's tensors, saving gives the file back.

What a call reads (float32 scales with the global scale multiplied in, or a decoded weight on a CPU) is derived from
them once after loading, in buffers that are not saved.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from onegraph.nn.linear import E8PLinear, shared_codebook
from onegraph.ops.e8p import e8p_embedding, e8p_linear

Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # suffix -> (shape, dtype)


class _Coded(nn.Module):
    """One layer's checkpoint tensors under their own names (`formats.e8p.linear_tensors`), empty until loaded.

    Args:
        stored: the tensors as the file holds them, dtypes included: float32 scales stay float32 when saved again.
        bits: 2, 3 or 4; dtype: of the activations.
    """

    codes: Tensor
    residual: Tensor | None
    in_scale: Tensor
    out_scale: Tensor
    scale: Tensor
    bias: Tensor | None
    wide_in: Tensor | None
    wide_out: Tensor | None
    codebook: Tensor | None
    dense: Tensor | None

    def __init__(self, stored: Stored, bits: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.bits, self.dtype = bits, dtype
        for suffix in ("codes", "residual", "in_scale", "out_scale", "scale", "bias"):
            shape, kind = stored.get(suffix, (None, None))
            self.register_buffer(suffix, None if shape is None else torch.empty(shape, dtype=kind))
        for name in ("wide_in", "wide_out", "codebook", "dense"):
            self.register_buffer(name, None, persistent=False)

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 8

    def prepare(self) -> None:
        """Derives what calls read, where the codes lie. Call it once after loading; moving the module repeats it."""
        self.wide_in = self.in_scale.float()
        self.wide_out = self.out_scale.float() * self.scale.float()
        self.codebook = shared_codebook(self.codes.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to()`, `.cuda()` and the like move the stored tensors, leave their dtypes; activations take the dtype."""
        ready = self.wide_in is not None
        self.wide_in = self.wide_out = self.codebook = self.dense = None
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(fn(torch.empty(0, dtype=torch.uint8, device=tensor.device)).device)

        super()._apply(moved, recurse)
        if ready and not self.codes.is_meta:
            self.prepare()
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class E8PModuleLinear(_Coded):
    """x [..., k] -> [..., n] in x's dtype; on a CPU, where reading codes takes long, from the decoded weight."""

    def prepare(self) -> None:
        super().prepare()
        if self.codes.device.type == "cpu":
            self.dense = self.layer().dense(self.dtype).weight

    def layer(self) -> E8PLinear:
        """The same linear as onegraph's own module."""
        assert self.wide_in is not None
        assert self.wide_out is not None
        return E8PLinear(
            codes=self.codes,
            residual=self.residual,
            in_scale=self.wide_in,
            out_scale=self.wide_out,
            bias=self.bias,
            bits=self.bits,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.dense is not None:
            bias = None if self.bias is None else self.bias.to(self.dense.dtype)
            return nn.functional.linear(x, self.dense, bias)
        return e8p_linear(
            x, self.codes, self.residual, self.codebook, self.wide_in, self.wide_out, self.bias, self.bits
        )

    def plain(self, dtype: torch.dtype) -> nn.Linear:
        """transformers' own layer with the decoded weight."""
        made = self.layer().dense(dtype)
        linear = nn.Linear(self.in_features, self.out_features, bias=made.bias is not None, device="meta", dtype=dtype)
        linear.weight = nn.Parameter(made.weight, requires_grad=False)
        if made.bias is not None:
            linear.bias = nn.Parameter(made.bias, requires_grad=False)
        return linear


class E8PModuleEmbedding(_Coded):
    """ids int [...] -> rows [..., D] in the model's dtype; the output side of the codes is not rotated."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = e8p_embedding(ids, self.codes, self.residual, self.codebook, self.wide_in, self.wide_out, self.bits)
        return rows.to(self.dtype)

    def plain(self, dtype: torch.dtype) -> nn.Embedding:
        ids = torch.arange(self.out_features, device=self.codes.device)
        rows = e8p_embedding(ids, self.codes, self.residual, self.codebook, self.wide_in, self.wide_out, self.bits)
        return nn.Embedding.from_pretrained(rows.to(dtype))


def stored_as(names: Mapping[str, Any], layer: str, wanted: Stored) -> Stored:
    """`wanted` with the float dtypes that the file has: `names` maps tensor name to something with a dtype."""
    return {
        suffix: (shape, names[f"{layer}.{suffix}"].dtype if dtype.is_floating_point else dtype)
        for suffix, (shape, dtype) in wanted.items()
    }
