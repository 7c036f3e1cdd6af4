"""Checkpoints as others publish them: what each layer is, its tensors say.

`quantization_config` (or hf_quant_config.json, see `formats/checkpoint.py`) gives the size of blocks and what must be
refused. Which layer is in which format it is not asked: lists of skipped modules are wider or narrower than the truth
in several published files, and "ignored" in NVIDIA's DeepSeek-V4 means as DeepSeek has it, not bfloat16. A layer's
dtype and the names beside its weight tell it, or the file is refused:

| tensor of a layer   | beside it                                 | format                                            |
|---------------------|-------------------------------------------|---------------------------------------------------|
| weight E4M3         | weight_scale_inv, weight_scale or scale   | FP8; the shape of the scales says which           |
| weight E4M3         | the same, of a byte for 32 inputs         | MXFP8                                             |
| weight uint8        | weight_scale, weight_scale_2              | NVFP4 as ModelOpt writes it                       |
| weight_packed uint8 | weight_scale E4M3, weight_global_scale    | NVFP4 as compressed-tensors writes it             |
| weight_packed uint8 | weight_scale uint8 (E8M0)                 | MXFP4 as compressed-tensors writes it             |
| weight_packed int32 | weight_scale, weight_zero_point           | INT4, in a mixture of compressed-tensors          |
| weight int8         | scale E8M0                                | MXFP4 as DeepSeek writes it                       |
| weight, a float     |                                           | dense                                             |

Whatever else lies in the file is an unexpected tensor, which the loader shows by name.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onegraph.formats.dense import DENSE
from onegraph.formats.files import quote
from onegraph.formats.fp8 import FP8, Block, fp8_of
from onegraph.formats.int4 import is_int4
from onegraph.formats.int4_config import INT4Config
from onegraph.formats.mxfp4 import MXFP4
from onegraph.formats.mxfp8 import MXFP8, is_mxfp8
from onegraph.formats.nvfp4 import E4M3, GROUP, NVFP4
from onegraph.formats.weight import File, WeightFormat

# quant_algo of ModelOpt -> inputs that share a scale, where the config may say
ALGORITHMS: dict[str, int | None] = {
    "FP8": None,
    "FP8_PB_WO": None,
    "FP8_BLOCK_SCALES": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "MXFP8": 32,
    "NVFP4": GROUP,
    "W4A16_NVFP4": GROUP,
}
MIXED = "MIXED_PRECISION"
# formats of compressed-tensors -> bits of a weight
PACKINGS = {
    "float-quantized": 8,
    "naive-quantized": 8,
    "mxfp8-quantized": 8,
    "nvfp4-pack-quantized": 4,
    "mxfp4-pack-quantized": 4,
}
INTEGERS = "pack-quantized"  # likewise; `formats/int4_config.py` reads it
KEPT = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
# Activations stay as they are, and so does the KV cache: what would quantize them is not read.
UNREAD = (".input_scale", ".activation_scale", ".input_global_scale", ".k_scale", ".v_scale")
Data = Mapping[str, Any]


@dataclass(frozen=True)
class Published:
    """`quantization_config` of a published checkpoint.

    Args:
        data: the config as it was read.
        block: outputs and inputs that share a scale, where the config says so of FP8 weights.
        ignore: names or patterns that the config says were left out; told, not believed.
        integers: what it says of layers of integers, where it has some (compressed-tensors).
    """

    data: Data = field(hash=False)
    block: Block | None = None
    ignore: tuple[str, ...] = ()
    integers: INT4Config | None = None

    @staticmethod
    def matches(data: Data) -> bool:
        return _method(data) in ("fp8", "modelopt", "compressed-tensors")

    @classmethod
    def from_dict(cls, data: Data) -> "Published":
        """Raises ValueError in one line for an algorithm, format or block size that is not supported, with its name."""
        blocks = {"fp8": _check_fp8, "modelopt": _check_modelopt, "compressed-tensors": _check_compressed}[
            str(_method(data))
        ](data)
        inner = _inner(data)
        kept = next((part[key] for part in (data, inner) for key in KEPT if part.get(key) is not None), ())
        if not isinstance(kept, list | tuple) or not all(isinstance(name, str) for name in kept):
            raise ValueError("quantization_config.ignore is no list of module names")
        return cls(data, blocks.pop() if len(blocks) == 1 else None, tuple(kept), _integers(data))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)

    def format_of(self, layer: str, file: File) -> WeightFormat:
        """What the file's tensors say. Raises CheckpointError for an FP8 weight whose scales say nothing."""
        if self.integers is not None and is_int4(file, layer):
            return self.integers.format_of(layer, file)
        if f"{layer}.weight_packed" in file:
            return NVFP4 if f"{layer}.weight_global_scale" in file else MXFP4
        weight = f"{layer}.weight"
        kind = file.info(weight).dtype if weight in file else None
        if kind == E4M3:
            if self.block in (None, MXFP8.block) and is_mxfp8(file, layer):
                return MXFP8
            return fp8_of(file, layer, self.block)
        if kind == torch.uint8 and any(f"{layer}.{scale}" in file for scale in ("weight_scale", "weight_scale_2")):
            return NVFP4
        return MXFP4 if kind == torch.int8 and f"{layer}.scale" in file else DENSE

    def check_layers(self, layers: Collection[str]) -> None:
        """What the config names may be patterns, and no linears: nothing to hold against the layers."""

    def stacked(self, layer: str) -> None:
        """As the family publishes them."""

    def ignored(self, name: str) -> bool:
        """Scales of activations and of a KV cache."""
        return name.endswith(UNREAD)

    def renamed(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> "Published":
        return self


def _method(data: Data) -> object:
    """The quant_method, under one name each; hf_quant_config.json and some exports of ModelOpt have none."""
    method = data.get("quant_method")
    if method is None and ("quant_algo" in _inner(data) or _mapping(data.get("producer")).get("name") == "modelopt"):
        return "modelopt"
    if isinstance(method, str):
        method = method.replace("_", "-")
        return "modelopt" if method.startswith("modelopt") else method
    return method


def _mapping(value: object) -> Data:
    return value if isinstance(value, Mapping) else {}


def _inner(data: Data) -> Data:
    """hf_quant_config.json holds everything but the producer one level deeper."""
    return _mapping(data.get("quantization")) or data


def _check_fp8(data: Data) -> set[Block]:
    """DeepSeek's, Qwen's, MiniMax's; NVIDIA's DeepSeek-V4, which says besides what its experts are in."""
    if (kind := data.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"quantization_config.fmt is {quote(kind, 40)}; FP8 weights are read as e4m3")
    _check_modelopt(data)
    size = data.get("weight_block_size")
    return set() if size is None else {_block(size, "weight_block_size")}


def _check_modelopt(data: Data) -> set[Block]:
    inner = _inner(data)
    layers = inner.get("quantized_layers") or {}
    if not isinstance(layers, Mapping) or not all(isinstance(entry, Mapping) for entry in layers.values()):
        raise ValueError("quantization_config.quantized_layers is no object of layer name to algorithm")
    _check_algorithm(inner.get("quant_algo"), inner, mixed=True)
    _check_algorithm(inner.get("moe_quant_algo"), inner)
    for entry in layers.values():
        _check_algorithm(entry.get("quant_algo"), entry)
    return set()


def _check_algorithm(name: object, entry: Data, *, mixed: bool = False) -> None:
    if name is None or (mixed and name == MIXED):
        return
    upper = name.upper() if isinstance(name, str) else ""
    if upper not in ALGORITHMS:
        raise ValueError(
            f"quantization_config has quant_algo {quote(name, 80)}, which is not supported; supported are "
            f"{', '.join(ALGORITHMS)} and {MIXED} of them"
        )
    wanted, size = ALGORITHMS[upper], entry.get("group_size")
    if wanted is not None and size not in (None, wanted):
        raise ValueError(f"quantization_config.group_size is {quote(size, 40)}; {upper} has groups of {wanted}")


def _check_compressed(data: Data) -> set[Block]:
    whole, found = data.get("format"), set[Block]()
    for group in _groups(data).values():
        if group.get("format") == INTEGERS and whole == "mixed-precision":
            continue  # `_integers` checks it
        packing = _packing(group.get("format") or whole)
        weights = _mapping(group.get("weights"))
        kind, bits = weights.get("type", "float"), weights.get("num_bits")
        if kind != "float" or bits not in (None, PACKINGS[packing]):
            raise ValueError(
                f"quantization_config has weights of type {quote(kind, 40)} and {quote(bits, 40)} bits in "
                f"{packing}, which is not supported; it holds floats of {PACKINGS[packing]} bits"
            )
        if (size := weights.get("block_structure")) is not None:
            found.add(_block(size, "block_structure"))
    if whole != "mixed-precision":
        _packing(whole)
    if _mapping(data.get("sparsity_config")).get("format", "dense") != "dense":
        raise ValueError("quantization_config has a sparsity_config, which is not supported; load a dense checkpoint")
    for place in _transforms(data):
        if place not in ("weight_input", "weight_output"):  # those are in the weights
            raise ValueError(
                f"quantization_config.transform_config has a transform at {quote(place, 40)}, which is not supported"
            )
    return found


def _packing(name: object) -> str:
    if isinstance(name, str) and name in PACKINGS:
        return name
    raise ValueError(
        f"quantization_config has format {quote(name, 80)}, which is not supported; supported of compressed-tensors "
        f"are {', '.join(PACKINGS)}, {INTEGERS} and mixed-precision of them"
    )


def _integers(data: Data) -> INT4Config | None:
    """The groups of integers in a mixture."""
    if data.get("format") != "mixed-precision":
        return None
    groups = {name: group for name, group in _groups(data).items() if group.get("format") == INTEGERS}
    return INT4Config.from_dict({**data, "format": INTEGERS, "config_groups": groups}) if groups else None


def _groups(data: Data) -> Mapping[str, Data]:
    groups = data.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ValueError("quantization_config.config_groups is no object of groups")
    return groups


def _transforms(data: Data) -> Iterator[object]:
    """Where a transform_config rotates something."""
    for group in _mapping(_mapping(data.get("transform_config")).get("config_groups")).values():
        applied = _mapping(group).get("apply")
        for entry in applied if isinstance(applied, list) else [applied]:
            yield _mapping(entry).get("location")


def _block(size: object, key: str) -> Block:
    for block in FP8:
        if block is not None and size in (list(block), "x".join(map(str, block))):
            return block
    known = ", ".join(str(list(block)) for block in FP8 if block is not None)
    raise ValueError(f"quantization_config.{key} is {quote(size, 40)}; supported are {known}")
