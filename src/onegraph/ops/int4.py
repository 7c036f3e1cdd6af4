"""INT4 weights (`formats/int4.py`): codes uint8 [..., n, k/2], scale [..., n, k/g], zero uint8 [..., n, k/g] and, with
act-order, order int32 [..., k]. A weight is (code - zero) * scale, rounded once, its columns where x has them.
"""

import math

import torch
from torch import Tensor

from onegraph.formats.int4 import COLUMNS
from onegraph.formats.weight import FLOATS, Dtypes, Shape
from onegraph.ops.activation import SwiGLU
from onegraph.ops.coded import Coded
from onegraph.ops.samples import Sample


def _decode(codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None) -> Tensor:
    q = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float().unflatten(-1, (scale.shape[-1], -1))
    weight: Tensor = ((q - zero.float().unsqueeze(-1)) * scale.float().unsqueeze(-1)).flatten(-2)
    if order is None:
        return weight
    return torch.empty_like(weight).scatter_(-1, order.long().unsqueeze(-2).expand_as(weight), weight)


def _wanted(codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None) -> tuple[tuple[Dtypes, Shape], ...]:
    k, groups = codes.shape[-1] * 2, scale.shape[-1] if scale.dim() else 0
    if not groups or k % groups or (groups > 1 and k // groups % COLUMNS):
        raise ValueError(
            f"the scale of codes is {scale.dtype} {tuple(scale.shape)}; {k} inputs are one group or groups of a "
            f"multiple of {COLUMNS}"
        )
    shape = (*codes.shape[:-1], groups)
    return (FLOATS, shape), ((torch.uint8,), shape), ((torch.int32,), (*codes.shape[:-2], k))


def random_weight(
    n: int, k: int, columns: int, device: torch.device | str, g: torch.Generator, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scale and zero of a random weight with groups of `columns`."""
    codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    scale = (0.5 + torch.rand(n, k // columns, generator=g)) * (k**-0.5 / 6.5)
    zero = torch.randint(0, 16, (n, k // columns), generator=g, dtype=torch.uint8)
    return codes.to(device), scale.to(device, dtype), zero.to(device)


def random_order(k: int, device: torch.device | str, g: torch.Generator) -> Tensor:
    """An order of k inputs."""
    return torch.randperm(k, generator=g).int().to(device)


def _groups(columns: int, *, order: bool = False, bf16: bool = False) -> Sample:
    def make(shape: Shape, device: torch.device | str, g: torch.Generator) -> tuple[Tensor | None, ...]:
        *lead, n, k = shape
        weight = random_weight(math.prod(lead) * n, k, columns, device, g, torch.bfloat16 if bf16 else torch.float16)
        orders = [random_order(k, device, g) for _ in range(math.prod(lead))] if order else []
        order_of = torch.stack(orders).view(*lead, k) if orders else None
        return *(tensor.view(*lead, n, -1) for tensor in weight), order_of

    return Sample(name=f"groups of {columns}{', ordered' * order}{', bf16 scales' * bf16}:", make=make)


CODED = Coded(
    name="int4",
    module=__name__,
    tensors=("codes", "scale", "zero", "order?"),
    packed=2,
    decode=_decode,
    wanted=_wanted,
    kernels="onegraph.ops.cuda.int4:KERNELS",
    on_gpu=("linear",),  # experts run the reference there
    cases={
        "dequantize": (
            _groups(32).weight(64, 96),
            _groups(64).weight(1, 64),
            _groups(128, order=True).weight(24, 256),
        ),
        "linear": (
            _groups(128).linear((1,), 576, 512),
            _groups(128, order=True).linear((1,), 1000, 4096, bias=True),
            _groups(64, bf16=True).linear((1,), 256, 1024, float32=True),
            _groups(32).linear((1,), 40, 768),
            _groups(2048).linear((1,), 264, 2048, bias=True),
            _groups(128, order=True).linear((3,), 208, 1280),
            _groups(128, bf16=True).linear((4,), 64, 11008),
            _groups(32, order=True).linear((1,), 48, 96),
            _groups(64).linear((2, 3), 48, 320, bias=True),
            _groups(32, order=True).linear((17,), 100, 512, bias=True, float32=True),
            _groups(256).linear((64,), 128, 256),
            _groups(128).linear((0,), 128, 128),
        ),
        "experts": (
            _groups(32).experts(1, 2, 6, 64, 96, SwiGLU()),
            _groups(32, order=True).experts(5, 2, 4, 64, 32, SwiGLU()),
        ),
    },
)
int4_dequantize, int4_linear, int4_experts = CODED.ops.values()
WEIGHT = CODED.weight
