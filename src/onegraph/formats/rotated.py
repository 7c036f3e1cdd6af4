"""What formats share whose weights are rotated on both sides: a linear W [n, k] as integers Q [n, k] and scales,

    W = diag(out_scale * scale) @ H_n @ Q @ H_k @ diag(in_scale)

with H_d the orthonormal block Hadamard of `hadamard_block(d)`: blocks of at most 128, so that any slice of W at
multiples of 128 rows or columns is itself such a layer. `in_scale` carries the random signs and the per-channel scale
of the input side, `out_scale` those of the output side; `scale` is one float32, with the unit of Q already in it: a
loader multiplies out_scale by scale in float32 and is done. How Q is coded is the format's own (`e8p.py`,
`trellis.py`).
"""

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from onegraph.formats.dense import DENSE
from onegraph.formats.files import quote
from onegraph.formats.weight import FLOATS, WHOLE, Field, File, Part, Source, Tensors, WeightFormat

KEEP = 16  # in a rate map: the layer stays unquantized
MAX_BLOCK = 128
FORMAT_VERSION = 1
NAMES = "e8p", "trellis"  # `format` of a quantization_config that onegraph wrote


def hadamard_block(d: int) -> int:
    """Largest power of two that divides `d`, at most 128: the block of the Hadamard rotation of a dimension."""
    if d < 1:
        raise ValueError(f"a dimension of {d} cannot be rotated; it must be at least 1")
    return min(d & -d, MAX_BLOCK)


def check_bits(bits: object, allowed: Sequence[int], *, where: str = "bits") -> None:
    """Raises ValueError for a rate that is not among `allowed`."""
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed:
        raise ValueError(f"{where} is {bits!r}; allowed: {', '.join(map(str, allowed))}")


class RotatedFormat(WeightFormat):
    """A rotated format at one rate. Siblings that share an input have bit-identical in_scale, and so can be joined.

    Args:
        name: of the format. coded: fields of the codes, `codes` first. unit: Q = unit * w, for a weight w of
            variance about 1.
    """

    fuses = frozenset(("norm", "silu", "add"))
    mixes_rows = True

    def __init__(self, name: str, bits: int, coded: Mapping[str, Field], unit: float) -> None:
        self.rate, self.name, self.unit = bits, f"{name} at {bits} bit{'s' * (bits > 1)}", unit
        half = Field(torch.float16, columns=1, stored=FLOATS), Field(torch.float16, rows=1, stored=FLOATS)
        scale = Field(torch.float32, stored=FLOATS)
        self._stored = {**coded, "in_scale": half[0], "out_scale": half[1], "scale": scale}
        self.fields = {**coded, "in_scale": Field(torch.float32, columns=1), "out_scale": Field(torch.float32, rows=1)}

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
        for key, value in (("in_scale", 1.0), ("out_scale", 1.0), ("scale", k**-0.5 / self.unit)):
            stored[key].fill_(value)

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
        rows = [part["out_scale"].shape[-1] for part in parts]
        return len({hadamard_block(count) for count in (*rows, sum(rows))}) == 1 and super().joins(parts)


@dataclass(frozen=True, kw_only=True)
class RotatedConfig:
    """`quantization_config` of a checkpoint's config.json. A subclass says which format, and its rates.

    Args:
        bits: rate of every linear inside the blocks that `layers` does not name, and of experts.
        layers: full module name -> rate, only where it differs; 16 keeps the layer as the source has it. Experts are
            one layer a block and matrix: "model.layers.0.mlp.experts.gate_up_proj".
        lm_head, embed_tokens: their rate, None for unquantized. Quantizing either unties tied embeddings: the head is a
            linear like any other; the embedding is looked up by row, so its output side is not rotated (H_n = 1).
    """

    format: ClassVar[str]
    formats: ClassVar[Mapping[int, RotatedFormat]]

    bits: int
    layers: Mapping[str, int] = field(default_factory=dict)
    lm_head: int | None = None
    embed_tokens: int | None = None

    def __post_init__(self) -> None:
        rates = tuple(self.formats)
        check_bits(self.bits, rates)
        if not isinstance(self.layers, Mapping):
            raise ValueError(f"layers is {type(self.layers).__name__}; it must map module names to bits")
        for name, bits in self.layers.items():
            if not isinstance(name, str):
                raise ValueError(f"layers has the key {name!r}; keys are module names")
            check_bits(bits, (*rates, KEEP), where=f"layers[{name!r}]")
        for key in ("lm_head", "embed_tokens"):
            if getattr(self, key) is not None:
                check_bits(getattr(self, key), rates, where=key)

    @classmethod
    def matches(cls, data: Mapping[str, Any]) -> bool:
        """Whether onegraph wrote a quantization_config in this format. An unknown one is E8P's to refuse."""
        named = data.get("format") if data.get("format") in NAMES else NAMES[0]
        return data.get("quant_method") == "onegraph" and named == cls.format

    def format_of(self, layer: str, file: File | None = None) -> WeightFormat:
        """The format of a layer by its full module name; `file` is not asked."""
        bits = self.bits_of(layer)
        return DENSE if bits == KEEP else self.formats[bits]

    def check_layers(self, layers: Collection[str]) -> None:
        """Raises ValueError where the rate map names a linear that is none of `layers`, those of the blocks."""
        if unknown := [name for name in self.layers if name not in layers]:
            raise ValueError(f"quantization_config.layers names {unknown[0]!r}, which is no linear of a block here")

    def stacked(self, layer: str) -> bool:
        return self.bits_of(layer) != KEEP

    def ignored(self, name: str) -> bool:
        return False

    def renamed(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> Self:
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
            "format": self.format,
            "format_version": FORMAT_VERSION,
            "bits": self.bits,
            "layers": dict(sorted(self.layers.items())),
            "lm_head": self.lm_head,
            "embed_tokens": self.embed_tokens,
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Parse what `to_dict` wrote. Raises ValueError on another method, version, or a key it does not know."""
        if not isinstance(data, Mapping):
            raise ValueError(f"quantization_config is {type(data).__name__}; it must be an object")
        fixed = {"quant_method": "onegraph", "format": cls.format, "format_version": FORMAT_VERSION}
        free = {"bits", "layers", "lm_head", "embed_tokens"}
        version = data.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(
                f"quantization_config.format_version is {version}; this version reads {FORMAT_VERSION}: a newer "
                "onegraph wrote it, onegraph.json beside it says which; install that one or a later one"
            )
        if data.get("quant_method") == fixed["quant_method"] and data.get("format") not in NAMES:
            named = ", ".join(map(repr, NAMES))
            raise ValueError(f"quantization_config.format is {data.get('format')!r}; this version reads {named}")
        for key, value in fixed.items():
            if data.get(key) != value:
                raise ValueError(f"quantization_config.{key} is {data.get(key)!r}; this version reads {value!r}")
        if unknown := sorted(set(map(str, data)) - set(fixed) - free):
            known = ", ".join(sorted({*fixed, *free}))
            raise ValueError(f"quantization_config has the unknown key {', '.join(unknown)}; known: {known}")
        if "bits" not in data:
            raise ValueError(f"quantization_config has no bits; allowed: {', '.join(map(str, cls.formats))}")
        return cls(**{key: data[key] for key in free if key in data})


def fits(name: str, pattern: str) -> bool:
    """Whether a rate map's pattern (a name or a shell pattern) stands for the linear `name`."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def resolve_rates(
    patterns: Mapping[str, int], names: Iterable[str], bits: int, allowed: Sequence[int] = (2, 3, 4)
) -> dict[str, int]:
    """The `layers` of a config from names or shell patterns ("*.down_proj"); the last pattern that matches a name wins.

    Raises ValueError for a pattern that matches none of `names`: a misspelt map must not pass as the default rate.
    """
    names = list(names)
    rates: dict[str, int] = {}
    for pattern, rate in patterns.items():
        check_bits(rate, (*allowed, KEEP), where=f"the rate of {pattern!r}")
        matched = [name for name in names if fits(name, pattern)]
        if not matched:
            raise ValueError(f"the rate map names {pattern!r}, which matches no linear; linears are e.g. {names[:3]}")
        rates |= dict.fromkeys(matched, rate)
    return {name: rate for name, rate in rates.items() if rate != bits}
