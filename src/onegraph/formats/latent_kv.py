"""A row of a latent cache in codes: the latent in FP8 or TurboQuant's codes, the rotated key in bfloat16.

    | bytes      | what                                                                  |
    |------------|-----------------------------------------------------------------------|
    | rank b / 8 | the latent: b = 8, E4M3; b = 1 to 4, TurboQuant's codes in planes      |
    | 2 rope     | the rotated key, bfloat16                                             |
    | 4          | what all codes of the row are multiplied by, float32                  |
    | to 16      | padding, so that every row begins at a multiple of 16                 |

DeepSeek-V3 (rank 512, rope 64) takes 656 bytes per token and layer in FP8, 400 at 4 bits, and 1152 in bfloat16.

One factor a row serves FP8 as well as one for 64 codes: E4M3 has 18 binades, and a factor moves none of its three bits
of mantissa. A kernel multiplies scores and weights by it, in place of every number.

TurboQuant's codes are those of the rotated latent (`formats.turboquant.rotation`), in the order of their levels. A
level is an odd polynomial of x = code - (2^b - 1) / 2 with three terms, which costs a kernel less than a table does. It
fits Lloyd-Max's centroids; the squared error grows by 0.3 % at 4 bits, less at 3, and not at all at 1 and 2.

A plane of width w has B = rank w / 8 bytes; byte j holds dimensions j, j + B, j + 2 B, ... from bit 0 upwards, so that
both halves of a latent come with one load. 3 bits are a plane of the two low bits, then one of the high bit.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onegraph.formats.turboquant import EXACT, TurboQuantConfig, codebook
from onegraph.formats.turboquant_layout import PLANES

E4M3_MAX = 448.0
FP8 = 8  # bits of a code
RANKS = (64, 128, 256, 512)  # that the rotation and codebooks exist for, powers of two


def row_bytes(rank: int, rope: int, bits: int) -> int:
    """Bytes of a row; `bits` of a code, 8 for FP8. Raises ValueError for a rank that `bits` cannot hold."""
    if rank % 4 or (bits != FP8 and rank not in RANKS):
        allowed = "a multiple of 4" if bits == FP8 else ", ".join(map(str, RANKS[:-1])) + f" or {RANKS[-1]}"
        raise ValueError(f"the latent has {rank} numbers; a cache in {bits}-bit codes needs {allowed}")
    return -(-(rank * bits // 8 + 2 * rope + 4) // 16) * 16


def pack_rows(codes: Tensor, turned: Tensor, factor: Tensor, bits: int) -> Tensor:
    """codes uint8 [..., rank], turned [..., rope] of any float, factor float32 [...] -> uint8 [..., row_bytes]."""
    rank, rope = codes.shape[-1], turned.shape[-1]
    parts, shift = [codes] if bits == FP8 else [], 0
    for width in () if bits == FP8 else PLANES[bits]:
        spread = (codes >> shift & (1 << width) - 1).unflatten(-1, (8 // width, rank * width // 8))
        moved = spread << torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device).unsqueeze(1)
        parts.append(moved.sum(-2, dtype=torch.uint8))
        shift += width
    parts.append(turned.to(torch.bfloat16).contiguous().view(torch.uint8))
    parts.append(factor.float().unsqueeze(-1).contiguous().view(torch.uint8))
    row = torch.cat(parts, dim=-1)
    return torch.nn.functional.pad(row, (0, row_bytes(rank, rope, bits) - row.shape[-1]))


def unpack_rows(rows: Tensor, rank: int, rope: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `pack_rows`: uint8 [..., row_bytes] -> codes, the rotated key as float32, factor."""
    size = rank * bits // 8
    codes, turned, factor = rows[..., : size + 2 * rope + 4].split((size, 2 * rope, 4), dim=-1)
    if bits != FP8:
        planes, shift, found = codes.split([rank * width // 8 for width in PLANES[bits]], dim=-1), 0, []
        for width, plane in zip(PLANES[bits], planes, strict=True):
            at = torch.arange(0, 8, width, dtype=torch.uint8, device=rows.device).unsqueeze(1)
            found.append((plane.unsqueeze(-2) >> at & (1 << width) - 1).flatten(-2) << shift)
            shift += width
        codes = torch.stack(found).sum(0, dtype=torch.uint8)
    wide = turned.contiguous().view(torch.bfloat16).float()
    return codes, wide, factor.contiguous().view(torch.float32).squeeze(-1)


def fp8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., rank] of any float -> E4M3 codes uint8, and their factor float32 [...]."""
    factor = x.float().abs().amax(-1).clamp_min(1e-30) * (1 / E4M3_MAX)
    codes = (x.float() / factor.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), factor


def curve(rank: int, bits: int) -> Tensor:
    """float32 [3]: coefficients of x, x^3 and x^5 of the levels of a unit vector of `rank` numbers."""
    sizes = codebook(rank, bits)[::2].double() * math.sqrt(rank)
    x = torch.arange(len(sizes), dtype=torch.float64).unsqueeze(1) + 0.5
    terms = min(3, len(sizes))
    powers = x ** (2 * torch.arange(terms) + 1)
    weight = (-sizes.square() / 4).exp().unsqueeze(1)  # the root of how often a level is taken
    found = torch.linalg.lstsq(powers * weight, sizes.unsqueeze(1) * weight).solution.squeeze(1)
    return torch.nn.functional.pad(found / math.sqrt(rank), (0, 3 - terms)).float()


def levels(codes: Tensor, bits: int, curve: Tensor | None) -> Tensor:
    """What codes mean before their factor, float32: E4M3's, or with `curve` TurboQuant's."""
    if curve is None:
        return codes.view(torch.float8_e4m3fn).float()
    x = codes.float() - ((1 << bits) - 1) / 2
    square = x * x
    return x * (curve[0] + square * (curve[1] + square * curve[2]))


def code_bits(kv: TurboQuantConfig | None, fp8: bool, layers: int) -> list[int]:
    """Bits of a code in each layer, 0 where it is in the model's dtype. Raises ValueError for what codes of latents do
    not have."""
    if kv is None:
        return [FP8 if fp8 else 0] * layers
    own = {"mode": "full", "rotation": "hadamard", "keys": "mse", "values": "mse"}
    wrong = [f"{name}={getattr(kv, name)}" for name, value in own.items() if getattr(kv, name) != value]
    rates = [kv.rate(layer, layers) for layer in range(layers)]
    wrong += sorted({f"k{k}v{v}" for k, v in rates if k != v})
    if wrong:
        raise ValueError(
            f"turboquant: got {', '.join(wrong)} for a latent, which is key and value at once; allowed are one rate "
            "for both and mode=full, like turboquant:4,mode=full, with first, last, edge, exact, scale and seed"
        )
    return [0 if k == EXACT else k for k, _ in rates]


def token_bytes(bits: Sequence[int], rank: int, rope: int, exact_bytes: int) -> int:
    """Bytes that a token takes in all layers of these `code_bits`."""
    return sum(row_bytes(rank, rope, b) if b else (rank + rope) * exact_bytes for b in bits)
