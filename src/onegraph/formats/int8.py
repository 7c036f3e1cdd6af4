"""Int8 by row: how a CPU holds weights of any format. It is made at load and never stored.

A linear W [n, k] is held as weight int8 [n, k] and scale bfloat16 [n],

    W = diag(scale) @ weight @ T

with T an orthonormal block Hadamard with random signs (`block_rotation`), which evens out what is large in a row: its
largest number sets the step of all of them. Inputs are turned likewise, x @ T^t, in front of the product.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from onegraph.formats.rotated import hadamard_block
from onegraph.formats.turboquant import rotation
from onegraph.formats.weight import Field, Tensors, WeightFormat

ROWS_AT_ONCE = 1024  # that are encoded: a whole layer takes several times its float32 form


@cache
def block_rotation(k: int) -> Tensor:
    """float32 [b, b]: one block of T for k inputs, b the largest power of two that divides k, at most 128."""
    block = hadamard_block(k)
    result: Tensor = rotation(block) * block**-0.5
    return result


def rotated(x: Tensor) -> Tensor:
    """x [..., k] -> x @ T^t, float32."""
    matrix = block_rotation(x.shape[-1])
    return (x.float().reshape(-1, len(matrix)) @ matrix.T).view(x.shape)


def turned_back(x: Tensor) -> Tensor:
    """x [..., k] -> x @ T, float32."""
    matrix = block_rotation(x.shape[-1])
    return (x.float().reshape(-1, len(matrix)) @ matrix).view(x.shape)


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
        found = torch.empty_like(weight, dtype=torch.int8)
        scales = torch.empty(len(weight), dtype=torch.bfloat16, device=weight.device)
        for first in range(0, len(weight), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            rows = rotated(weight[part])
            scale = rows.abs().amax(1) / 127
            near = scale.bfloat16()
            up = torch.nextafter(near, torch.full_like(near, torch.inf))
            held = scales[part] = torch.where(near.float() < scale, up, near)
            found[part] = rows.div_(torch.where(held > 0, held, 1).float()[:, None]).round_()
        return {"weight": found, "scale": scales}


INT8 = Int8()
