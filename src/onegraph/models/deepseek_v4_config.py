"""What config.json says about a DeepSeek-V4 (Flash or Pro), as transformers or as DeepSeek write it, checked whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onegraph.formats.quantization import parse_quantization
from onegraph.formats.weight import Quantization
from onegraph.models.deepseek_v4_names import official
from onegraph.models.deepseek_v4_parts import decoder_parts
from onegraph.models.fields import Fields, end_of_text, number, short
from onegraph.models.parts import Parts
from onegraph.models.rope import Rope

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASH, TOP_K = "hash_moe", "moe"
_RATIOS = {0: SLIDING, 4: CSA, 128: HCA}

# transformers' class defaults (5.17), for keys that a config.json leaves out: V4-Flash's sizes.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
    "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024, "num_experts_per_tok": 6, "n_routed_experts": 256,
    "routed_scaling_factor": 1.5, "max_position_embeddings": 1048576, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
    "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512, "rms_norm_eps": 1e-6, "num_hash_layers": 3,
}  # fmt: skip

# What this decoder does not do: key -> values that mean "not used", and what it would be.
_ABSENT: dict[str, tuple[tuple[object, ...], str]] = {
    "vision_config": ((None,), "vision is not supported"),
    "text_config": ((None,), "a multimodal wrapper is not supported; give the text model"),
    "speculative_config": ((None,), "MTP drafting is not supported"),
    "engram_layer_ids": ((None, []), "Engram layers (V4.1) are not supported"),
    "kv_source_layer_ids": ((None, []), "shared key-value layers (V4.1) are not supported"),
    "candidate_source_layer_id": ((None,), "candidate selection (V4.1) is not supported"),
    "attention_bias": ((None, False), "biases in attention are not supported"),
    "mlp_bias": ((None, False), "biases in experts are not supported"),
    "num_key_value_heads": ((None, 1), "the attention has one key-value head"),
    "n_shared_experts": ((None, 1), "the block has one shared expert"),
    "scoring_func": ((None, "sqrtsoftplus"), "supported: sqrtsoftplus"),
    "norm_topk_prob": ((None, True), "weights of experts are normalised"),
    "hidden_act": ((None, "silu", "swish"), "supported: silu"),
    "tie_word_embeddings": ((None, False), "the head has its own weight"),
    "auto_map": ((None,), "code in checkpoints is never run"),
}


@dataclass(frozen=True)
class Layer:
    """One block, of the decoder or of a draft stage behind it: where its tensors stand and what kind it is."""

    prefix: str
    index: int
    kind: str
    ratio: int
    hashed: bool

    @property
    def indexed(self) -> bool:
        """Whether an indexer selects the entries that a query sees; such entries overlap."""
        return self.kind == CSA


@dataclass(frozen=True)
class DSpark:
    """What sizes DSpark's draft stages, which published files hold and nothing here runs: the decoder's `layers` whose
    streams they take, and the rank of the Markov head."""

    layers: tuple[int, ...]
    rank: int


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config:
    """Sizes are counts of elements. `kinds` names each layer's attention, `ratios` its compression (0: none), `hashed`
    whether its experts are looked up by token. `main` is the RoPE of layers without compression, `compress` of others.
    `drafts` counts the stages of `mtp.*`, which are DSpark's where `dspark` is given.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    kinds: tuple[str, ...]
    ratios: tuple[int, ...]
    hashed: tuple[bool, ...]
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_top_k: int
    streams: int
    sinkhorn: int
    hyper_eps: float
    experts: int
    top_k: int
    expert_size: int
    route_scale: float
    limit: float
    eps: float
    max_positions: int
    main: Rope
    compress: Rope
    drafts: int
    dspark: DSpark | None
    eos: tuple[int, ...]
    quantization: Quantization | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DeepseekV4Config":
        """Parse a Hugging Face config.json. Raises one ValueError that names what is unsupported or makes no sense.

        The draft stages that checkpoints carry (`mtp.*`) are not part of the decoder; `drafts` counts them.
        """
        try:
            return cls._parse(config)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from None

    @classmethod
    def _parse(cls, config: Mapping[str, Any]) -> "DeepseekV4Config":
        if not isinstance(config, Mapping):
            raise ValueError(f"is {type(config).__name__}; it must be an object")
        if config.get("model_type") == "deepseek_v41":
            raise ValueError(
                "model_type 'deepseek_v41' (DeepSeek-V4.1) is not supported: it has Engram tables, layers that share "
                "keys and a selection of candidates, which this decoder does not compute; load a DeepSeek-V4"
            )
        if config.get("model_type") != "deepseek_v4":
            raise ValueError(f"model_type {config.get('model_type')!r} is not deepseek_v4")
        for key, (neutral, why) in _ABSENT.items():
            if not any(config.get(key) is value or config.get(key) == value for value in neutral):
                raise ValueError(f"{key} is {short(config[key])}: {why}")
        fields = Fields(config, _DEFAULTS)
        layers = fields.integer("num_hidden_layers", high=4096)
        heads, head_dim = fields.integer("num_attention_heads", high=4096), fields.integer("head_dim", high=4096)
        groups = fields.integer("o_groups", high=4096)
        if heads % groups:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of o_groups {groups}")
        kinds, ratios = _attention(fields, layers)
        experts = fields.integer("n_routed_experts", high=65536)
        max_positions = fields.integer("max_position_embeddings", high=2**24)
        rope_dim, index_dim = _rope_dim(fields, head_dim), fields.integer("index_head_dim", high=4096)
        if CSA in kinds and rope_dim > index_dim:
            raise ValueError(f"index_head_dim is {index_dim}; it must hold the {rope_dim} rotary dimensions")
        vocabulary = fields.integer("vocab_size", high=2**24)
        main, compress = _ropes(fields, max_positions)
        return cls(
            vocab_size=vocabulary,
            hidden_size=fields.integer("hidden_size", high=2**18),
            layers=layers,
            kinds=kinds,
            ratios=ratios,
            hashed=_hashed(fields, layers),
            heads=heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            q_rank=fields.integer("q_lora_rank", high=2**18),
            out_groups=groups,
            out_rank=fields.integer("o_lora_rank", high=2**18),
            window=fields.integer("sliding_window", high=2**20),
            index_heads=fields.integer("index_n_heads", high=4096),
            index_dim=index_dim,
            index_top_k=fields.integer("index_topk", high=2**20),
            streams=fields.integer("hc_mult", high=64),
            sinkhorn=fields.integer("hc_sinkhorn_iters", high=1000),
            hyper_eps=number(fields.get("hc_eps"), "hc_eps", low=0.0, high=1.0),
            experts=experts,
            top_k=fields.integer("num_experts_per_tok", high=experts),
            expert_size=fields.integer("moe_intermediate_size", high=2**20),
            route_scale=number(fields.get("routed_scaling_factor"), "routed_scaling_factor", low=1e-6, high=1e6),
            limit=number(fields.get("swiglu_limit"), "swiglu_limit", low=1e-6, high=1e9),
            eps=number(fields.get("rms_norm_eps"), "rms_norm_eps", low=1e-12, high=1.0),
            max_positions=max_positions,
            main=main,
            compress=compress,
            drafts=_drafts(fields, layers),
            dspark=_dspark(fields, layers),
            eos=end_of_text(config.get("eos_token_id"), vocabulary),
            quantization=parse_quantization(config.get("quantization_config")),
        )

    def layer(self, i: int) -> Layer:
        """Block i of the decoder; from `layers` on, the blocks of the draft stages: window only, routed by scores."""
        if i >= self.layers:
            return Layer(f"mtp.{i - self.layers}.", i, SLIDING, 0, False)
        return Layer(f"layers.{i}.", i, self.kinds[i], self.ratios[i], self.hashed[i])

    @property
    def parts(self) -> Parts:
        """What the decoder is made of, by DeepSeek's names."""
        return decoder_parts(self)

    def family_name(self, name: str) -> str:
        return official(name)


def _attention(fields: Fields, layers: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Kind and ratio of each layer, from layer_types (transformers) or compress_ratios (DeepSeek)."""
    rates: dict[str, int] = {CSA: 4, HCA: 128}
    given = fields.get("compress_rates")
    if given is not None:
        if not isinstance(given, Mapping) or not set(given) <= set(rates):
            raise ValueError(f"compress_rates is {short(given)}; it must give a ratio for {CSA} and {HCA}")
        rates |= dict(given)
    for kind, rate in rates.items():
        if type(rate) is not int or not 1 <= rate <= 65536:
            raise ValueError(f"compress_rates of {kind} is {short(rate)}; it must be an integer from 1 to 65536")
    kinds, ratios = fields.get("layer_types"), fields.get("compress_ratios")
    if kinds is None and isinstance(ratios, list):
        if not all(type(ratio) is int and ratio in _RATIOS for ratio in ratios):
            raise ValueError(f"compress_ratios is {short(ratios)}; allowed are {', '.join(map(str, _RATIOS))}")
        kinds = [_RATIOS[ratio] for ratio in ratios]
    elif kinds is None:
        kinds = [HCA if i < 2 or i % 2 == 0 else CSA for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) < layers or not all(kind in (SLIDING, CSA, HCA) for kind in kinds):
        raise ValueError(f"layer_types is {short(kinds)}; it must list {layers} of {SLIDING}, {CSA} and {HCA}")
    kinds = tuple(kinds[:layers])  # what follows is the MTP layer's
    return kinds, tuple(rates.get(kind, 0) for kind in kinds)


def _drafts(fields: Fields, layers: int) -> int:
    """Draft stages: DSpark's checkpoints have three and say so in the tail of compress_ratios alone."""
    ratios = fields.get("compress_ratios")
    if isinstance(ratios, list) and len(ratios) > layers:
        return len(ratios) - layers
    return (
        0
        if fields.get("num_nextn_predict_layers") is None
        else fields.integer("num_nextn_predict_layers", low=0, high=64)
    )


def _dspark(fields: Fields, layers: int) -> DSpark | None:
    if fields.get("dspark_block_size") is None:
        return None
    taps = fields.get("dspark_target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(i) is int and 0 <= i < layers for i in taps):
        raise ValueError(f"dspark_target_layer_ids is {short(taps)}; it must list layers below {layers}")
    return DSpark(layers=tuple(taps), rank=fields.integer("dspark_markov_rank", high=2**16))


def _hashed(fields: Fields, layers: int) -> tuple[bool, ...]:
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        count = fields.integer("num_hash_layers", low=0, high=4096)
        return tuple(i < count for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) < layers or not all(kind in (HASH, TOP_K) for kind in kinds):
        raise ValueError(f"mlp_layer_types is {short(kinds)}; it must list {layers} of {HASH} and {TOP_K}")
    return tuple(kind == HASH for kind in kinds[:layers])


def _rope_dim(fields: Fields, head_dim: int) -> int:
    factor = fields.get("partial_rotary_factor")
    if factor is not None:
        dim = int(head_dim * number(factor, "partial_rotary_factor", low=0.0, high=1.0))
    elif fields.get("qk_rope_head_dim") is not None:
        dim = fields.integer("qk_rope_head_dim", high=head_dim)
    else:
        dim = head_dim // 8
    if dim < 2 or dim % 2:
        raise ValueError(f"{dim} rotary dimensions of {head_dim}; they come in pairs, at least one")
    return dim


def _ropes(fields: Fields, max_positions: int) -> tuple[Rope, Rope]:
    """Plain RoPE for layers without compression; the others have their own base, and YaRN without its magnitude."""
    given = fields.get("rope_parameters")
    given = fields.get("rope_scaling") if given is None else given
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters is {short(given)}; it must be an object")
    given = dict(given or {})
    main, compress = given.pop("main", None), given.pop("compress", None)
    if not isinstance(main, Mapping) or not isinstance(compress, Mapping):
        main = {"rope_type": "default", "rope_theta": fields.get("rope_theta")}
        compress = {**given, "rope_theta": fields.get("compress_rope_theta")}
        if (compress.get("rope_type") or compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)

    def rope(parameters: Mapping[str, Any]) -> Rope:
        plain = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
        return Rope.from_dict({"rope_parameters": plain}, default_theta=10000.0, max_positions=max_positions)

    return rope(main), rope(compress)
