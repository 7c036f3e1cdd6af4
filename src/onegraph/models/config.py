"""What config.json says about a decoder of the Llama kind, every field checked before anything is allocated.

Meaning and defaults of the fields are transformers' own (5.17), which is the oracle of the tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onegraph.formats.quantization import parse_quantization
from onegraph.formats.weight import FLOATS, Dtypes, Quantization, Shape
from onegraph.models.parts import Component, Parts, Stack
from onegraph.models.rope import Rope, _number
from onegraph.models.routed import KEYS, Routed

EMBED, NORM, HEAD = "model.embed_tokens", "model.norm.weight", "lm_head"

# transformers' class defaults, for keys that a config.json leaves out. None: as many as attention heads.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    "smollm3": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
    },
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_UNIFORM = ("llama", "mistral", "mixtral", "qwen3_moe")  # all layers have the same window, or none

# Features of relatives that this decoder does not have: key -> values that mean "not used".
_ABSENT: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (None, 1),
    "rotary_pct": (None, 1),
    "rope_interleaved": (None, False),
    "mrope_section": (None,),
    "use_mrope": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "moe_intermediate_size": (None, 0),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "routed_scaling_factor": (None, 1),
    "scoring_func": (None, "softmax"),
    "n_group": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "attn_temperature_tuning": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "parallel_attn": (None, False),
    "use_parallel_residual": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "vision_config": (None,),
    "text_config": (None,),
    "auto_map": (None,),
}

_MAX_POSITIONS = 2**24


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A decoder of the Llama kind. Build it with `from_dict`, which validates; sizes are counts of elements.

    `windows` has one entry a layer: how many latest keys a query sees, 0 for all. `rope_layers` says which layers
    rotate. `sinks`: each head has one more logit. `routed` are the experts that stand for the MLP in some layers or in
    all. `eos` lists the tokens that end a text.
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
    qk_norm: bool
    sinks: bool
    windows: tuple[int, ...]
    rope_layers: tuple[bool, ...]
    rope: Rope
    routed: Routed | None
    eos: tuple[int, ...]
    quantization: Quantization | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Parse a Hugging Face config.json. Raises one ValueError that names what is unsupported or makes no sense."""
        try:
            return cls._parse(config)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from None

    @classmethod
    def _parse(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        if not isinstance(config, Mapping):
            raise ValueError(f"is {type(config).__name__}; it must be an object")
        family = config.get("model_type")
        if not isinstance(family, str) or family not in _FAMILIES:
            raise ValueError(f"model_type {family!r} is not supported; supported: {', '.join(_FAMILIES)}")
        fields = _Fields(config, _FAMILIES[family])
        layers = fields.integer("num_hidden_layers", high=4096)
        routed = Routed.parse(family, fields, layers)
        for key, neutral in _ABSENT.items():
            if (routed is None or key not in KEYS) and not any(
                config.get(key) is value or config.get(key) == value for value in neutral
            ):
                raise ValueError(f"{key} is {_short(config[key])}; this feature is not supported")
        for key in ("hidden_act", "hidden_activation"):
            if config.get(key) not in (None, "silu", "swish"):
                raise ValueError(f"{key} {_short(config[key])} is not supported; supported: silu")

        heads = fields.integer("num_attention_heads", high=4096)
        kv_heads = (
            heads if fields.get("num_key_value_heads") is None else fields.integer("num_key_value_heads", high=4096)
        )
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        hidden = fields.integer("hidden_size", high=2**18)
        if fields.get("head_dim") is None:
            if hidden % heads:
                raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
            head_dim = hidden // heads
        else:
            head_dim = fields.integer("head_dim", high=1024)
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary embeddings need an even one")
        max_positions = fields.integer("max_position_embeddings", high=_MAX_POSITIONS)
        vocab = fields.integer("vocab_size", high=2**24)
        biased = ("llama", "qwen3", "qwen3_moe", "smollm3", "gpt_oss")
        attention_bias = fields.flag("attention_bias") if family in biased else False
        rotated = any(config.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
        rope_layers = _rope_layers(fields, layers) if family == "smollm3" else (True,) * layers
        return cls(
            model_type=family,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", high=2**22),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=_number(fields.get("rms_norm_eps", 1e-6), "rms_norm_eps", low=1e-12, high=1.0),
            max_positions=max_positions,
            tied=fields.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias") if family in ("llama", "smollm3") else False,
            qk_norm=family in ("qwen3", "qwen3_moe"),
            sinks=family == "gpt_oss",
            windows=_windows(family, fields, layers, rope_layers),
            rope_layers=rope_layers,
            rope=Rope.from_dict(
                config if family != "gpt_oss" or rotated else {**config, "rope_parameters": _GPT_OSS_ROPE},
                default_theta=_FAMILIES[family].get("rope_theta", 10000.0),
                max_positions=max_positions,
            ),
            routed=routed,
            eos=_eos(config.get("eos_token_id"), vocab),
            quantization=parse_quantization(config.get("quantization_config")),
        )

    @property
    def parts(self) -> Parts:
        """What the decoder is made of, by the names of transformers' modules, which files have too."""
        d, wide, q, kv = (
            self.hidden_size,
            self.intermediate_size,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        attention = {
            "self_attn.q_proj": (q, d, self.qkv_bias),
            "self_attn.k_proj": (kv, d, self.qkv_bias),
            "self_attn.v_proj": (kv, d, self.qkv_bias),
            "self_attn.o_proj": (d, q, self.out_bias),
        }
        mlp = {
            "mlp.gate_proj": (wide, d, self.mlp_bias),
            "mlp.up_proj": (wide, d, self.mlp_bias),
            "mlp.down_proj": (d, wide, self.mlp_bias),
        }
        norms = {"input_layernorm": d, "post_attention_layernorm": d}
        norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim} if self.qk_norm else {}
        own = {f"{norm}.weight": ((size,), FLOATS) for norm, size in norms.items()}
        own |= {"self_attn.sinks": ((self.heads,), FLOATS)} if self.sinks else {}
        linears: dict[str, tuple[int, int, bool]] = {}
        tensors: dict[str, tuple[Shape, Dtypes]] = {}
        stacks: dict[str, Stack] = {}
        single: list[str] = []
        for i in range(self.layers):
            prefix, routed = f"model.layers.{i}.", self.routed_at(i)
            whole = routed is not None and routed.stacked(prefix, self.quantization)
            half = mlp if routed is None else {} if whole else dict(routed.linears(d))
            if routed is not None and not whole and self._keeps(prefix + routed.whole[0]):
                tensors |= {f"{prefix}{name}.weight": ((n, k), FLOATS) for name, (n, k, _) in half.items()}
                half = {}
            linears |= {prefix + name: size for name, size in (attention | half).items()}
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
            tensors=tensors | {NORM: ((d,), FLOATS)},
            head=HEAD,
            tied=self.tied,
            components=self._components,
        )

    def _keeps(self, stack: str) -> bool:
        """Whether what onegraph wrote keeps these experts as the source had them: dense, one by one."""
        return self.quantization is not None and self.quantization.stacked(stack) is False

    @property
    def _components(self) -> dict[str, Component]:
        found = {
            "embedding": Component(("embed",), r"embed_tokens$"),
            "attention qkv": Component(("blocks.*.qkv.linear",), r"self_attn\.[qkv]_proj$"),
            "attention out": Component(("blocks.*.out.linear",), r"self_attn\.o_proj$"),
        }
        if self.routed is None or not all(self.routed.layers):
            found |= {
                "mlp gate up": Component(("blocks.*.mlp.gate_up.linear",), r"mlp\.(gate|up)_proj$"),
                "mlp down": Component(("blocks.*.mlp.down.linear",), r"mlp\.down_proj$"),
            }
        found |= {} if self.routed is None else self.routed.components
        return found | {"lm_head": Component(("lm_head",), r"^lm_head$")}

    def routed_at(self, layer: int) -> Routed | None:
        """The experts of a layer; None for one with an MLP."""
        return self.routed if self.routed is not None and self.routed.layers[layer] else None

    def family_name(self, name: str) -> str:
        return name


class _Fields:
    """The config over the defaults of its family, each value checked for its type and range."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults

    def get(self, key: str, default: object = None) -> Any:
        return self.config[key] if key in self.config else self.defaults.get(key, default)

    def integer(self, key: str, *, low: int = 1, high: int) -> int:
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            got = "missing" if value is None else f"{_short(value)}"
            raise ValueError(f"{key} is {got}; it must be an integer from {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {_short(value)}; it must be true or false")
        return value


def _windows(family: str, fields: _Fields, layers: int, rope_layers: tuple[bool, ...]) -> tuple[int, ...]:
    kinds = fields.get("layer_types")
    if kinds is not None:
        allowed = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in allowed for kind in kinds):
            raise ValueError(f"layer_types is {_short(kinds)}; it must list {layers} of {', '.join(allowed)}")
    if family in _UNIFORM:
        # transformers' Llama knows no window, the others one for all layers; relatives that differ are refused.
        off = family == "qwen3_moe" and not fields.flag("use_sliding_window")
        given = None if off else fields.get("sliding_window")
        window = 0 if given is None else fields.integer("sliding_window", high=_MAX_POSITIONS)
        if family == "llama" and window:
            raise ValueError(f"sliding_window is {window}; llama with a sliding window is not supported")
        wrong = "full_attention" if window else "sliding_attention"
        if kinds is not None and wrong in kinds:
            raise ValueError(
                f"layer_types with {wrong} is not supported for {family} and sliding_window {window or None}"
            )
        return (window,) * layers
    if family == "gpt_oss":
        window = fields.integer("sliding_window", high=_MAX_POSITIONS)
        kinds = kinds or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        if kinds is not None and "sliding_attention" in kinds:
            raise ValueError(
                "layer_types has sliding_attention, but use_sliding_window is off or sliding_window missing"
            )
        return (0,) * layers
    window = fields.integer("sliding_window", high=_MAX_POSITIONS)
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if family == "smollm3":
        return tuple(0 if rotates else window for rotates in rope_layers)
    full = 28 if fields.get("max_window_layers") is None else fields.integer("max_window_layers", low=0, high=4096)
    return tuple(window if i >= full else 0 for i in range(layers))


def _rope_layers(fields: _Fields, layers: int) -> tuple[bool, ...]:
    """SmolLM3: `no_rope_layers` holds 1 where a layer rotates and 0 where it does not."""
    given = fields.get("no_rope_layers")
    if given is None:
        every = (
            4 if fields.get("no_rope_layer_interval") is None else fields.integer("no_rope_layer_interval", high=4096)
        )
        return tuple((i + 1) % every != 0 for i in range(layers))
    if (
        not isinstance(given, list)
        or len(given) < layers
        or not all(type(x) in (int, bool) and x in (0, 1) for x in given)
    ):
        raise ValueError(f"no_rope_layers is {_short(given)}; it must list a 0 or 1 for each of {layers} layers")
    return tuple(bool(x) for x in given[:layers])


def _eos(value: object, vocab: int) -> tuple[int, ...]:
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(f"eos_token_id is {_short(value)}; it must be one or a list of tokens below {vocab}")
    return tuple(tokens)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
