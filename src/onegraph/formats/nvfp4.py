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
    | input_scale      | input_global_scale    | input_scale   | compressed-tensors stores its RECIPROCAL |

What onegraph writes is ModelOpt's form.

**Cache rows** are another thing with functions of another name: a row of a KV cache or of an indexer carries no global
scale, and its codes and scales lie together, [..., d/2 + d/16] bytes: d/2 of codes, then d/16 of E4M3 scales.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

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
RECIPROCAL = {"weight_scale_2": False, "weight_global_scale": True, "input_scale": False, "input_global_scale": True}

Activations = Literal["dynamic", "frozen"]


class NVFP4Format(WeightFormat):
    """codes uint8 [n, k/2]; scale uint8 [n, k/16], the bits of E4M3 numbers, which every part of torch can copy and
    compare; global_scale float32 [n], one a row, so that joined layers keep theirs.

    Args:
        activations: None leaves them as they are (weights only). "dynamic" quantizes them too (W4A4), with a global
            scale that the device makes from each call's x. "frozen" takes `input_scale`, float32 []: the file's, or
            what `quant.nvfp4.observing` saw.
        prompts: only where x is [B, Q, k] with a prompt's Q (`ops.nvfp4_linear.FEW`); routed and grouped linears, and
            steps of few tokens a row, leave activations as they are.
    """

    ops = "onegraph.ops.nvfp4_linear"
    group = GROUP

    def __init__(self, activations: Activations | None = None, *, prompts: bool = False) -> None:
        if activations not in (None, "dynamic", "frozen"):
            raise ValueError(f"activations is {activations!r}; allowed: None, 'dynamic', 'frozen'")
        self.activations, self.prompts, self.rounds_inputs = activations, prompts, activations is not None
        where = " prompts" if prompts else ""
        self.name = "nvfp4" if activations is None else f"nvfp4, {activations} W4A4{where}"
        coded = {
            "codes": Field(torch.uint8, rows=1, columns=2),
            "scale": Field(torch.uint8, rows=1, columns=GROUP, stored=(E4M3, torch.uint8)),
        }
        factor = {"input_scale": Field(torch.float32, stored=FLOATS)} if activations == "frozen" else {}
        self.fields = coded | {"global_scale": Field(torch.float32, rows=1)} | factor
        self._stored = coded | {"global_scale": Field(torch.float32, stored=FLOATS)} | factor

    @property
    def stored(self) -> Mapping[str, Field]:
        return self._stored

    def names(self, file: Container[str], layer: str) -> dict[str, str]:
        packed = f"{layer}.weight_packed" in file
        suffixes = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
        suffixes = suffixes if packed else ("weight", "weight_scale", "weight_scale_2", "input_scale")
        names = dict(zip(("codes", "scale", "global_scale", "input_scale"), suffixes, strict=True))
        found = {key: f"{layer}.{suffix}" for key, suffix in names.items()}
        return found if found["input_scale"] in file else {key: found[key] for key in list(found)[:3]}

    def as_published(self, file: File, layer: str) -> WeightFormat:
        """Without an input_scale it was published with weights alone in NVFP4."""
        return PROMPTS_TOO if "input_scale" in self.names(file, layer) else self

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
        rows, codes = made["codes"].shape[:-1], made["codes"]
        made["global_scale"] = _factor(source, names["global_scale"]).expand(rows).contiguous()
        if "input_scale" in self.fields:
            given = names.get("input_scale")
            made["input_scale"] = torch.zeros((), device=codes.device) if given is None else _factor(source, given)
        return made

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        super().fill(stored, k, generator)
        stored["scale"].view(E4M3).fill_(1.0)
        stored["global_scale"].fill_(k**-0.5 / E2M1_RMS)
        if "input_scale" in stored:
            stored["input_scale"].fill_(1.0)

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensors | None:
        """Exact, since rows keep their global scales; a frozen scale of activations is the largest of theirs."""
        if "input_scale" in self.fields:
            largest = torch.stack([part["input_scale"] for part in parts]).amax()
            parts = [{**part, "input_scale": largest} for part in parts]
        return super().join(parts)


NVFP4 = NVFP4Format()
PROMPTS_TOO = NVFP4Format("frozen", prompts=True)


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


# ------------------------------------------------------------------------------------------- FP4 tensor cores' layout

TILE_ROWS, TILE_COLUMNS = 128, 4


def tiled_shape(n: int, g: int) -> tuple[int, int]:
    """Of scales n x g in that order."""
    return -(-n // TILE_ROWS) * TILE_ROWS, -(-g // TILE_COLUMNS) * TILE_COLUMNS


def swizzle_scales(scale: Tensor) -> Tensor:
    """scale [n, g] -> [n', g'] with n' and g' rounded up to multiples of 128 and 4, zeros in the padding, in the order
    that FP4 tensor cores read: tiles of 128 x 4, row-major; in a tile the scale of row r and column c lies at byte
    (r % 32) * 16 + (r // 32) * 4 + c. (NVIDIA, cuBLAS, "1D block scaling factors layout".)"""
    n, g = scale.shape
    rows, columns = tiled_shape(n, g)
    padded = torch.zeros(rows, columns, dtype=torch.uint8, device=scale.device)
    padded[:n, :g] = scale.view(torch.uint8)
    tiles = padded.view(rows // TILE_ROWS, 4, 32, columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(scale.dtype)


def unswizzle_scales(swizzled: Tensor, n: int, g: int) -> Tensor:
    """The inverse of `swizzle_scales`, without the padding: [n', g'] -> [n, g]. Raises ValueError on another size."""
    rows, columns = tiled_shape(n, g)
    if swizzled.numel() != rows * columns:
        raise ValueError(
            f"swizzled scales hold {swizzled.numel()} values {list(swizzled.shape)}; scales of {n} x {g} are padded to "
            f"{rows} x {columns} = {rows * columns}"
        )
    tiles = swizzled.reshape(-1).view(torch.uint8)
    tiles = tiles.view(rows // TILE_ROWS, columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)[:n, :g].contiguous().view(swizzled.dtype)
