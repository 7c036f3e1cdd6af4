"""Routed experts as config.json says them: which layers have them, how tokens choose, and how files name the weights.

Meaning and defaults of the fields are transformers' own (5.17). What it holds fused in memory it writes one expert at a
time, as the published files of Qwen3-MoE and Mixtral have it; gpt-oss has all experts of a layer in one tensor. So
has whatever `onegraph quantize` wrote in E8P: `gate_up_proj` and `down_proj` beside where the single ones would be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from onegraph.formats.fused import STACKS
from onegraph.formats.weight import FLOATS, Dtypes, Quantization, Shape
from onegraph.models.fields import Fields, short
from onegraph.models.parts import Component, Stack
from onegraph.ops.activation import Gate, GeGLU, ReLU2, SwiGLU, parts_of
from onegraph.ops.route import check_groups

# Norms of a block whose MLP and experts stand beside each other: behind either, and in front of the experts.
BESIDE_NORMS = "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
ROUTED_IN = "pre_feedforward_layernorm_2"
_NOTHING: Any = ()  # no file is asked which format a stack has: only its quantization_config is
_GPT_OSS_ALPHA, _GPT_OSS_SHIFT = 1.702, 1.0  # in no config.json
_CORRECTION = "e_score_correction_bias"
_LATENT = "mixer.fc1_latent_proj", "mixer.fc2_latent_proj"  # around routed experts of a size of their own


class Sigmoid(NamedTuple):
    """Scores by sigmoid, each expert's choice with a bias of its own: see `ops.route.sigmoid_route`."""

    groups: int
    top_groups: int
    scale: float


Scores = Callable[[Fields, int, int], Sigmoid | None]


class Shared(NamedTuple):
    """An expert that every token uses: its name within a block, its width, whether a token's sigmoid scales it, and how
    it calls gate and up, or up alone, or one linear of both; and down."""

    name: str
    size: int
    gated: bool = False
    front: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"

    @property
    def linears(self) -> tuple[str, ...]:
        """Within a block, those in `front`, and down."""
        return tuple(f"{self.name}.{each}" for each in (*self.front, self.down))


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The experts of a model, the same in each layer that has them.

    Args:
        family: the model_type, by which files name things.
        layers: for each layer whether it has experts; the others have an MLP.
        count, size, top_k: experts of a layer, the width of one, and how many a token uses.
        normalise: whether weights of the chosen sum to 1.
        gate: what stands between the two products of an expert.
        fused: the family publishes all experts of a layer as one tensor, gate rows at even places and up rows at odd
            ones, with biases; so has the router one.
        sigmoid: how tokens choose where it is not by softmax. shared: an expert beside the routed ones.
        in_stacks: this file holds all experts of a layer as one dense tensor, gate rows first (Qwen3.5). turned: it
            lies [E, k, n] (Qwen3-VL-MoE as published).
        beside: a block's MLP is the shared expert, with norms of its own (`nn.moe.Beside`, Gemma 4).
        latent: size that the routed experts work at, between linears of their own; 0: that of the stream.
    """

    family: str
    layers: tuple[bool, ...]
    count: int
    size: int
    top_k: int
    normalise: bool
    gate: Gate
    fused: bool
    sigmoid: Sigmoid | None = None
    shared: Shared | None = None
    in_stacks: bool = False
    turned: bool = False
    beside: bool = False
    latent: int = 0

    @classmethod
    def parse(cls, family: str, fields: Fields, layers: int) -> Routed | None:
        """None for a family without experts. Raises ValueError for what makes no sense."""
        kind = KINDS.get(family)
        if kind is None:
            return None
        sparse = kind.layers(fields, layers)
        if kind.idle and not any(sparse):
            fields.read(*kind.idle)
            return None
        count = _count(kind.count, fields)
        top_k = fields.integer(kind.top_k, high=count)
        return cls(
            family=family,
            layers=sparse,
            count=count,
            size=fields.integer(kind.size, high=2**22),
            top_k=top_k,
            normalise=fields.flag("norm_topk_prob") if kind.asked else True,
            gate=kind.gate(fields),
            fused=kind.fused,
            sigmoid=kind.scores(fields, count, top_k),
            shared=kind.shared(fields),
            beside=kind.beside,
            latent=kind.latent(fields),
        )

    @property
    def router(self) -> str:
        """Its name within a block."""
        return KINDS[self.family].names[0]

    @property
    def routers(self) -> tuple[str, ...]:
        """Within a block, what the rows of the router come from: its own, and the shared expert's gate."""
        gate = () if self.shared is None or not self.shared.gated else (f"{self.shared.name}_gate",)
        return self.router, *gate

    @property
    def correction(self) -> str:
        """Within a block, the bias of each expert's choice, where they are scored by sigmoid."""
        return KINDS[self.family].correction or f"{self.router}.{_CORRECTION}"

    @property
    def transposed(self) -> bool:
        """Whether dense experts in one tensor lie [E, k, n]."""
        return self.fused or self.turned

    @property
    def whole(self) -> tuple[str, str]:
        """Within a block, gate-up and down of all experts, where they are one tensor each."""
        gate_up, down = STACKS if self.parts == 2 else ("up_proj", STACKS[1])
        above = KINDS[self.family].names[1].removesuffix(f".{gate_up}").partition(".{}")[0]
        return f"{above}.{gate_up}", f"{above}.{down}"

    @property
    def parts(self) -> int:
        """Rows of the first product for each hidden unit: gate and up, or up alone."""
        return parts_of(self.gate.alpha)

    def stacked(self, prefix: str, quantization: Quantization | None) -> bool:
        """Whether a file has the experts of the block `prefix` in one tensor each. Raises ValueError where gate-up and
        down are at two rates, which no op takes."""
        if quantization is None:
            return self.fused or self.in_stacks
        both = [prefix + name for name in self.whole]
        kinds = {quantization.format_of(name, _NOTHING) if quantization.stacked(name) else None for name in both}
        if len(kinds) > 1:
            raise ValueError(f"{both[0]} and {both[1]} have two rates; experts of a layer must have one")
        return self.fused or kinds != {None} or self.in_stacks

    @property
    def each(self) -> tuple[list[tuple[str, ...]], list[str]]:
        """Within a block, gate and up of each expert, and down of each, where they are not `stacked`."""
        every = [self.names(expert) for expert in range(self.count)]
        return [tuple(front) for *front, _ in every], [down for *_, down in every]

    def names(self, expert: int) -> tuple[str, ...]:
        """Gate and up, or up alone, and down of one of them."""
        return tuple(name.format(expert) for name in KINDS[self.family].names[1:])

    def linears(self, hidden: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        """Name within a block and size of experts that are not stacked: they may be in any format."""
        hidden = self.latent or hidden
        for pair, down in zip(*self.each, strict=True):
            yield from ((name, (self.size, hidden, False)) for name in pair)
            yield down, (hidden, self.size, False)

    @property
    def around(self) -> tuple[str, ...]:
        """Within a block, the linears around experts of a size of their own: in front, and behind their sum."""
        return _LATENT if self.latent else ()

    def shared_linears(self, hidden: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        """Likewise of the expert beside them, if there is one, and of what is around them."""
        if self.shared is not None:
            *front, down = self.shared.linears
            rows = self.parts * self.shared.size // len(front)
            yield from ((name, (rows, hidden, False)) for name in front)
            yield down, (hidden, self.shared.size, False)
        for name, size in zip(self.around, ((self.latent, hidden), (hidden, self.latent)), strict=False):
            yield name, (*size, False)

    def tensors(self, hidden: int) -> dict[str, tuple[Shape, Dtypes]]:
        """What stays as it is in a block, by the name within it: the router, and the shared expert's gate."""
        shapes: dict[str, Shape] = dict.fromkeys((f"{name}.weight" for name in self.routers), (1, hidden))
        shapes |= {f"{self.router}.weight": (self.count, hidden)}
        shapes |= {f"{self.router}.bias": (self.count,)} if self.fused else {}
        shapes |= {self.correction: (self.count,)} if self.sigmoid else {}
        if self.beside:
            shapes |= {"router.scale": (hidden,), "router.per_expert_scale": (self.count,)}
            shapes |= {f"{name}.weight": (hidden,) for name in (*BESIDE_NORMS, ROUTED_IN)}
        return {name: (shape, FLOATS) for name, shape in shapes.items()}

    def stacks(self, hidden: int) -> dict[str, Stack]:
        """Experts in one tensor each, by the name within a block."""
        (gate_up, down), hidden = self.whole, self.latent or hidden
        return {
            gate_up: Stack(self.count, self.parts * self.size, hidden, transposed=self.transposed, bias=self.fused),
            down: Stack(self.count, hidden, self.size, transposed=self.transposed, bias=self.fused),
        }

    def owner(self, name: str) -> str | None:
        """The stack, by its name within a block, that the tensor `name` of an unquantized file becomes a part of."""
        layer = next((s for s in (".weight", "_blocks", "_scales") if name.endswith(s)), "")
        layer = name.removesuffix(layer)
        if layer in self.whole:
            return layer
        found = [pattern.fullmatch(layer) is not None for pattern in _patterns(self.family)]
        return (self.whole[1] if found[-1] else self.whole[0]) if any(found) else None

    @property
    def components(self) -> dict[str, Component]:
        router, *experts = (name.replace(".", r"\.").replace(r"{}", r"\d+") for name in KINDS[self.family].names)
        stacked = () if self.fused else (re.escape(name) for name in self.whole)
        found = {
            "router": Component(("blocks.*.mlp.gate",), f"{router}$"),
            "experts": Component(("blocks.*.mlp.experts",), f"({'|'.join([*experts, *stacked])})$"),
        }
        if self.shared is not None:
            paths = "blocks.*.mlp.shared.gate_up", "blocks.*.mlp.shared.down"
            found["shared expert"] = Component(paths, f"({'|'.join(map(re.escape, self.shared.linears))})$")
        return found


@cache
def _patterns(family: str) -> tuple[re.Pattern[str], ...]:
    """Of the names of an expert's linears within a block."""
    return tuple(re.compile(re.escape(name).replace(r"\{\}", r"\d+")) for name in KINDS[family].names[1:])


def _count(keys: tuple[str, ...], fields: Fields) -> int:
    given = [key for key in keys if fields.get(key) is not None]
    counts = {fields.integer(key, high=65536) for key in given}
    if len(counts) != 1:
        got = " and ".join(f"{key} {fields.get(key)}" for key in given) or "neither num_experts nor num_local_experts"
        raise ValueError(f"config has {got}; it must say once how many experts a layer has")
    return counts.pop()


# ---------------------------------------------------------------------------------------------- which layers have them


def _all(fields: Fields, layers: int) -> tuple[bool, ...]:
    return (True,) * layers


def _stepped(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Qwen-MoE: every `decoder_sparse_step`th layer that `mlp_only_layers` does not name."""
    dense = fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError(f"mlp_only_layers is {dense!r}; it must list the numbers of layers")
    step = fields.integer("decoder_sparse_step", high=4096)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _behind(fields: Fields, layers: int) -> tuple[bool, ...]:
    """All behind the first `first_k_dense_replace`, or as `mlp_layer_types` says where the family has that key."""
    dense = fields.integer("first_k_dense_replace", low=0, high=4096)
    if "mlp_layer_types" not in fields.defaults or (kinds := fields.get("mlp_layer_types")) is None:
        return tuple(i >= dense for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
        raise ValueError(f"mlp_layer_types is {short(kinds)}; it must list dense or sparse for each of {layers} layers")
    return tuple(kind == "sparse" for kind in kinds)


def _behind_lfm2(fields: Fields, layers: int) -> tuple[bool, ...]:
    dense = fields.integer("num_dense_layers", low=0, high=4096)
    return tuple(i >= dense for i in range(layers))


def _blocks(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Nemotron-H: the blocks that layers_block_type calls moe."""
    kinds = fields.get("layers_block_type")
    return tuple(kind == "moe" for kind in kinds) if isinstance(kinds, list) else (True,) * layers


def _if_counted(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Granite 4: all, unless num_local_experts is 0."""
    return (fields.get("num_local_experts") != 0,) * layers


def _if_enabled(fields: Fields, layers: int) -> tuple[bool, ...]:
    return (fields.flag("enable_moe_block"),) * layers


# -------------------------------------------------------------------------------------------------- how tokens choose


def _by_softmax(fields: Fields, count: int, top_k: int) -> Sigmoid | None:
    return None


def _by_sigmoid(scale: str | None) -> Scores:
    """Without groups; `scale`: the key of what the weights are multiplied by."""
    return lambda fields, count, top_k: Sigmoid(1, 1, fields.number(scale, low=1e-6, high=1e6) if scale else 1.0)


def _in_groups(fields: Fields, count: int, top_k: int) -> Sigmoid | None:
    groups, top_groups = (fields.integer(key, high=count) for key in ("n_group", "topk_group"))
    check_groups("n_group and topk_group", count, top_k, groups, top_groups)
    return Sigmoid(groups, top_groups, fields.number("routed_scaling_factor", low=1e-6, high=1e6))


# ------------------------------------------------------------------------------------------------- beside, in between


def _no_shared(fields: Fields) -> Shared | None:
    return None


def _gated(fields: Fields) -> Shared | None:
    return Shared("mlp.shared_expert", fields.integer("shared_expert_intermediate_size", high=2**22), True)


def _several(key: str) -> Callable[[Fields], Shared | None]:
    """As many experts of the routed ones' size as `key` says, which are one."""
    return lambda fields: Shared(
        "mlp.shared_experts",
        fields.integer(key, high=4096) * fields.integer("moe_intermediate_size", high=2**22),
    )


def _shared_mlp(low: int) -> Callable[[Fields], Shared | None]:
    """Granite's, of `low` hidden units at least; 0: there is none."""

    def shared(fields: Fields) -> Shared | None:
        size = fields.integer("shared_intermediate_size", low=low, high=2**22)
        return Shared("shared_mlp", size, front=("input_linear",), down="output_linear") if size else None

    return shared


def _clamped(fields: Fields) -> Gate:
    limit = fields.number("swiglu_limit", low=1e-6, high=1e9)
    fields.read("experts_per_token", "initial_context_length")  # what the others say already
    return SwiGLU(limit, _GPT_OSS_ALPHA, _GPT_OSS_SHIFT)


def _latent_size(fields: Fields) -> int:
    return 0 if fields.get("moe_latent_size") is None else fields.integer("moe_latent_size", high=2**18)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a family's config.json and files say what its experts are.

    Args:
        names: within a block: the router; then gate, up and down of expert {} (Nemotron-H: up and down), or gate-up and
            down of all in one (gpt-oss).
        count: keys of which one or several say how many experts a layer has. top_k, size: the keys of these.
        layers: (fields, layers) -> which layers have experts. idle: keys that mean nothing where none has.
        asked: norm_topk_prob says whether weights are normalised; else they are.
        scores: (fields, experts, top_k) -> how tokens choose where it is not by softmax. correction: within a block,
            the bias of each expert's choice, where that is not the router's.
        gate, shared, latent, fused, beside: see `Routed`.
    """

    names: tuple[str, ...] = ("mlp.gate", *(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    layers: Callable[[Fields, int], tuple[bool, ...]] = _all
    idle: tuple[str, ...] = ()
    asked: bool = False
    scores: Scores = _by_softmax
    correction: str = ""
    gate: Callable[[Fields], Gate] = lambda fields: SwiGLU()
    shared: Callable[[Fields], Shared | None] = _no_shared
    latent: Callable[[Fields], int] = lambda fields: 0
    fused: bool = False
    beside: bool = False


_W = "w1", "w3", "w2"
_MIXTRAL = ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{name}" for name in _W))
_GRANITE = Kind(
    names=(
        "block_sparse_moe.router",
        *(f"block_sparse_moe.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")),
    ),
    size="intermediate_size",
)
_ROUTED = "n_routed_experts", "num_experts", "num_local_experts"
_DEEPSEEK = Kind(count=_ROUTED, layers=_behind, asked=True, scores=_in_groups, shared=_several("n_shared_experts"))

KINDS: dict[str, Kind] = {
    "mixtral": Kind(names=_MIXTRAL, size="intermediate_size"),
    "minimax_m2": Kind(
        names=_MIXTRAL,
        size="intermediate_size",
        scores=_by_sigmoid(None),
        correction=f"block_sparse_moe.{_CORRECTION}",
    ),
    "gpt_oss": Kind(
        names=("mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        size="intermediate_size",
        gate=_clamped,
        fused=True,
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": replace(_GRANITE, shared=_shared_mlp(0)),
    "granitemoehybrid": replace(
        _GRANITE,
        layers=_if_counted,
        idle=("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        shared=_shared_mlp(1),
    ),
    "olmoe": Kind(size="intermediate_size", asked=True),
    "qwen2_moe": Kind(layers=_stepped, asked=True, shared=_gated),
    "qwen3_moe": Kind(layers=_stepped, asked=True),
    "qwen3_vl_moe_text": Kind(layers=_stepped),
    "qwen3_next": Kind(layers=_stepped, asked=True, shared=_gated),
    "qwen3_5_moe_text": Kind(shared=_gated),
    "lfm2_moe": Kind(
        names=("feed_forward.gate", *(f"feed_forward.experts.{{}}.{name}" for name in _W)),
        layers=_behind_lfm2,
        asked=True,
        scores=_by_sigmoid("routed_scaling_factor"),
        correction="feed_forward.expert_bias",
    ),
    "gemma4_text": Kind(
        names=("router.proj", *(f"experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
        top_k="top_k_experts",
        layers=_if_enabled,
        idle=("num_experts", "top_k_experts", "moe_intermediate_size"),
        gate=lambda fields: GeGLU(),
        shared=lambda fields: Shared("mlp", fields.integer("intermediate_size", high=2**22)),
        beside=True,
    ),
    "glm4_moe": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "dots1": _DEEPSEEK,
    "solar_open": replace(_DEEPSEEK, layers=_all),
    "mistral4": replace(_DEEPSEEK, scores=_by_softmax),
    "deepseek_v2": replace(_DEEPSEEK, scores=_by_softmax),
    "exaone_moe": replace(_DEEPSEEK, shared=_several("num_shared_experts"), correction=f"mlp.{_CORRECTION}"),
    "hy_v3": replace(
        _DEEPSEEK,
        asked=False,
        scores=_by_sigmoid("router_scaling_factor"),
        shared=_several("num_shared_experts"),
        correction=f"mlp.{_CORRECTION}",
    ),
    "kimi_linear": replace(_DEEPSEEK, names=("mlp.gate", *(f"mlp.experts.{{}}.{name}" for name in _W))),
    "nemotron_h": replace(
        _DEEPSEEK,
        names=("mixer.gate", "mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj"),
        layers=_blocks,
        idle=(
            *_ROUTED, "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
            "moe_latent_size", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
        ),
        gate=lambda fields: ReLU2(),
        shared=lambda fields: Shared(
            "mixer.shared_experts",
            fields.integer("moe_shared_expert_intermediate_size", high=2**22),
            front=("up_proj",),
        ),
        latent=_latent_size,
    ),
}  # fmt: skip
