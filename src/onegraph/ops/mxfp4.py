"""MXFP4 weights (`formats/mxfp4.py`): codes uint8 [..., n, k/2], scale uint8 [..., n, k/32], E8M0 and not 255.

On Hopper few tokens run straight from the codes, by the kernels that NVFP4 has (`ops/cuda/nvfp4.py`). In bfloat16 every
weight is exact; in float16 those are that float16 holds.
"""

import math

import torch
from torch import Tensor

from onegraph.formats.mxfp4 import GROUP, ONE
from onegraph.formats.nvfp4 import E2M1_RMS
from onegraph.formats.weight import Dtypes, Shape
from onegraph.ops.activation import SwiGLU
from onegraph.ops.coded import Coded
from onegraph.ops.nvfp4 import decode_e2m1
from onegraph.ops.samples import Sample


def factors(scale: Tensor) -> Tensor:
    """2^(scale - 127) of bytes of E8M0, float32: its exponent field, and for 0, which is subnormal, half of 2^-126."""
    exponent = scale.int()
    return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)


def _decode(codes: Tensor, scale: Tensor) -> Tensor:
    groups: Tensor = decode_e2m1(codes).unflatten(-1, (-1, GROUP))
    return (groups * factors(scale).unsqueeze(-1)).flatten(-2)


def _wanted(codes: Tensor, scale: Tensor) -> tuple[tuple[Dtypes, Shape], ...]:
    return (((torch.uint8,), (*codes.shape[:-1], codes.shape[-1] * 2 // GROUP)),)


def random_weight(shape: Shape, device: torch.device | str, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """codes and scale of a random weight [..., n, k], of outputs about as large as inputs."""
    *rows, k = shape
    codes = torch.randint(0, 256, (*rows, k // 2), generator=g, dtype=torch.uint8)
    about = ONE - round(math.log2(E2M1_RMS * k**0.5))
    scale = torch.randint(about - 2, about + 2, (*rows, k // GROUP), generator=g, dtype=torch.uint8)
    return codes.to(device), scale.to(device)


_ANY, _V4, _GPT_OSS = Sample(make=random_weight), SwiGLU(10.0), SwiGLU(7.0, 1.702, 1.0)

CODED = Coded(
    name="mxfp4",
    module=__name__,
    tensors=("codes", "scale"),
    packed=2,
    group=GROUP,
    decode=_decode,
    wanted=_wanted,
    expert_biases=True,
    kernels="onegraph.ops.cuda.nvfp4:MX_STREAM",
    cases={
        "dequantize": (_ANY.weight(64, 96), _ANY.weight(1, 32)),
        "linear": (
            _ANY.linear((1,), 64, 96),
            _ANY.linear((5,), 48, 64, bias=True),
            _ANY.linear((2,), 32, 32, float32=True),
            _ANY.linear((1,), 1000, 2880, bias=True),
            _ANY.linear((1,), 640, 1024, float32=True),
            _ANY.linear((4,), 128, 4096),
            _ANY.linear((17,), 101, 512, bias=True),
            _ANY.linear((24,), 96, 2880, float32=True),
            _ANY.linear((40,), 64, 256),
            _ANY.linear((64,), 101, 320, bias=True, float32=True),
            _ANY.linear((0,), 32, 64),
        ),
        "grouped_linear": (
            _ANY.grouped((1,), 4, 64, 256),
            _ANY.grouped((3,), 2, 128, 512),
            _ANY.grouped((10,), 8, 32, 64),
        ),
        "experts": (
            _ANY.experts(1, 6, 16, 256, 128, _V4, biases=False),
            _ANY.experts(1, 4, 8, 320, 192, _GPT_OSS, biases=True),
            _ANY.experts(1, 7, 16, 1024, 512, _V4, biases=False),
            _ANY.experts(3, 2, 4, 128, 64, _GPT_OSS, biases=True),
            _ANY.experts(13, 2, 3, 320, 192, _GPT_OSS, biases=True),
            _ANY.experts(16, 6, 24, 256, 64, _V4, biases=False),
            _ANY.experts(2, 2, 4, 96, 32, _GPT_OSS, biases=True),
        ),
    },
)
mxfp4_dequantize, mxfp4_linear, mxfp4_grouped_linear, mxfp4_experts = CODED.ops.values()
WEIGHT = CODED.weight
