"""Trellis-coded weights: what the bytes of a quantized linear mean.

A linear is stored as `rotated.py` tells. Its integers Q [n, k] come in tiles of 16 outputs by 16 inputs, each coded by
itself at K bits per weight, 1 to 8:

    codes int16 [n / 16, k K]      tile (i, j) is codes[i, 16 K j : 16 K (j + 1)], a string of 256 K bits

Bit b of the string is bit b % 16 of word b // 16. The string is a ring. Weight p of the tile, 0 to 255, has the state

    s_p = bits K p to K p + 15 of the ring, the first one lowest

so that neighbours share 16 - K bits (the bitshift trellis of QTIP, arXiv 2406.11235, section 3.1, tail-biting), and any
weight is decoded by itself. Its integer is computed from the state (exllamav3's `mul1`, a relative of QTIP's 1MAD):

    Q = the sum of the four bytes of (0x83DCD12D s_p mod 2^32), less 510          in -510 to 510, near to a Gaussian

Weights lie in the order in which m16n8k16 takes them: lane l = p // 8 = 4 g + t of a warp has the outputs g and g + 8
of the tile and the inputs 4 t to 4 t + 3, the first output's four weights in front.

That is the code `OWN`. Weights read from exllamav3's files (`exl3.py`) have the same ring and the same states. A lane
has the inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. In place of Q are float16 numbers:

    INST3   the sum of the two float16 in ((89226354 s_p + 64248484 mod 2^32) & 0x8FFF8FFF) ^ 0x3B603B60
    MCG     likewise of 0xCBAC1FED s_p mod 2^32
    MUL1    (1024 + the sum of the four bytes of (0x83DCD12D s_p mod 2^32)) * 0x1EEE + 0xC931, rounded once
"""

import torch
from torch import Tensor

from onegraph.formats.rotated import RotatedConfig, RotatedFormat, check_bits
from onegraph.formats.weight import Field

BITS = tuple(range(1, 9))
TILE = 16  # outputs and inputs
WEIGHTS = TILE * TILE
STATE = 16  # bits
STATES = 1 << STATE
MULTIPLIER, OFFSET = 0x83DCD12D, 510
OWN, INST3, MCG, MUL1 = CODES = range(4)
_HALVES = {INST3: (89226354, 64248484), MCG: (0xCBAC1FED, 0)}  # factor and addend of a state
MUL1_UNIT, MUL1_OFFSET = 0x6EE * 2.0**-18, -0x531 * 2.0**-7  # 0x1EEE and 0xC931 as float16
UNIT = 147.75  # Q = UNIT * w: the standard deviation of Q over all states


def values(states: Tensor, code: int = OWN) -> Tensor:
    """Values of states [...], of any integer dtype, as int16 [...]; of another code than `OWN`, float16."""
    state = states.long() & (STATES - 1)
    if code in _HALVES:
        factor, addend = _HALVES[code]
        pair = (state * factor + addend & 0x8FFF8FFF ^ 0x3B603B60).int().unsqueeze(-1).view(torch.float16)
        return pair[..., 0] + pair[..., 1]
    product = state * MULTIPLIER
    total: Tensor = (product & 0xFF) + (product >> 8 & 0xFF) + (product >> 16 & 0xFF) + (product >> 24 & 0xFF)
    if code == MUL1:  # exact in float32, so that the float16 is rounded once
        return ((total + 1024).float() * MUL1_UNIT + MUL1_OFFSET).half()
    return (total - OFFSET).to(torch.int16)


def positions(device: torch.device | str = "cpu", code: int = OWN) -> Tensor:
    """int64 [16, 16]: the place in a tile's string of the weight of each output and input."""
    row, column = torch.arange(TILE, device=device).view(-1, 1), torch.arange(TILE, device=device)
    if code != OWN:  # inputs 0, 1, 8, 9, 2, 3 and so on
        column = column % 8 // 2 * 4 + column // 8 * 2 + column % 2
    places: Tensor = row % 8 * 32 + column // 4 * 8 + row // 8 * 4 + column % 4
    return places


def states(codes: Tensor, bits: int, places: Tensor) -> Tensor:
    """int32 [..., tiles, places]: states of the weights `places`, int64 [P], of tiles int16 [..., tiles * 16 K]."""
    words = codes.unflatten(-1, (-1, TILE * bits)).int() & 0xFFFF
    first = places * bits
    low, high = first // 16, (first // 16 + 1) % (TILE * bits)
    both: Tensor = words[..., low] | words[..., high] << 16
    return both >> (first % 16).int() & (STATES - 1)


def decode(codes: Tensor, bits: int, code: int = OWN) -> Tensor:
    """[..., n, k]: Q of codes int16 [..., n / 16, k K], int16; of another code than `OWN`, float16."""
    *lead, rows, _ = codes.shape
    found = states(codes, bits, positions(codes.device, code).flatten())
    if found.numel() > 2 * STATES:  # looking values up is quicker than computing each
        table = values(torch.arange(STATES, device=codes.device), code)
        q = table.index_select(0, found.flatten()).view(found.shape)
    else:
        q = values(found, code)
    tiles: Tensor = q.unflatten(-1, (TILE, TILE))
    return tiles.transpose(-2, -3).reshape(*lead, rows * TILE, -1)


def decode_rows(codes: Tensor, bits: int, rows: Tensor) -> Tensor:
    """int16 [N, k]: rows int64 [N] of Q, of codes int16 [n / 16, k K]."""
    places = positions(codes.device)[rows % TILE]  # [N, 16]
    words = codes[rows // TILE].unflatten(-1, (-1, TILE * bits)).int() & 0xFFFF  # [N, tiles, 16 K]
    first = places * bits
    low, high = (
        at.unsqueeze(1).expand(-1, words.shape[1], -1) for at in (first // 16, (first // 16 + 1) % (16 * bits))
    )
    both = words.gather(2, low) | words.gather(2, high) << 16
    return values(both >> (first % 16).int().unsqueeze(1) & (STATES - 1)).flatten(1)


def pack(states: Tensor, bits: int) -> Tensor:
    """int16 [..., 16 K]: the strings of tiles whose weights have the states int [..., 256], in the order of places."""
    places = torch.arange(16, dtype=torch.int32, device=states.device)
    ring = states.int().unsqueeze(-1) >> places[:bits] & 1
    words: Tensor = ring.flatten(-2).unflatten(-1, (-1, 16)) << places
    return words.sum(-1, dtype=torch.int32).to(torch.int16)


class TrellisFormat(RotatedFormat):
    """The trellis at one rate, 1 to 8 bits. Raises ValueError for another rate."""

    ops = "onegraph.ops.trellis_weight"
    group = TILE
    code = OWN

    def __init__(self, bits: int) -> None:
        check_bits(bits, BITS)
        codes = Field(torch.int16, rows=TILE, columns=TILE, each=TILE * bits)
        super().__init__("trellis", bits, {"codes": codes}, UNIT)

    def check_size(self, n: int, k: int) -> None:
        if n < 1 or k < 1 or n % TILE or k % TILE:
            raise ValueError(
                f"a linear of {n} x {k} cannot be stored as {self.name}; tiles have {TILE} outputs and {TILE} inputs, "
                f"so both must be multiples of {TILE}"
            )


TRELLIS = {bits: TrellisFormat(bits) for bits in BITS}


class TrellisConfig(RotatedConfig):
    """`quantization_config` of a checkpoint whose weights are trellis-coded."""

    format = "trellis"
    formats = TRELLIS
