"""What config.json says about a decoder of the Llama kind, every field checked before anything is allocated.

Meaning and defaults of the fields are transformers' own (5.17), which is the oracle of the tests.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onegraph.formats.quantization import parse_quantization
from onegraph.formats.weight import FLOATS, Dtypes, Quantization, Shape
from onegraph.models import windows, wrapper
from onegraph.models.families import FAMILIES, MISSING, ArchSpec, Norms
from onegraph.models.fields import Fields, end_of_text, short
from onegraph.models.heads import Heads
from onegraph.models.latent_config import Latent
from onegraph.models.mixers import Mixers, NoMixer
from onegraph.models.parts import Component, Parts, Stack
from onegraph.models.rope import Rope
from onegraph.models.routed import Routed
from onegraph.models.windows import FULL

EMBED, HEAD = "model.embed_tokens", "lm_head"
PER_LAYER = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"  # within a block
PER_LAYER_OF_MODEL = tuple(
    f"model.{name}" for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
)
_MTP_LAYERS = "num_mtp_layers"  # which transformers 5 writes in place of the published key
_UNREAD = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
LOCAL = "rope_local_base_freq"  # rope_theta of layers with a window, in configs of Gemma
ROPE_KEYS = "rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A decoder of the Llama kind. Build it with `from_dict`, which validates; sizes are counts of elements.

    `windows` has one entry a layer: how many latest keys a query sees, 0 for all; so has `ropes`, with None for a layer
    that does not rotate. `scale` and `softcap` (0: none) are those of attention scores. `embed_scale` multiplies rows
    of the embedding; `residual_scale` what a sublayer adds; logits are divided by `logits_divisor`, then bounded by
    `logits_softcap` (0: not). `routed` are the experts that stand for the MLP in some layers or in all. `eos` lists the
    tokens that end a text. `attention`: the sizes of each layer's heads (`models/heads.py`), of which kv_heads and
    head_dim are the usual ones. `wide_from`: the layer from which on the MLP has twice the hidden units. `per_layer`:
    size and rows of the embedding that each block has of its own, (0, 0) for none. `nested`: the text model of a
    multimodal one (`models/wrapper.py`). `drafts` counts the layers behind the last, or under `mtp.`, that only predict
    further tokens; `draft_kinds`: the blocks of one where they are halves. `mixers` has one entry a layer: what stands
    in attention's place, None for attention.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norm: bool
    scale: float
    softcap: float
    embed_scale: float
    residual_scale: float
    logits_divisor: float
    logits_softcap: float
    windows: tuple[int, ...]
    ropes: tuple[Rope | None, ...]
    routed: Routed | None
    eos: tuple[int, ...]
    quantization: Quantization | None
    nested: bool
    drafts: int
    mixers: Mixers
    latent: Latent | None
    attention: tuple[Heads, ...]
    wide_from: int
    per_layer: tuple[int, int]
    draft_kinds: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Parse a Hugging Face config.json. Raises one ValueError that names what is unsupported or makes no sense."""
        try:
            return cls._parse(config)
        except ValueError as error:
            explain = getattr(config, "explain", "config.json: {}".format)  # a GGUF file has keys of its own
            raise ValueError(explain(error)) from None

    @classmethod
    def _parse(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        if not isinstance(config, Mapping):
            raise ValueError(f"is {type(config).__name__}; it must be an object")
        _refuse_missing(config)
        nested = wrapper.is_wrapper(config)
        config = wrapper.text_config(config)
        _refuse_missing(config)
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            near = difflib.get_close_matches(str(family), FAMILIES)
            known = f"docs/reference/models.md lists the {len(FAMILIES)} that are"
            known += f"; nearest: {', '.join(near)}" if near else ""
            raise ValueError(f"model_type {short(family)} is not supported; {known}")
        traits = FAMILIES[family]
        fields = Fields(traits.keys(config), traits.defaults)
        layers = fields.integer("num_hidden_layers", high=4096)
        quantization = parse_quantization(fields.get("quantization_config"))
        drafts = _drafts(traits, fields)
        if quantization is not None:
            quantization = quantization.renamed(lambda given: _own_names(given, nested, traits, layers, drafts))
        routed = Routed.parse(family, fields, layers)
        heads, kv_heads, hidden, head_dim = _sizes(fields, traits.latent)
        latent = Latent.parse(fields, heads, kv_heads, layers) if traits.latent else None
        vocab = fields.integer("vocab_size", high=2**24)
        fields.check_fixed(traits.fixed)
        fields.read(*traits.idle)
        _check_activation(fields, "gelu_pytorch_tanh" if traits.gelu else "relu2" if traits.relu2 else "silu")
        if traits.head_norm is True and fields.get("use_qk_norm") is not None and not fields.flag("use_qk_norm"):
            raise ValueError(f"use_qk_norm is False; {family} norms each head of q and k, whatever its config says")

        def says(what: bool | str) -> bool:
            return fields.flag(what) if isinstance(what, str) else what

        def factor(key: str, default: float) -> float:
            return fields.number(key, low=1e-6, high=1e6, default=default) if traits.multipliers else default

        def softcap(key: str) -> float:
            given = traits.softcaps and fields.get(key) is not None
            return fields.number(key, low=1e-3, high=1e6) if given else 0.0

        ropes = _ropes(family, traits, fields, layers, head_dim)
        scalar = fields.number("query_pre_attn_scalar", low=1e-3, high=1e6) if traits.query_scalar else head_dim
        parsed = cls(
            model_type=family,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=_inner_size(family, traits, fields),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=fields.number(traits.eps, low=1e-12, high=1.0, default=1e-6),
            max_positions=fields.integer("max_position_embeddings", high=windows.MAX_POSITIONS),
            tied=fields.flag("tie_word_embeddings"),
            qkv_bias=says(traits.qkv_bias),
            out_bias=says(traits.out_bias),
            mlp_bias=says(traits.mlp_bias),
            head_norm=says(traits.head_norm),
            scale=traits.score_scale
            or (
                factor("attention_multiplier", 1.0)
                if traits.multipliers
                else scalar**-0.5
                if latent is None
                else latent.scale(ropes[0])
            ),
            softcap=softcap("attn_logit_softcapping"),
            embed_scale=math.sqrt(hidden) if traits.scaled_embedding else factor("embedding_multiplier", 1.0),
            residual_scale=factor("residual_multiplier", 1.0),
            logits_divisor=factor("logits_scaling", 1.0),
            logits_softcap=softcap("final_logit_softcapping"),
            windows=traits.windows(fields, layers),
            ropes=ropes,
            routed=routed,
            eos=end_of_text(fields.get("eos_token_id"), vocab),
            quantization=quantization,
            nested=nested,
            drafts=drafts,
            draft_kinds=_draft_kinds(traits, fields, drafts),
            latent=latent,
            mixers=traits.mixers(fields, layers),
            attention=traits.heads(fields, layers) or (Heads(kv_heads, head_dim),) * layers,
            wide_from=_wide_from(traits, fields, layers),
            per_layer=_per_layer(traits, fields),
        )
        fields.check_unread(family)
        for rope, each in zip(parsed.ropes, parsed.attention, strict=True):
            if rope is not None:
                rope.turned(each.dim)
        return parsed

    def held_as(self, shapes: Mapping[str, tuple[int, ...]]) -> "LlamaConfig":
        """As a file with tensors of these names, by the family's, and shapes holds the model."""
        first = next((i for i in range(self.layers) if self.routed_at(i)), None)
        if self.routed is None or first is None or self.routed.fused:
            return self
        down, sizes = shapes.get(self.prefix(first) + self.routed.whole[1]), (self.hidden_size, self.routed.size)
        turned = down is not None and down[1:] == sizes[::-1] != sizes
        return replace(self, routed=replace(self.routed, in_stacks=down is not None, turned=turned))

    @property
    def traits(self) -> ArchSpec:
        """What its family is made of."""
        return FAMILIES[self.model_type]

    def norms_at(self, layer: int) -> Norms:
        """RMSNorms of a block."""
        others = self.traits.mixer_norms
        if isinstance(self.mixers[layer], NoMixer):
            return Norms(None, None, self.traits.norms.attention_in, None)
        return self.traits.norms if others is None or self.mixers[layer] is None else others

    @property
    def qkv(self) -> tuple[str, ...]:
        """Within a block, the linears whose results side by side are queries, keys and values; with an output gate rows
        of it lie behind each head of queries."""
        if self.latent is not None:
            return self.latent.front
        return self.traits.names.qkv

    def feeds(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return not self.traits.single or isinstance(self.mixers[layer], NoMixer)

    def qkv_at(self, layer: int) -> tuple[str, ...]:
        """Those of `qkv` that a layer has."""
        heads = self.attention[layer]
        return self.qkv[:1] if heads.source is not None else self.qkv if heads.values else self.qkv[:2]

    def inner_at(self, layer: int) -> int:
        """Hidden units of a layer's MLP."""
        return self.intermediate_size * (2 if layer >= self.wide_from else 1)

    @property
    def gate_up(self) -> tuple[str, ...]:
        """Within a block, the linears whose results side by side are the MLP's gate and up."""
        return self.traits.names.gate_up

    @property
    def norm(self) -> str:
        """The weight of the final norm."""
        return f"{self.traits.names.norm}.weight"

    @property
    def steady(self) -> list[str]:
        """Linears that are never rounded, whatever a rate map says."""
        mixers = enumerate(self.mixers)
        found = [self.prefix(i) + name for i, mixer in mixers if mixer is not None for name in mixer.unrounded]
        if self.latent is not None:
            layers = range(self.layers)
            found += [self.prefix(i) + name for i in layers for name in self.latent.index_linears(i, self.hidden_size)]
        return found

    @property
    def cached(self) -> list[tuple[int, int]]:
        """(heads of keys, size of a head) of each layer that attends to keys and values of its own, in order."""
        layers = zip(self.mixers, self.attention, strict=True)
        return [(heads.kv_heads, heads.dim) for mixer, heads in layers if mixer is None and heads.source is None]

    @property
    def attention_layers(self) -> int:
        """How many layers' keys and values are cached."""
        return len(self.cached)

    @property
    def exact_cache(self) -> str | None:
        """What of its attention a KV cache in codes does not know; None: nothing."""
        if self.traits.sinks:
            return "attention sinks"
        if any(heads.source is not None for heads in self.attention):
            return "layers that read the keys and values of others"
        return "a bound of attention scores" if self.softcap else None

    @property
    def parts(self) -> Parts:
        """What the decoder is made of, by the names of transformers' modules, which files have too."""
        d = self.hidden_size
        around: dict[str, tuple[Shape, Dtypes]]
        around = {"layer_scalar": ((1,), FLOATS)} if self.traits.layer_scale else {}
        if size := self.per_layer[0]:
            shapes: tuple[Shape, ...] = (size, d), (d, size), (d,)
            around |= {f"{name}.weight": (shape, FLOATS) for name, shape in zip(PER_LAYER, shapes, strict=True)}
        linears: dict[str, tuple[int, int, bool]] = {}
        tensors: dict[str, tuple[Shape, Dtypes]] = {}
        stacks: dict[str, Stack] = {}
        single: list[str] = []
        for i in range(self.layers):
            prefix, routed, mixer = self.prefix(i), self.routed_at(i), self.mixers[i]
            (attention, inside), mlp = self._attention_parts(i), self._mlp_parts(i) if self.feeds(i) else {}
            mixing = attention if mixer is None else dict(mixer.linears(d))
            own = around | (inside if mixer is None else mixer.tensors)
            own |= {f"{name}.weight": ((d,), FLOATS) for name in self.norms_at(i) if name is not None}
            if self.latent is not None:
                mixing, own = mixing | self.latent.index_linears(i, d), own | self.latent.index_tensors(i, d)
            whole = routed is not None and routed.stacked(prefix, self.quantization)
            half = mlp if routed is None else {} if whole else dict(routed.linears(d))
            if routed is not None and not whole and self._keeps(prefix + routed.whole[0]):
                tensors |= {f"{prefix}{name}.weight": ((n, k), FLOATS) for name, (n, k, _) in half.items()}
                half = {}
            half = half | ({} if routed is None else dict(routed.shared_linears(d)))
            linears |= {prefix + name: size for name, size in (mixing | half).items()}
            others = own if routed is None else own | routed.tensors(d)
            if routed is not None and whole:
                stacks |= {prefix + name: what for name, what in routed.stacks(d).items()}
            elif routed is not None:
                single += (prefix + name for name in routed.whole)
            tensors |= {prefix + name: what for name, what in others.items()}
        return Parts(
            linears=linears | {HEAD: (self.vocab_size, d, False)},
            embedding=(EMBED, (self.vocab_size, d)),
            stacks=stacks,
            single=tuple(single),
            steady=tuple(self.steady),
            tensors=tensors | {self.norm: ((d,), FLOATS)} | self._per_layer_parts,
            head=HEAD,
            tied=self.tied,
            components=self._components,
            ignored=self._ignored,
        )

    def _attention_parts(self, layer: int) -> tuple[dict[str, tuple[int, int, bool]], dict[str, tuple[Shape, Dtypes]]]:
        """Linears and tensors of a layer's attention, by the name within the block."""
        heads, d, names = self.attention[layer], self.hidden_size, self.traits.names
        if self.latent is not None:
            return dict(self.latent.linears(d)), dict(self.latent.tensors)
        q, kv = self.heads * heads.dim, heads.kv_heads * heads.dim
        queries = 2 * q if self.traits.output_gate else q
        sizes = (queries + 2 * kv,) if len(self.qkv) == 1 else (queries, kv, kv)
        linears = {name: (n, d, self.qkv_bias) for name, n in zip(self.qkv_at(layer), sizes, strict=False)}
        linears[names.out] = d, q, self.out_bias
        inside: dict[str, tuple[Shape, Dtypes]] = {}
        if self.head_norm or self.traits.whole_norm:
            both = (heads.dim, heads.dim) if self.head_norm else (q, kv)
            norms = zip(names.head_norms[: 1 if heads.source is not None else 2], both, strict=False)
            inside = {f"{name}.weight": ((size,), FLOATS) for name, size in norms}
        return linears, inside | ({"self_attn.sinks": ((self.heads,), FLOATS)} if self.traits.sinks else {})

    def _mlp_parts(self, layer: int) -> dict[str, tuple[int, int, bool]]:
        """Linears of a layer's MLP, by the name within the block."""
        d, wide = self.hidden_size, self.inner_at(layer)
        rows = wide * (1 if self.traits.relu2 else 2) // len(self.gate_up)
        found = dict.fromkeys(self.gate_up, (rows, d, self.mlp_bias))
        return found | {self.traits.names.down: (d, wide, self.mlp_bias)}

    @property
    def _per_layer_parts(self) -> dict[str, tuple[Shape, Dtypes]]:
        """Tensors that make what each block has of its own of a token."""
        size, rows = self.per_layer
        if not size:
            return {}
        shapes: tuple[Shape, ...] = (rows, self.layers * size), (self.layers * size, self.hidden_size), (size,)
        return {f"{name}.weight": (shape, FLOATS) for name, shape in zip(PER_LAYER_OF_MODEL, shapes, strict=True)}

    def _keeps(self, stack: str) -> bool:
        """Whether what onegraph wrote keeps these experts as the source had them: dense, one by one."""
        return self.quantization is not None and self.quantization.stacked(stack) is False

    @property
    def _components(self) -> dict[str, Component]:
        def of(*names: str) -> str:
            return rf"\.({'|'.join(map(re.escape, names))})$"

        found = {"embedding": Component(("embed",), r"embed_tokens$")}
        for mixer in dict.fromkeys((None, *(each for each in self.mixers if not isinstance(each, NoMixer)))):
            sides, out = (self.qkv, self.traits.names.out) if mixer is None else (mixer.inputs, mixer.out)
            blocks = [str(i) for i, each in enumerate(self.mixers) if each == mixer]
            title, front = ("attention", "qkv") if mixer is None else (mixer.title, "in")
            within = rf"\.({'|'.join(blocks)})"  # two kinds may name their linears alike
            if len(blocks) == self.layers:
                blocks, within = ["*"], ""
            paths = (tuple(f"blocks.{i}.{half}.linear" for i in blocks) for half in ("qkv", "out"))
            found[f"{title} {front}"] = Component(next(paths), within + of(*sides))
            found[f"{title} out"] = Component(next(paths), within + of(out))
        if self.routed is None or not all(self.routed.layers):
            found |= {
                "mlp gate up": Component(("blocks.*.mlp.gate_up.linear",), of(*self.gate_up)),
                "mlp down": Component(("blocks.*.mlp.down.linear",), of(self.traits.names.down)),
            }
        found |= {} if self.routed is None else self.routed.components
        return found | {"lm_head": Component(("lm_head",), r"^lm_head$")}

    def prefix(self, layer: int) -> str:
        """What the names of a layer's parts begin with."""
        return f"model.layers.{layer}."

    def attention_index(self, layer: int) -> int:
        """By which a cache finds a layer's part: the number of the layer that it reads among those that are cached."""
        source = self.attention[layer].source
        at = layer if source is None else source
        owners = zip(self.mixers[:at], self.attention[:at], strict=True)
        return sum(mixer is None and heads.source is None for mixer, heads in owners)

    def routed_at(self, layer: int) -> Routed | None:
        """The experts of a layer; None for one with an MLP."""
        return self.routed if self.routed is not None and self.routed.layers[layer] else None

    def family_name(self, name: str) -> str:
        """The text model's own name of a tensor."""
        return _own_name(name, self.nested, self.traits)

    def _ignored(self, name: str) -> bool:
        other = _drafting(name, self.layers, self.drafts) or (self.nested and wrapper.is_other(name))
        borrowed = _UNREAD.match(name)  # what transformers saves of layers that read the keys of others
        if borrowed is not None and int(borrowed[1]) < self.layers:
            other = other or self.attention[int(borrowed[1])].source is not None
        return other


def _own_name(name: str, nested: bool, traits: ArchSpec) -> str:
    """The family's own name of a tensor or layer of its files."""
    return traits.own_name(wrapper.family_name(name) if nested else name)


def _own_names(given: Mapping[str, Any], nested: bool, traits: ArchSpec, layers: int, drafts: int) -> dict[str, Any]:
    """What is said of layers of the decoder alone, by the family's own names."""
    kept = {name: what for name, what in given.items() if not nested or not wrapper.is_other(name)}
    named = {_own_name(name, nested, traits): what for name, what in kept.items()}
    return {name: what for name, what in named.items() if not _drafting(name, layers, drafts)}


def _drafting(name: str, layers: int, drafts: int) -> bool:
    """Whether a tensor or layer is of one of the draft layers that are beside or behind so many layers."""
    behind = tuple(f"model.layers.{i}." for i in range(layers, layers + drafts))
    return name.startswith(("mtp.", *behind))


def _refuse_missing(config: Mapping[str, Any]) -> None:
    family = config.get("model_type")
    if isinstance(family, str) and family in MISSING:
        raise ValueError(f"model_type {family!r} is not supported: {MISSING[family]} is not built")


def _sizes(fields: Fields, latent: bool) -> tuple[int, int, int, int]:
    """Heads, key-value heads, hidden size and head_dim; of latent attention the part of a head that rotates."""
    heads = fields.integer("num_attention_heads", high=4096)
    grouped = fields.get("num_key_value_heads") is not None
    kv_heads = fields.integer("num_key_value_heads", high=4096) if grouped else heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    hidden = fields.integer("hidden_size", high=2**18)
    if latent:
        head_dim = fields.integer("qk_rope_head_dim", high=1024)
    elif fields.get("head_dim") is not None:
        head_dim = fields.integer("head_dim", high=1024)
    elif hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embeddings need an even one")
    return heads, kv_heads, hidden, head_dim


def _wide_from(traits: ArchSpec, fields: Fields, layers: int) -> int:
    """See `LlamaConfig`."""
    if not traits.per_layer or not fields.flag("use_double_wide_mlp"):
        return layers
    return layers - fields.integer("num_kv_shared_layers", low=0, high=layers)


def _per_layer(traits: ArchSpec, fields: Fields) -> tuple[int, int]:
    """See `LlamaConfig`."""
    if not traits.per_layer:
        return 0, 0
    fields.read("vocab_size_per_layer_input")
    if not fields.get("hidden_size_per_layer_input"):
        return 0, 0
    size = fields.integer("hidden_size_per_layer_input", high=2**18)
    return size, fields.integer("vocab_size_per_layer_input", high=2**24)


def _inner_size(family: str, traits: ArchSpec, fields: Fields) -> int:
    """Hidden units of the MLP."""
    if family != "lfm2":
        return fields.integer(traits.inner, high=2**22)
    _check_lfm2(fields)
    size = fields.integer("block_ff_dim" if fields.get("block_ff_dim") is not None else "intermediate_size", high=2**22)
    adjust = fields.get("block_auto_adjust_ff_dim")
    of = 256 if fields.get("block_multiple_of") is None else fields.integer("block_multiple_of", high=65536)
    factor = fields.number("block_ffn_dim_multiplier", low=1e-3, high=1e3, default=1.0)
    if adjust is None or fields.flag("block_auto_adjust_ff_dim"):
        size = -(-int(factor * int(2 * size / 3)) // of) * of
    return size


def _check_lfm2(fields: Fields) -> None:
    """Keys of the published files that say what others do."""
    for key, other in (
        ("block_dim", "hidden_size"), ("conv_dim", "hidden_size"), ("conv_dim_out", "hidden_size"),
        ("num_heads", "num_attention_heads"), ("tie_embedding", "tie_word_embeddings"),
    ):  # fmt: skip
        if (given := fields.get(key)) is not None and given != fields.get(other):
            raise ValueError(f"{key} is {short(given)} and {other} {short(fields.get(other))}; they must agree")


def _check_activation(fields: Fields, known: str) -> None:
    allowed = (None, "silu", "swish") if known == "silu" else (None, known)
    for key in ("hidden_act", "hidden_activation"):
        if (given := fields.get(key)) not in allowed:
            raise ValueError(f"{key} {short(given)} is not supported; supported: {known}")


def _drafts(traits: ArchSpec, fields: Fields) -> int:
    """Layers that only predict further tokens."""
    key = "num_nextn_predict_layers" if traits.draft is None else traits.draft.key
    has = key in traits.defaults or (traits.draft is not None and fields.get(key) is not None)
    if traits.draft is not None and fields.config.get(key) is None and fields.get(_MTP_LAYERS) is not None:
        key, has = _MTP_LAYERS, True
    return fields.integer(key, low=0, high=64) if has else 0


def _draft_kinds(traits: ArchSpec, fields: Fields, drafts: int) -> tuple[str, ...]:
    """Of each block of a draft layer whose blocks are halves of a layer."""
    if traits.draft is None or not traits.draft.kinds:
        return ()
    key, allowed = traits.draft.kinds, (FULL, "moe", "mlp")
    kinds = fields.get(key)
    if not drafts:
        return ()
    if not isinstance(kinds, list) or FULL not in kinds or not all(kind in allowed for kind in kinds):
        raise ValueError(
            f"{key} is {short(kinds)}; it must list {FULL}, and moe or mlp besides: set {traits.draft.key} to 0 to run "
            "the model without its draft layer"
        )
    return tuple(kinds)


def _ropes(family: str, traits: ArchSpec, fields: Fields, layers: int, head_dim: int) -> tuple[Rope | None, ...]:
    """Of each layer."""
    fields.read(*ROPE_KEYS)
    config = fields.config
    if traits.rope == "never":
        return (None,) * layers
    if all(config.get(key) is None for key in ROPE_KEYS[:2]) and "rope_parameters" in traits.defaults:
        config = {**config, "rope_parameters": traits.defaults["rope_parameters"]}
    if traits.partial is not None:
        fields.read("partial_rotary_factor")
        config = _in_heads(fields, config, head_dim)
    if traits.latent:
        config = _of_whole(fields, config, head_dim)
    theta = traits.defaults.get("rope_theta", 10000.0)

    def parse(config: Mapping[str, Any], theta: float) -> Rope:
        limit = fields.integer("max_position_embeddings", high=windows.MAX_POSITIONS)
        rope = Rope.from_dict(
            config,
            default_theta=theta,
            max_positions=limit,
            partial=traits.partial,
            query_scaling=traits.query_scaling,
            mrope=traits.mrope,
        )
        if traits.rope_kinds is not None and rope.kind not in traits.rope_kinds:
            raise ValueError(f"rope type {rope.kind!r} is not supported for {family}; give {traits.rope_kinds[0]!r}")
        return rope

    said = config.get("rope_parameters")
    if traits.rope == "given" and isinstance(said, Mapping) and said.get("rope_theta", 0) is None:
        parse({"rope_parameters": said}, theta)  # the other keys are checked all the same
        return (None,) * layers
    if traits.rotates is not None:
        rope = parse(config, theta)
        return tuple(rope if turns else None for turns in traits.rotates(fields, layers))
    if not traits.two_ropes:
        return (parse(config, theta),) * layers
    key = LOCAL if LOCAL in traits.defaults else "rope_theta"
    fields.read(key)
    local, whole = _two(config, key)
    near, far = parse(local, traits.defaults[key]), parse(whole, theta)
    return tuple(near if window else far for window in traits.windows(fields, layers))


def _in_heads(fields: Fields, config: Mapping[str, Any], head_dim: int) -> Mapping[str, Any]:
    """A config that says the part of a head that rotates as a number of coordinates, as one that says the part."""
    if fields.get("rotary_dim") is None:
        return config
    part = fields.integer("rotary_dim", high=1024) / head_dim
    if config.get("partial_rotary_factor") not in (None, part):
        both = f"rotary_dim {fields.get('rotary_dim')} and partial_rotary_factor {config['partial_rotary_factor']}"
        raise ValueError(f"{both} disagree; give one of them")
    return {**config, "partial_rotary_factor": part}


def _of_whole(fields: Fields, config: Mapping[str, Any], rope: int) -> Mapping[str, Any]:
    """A config without the part of a query that rotates, which latent attention has as two sizes."""
    given, part = config.get("rope_parameters"), rope / (rope + fields.integer("qk_nope_head_dim", high=2**14))
    if not isinstance(given, Mapping) or given.get("partial_rotary_factor") != part:
        return config
    return {**config, "rope_parameters": {key: value for key, value in given.items() if key != "partial_rotary_factor"}}


def _two(config: Mapping[str, Any], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What says the rope of layers with a window, and of the others: transformers 5 writes one object for each into
    rope_parameters; before, rope_theta and rope_scaling were of the layers without one, and `key` of those with."""
    given = config.get("rope_parameters")
    if given is None:
        return {"rope_theta": config.get(key)}, {key: config[key] for key in ROPE_KEYS if key in config}
    kinds = windows.SLIDING, windows.FULL
    if not isinstance(given, Mapping) or any(not isinstance(given.get(kind) or {}, Mapping) for kind in kinds):
        raise ValueError(f"rope_parameters is {short(given)}; it must have an object for each of {', '.join(kinds)}")
    if unknown := sorted(set(map(str, given)) - set(kinds)):
        raise ValueError(f"rope_parameters has {', '.join(unknown)}; it must have {' and '.join(kinds)}")
    near, above = (given.get(windows.SLIDING) or {}).get("rope_theta"), config.get(key)
    if near is not None and above is not None and near != above:
        raise ValueError(f"{key} is {above!r}, rope_parameters has {near!r} for {windows.SLIDING}; they must agree")
    thetas = above, config.get("rope_theta")
    local, whole = (
        {"rope_parameters": given.get(kind), "rope_theta": theta} for kind, theta in zip(kinds, thetas, strict=True)
    )
    return local, whole
