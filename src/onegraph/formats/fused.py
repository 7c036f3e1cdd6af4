"""All experts of a layer in one tensor, as some families publish them.

| as                                  | of a stack X of E matrices n x k                                    | format |
|-------------------------------------|---------------------------------------------------------------------|--------|
| gpt-oss                             | X_blocks uint8 [E, n, k/32, 16], X_scales uint8 (E8M0) [E, n, k/32] | MXFP4  |
| Qwen3.5-MoE                         | X, a float [E, n, k]                                                | dense  |
| gpt-oss dequantized, Qwen3-VL-MoE   | X, a float [E, k, n]: transposed                                    | dense  |
| onegraph, of any family             | X.codes, X.residual, X.in_scale, X.out_scale, X.scale: see `e8p.py` | E8P    |
| likewise                            | X.codes, X.in_scale, X.out_scale, X.scale: see `trellis.py`         | trellis|

X_bias, a float [E, n], may lie beside either. gpt-oss's config says `quant_method: mxfp4`; which tensors are in blocks
their names say; which are E8P or trellis, and at which rate, the `quantization_config`. A stack of these has what its
layers have, [E] in front of each dimension, `scale` [E]. Its rows are gate, then up, in every family, since they are
rotated together; X_bias stays as the family has it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.dense import DENSE
from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.mxfp4 import E8M0, GROUP, MXFP4
from onegraph.formats.weight import FLOATS, WHOLE, Expected, Field, File, Part, Quantization, Require, WeightFormat

STACKS = "gate_up_proj", "down_proj"  # how onegraph calls those of a layer, in any family
_BLOCKS, _SCALES = "_blocks", "_scales"


def in_blocks(tensor: str) -> str | None:
    """The stack whose MXFP4 blocks the tensor of this name is; None where it is none."""
    return tensor.removesuffix(_BLOCKS) if tensor.endswith(_BLOCKS) else None


def stack_names(file: File, name: str, quantization: Quantization | None = None) -> tuple[WeightFormat, dict[str, str]]:
    """The format of the stack `name`, and by field the tensor that holds it. Raises CheckpointError where there is
    none."""
    if quantization is not None and quantization.stacked(name):
        format = quantization.format_of(name, file)
        return format, format.names(file, name)
    if f"{name}{_BLOCKS}" in file:
        return MXFP4, {"codes": f"{name}{_BLOCKS}", "scale": f"{name}{_SCALES}"}
    if name in file:
        return DENSE, {"weight": name}
    if f"{name}.codes" in file:
        raise CheckpointError(f"{quote(name + '.codes')} is in the file, and quantization_config has no rate for it")
    raise CheckpointError(f"there is neither {quote(name)} nor {quote(name + _BLOCKS)}; fetch the checkpoint again")


def expected_stack(
    file: File, name: str, count: int, n: int, k: int, *, bias: bool, transposed: bool = False,
    quantization: Quantization | None = None,
) -> Expected:  # fmt: skip
    """The tensors of a stack of `count` matrices n x k, whose floats may lie `transposed`. Raises CheckpointError where
    there is none, ValueError where its format does not hold such sizes."""
    format, names = stack_names(file, name, quantization)
    format.check_size(n, k)
    found: Expected = {f"{name}_bias": ((count, n), FLOATS)} if bias else {}
    if format is DENSE:
        return found | {names["weight"]: ((count, k, n) if transposed else (count, n, k), FLOATS)}
    if format is not MXFP4:
        return found | {
            names[key]: ((count, *field.shape(n, k)), field.allowed) for key, field in format.stored.items()
        }
    return found | {
        names["codes"]: ((count, n, k // GROUP, GROUP // 2), (torch.uint8,)),
        names["scale"]: ((count, n, k // GROUP), (torch.uint8, E8M0)),
    }


@dataclass(frozen=True)
class OneOfStack:
    """A matrix of a stack as the record of its format reads a layer of its own: a `Source`.

    Args:
        matrix: by field, of that matrix alone, as the file holds it.
        dtype: of the activations.
        require: see `Source`.
    """

    format: WeightFormat
    matrix: Mapping[str, Tensor]
    dtype: torch.dtype
    require: Require

    def __contains__(self, name: object) -> bool:
        return False  # each format then has the names of its own, which `read` goes by

    def info(self, name: str) -> Any:
        raise AssertionError("a matrix of a stack has no file of its own")

    def read(self, name: str, field: Field, part: Part) -> Tensor:
        assert part == WHOLE
        key = next(key for key, own in self.format.stored.items() if own is field)
        value = self.matrix[key]
        value = value.flatten(1) if value.dim() == 3 else value
        return value.to(self.dtype) if field.dtype is None else value


@dataclass(frozen=True)
class BlocksConfig:
    """`quantization_config` of gpt-oss: experts in stacks of MXFP4 blocks, every layer that may be listed dense."""

    data: Mapping[str, Any] = field(hash=False, default_factory=lambda: {"quant_method": "mxfp4"})

    @staticmethod
    def matches(data: Mapping[str, Any]) -> bool:
        return data.get("quant_method") == "mxfp4"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "BlocksConfig":
        return cls(dict(data))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)

    def format_of(self, layer: str, file: File) -> WeightFormat:
        return DENSE

    def check_layers(self, layers: Collection[str]) -> None:
        """`modules_to_not_convert` names modules of which most are no linears: nothing to hold against the layers."""

    def stacked(self, layer: str) -> None:
        """As the family publishes them."""

    def ignored(self, name: str) -> bool:
        return False

    def renamed(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> "BlocksConfig":
        return self


def stacked(format: WeightFormat, name: str, layers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a file holds of the stack `name` of experts that were encoded one by one, by its tensors' names: the inverse
    of `Loader.matrices`. `layers`: of each expert the tensors of `format.stored`, of one size; gate and up of an expert
    as one layer, gate rows first. Raises ValueError where they differ in shape or dtype."""
    for i, layer in enumerate(layers):
        for key in format.stored:
            one, first = layer[key], layers[0][key]
            if one.shape != first.shape or one.dtype != first.dtype:
                raise ValueError(
                    f"{name}.{key} of expert {i} is {one.dtype} {tuple(one.shape)} and of expert 0 {first.dtype} "
                    f"{tuple(first.shape)}; experts of a stack must be of one size and rate"
                )
    return {f"{name}.{key}": torch.stack([layer[key] for layer in layers]) for key in format.stored}
