"""NVFP4: what the bytes of a four-bit float linear mean, and how other tools write them.

A linear W [n, k] is stored as

    W[i, j] = E2M1(codes[i, j]) * scale[i, j // 16] * global_scale

E2M1 is sign, two exponent bits, one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Two neighbouring
columns share a byte, the even one in the low half: codes uint8 [n, k/2]. `scale` is float8 E4M3 [n, k/16], finite and
not negative; `global_scale` one float32, so chosen that the largest scale is E4M3's largest number, 448.

The same layer under two tools' names (read from their sources, November 2026):

    | NVIDIA ModelOpt  | compressed-tensors    | here          |                                          |
    |------------------|-----------------------|---------------|------------------------------------------|
    | weight           | weight_packed         | codes         | uint8 [n, k/2]                           |
    | weight_scale     | weight_scale          | scale         | E4M3 [n, k/16], rows not swizzled        |
    | weight_scale_2   | weight_global_scale   | global_scale  | compressed-tensors stores its RECIPROCAL |

Activations stay as they are: an `input_scale` or `input_global_scale` is not read. What onegraph writes is ModelOpt's
form.

**Cache rows** are another thing with functions of another name: a row of a KV cache or of an indexer carries no global
scale, and its codes and scales lie together, [..., d/2 + d/16] bytes: d/2 of codes, then d/16 of E4M3 scales.
"""

import math
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.files import quote
from onegraph.formats.weight import (
    FLOATS,
    WHOLE,
    Expected,
    Field,
    File,
    Part,
    Source,
    Tensors,
    WeightFormat,
    check_conversion,
)

GROUP = 16  # columns that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E2M1_RMS = 2.93  # of random codes
E4M3 = torch.float8_e4m3fn
RECIPROCAL = {"weight_scale_2": False, "weight_global_scale": True}
CODED = {
    "codes": Field(torch.uint8, rows=1, columns=2),
    "scale": Field(torch.uint8, rows=1, columns=GROUP, stored=(E4M3, torch.uint8)),
}


class NVFP4Format(WeightFormat):
    """codes uint8 [n, k/2]; scale uint8 [n, k/16], the bits of E4M3 numbers, which every part of torch can copy and
    compare; global_scale float32 [n], one a row, so that joined layers keep theirs."""

    name = "nvfp4"
    ops = "onegraph.ops.nvfp4_linear"
    group = GROUP
    fields: Mapping[str, Field] = MappingProxyType(CODED | {"global_scale": Field(torch.float32, rows=1)})
    stored = MappingProxyType(CODED | {"global_scale": Field(torch.float32, stored=FLOATS)})

    def names(self, file: Container[str], layer: str) -> dict[str, str]:
        packed = f"{layer}.weight_packed" in file
        suffixes = ("weight_packed", "weight_scale", "weight_global_scale")
        suffixes = suffixes if packed else ("weight", "weight_scale", "weight_scale_2")
        return {key: f"{layer}.{suffix}" for key, suffix in zip(self.stored, suffixes, strict=True)}

    def expected(self, file: File, layer: str, n: int, k: int, bias: bool = False) -> Expected:
        self.check_size(n, k)
        found: Expected = {f"{layer}.bias": ((n,), FLOATS)} if bias else {}
        for key, name in self.names(file, layer).items():
            if key in ("codes", "scale"):
                found[name] = self.stored[key].shape(n, k), self.stored[key].allowed
            else:  # one number, of no dimension or of some
                shape = file.info(name).shape if name in file else ()
                found[name] = shape if math.prod(shape) == 1 else (), FLOATS
        return found

    def read(self, source: Source, layer: str, part: Part = WHOLE) -> Tensors:
        names = self.names(source, layer)
        made = {key: source.read(names[key], self.stored[key], part) for key in ("codes", "scale")}
        bits = made["scale"].view(torch.uint8)
        source.require(
            ((bits & 0x7F < 0x7F) & (bits <= 0x80)).all(),
            lambda: f"{quote(names['scale'])} holds NaN or negative scales; the file is damaged, fetch it again",
        )
        made["scale"] = bits & 0x7F  # a negative zero is a zero
        rows = made["codes"].shape[:-1]
        made["global_scale"] = _factor(source, names["global_scale"]).expand(rows).contiguous()
        return made

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        super().fill(stored, k, generator)
        stored["scale"].view(E4M3).fill_(1.0)
        stored["global_scale"].fill_(k**-0.5 / E2M1_RMS)


NVFP4 = NVFP4Format()


def _factor(source: Source, name: str) -> Tensor:
    """A global scale as a factor, float32 []."""
    value = source.read(name, Field(torch.float32), WHOLE).reshape(())
    check_conversion(name, value.dtype, torch.float32)
    value = value.float()
    source.require(value > 0, lambda: f"tensor {quote(name)} is {value.item()}; a global scale is above zero")
    return 1 / value if RECIPROCAL[name.rpartition(".")[2]] else value


def written_config(kept: Iterable[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint of NVFP4 linears, where the modules `kept` stayed as they were: in
    ModelOpt's form, which `formats/published.py` reads, and vLLM and TensorRT-LLM."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": GROUP,
        "ignore": sorted(kept),
        "producer": {"name": "onegraph"},
    }
