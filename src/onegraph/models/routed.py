"""Routed experts as config.json says them: which layers have them, how tokens choose, and how files name the weights.

Meaning and defaults of the fields are transformers' own (5.17). What it holds fused in memory it writes one expert at a
time, as the published files of Qwen3-MoE and Mixtral have it; gpt-oss has all experts of a layer in one tensor. So
has whatever `onegraph quantize` wrote in E8P: `gate_up_proj` and `down_proj` beside where the single ones would be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from onegraph.formats.fused import STACKS
from onegraph.formats.weight import FLOATS, Dtypes, Quantization, Shape
from onegraph.models.fields import Fields, short
from onegraph.models.parts import Component, Stack
from onegraph.ops.activation import Gate, GeGLU, ReLU2, SwiGLU, parts_of
from onegraph.ops.route import check_groups

# Names within a block: the router; then gate, up and down of expert {} (Nemotron-H: up and down), or gate-up and down
# of all in one (gpt-oss).
_USUAL = ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
_NAMES = {
    "qwen3_moe": _USUAL,
    "qwen2_moe": _USUAL,
    "olmoe": _USUAL,
    "glm4_moe": _USUAL,
    "deepseek_v3": _USUAL,
    "kimi_k2": _USUAL,
    "mistral4": _USUAL,
    "deepseek_v32": _USUAL,
    "glm_moe_dsa": _USUAL,
    "qwen3_vl_moe_text": _USUAL,
    "mixtral": ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
    "minimax_m2": ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
    "gpt_oss": ("mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "qwen3_5_moe_text": _USUAL,
    "qwen3_next": _USUAL,
    "lfm2_moe": ("feed_forward.gate", *(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
    "kimi_linear": ("mlp.gate", *(f"mlp.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
    "nemotron_h": ("mixer.gate", "mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj"),
    "gemma4_text": ("router.proj", *(f"experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
}
_GRANITE = "granitemoe", "granitemoeshared", "granitemoehybrid"
_NAMES |= dict.fromkeys(
    _GRANITE,
    ("block_sparse_moe.router", *(f"block_sparse_moe.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
)
# Norms of a block whose MLP and experts stand beside each other: behind either, and in front of the experts.
BESIDE_NORMS = "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
ROUTED_IN = "pre_feedforward_layernorm_2"
_NOTHING: Any = ()  # no file is asked which format a stack has: only its quantization_config is
_GPT_OSS_ALPHA, _GPT_OSS_SHIFT = 1.702, 1.0  # in no config.json
_CORRECTION = "e_score_correction_bias"
_COUNTS = ("num_experts", "num_local_experts")  # keys that say how many experts a layer has; GLM has one more
# whose configs have the keys of DeepSeek's
_DEEPSEEK = "glm4_moe", "deepseek_v3", "kimi_k2", "mistral4", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "nemotron_h"
_GATED = "qwen2_moe", "qwen3_5_moe_text", "qwen3_next"  # whose shared expert has a gate
_SHARED = dict.fromkeys(_GATED, "mlp.shared_expert") | dict.fromkeys(_DEEPSEEK, "mlp.shared_experts")
_SHARED |= {"nemotron_h": "mixer.shared_experts"}
_LATENT = "mixer.fc1_latent_proj", "mixer.fc2_latent_proj"  # around routed experts of a size of their own
# decoder_sparse_step and mlp_only_layers say which layers have experts
_SPARSE = "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text"
_OWN_SIZE = (
    *_SPARSE,
    "qwen3_5_moe_text",
    "gemma4_text",
    "lfm2_moe",
    *_DEEPSEEK,
)  # whose experts have a size of their own
# whose config says whether weights are normalised; in others they are
_ASKED = "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "lfm2_moe", *_DEEPSEEK


class Sigmoid(NamedTuple):
    """Scores by sigmoid, each expert's choice with a bias of its own: see `ops.route.sigmoid_route`."""

    groups: int
    top_groups: int
    scale: float


class Shared(NamedTuple):
    """An expert that every token uses: its name within a block, its width, whether a token's sigmoid scales it, and how
    it calls gate and up, or up alone, or one linear of both; and down."""

    name: str
    size: int
    gated: bool
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
        if family not in _NAMES:
            return None
        beside = family == "gemma4_text"
        if beside and not fields.flag("enable_moe_block"):
            fields.read("num_experts", "top_k_experts", "moe_intermediate_size")
            return None
        if family == "granitemoehybrid" and fields.get("num_local_experts") == 0:
            fields.read("num_experts_per_tok", "intermediate_size")
            return None
        count, glm = _count(family, fields), family in _DEEPSEEK
        top_k = fields.integer("top_k_experts" if beside else "num_experts_per_tok", high=count)
        gate: Gate = GeGLU() if beside else ReLU2() if family == "nemotron_h" else SwiGLU()
        if family == "gpt_oss":
            limit = fields.number("swiglu_limit", low=1e-6, high=1e9)
            gate = SwiGLU(limit, _GPT_OSS_ALPHA, _GPT_OSS_SHIFT)
            fields.read("experts_per_token", "initial_context_length")  # what the others say already
        sparse = (True,) * layers
        if family in _SPARSE:
            sparse = _sparse(fields, layers)
        elif family == "nemotron_h":
            kinds = fields.get("layers_block_type")
            sparse = tuple(kind == "moe" for kind in kinds) if isinstance(kinds, list) else sparse
            if not any(sparse):
                fields.read("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size")
                fields.read("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob")
                return None
        elif glm or family == "lfm2_moe":
            dense = fields.integer("first_k_dense_replace" if glm else "num_dense_layers", low=0, high=4096)
            sparse = tuple(i >= dense for i in range(layers))
            if "mlp_layer_types" in fields.defaults and (kinds := fields.get("mlp_layer_types")) is not None:
                sparse = _listed(kinds, layers)
        return cls(
            family=family,
            layers=sparse,
            count=count,
            size=fields.integer("moe_intermediate_size" if family in _OWN_SIZE else "intermediate_size", high=2**22),
            top_k=top_k,
            normalise=fields.flag("norm_topk_prob") if family in _ASKED else True,
            gate=gate,
            fused=family == "gpt_oss",
            sigmoid=_sigmoid(family, fields, count, top_k),
            shared=_shared(family, fields),
            beside=beside,
            latent=_latent_size(fields) if family == "nemotron_h" else 0,
        )

    @property
    def router(self) -> str:
        """Its name within a block."""
        return _NAMES[self.family][0]

    @property
    def routers(self) -> tuple[str, ...]:
        """Within a block, what the rows of the router come from: its own, and the shared expert's gate."""
        gate = () if self.shared is None or not self.shared.gated else (f"{self.shared.name}_gate",)
        return self.router, *gate

    @property
    def correction(self) -> str:
        """Within a block, the bias of each expert's choice, where they are scored by sigmoid."""
        if self.family == "lfm2_moe":
            return "feed_forward.expert_bias"
        owner = self.router.rpartition(".")[0] if self.family == "minimax_m2" else self.router
        return f"{owner}.{_CORRECTION}"

    @property
    def transposed(self) -> bool:
        """Whether dense experts in one tensor lie [E, k, n]."""
        return self.fused or self.turned

    @property
    def whole(self) -> tuple[str, str]:
        """Within a block, gate-up and down of all experts, where they are one tensor each."""
        gate_up, down = STACKS if self.parts == 2 else ("up_proj", STACKS[1])
        above = _NAMES[self.family][1].removesuffix(f".{gate_up}").partition(".{}")[0]
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
        return tuple(name.format(expert) for name in _NAMES[self.family][1:])

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
        router, *experts = (name.replace(".", r"\.").replace(r"{}", r"\d+") for name in _NAMES[self.family])
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
    return tuple(re.compile(re.escape(name).replace(r"\{\}", r"\d+")) for name in _NAMES[family][1:])


def _count(family: str, fields: Fields) -> int:
    keys = ("n_routed_experts", *_COUNTS) if family in _DEEPSEEK else _COUNTS
    given = [key for key in keys if fields.get(key) is not None]
    counts = {fields.integer(key, high=65536) for key in given}
    if len(counts) != 1:
        got = " and ".join(f"{key} {fields.get(key)}" for key in given) or "neither num_experts nor num_local_experts"
        raise ValueError(f"config has {got}; it must say once how many experts a layer has")
    return counts.pop()


def _latent_size(fields: Fields) -> int:
    return 0 if fields.get("moe_latent_size") is None else fields.integer("moe_latent_size", high=2**18)


def _sigmoid(family: str, fields: Fields, count: int, top_k: int) -> Sigmoid | None:
    if family in ("minimax_m2", "lfm2_moe"):
        key = "routed_scaling_factor"
        return Sigmoid(1, 1, 1.0 if family == "minimax_m2" else fields.number(key, low=1e-6, high=1e6))
    if family not in _DEEPSEEK or family == "mistral4":
        return None
    groups, top_groups = (fields.integer(key, high=count) for key in ("n_group", "topk_group"))
    check_groups("n_group and topk_group", count, top_k, groups, top_groups)
    return Sigmoid(groups, top_groups, fields.number("routed_scaling_factor", low=1e-6, high=1e6))


def _shared(family: str, fields: Fields) -> Shared | None:
    if family == "gemma4_text":
        return Shared("mlp", fields.integer("intermediate_size", high=2**22), False)
    if family in _GATED:
        return Shared(_SHARED[family], fields.integer("shared_expert_intermediate_size", high=2**22), True)
    if family == "nemotron_h":
        size = fields.integer("moe_shared_expert_intermediate_size", high=2**22)
        return Shared(_SHARED[family], size, False, front=("up_proj",))
    if family in _GRANITE[1:]:
        size = fields.integer("shared_intermediate_size", low=family == "granitemoehybrid", high=2**22)
        return Shared("shared_mlp", size, False, ("input_linear",), "output_linear") if size else None
    if family in _DEEPSEEK:
        size = fields.integer("n_shared_experts", high=4096) * fields.integer("moe_intermediate_size", high=2**22)
        return Shared(_SHARED[family], size, False)
    return None


def _listed(kinds: object, layers: int) -> tuple[bool, ...]:
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
        raise ValueError(f"mlp_layer_types is {short(kinds)}; it must list dense or sparse for each of {layers} layers")
    return tuple(kind == "sparse" for kind in kinds)


def _sparse(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Qwen-MoE: every `decoder_sparse_step`th layer that `mlp_only_layers` does not name has experts."""
    dense = fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError(f"mlp_only_layers is {dense!r}; it must list the numbers of layers")
    step = fields.integer("decoder_sparse_step", high=4096)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
