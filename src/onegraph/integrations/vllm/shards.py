"""Where the tensors of a checkpoint go in vLLM's layers: a slot for each tensor of each linear that a layer is made of.

vLLM asks for one parameter a name, at its final shape, before anything is read (it restores registered storage later).
Linears have scales of their own, and in a mixed map formats of their own, so a parameter here is the slots of its
linears one after the other, as their formats' records describe them. One loader fills them, whatever the parallel layer
and whichever of vLLM's two loader protocols is at work: how a tensor is cut follows from its size on disk and the size
of its slot.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.weight import FLOATS, Field, Shape, Tensors, WeightFormat
from onegraph.formats.weight import Part as Cut
from onegraph.ops.weight import WeightOps, weight_ops

SHARD_IDS: Mapping[Any, int] = {"q": 0, "k": 1, "v": 2}
PIECES = {"in_proj_qkv": 3}  # linears that vLLM counts of one of the checkpoint's, beside others (Qwen3.5)
AFTER_NORM = "_after_norm"
ALIGN = 16  # bytes; where slots of different kinds share a parameter
CURE = "choose a smaller tensor_parallel_size, or keep this layer unquantized"
Span = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """One linear of the checkpoint, or this rank's share of it: outputs first..last of the layer. `pieces`: how many of
    them belong to each linear that vLLM counts, where files hold several as one (Phi-3's qkv_proj): ranks cut those."""

    name: str
    format: WeightFormat
    ops: WeightOps
    first: int
    last: int
    pieces: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Shard:
    """What this rank owns of a layer.

    Args:
        vocabulary: first and last of the rows in use where a vocabulary is cut; the slot's other rows are padding.
        by_row: whether each row stands for itself, as in an embedding, and rows may be cut anywhere.
    """

    rank: int = 0
    ranks: int = 1
    vocabulary: Span | None = None
    by_row: bool = False

    def rows(self, name: str, size: int, pieces: Sequence[int]) -> tuple[Span, ...] | None:
        """Which of `size` outputs go into a slot of `pieces`, one behind the other; None: all of them. Raises
        ValueError, as `columns` does, and where ranks would have to share one of several pieces."""
        if self.vocabulary is not None:
            return (self.vocabulary,)
        what, own = f"{name}: its number of outputs", sum(pieces)
        if len(pieces) == 1:
            span = self._share(what, size, own)
            return None if span is None else (span,)
        if own == size:
            return None
        if own * self.ranks != size:
            raise ValueError(f"{what} is {size} in the checkpoint, of which {own} is no share among {self.ranks} ranks")
        firsts = [sum(pieces[:i]) * self.ranks + self.rank * piece for i, piece in enumerate(pieces)]
        return tuple((first, first + piece) for first, piece in zip(firsts, pieces, strict=True))

    def columns(self, name: str, size: int, own: int) -> Span | None:
        """The same of inputs; ranks that outnumber the shares (of k and v) have the same. Raises ValueError where
        `own` is no share of them."""
        return self._share(f"{name}: its number of inputs", size, own)

    def _share(self, what: str, size: int, own: int) -> Span | None:
        if own == size:
            return None
        if size % own or self.ranks % (size // own):
            raise ValueError(f"{what} is {size} in the checkpoint, of which {own} is no share among {self.ranks} ranks")
        first = self.rank // (self.ranks // (size // own)) * own
        return first, first + own


@dataclass(frozen=True)
class Slot:
    """A tensor of one part: `field` in the file, `kept` in memory, rows (or bytes) first..last of the parameter."""

    suffix: str
    field: Field
    kept: Field
    shape: Shape
    dtype: torch.dtype
    first: int
    last: int
    packed: bool  # in bytes

    def view(self, parameter: Tensor) -> Tensor:
        """What of the parameter is this tensor; no copy."""
        if not self.kept.rows and not self.packed:
            return parameter[self.first]
        rows = parameter[self.first : self.last]
        return rows.view(self.dtype).view(self.shape) if self.packed else rows


class Slots:
    """The parameters of one layer of vLLM, and what of them belongs to which linear.

    A parameter has the name of its tensors in a file. Those with a dimension of outputs lie row under row, the others
    have a dimension more, that of the parts: of E8P codes int16 [n, k/8], in_scale float32 [parts, k], out_scale
    float32 [n], scale float32 [parts]. Tensors of different kinds (another dtype or width) are bytes, uint8 [bytes].

    Args:
        parts: the checkpoint's linears and their formats. rows: outputs of each on this rank; if there is one, or where
            `PIECES` says so, of each linear that vLLM makes of it. k: inputs on this rank.
        dtype: of what a format leaves in the dtype of the activations.

    Raises ValueError where the parts do not fit vLLM's layer.
    """

    def __init__(
        self, parts: Mapping[str, WeightFormat], rows: Sequence[int], k: int, share: Shard, dtype: torch.dtype
    ) -> None:
        first = next(iter(parts))
        counts = [PIECES.get(name.rpartition(".")[2], 1) for name in parts] if len(parts) > 1 else [len(rows)]
        if sum(counts) != len(rows):
            raise ValueError(f"{first}: vLLM makes {len(rows)} linears of it, the checkpoint has {len(parts)}")
        ends = list(accumulate(counts))
        pieces = [tuple(rows[end - count : end]) for count, end in zip(counts, ends, strict=True)]
        self._owners = [index for index, count in enumerate(counts) for _ in range(count)]  # of each of vLLM's linears
        self.k, self.share, self.parts = k, share, list[Part]()
        found = defaultdict[str, list[tuple[int, str, Field, Field]]](list)
        for (name, format), own in zip(parts.items(), pieces, strict=True):
            try:
                format.check_size(sum(own), k)
            except ValueError as error:
                raise ValueError(f"{name}: {error}; {CURE}") from None
            at = self.parts[-1].last if self.parts else 0
            self.parts.append(Part(name, format, weight_ops(format), at, at + sum(own), own))
            names = format.names((), name)
            for key, field in format.stored.items():
                suffix = names[key].removeprefix(f"{name}.")
                found[suffix].append((len(self.parts) - 1, key, field, format.fields.get(key, field)))
        self.slots: list[dict[str, Slot]] = [{} for _ in self.parts]
        self.shapes: dict[str, tuple[Shape, torch.dtype]] = {}
        for suffix, tensors in found.items():
            self._place(suffix, tensors, dtype)
        self.taken = [  # by the ops; what a tracer follows is plain dicts
            {key: slot for key, slot in slots.items() if key in part.format.fields}
            for part, slots in zip(self.parts, self.slots, strict=True)
        ]
        self.constants: tuple[str, ...] = ()
        self.normed: frozenset[str] = frozenset()  # suffixes of tensors that the weight of a norm goes into
        self.loaded: set[tuple[str, int]] = set()
        self.sizes: dict[tuple[int, str], Span] = {}  # outputs and inputs of each part on disk, as its tensors allow

    def _place(self, suffix: str, tensors: Sequence[tuple[int, str, Field, Field]], dtype: torch.dtype) -> None:
        """Lays out the parameter `suffix`: (part, key, field in the file, field in memory) of its tensors in order."""
        shapes = [kept.shape(self.parts[index].rows, self.k) for index, _, _, kept in tensors]
        kinds = {
            (kept.dtype or dtype, shape[1:] if kept.rows else shape)
            for shape, (*_, kept) in zip(shapes, tensors, strict=True)
        }
        at, packed = 0, len(kinds) > 1
        for shape, (index, key, field, kept) in zip(shapes, tensors, strict=True):
            kind = kept.dtype or dtype
            if packed:
                at = -(-at // ALIGN) * ALIGN
            count = math.prod(shape) * kind.itemsize if packed else shape[0] if kept.rows else 1
            self.slots[index][key] = Slot(suffix, field, kept, shape, kind, at, at + count, packed)
            at += count
        ((kind, trailing),) = ((torch.uint8, ()),) if packed else kinds
        self.shapes[suffix] = (at, *trailing), kind

    def create(self, layer: Any) -> None:
        """Registers the parameters on `layer`, at their final shape."""
        for suffix, (shape, kind) in self.shapes.items():
            parameter: Any = nn.Parameter(torch.empty(shape, dtype=kind), requires_grad=False)
            parameter.weight_loader = self._loader(suffix)
            layer.register_parameter(suffix, parameter)

    def _loader(self, suffix: str) -> Callable[..., None]:
        """`load` of one parameter as vLLM knows loaders: a function, whose arguments it binds by these names when it
        reloads weights."""

        def weight_loader(param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
            self.load(suffix, param, loaded_weight, loaded_shard_id)

        return weight_loader

    def load(self, suffix: str, parameter: Tensor, tensor: Tensor, shard_id: Any = None) -> None:
        """vLLM's `weight_loader`: copies this rank's share of one tensor of the checkpoint into its slot.

        Raises ValueError that names the tensor: of a linear that is fused on disk, of another shape or dtype than its
        format asks for, or that cannot be cut for this rank.
        """
        shard_id = getattr(tensor, "shard_id", None) if shard_id is None else shard_id
        one = shard_id[0] if isinstance(shard_id, tuple) else shard_id  # several at once: they lie one behind the other
        at = one if isinstance(one, int) else SHARD_IDS.get(one, 0)
        index = self._owners[at] if at < len(self._owners) else len(self.parts)
        if (shard_id is None) != (len(self.parts) == 1) or index >= len(self.parts):
            raise ValueError(f"{self.parts[0].name}.{suffix}: comes as part {shard_id!r} of {len(self.parts)} linears")
        part = self.parts[index]
        slot = next((slot for slot in self.slots[index].values() if slot.suffix == suffix), None)
        if slot is None:
            raise ValueError(f"{part.name}.{suffix} is in the checkpoint; {part.format} has no such tensor")
        field, target = slot.field, slot.view(parameter.data)
        allowed = field.stored or ((field.dtype,) if field.dtype else FLOATS)
        if tensor.dim() != len(field.shape(1, 1)) or tensor.dtype not in allowed:
            kinds = " or ".join(str(kind).removeprefix("torch.") for kind in allowed)
            raise ValueError(
                f"{part.name}.{suffix} is {tensor.dtype} of {tensor.dim()} dimensions; in {part.format} it must be "
                f"{kinds} of {len(field.shape(1, 1))}"
            )
        self._agree(index, suffix, field, tensor)
        spans, columns = self._owned(part, field, tensor)
        tensor = field.cut(tensor, Cut(columns=columns))
        if field.rows and spans is not None:
            tensor = torch.cat([field.cut(tensor, Cut(rows=span)) for span in spans], dim=field.row_dim)
            target.zero_()  # the padding of a vocabulary
            target = field.cut(target, Cut(rows=(0, sum(last - first for first, last in spans))))
        target.copy_(tensor if target.is_floating_point() else tensor.view(target.dtype))
        self.loaded.add((suffix, index))

    def _agree(self, index: int, suffix: str, field: Field, tensor: Tensor) -> None:
        """Raises ValueError for a tensor of another size on disk than those of its layer that came before: codes of
        another rate would pass for a layer of which ranks have a share."""
        dims = (("outputs", field.rows, 1, field.row_dim), ("inputs", field.columns, field.each, -1))
        for what, unit, each, dim in ((what, unit, each, dim) for what, unit, each, dim in dims if unit):
            size = tensor.shape[dim]
            count, key = size // each, (index, what)
            low, high = self.sizes.get(key, (1, count * unit))
            low, high = max(low, (count - 1) * unit + 1), min(high, count * unit)
            if size % each or low > high:
                raise ValueError(
                    f"{self.parts[index].name}.{suffix} has shape {tuple(tensor.shape)}, which is no tensor of "
                    f"{self.parts[index].format} with as many {what} as the others of the layer"
                )
            self.sizes[key] = low, high

    def _owned(self, part: Part, field: Field, tensor: Tensor) -> tuple[tuple[Span, ...] | None, Span | None]:
        """Which rows and columns of a layer with this tensor are this rank's, None for all. Raises ValueError where
        they are no layer of their own."""

        def size(dim: int, unit: int, own: int, each: int = 1) -> int:
            count = tensor.shape[dim] // each
            return own if count == -(-own // unit) else count * unit  # a last group may be smaller

        n, k, spans, columns = part.rows, self.k, None, None
        if field.rows:
            n = size(field.row_dim, field.rows, n)
            spans = self.share.rows(part.name, n, part.pieces)
        if field.columns:
            k = size(-1, field.columns, k, field.each)
            columns = self.share.columns(part.name, k, self.k)
        rows = () if spans is None or self.share.by_row else spans
        try:
            for span in rows or (None,):
                part.format.check_part(n, k, Cut(span, columns))
        except ValueError as error:
            raise ValueError(f"{part.name}: {error}; {CURE}") from None
        return spans, columns

    # ------------------------------------------------------------------------------------------------ once it is loaded

    def tensors(self, layer: Any, index: int) -> Tensors:
        """The tensors of part `index` that its format's ops take; no copy."""
        return {key: slot.view(getattr(layer, slot.suffix)) for key, slot in self.taken[index].items()}

    def expect_norm(self, layer: Any, norm: Tensor) -> None:
        """Before loading: buffers for what the weight [k] of the norm in front is multiplied into, once both are there.

        They are persistent, since vLLM leaves other buffers alone when it reloads weights; no file brings them, so the
        layer is finished last of all, when the norm is there.
        """
        for index, part in enumerate(self.parts):
            plain = self.tensors(layer, index)
            after = part.format.after_norm(plain, norm)
            changed = {self.slots[index][key].suffix for key in plain if after[key] is not plain[key]}
            for suffix in changed - self.normed:
                layer.register_buffer(suffix + AFTER_NORM, torch.empty_like(getattr(layer, suffix)))
            self.normed |= changed

    def follow_norm(self, layer: Any, norm: Tensor) -> None:
        """Fills them, in place."""
        for index, part in enumerate(self.parts):
            after = part.format.after_norm(self.tensors(layer, index), norm)
            for key, slot in self.taken[index].items():
                if slot.suffix in self.normed:
                    slot.view(getattr(layer, slot.suffix + AFTER_NORM)).copy_(after[key])

    def finish(self, layer: Any, *, made_up: bool = False) -> None:
        """After loading: nothing may be missing, nor NaN; what the formats fold is folded, in place. `made_up`: nothing
        was loaded, as with vLLM's dummy weights; the formats make something up.

        Raises ValueError that names the tensor.
        """
        given = {suffix: getattr(layer, suffix).data for suffix in self.shapes}
        device = next(iter(given.values())).device
        self.settle(given, torch.Generator(device).manual_seed(0) if made_up else None)
        self.loaded.clear()
        self.sizes.clear()
        self.add_constants(layer, device)

    def settle(self, parameters: Tensors, made_up: torch.Generator | None) -> None:
        """`finish` of tensors that stand where parameters do, by the parameters' names."""
        for index, part in enumerate(self.parts):
            stored = {key: slot.view(parameters[slot.suffix]) for key, slot in self.slots[index].items()}
            if made_up is not None:
                part.format.fill(stored, self.k, made_up)
            else:
                self._check_loaded(index, stored)
            for key, tensor in part.format.fold(stored).items():
                if tensor is not stored[key]:
                    stored[key].copy_(tensor)
            for key in stored.keys() - part.format.fields.keys():
                stored[key].fill_(1)  # folded: it counts no more

    def add_constants(self, layer: Any, device: torch.device) -> None:
        """Registers what the formats' ops take besides."""
        for part in self.parts:
            constants = part.format.constants(device)
            for key, tensor in constants.items():
                layer.register_buffer(key, tensor, persistent=False)
            self.constants = tuple({*self.constants, *constants})

    def _check_loaded(self, index: int, stored: Tensors) -> None:
        for key, tensor in stored.items():
            suffix = self.slots[index][key].suffix
            if (suffix, index) not in self.loaded:
                raise ValueError(f"the checkpoint holds no {self.parts[index].name}.{suffix}")
            if tensor.dtype.is_floating_point and not bool(tensor.isfinite().all()):
                raise ValueError(f"{self.parts[index].name}.{suffix} holds NaN or infinite values; the file is damaged")

    def joined(self, layer: Any) -> bool:
        """Whether all parts, as they lie, are one layer of one format."""
        first = self.parts[0].format
        same = all(part.format is first for part in self.parts)
        return same and first.joins([self.tensors(layer, index) for index in range(len(self.parts))])

    def kernel_args(
        self, layer: Any, index: int | None, *, rows: int | None = None, after_norm: bool = False
    ) -> Tensors:
        """What the ops take for part `index`, or for all parts where they are one layer (None): tensors and constants.
        rows: only so many, the first. No copy."""
        found = {key: getattr(layer, key) for key in self.constants}
        for key, slot in self.taken[index or 0].items():
            name = slot.suffix + AFTER_NORM if after_norm and slot.suffix in self.normed else slot.suffix
            whole = getattr(layer, name)
            found[key] = whole if index is None and slot.kept.rows else slot.view(whole)
            if rows is not None:
                found[key] = slot.kept.cut(found[key], Cut(rows=(0, rows)))
        return found
