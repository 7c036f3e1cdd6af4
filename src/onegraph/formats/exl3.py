"""EXL3: the trellis-coded weights that exllamav3 publishes, read as the trellis of `trellis.py`.

The file of a linear of n outputs and k inputs, with W = diag(svh) H_n Q H_k diag(suh) and Hadamard blocks of 128:

| tensor    | dtype, shape                 |                                                              |
|-----------|------------------------------|--------------------------------------------------------------|
| trellis   | int16 [k/16, n/16, 16 K]     | of each tile of 16 x 16 a ring of 256 K bits, K from 1 to 8  |
| suh, svh  | float16 [k], [n]             | signs and scales                                             |
| su, sv    | int16 [k/16], [n/16]         | in old files instead: signs, a set bit is -1, lowest first   |
| mcg, mul1 | int32 []                     | the multiplier of the code; neither: the code is 3inst       |
| bias      | float16 [n]                  |                                                              |

A ring is a string of 32-bit words, highest bit first. The state of weight p is the 16 bits that end with the string's
bit K (p + 1) - 1. Weight p = 8 l + e belongs to lane l of m16n8k16: output l // 4 + 8 (e // 4) and input
2 (l % 4) + 8 (e // 2 % 2) + e % 2 of the tile.

With its words in reverse order a tile is a ring as `trellis.py` has it, whose weight p is exllamav3's 255 - p: outputs
and inputs of the tile run backwards. Output i is then 15 - i, which is i with four bits flipped. In a Hadamard matrix
that flips the signs of each row whose number has an odd count of those bits. So loading reverses words and flips signs
of scales; the codes keep their K bits, and nothing is rounded.

exllamav3 pads n and k with zeros to multiples of 128, the bias too. Padded linears are decoded at load and cut
(`Loader`); padded experts are refused.

Sources, read November 2026: exllamav3 1.4.1 modules/quant/exl3.py, modules/quant/exl3_lib/quantize.py,
exllamav3_ext/quant/codebook.cuh, pack.cu and reconstruct.cu, conversion/compile.py.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.dense import DENSE
from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.rotated import MAX_BLOCK
from onegraph.formats.trellis import BITS, INST3, MCG, MUL1, TILE, TrellisFormat
from onegraph.formats.weight import FLOATS, WHOLE, Expected, Field, File, Part, Shape, Source, Tensors, WeightFormat

CODEBOOKS = {"3inst": INST3, "mcg": MCG, "mul1": MUL1}
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
UNITS = {INST3: 1.2437, MCG: 1.2441, MUL1: 1.0003}  # the standard deviation of the values of all states


@dataclass(frozen=True)
class _Tiles(Field):
    """[k/16, n/16, each]."""

    def shape(self, n: int, k: int) -> Shape:
        return -(-k // self.columns), -(-n // self.rows), self.each

    def cut(self, tensor: Tensor, part: Part) -> Tensor:
        for dim, (span, unit) in enumerate(((part.columns, self.columns), (part.rows, self.rows))):
            if span is not None:
                tensor = tensor.narrow(dim, span[0] // unit, (span[1] - span[0]) // unit)
        return tensor


class EXL3Format(TrellisFormat):
    """One rate, 1 to 8 bits, and codebook of exllamav3."""

    def __init__(self, bits: int, codebook: str) -> None:
        super().__init__(bits)
        self.code = CODEBOOKS[codebook]
        self.name, self.unit, self.codebook = (
            f"exl3 {codebook} at {bits} bit{'s' * (bits > 1)}",
            UNITS[self.code],
            codebook,
        )
        half = Field(torch.float16, columns=1, stored=FLOATS), Field(torch.float16, rows=1, stored=FLOATS)
        tiles = _Tiles(torch.int16, rows=TILE, columns=TILE, each=TILE * bits)
        self._stored = {"codes": tiles, "in_scale": half[0], "out_scale": half[1]}
        if codebook in MULTIPLIERS:
            self._stored["multiplier"] = Field(torch.int32)

    def _fields(self, file: Container[str], layer: str) -> dict[str, tuple[str, Field]]:
        """Field of `stored` -> the tensor that the file has for it, and that tensor's field."""
        found = {"codes": (f"{layer}.trellis", self.stored["codes"])}
        for key, suffix, signs in (
            ("in_scale", "su", Field(torch.int16, columns=TILE)),
            ("out_scale", "sv", Field(torch.int16, rows=TILE)),
        ):
            old = f"{layer}.{suffix}" in file
            found[key] = (f"{layer}.{suffix}", signs) if old else (f"{layer}.{suffix}h", self.stored[key])
        if "multiplier" in self.stored:
            found["multiplier"] = f"{layer}.{self.codebook}", self.stored["multiplier"]
        return found

    def names(self, file: Container[str], layer: str) -> dict[str, str]:
        return {key: name for key, (name, _) in self._fields(file, layer).items()}

    def stored_size(self, file: File, layer: str, n: int, k: int) -> tuple[int, int]:
        """exllamav3 pads both with zeros to multiples of 128."""
        name, tiles = self._fields(file, layer)["codes"]
        padded = -(-n // MAX_BLOCK) * MAX_BLOCK, -(-k // MAX_BLOCK) * MAX_BLOCK
        return padded if name in file and tuple(file.info(name).shape) == tiles.shape(*padded) else (n, k)

    def expected(self, file: File, layer: str, n: int, k: int, bias: bool = False) -> Expected:
        fields = self._fields(file, layer)
        n, k = self.stored_size(file, layer, n, k)
        self.check_size(n, k)
        found: Expected = {name: (field.shape(n, k), field.allowed) for name, field in fields.values()}
        return found | ({f"{layer}.bias": ((n,), FLOATS)} if bias else {})

    def read(self, source: Source, layer: str, part: Part = WHOLE) -> Tensors:
        fields = self._fields(source, layer)
        found = {key: source.read(name, field, part) for key, (name, field) in fields.items()}
        if "multiplier" in found:
            name, value = fields["multiplier"][0], found["multiplier"].long() & 0xFFFFFFFF
            wanted = MULTIPLIERS[self.codebook]
            source.require(
                value == wanted,
                lambda: f"tensor {quote(name)} is {int(value):#x}; exllamav3's {self.codebook} has {wanted:#x}",
            )
        words = found["codes"].transpose(0, 1).contiguous().view(torch.int32).flip(-1)
        scales = {key: _scale(found[key]) for key in ("in_scale", "out_scale")}
        return {"codes": words.view(torch.int16).flatten(1), **scales}

    def check(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Of `paired` experts in_scale is [E, 2, k]."""
        codes, in_scale = tensors.get("codes"), tensors.get("in_scale")
        if codes is not None and in_scale is not None and in_scale.dim() == codes.dim() == 3 and in_scale.shape[1] == 2:
            tensors = {**tensors, "in_scale": in_scale[:, 0]}
        return super().check(tensors)

    def paired(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensors | None:
        """exllamav3 scales the inputs of gate and of up each for itself."""
        if len(parts) != 2 or len(parts[0]["out_scale"]) != len(parts[1]["out_scale"]):
            return None
        return {
            key: torch.stack([part[key] for part in parts])
            if key == "in_scale"
            else torch.cat([part[key] for part in parts])
            for key in self.fields
        }

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        WeightFormat.fill(self, stored, k, generator)
        stored["in_scale"].fill_(k**-0.5 / self.unit)
        stored["out_scale"].fill_(1.0)
        if "multiplier" in stored:
            stored["multiplier"].fill_(MULTIPLIERS[self.codebook] - 2**32)


def _scale(stored: Tensor) -> Tensor:
    """float32 [d] with the signs of a tile that runs backwards, of suh, svh [d] or su, sv int16 [d/16]."""
    bits = torch.arange(TILE, dtype=torch.int32, device=stored.device)
    if stored.dtype == torch.int16:
        stored = (1 - 2 * (stored.int().unsqueeze(-1) >> bits & 1)).flatten()
    odd = bits ^ bits >> 1
    odd = (odd ^ odd >> 2) & 1
    return stored.float() * (1 - 2 * odd).repeat(len(stored) // TILE)


EXL3 = {(bits, codebook): EXL3Format(bits, codebook) for bits in BITS for codebook in CODEBOOKS}


@dataclass(frozen=True)
class EXL3Config:
    """`quantization_config` of exllamav3. Rates and codebooks of layers follow from their tensors."""

    data: Mapping[str, Any] = field(hash=False)

    @staticmethod
    def matches(data: Mapping[str, Any]) -> bool:
        return data.get("quant_method") == "exl3"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EXL3Config":
        """Raises ValueError for a codebook that is not known."""
        if (named := data.get("codebook")) is not None and named not in CODEBOOKS:
            known = ", ".join(CODEBOOKS)
            raise ValueError(f"quantization_config.codebook is {quote(named, 40)}; EXL3 is read with {known}")
        return cls(dict(data))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)

    def format_of(self, layer: str, file: File) -> WeightFormat:
        """By the shape of the layer's trellis and the multiplier beside it. Raises CheckpointError for a shape that no
        tiles have, and for two multipliers."""
        name = f"{layer}.trellis"
        if name not in file:
            return DENSE
        shape = tuple(file.info(name).shape)
        if len(shape) != 3 or shape[2] % TILE or shape[2] // TILE not in BITS:
            raise CheckpointError(
                f"tensor {quote(name)} has shape {list(shape)}; EXL3 has [k/16, n/16, 16 * bits] with bits from 1 to 8"
            )
        marks = [mark for mark in MULTIPLIERS if f"{layer}.{mark}" in file]
        if len(marks) > 1:
            raise CheckpointError(
                f"there are {quote(f'{layer}.mcg')} and {quote(f'{layer}.mul1')}; a layer has one code"
            )
        return EXL3[shape[2] // TILE, marks[0] if marks else "3inst"]

    def check_layers(self, layers: Collection[str]) -> None:
        """The config names no layers."""

    def stacked(self, layer: str) -> None:
        """As the family publishes them."""

    def ignored(self, name: str) -> bool:
        return False

    def renamed(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> "EXL3Config":
        return self
