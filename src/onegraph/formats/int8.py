"""Int8 by row: how a CPU holds weights of any format. It is made at load and never stored.

A linear W [n, k] is held as weight int8 [n, k] and scale bfloat16 [n], W = scale[:, None] * weight: a quarter of what
float32 takes. A row's largest number is 127, so rounding costs a weight at most half of 1/127 of it.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from onegraph.formats.weight import Field, Tensors, WeightFormat


class Int8(WeightFormat):
    """See the module."""

    name = "int8 by row"
    ops = "onegraph.ops.int8"
    fields: Mapping[str, Field] = MappingProxyType(
        {"weight": Field(torch.int8, rows=1, columns=1), "scale": Field(torch.bfloat16, rows=1)}
    )

    def encode(self, weight: Tensor) -> Tensors:
        """weight [n, k] of a float dtype -> the fields. The scale is rounded first, so that it costs nothing besides:
        up, since a row's largest number must stay within 127."""
        weight = weight.float()
        scale = weight.abs().amax(1) / 127
        near = scale.bfloat16()
        up = torch.nextafter(near, torch.full_like(near, torch.inf))
        held = torch.where(near.float() < scale, up, near)
        step = torch.where(held > 0, held, 1).float()
        return {"weight": (weight / step[:, None]).round_().to(torch.int8), "scale": held}


INT8 = Int8()
