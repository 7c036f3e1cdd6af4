"""TurboQuant KV cache: what the bytes of a page mean.

The cache of a layer is uint8 [pages, kv_heads, page_bytes]. A page is page_size / 16 **blocks** of 16 tokens; a block
is contiguous and holds everything of its tokens, in sections: the codes' planes of the keys, those of the values, then
the norms. Nothing is padded: a token and head take exactly `bytes_per_token_head`.

**Code.** A level of a symmetric codebook by its magnitude and sign: code = 2 * rank of |level| (0 the smallest)
+ (1 if negative). Whatever maps codes to levels lists them in this order: +c0, -c0, +c1, -c1, ...

**Plane.** 4-, 2- and 1-bit codes are one plane of that width; a 3-bit code is a plane of its two low bits and one of
its high bit. The `prod` variant spends one of its bits on a plane of the signs (1: negative) of the residual's
projection, so a variant with b bits has codes of b - 1 bits (none at b = 1). A row of a plane is head_dim * width / 8
bytes, 2 * width for each 16 dimensions. Neighbours (2k, 2k + 1) take the same place in the low and in the high nibble
of a byte, so that after one shift and one mask every nibble is the code of a dimension, which is what the byte-permute
instruction takes as selectors. Of 16 dimensions, pair k (0 to 7) stands, from bit 0 (and bit 4) upwards,

    width 4: in byte k      width 2: in byte k // 2, at bit 2 (k % 2)      width 1: in byte k // 2 % 2, at bit
                                                                           k % 2 + 2 (k // 4)

where width 1 is such that words of the two planes of 3-bit codes line up with a shift.

**Order in a section.** Keys: rows token by token. Values: the rows of tokens 2p and 2p + 1 interleaved byte by byte,
because the product with the values runs along tokens and wants two of them in one register. Norms: float16, one a token
(`prod`: the norms, then the norms of the residuals). A byte belongs to one token, so tokens are written independently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import torch
from torch import Tensor

BLOCK = 16  # tokens
VARIANTS = ("mse", "prod")
PLANES = {0: (), 1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}  # code bits -> widths of their planes, low bits first


@dataclass(frozen=True)
class Section:
    """A section of a block: `row` bytes per token, `offset` bytes from the block's start. `paired`: tokens 2p, 2p + 1
    are interleaved byte by byte."""

    row: int
    offset: int
    paired: bool


@dataclass(frozen=True)
class Coded:
    """Quantized vectors of tokens.

    Attributes:
        codes: uint8 [..., tokens, head_dim]; of `code_bits` bits each (zeros where that is 0).
        norms: float16 [..., tokens].
        signs: uint8 [..., tokens, head_dim], 1 where the projected residual is negative; None unless `prod`.
        residual_norms: float16 [..., tokens]; None unless `prod`.
    """

    codes: Tensor
    norms: Tensor
    signs: Tensor | None = None
    residual_norms: Tensor | None = None


@dataclass(frozen=True)
class TurboQuantLayout:
    """Sizes and offsets of a page. Raises ValueError for what the format does not have."""

    head_dim: int
    k_bits: int
    v_bits: int
    k_variant: str = "mse"
    v_variant: str = "mse"
    page_size: int = BLOCK

    def __post_init__(self) -> None:
        for name, bits, variant in (("k", self.k_bits, self.k_variant), ("v", self.v_bits, self.v_variant)):
            if bits not in (1, 2, 3, 4):
                raise ValueError(f"{name}_bits is {bits}; TurboQuant stores 1, 2, 3 or 4 bits")
            if variant not in VARIANTS:
                raise ValueError(f"{name}_variant is {variant!r}; allowed are 'mse' and 'prod'")
        if self.head_dim < 16 or self.head_dim % 16:
            raise ValueError(f"head_dim is {self.head_dim}; TurboQuant pages need a multiple of 16")
        if self.page_size < BLOCK or self.page_size % BLOCK:
            raise ValueError(f"page_size is {self.page_size}; TurboQuant pages hold a multiple of {BLOCK} tokens")

    @property
    def k_code_bits(self) -> int:
        """Bits of a key's code: one less where `prod` keeps a sign beside it."""
        return self.k_bits - (self.k_variant == "prod")

    @property
    def v_code_bits(self) -> int:
        return self.v_bits - (self.v_variant == "prod")

    @property
    def bytes_per_token_head(self) -> int:
        """Bytes that one token takes in one kv head: K and V codes and norms."""
        norms = 2 * ((1 + (self.k_variant == "prod")) + (1 + (self.v_variant == "prod")))
        return self.head_dim * (self.k_bits + self.v_bits) // 8 + norms

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.bytes_per_token_head

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one kv head."""
        return self.page_size * self.bytes_per_token_head

    def cache_shape(self, pages: int, kv_heads: int) -> tuple[int, int, int]:
        """Shape of a layer's cache, uint8."""
        return pages, kv_heads, self.page_bytes

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """In the order of `pack_tokens`: K planes, K signs, V planes, V signs, K norms (and residual's), V norms."""
        k_rows = [self.head_dim * w // 8 for w in (*PLANES[self.k_code_bits], *([1] * (self.k_variant == "prod")))]
        v_rows = [self.head_dim * w // 8 for w in (*PLANES[self.v_code_bits], *([1] * (self.v_variant == "prod")))]
        norms = self.bytes_per_token_head - sum(k_rows) - sum(v_rows)
        rows = [(r, False) for r in k_rows] + [(r, True) for r in v_rows] + [(2, False)] * (norms // 2)
        found, offset = [], 0
        for row, paired in rows:
            found.append(Section(row, offset, paired))
            offset += row * BLOCK
        return tuple(found)

    def offsets(self, slots: Tensor) -> Tensor:
        """Where in a page the bytes of a token stand: int64 slots [...] (0 <= slot < page_size) -> int64
        [..., bytes_per_token_head], in the order of `pack_tokens`."""
        token = (slots % BLOCK).unsqueeze(-1)
        parts = []
        for s in self.sections:
            byte = torch.arange(s.row, device=slots.device)
            within = token // 2 * (2 * s.row) + 2 * byte + token % 2 if s.paired else token * s.row + byte
            parts.append(s.offset + within)
        return (slots // BLOCK).unsqueeze(-1) * self.block_bytes + torch.cat(parts, dim=-1)


@lru_cache(maxsize=64)
def layout_of(head_dim: int, k_levels: int, v_levels: int, page_bytes: int) -> TurboQuantLayout:
    """The layout, of variant `mse`, of a cache with codebooks of so many levels and pages of `page_bytes` a head."""
    for name, levels in (("k", k_levels), ("v", v_levels)):
        if levels not in (2, 4, 8, 16):
            raise ValueError(f"{name}_codebook is of {levels} levels; TurboQuant stores codes of 2, 4, 8 or 16")
    bits = k_levels.bit_length() - 1, v_levels.bit_length() - 1
    layout = TurboQuantLayout(head_dim, *bits)
    if page_bytes == 0 or page_bytes % layout.block_bytes:
        raise ValueError(
            f"a page of the cache has {page_bytes} bytes per head; with {layout.bytes_per_token_head} bytes per token "
            f"it must be a multiple of {layout.block_bytes}"
        )
    return TurboQuantLayout(head_dim, *bits, page_size=page_bytes // layout.bytes_per_token_head)


def _pack_plane(values: Tensor, width: int) -> Tensor:
    """uint8 [..., head_dim] of values below 2^width -> uint8 [..., head_dim * width / 8]."""
    pairs = values[..., 0::2] | (values[..., 1::2] << 4)
    if width == 4:
        return pairs
    pairs = pairs[..., 0::2] | (pairs[..., 1::2] << width)
    if width == 2:
        return pairs
    halves = pairs.unflatten(-1, (-1, 2, 2))  # of 16 dimensions, then bytes
    packed: Tensor = halves[..., 0, :] | (halves[..., 1, :] << 2)
    return packed.flatten(-2)


def _unpack_plane(row: Tensor, width: int) -> Tensor:
    """Inverse of `_pack_plane`."""
    if width == 1:
        groups = row.unflatten(-1, (-1, 2))
        row = torch.stack((groups & 0x33, (groups >> 2) & 0x33), dim=-2).flatten(-3)
    if width < 4:
        mask = 0x11 * ((1 << width) - 1)
        row = torch.stack((row & mask, (row >> width) & mask), dim=-1).flatten(-2)
    return torch.stack((row & 15, row >> 4), dim=-1).flatten(-2)


def _pack_planes(coded: Coded, code_bits: int, variant: str) -> list[Tensor]:
    planes, shift = [], 0
    for width in PLANES[code_bits]:
        planes.append(_pack_plane((coded.codes >> shift) & ((1 << width) - 1), width))
        shift += width
    if variant == "prod":
        assert coded.signs is not None
        planes.append(_pack_plane(coded.signs, 1))
    return planes


def _norm_bytes(coded: Coded, variant: str) -> list[Tensor]:
    norms = [coded.norms]
    if variant == "prod":
        assert coded.residual_norms is not None
        norms.append(coded.residual_norms)
    return [n.contiguous().unsqueeze(-1).view(torch.uint8) for n in norms]


def pack_tokens(layout: TurboQuantLayout, keys: Coded, values: Coded) -> Tensor:
    """The bytes of each token, uint8 [..., tokens, bytes_per_token_head]: put byte i of a token at
    `layout.offsets(slot)[i]` of its page."""
    rows = _pack_planes(keys, layout.k_code_bits, layout.k_variant)
    rows += _pack_planes(values, layout.v_code_bits, layout.v_variant)
    rows += _norm_bytes(keys, layout.k_variant) + _norm_bytes(values, layout.v_variant)
    return torch.cat(rows, dim=-1)


def unpack_tokens(layout: TurboQuantLayout, rows: Tensor) -> tuple[Coded, Coded]:
    """Inverse of `pack_tokens`: uint8 [..., tokens, bytes_per_token_head] -> keys, values."""
    return _unpack(layout, rows.split([s.row for s in layout.sections], dim=-1))


def _unpack(layout: TurboQuantLayout, sections: Sequence[Tensor]) -> tuple[Coded, Coded]:
    """Keys, values of uint8 [..., tokens, row] of each section."""
    parts = iter(sections)

    def planes(code_bits: int, variant: str) -> tuple[Tensor, Tensor | None]:
        shift, found = 0, []
        for width in PLANES[code_bits]:
            found.append(_unpack_plane(next(parts), width) << shift)
            shift += width
        signs = _unpack_plane(next(parts), 1) if variant == "prod" else None
        if not found:
            assert signs is not None
            return torch.zeros_like(signs), signs
        return reduce(torch.bitwise_or, found), signs

    def norm() -> Tensor:
        result: Tensor = next(parts).contiguous().view(torch.float16).squeeze(-1)
        return result

    k_codes, k_signs = planes(layout.k_code_bits, layout.k_variant)
    v_codes, v_signs = planes(layout.v_code_bits, layout.v_variant)
    keys = Coded(k_codes, norm(), k_signs, norm() if layout.k_variant == "prod" else None)
    values = Coded(v_codes, norm(), v_signs, norm() if layout.v_variant == "prod" else None)
    return keys, values


def pack_pages(layout: TurboQuantLayout, keys: Coded, values: Coded) -> Tensor:
    """Whole pages: tensors of page_size tokens -> uint8 [..., page_bytes]."""
    rows = pack_tokens(layout, keys, values).unflatten(-2, (-1, BLOCK))  # [..., blocks, BLOCK, bytes]
    parts = rows.split([s.row for s in layout.sections], dim=-1)
    blocks = [
        (part.unflatten(-2, (-1, 2)).transpose(-1, -2) if s.paired else part).flatten(rows.dim() - 2)
        for s, part in zip(layout.sections, parts, strict=True)
    ]
    return torch.cat(blocks, dim=-1).flatten(-2)


def unpack_pages(layout: TurboQuantLayout, pages: Tensor) -> tuple[Coded, Coded]:
    """uint8 [..., page_bytes] -> keys, values of [..., page_size] tokens."""
    blocks = pages.unflatten(-1, (-1, layout.block_bytes))
    sections = []
    for s, part in zip(layout.sections, blocks.split([BLOCK * s.row for s in layout.sections], dim=-1), strict=True):
        if s.paired:
            part = part.unflatten(-1, (-1, s.row, 2)).transpose(-1, -2)
        sections.append(part.reshape(*pages.shape[:-1], layout.page_size, s.row))
    return _unpack(layout, sections)
