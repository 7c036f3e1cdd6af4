"""MXFP8 weights (`formats/mxfp8.py`): codes uint8 [..., n, k], scale uint8 [..., n, ceil(k/32)], E8M0 and not 255. A
weight is exact where float32 holds the number.

On a GPU few tokens run straight from the codes where k is a multiple of 128 (`ops/cuda/mxfp8.py`).
"""

import torch
from torch import Tensor

from onegraph.formats.mxfp4 import E8M0, GROUP, ONE
from onegraph.formats.weight import Dtypes, Shape
from onegraph.ops.activation import SwiGLU
from onegraph.ops.coded import Coded
from onegraph.ops.fp8 import CODED as FP8
from onegraph.ops.fp8 import random_weight as random_fp8
from onegraph.ops.samples import Sample

BLOCK = 1, GROUP  # as FP8 calls it


def _decode(codes: Tensor, scale: Tensor) -> Tensor:
    return FP8.decode(codes, scale.view(E8M0).float(), *BLOCK)


def _wanted(codes: Tensor, scale: Tensor) -> tuple[tuple[Dtypes, Shape], ...]:
    return (((torch.uint8,), (*codes.shape[:-1], -(-codes.shape[-1] // GROUP))),)


def random_weight(shape: Shape, device: torch.device | str, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes and scales of weights [..., n, k] near 1/sqrt(k), every number but NaN among the codes."""
    codes, scale = random_fp8(shape, *BLOCK, "cpu", g)
    return codes.to(device), (scale.log2().round() + ONE).to(device, torch.uint8)


_ANY = Sample(make=random_weight)

CODED = Coded(
    name="mxfp8",
    module=__name__,
    tensors=("codes", "scale"),
    decode=_decode,
    wanted=_wanted,
    kernels="onegraph.ops.cuda.mxfp8:STREAM",
    on_gpu=("dequantize", "linear", "grouped_linear", "experts"),
    cases={
        "dequantize": (_ANY.weight(24, 96), _ANY.weight(2, 17, 40)),
        "linear": (
            _ANY.linear((1,), 256, 512),
            _ANY.linear((5,), 200, 328, bias=True),
            _ANY.linear((2, 3), 64, 96, float32=True),
            _ANY.linear((17,), 100, 256, bias=True),
            _ANY.linear((0,), 128, 128),
        ),
        "grouped_linear": (_ANY.grouped((1,), 4, 128, 256), _ANY.grouped((2, 5), 3, 32, 64)),
        "experts": (
            _ANY.experts(1, 6, 16, 256, 128, SwiGLU()),
            _ANY.experts(5, 2, 4, 128, 256, SwiGLU(1.0, 1.702, 1.0)),
            _ANY.experts(13, 2, 3, 64, 48, SwiGLU(7.0)),
        ),
    },
)
mxfp8_dequantize, mxfp8_linear, mxfp8_grouped_linear, mxfp8_experts = CODED.ops.values()
WEIGHT = CODED.weight
