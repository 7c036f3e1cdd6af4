"""FP8: E4M3 codes and a multiplier for a block, a row, 32 inputs of a row, or the whole layer; MXFP8, whose multipliers
are bytes, is in `formats/mxfp8.py`.

A linear W [n, k] is stored as

    W[i, j] = E4M3(codes[i, j]) * scale[block of (i, j)]

E4M3 is sign, four exponent bits with a bias of 7, three mantissa bits: up to 448, subnormals in steps of 2^-9; 0x7F and
0xFF are NaN. The scale multiplies under every name that files give it, `weight_scale_inv` too.

| publisher                                | tensor beside `weight` | shape and dtype                                  |
|------------------------------------------|------------------------|--------------------------------------------------|
| DeepSeek-V4 (blocks of 128, V4.1 of 32)  | scale                  | E8M0 [ceil(n/128), ceil(k/128)]; Base: float32   |
| DeepSeek-V3, Qwen3-*-FP8, GLM, MiniMax   | weight_scale_inv       | float32, bfloat16 or float16, blocks of 128      |
| ModelOpt FP8_PB_WO                       | weight_scale           | float32 [ceil(n/128), 1, ceil(k/128), 1]         |
| compressed-tensors float-quantized       | weight_scale           | [1], [n, 1], or blocks                           |
| ModelOpt FP8 / FP8_PER_CHANNEL_PER_TOKEN | weight_scale           | float32 [] / [n]                                 |
| blocks of [1, 32], scales not of a byte  | weight_scale(_inv)     | float32, bfloat16 or float16, [n, ceil(k/32)]    |

Blocks at the end of n or k may be cut short. Where two of these shapes are the same, they also mean the same: a grid of
two block sizes has one shape only where one block covers all that differs.
"""

import math
from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.mxfp4 import E8M0, ONE
from onegraph.formats.nvfp4 import E4M3
from onegraph.formats.weight import (
    FLOATS,
    WHOLE,
    Expected,
    Field,
    File,
    Part,
    Shape,
    Source,
    Tensors,
    WeightFormat,
    check_conversion,
)

Block = tuple[int, int]
NAMES = ("weight_scale_inv", "weight_scale", "scale")  # of the multiplier
NAN = 0x7F  # of E4M3, whatever the sign
E4M3_RMS = 100.0  # of random codes that are not NaN


class FP8Format(WeightFormat):
    """codes uint8 [..., n, k], the bits of E4M3, which every part of torch can copy and compare; scale float32
    [..., ceil(n/rows), ceil(k/columns)], or [..., n] where `columns` is 0.

    Args:
        block: outputs and inputs that share a scale; None: a scale a row. One scale a layer is the same for each of its
            rows.
    """

    ops = "onegraph.ops.fp8"

    def __init__(self, block: Block | None) -> None:
        self.block = block
        self.rows, self.columns = block or (1, 0)
        self.name = "fp8, a scale a row" if block is None else f"fp8, blocks of {self.rows}x{self.columns}"
        kinds = FLOATS if block is None else (*FLOATS, E8M0, torch.uint8)
        self.fields: Mapping[str, Field] = {
            "codes": Field(torch.uint8, rows=1, columns=1, stored=(E4M3,)),
            "scale": Field(torch.float32, rows=self.rows, columns=self.columns, stored=kinds),
        }

    def names(self, file: Container[str], layer: str) -> dict[str, str]:
        usual = "weight_scale" if self.block in (None, (1, 32)) else "weight_scale_inv"
        return {"codes": f"{layer}.weight", "scale": scale_name(file, layer) or f"{layer}.{usual}"}

    def shapes(self, n: int, k: int) -> list[Shape]:
        """Of the scales of a layer, as files write them; the first is the usual one."""
        if self.block is None:
            return [(n,), (n, 1), (), (1,), (1, 1)]
        rows, columns = self.fields["scale"].shape(n, k)
        return [(rows, columns), (rows, 1, columns, 1)]

    def expected(self, file: File, layer: str, n: int, k: int, bias: bool = False) -> Expected:
        found, name = super().expected(file, layer, n, k, bias), self.names(file, layer)["scale"]
        if name in file and (shape := tuple(file.info(name).shape)) in self.shapes(n, k):
            found[name] = shape, found[name][1]
        return found

    def read(self, source: Source, layer: str, part: Part = WHOLE) -> Tensors:
        names, field = self.names(source, layer), self.fields["scale"]
        n, k = source.info(names["codes"]).shape
        codes = source.read(names["codes"], self.fields["codes"], part).view(torch.uint8)
        source.require(
            ((codes & NAN) != NAN).all(),
            lambda: f"{quote(names['codes'])} holds NaN codes; the file is damaged, fetch it again",
        )
        shape = field.shape(n, k)
        if tuple(source.info(names["scale"]).shape) == shape:
            scale = source.read(names["scale"], field, part)
        else:  # another spelling of the shape: read whole, the factors are few
            whole = source.read(names["scale"], Field(torch.float32), WHOLE)
            whole = whole.reshape(()).expand(shape) if whole.numel() == 1 else whole.reshape(shape)
            scale = field.cut(whole, part)
        return {"codes": codes, "scale": self.multiplier(source, scale, names["scale"]).contiguous()}

    def multiplier(self, source: Source, scale: Tensor, name: str) -> Tensor:
        """Scales of a file as `fields` has them. Raises CheckpointError for those that no layer has."""
        return _multiplier(source, scale, name)

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        codes, scale = stored["codes"].view(torch.uint8), stored["scale"]
        codes.random_(0, 256, generator=generator)
        codes.copy_(torch.where((codes & NAN) == NAN, codes & ~1, codes))
        gain = k**-0.5 / E4M3_RMS
        if scale.dtype in (E8M0, torch.uint8):
            scale.view(torch.uint8).fill_(ONE + round(math.log2(gain)))
        else:
            scale.fill_(gain)

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensors | None:
        """Exact where rows keep their blocks: all parts but the last end with one."""
        if any(part["codes"].shape[-2] % self.rows for part in parts[:-1]):
            return None
        return super().join(parts)


FP8: dict[Block | None, FP8Format] = {block: FP8Format(block) for block in ((128, 128), (32, 32), (1, 32), None)}


def scale_name(file: Container[str], layer: str) -> str | None:
    """The tensor that holds the scales of an FP8 layer."""
    return next((name for suffix in NAMES if (name := f"{layer}.{suffix}") in file), None)


def fp8_of(file: File, layer: str, block: Block | None = None) -> FP8Format:
    """The format of a layer whose `.weight` is E4M3, from the shapes of its tensors.

    Args:
        block: that the config announces for every layer with blocks; None: any that is supported.

    Raises CheckpointError that names the tensor where there is no scale, or one of another shape.
    """
    weight, name = f"{layer}.weight", scale_name(file, layer)
    sizes = tuple(file.info(weight).shape)
    if len(sizes) != 2:
        raise CheckpointError(f"{quote(weight)} is float8_e4m3fn {list(sizes)}; an FP8 linear is [n, k]")
    if name is None:
        raise CheckpointError(
            f"{quote(weight)} is float8_e4m3fn and has no scale; it must come with one of {', '.join(NAMES)}"
        )
    shape, n, k = tuple(file.info(name).shape), *sizes
    announced = [block, None] if block is not None else [None, *(b for b in FP8 if b is not None)]
    for candidate in announced:
        if candidate in FP8 and shape in FP8[candidate].shapes(n, k):
            return FP8[candidate]
    allowed = " or ".join(f"{list(FP8[b].shapes(n, k)[0])} ({FP8[b]})" for b in announced if b in FP8)
    raise CheckpointError(f"{quote(name)} has shape {list(shape)}; scales of a weight of {n} x {k} are {allowed}")


def _multiplier(source: Source, scale: Tensor, name: str) -> Tensor:
    """Scales of a file as float32, E8M0 and its bytes by their meaning, 2^(byte - 127); zero, negative, infinite and
    NaN (255 in E8M0) are refused."""
    if scale.dtype == torch.uint8:
        scale = scale.view(E8M0)
    if scale.dtype != E8M0:  # whose conversion is by its meaning
        check_conversion(name, scale.dtype, torch.float32)
    value = scale.float()
    source.require(
        ((value > 0) & (value < math.inf)).all(),
        lambda: (
            f"{quote(name)} holds scales that are zero, negative, infinite or NaN; the file is damaged, fetch it again"
        ),
    )
    return value
