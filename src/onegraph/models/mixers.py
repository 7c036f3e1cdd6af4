"""What stands in attention's place in some layers of a hybrid model, as config.json describes it.

Meaning and defaults of the fields are transformers' own (5.17). Such a layer reads the residual stream through
linears, mixes a token with those before it through a state of fixed size, and writes the result through one more
linear. A record here says which linears and tensors that takes; `models/recurrent.py` makes the modules.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from onegraph.formats.weight import FLOATS, Dtypes, Shape
from onegraph.models.fields import Fields, short
from onegraph.models.windows import FULL, LINEAR

CONV = "conv"
Size = tuple[int, int, bool]  # of a linear: outputs, inputs, whether it has a bias
Pieces = tuple[tuple[int, int], ...]  # that lie one behind the other: heads, and rows of each


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated DeltaNet (Yang et al., arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it.

    Args:
        k_heads, v_heads: of queries and keys, and of values, of which each head of keys serves v_heads / k_heads.
        k_dim, v_dim: sizes of a head. width: of the convolution over queries, keys and values.
        grouped: files hold one linear of queries, keys, values and output gates, and one of beta and decay, rows of
            each grouped by head of keys (Qwen3-Next).
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int
    grouped: bool

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.k_heads * self.k_dim

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """That the convolution runs over: queries, keys, values."""
        return 2 * self.keys + self.values

    title, decays = "linear attention", "linear_attn."  # in front of A_log and dt_bias
    norm_eps: ClassVar[float | None] = None  # of the output norm, where it is not the model's

    @property
    def beta_scale(self) -> float:
        """Multiplies beta."""
        return 1.0

    @property
    def unrounded(self) -> tuple[str, ...]:
        """Linears that are never rounded."""
        return self.steady

    @property
    def inputs(self) -> tuple[str, ...]:
        """Within a block, the linears whose results side by side are queries, keys, values and output gates."""
        names = ("in_proj_qkvz",) if self.grouped else ("in_proj_qkv", "in_proj_z")
        return tuple(f"linear_attn.{name}" for name in names)

    @property
    def steady(self) -> tuple[str, ...]:
        """Linears that are never rounded: of beta and decay, whose errors multiply over the whole sequence."""
        names = ("in_proj_ba",) if self.grouped else ("in_proj_b", "in_proj_a")
        return tuple(f"linear_attn.{name}" for name in names)

    @property
    def out(self) -> str:
        return "linear_attn.out_proj"

    @property
    def heads(self) -> dict[str, int]:
        """What ranks share out, each of which has as many."""
        return {"key heads": self.k_heads, "value heads": self.v_heads}

    def of_rank(self, ranks: int) -> Self:
        """What one of so many ranks has."""
        return replace(self, k_heads=self.k_heads // ranks, v_heads=self.v_heads // ranks)

    @property
    def behind_heads(self) -> tuple[int, int]:
        """Inputs of the output linear."""
        return self.v_heads, self.v_dim

    @property
    def cuts(self) -> dict[str, Pieces]:
        """Within a block, linears and tensors of which ranks have rows, and what these are; the others are whole."""
        each: Pieces = ((self.v_heads, 1),)
        decays = dict.fromkeys((f"{self.decays}A_log", f"{self.decays}dt_bias"), each)
        keys, values = (self.k_heads, self.k_dim), (self.v_heads, self.v_dim)
        per = self.v_heads // self.k_heads
        if self.grouped:
            whole = (self.k_heads, 2 * self.k_dim + 2 * per * self.v_dim)
            found: dict[str, Pieces] = {self.inputs[0]: (whole,), self.steady[0]: ((self.k_heads, 2 * per),)}
        else:
            found = {self.inputs[0]: (keys, keys, values), self.inputs[1]: (values,)}
            found |= dict.fromkeys(self.steady, each)
        return found | decays | dict.fromkeys(self.convs, (keys, keys, values))

    @property
    def convs(self) -> dict[str, int]:
        """Within a block, the weights of the convolution that lie one behind the other, and the channels of each."""
        return {"linear_attn.conv1d.weight": self.channels}

    @property
    def norm(self) -> str:
        """Within a block, the weight of the output norm."""
        return "linear_attn.norm.weight"

    @property
    def order(self) -> list[int] | None:
        """Row of the file's linear for each row of queries | keys | values | output gates; None where they agree."""
        return self._ungrouped(self.k_dim, self.k_dim, *[self.v_dim * self.v_heads // self.k_heads] * 2)

    @property
    def steady_order(self) -> list[int] | None:
        """The same for each row of beta | decay."""
        return self._ungrouped(*[self.v_heads // self.k_heads] * 2)

    def _ungrouped(self, *sizes: int) -> list[int] | None:
        """Rows of pieces of `sizes`, which lie side by side for each head of keys: all of the first piece, then all of
        the second, and so on."""
        if not self.grouped:
            return None
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        group = sum(sizes)
        return [
            head * group + start + row
            for start, size in zip(starts, sizes, strict=True)
            for head in range(self.k_heads)
            for row in range(size)
        ]

    def linears(self, hidden: int) -> Iterator[tuple[str, Size]]:
        """Name within a block and size of linears, which files may have in any format."""
        sizes = (self.channels + self.values,) if self.grouped else (self.channels, self.values)
        yield from ((name, (n, hidden, False)) for name, n in zip(self.inputs, sizes, strict=True))
        each = 2 * self.v_heads // len(self.steady)
        yield from ((name, (each, hidden, False)) for name in self.steady)
        yield self.out, (hidden, self.values, False)

    @property
    def tensors(self) -> dict[str, tuple[Shape, Dtypes]]:
        """Name within a block, shape and dtypes of everything else."""
        shapes: dict[str, Shape] = {name: (size, 1, self.width) for name, size in self.convs.items()}
        shapes |= dict.fromkeys((f"{self.decays}A_log", f"{self.decays}dt_bias"), (self.v_heads,))
        return {name: (shape, FLOATS) for name, shape in (shapes | {self.norm: (self.v_dim,)}).items()}

    @classmethod
    def parse(cls, fields: Fields, *, grouped: bool = False, **own: bool) -> Self:
        """own: what a subclass adds. Raises ValueError for sizes that do not go together."""
        k_heads, v_heads = (fields.integer(f"linear_num_{each}_heads", high=4096) for each in ("key", "value"))
        if v_heads % k_heads:
            raise ValueError(f"linear_num_value_heads {v_heads} is not a multiple of linear_num_key_heads {k_heads}")
        return cls(
            k_heads=k_heads,
            v_heads=v_heads,
            k_dim=fields.integer("linear_key_head_dim", high=1024),
            v_dim=fields.integer("linear_value_head_dim", high=1024),
            width=_width(fields, "linear_conv_kernel_dim"),
            grouped=grouped,
            **own,
        )


@dataclass(frozen=True, kw_only=True)
class ApartDelta(GatedDelta):
    """`GatedDelta` as OLMo hybrid has it: a linear and a convolution each for queries, keys and values.

    negative: beta is doubled, so that the state may have negative eigenvalues (Grazzi et al., arXiv 2411.12537).
    """

    negative: bool
    norm_eps: ClassVar[float | None] = 1e-5  # whatever rms_norm_eps says

    @property
    def beta_scale(self) -> float:
        return 2.0 if self.negative else 1.0

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(f"linear_attn.{each}_proj" for each in "qkvg")

    @property
    def steady(self) -> tuple[str, ...]:
        return "linear_attn.b_proj", "linear_attn.a_proj"

    @property
    def out(self) -> str:
        return "linear_attn.o_proj"

    @property
    def convs(self) -> dict[str, int]:
        sizes = zip("qkv", (self.keys, self.keys, self.values), strict=True)
        return {f"linear_attn.{each}_conv1d.weight": size for each, size in sizes}

    @property
    def norm(self) -> str:
        return "linear_attn.o_norm.weight"

    @property
    def cuts(self) -> dict[str, Pieces]:
        keys, values, each = (self.k_heads, self.k_dim), (self.v_heads, self.v_dim), (self.v_heads, 1)
        found: dict[str, Pieces] = {}
        for names, units in ((self.inputs, (keys, keys, values, values)), (self.convs, (keys, keys, values))):
            found |= {name: (unit,) for name, unit in zip(names, units, strict=True)}
        return found | dict.fromkeys((*self.steady, f"{self.decays}A_log", f"{self.decays}dt_bias"), (each,))

    def linears(self, hidden: int) -> Iterator[tuple[str, Size]]:
        sizes = self.keys, self.keys, self.values, self.values
        yield from ((name, (n, hidden, False)) for name, n in zip(self.inputs, sizes, strict=True))
        yield from ((name, (self.v_heads, hidden, False)) for name in self.steady)
        yield self.out, (hidden, self.values, False)


@dataclass(frozen=True, kw_only=True)
class KimiDelta:
    """Kimi Delta Attention (arXiv 2510.26692): a decay for each channel of a key; decays and gates are of low rank.

    number, dim: of heads of queries, keys and values alike. width: of the convolutions.
    """

    number: int
    dim: int
    width: int

    title, out, norm = "delta attention", "self_attn.o_proj", "self_attn.o_norm.weight"
    inputs = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
    decays = "self_attn.forget_gate."
    steady = "self_attn.b_proj", f"{decays}f_a_proj", "self_attn.g_a_proj"
    behind = f"{decays}f_b_proj", "self_attn.g_b_proj"  # of the low ranks of decay and gate; as steady as these

    unrounded = *steady, *behind

    @property
    def values(self) -> int:
        """Numbers of all heads of a token."""
        return self.number * self.dim

    @property
    def heads(self) -> dict[str, int]:
        """As `GatedDelta.heads`; so are `of_rank`, `behind_heads` and `cuts`."""
        return {"heads of delta attention": self.number}

    def of_rank(self, ranks: int) -> Self:
        return replace(self, number=self.number // ranks)

    @property
    def behind_heads(self) -> tuple[int, int]:
        return self.number, self.dim

    @property
    def cuts(self) -> dict[str, Pieces]:
        whole = *self.inputs, *self.convs, *self.behind, f"{self.decays}dt_bias"
        found: dict[str, Pieces] = dict.fromkeys(whole, ((self.number, self.dim),))
        return found | dict.fromkeys((self.steady[0], f"{self.decays}A_log"), ((self.number, 1),))

    @property
    def convs(self) -> dict[str, int]:
        """As `GatedDelta.convs`."""
        return {f"self_attn.{each}_conv1d.weight": self.values for each in "qkv"}

    def linears(self, hidden: int) -> Iterator[tuple[str, Size]]:
        """As `GatedDelta.linears`."""
        yield from ((name, (self.values, hidden, False)) for name in self.inputs)
        yield from zip(self.steady, ((n, hidden, False) for n in (self.number, self.dim, self.dim)), strict=True)
        yield from ((name, (self.values, self.dim, False)) for name in self.behind)
        yield self.out, (hidden, self.values, False)

    @property
    def tensors(self) -> dict[str, tuple[Shape, Dtypes]]:
        """As `GatedDelta.tensors`."""
        shapes: dict[str, Shape] = {name: (size, 1, self.width) for name, size in self.convs.items()}
        shapes |= {f"{self.decays}A_log": (1, 1, self.number, 1), f"{self.decays}dt_bias": (self.values,)}
        return {name: (shape, FLOATS) for name, shape in (shapes | {self.norm: (self.dim,)}).items()}

    @classmethod
    def parse(cls, fields: Fields) -> "KimiDelta":
        return cls(
            number=fields.integer("linear_num_heads", high=4096),
            dim=fields.integer("linear_head_dim", high=1024),
            width=_width(fields, "linear_conv_kernel_dim"),
        )


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """LFM2's gated convolution of `width` tokens, over `size` channels; its linears and itself may have biases."""

    size: int
    width: int
    bias: bool

    title, inputs, out = "convolution", ("conv.in_proj",), "conv.out_proj"
    steady = unrounded = ()

    @property
    def heads(self) -> dict[str, int]:
        """As `GatedDelta.heads`; so are `of_rank`, `behind_heads` and `cuts`."""
        return {"channels of the convolution": self.size}

    def of_rank(self, ranks: int) -> Self:
        return replace(self, size=self.size // ranks)

    @property
    def behind_heads(self) -> tuple[int, int]:
        return self.size, 1

    @property
    def cuts(self) -> dict[str, Pieces]:
        one = (self.size, 1)
        return {self.inputs[0]: (one,) * 3, "conv.conv.weight": (one,), "conv.conv.bias": (one,)}

    def linears(self, hidden: int) -> Iterator[tuple[str, Size]]:
        """As `GatedDelta.linears`."""
        yield "conv.in_proj", (3 * self.size, hidden, self.bias)
        yield self.out, (hidden, self.size, self.bias)

    @property
    def tensors(self) -> dict[str, tuple[Shape, Dtypes]]:
        """As `GatedDelta.tensors`."""
        found: dict[str, tuple[Shape, Dtypes]] = {"conv.conv.weight": ((self.size, 1, self.width), FLOATS)}
        return found | ({"conv.conv.bias": ((self.size,), FLOATS)} if self.bias else {})

    @classmethod
    def parse(cls, fields: Fields) -> "ShortConv":
        size = fields.integer("hidden_size", high=2**18)
        return cls(size=size, width=_width(fields, "conv_L_cache"), bias=fields.flag("conv_bias"))


class MambaKeys(NamedTuple):
    """What a family calls a Mamba-2 layer within a block, and the keys of config.json that say what it is made of."""

    module: str
    number: str
    size: str
    groups: str
    n: str
    width: str
    conv_bias: str
    bias: str


_NEMOTRON = MambaKeys(
    "mixer", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias",
    "use_bias",
)  # fmt: skip
_GRANITE = MambaKeys(
    "mamba", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias",
    "mamba_proj_bias",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Mamba2 as Nemotron-H and Granite 4 have it: a `number` of heads of `size` numbers, B and C of `n` numbers for
    each of `groups`.

    module: its name within a block. width: of the convolution; conv_bias: its own. bias: of the linears. dt_min: the
    least step.
    """

    module: str
    number: int
    size: int
    groups: int
    n: int
    width: int
    conv_bias: bool
    bias: bool
    dt_min: float

    title, steady, unrounded = "Mamba-2", (), ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return (f"{self.module}.in_proj",)

    @property
    def out(self) -> str:
        return f"{self.module}.out_proj"

    @property
    def heads(self) -> dict[str, int]:
        """As `GatedDelta.heads`; so are `of_rank`, `behind_heads` and `cuts`."""
        found = {"Mamba-2 heads": self.number}
        return found if self.groups == 1 else found | {"groups of Mamba-2 heads": self.groups}

    def of_rank(self, ranks: int) -> Self:
        return replace(self, number=self.number // ranks, groups=max(1, self.groups // ranks))

    @property
    def behind_heads(self) -> tuple[int, int]:
        return self.number, self.size

    @property
    def cuts(self) -> dict[str, Pieces]:
        x, group, each = (self.number, self.size), (self.groups, self.n), (self.number, 1)
        found: dict[str, Pieces] = {"in_proj": (x, x, group, group, each), "norm.weight": (x,)}
        found |= dict.fromkeys(("conv1d.weight", "conv1d.bias"), (x, group, group))
        found |= dict.fromkeys(("A_log", "D", "dt_bias"), (each,))
        return {f"{self.module}.{name}": pieces for name, pieces in found.items()}

    @property
    def inner(self) -> int:
        """Numbers of all heads of a token."""
        return self.number * self.size

    @property
    def channels(self) -> int:
        """That the convolution runs over: x, B, C."""
        return self.inner + 2 * self.groups * self.n

    def linears(self, hidden: int) -> Iterator[tuple[str, Size]]:
        """As `GatedDelta.linears`: output gates | x | B | C | steps."""
        yield self.inputs[0], (self.inner + self.channels + self.number, hidden, self.bias)
        yield self.out, (hidden, self.inner, self.bias)

    @property
    def tensors(self) -> dict[str, tuple[Shape, Dtypes]]:
        """As `GatedDelta.tensors`."""
        shapes: dict[str, Shape] = {"conv1d.weight": (self.channels, 1, self.width), "norm.weight": (self.inner,)}
        shapes |= {"conv1d.bias": (self.channels,)} if self.conv_bias else {}
        shapes |= dict.fromkeys(("A_log", "D", "dt_bias"), (self.number,))
        return {f"{self.module}.{name}": (shape, FLOATS) for name, shape in shapes.items()}

    @classmethod
    def parse(cls, fields: Fields, keys: MambaKeys, size: int | None = None) -> "Mamba":
        """size: of a head, where its key does not say it. Raises ValueError for sizes that do not go together."""
        heads, groups = fields.integer(keys.number, high=4096), fields.integer(keys.groups, high=4096)
        if heads % groups:
            raise ValueError(f"{keys.number} {heads} is not a multiple of {keys.groups} {groups}")
        limit = fields.get("time_step_limit")
        low, high = limit if isinstance(limit, list | tuple) and len(limit) == 2 else (-1.0, -1.0)
        high = float("inf") if high == {"__float__": "Infinity"} else high
        given = isinstance(low, int | float) and 0 <= low < 1 and isinstance(high, int | float)
        if not given or high < 3.4e38:  # the largest float32, which steps are
            raise ValueError(f"time_step_limit is {short(limit)}; it must be two numbers, 0 to 1 and infinity")
        return cls(
            module=keys.module,
            number=heads,
            size=fields.integer(keys.size, high=1024) if size is None else size,
            groups=groups,
            n=fields.integer(keys.n, high=1024),
            width=_width(fields, keys.width),
            conv_bias=fields.flag(keys.conv_bias),
            bias=fields.flag(keys.bias),
            dt_min=float(low),
        )


@dataclass(frozen=True)
class NoMixer:
    """Of a block that is an MLP or experts alone."""

    title, inputs, out, steady, unrounded = "", (), "", (), ()

    def linears(self, hidden: int) -> Iterator[tuple[str, Size]]:
        """None."""
        return iter(())

    @property
    def tensors(self) -> dict[str, tuple[Shape, Dtypes]]:
        """None."""
        return {}


RecurrentMixer = GatedDelta | KimiDelta | Mamba | ShortConv
Mixer = RecurrentMixer | NoMixer
Mixers = tuple[Mixer | None, ...]  # of each layer; None: attention


def none(fields: Fields, layers: int) -> Mixers:
    """Every layer attends."""
    return (None,) * layers


def gated_delta(fields: Fields, layers: int) -> Mixers:
    """All but each fourth layer, or as full_attention_interval or layer_types says (Qwen3.5)."""
    return _of(_by_interval(fields, layers), GatedDelta.parse(fields, grouped=False))


def grouped_gated_delta(fields: Fields, layers: int) -> Mixers:
    """The same with joint linears (Qwen3-Next)."""
    return _of(_by_interval(fields, layers), GatedDelta.parse(fields, grouped=True))


def apart_delta(fields: Fields, layers: int) -> Mixers:
    """All but each fourth layer, or as layer_types says; where none would attend, the last one does (OLMo hybrid)."""
    kinds = _by_interval(fields, layers)
    if fields.get("layer_types") is None and FULL not in kinds:
        kinds[-1] = FULL
    mixer = ApartDelta.parse(fields, negative=fields.flag("linear_allow_neg_eigval"))
    return _of(kinds, mixer)


def kimi_delta(fields: Fields, layers: int) -> Mixers:
    """All but layers 4, 8, 12 and so on, or as layer_types says (Kimi Linear)."""
    kinds = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
    return _of(_kinds(fields, layers, LINEAR) or kinds, KimiDelta.parse(fields))


def single(fields: Fields, layers: int) -> Mixers:
    """As layers_block_type says; blocks that it calls mlp or moe have none (Nemotron-H)."""
    found: dict[str, Mixer | None] = {LINEAR: Mamba.parse(fields, _NEMOTRON), FULL: None}
    found |= dict.fromkeys(("mlp", "moe"), NoMixer())
    kinds = fields.get("layers_block_type")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(k, str) and k in found for k in kinds):
        raise ValueError(f"layers_block_type is {short(kinds)}; it must list {layers} of {', '.join(found)}")
    if FULL not in kinds:
        raise ValueError(f"layers_block_type has no {FULL}; a model without a layer that attends is not supported")
    return tuple(found[kind] for kind in kinds)


def mamba(fields: Fields, layers: int) -> Mixers:
    """As layer_types says (Granite 4)."""
    kinds = _kinds(fields, layers, LINEAR) or [LINEAR] * layers
    if LINEAR not in kinds:  # configs of models without such layers say their sizes all the same
        fields.read("mamba_expand", "time_step_limit", *_GRANITE[1:])
        return none(fields, layers)
    heads, hidden = fields.integer(_GRANITE.number, high=4096), fields.integer("hidden_size", high=2**18)
    inner, size = fields.integer("mamba_expand", high=64) * hidden, fields.get(_GRANITE.size)
    mixer = Mamba.parse(fields, _GRANITE, inner // heads if size == "auto" else None)
    if mixer.inner != inner:
        raise ValueError(
            f"mamba_n_heads is {heads} and mamba_d_head {size}; all heads together must have mamba_expand times "
            f"hidden_size numbers, {inner}"
        )
    return _of(kinds, mixer)


def short_conv(fields: Fields, layers: int) -> Mixers:
    """The layers that full_attn_idxs leaves out, or that layer_types says (LFM2)."""
    given = fields.get("full_attn_idxs")
    indices = list(range(layers)) if given is None else given
    if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < layers for i in indices):
        raise ValueError(f"full_attn_idxs is {short(given)}; it must list numbers of layers, 0 to {layers - 1}")
    kinds = [FULL if i in indices else CONV for i in range(layers)]
    listed = _kinds(fields, layers, CONV)
    if listed is not None and given is not None and listed != kinds:
        raise ValueError(f"full_attn_idxs is {short(given)} and layer_types {short(listed)}; they must agree")
    return _of(listed or kinds, ShortConv.parse(fields))


def _by_interval(fields: Fields, layers: int) -> list[str]:
    given = fields.get("full_attention_interval")
    every = 4 if given is None else fields.integer("full_attention_interval", high=4096)
    kinds = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    listed = _kinds(fields, layers, LINEAR)
    if listed is not None and given is not None and listed != kinds:
        raise ValueError(f"full_attention_interval is {every} and layer_types {short(listed)}; they must agree")
    return listed or kinds


def _kinds(fields: Fields, layers: int, other: str) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, other) for kind in kinds):
        raise ValueError(f"layer_types is {short(kinds)}; it must list {layers} of {FULL}, {other}")
    return kinds


def _of(kinds: list[str], mixer: Mixer) -> Mixers:
    if FULL not in kinds:
        raise ValueError(
            f"none of {len(kinds)} layers attends (full_attention_interval, full_attn_idxs, layer_types); a model "
            f"without a layer of {FULL} is not supported"
        )
    return tuple(None if kind == FULL else mixer for kind in kinds)


def _width(fields: Fields, key: str) -> int:
    return fields.integer(key, low=2, high=16)
