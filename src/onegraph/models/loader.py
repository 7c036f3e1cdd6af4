"""From a checkpoint to layers, for every family: what must be there, and each tensor streamed to its device.

A family says what it is made of (`Parts`) and under which names its files store that; the formats say which tensors a
linear has. Everything is checked before anything is read. Then each tensor goes from its file through pinned memory to
its device (`models/prefetch.py`) and is joined there. On a CPU it is a copy: a view would keep all of its file mapped.
"""

import ctypes
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint, finite
from onegraph.formats.dense import DENSE
from onegraph.formats.files import CheckpointError
from onegraph.formats.fused import OneOfStack, expected_stack, stack_names
from onegraph.formats.table import UNWRITTEN
from onegraph.formats.weight import FLOATS, WHOLE, Expected, Field, Part, Tensors, WeightFormat, check_conversion
from onegraph.models.parts import Family
from onegraph.models.prefetch import AHEAD_BYTES, Prefetch
from onegraph.models.stream import Stream
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import ConcatLinear, GroupedLinear, Linear, PackedLinear, dense, join
from onegraph.nn.lora import Adapters, LoraLinear
from onegraph.ops.cpu.packed import packs
from onegraph.ops.weight import weight_ops

if TYPE_CHECKING:
    from onegraph.models.expert_memory import ExpertMemory

Held = Literal["int8", "float16"]
"""How a CPU may hold the weights of linears: see `Loader`."""

TRIM_BYTES = 1 << 28  # read of files, after which freed memory goes back to the system
PACKING_BYTES = 1 << 28  # float32 weights that wait to be packed, besides those of the last layer

_BLOCK = re.compile(r"(.*?)\b(\d+)\.")  # of the decoder: what stands before its number, and the number


class Loader:
    """The layers of one checkpoint, made when asked for.

    Args:
        config: see `Family`.
        dtype: of activations and dense weights.
        decode: make dense layers of quantized ones, for a device whose time would go into reading codes.
        held: what a CPU holds linears in, whatever they are stored as: "int8" those of blocks by row, experts too, and
            the head in float16 where `ops.cpu.packed.packs`, "float16" all of them, experts not. Activations are
            float32 then.
        decode_experts: likewise of experts in one tensor, to quantize them anew.
        ahead: prefetch tensors for a GPU; not if parts of layers are loaded.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Family,
        dtype: torch.dtype,
        *,
        decode: bool = False,
        held: Held | None = None,
        decode_experts: bool = False,
        ahead: bool = True,
    ) -> None:
        if dtype not in FLOATS:
            raise ValueError(f"dtype is {dtype}; allowed are float32, bfloat16 and float16")
        self.checkpoint, self.dtype = checkpoint, dtype
        self.decode, self.held, self.decode_experts = decode, held, decode_experts
        self.decoded: frozenset[str] = frozenset()  # linears that become dense for reasons of their own
        self.parts, self.quantization = config.parts, config.quantization
        self.stored = {config.family_name(name): name for name in checkpoint.names}
        self._streams: dict[torch.device, Stream] = {}
        self._reading, self._allowed = False, ahead
        self._ahead: Prefetch | None = None
        self._claims: list[tuple[Tensor, Callable[[], str]]] = []
        self._told: _Told | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._packing: deque[tuple[PackedLinear, int]] = deque()  # layers in the pool, and their bytes in float32
        self._untrimmed = 0
        self.adapters: Adapters | None = None  # whose additions linears are made with
        self.expert_memory: ExpertMemory | None = None  # where experts stay in host memory

    # ---------------------------------------------------------------------------------------------- what must be there

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def info(self, name: str) -> Any:
        return self.checkpoint.info(self.stored.get(name, name))

    def format_of(self, layer: str) -> WeightFormat:
        if self.quantization is None or f"{layer}.weight" in self.parts.tensors:
            return DENSE
        return self.quantization.format_of(layer, self)

    def stack(self, name: str) -> tuple[WeightFormat, dict[str, str]]:
        """`formats.fused.stack_names` of a stack of experts."""
        return stack_names(self, name, self.quantization)

    @cached_property
    def tied(self) -> bool:
        """Whether the head is the embedding's own weight: tied by the config, neither of the two quantized, and no
        head of its own in the files."""
        ends = self.parts.head, self.parts.embedding[0]
        return self.parts.tied and all(self.format_of(name) is DENSE for name in ends) and not self.own_head

    @cached_property
    def own_head(self) -> bool:
        """Whether the files hold a dense head that differs from the embedding although the config ties the two. It is
        the head then, as in transformers. One that is not written yet counts as such."""
        names = [f"{name}.weight" for name in (self.parts.head, self.parts.embedding[0])]
        if not self.parts.tied or not all(name in self for name in names):
            return False
        head_info, info = map(self.info, names)
        if head_info.shape != info.shape or head_info.offset == UNWRITTEN:
            return True
        head, embedding = (self.checkpoint.tensor(self.stored[name]) for name in names)
        return not torch.equal(head, embedding.to(head.dtype))

    def layers(self) -> dict[str, tuple[int, int, bool]]:
        """Every layer that may be quantized and is in the file: the linears and the embedding."""
        name, (rows, columns) = self.parts.embedding
        absent = {*self.parts.shared, *([self.parts.head] if self.tied else [])}
        found = self.parts.linears | {name: (rows, columns, False)}
        return {layer: size for layer, size in found.items() if layer not in absent}

    def expected(self) -> Expected:
        """Every tensor that the config needs, by the family's name: (shape, dtypes allowed)."""
        found: Expected = {}
        for layer, (n, k, bias) in self.layers().items():
            found |= self.format_of(layer).expected(self, layer, n, k, bias)
        for name, (experts, n, k, transposed, bias) in self.parts.stacks.items():
            form: dict[str, Any] = {"transposed": transposed, "quantization": self.quantization}
            found |= expected_stack(self, name, experts, n, k, bias=bias, **form)
        return found | dict(self.parts.tensors)

    def check(self) -> None:
        """Raises CheckpointError that names each tensor missing, of a wrong shape or dtype, or not asked for; and
        ValueError where the config names a layer that the model does not have, or one cannot be stored so."""
        if self.quantization is not None:
            inside = [name for name in self.parts.linears if name != self.parts.head]
            self.quantization.check_layers([*inside, *self.parts.stacks, *self.parts.single])
        expected = {self.stored.get(name, name): what for name, what in self.expected().items()}
        ignored = {stored for name, stored in self.stored.items() if self._ignored(name)}
        self.checkpoint.check(expected, optional=ignored)
        if self.own_head:
            warnings.warn(self.about_head, stacklevel=2)

    @property
    def about_head(self) -> str:
        """What there is to say of `own_head`."""
        return (
            f"{self.checkpoint.path}: config.json has tie_word_embeddings, and {self.parts.head}.weight differs from "
            "the embedding; the file's head is used"
        )

    def _ignored(self, name: str) -> bool:
        spare = self.tied and name == f"{self.parts.head}.weight"
        return spare or self.parts.ignored(name) or (self.quantization is not None and self.quantization.ignored(name))

    def device_bytes(self) -> dict[str, int]:
        """Bytes on the device of every layer, stack of experts and other tensor, by the family's name."""
        found = {}
        for name in self.parts.tensors:
            info = self.info(name)  # some are kept in a wider dtype of the file's
            wide = torch.promote_types(info.dtype, self.dtype) if info.dtype in FLOATS else info.dtype
            found[name] = info.nbytes // info.dtype.itemsize * wide.itemsize
        for layer, (n, k, bias) in self.layers().items():
            format = DENSE if layer in self.decoded or self.is_padded(layer) else self.format_of(layer)
            found[layer] = format.device_bytes(n, k, self.dtype, bias)
        for name, (experts, n, k, _, bias) in self.parts.stacks.items():
            format = self.stack(name)[0]
            found[name] = experts * (format.device_bytes(n, k, self.dtype) + 4 * n * bias)
        return found

    @property
    def expert_bytes(self) -> dict[str, int]:
        """Of `device_bytes`, those of routed experts, one by one or in stacks."""
        part = self.parts.components.get("experts")
        found = {} if part is None else self.device_bytes()
        return {name: size for name, size in found.items() if part is not None and re.search(part.layers, name)}

    @property
    def weight_bytes(self) -> int:
        """Bytes on the device of all weights."""
        held = self.expert_memory
        more = 0 if held is None else held.device_bytes - held.host_bytes
        return sum(self.device_bytes().values()) + more

    def unread(self, device: torch.device) -> list[str]:
        """Linears in codes that no kernel of this GPU multiplies by as they are."""
        index = torch.cuda.current_device() if device.index is None else device.index
        found = []
        for layer, (n, k, _) in self.layers().items():
            format = self.format_of(layer)
            if layer in self.parts.linears and format.coded and not self.is_padded(layer):
                reads = weight_ops(format).reads
                if reads is not None and not reads(format, n, k, self.dtype, index):
                    found.append(layer)
        return found

    # -------------------------------------------------------------------------------------------------------- reading

    @contextmanager
    def reading(self, progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
        """Within it a whole model is loaded: tensors for a GPU are prefetched in the order of `units`, and wrong values
        raise an error when a layer is complete (`forget`), or at the end.

        progress: called as progress(bytes read, bytes in all).
        """
        if progress is not None:
            self._told = _Told(progress, sum(self.info(name).nbytes for name in self.stored if not self._ignored(name)))
        self._reading = True
        if self._packs and (threads := torch.get_num_threads()) > 1:
            self._pool = ThreadPoolExecutor(threads)
        try:
            yield
            self._settle()
            self._wait_packed(0)
            if self._told is not None:
                self._told(self._told.total)  # where parts are asked for, some is nobody's
        finally:
            self._reading, self._told = False, None
            self._claims.clear()
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None
                self._packing.clear()
            _trim()
            if self._ahead is not None:
                self._ahead.close()
                self._ahead = None
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # where tensors waited for being asked for

    @cached_property
    def units(self) -> list[list[str]]:
        """What a device will ask for, by the file's names and in about that order: the ends, each block, the rest."""
        first = f"{self.parts.embedding[0]}.", f"{self.parts.head}."
        found: dict[tuple[int, str, int], list[str]] = {}
        experts = () if self.expert_memory is None else self.expert_bytes
        for name, stored in self.stored.items():
            layers = name, name.rpartition(".")[0], name.rpartition("_")[0]  # a stack, a field of a layer or of a stack
            if not self._ignored(name) and not any(layer in experts for layer in layers):
                block = _BLOCK.match(name)
                key = (1, block[1], int(block[2])) if block else (0 if name.startswith(first) else 2, "", 0)
                found.setdefault(key, []).append(stored)
        return [found[key] for key in sorted(found)]

    @cached_property
    def unit_bytes(self) -> list[int]:
        """Of `units`, as they are stored."""
        return [sum(self.info(name).nbytes for name in unit) for unit in self.units]

    @property
    def landing_bytes(self) -> int:
        """What of the file a GPU holds at most that nobody has asked for yet."""
        return min(sum(self.unit_bytes), AHEAD_BYTES + max(self.unit_bytes, default=0))

    def tensor(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in `dtype`, the model's unless another is given."""
        return self._whole(name, device, dtype or self.dtype)

    def float32(self, name: str, device: torch.device) -> Tensor:
        """A tensor that stays float32 in any model."""
        return self.tensor(name, device, torch.float32)

    def weight(self, layer: str, device: torch.device, part: Part = WHOLE) -> tuple[WeightFormat, Tensors]:
        """The tensors of a layer, or of a part of it, in its format; of a padded one those of the file. Raises
        ValueError where the part is no layer."""
        format = self.format_of(layer)
        if part != WHOLE:
            n, k, _ = self.layers()[layer]
            format.check_part(n, k, part)
        tensors = format.read(_Reader(self, device), layer, part)
        spare = f"{layer}.bias"  # of a linear that has none, as older tools write it: passed over only where it is 0
        if spare in self and not self.parts.linears.get(layer, (0, 0, True))[2]:
            zero = (self.float32(spare, device) == 0).all()
            self.require(zero, lambda: f"{spare} is not zero, and config.json gives {layer} no bias")
        format.check_dtype(layer, tensors, self.dtype, self.require)
        return format, tensors

    def is_padded(self, layer: str) -> bool:
        """Whether the file has more outputs or inputs of a linear than the model."""
        n, k, _ = self.parts.linears.get(layer, (0, 0, False))
        return self.format_of(layer).stored_size(self, layer, n, k) != (n, k)

    def forget(self) -> None:
        """A layer is done: drops the maps of the files read so far, whose pages count as this process's memory. Raises
        CheckpointError for values of the layer that no layer has."""
        self._settle()
        if self._ahead is not None:
            self._ahead.drop()
        self.checkpoint.forget()
        if self._untrimmed >= TRIM_BYTES:  # after each layer it cost a third of a CPU's time to load a small model
            self._untrimmed = 0
            _trim()

    def require(self, ok: Tensor, message: Callable[[], str]) -> None:
        """See `formats.weight.Source`."""
        if self._sent(ok.device):
            self._claims.append((ok, message))
        elif not ok:
            raise CheckpointError(message())

    def _sent(self, device: torch.device) -> bool:
        """Whether tensors are copied there while others are asked for; on a CPU they are mapped."""
        return self._reading and self._allowed and device.type != "cpu"

    def _settle(self) -> None:
        claims, self._claims = self._claims, []
        for device in dict.fromkeys(ok.device for ok, _ in claims):
            if device.type == "meta":  # which has no values
                continue
            here = [(ok, message) for ok, message in claims if ok.device == device]
            for held, (_, message) in zip(torch.stack([ok for ok, _ in here]).tolist(), here, strict=True):
                if not held:
                    raise CheckpointError(message())

    def _whole(self, name: str, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """A tensor on the device, as `dtype` (None: as it is stored). Raises CheckpointError where codes would become
        numbers."""
        stored, value = self.stored.get(name, name), None
        if self._sent(device):
            if self._ahead is None:
                spans = {each: self.info(each) for unit in self.units for each in unit}
                self._ahead = Prefetch(spans, self.units, pinned=device.type == "cuda")
            value = self._ahead.take(stored, device)
        if value is None:
            read = self.checkpoint.unrounded(stored)
            value = self._stream(device)(read, dtype, name)
            if value.data_ptr() == read.data_ptr():  # one tensor that stays would keep all of its file's pages
                value = value.clone()
        else:
            kind = value.dtype
            check_conversion(name, kind, dtype or kind)
            if (ok := finite(value)) is not None:
                self.require(ok, lambda: self.checkpoint.not_finite(stored, kind))
            value = value.to(dtype or kind)
        self._untrimmed += value.nbytes
        if self._told is not None:
            self._told(self.info(name).nbytes)
        return value

    def _stream(self, device: torch.device) -> Stream:
        if device not in self._streams:
            self._streams[device] = Stream(device)
        return self._streams[device]

    # --------------------------------------------------------------------------------------------------- making layers

    def linear(self, layer: str, device: torch.device, part: Part = WHOLE) -> Linear:
        """A linear, or a part of it; the first part of its inputs has the bias."""
        return self._packed(self._linear(layer, device, part))

    def adapted(self, layer: str, device: torch.device, part: Part = WHOLE) -> Linear | LoraLinear:
        """`linear`, with what adapters add to it."""
        made = self.linear(layer, device, part)
        if self.adapters is None:
            return made
        return self.adapters.wrap(made, [(layer, made.out_features)], device, self.dtype) or made

    def _linear(self, layer: str, device: torch.device, part: Part) -> Linear:
        """`linear` as it may be joined to others."""
        if self.is_padded(layer):
            return self._unpadded(layer, device, part)
        format, tensors = self.weight(layer, device, part)
        bias = None
        if self.parts.linears[layer][2] and (part.columns is None or part.columns[0] == 0):
            dtype = torch.float32 if format.coded else self.dtype
            bias = Field(dtype, rows=1).cut(self.tensor(f"{layer}.bias", device, dtype), part)
        made = Linear(format, tensors, bias)
        if self.held == "int8" and layer != self.parts.head:
            return made.int8()
        return made.dense(self.dtype) if format.coded and self._decodes(layer) else made

    def _unpadded(self, layer: str, device: torch.device, part: Part) -> Linear:
        """`_linear` of a padded layer: decoded, since rotations mix what is padded with the rest."""
        n, k, biased = self.parts.linears[layer]
        padded = Linear(*self.weight(layer, device)).dense(self.dtype).tensors["weight"]
        bias = self.tensor(f"{layer}.bias", device, self.dtype)[:n].clone() if biased else None
        made = dense(padded[:n, :k].clone(), bias)
        if part != WHOLE:
            first = part.columns is None or part.columns[0] == 0
            made = made.part(rows=part.rows, columns=part.columns, keep_bias=first)
        return made.int8() if self.held == "int8" and layer != self.parts.head else made

    def _decodes(self, layer: str) -> bool:
        return self.decode or self.held is not None or layer in self.decoded

    def runs_as_stored(self, layer: str) -> bool:
        """Whether a linear is run in the codes that the file has, and no adapter adds to it."""
        adapted = self.adapters is not None and self.adapters.changes(layer)
        return self.format_of(layer).coded and not self._decodes(layer) and not adapted

    @property
    def _packs(self) -> bool:
        """Whether dense linears are packed in float16."""
        return self.held is not None and packs()

    def _packed(self, linear: Linear) -> Linear:
        """The linear packed where that is done; in the pool, while the next ones are decoded."""
        if not self._packs or linear.format is not DENSE:
            return linear
        made = linear.float16(self._pool)
        if self._pool is not None and isinstance(made, PackedLinear):
            self._wait_packed(PACKING_BYTES)
            self._packing.append((made, 4 * made.out_features * made.in_features))
        return made

    def _wait_packed(self, allowed: int) -> None:
        """Until so many bytes at most wait in the pool."""
        while sum(size for _, size in self._packing) > allowed:
            self._packing.popleft()[0].wait()

    def siblings(
        self,
        layers: Sequence[str],
        device: torch.device,
        *,
        joined: bool = True,
        parts: Sequence[Part] | None = None,
    ) -> Linear | ConcatLinear:
        """Linears that read the same input, or of each a part: as one where that is exact, unless `joined` is False."""
        each = [WHOLE] * len(layers) if parts is None else parts
        linears = [self._linear(layer, device, part) for layer, part in zip(layers, each, strict=True)]
        made = join(linears) if joined else ConcatLinear(linears)
        if isinstance(made, Linear):
            made = self._packed(made)
        else:
            made = ConcatLinear([self._packed(one) for one in linears])
        if self.adapters is None:
            return made
        outputs = [(layer, linear.out_features) for layer, linear in zip(layers, linears, strict=True)]
        return self.adapters.wrap(made, outputs, device, self.dtype) or made

    def grouped(
        self, layer: str, groups: int, device: torch.device, some: tuple[int, int] | None = None
    ) -> GroupedLinear:
        """`groups` linears whose rows are stored one group after the other, or `some` of them, first and last. Raises
        ValueError where one is no layer."""
        n, k, _ = self.layers()[layer]
        first, last = some or (0, groups)
        rows = n // groups
        part = WHOLE if some is None else Part(rows=(first * rows, last * rows))
        format, tensors = self.weight(layer, device, part)
        for start in range(0, n, rows):
            format.check_part(n, k, Part(rows=(start, start + rows)))
        split = {key: _ungrouped(tensors[key], field, last - first) for key, field in format.fields.items()}
        return GroupedLinear(format, split)

    def matrices(self, name: str, device: torch.device, transposed: bool) -> Iterator[Tensors]:
        """Those of a stack of experts, one at a time. Raises CheckpointError for values that no layer has."""
        format, names = self.stack(name)
        stack = {key: self._whole(stored, device, None) for key, stored in names.items()}
        turned = transposed and format is DENSE
        for i in range(min(len(tensor) for tensor in stack.values())):
            one = {key: tensor[i] for key, tensor in stack.items()}
            layer = f"{name} of expert {i}"
            read = format.read(OneOfStack(format, one, self.dtype, self.require), layer)
            format.check_dtype(layer, read, self.dtype, self.require)
            yield {key: tensor.t() for key, tensor in read.items()} if turned else read

    def embedding(self, device: torch.device, scale: float = 1.0) -> Embedding:
        name = self.parts.embedding[0]
        shared = self.tied and not self._packs
        if self.held and not shared and self.format_of(name) is DENSE:  # of which a step looks up some rows
            stored = self._whole(f"{name}.weight", device, None)
            return Embedding(DENSE, {"weight": stored}, self.dtype, scale=scale)
        format, tensors = self.weight(name, device)
        return Embedding(format, tensors, self.dtype, scale=scale)

    def head(self, embedding: Embedding, device: torch.device, part: Part = WHOLE) -> Linear:
        """The linear to logits, or a part of it; shares the embedding's weight where the two are tied, unless it is
        packed."""
        if not self.tied:
            return self.linear(self.parts.head, device, part)
        whole = Linear(embedding.format, embedding.tensors)
        return self._packed(whole if part == WHOLE else whole.part(rows=part.rows))


def _trim() -> None:
    """glibc keeps what was freed between tensors that stay: 1.2 GB of a model of 8 billion weights."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _ungrouped(tensor: Tensor, field: Field, groups: int) -> Tensor:
    """[G n, ..] -> [G, n, ..]; what has no rows is the same for all groups."""
    if not field.rows:
        return tensor.expand(groups, *tensor.shape)
    result: Tensor = tensor.unflatten(field.row_dim, (groups, -1))
    return result


class _Reader:
    """A loader's file as the formats read it: on one device."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __contains__(self, name: object) -> bool:
        return name in self.loader

    def info(self, name: str) -> Any:
        return self.loader.info(name)

    def read(self, name: str, field: Field, part: Part) -> Tensor:
        dtype = self.loader.dtype if field.dtype is None else None
        if part == WHOLE:
            return self.loader._whole(name, self.device, dtype)
        value = field.cut(self.loader.checkpoint.unrounded(self.loader.stored.get(name, name)), part)
        if self.loader._told is not None:
            self.loader._told(value.nbytes)
        return self.loader._stream(self.device)(value, dtype, name)

    def require(self, ok: Tensor, message: Callable[[], str]) -> None:
        self.loader.require(ok, message)


class _Told:
    """Calls `progress` with the bytes read, some thousand times at most."""

    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self.progress, self.total, self.done, self.said = progress, total, 0, 0
        progress(0, total)

    def __call__(self, nbytes: int) -> None:
        self.done = min(self.done + nbytes, self.total)  # what is shared may be read twice
        if self.done - self.said >= self.total / 1000 or self.done == self.total:
            self.said = self.done
            self.progress(self.done, self.total)
