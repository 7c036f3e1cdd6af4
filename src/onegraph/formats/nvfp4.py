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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError, quote

GROUP = 16  # columns that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3 = torch.float8_e4m3fn
RECIPROCAL = {"weight_scale_2": False, "weight_global_scale": True, "input_scale": False, "input_global_scale": True}


class NVFP4Tensors(NamedTuple):
    """One layer as read: codes uint8 [n, k/2]; scale uint8 [n, k/16], the bits of E4M3 numbers, which every part of
    torch can copy and compare; global_scale float32 [], a factor, not a divisor; input_scale the frozen global scale of
    its activations, float32 [], None where the file has none."""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor
    input_scale: Tensor | None


def is_nvfp4(checkpoint: Checkpoint, layer: str) -> bool:
    """Whether the checkpoint holds `layer` in NVFP4, under either tool's names."""
    if f"{layer}.weight_packed" in checkpoint:
        return True
    weight = f"{layer}.weight"
    return f"{layer}.weight_scale" in checkpoint and weight in checkpoint and checkpoint.dtype(weight) == torch.uint8


def tensor_names(checkpoint: Checkpoint, layer: str) -> tuple[str, str, str, str | None]:
    """Names of codes, scale, global scale and input scale (None if absent) of an NVFP4 layer."""
    packed = f"{layer}.weight_packed" in checkpoint
    weight, second, inputs = (
        ("weight_packed", "weight_global_scale", "input_global_scale")
        if packed
        else ("weight", "weight_scale_2", "input_scale")
    )
    given = f"{layer}.{inputs}"
    return f"{layer}.{weight}", f"{layer}.weight_scale", f"{layer}.{second}", given if given in checkpoint else None


def read_linear(checkpoint: Checkpoint, layer: str, n: int, k: int, device: torch.device | str = "cpu") -> NVFP4Tensors:
    """Reads `layer` of n outputs and k inputs. Raises CheckpointError that names the tensor and both sizes where a
    shape, a dtype or a value does not fit: a kernel that trusted a scale of another width would read past it."""
    if k % GROUP:
        raise CheckpointError(f"{quote(layer)} has {k} inputs; NVFP4 stores them in groups of {GROUP}")
    codes_name, scale_name, global_name, input_name = tensor_names(checkpoint, layer)
    _check(checkpoint, codes_name, (n, k // 2), (torch.uint8,))
    _check(checkpoint, scale_name, (n, k // GROUP), (E4M3, torch.uint8))
    codes = checkpoint.tensor(codes_name, device=device)
    bits = checkpoint.tensor(scale_name, device=device).view(torch.uint8)
    if bool(((bits & 0x7F) == 0x7F).any()) or bool((bits > 0x80).any()):
        raise CheckpointError(f"{quote(scale_name)} holds NaN or negative scales; the file is damaged, fetch it again")
    return NVFP4Tensors(
        codes,
        bits & 0x7F,  # a negative zero is a zero
        _scalar(checkpoint, global_name, device),
        None if input_name is None else _scalar(checkpoint, input_name, device),
    )


def _check(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    info = checkpoint.info(name)
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {quote(name)} has shape {list(info.shape)}, the layer asks for {list(shape)} "
            "(rows as they are, neither padded nor swizzled)"
        )
    if info.dtype not in dtypes:
        raise CheckpointError(f"{info.file}: tensor {quote(name)} is {info.dtype}, the layer asks for {dtypes[0]}")


def _scalar(checkpoint: Checkpoint, name: str, device: torch.device | str) -> Tensor:
    """A global scale as a factor, float32 []."""
    info = checkpoint.info(name)
    if math.prod(info.shape) != 1 or not info.dtype.is_floating_point:
        raise CheckpointError(
            f"{info.file}: tensor {quote(name)} is {info.dtype} {list(info.shape)}; it is one float32"
        )
    value = checkpoint.tensor(name, dtype=torch.float32).reshape(())
    if not value > 0:
        raise CheckpointError(f"{info.file}: tensor {quote(name)} is {value.item()}; a global scale is above zero")
    return (1 / value if RECIPROCAL[name.rpartition(".")[2]] else value).to(device)


@dataclass(frozen=True)
class NVFP4Config:
    """`quantization_config` of an NVFP4 checkpoint. `ignore` are the module names or patterns that were kept, as the
    file tells them; which layers are NVFP4 is read from the tensors themselves."""

    ignore: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """ModelOpt's form, which vLLM and TensorRT-LLM read too."""
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": GROUP,
            "ignore": list(self.ignore),
            "producer": {"name": "onegraph"},
        }

    @staticmethod
    def matches(data: object) -> bool:
        """Whether a quantization_config is one of NVFP4 that this module reads."""
        return isinstance(data, Mapping) and (
            (data.get("quant_method") in ("modelopt", "modelopt_fp4") and _algorithm(data) == "NVFP4")
            or (data.get("quant_method") == "compressed-tensors" and data.get("format") == "nvfp4-pack-quantized")
        )

    @classmethod
    def from_dict(cls, data: object) -> "NVFP4Config":
        """Raises ValueError for another method, algorithm or group size."""
        if not cls.matches(data):
            assert isinstance(data, Mapping)
            raise ValueError(
                f"quantization_config is {data.get('quant_method')!r} {_algorithm(data) or data.get('format')!r}; read "
                "are 'modelopt' with quant_algo 'NVFP4' and 'compressed-tensors' with format 'nvfp4-pack-quantized'"
            )
        assert isinstance(data, Mapping)
        inner = data.get("quantization", data)
        if (size := inner.get("group_size", GROUP)) != GROUP:
            raise ValueError(f"quantization_config.group_size is {size!r}; NVFP4 has groups of {GROUP}")
        kept = data.get("ignore", inner.get("exclude_modules", ()))
        if not isinstance(kept, list | tuple) or not all(isinstance(name, str) for name in kept):
            raise ValueError("quantization_config.ignore is no list of module names")
        return cls(tuple(kept))


def _algorithm(data: Mapping[str, Any]) -> object:
    inner = data.get("quantization")
    return (inner if isinstance(inner, Mapping) else data).get("quant_algo")


# ------------------------------------------------------------------------------------------- FP4 tensor cores' layout

TILE_ROWS, TILE_COLUMNS = 128, 4


def swizzle_scales(scale: Tensor) -> Tensor:
    """scale [n, g] -> [n', g'] with n' and g' rounded up to multiples of 128 and 4, zeros in the padding, in the order
    that FP4 tensor cores read: tiles of 128 x 4, row-major; in a tile the scale of row r and column c lies at byte
    (r % 32) * 16 + (r // 32) * 4 + c. (NVIDIA, cuBLAS, "1D block scaling factors layout".)"""
    n, g = scale.shape
    rows, columns = -(-n // TILE_ROWS) * TILE_ROWS, -(-g // TILE_COLUMNS) * TILE_COLUMNS
    padded = torch.zeros(rows, columns, dtype=torch.uint8, device=scale.device)
    padded[:n, :g] = scale.view(torch.uint8)
    tiles = padded.view(rows // TILE_ROWS, 4, 32, columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(scale.dtype)


def unswizzle_scales(swizzled: Tensor, n: int, g: int) -> Tensor:
    """The inverse of `swizzle_scales`, without the padding: [n', g'] -> [n, g]. Raises ValueError on another size."""
    rows, columns = -(-n // TILE_ROWS) * TILE_ROWS, -(-g // TILE_COLUMNS) * TILE_COLUMNS
    if swizzled.numel() != rows * columns:
        raise ValueError(
            f"swizzled scales hold {swizzled.numel()} values {list(swizzled.shape)}; scales of {n} x {g} are padded to "
            f"{rows} x {columns} = {rows * columns}"
        )
    tiles = swizzled.reshape(-1).view(torch.uint8)
    tiles = tiles.view(rows // TILE_ROWS, columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)[:n, :g].contiguous().view(swizzled.dtype)
