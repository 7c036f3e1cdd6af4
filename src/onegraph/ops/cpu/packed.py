"""A dense weight in float16 as FBGEMM, which comes with torch on x86, reads it: a product of float32 activations.

It streams such a weight three to four times as fast as torch's other products of one token do theirs, and no rounding
is left but the weight's own: sums are float32. An output depends on its row alone, to the last bit, whatever the batch
and the number of threads are. FBGEMM splits a batch among kernels for one to six rows (AVX2) or one to fourteen
(AVX-512). With AVX2 the kernels for one and two rows add in another order than the rest, so a batch that would end in
one of them is padded.
"""

import math
from functools import lru_cache
from typing import NewType

import torch
from torch import Tensor
from torch.nn.functional import pad

Packed = NewType("Packed", object)
"""An object of torch's, which belongs to this process: weight and bias."""

AT_ONCE = 1 << 18  # weights that are compared at a time: 1 MiB of float32, which a core's cache holds

ROWS = 120
"""FBGEMM multiplies this many rows at a time, each time from the first kernel on (`mb_max` of its FbgemmFPCommon.h)."""

EXACT_TO = 2.0**-11
"""What rounding to float16 costs a weight at most where it is in float16's range, relative to its norm."""


def packs() -> bool:
    """Whether this machine's torch multiplies by packed float16, each row by itself to the last bit."""
    return torch.backends.quantized.engine in ("x86", "fbgemm") and ROWS in _consistent()


@lru_cache(maxsize=1)
def _consistent() -> frozenset[int]:
    """The numbers of rows, up to ROWS, of which each gets the bits that it gets among ROWS.

    Measured, since FBGEMM does not say which kernels it has for this CPU. All rows are the same one, so that each
    kernel of a split has to agree with every other.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(33, 640, generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are
    packed = pack(drawn[1:], None)
    x = drawn[:1].expand(ROWS, -1).contiguous()
    want = torch.ops.quantized.linear_dynamic_fp16(x, packed)[0]
    counts = range(1, ROWS + 1)
    return frozenset(m for m in counts if (torch.ops.quantized.linear_dynamic_fp16(x[:m], packed) == want).all())


def padded(rows: int) -> int:
    """The number of rows to multiply in place of `rows`, so that each gets the same bits as in any other batch."""
    whole, rest = rows // ROWS * ROWS, rows % ROWS
    return whole + min(m for m in _consistent() if m >= rest) if rest else rows


def holds(weight: Tensor) -> bool:
    """Whether float16 holds a weight [n, k] as closely as its eleven bits can: nothing overflows, and little is so
    small that bits are lost."""
    error = size = 0.0
    for part in weight.reshape(-1).split(AT_ONCE):
        lost = part.half().float().sub_(part)
        error, size = error + float(lost.dot(lost)), size + float(part.dot(part))
    return math.isfinite(error) and error <= EXACT_TO**2 * size


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
    rows = x.shape[:-1].numel()
    more = padded(rows) - rows
    wide = pad(x.reshape(rows, -1), (0, 0, 0, more)) if more else x
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16(wide, packed)
    return y[:rows].reshape(*x.shape[:-1], -1) if more else y
