"""A weight format as one record: the tensors of a layer, how a file holds them, how a layer may be cut and joined.

Everything that differs between E8P, NVFP4, MXFP4 and dense weights stands in such a record, one file a format; loaders,
modules, quantizers and plugins read it and know no format by name. `formats/quantization.py` lists the formats.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from onegraph.formats.files import CheckpointError, quote

Tensors = dict[str, Tensor]  # the tensors of one layer, by the names of a format's fields
Shape = tuple[int, ...]
Dtypes = tuple[torch.dtype, ...]
Expected = dict[str, tuple[Shape, Dtypes]]  # tensor name in a file -> shape and the dtypes that it may have
Require = Callable[[Tensor, Callable[[], str]], None]  # whether something holds, bool [], and the message if not
Fusion = Literal["norm", "silu", "add"]  # RMSNorm or SwiGLU in front of a linear, a sum behind it: in the same launch

FLOATS: Dtypes = (torch.float32, torch.bfloat16, torch.float16)
_NUMBERS = (*FLOATS, torch.float64)


def check_conversion(name: str, found: torch.dtype, wanted: torch.dtype) -> None:
    """Raises CheckpointError where codes would become numbers: an integer, E8M0 or E4M3 as a float by its value. The
    byte 127 of E8M0 stands for 1; copied into a float it is 127, and the model talks nonsense without any error."""
    if found != wanted and wanted.is_floating_point and found not in _NUMBERS:
        raise CheckpointError(
            f"tensor {quote(name)} holds codes of {str(found).removeprefix('torch.')}; they are never taken for the "
            f"numbers of a {str(wanted).removeprefix('torch.')} tensor"
        )


@dataclass(frozen=True)
class Field:
    """One tensor of a layer of n outputs and k inputs.

    Args:
        dtype: of its elements; None: that of the activations.
        rows, columns: how many outputs and inputs one element stands for along the last two dimensions; 0: the tensor
            has no such dimension.
        stored: the dtypes that a file may hold it in; empty: `dtype` alone.
        each: elements along the last dimension for each group of `columns`, where that is more than one.
    """

    dtype: torch.dtype | None
    rows: int = 0
    columns: int = 0
    stored: Dtypes = ()
    each: int = 1

    def shape(self, n: int, k: int) -> Shape:
        sizes = (n, self.rows, 1), (k, self.columns, self.each)
        return tuple(-(-size // unit) * each for size, unit, each in sizes if unit)

    @property
    def allowed(self) -> Dtypes:
        """The dtypes that a file may hold it in."""
        return self.stored or ((self.dtype,) if self.dtype is not None else FLOATS)

    @property
    def row_dim(self) -> int:
        """The dimension of the outputs, counted from the last."""
        return -2 if self.columns else -1

    def cut(self, tensor: Tensor, part: Part) -> Tensor:
        """What of the tensor belongs to a part of its layer; a view."""
        cuts = (part.rows, self.rows, 1, self.row_dim), (part.columns, self.columns, self.each, -1)
        for span, unit, each, dim in cuts:
            if span is not None and unit:
                first, last = span
                tensor = tensor.narrow(dim, first // unit * each, (-(-last // unit) - first // unit) * each)
        return tensor


@dataclass(frozen=True)
class Part:
    """Outputs and inputs of a layer, each first..last, None for all of them."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


WHOLE = Part()


class File(Protocol):
    """What a record asks of a checkpoint: names, and what is known of a tensor before it is read."""

    def __contains__(self, name: object) -> bool: ...
    def info(self, name: str) -> Any: ...  # with shape, dtype, file


class Source(File, Protocol):
    """A file whose tensors can be read to the device that a layer goes to."""

    def read(self, name: str, field: Field, part: Part) -> Tensor: ...

    @abstractmethod
    def require(self, ok: Tensor, message: Callable[[], str]) -> None:
        """Raises CheckpointError with `message` unless `ok`, bool [], holds: now, or once a layer, since each answer
        that is waited for would stop the copies behind it."""


class WeightFormat:
    """One way to store the weight [n, k] of a linear. Subclasses give the class attributes and what differs.

    Attributes:
        name: how messages and records call it.
        ops: the module whose `WEIGHT` runs it (`onegraph.ops.weight.WeightOps`).
        fields: what the ops take, in this order; a tensor whose dtype is None has that of the activations.
        group: inputs that are coded together: k is a multiple of it.
        fuses: what may be computed in the launch of a linear.
        mixes_rows: outputs are rotated, so that their order is part of the code.
    """

    name: str
    ops: str
    fields: Mapping[str, Field]
    group: int = 1
    fuses: frozenset[Fusion] = frozenset()
    mixes_rows: bool = False

    def __repr__(self) -> str:
        return self.name

    # ------------------------------------------------------------------------------------------------------ in a file

    @property
    def stored(self) -> Mapping[str, Field]:
        """What a checkpoint holds of a layer, by the suffix of its name; `fields` unless loading folds some of them."""
        return self.fields

    def names(self, file: Container[str], layer: str) -> dict[str, str]:
        """Field of `stored` -> name of its tensor in the file."""
        return {suffix: f"{layer}.{suffix}" for suffix in self.stored}

    def stored_size(self, file: File, layer: str, n: int, k: int) -> tuple[int, int]:
        """Outputs and inputs that the file has of a layer of n x k: more where it is padded."""
        return n, k

    def expected(self, file: File, layer: str, n: int, k: int, bias: bool = False) -> Expected:
        """The tensors of `layer` that must be in the file. Raises ValueError where n x k cannot be stored."""
        self.check_size(n, k)
        names = self.names(file, layer)
        found: Expected = {names[key]: (field.shape(n, k), field.allowed) for key, field in self.stored.items()}
        return found | ({f"{layer}.bias": ((n,), FLOATS)} if bias else {})

    def read(self, source: Source, layer: str, part: Part = WHOLE) -> Tensors:
        """The `fields` of a layer, or of a part of it. Raises CheckpointError for values that no layer has."""
        names = self.names(source, layer)
        return self.fold({key: source.read(names[key], field, part) for key, field in self.stored.items()})

    def fold(self, stored: Tensors) -> Tensors:
        """From the tensors of a file to `fields`: what can be multiplied together once is. What only `stored` has are
        factors: with ones in their place folding changes nothing, so that who folds in place may do it again."""
        return stored

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        """Makes up a layer of k inputs in its tensors: random codes, outputs about as large as inputs. For benchmarks,
        whose time does not depend on weights."""
        for tensor in stored.values():
            if tensor.dtype.is_floating_point:
                tensor.normal_(std=k**-0.5, generator=generator)
            else:
                info = torch.iinfo(tensor.dtype)
                tensor.random_(info.min, info.max + 1, generator=generator)

    def check_size(self, n: int, k: int) -> None:
        if n < 1 or k < 1 or k % self.group:
            raise ValueError(
                f"a linear of {n} x {k} cannot be stored as {self.name}; inputs come in groups of {self.group}, so "
                f"k % {self.group} must be 0"
            )

    def layout(self, n: int, k: int, bias: bool = False) -> dict[str, tuple[Shape, torch.dtype]]:
        """What is written of a linear: field of `stored` (and "bias") -> (shape, dtype). Raises ValueError, as
        `expected` does."""
        self.check_size(n, k)
        found = {key: (field.shape(n, k), field.dtype or torch.bfloat16) for key, field in self.stored.items()}
        return found | ({"bias": ((n,), torch.float32)} if bias else {})

    def bits(self, n: int, k: int, bias: bool = False) -> int:
        """Bits that one linear takes on disk, all scales counted."""
        return 8 * sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.layout(n, k, bias).values())

    def device_bytes(self, n: int, k: int, dtype: torch.dtype, bias: bool = False) -> int:
        """Bytes that one linear takes on a device, where `fields` may be wider than in a file (E8M0 scales are float32
        there); dtype: of activations."""
        found = sum(math.prod(each.shape(n, k)) * (each.dtype or dtype).itemsize for each in self.fields.values())
        return found + n * bias * (torch.float32 if self.coded else dtype).itemsize

    @property
    def coded(self) -> bool:
        """Whether the weight is in codes, whatever the dtype of the activations."""
        return all(field.dtype is not None for field in self.fields.values())

    # ----------------------------------------------------------------------------------------------- on the way to ops

    def check(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Outputs and inputs of a layer with these tensors, which may have dimensions in front (experts, groups).
        Raises ValueError where a shape or dtype disagrees with the others."""
        if missing := [key for key in self.fields if key not in tensors]:
            raise ValueError(f"{self.name}: {missing[0]} is missing; a layer has {', '.join(self.fields)}")
        if unknown := [key for key in tensors if key not in self.fields]:
            raise ValueError(f"{self.name}: {unknown[0]} is given; a layer has {', '.join(self.fields)}")
        key, field = next((key, field) for key, field in self.fields.items() if field.rows and field.columns)
        like = tensors[key]
        if like.dim() < 2:
            raise ValueError(f"{key} is {tuple(like.shape)}; it must be [..., n, k / {field.columns}]")
        *lead, rows, columns = like.shape
        n, k = rows * field.rows, columns // field.each * field.columns
        for key, field in self.fields.items():
            tensor, shape = tensors[key], (*lead, *field.shape(n, k))
            dtypes = (field.dtype,) if field.dtype is not None else FLOATS
            if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
                kinds = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
                raise ValueError(
                    f"{key} is {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}; "
                    f"a layer of {n} x {k} in {self.name} needs {kinds} {shape}"
                )
        return n, k

    def check_dtype(self, layer: str, tensors: Tensors, dtype: torch.dtype, require: Require) -> None:
        """Raises CheckpointError, as `require` does (see `Source`), where the layer, as it was read, has weights that
        products in `dtype` cannot take."""

    def constants(self, device: torch.device) -> Tensors:
        """What every layer's ops take besides: tables of the format, one of each on a device."""
        return {}

    def after_norm(self, tensors: Tensors, weight: Tensor) -> Tensors:
        """The layer with the weight [k] of the RMSNorm in front in it; only of a format that fuses "norm"."""
        raise AssertionError(f"{self.name} does not fuse a norm")

    # -------------------------------------------------------------------------------------------------- cut and joined

    def check_part(self, n: int, k: int, part: Part) -> None:
        """Raises ValueError where the part of a layer of n x k is not itself a layer of this format."""
        for what, span, size, unit in (
            ("rows", part.rows, n, max(field.rows for field in self.fields.values())),
            ("columns", part.columns, k, math.lcm(self.group, *(f.columns for f in self.fields.values() if f.columns))),
        ):
            if span is None:
                continue
            first, last = span
            if not 0 <= first < last <= size:
                raise ValueError(f"{what} {first}:{last} is no part of {size}; bounds must ascend within it")
            if first % unit or (last % unit and last != size):
                raise ValueError(f"{what} {first}:{last} cuts a group of {unit}; bounds must be multiples of {unit}")

    def part(self, tensors: Mapping[str, Tensor], part: Part) -> Tensors:
        """The tensors of a part of the layer, itself a layer. Raises ValueError where it is none."""
        self.check_part(*self.check(tensors), part)
        return {key: field.cut(tensors[key], part).clone() for key, field in self.fields.items()}

    def joins(self, parts: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether parts that read the same input are one layer where their rows lie one after the other."""
        shared = [key for key, field in self.fields.items() if not field.rows]
        return all(torch.equal(part[key], parts[0][key]) for key in shared for part in parts[1:])

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensors | None:
        """One layer with the rows of all parts, which read the same input; None where that is not exact."""
        if not self.joins(parts):
            return None
        return {
            key: torch.cat([part[key] for part in parts], dim=field.row_dim) if field.rows else parts[0][key]
            for key, field in self.fields.items()
        }

    def paired(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensors | None:
        """Gate and up of an expert as one matrix where `join` makes none of them; None where ops have no such form."""
        return None


class Quantization(Protocol):
    """The `quantization_config` of a checkpoint, parsed: which layer is stored in which format."""

    def format_of(self, layer: str, file: File) -> WeightFormat: ...

    def check_layers(self, layers: Collection[str]) -> None:
        """Raises ValueError where it names a linear of a block that `layers` does not have."""

    def stacked(self, layer: str) -> bool | None:
        """Whether the experts `layer` (all gate-up or all down of a block) are in codes, one tensor a field whatever
        the family does, or dense as it has them; None: in any format, as it has them."""

    def ignored(self, name: str) -> bool:
        """Whether a file may hold the tensor `name` although nothing reads it."""

    def renamed(self, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> Quantization:
        """The same for a model that calls its layers otherwise; `rename` maps the keys of a dict."""

    def to_dict(self) -> dict[str, Any]: ...
