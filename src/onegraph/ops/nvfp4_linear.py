"""NVFP4 weights (`formats/nvfp4.py`): codes uint8 [..., n, k/2], scale uint8 [..., n, k/16], the bits of E4M3 numbers,
global_scale float32 [..., n], one a row: layers that are fused keep their own. Few tokens run in one launch.

A weight is not a cache row, which has no global scale: those are in `ops/nvfp4.py`.
"""

import torch
from torch import Tensor

from onegraph.formats.nvfp4 import GROUP
from onegraph.formats.weight import Dtypes, Shape
from onegraph.ops.activation import ReLU2, SwiGLU
from onegraph.ops.coded import Coded
from onegraph.ops.nvfp4 import decode_e2m1, times_scales
from onegraph.ops.samples import Sample


def _decode(codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return times_scales(decode_e2m1(codes), scale) * global_scale.unsqueeze(-1)


def _wanted(codes: Tensor, scale: Tensor, global_scale: Tensor) -> tuple[tuple[Dtypes, Shape], ...]:
    *rows, half = codes.shape
    return ((torch.uint8,), (*rows, half * 2 // GROUP)), ((torch.float32,), tuple(rows))


def random_weight(shape: Shape, device: torch.device | str, g: torch.Generator) -> tuple[Tensor, ...]:
    """Random codes, scales and global scales of weights [..., n, k] near 1/sqrt(k)."""
    *rows, k = shape
    codes = torch.randint(0, 256, (*rows, k // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(40, 127, (*rows, k // GROUP), generator=g, dtype=torch.uint8)
    # E2M1 codes have rms 2.9, these scales some 130
    global_scale = (0.5 + torch.rand(*rows, generator=g)) * k**-0.5 / 380
    return codes.to(device), scale.to(device), global_scale.to(device)


_ANY, _V4 = Sample(make=random_weight), SwiGLU(10.0)

CODED = Coded(
    name="nvfp4",
    module=__name__,
    tensors=("codes", "scale", "global_scale"),
    packed=2,
    group=GROUP,
    decode=_decode,
    wanted=_wanted,
    kernels="onegraph.ops.cuda.nvfp4:STREAM",
    cases={
        "dequantize": (_ANY.weight(48, 64), _ANY.weight(3, 16, 32)),
        "linear": (
            _ANY.linear((1,), 576, 576),
            _ANY.linear((1,), 4096, 256),
            _ANY.linear((1,), 1000, 4096, bias=True),
            _ANY.linear((1,), 640, 1024, float32=True),
            _ANY.linear((2,), 192, 1536, bias=True),
            _ANY.linear((8,), 128, 4096),
            _ANY.linear((2, 3), 48, 208),
            _ANY.linear((17,), 100, 512, bias=True),
            _ANY.linear((40,), 96, 320, bias=True, float32=True),
            _ANY.linear((0,), 128, 128),
        ),
        "grouped_linear": (
            _ANY.grouped((1,), 4, 64, 256),
            _ANY.grouped((3,), 2, 128, 512),
            _ANY.grouped((2, 5), 8, 32, 64),
        ),
        "experts": (
            _ANY.experts(1, 6, 16, 256, 128, _V4),
            _ANY.experts(1, 7, 16, 1024, 512, _V4),
            _ANY.experts(4, 3, 32, 512, 256, _V4),
            _ANY.experts(3, 2, 4, 128, 64, SwiGLU(1.0)),
            _ANY.experts(1, 2, 8, 256, 256, SwiGLU(7.0, 1.702, 1.0)),
            _ANY.experts(5, 2, 4, 128, 64, SwiGLU(alpha=1.702, shift=1.0)),
            _ANY.experts(5, 2, 4, 128, 64, ReLU2()),
            _ANY.experts(16, 6, 24, 256, 64, _V4),
            _ANY.experts(13, 2, 3, 256, 128, _V4),
        ),
    },
)
nvfp4_dequantize, nvfp4_linear, nvfp4_grouped_linear, nvfp4_experts = CODED.ops.values()
WEIGHT = CODED.weight
