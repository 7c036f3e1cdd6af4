"""INT4: four-bit integers with a scale and a zero point for a group of inputs, as AWQ, GPTQ and compressed-tensors
publish them.

A linear W [n, k] is stored as

    W[i, j] = (codes[i, j] - zero[i, j // g]) * scale[i, j // g]

with codes and zeros from 0 to 15 and g inputs to a group, or one group of all. Two neighbouring columns share a byte,
the even one in the low half. What the tools write is brought to that when it is read, on the layer's device:

| AWQ (gemm)             | GPTQ                   | compressed-tensors (pack-quantized)    | here                     |
|------------------------|------------------------|----------------------------------------|--------------------------|
| qweight i32 [k, n/8]   | qweight i32 [k/8, n]   | weight_packed i32 [n, k/8]             | codes uint8 [n, k/2]     |
| scales [k/g, n]        | scales [k/g, n]        | weight_scale [n, k/g]                  | scale [n, k/g], as it is |
| qzeros i32 [k/g, n/8]  | qzeros i32 [k/g, n/8]  | weight_zero_point i32 [n/8, k/g], or 8 | zero uint8 [n, k/g]      |
| -                      | g_idx i32 [k]          | weight_g_idx i32 [k]                   | order int32 [k]          |

Eight codes of a word: lowest first; AWQ's are rows 0, 2, 4, 6, 1, 3, 5, 7. compressed-tensors counts from -8: its words
hold code + 8 and zero + 8, and symmetric layers have no zeros.

**Act-order**: g_idx gives each input's group, in any order. Columns are put in the order of their groups when they are
read; `order` [k] says which input each is, and the ops take x in that order.

Sources, read November 2026: AutoAWQ awq/modules/linear/gemm.py and awq/utils/packing_utils.py; AutoGPTQ
auto_gptq/nn_modules/qlinear; GPTQModel gptqmodel/utils/model.py; compressed-tensors compressors/pack_quantized.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.weight import FLOATS, WHOLE, Expected, Field, File, Part, Source, Tensors, WeightFormat

COLUMNS = 32  # groups and bounds of parts are multiples of it
ALL = 1 << 30  # columns of a group that has them all
WORD = 8  # codes
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the codes of a word, lowest first
MIDDLE = 8  # the zero of a symmetric layer
RMS = 6.5  # of a random code minus a random zero


@dataclass(frozen=True)
class Layout:
    """How files of one tool hold a layer.

    Args:
        suffixes: field -> suffix of its tensor.
        codes: outputs and inputs of a word of codes; zero_rows: outputs of a word of zeros.
        turned: whether inputs come first and outputs last.
        rows: which output of its eight each number of a word of outputs is, lowest first.
    """

    suffixes: Mapping[str, str]
    codes: tuple[int, int]
    zero_rows: int = WORD
    turned: bool = True
    rows: tuple[int, ...] = tuple(range(WORD))

    def field(self, key: str, columns: int, dtype: torch.dtype) -> Field:
        """Of a layer with groups of `columns`; where the layout is turned, rows and columns are."""
        rows, columns = {"codes": self.codes, "scale": (1, columns), "zero": (self.zero_rows, columns)}[key]
        rows, columns = (columns, rows) if self.turned else (rows, columns)
        return Field(dtype if key == "scale" else torch.int32, rows=rows, columns=columns)


_TURNED = {"codes": "qweight", "scale": "scales", "zero": "qzeros", "order": "g_idx"}
AWQ = Layout(_TURNED, codes=(WORD, 1), rows=AWQ_ROWS)
GPTQ = Layout(_TURNED, codes=(1, WORD))
PACKED = Layout(
    {
        "codes": "weight_packed",
        "scale": "weight_scale",
        "zero": "weight_zero_point",
        "order": "weight_g_idx",
        "shape": "weight_shape",
    },
    codes=(1, WORD),
    turned=False,
)


def is_int4(file: File, layer: str) -> bool:
    """Whether the file holds `layer` in words of integers, under any of the tools' names."""
    packed = f"{layer}.weight_packed"
    return f"{layer}.qweight" in file or (packed in file and file.info(packed).dtype == torch.int32)


def layout_of(file: Container[str], layer: str) -> Layout:
    """The layout of a layer's tensors: AWQ's and GPTQ's have the same names and differ in their shapes."""
    if f"{layer}.qweight" not in file:
        return PACKED
    words, scales = (f"{layer}.{suffix}" for suffix in ("qweight", "scales"))
    if scales not in file:
        raise CheckpointError(f"{quote(scales)} is missing beside {quote(words)}")
    shapes = [tuple(file.info(name).shape) for name in (words, scales)]  # type: ignore[attr-defined]  # a File
    if all(len(shape) == 2 for shape in shapes) and shapes[1][1]:
        (_, n), outputs = shapes[0], shapes[1][1]
        if n == outputs:
            return GPTQ
        if n * WORD == outputs:
            return AWQ
    raise CheckpointError(
        f"{quote(words)} has shape {list(shapes[0])} and {quote(scales)} {list(shapes[1])}; GPTQ has [k/8, n] and "
        "AWQ's gemm [k, n/8] beside [k/g, n]"
    )


class INT4Format(WeightFormat):
    """codes uint8 [n, k/2]; scale [n, k/g] in the dtype that the file has; zero uint8 [n, k/g]; with act-order besides
    order int32 [k]. Made by `int4`, one of each kind, so that layers of one kind are of one format.

    Args:
        columns: inputs of a group, a multiple of 32; `ALL`: one group of all.
        dtype: of scale: float16, bfloat16 or float32.
        order: whether the layer has act-order.
        less_one: whether GPTQ's words hold zero - 1.
        symmetric: whether every zero is 8, as the config says.
    """

    ops = "onegraph.ops.int4"
    group = WORD

    def __init__(self, columns: int, dtype: torch.dtype, order: bool, less_one: bool, symmetric: bool) -> None:
        self.columns, self.dtype, self.order = columns, dtype, order
        self.less_one, self.symmetric = less_one, symmetric
        groups = "one group a row" if columns == ALL else f"groups of {columns}"
        self.name = f"int4, {groups}{', act-order' if order else ''}"
        scale = Field(dtype, rows=1, columns=columns)
        codes, zero = Field(torch.uint8, rows=1, columns=2), Field(torch.uint8, rows=1, columns=columns)
        ordered = {"order": Field(torch.int32, columns=1)} if order else {}
        self.fields = MappingProxyType({"codes": codes, "scale": scale, "zero": zero} | ordered)
        packed = {key: PACKED.field(key, columns, dtype) for key in ("codes", "scale", "zero")}
        self._stored = MappingProxyType(packed | ordered)

    # ------------------------------------------------------------------------------------------------------ in a file

    @property
    def stored(self) -> Mapping[str, Field]:
        """As compressed-tensors has it."""
        return self._stored

    def names(self, file: Container[str], layer: str) -> dict[str, str]:
        layout = layout_of(file, layer)
        names = {key: f"{layer}.{suffix}" for key, suffix in layout.suffixes.items()}
        asked = {"codes", "scale"} | ({"order"} if self.order else set())
        if not (layout is PACKED and self.symmetric):
            asked.add("zero")
        return {key: name for key, name in names.items() if key in asked or name in file}

    def expected(self, file: File, layer: str, n: int, k: int, bias: bool = False) -> Expected:
        self.check_size(n, k)
        layout = layout_of(file, layer)
        found: Expected = {f"{layer}.bias": ((n,), FLOATS)} if bias else {}
        for key, name in self.names(file, layer).items():
            if key in ("order", "shape"):
                found[name] = ((k,), (torch.int32,)) if key == "order" else ((2,), (torch.int64, torch.int32))
                continue
            field = layout.field(key, self.columns, self.dtype)
            assert field.dtype is not None
            found[name] = field.shape(*((k, n) if layout.turned else (n, k))), (field.dtype,)
        return found

    def check_size(self, n: int, k: int) -> None:
        super().check_size(n, k)
        if self.columns != ALL and k % self.columns:
            raise ValueError(f"a linear of {n} x {k} cannot be stored as {self.name}; k % {self.columns} must be 0")

    def read(self, source: Source, layer: str, part: Part = WHOLE) -> Tensors:
        """The words are taken apart on the device that they are read to. Raises CheckpointError for scales that are not
        finite, a g_idx that is none, and another layer's shape."""
        layout, names = layout_of(source, layer), self.names(source, layer)
        turned = Part(part.columns, part.rows) if layout.turned else part
        found = {
            key: source.read(names[key], layout.field(key, self.columns, self.dtype), turned)
            for key in ("codes", "scale", "zero")
            if key in names
        }
        scale = (found["scale"].t() if layout.turned else found["scale"]).contiguous()
        source.require(
            torch.isfinite(scale).all(),
            lambda: f"{quote(names['scale'])} holds NaN or infinite scales; the file is damaged, fetch it again",
        )
        n, groups = scale.shape
        first = 0 if part.rows is None else part.rows[0] % WORD  # words have outputs before a part's first
        if "shape" in names and part == WHOLE:
            told = source.read(names["shape"], Field(torch.int64), WHOLE).tolist()
            if told != [n, found["codes"].shape[1] * WORD]:
                raise CheckpointError(
                    f"{quote(names['shape'])} says {told}; {quote(names['codes'])} holds "
                    f"{[n, found['codes'].shape[1] * WORD]}"
                )
        tensors = {"codes": _codes(found["codes"], layout, first, n), "scale": scale}
        tensors["zero"] = (
            self._zero(found["zero"], layout, first, n)
            if "zero" in found
            else torch.full((n, groups), MIDDLE, dtype=torch.uint8, device=scale.device)
        )
        if "order" in names:
            order = self._order(source, names["order"], part)
            if self.order:
                assert order is not None
                tensors |= {"codes": permuted(tensors["codes"], order), "order": order}
        return tensors

    def _zero(self, words: Tensor, layout: Layout, first: int, n: int) -> Tensor:
        """Words of zeros -> uint8 [n, k/g].

        GPTQ's first form holds zero - 1. GPTQModel, which transformers loads it with, makes it by a subtraction of
        0x11111111 from each word and undoes that by adding it: where a zero is 0 the subtraction borrowed from the
        number above, which the addition gives back. A stored 15 is then a zero of 0, not 16, as in AutoGPTQ's CUDA and
        ExLlamaV2 kernels too, which add 1 to each number and keep four bits. (A file of AutoGPTQ's own with zeros of 0
        is broken: its packer spilled them over the numbers above.) Some tools write symmetric files with 8 in them and
        yet announce the first form; where the config says symmetric, an 8 in every place is no 9.
        """
        if layout is GPTQ and self.less_one:
            eights = self.symmetric and bool((words == -0x77777778).all())
            words = words if eights else words + 0x11111111
        return _outputs(words, layout, first, n)

    def _order(self, source: Source, name: str, part: Part) -> Tensor | None:
        """order int32 [k] from g_idx; None where it is the order of the inputs themselves."""
        groups = source.read(name, Field(torch.int32), WHOLE)
        k = groups.shape[0]
        wanted = torch.arange(k, dtype=torch.int32, device=groups.device) // self.columns
        if torch.equal(groups, wanted) or not bool(groups.any()):  # zeros: never filled in, as ExLlamaV2 takes them
            return torch.arange(k, dtype=torch.int32, device=groups.device) if self.order else None
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], wanted):
            raise CheckpointError(f"{quote(name)} is no division of {k} inputs into groups of {self.columns}")
        if not self.order:
            raise CheckpointError(
                f"{quote(name)} puts inputs out of order, and config.json does not say desc_act; the two disagree"
            )
        assert part.columns is None
        return order.int()

    def fill(self, stored: Mapping[str, Tensor], k: int, generator: torch.Generator) -> None:
        super().fill(stored, k, generator)
        stored["scale"].fill_(k**-0.5 / RMS)
        if "order" in stored:
            stored["order"].copy_(torch.arange(k, device=stored["order"].device) // self.columns)

    # -------------------------------------------------------------------------------------------------- cut and joined

    def check_part(self, n: int, k: int, part: Part) -> None:
        if self.order and part.columns is not None:
            raise ValueError(
                "columns of a layer with act-order cannot be cut: every group has inputs from anywhere; cut rows only"
            )
        if self.columns == ALL:  # shared by all columns, wherever they are cut
            int4(COLUMNS, self.dtype).check_part(n, k, part)
        else:
            super().check_part(n, k, part)


def int4(
    columns: int, dtype: torch.dtype, *, order: bool = False, less_one: bool = False, symmetric: bool = False
) -> INT4Format:
    """The one format of this kind; see `INT4Format`."""
    return _made(columns, dtype, order, less_one, symmetric)


_made = cache(INT4Format)


# --------------------------------------------------------------------------------------------------- words taken apart


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device)


def _outputs(words: Tensor, layout: Layout, first: int, n: int) -> Tensor:
    """Words of eight outputs -> uint8 [n, inputs]: turned int32 [inputs, outputs / 8], else [outputs / 8, inputs]."""
    words = words.t() if layout.turned else words
    codes = ((words.unsqueeze(1) >> _shifts(words.device).view(-1, 1)) & 15).to(torch.uint8)
    place = [layout.rows.index(row) for row in range(WORD)]
    return codes[:, place].flatten(0, 1)[first : first + n].contiguous()


def _codes(words: Tensor, layout: Layout, first: int, n: int) -> Tensor:
    """Words of codes -> uint8 [n, k/2]."""
    if layout is not AWQ:  # eight inputs of one output, lowest first: bytes in our order
        return (words.t() if layout.turned else words).contiguous().view(torch.uint8)
    bytes_ = words.contiguous().view(torch.uint8).unflatten(1, (-1, 4))  # two outputs each
    rows = torch.empty(words.shape[0], words.shape[1], WORD, dtype=torch.uint8, device=words.device)
    rows[..., layout.rows[0::2]] = bytes_ & 15
    rows[..., layout.rows[1::2]] = bytes_ >> 4
    codes = rows.flatten(1)[:, first : first + n]
    return (codes[0::2] | codes[1::2] << 4).t().contiguous()


def permuted(codes: Tensor, order: Tensor) -> Tensor:
    """codes [n, k/2] with column order[j] at j."""
    columns = torch.stack((codes & 15, codes >> 4), -1).flatten(1).index_select(1, order)
    return columns[:, 0::2] | columns[:, 1::2] << 4
