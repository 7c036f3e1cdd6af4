"""E8P-RVQ: what the bytes of a quantized linear mean.

A linear W [n, k] is stored as small integers Q [n, k] and scales,

    W = diag(out_scale * scale) @ H_n @ Q @ H_k @ diag(in_scale)

with H_d the orthonormal block Hadamard of `hadamard_block(d)`: blocks of at most 128, so that any slice of W at
multiples of 128 rows or columns is itself such a layer. `in_scale` carries the random signs and the per-channel scale
of the input side, `out_scale` those of the output side; `scale` is one float32, with the unit of Q (1/4 or 1/16)
already in it: a loader multiplies out_scale by scale in float32 and is done.

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

import fnmatch
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.dense import DENSE
from onegraph.formats.files import quote
from onegraph.formats.weight import FLOATS, WHOLE, Field, File, Part, Source, Tensors, WeightFormat

BITS = (2, 3, 4)
KEEP = 16  # in a rate map: the layer stays unquantized
MAX_BLOCK = 128
FORMAT_VERSION = 1

STAGE_RATIO = {2: 1, 3: 2, 4: 4}  # how much finer the residual stage is than the first
UNIT = {2: 4, 3: 4, 4: 16}  # Q = UNIT * w


def hadamard_block(d: int) -> int:
    """Largest power of two that divides `d`, at most 128: the block of the Hadamard rotation of a dimension."""
    if d < 1:
        raise ValueError(f"a dimension of {d} cannot be rotated; it must be at least 1")
    return min(d & -d, MAX_BLOCK)


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
    _check_bits(bits)
    return {2: None, 3: torch.uint8, 4: torch.int16}[bits]


def _check_bits(bits: object, *, where: str = "bits", allowed: tuple[int, ...] = BITS) -> None:
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed:
        raise ValueError(f"{where} is {bits!r}; allowed: {', '.join(map(str, allowed))}")


@cache
def _resident_codebook(device: torch.device) -> Tensor:
    return codebook(device)  # 4 KB, one a device, so that it stays in cache across layers


class E8PFormat(WeightFormat):
    """E8P at one rate: 2, 3 or 4 bits. Siblings that share an input have bit-identical in_scale, and so can be joined.

    Raises ValueError for another rate.
    """

    ops = "onegraph.ops.e8p_weight"
    group = 8
    fuses = frozenset(("norm", "silu", "add"))
    mixes_rows = True

    def __init__(self, bits: int) -> None:
        _check_bits(bits)
        self.rate, self.name = bits, f"e8p at {bits} bits"
        coded = {"codes": Field(torch.int16, rows=1, columns=8)}
        if (dtype := residual_dtype(bits)) is not None:
            coded["residual"] = Field(dtype, rows=1, columns=8)
        half = Field(torch.float16, columns=1, stored=FLOATS), Field(torch.float16, rows=1, stored=FLOATS)
        self._stored = coded | {"in_scale": half[0], "out_scale": half[1], "scale": Field(torch.float32, stored=FLOATS)}
        self.fields = coded | {"in_scale": Field(torch.float32, columns=1), "out_scale": Field(torch.float32, rows=1)}

    @property
    def stored(self) -> Mapping[str, Field]:
        return self._stored

    def read(self, source: Source, layer: str, part: Part = WHOLE) -> Tensors:
        stored = {key: source.read(f"{layer}.{key}", field, part) for key, field in self.stored.items()}
        scale = stored["scale"]
        source.require(scale > 0, lambda: f"tensor {quote(f'{layer}.scale')} is {scale.item()}; a scale is above zero")
        return self.fold(stored)

    def fold(self, stored: Tensors) -> Tensors:
        scales = {
            "in_scale": stored["in_scale"].float(),
            "out_scale": stored["out_scale"].float() * stored["scale"].float(),
        }
        return {key: scales[key] if key in scales else stored[key] for key in self.fields}

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        super().fill(stored, k, generator)
        for key, value in (("in_scale", 1.0), ("out_scale", 1.0), ("scale", k**-0.5 / UNIT[self.rate])):
            stored[key].fill_(value)

    def constants(self, device: torch.device) -> Tensors:
        return {"codebook": _resident_codebook(device)}

    def after_norm(self, tensors: Tensors, weight: Tensor) -> Tensors:
        return tensors | {"in_scale": tensors["in_scale"] * weight.float()}

    def check_part(self, n: int, k: int, part: Part) -> None:
        super().check_part(n, k, part)
        for what, span, size in (("rows", part.rows, n), ("columns", part.columns, k)):
            if span is None:
                continue
            block, own = hadamard_block(size), hadamard_block(span[1] - span[0])
            if span[0] % block or own != block:
                raise ValueError(
                    f"{what} {span[0]}:{span[1]} of {size} cut a rotation block: the layer is rotated in blocks of "
                    f"{block}, the part would be in blocks of {own} from {span[0]} on"
                )

    def joins(self, parts: Sequence[Mapping[str, Tensor]]) -> bool:
        rows = [part["codes"].shape[-2] for part in parts]
        return len({hadamard_block(count) for count in (*rows, sum(rows))}) == 1 and super().joins(parts)


E8P = {bits: E8PFormat(bits) for bits in BITS}


@dataclass(frozen=True, kw_only=True)
class E8PConfig:
    """`quantization_config` of a checkpoint's config.json.

    Args:
        bits: rate of every linear inside the blocks that `layers` does not name, and of experts.
        layers: full module name -> rate, only where it differs; 16 keeps the layer as the source has it. Experts are
            one layer a block and matrix: "model.layers.0.mlp.experts.gate_up_proj".
        lm_head, embed_tokens: their rate, None for unquantized. Quantizing either unties tied embeddings: the head is a
            linear like any other; the embedding is looked up by row, so its output side is not rotated (H_n = 1).
    """

    bits: int
    layers: Mapping[str, int] = field(default_factory=dict)
    lm_head: int | None = None
    embed_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        if not isinstance(self.layers, Mapping):
            raise ValueError(f"layers is {type(self.layers).__name__}; it must map module names to bits")
        for name, bits in self.layers.items():
            if not isinstance(name, str):
                raise ValueError(f"layers has the key {name!r}; keys are module names")
            _check_bits(bits, where=f"layers[{name!r}]", allowed=(*BITS, KEEP))
        for key in ("lm_head", "embed_tokens"):
            if getattr(self, key) is not None:
                _check_bits(getattr(self, key), where=key)

    @staticmethod
    def matches(data: Mapping[str, Any]) -> bool:
        """Whether a quantization_config is one that onegraph wrote."""
        return data.get("quant_method") == "onegraph"

    def format_of(self, layer: str, file: File | None = None) -> WeightFormat:
        """The format of a layer by its full module name; `file` is not asked."""
        bits = self.bits_of(layer)
        return DENSE if bits == KEEP else E8P[bits]

    def check_layers(self, layers: Collection[str]) -> None:
        """Raises ValueError where the rate map names a linear that is none of `layers`, those of the blocks."""
        if unknown := [name for name in self.layers if name not in layers]:
            raise ValueError(f"quantization_config.layers names {unknown[0]!r}, which is no linear of a block here")

    def stacked(self, layer: str) -> bool:
        return self.bits_of(layer) != KEEP

    def ignored(self, name: str) -> bool:
        return False

    def renamed(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> "E8PConfig":
        return replace(self, layers=rename(dict(self.layers)))

    def bits_of(self, name: str) -> int:
        """Rate of the linear `name` (its full module name); 16 if it is kept."""
        if name in ("lm_head", "model.embed_tokens", "embed_tokens"):
            bits = self.lm_head if name == "lm_head" else self.embed_tokens
            return KEEP if bits is None else bits
        return self.layers.get(name, self.bits)

    def to_dict(self) -> dict[str, Any]:
        return {
            "quant_method": "onegraph",
            "format": "e8p",
            "format_version": FORMAT_VERSION,
            "bits": self.bits,
            "layers": dict(sorted(self.layers.items())),
            "lm_head": self.lm_head,
            "embed_tokens": self.embed_tokens,
        }

    @classmethod
    def from_dict(cls, data: object) -> "E8PConfig":
        """Parse what `to_dict` wrote. Raises ValueError on another method, version, or a key it does not know."""
        if not isinstance(data, Mapping):
            raise ValueError(f"quantization_config is {type(data).__name__}; it must be an object")
        fixed = {"quant_method": "onegraph", "format": "e8p", "format_version": FORMAT_VERSION}
        free = {"bits", "layers", "lm_head", "embed_tokens"}
        version = data.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(
                f"quantization_config.format_version is {version}; this version reads {FORMAT_VERSION}: a newer "
                "onegraph wrote it, onegraph.json beside it says which; install that one or a later one"
            )
        for key, value in fixed.items():
            if data.get(key) != value:
                raise ValueError(f"quantization_config.{key} is {data.get(key)!r}; this version reads {value!r}")
        if unknown := sorted(set(map(str, data)) - set(fixed) - free):
            known = ", ".join(sorted({*fixed, *free}))
            raise ValueError(f"quantization_config has the unknown key {', '.join(unknown)}; known: {known}")
        if "bits" not in data:
            raise ValueError("quantization_config has no bits; allowed: 2, 3, 4")
        return cls(**{key: data[key] for key in free if key in data})


def fits(name: str, pattern: str) -> bool:
    """Whether a rate map's pattern (a name or a shell pattern) stands for the linear `name`."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def resolve_rates(patterns: Mapping[str, int], names: Iterable[str], bits: int) -> dict[str, int]:
    """The `layers` of a config from names or shell patterns ("*.down_proj"); the last pattern that matches a name wins.

    Raises ValueError for a pattern that matches none of `names`: a misspelt map must not pass as the default rate.
    """
    names = list(names)
    rates: dict[str, int] = {}
    for pattern, rate in patterns.items():
        _check_bits(rate, where=f"the rate of {pattern!r}", allowed=(*BITS, KEEP))
        matched = [name for name in names if fits(name, pattern)]
        if not matched:
            raise ValueError(f"the rate map names {pattern!r}, which matches no linear; linears are e.g. {names[:3]}")
        rates |= dict.fromkeys(matched, rate)
    return {name: rate for name, rate in rates.items() if rate != bits}
