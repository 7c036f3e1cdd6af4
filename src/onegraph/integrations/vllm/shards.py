"""Where the tensors of a checkpoint go in vLLM's layers: a slot for each linear that a fused layer is made of.

vLLM asks for one parameter a name, at its final shape, before anything is read (it restores registered storage later).
E8P linears have signs and scales of their own, and in a mixed map rates of their own, so a parameter here is the slots
of its linears one after the other. One loader fills them, whatever the parallel layer and whichever of vLLM's two
loader protocols is at work: how a tensor is cut follows from its size on disk and the size of its slot.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.e8p import KEEP, hadamard_block, linear_tensors, residual_dtype

SHARD_IDS: Mapping[Any, int] = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True)
class Part:
    """One linear of the checkpoint, or this rank's share of it: outputs first..last of the layer."""

    name: str
    bits: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def residual(self) -> torch.dtype | None:
        return None if self.bits == KEEP else residual_dtype(self.bits)


@dataclass(frozen=True)
class Share:
    """What this rank owns of a layer.

    Args:
        vocabulary: first row and count of the rows in use where a vocabulary is cut; the slot's other rows are padding.
        rotated: whether the output side is rotated (an embedding's is not, so that any row stands for itself).
    """

    rank: int = 0
    ranks: int = 1
    vocabulary: tuple[int, int] | None = None
    rotated: bool = True

    def rows(self, name: str, size: int, slot: int) -> tuple[int, int]:
        """First row and count of what goes into a slot of `slot` rows. Raises ValueError, as `start` does."""
        if self.vocabulary is not None:
            first, count = self.vocabulary
            if self.rotated and count != size:
                _whole_blocks(f"{name}: its number of rows", size, first, count)
            return first, count
        return self.start(f"{name}: its number of outputs", size, slot), slot

    def start(self, what: str, size: int, part: int) -> int:
        """Where this rank's `part` of a dimension of `size` begins; ranks that outnumber the parts (of k and v) share.

        Raises ValueError where it is no part of it, or would cut a rotation block: such a slice is not a layer.
        """
        if part == size:
            return 0
        if size % part or self.ranks % (size // part):
            raise ValueError(
                f"{what} is {size} in the checkpoint, of which {part} is no share among {self.ranks} ranks"
            )
        first = self.rank // (self.ranks // (size // part)) * part
        _whole_blocks(what, size, first, part)
        return first


def _whole_blocks(what: str, size: int, first: int, part: int) -> None:
    block = hadamard_block(size)
    if part < 1 or first % block or hadamard_block(part) != block:
        raise ValueError(
            f"{what} is {size}, rotated in blocks of {block}, which a share of {part} would cut; choose a smaller "
            "tensor_parallel_size, or keep this layer unquantized"
        )


class Slots:
    """The parameters of one layer of vLLM, and what of them belongs to which linear.

    codes int16 [rows of E8P parts, k/8]; residual of their dtype, the same shape, or uint8 [bytes / (k/8), k/8] where
    rates are mixed; in_scale float32 [parts, k]; out_scale float32 [n]; scale float32 [parts];
    weight [rows of unquantized parts, k]. Raises ValueError where the parts do not fit vLLM's layer.
    """

    def __init__(self, parts: Mapping[str, int], rows: Sequence[int], k: int, share: Share) -> None:
        first = next(iter(parts))
        if len(parts) != len(rows):
            raise ValueError(f"{first}: vLLM makes {len(rows)} linears of it, the checkpoint has {len(parts)}")
        self.k, self.share, self.parts = k, share, list[Part]()
        for (name, bits), n in zip(parts.items(), rows, strict=True):
            if bits != KEEP:
                linear_tensors(n, k, bits)  # refuses what cannot be stored
            at = self.parts[-1].last if self.parts else 0
            self.parts.append(Part(name, bits, at, at + n))
        residuals = {part.residual for part in self.parts if part.residual is not None}
        self.residual: torch.dtype = residuals.pop() if len(residuals) == 1 else torch.uint8
        self.spans: dict[str, list[tuple[int, int]]] = {}
        for suffix, counts in {
            "codes": [0 if part.bits == KEEP else part.rows for part in self.parts],
            "residual": [part.rows * self._width(part) for part in self.parts],
            "weight": [part.rows if part.bits == KEEP else 0 for part in self.parts],
        }.items():
            ends = [sum(counts[: i + 1]) for i in range(len(counts))]
            self.spans[suffix] = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.loaded: set[tuple[str, int]] = set()

    def _width(self, part: Part) -> int:
        """Rows of the residual parameter that one row of the part's residual takes."""
        return 0 if part.residual is None else part.residual.itemsize // self.residual.itemsize

    @property
    def uniform(self) -> bool:
        """Whether all parts are stored at one rate."""
        return len({part.bits for part in self.parts}) == 1

    def create(self, layer: Any, dtype: torch.dtype) -> None:
        """Registers the parameters on `layer`, at their final shape; `dtype` is that of unquantized parts."""
        n, parts = self.parts[-1].last, len(self.parts)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((self.spans["codes"][-1][1], self.k // 8), torch.int16),
            "residual": ((self.spans["residual"][-1][1], self.k // 8), self.residual),
            "weight": ((self.spans["weight"][-1][1], self.k), dtype),
            "in_scale": ((parts, self.k), torch.float32),
            "out_scale": ((n,), torch.float32),
            "scale": ((parts,), torch.float32),
        }
        for suffix, (shape, kind) in shapes.items():
            if shape[0] == 0:
                continue
            parameter: Any = nn.Parameter(torch.empty(shape, dtype=kind), requires_grad=False)
            parameter.weight_loader = self._loader(suffix)
            layer.register_parameter(suffix, parameter)

    def _loader(self, suffix: str) -> Callable[..., None]:
        """`load` of one parameter as vLLM knows loaders: a function, whose arguments it binds by these names when it
        reloads weights."""

        def weight_loader(param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
            self.load(suffix, param, loaded_weight, loaded_shard_id)

        return weight_loader

    def view(self, suffix: str, parameter: Tensor, index: int) -> Tensor:
        """What of a parameter belongs to part `index`, in its own dtype and shape; no copy."""
        part = self.parts[index]
        if suffix in ("in_scale", "scale"):
            return parameter[index]
        if suffix == "out_scale":
            return parameter[part.first : part.last]
        first, last = self.spans[suffix][index]
        rows = parameter[first:last]
        if suffix == "residual" and part.residual != rows.dtype:
            assert part.residual is not None
            return rows.reshape(-1).view(part.residual).view(part.rows, self.k // 8)
        return rows

    def load(self, suffix: str, parameter: Tensor, tensor: Tensor, shard_id: Any = None) -> None:
        """vLLM's `weight_loader`: copies this rank's share of one tensor of the checkpoint into its slot.

        Raises ValueError that names the tensor: of a linear that is fused on disk, of another shape or dtype than its
        rate asks for, or that cannot be cut for this rank.
        """
        shard_id = getattr(tensor, "shard_id", None) if shard_id is None else shard_id
        index = shard_id if isinstance(shard_id, int) else SHARD_IDS.get(shard_id, 0)
        if (shard_id is None) != (len(self.parts) == 1) or index >= len(self.parts):
            raise ValueError(f"{self.parts[0].name}.{suffix}: comes as part {shard_id!r} of {len(self.parts)} linears")
        part = self.parts[index]
        name, target = f"{part.name}.{suffix}", self.view(suffix, parameter.data, index)
        exact = not tensor.dtype.is_floating_point or not target.dtype.is_floating_point
        if tensor.dim() != target.dim() or (exact and tensor.dtype != target.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype} of {tensor.dim()} dimensions; at {part.bits} bits it must be "
                f"{target.dtype} of {target.dim()}"
            )
        count = target.shape[0] if target.dim() else 0
        if suffix not in ("in_scale", "scale"):
            first, count = self.share.rows(part.name, tensor.shape[0], count)
            tensor = tensor.narrow(0, first, count)
        if suffix not in ("out_scale", "scale"):
            size, kept = tensor.shape[-1], target.shape[-1]
            inputs = self.k // kept  # that one element stands for: 8 in codes
            start = self.share.start(f"{part.name}: its number of inputs", size * inputs, self.k) // inputs
            tensor = tensor.narrow(-1, start, kept)
        if target.dim() and suffix != "in_scale":
            target[count:].zero_()  # the padding of a vocabulary
            target = target[:count]
        target.copy_(tensor)
        self.loaded.add((suffix, index))

    def fill(self, layer: Any) -> None:
        """What vLLM's dummy weights are for others: codes that are random, and scales that keep activations near 1."""
        generator = torch.Generator(layer.in_scale.device).manual_seed(0)
        for suffix in ("codes", "residual"):
            if (parameter := getattr(layer, suffix, None)) is not None:
                info = torch.iinfo(parameter.dtype)
                parameter.data.random_(info.min, info.max + 1, generator=generator)
        layer.in_scale.data.fill_(1.0)
        layer.out_scale.data.fill_(0.05 * self.k**-0.5)  # a row of Q has a root mean square of 4 to 20
        layer.scale.data.fill_(1.0)

    def finish(self, layer: Any) -> None:
        """After loading: nothing may be missing, nor NaN; the parts' global scales go into out_scale, in place.

        Raises ValueError that names the tensor.
        """
        for index, part in enumerate(self.parts):
            wanted = ["weight"] if part.bits == KEEP else list(linear_tensors(part.rows, self.k, part.bits))
            for suffix in wanted:
                if (suffix, index) not in self.loaded:
                    raise ValueError(f"the checkpoint holds no {part.name}.{suffix}")
                tensor = self.view(suffix, getattr(layer, suffix).data, index)
                if tensor.dtype.is_floating_point and not bool(tensor.isfinite().all()):
                    raise ValueError(f"{part.name}.{suffix} holds NaN or infinite values; the file is damaged")
            if part.bits != KEEP:
                self.view("out_scale", layer.out_scale.data, index).mul_(layer.scale.data[index])
                layer.scale.data[index] = 1.0
        self.loaded.clear()
