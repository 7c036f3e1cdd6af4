"""A dense weight in float16 as FBGEMM, which comes with torch on x86, reads it: a product of float32 activations.

It streams such a weight three to four times as fast as torch's other products of one token do theirs, and no rounding
is left but the weight's own: sums are float32. An output depends on its row alone, to the last bit, whatever the batch
and the number of threads are.
"""

from typing import NewType

import torch
from torch import Tensor

Packed = NewType("Packed", object)
"""An object of torch's, which belongs to this process: weight and bias."""

AT_ONCE = 1 << 20  # weights that are compared at a time

EXACT_TO = 2.0**-11
"""What rounding to float16 costs a weight at most where it is in float16's range, relative to its norm."""


def packs() -> bool:
    """Whether this machine's torch does it."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def holds(weight: Tensor) -> bool:
    """Whether float16 holds a weight [n, k] as closely as its eleven bits can: nothing overflows, and little is so
    small that bits are lost."""
    parts = weight.split(max(1, AT_ONCE // weight.shape[1]))
    error = sum(float((part.half().float() - part).square().sum(dtype=torch.float64)) for part in parts)
    size = sum(float(part.square().sum(dtype=torch.float64)) for part in parts)
    return error <= EXACT_TO**2 * size  # false for what is not finite


def pack(weight: Tensor, bias: Tensor | None) -> Packed:
    """float32 [n, k] and [n]."""
    packed: Packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
    return packed


def unpack(packed: Packed) -> Tensor:
    """The weight, float32 [n, k]."""
    weight: Tensor = torch.ops.quantized.linear_unpack_fp16(packed)[0]
    return weight


def linear(x: Tensor, packed: Packed) -> Tensor:
    """float32 [..., k] -> float32 [..., n]."""
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return y
