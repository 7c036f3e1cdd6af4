"""E8P-RVQ: what the bytes of a quantized linear mean.

A linear is stored as `rotated.py` tells, with the integers Q [n, k] and the unit 1/4 or 1/16.

Q is the sum of residual stages, each coding 8 neighbouring columns of a row at once:

    2 bits:  Q = 4w  = a                a = E8P(codes), odd, |a| <= 11
    3 bits:  Q = 4w  = a + e            e = E81B(residual) in {0, +-1, +-2, +-4}    (residual ratio 2)
    4 bits:  Q = 16w = 4a + b           b = E8P(residual)                           (residual ratio 4)

**The 16-bit E8P code** (QuIP#, arXiv 2402.04396, section 4.2): the high byte i names one of 256 rows of the codebook,
the low byte s holds a sign bit for each of the 8 coordinates, bit j for column j; p, the parity of s, carries the
shift. A row of the codebook is the decoded vector of the code with s = 0, that is 4 (v + 1/4) for v in
D8^ = (Z + 1/2)^8 with an even coordinate sum. Because 2v is odd, negating v and moving the shift from +1/4 to -1/4
only flip bits, so that decoding is, in int8,

    a_j = row_j ^ (0xFC if bit j of s' else 0) ^ (0x02 if p else 0)       s' = s ^ p  (bit 0 flips if p is odd)

with no addition and no multiplication. The mask on the right depends on s alone (`sign_masks`: 256 rows of 8 bytes).

**E81B** (one byte): zero, the 240 roots of E8 and 15 of the 16 vectors +-2 e_i, all times 2.
"""

import itertools
from functools import cache, lru_cache

import torch
from torch import Tensor

from onegraph.formats.rotated import RotatedConfig, RotatedFormat, check_bits
from onegraph.formats.weight import Field, Tensors

BITS = (2, 3, 4)
STAGE_RATIO = {2: 1, 3: 2, 4: 4}  # how much finer the residual stage is than the first
UNIT = {2: 4, 3: 4, 4: 16}  # Q = UNIT * w


@lru_cache(maxsize=1)
def _codebook_cpu() -> Tensor:
    return torch.tensor([*_e8p_rows(), *_e81b_rows()], dtype=torch.int8)


def _e8p_rows() -> list[list[int]]:
    """256 rows 4 (v + 1/4). |v| runs over the 227 half-odd vectors of norm <= 10 by norm, then over 29 of norm 12."""
    orbits = [(1,) * 8, (3,) + (1,) * 7, (3, 3) + (1,) * 6, (3,) * 3 + (1,) * 5, (5,) + (1,) * 7]
    orbits += [(3,) * 4 + (1,) * 4, (5, 3) + (1,) * 6]
    rows = [v for orbit in orbits for v in sorted(set(itertools.permutations(orbit)), reverse=True)]
    # Any 29 of the 56 norm-12 vectors do equally well; these are the first in descending order.
    rows += sorted(set(itertools.permutations((3,) * 5 + (1,) * 3)), reverse=True)[:29]
    # 2v with sum(v) odd leaves D8^: coordinate 0 is negated once and for all, so that even sign parity stays inside.
    return [[2 * (-v[0] if sum(v) // 2 % 2 else v[0]) + 1, *(2 * c + 1 for c in v[1:])] for v in rows]


def _e81b_rows() -> list[list[int]]:
    """256 rows 2e: zero, the 240 roots of E8, and +-2 e_i without the last."""
    rows = [[0] * 8]
    for i, j in itertools.combinations(range(8), 2):
        for a, b in itertools.product((2, -2), repeat=2):
            rows.append([a if c == i else b if c == j else 0 for c in range(8)])
    rows += [list(v) for v in itertools.product((1, -1), repeat=8) if v.count(-1) % 2 == 0]
    rows += [[s if c == i else 0 for c in range(8)] for i in range(8) for s in (4, -4)][:15]
    return rows


def codebook(device: torch.device | str = "cpu") -> Tensor:
    """int8 [512, 8]: rows 0..255 E8P (what a code with sign byte 0 decodes to), rows 256..511 E81B times 2."""
    return _codebook_cpu().to(device)


def sign_masks(device: torch.device | str = "cpu") -> Tensor:
    """int8 [256, 8]: what a codebook row is XORed with, by sign byte; for kernels that rather look it up."""
    signs = torch.arange(256, device=device)  # made there: a copy from the host has no place in a captured step
    bits = (signs[:, None] >> torch.arange(8, device=device)) & 1
    parity = bits.sum(1, keepdim=True) & 1
    bits[:, :1] ^= parity
    return (bits * 0xFC ^ parity * 0x02).to(torch.uint8).view(torch.int8)


def residual_dtype(bits: int) -> torch.dtype | None:
    """dtype of the residual codes at a rate: None at 2 bits (one stage), uint8 at 3, int16 at 4."""
    check_bits(bits, BITS)
    return {2: None, 3: torch.uint8, 4: torch.int16}[bits]


@cache
def _resident_codebook(device: torch.device) -> Tensor:
    return codebook(device)  # 4 KB, one a device, so that it stays in cache across layers


class E8PFormat(RotatedFormat):
    """E8P at one rate: 2, 3 or 4 bits. Raises ValueError for another rate."""

    ops = "onegraph.ops.e8p_weight"
    group = 8

    def __init__(self, bits: int) -> None:
        check_bits(bits, BITS)
        coded = {"codes": Field(torch.int16, rows=1, columns=8)}
        if (dtype := residual_dtype(bits)) is not None:
            coded["residual"] = Field(dtype, rows=1, columns=8)
        super().__init__("e8p", bits, coded, UNIT[bits])

    def constants(self, device: torch.device) -> Tensors:
        return {"codebook": _resident_codebook(device)}


E8P = {bits: E8PFormat(bits) for bits in BITS}


class E8PConfig(RotatedConfig):
    """`quantization_config` of a checkpoint in E8P."""

    format = "e8p"
    formats = E8P
