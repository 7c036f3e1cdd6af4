"""MXFP8: E4M3 codes with one power of two for 32 inputs (OCP Microscaling Formats 1.0, section 5).

A linear W [n, k] is stored as

    W[i, j] = E4M3(codes[i, j]) * 2^(scale[i, j // 32] - 127)

E4M3 as in `formats/fp8.py`, of which this is the form with scales of a byte: 8.25 bits per weight, in memory too. scale
is E8M0, an exponent alone; 255 is NaN. The last group of a row may be cut short.

| ModelOpt, compressed-tensors        | transformers, [1, 32]          | here                             |
|-------------------------------------|--------------------------------|----------------------------------|
| weight E4M3 [n, k]                  | weight E4M3 [n, k]             | codes uint8 [..., n, k]          |
| weight_scale uint8 (E8M0) [n, k/32] | weight_scale_inv uint8 or E8M0 | scale uint8 [..., n, ceil(k/32)] |
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from onegraph.formats.files import quote
from onegraph.formats.fp8 import FP8Format, scale_name
from onegraph.formats.mxfp4 import E8M0, GROUP, NAN
from onegraph.formats.weight import Field, File, Source


class MXFP8Format(FP8Format):
    """codes uint8 [..., n, k], the bits of E4M3; scale uint8 [..., n, ceil(k/32)], the exponents of E8M0 with their
    bias of 127."""

    ops = "onegraph.ops.mxfp8"

    def __init__(self) -> None:
        super().__init__((1, GROUP))
        self.name = "mxfp8"
        scale = Field(torch.uint8, rows=1, columns=GROUP, stored=(torch.uint8, E8M0))
        self.fields: Mapping[str, Field] = {**self.fields, "scale": scale}

    def multiplier(self, source: Source, scale: Tensor, name: str) -> Tensor:
        exponents = scale.view(torch.uint8)
        source.require(
            (exponents != NAN).all(),
            lambda: f"{quote(name)} holds scales that are NaN; the file is damaged, fetch it again",
        )
        return exponents


MXFP8 = MXFP8Format()


def is_mxfp8(file: File, layer: str) -> bool:
    """Whether a layer whose `.weight` is E4M3 has scales of a byte for 32 inputs."""
    name, shape = scale_name(file, layer), tuple(file.info(f"{layer}.weight").shape)
    if name is None or len(shape) != 2:
        return False
    scale = file.info(name)
    return scale.dtype in (torch.uint8, E8M0) and tuple(scale.shape) == MXFP8.fields["scale"].shape(*shape)
