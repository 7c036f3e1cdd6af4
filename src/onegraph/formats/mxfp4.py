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
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.dense import DENSE
from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.nvfp4 import E2M1_RMS
from onegraph.formats.weight import WHOLE, Field, File, Part, Source, Tensors, WeightFormat

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
            "scale": Field(torch.uint8, rows=1, columns=GROUP, stored=(torch.uint8, E8M0)),
        }
    )

    def names(self, file: Container[str], layer: str) -> dict[str, str]:
        if f"{layer}.scale" in file and f"{layer}.weight_packed" not in file:
            return {"codes": f"{layer}.weight", "scale": f"{layer}.scale"}
        return {"codes": f"{layer}.weight_packed", "scale": f"{layer}.weight_scale"}

    def read(self, source: Source, layer: str, part: Part = WHOLE) -> Tensors:
        tensors = super().read(source, layer, part)
        tensors = {key: tensor.view(torch.uint8) for key, tensor in tensors.items()}
        if bool((tensors["scale"] == NAN).any()):
            raise CheckpointError(f"{quote(layer)} has scales that are NaN; the file is damaged, fetch it again")
        return tensors

    def check_dtype(self, layer: str, tensors: Tensors, dtype: torch.dtype) -> None:
        """float16 holds 2^-24 to 65504; bfloat16 and float32 hold every weight."""
        if dtype != torch.float16:
            return
        first, last = FLOAT16_SCALES
        beyond = (tensors["scale"] < first) | (tensors["scale"] > last)
        used = (tensors["codes"].unflatten(-1, (-1, GROUP // 2)) & 0x77).any(-1)
        if bool((beyond & used).any()):
            raise CheckpointError(
                f"{quote(layer)} has scales beyond 2^{first - ONE} to 2^{last - ONE}, whose weights float16 does not "
                "hold; load the model in bfloat16"
            )

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        super().fill(stored, k, generator)
        stored["scale"].view(torch.uint8).fill_(ONE - round(math.log2(E2M1_RMS * k**0.5)))


MXFP4 = MXFP4Format()


@dataclass(frozen=True)
class MXFP4Config:
    """`quantization_config` of an MXFP4 checkpoint of compressed-tensors. Which layers are MXFP4 is read from the
    tensors themselves; `ignore` are the names or patterns that were kept, as the file tells them."""

    ignore: tuple[str, ...] = ()

    @staticmethod
    def matches(data: Mapping[str, Any]) -> bool:
        return data.get("quant_method") == "compressed-tensors" and data.get("format") == "mxfp4-pack-quantized"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "MXFP4Config":
        kept = data.get("ignore", ())
        if not isinstance(kept, list | tuple) or not all(isinstance(name, str) for name in kept):
            raise ValueError("quantization_config.ignore is no list of module names")
        return cls(tuple(kept))

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": list(self.ignore)}

    def format_of(self, layer: str, file: File) -> WeightFormat:
        return MXFP4 if f"{layer}.weight_packed" in file else DENSE

    def check_layers(self, layers: Collection[str]) -> None:
        """`ignore` may name patterns and modules that are no linears: nothing to hold against the layers."""

    def ignored(self, name: str) -> bool:
        return False

    def renamed(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> "MXFP4Config":
        return self
