"""MXFP4: four-bit floats with one power of two for 32 inputs (OCP Microscaling Formats 1.0, section 5).

A linear W [n, k] is stored as

    W[i, j] = E2M1(codes[i, j]) * 2^(scale[i, j // 32] - 127)

E2M1 as in `formats/nvfp4.py`: two neighbouring columns share a byte, the even one in the low half. scale is E8M0, an
exponent alone; 255 is NaN. Every number is exact in bfloat16.

| compressed-tensors           | DeepSeek-V4          | gpt-oss (experts)               | here                       |
|------------------------------|----------------------|---------------------------------|----------------------------|
| weight_packed uint8 [n, k/2] | weight int8 [n, k/2] | X_blocks uint8 [E, n, k/32, 16] | codes uint8 [..., n, k/2]  |
| weight_scale uint8 [n, k/32] | scale E8M0 [n, k/32] | X_scales uint8 [E, n, k/32]     | scale uint8 [..., n, k/32] |
"""

import math
from collections.abc import Container, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from onegraph.formats.files import quote
from onegraph.formats.nvfp4 import E2M1_RMS
from onegraph.formats.weight import FLOATS, WHOLE, Field, Part, Require, Source, Tensors, WeightFormat

GROUP = 32  # columns that share a scale
E8M0 = torch.float8_e8m0fnu
NAN, ONE = 255, 127
FLOAT16_SCALES = 104, 140  # of which 0.5 and 6 times are numbers of float16


class MXFP4Format(WeightFormat):
    """codes uint8 [n, k/2]; scale uint8 [n, k/32], the exponents of E8M0 with their bias of 127."""

    name = "mxfp4"
    ops = "onegraph.ops.mxfp4"
    group = GROUP
    fields: Mapping[str, Field] = MappingProxyType(
        {
            "codes": Field(torch.uint8, rows=1, columns=2, stored=(torch.uint8, torch.int8)),
            "scale": Field(torch.uint8, rows=1, columns=GROUP, stored=(torch.uint8, E8M0, *FLOATS)),
        }
    )

    def names(self, file: Container[str], layer: str) -> dict[str, str]:
        if f"{layer}.scale" in file and f"{layer}.weight_packed" not in file:
            return {"codes": f"{layer}.weight", "scale": f"{layer}.scale"}
        return {"codes": f"{layer}.weight_packed", "scale": f"{layer}.weight_scale"}

    def read(self, source: Source, layer: str, part: Part = WHOLE) -> Tensors:
        tensors = super().read(source, layer, part)
        scale = tensors["scale"]
        if scale.dtype in FLOATS:  # repackaged files hold the factors themselves
            scale = exponents(scale, layer, source)
        tensors = {"codes": tensors["codes"].view(torch.uint8), "scale": scale.view(torch.uint8)}
        source.require(
            (tensors["scale"] != NAN).all(),
            lambda: f"{quote(layer)} has scales that are NaN; the file is damaged, fetch it again",
        )
        return tensors

    def check_dtype(self, layer: str, tensors: Tensors, dtype: torch.dtype, require: Require) -> None:
        """float16 holds 2^-24 to 65504; bfloat16 and float32 hold every weight."""
        if dtype != torch.float16:
            return
        first, last = FLOAT16_SCALES
        beyond = (tensors["scale"] < first) | (tensors["scale"] > last)
        used = (tensors["codes"].unflatten(-1, (-1, GROUP // 2)) & 0x77).ne(0).any(-1)
        require(
            ~(beyond & used).any(),
            lambda: (
                f"{quote(layer)} has scales beyond 2^{first - ONE} to 2^{last - ONE}, whose weights float16 does not "
                "hold; load the model in bfloat16"
            ),
        )

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        super().fill(stored, k, generator)
        stored["scale"].view(torch.uint8).fill_(ONE - round(math.log2(E2M1_RMS * k**0.5)))


MXFP4 = MXFP4Format()


def exponents(factors: Tensor, layer: str, source: Source) -> Tensor:
    """Factors that are powers of two as the bytes of E8M0, uint8; any other number is a CheckpointError."""
    exponent = torch.frexp(factors.float()).exponent - 1
    bytes_ = (exponent + ONE).clamp(0, NAN - 1).to(torch.uint8)
    source.require(
        (bytes_.view(E8M0).float() == factors.float()).all(),
        lambda: f"{quote(layer)} is in MXFP4 and has scales that are no powers of two",
    )
    return bytes_
