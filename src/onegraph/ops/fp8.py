"""FP8 weights (`formats/fp8.py`): codes uint8 [..., n, k], the bits of E4M3; scale float32 [..., ceil(n/rows),
ceil(k/columns)], or where `columns` is 0 [..., n], one a row.

A weight is the product of the two as float32 rounds it, so exact where a scale has 20 significant bits or fewer (E8M0,
bfloat16, float16).
"""

import torch
from torch import Tensor

from onegraph.formats.fp8 import E4M3_RMS, NAN
from onegraph.formats.nvfp4 import E4M3
from onegraph.formats.weight import Dtypes, Shape
from onegraph.ops.activation import SwiGLU
from onegraph.ops.coded import Coded
from onegraph.ops.samples import Sample


def _decode(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    n, k = codes.shape[-2:]
    if columns:
        scale = scale.unsqueeze(-1).expand(*scale.shape, columns).flatten(-2)[..., :k]
        scale = scale.unsqueeze(-2).expand(*scale.shape[:-1], rows, k).flatten(-3, -2)[..., :n, :]
    else:
        scale = scale.unsqueeze(-1)
    return codes.view(E4M3).float() * scale


def _wanted(codes: Tensor, scale: Tensor, rows: int, columns: int) -> tuple[tuple[Dtypes, Shape], ...]:
    if rows < 1 or columns < 0 or (columns == 0 and rows != 1):
        raise ValueError(f"a block of {rows} x {columns} makes no sense; rows and columns are above 0, or 1 and 0")
    return (((torch.float32,), _grid(tuple(codes.shape), rows, columns)),)


def _grid(shape: Shape, rows: int, columns: int) -> Shape:
    *lead, n, k = shape
    return (*lead, -(-n // rows), -(-k // columns)) if columns else (*lead, n)


def random_weight(
    shape: Shape, rows: int, columns: int, device: torch.device | str, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random codes and scales of weights [..., n, k] near 1/sqrt(k), every number but NaN among the codes."""
    codes = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    codes = torch.where((codes & NAN) == NAN, codes & ~1, codes)
    scale = (0.5 + torch.rand(_grid(shape, rows, columns), generator=g)) * shape[-1] ** -0.5 / E4M3_RMS
    return codes.to(device), scale.to(device)


def _sample(name: str, rows: int, columns: int) -> Sample:
    def make(shape: Shape, device: torch.device | str, g: torch.Generator) -> tuple[Tensor, ...]:
        return random_weight(shape, rows, columns, device, g)

    return Sample(name=name, numbers=(rows, columns), make=make)


_B128, _B32, _MX, _ROWS = (_sample("128", 128, 128), _sample("32", 32, 32), _sample("mx", 1, 32), _sample("rows", 1, 0))

CODED = Coded(
    name="fp8",
    module=__name__,
    tensors=("codes", "scale"),
    numbers=("rows", "columns"),
    decode=_decode,
    wanted=_wanted,
    kernels="onegraph.ops.cuda.fp8:STREAM",
    on_gpu=("dequantize", "linear", "grouped_linear", "experts"),
    cases={
        "dequantize": (
            _B128.weight(256, 384),
            _B128.weight(2, 200, 130),
            _B32.weight(40, 72),
            _MX.weight(24, 96),
            _ROWS.weight(17, 40),
        ),
        "linear": (
            _B128.linear((1,), 256, 512),
            _B128.linear((5,), 200, 328, bias=True),
            _B32.linear((1,), 96, 160),
            _MX.linear((2, 3), 64, 96, float32=True),
            _ROWS.linear((1,), 576, 576),
            _ROWS.linear((17,), 100, 72, bias=True),
            _ROWS.linear((0,), 128, 128),
        ),
        "grouped_linear": (
            _B128.grouped((1,), 4, 128, 256),
            _B32.grouped((3,), 2, 64, 96),
            _ROWS.grouped((2, 5), 3, 32, 64),
        ),
        "experts": (
            _B128.experts(1, 6, 16, 256, 128, SwiGLU()),
            _B128.experts(5, 2, 4, 128, 256, SwiGLU(1.0, 1.702, 1.0)),
            _B32.experts(2, 3, 8, 96, 64, SwiGLU()),
            _ROWS.experts(13, 2, 3, 64, 48, SwiGLU(7.0)),
        ),
    },
)
fp8_dequantize, fp8_linear, fp8_grouped_linear, fp8_experts = CODED.ops.values()
WEIGHT = CODED.weight
