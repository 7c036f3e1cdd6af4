"""A row of DeepSeek-V4's key-value state in FP8: what carries no position in E4M3, the rotary part in bfloat16.

    | bytes            | what                                                                               |
    |------------------|------------------------------------------------------------------------------------|
    | D - R            | E4M3 codes                                                                         |
    | 2 R              | rotary dimensions, bfloat16                                                        |
    | ceil((D - R)/64) | one scale for 64 codes, E8M0: the byte b means 2^(b - 127)                         |
    | to 16            | padding, so that every row begins at a multiple of 16                              |

592 bytes for D = 512 and R = 64, where bfloat16 takes 1024.
"""

import torch
from torch import Tensor

BLOCK = 64  # codes that share a scale
E4M3_MAX = 448.0


def row_bytes(dim: int, rope: int) -> int:
    """Bytes of a row of `dim` dimensions, the last `rope` of them rotary."""
    plain = dim - rope
    return -(-(plain + 2 * rope + -(-plain // BLOCK)) // 16) * 16


def pack_rows(x: Tensor, rope: int) -> Tensor:
    """x [..., D] of any float -> uint8 [..., row_bytes]."""
    dim, plain = x.shape[-1], x.shape[-1] - rope
    blocks = -(-plain // BLOCK)
    wide = torch.nn.functional.pad(x[..., :plain].float(), (0, blocks * BLOCK - plain)).unflatten(-1, (blocks, BLOCK))
    # The least power of two that brings the largest number to 448 or below: exponent bits, plus one if any bit is left.
    bits = (wide.abs().amax(-1) * (1 / E4M3_MAX)).view(torch.int32)
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(1, 254)
    codes = (wide / (exponent << 23).view(torch.float32).unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    rows = torch.zeros(*x.shape[:-1], row_bytes(dim, rope), dtype=torch.uint8, device=x.device)
    rows[..., :plain] = codes.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)[..., :plain]
    rows[..., plain : plain + 2 * rope] = x[..., plain:].to(torch.bfloat16).contiguous().view(torch.uint8)
    rows[..., plain + 2 * rope : plain + 2 * rope + blocks] = exponent.to(torch.uint8)
    return rows


def unpack_rows(rows: Tensor, dim: int, rope: int) -> Tensor:
    """uint8 [..., row_bytes] -> float32 [..., dim]."""
    plain, blocks = dim - rope, -(-(dim - rope) // BLOCK)
    codes = rows[..., :plain].contiguous().view(torch.float8_e4m3fn).float()
    scale = (rows[..., plain + 2 * rope : plain + 2 * rope + blocks].to(torch.int32) << 23).view(torch.float32)
    turned = rows[..., plain : plain + 2 * rope].contiguous().view(torch.bfloat16).float()
    return torch.cat((codes * scale.repeat_interleave(BLOCK, dim=-1)[..., :plain], turned), dim=-1)
