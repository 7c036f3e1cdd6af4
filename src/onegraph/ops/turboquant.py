"""Writing tokens into a TurboQuant KV cache: norm, RoPE, rotation, quantization, packing and scatter in one launch.

What a code means stands in `onegraph.formats.turboquant`, where its bits stand in `onegraph.formats.turboquant_layout`.
Everything behind this op lives in rotated coordinates: the query and the exact keys and values that it returns are
rotated as well, so that codes and exact vectors attend together and one product at the end turns the result back.
"""

import torch
from torch import Tensor

from onegraph.formats.turboquant import mean_abs_coordinate
from onegraph.formats.turboquant_layout import Coded

LARGEST_NORM = 65504.0  # float16


def quantize(y: Tensor, codebook: Tensor, projection: Tensor | None = None, scale: str = "norm") -> Coded:
    """Rotated vectors [..., d] -> codes, of `codebook` (float32, in the layout's order); `projection` [d, d] asks for
    `prod`, whose residual norms come with everything but S^T sign(S r) multiplied in, and whose scale is the norm."""
    y = y.float()
    norm = y.norm(dim=-1, keepdim=True)
    unit = y / norm.clamp_min(1e-30)
    sizes = codebook[::2]
    codes = 2 * torch.bucketize(unit.abs(), (sizes[1:] + sizes[:-1]) / 2, out_int32=True)
    if codebook.numel() > 1:
        codes = codes + (unit < 0)
    level = codebook.index_select(0, codes.flatten()).view_as(unit)
    if projection is None:
        if scale == "matched":
            norm = norm / level.norm(dim=-1, keepdim=True)
        elif scale == "unbiased":
            norm = norm / (unit * level).sum(-1, keepdim=True).clamp_min(1e-3)
        return Coded(codes.to(torch.uint8), _half(norm))
    d = y.shape[-1]
    rest = unit - level
    residual = norm * rest.norm(dim=-1, keepdim=True) / (d * mean_abs_coordinate(d))
    signs = (rest @ projection.float().T < 0).to(torch.uint8)
    return Coded(codes.to(torch.uint8), _half(norm), signs, _half(residual))


def dequantize(coded: Coded, codebook: Tensor, projection: Tensor | None = None) -> Tensor:
    """What codes stand for, float32 [..., d], in rotated coordinates."""
    level = codebook.index_select(0, coded.codes.flatten().int()).view(coded.codes.shape)
    out = level * coded.norms.float().unsqueeze(-1)
    if coded.signs is None or coded.residual_norms is None:
        return out
    assert projection is not None
    return out + coded.residual_norms.float().unsqueeze(-1) * ((1.0 - 2.0 * coded.signs) @ projection.float())


def _half(norm: Tensor) -> Tensor:
    return norm.squeeze(-1).clamp(max=LARGEST_NORM).half()
