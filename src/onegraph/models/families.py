"""What sets the families of the one decoder apart, beyond the numbers in their config.json: one record each.

Meaning and defaults of the fields are transformers' own (5.17), which is the oracle of the tests.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from onegraph.models import heads, keys, mixers, windows
from onegraph.models.fields import Fields
from onegraph.models.heads import Heads
from onegraph.models.mixers import Mixers

Says = bool | str  # whether something is there, or the key of config.json that says so


class Norms(NamedTuple):
    """RMSNorms of a block by name: in front of attention and behind it, in front of the MLP and behind it; None: none.
    What is behind a sublayer norms its result before that joins the residual stream."""

    attention_in: str | None
    attention_out: str | None
    mlp_in: str | None
    mlp_out: str | None


BEFORE = Norms("input_layernorm", None, "post_attention_layernorm", None)
BOTH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
_LFM2_NORMS = Norms("operator_norm", None, "ffn_norm", None)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


class Names(NamedTuple):
    """How files call the rest of a block, and the final norm: queries, keys and values, or one linear of all three; the
    linear behind attention; norms of each head of queries and of keys; the MLP's gate and up, or one linear of both,
    and down."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    head_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    norm: str = "model.norm"


USUAL = Names()
_LFM2 = Names(
    out="self_attn.out_proj",
    head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    norm="model.embedding_norm",
)


_JOINED = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_SHARED_MLP = Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_NEMOTRON = Names(
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
)


class DraftNames(NamedTuple):
    """How files call the layer that only predicts further tokens (`models/mtp.py`).

    Args:
        key: of config.json, which counts such layers.
        root: what all its names begin with; {} is how many layers the decoder has. block: what then those of its block
            do, {} its number. projection: the linear in front of it. norms: of embeddings, of hidden states, and behind
            the block, {} the number of the last.
        copies: what files hold there once more and is the decoder's.
        kinds: key of config.json that lists its blocks, where a block is half a layer.
    """

    key: str
    root: str
    block: str
    projection: str
    norms: tuple[str, str, str]
    copies: tuple[str, ...] = ()
    kinds: str = ""


_MTP = DraftNames(
    "mtp_num_hidden_layers", "mtp.", "layers.0.", "fc", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
)  # fmt: skip
_NEXTN = DraftNames(
    "num_nextn_predict_layers", "model.layers.{}.", "", "eh_proj", ("enorm", "hnorm", "shared_head.norm"),
    ("embed_tokens", "shared_head.head"),
)  # fmt: skip
_HALVES = DraftNames(
    "num_nextn_predict_layers", "mtp.", "layers.{}.", "layers.0.eh_proj",
    ("layers.0.enorm", "layers.0.hnorm", "layers.{}.final_layernorm"), kinds="mtp_layers_block_type",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """A family, as the parts of its decoder are chosen by.

    Args:
        defaults: transformers' class defaults, for keys that a config.json leaves out. num_key_value_heads None: as
            many as attention heads.
        windows: (fields, layers) -> how many latest keys each layer sees, 0 for all; reads whatever keys say it.
        qkv_bias, out_bias, mlp_bias: biases of linears.
        norms: of a block; mixer_norms: of one with a recurrent layer, where they are others. norm_offset: files hold
            their weights less 1, q_norm's and k_norm's too.
        head_norm: RMSNorm of each head of q and k; whole_norm: of all heads of q together, and of k.
        sinks: each head has one more logit.
        gelu: the MLP's gate is GeLU by tanh, not SiLU. relu2: it has none, and the square of relu.
        single: a block is an MLP (`mixers.NoMixer`), or attention or a recurrent layer without one.
        rope_kinds: types of RoPE that mean for this family what their names say; None: all that are known.
        partial: the part of a head that rotates unless the config says; None: the whole, whatever happens.
        rope: whether attention rotates: always, never, or unless rope_theta is null in the config. rotates: (fields,
            layers) -> which layers do, None where all do or none.
        two_ropes: layers with a window have a RoPE of their own. query_scaling, mrope: see `Rope`.
        latent: attention is `models.latent.Latent`.
        fixed: keys with the values that they may have. idle: keys that change nothing here.
        scaled_embedding: rows of the embedding are multiplied by the root of the hidden size, rounded to the dtype.
        query_scalar: query_pre_attn_scalar to the power of -1/2 scales attention scores, not head_dim.
        softcaps: scores and logits may be bounded. multipliers: those of Granite.
        names: how files call what `norms` does not. eps: the key of the norms' epsilon. inner: of the MLP's hidden
            units.
        mixers: (fields, layers) -> what stands in attention's place in each layer (`models/mixers.py`).
        heads: (fields, layers) -> the attention of each layer (`models/heads.py`), None where all are alike.
        value_norm: RMSNorm without weights of each head of values. score_scale: of attention scores, in place of
            head_dim to the power of -1/2. layer_scale: a number scales the stream behind each block. per_layer: blocks
            end with an embedding of the token of their own (`nn.per_layer`).
        output_gate: rows of a gate lie behind each head's rows of queries; its sigmoid scales what the head gives.
        draft: the layer that only predicts further tokens.
        keys: config.json -> the same under the keys that are read here, where files spell them otherwise
            (`models/keys.py`). renames: patterns of what files' names have in place of ours, and ours.
    """

    defaults: Mapping[str, Any]
    windows: Callable[[Fields, int], tuple[int, ...]] = windows.none
    qkv_bias: Says = False
    out_bias: Says = False
    mlp_bias: Says = False
    norms: Norms = BEFORE
    mixer_norms: Norms | None = None
    norm_offset: bool = False
    head_norm: Says = False
    whole_norm: bool = False
    sinks: bool = False
    gelu: bool = False
    relu2: bool = False
    single: bool = False
    rope_kinds: tuple[str, ...] | None = None
    partial: float | None = None
    rope: Literal["always", "never", "given"] = "always"
    rotates: Callable[[Fields, int], tuple[bool, ...]] | None = None
    two_ropes: bool = False
    query_scaling: bool = False
    mrope: bool = False
    latent: bool = False
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    scaled_embedding: bool = False
    query_scalar: bool = False
    softcaps: bool = False
    multipliers: bool = False
    names: Names = USUAL
    eps: str = "rms_norm_eps"
    inner: str = "intermediate_size"
    mixers: Callable[[Fields, int], Mixers] = mixers.none
    heads: Callable[[Fields, int], tuple[Heads, ...] | None] = heads.alike
    value_norm: bool = False
    score_scale: float | None = None
    layer_scale: bool = False
    per_layer: bool = False
    output_gate: bool = False
    draft: DraftNames | None = None
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = keys.usual
    renames: tuple[tuple[str, str], ...] = ()

    def own_name(self, name: str) -> str:
        """The name here of a tensor or layer of a file."""
        for pattern, own in self.renames:
            name = re.sub(pattern, own, name)
        return name


_GEMMA: dict[str, Any] = {
    "norms": BOTH, "norm_offset": True, "gelu": True, "scaled_embedding": True, "query_scalar": True, "softcaps": True,
    "qkv_bias": "attention_bias", "out_bias": "attention_bias",
}  # fmt: skip
_GEMMA_SIZES: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
_GATED_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "head_dim": 256, "max_position_embeddings": 32768,
}  # fmt: skip
_QWEN_EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2, "intermediate_size": 5632, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
_QWEN_HYBRID: dict[str, Any] = {
    "windows": windows.beside_mixers, "norm_offset": True, "head_norm": True, "partial": 0.25, "output_gate": True,
    "mrope": True, "draft": _MTP, "qkv_bias": "attention_bias", "out_bias": "attention_bias",
    "fixed": {
        "attn_output_gate": (True,), "mtp_use_dedicated_embeddings": (False,), "mamba_ssm_dtype": ("float32",),
        "output_gate_type": ("silu", "swish"),
    },
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "latent": True,
    "draft": _NEXTN,
    "fixed": {
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
        "moe_layer_freq": (1,),
        "moe_router_dtype": ("float32",),
    },
    "idle": ("ep_size", "seq_aux", "aux_loss_alpha", "index_share_for_mtp_iteration"),
}
_DEEPSEEK_V3: dict[str, Any] = {
    "num_key_value_heads": None, "max_position_embeddings": 4096, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_INDEX: dict[str, Any] = {
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64, "indexer_rope_interleave": False,
    "mlp_layer_types": None,
}  # fmt: skip
_QWEN2_VL: dict[str, Any] = {
    "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "sliding_window": 4096, "max_window_layers": 80,
}  # fmt: skip
_GRANITE_MOE: dict[str, Any] = {
    "num_key_value_heads": None, "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_GRANITE_STACKS = tuple(
    (rf"\.block_sparse_moe\.{stored}$", f".block_sparse_moe.{own}")
    for stored, own in (
        (r"input_linear\.weight", "experts.gate_up_proj"), (r"output_linear\.weight", "experts.down_proj"),
        (r"router\.layer(\.weight)?", r"router\1"),
    )
)  # fmt: skip
_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_EXAONE: dict[str, Any] = {
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096,
    "sliding_window_pattern": 4,
}  # fmt: skip

# Known, and refused: the model_type and the part that is not built.
MISSING = {
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), "block-sparse attention with an index branch"),
    **dict.fromkeys(
        ("glm5_next", "glm5_next_text"), "linear attention and hyper-connections beside a sparse indexer"
    ),
    "kimi_k3": "Kimi Delta Attention, latent experts and residuals by attention",
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"), "query-selected sparse attention, hyper-connections and an n-gram embedding"
    ),
    "mamba2": "Mamba-2 layers",
    **dict.fromkeys(("bamba", "falcon_h1"), "Mamba-2 layers beside attention"),
    **dict.fromkeys(("llama4", "llama4_text"), "attention in chunks, and a temperature by position"),
    "gemma3n_text": "per-layer embeddings and alternating updates (AltUp)",
    "cohere2": "blocks whose attention and MLP run side by side",
}  # fmt: skip

FAMILIES: dict[str, ArchSpec] = {
    "llama": ArchSpec(
        defaults={"num_key_value_heads": None, "max_position_embeddings": 2048}, mlp_bias="mlp_bias", **_BIASED
    ),
    "mistral": ArchSpec(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        windows=windows.uniform,
    ),
    "qwen2": ArchSpec(
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
        windows=windows.upper,
        qkv_bias=True,
    ),
    "qwen3": ArchSpec(
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128,
        },
        windows=windows.upper,
        head_norm=True,
        **_BIASED,
    ),
    "smollm3": ArchSpec(
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2e6,
        },
        windows=windows.unrotated,
        rotates=windows.rotated,
        mlp_bias="mlp_bias",
        **_BIASED,
    ),
    "mixtral": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_experts_per_tok": 2,
        },
        windows=windows.uniform,
    ),
    "qwen3_moe": ArchSpec(
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096,
            "moe_intermediate_size": 768, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        },
        windows=windows.uniform_if_used,
        head_norm=True,
        **_BIASED,
    ),
    "gpt_oss": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4,
            "swiglu_limit": 7.0, "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        windows=windows.every_other,
        sinks=True,
        **_BIASED,
    ),
    "gemma2": ArchSpec(
        defaults=_GEMMA_SIZES | {
            "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        windows=windows.every_other,
        **_GEMMA,
    ),
    "gemma3_text": ArchSpec(
        defaults=_GEMMA_SIZES | {
            "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
        windows=windows.five_of_six,
        head_norm=True,
        two_ropes=True,
        **_GEMMA,
    ),
    "gemma4_text": ArchSpec(
        defaults={
            "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
            "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 512, "rope_theta": 1e4,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
        windows=windows.gemma4,
        norms=BOTH,
        gelu=True,
        scaled_embedding=True,
        softcaps=True,
        head_norm=True,
        two_ropes=True,
        heads=heads.gemma4,
        value_norm=True,
        score_scale=1.0,
        layer_scale=True,
        per_layer=True,
        fixed={"use_bidirectional_attention": ("vision",)},  # images alone attend in both directions
        **_BIASED,
    ),
    "glm4_moe": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "norm_topk_prob": True, "num_nextn_predict_layers": 1,
        },
        qkv_bias="attention_bias",
        head_norm="use_qk_norm",
        partial=0.5,
        draft=_NEXTN,
    ),
    "qwen2_moe": ArchSpec(
        defaults={
            "num_key_value_heads": 16, "max_position_embeddings": 32768, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
            "decoder_sparse_step": 1, "qkv_bias": True,
        },
        windows=windows.off,
        qkv_bias="qkv_bias",
    ),
    "olmoe": ArchSpec(
        defaults={
            "num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8, "num_experts": 64,
        },
        whole_norm=True,
        **_BIASED,
    ),
    "olmo2": ArchSpec(
        defaults={"num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        norms=AFTER,
        whole_norm=True,
        **_BIASED,
    ),
    "phi3": ArchSpec(
        defaults={"num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windows=windows.uniform,
        names=_JOINED,
        rope_kinds=("default",),  # transformers takes its "yarn" for longrope
        partial=1.0,
    ),
    "granite": ArchSpec(
        defaults={"num_key_value_heads": None, "max_position_embeddings": 2048},
        mlp_bias="mlp_bias",
        multipliers=True,
        **_BIASED,
    ),
    "granitemoe": ArchSpec(defaults=_GRANITE_MOE, multipliers=True, renames=_GRANITE_STACKS, **_BIASED),
    "granitemoeshared": ArchSpec(
        defaults=_GRANITE_MOE | {"shared_intermediate_size": 0},
        multipliers=True,
        renames=_GRANITE_STACKS,
        **_BIASED,
    ),
    "granitemoehybrid": ArchSpec(
        defaults=_GRANITE_MOE | {
            "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
            "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
            "time_step_limit": [0.0, math.inf],
        },
        windows=windows.beside_mixers,
        multipliers=True,
        rotates=windows.chosen,
        names=_SHARED_MLP,
        inner="shared_intermediate_size",
        mixers=mixers.mamba,
        keys=keys.granite_hybrid,
        fixed={
            "mamba_n_groups": (1,),  # transformers norms the results of all heads together
            "normalization_function": ("rmsnorm",),
        },
        idle=("mamba_chunk_size", "init_method"),
        renames=_GRANITE_STACKS,
        **_BIASED,
    ),
    "qwen3_5_text": ArchSpec(
        defaults=_GATED_DELTA | {"num_key_value_heads": 4}, mixers=mixers.gated_delta, **_QWEN_HYBRID
    ),
    "qwen3_5_moe_text": ArchSpec(
        defaults=_GATED_DELTA | _QWEN_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        mixers=mixers.gated_delta,
        **_QWEN_HYBRID,
    ),
    "qwen3_next": ArchSpec(
        defaults=_GATED_DELTA | _QWEN_EXPERTS | {
            "num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1, "norm_topk_prob": True,
        },
        mixers=mixers.grouped_gated_delta,
        **_QWEN_HYBRID,
    ),
    "lfm2": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1e6,
            "tie_word_embeddings": True, "conv_L_cache": 3,
        },
        windows=windows.beside_mixers,
        norms=_LFM2_NORMS,
        head_norm=True,
        names=_LFM2,
        eps="norm_eps",
        mixers=mixers.short_conv,
        fixed={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
        idle=(
            "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
            "conv_use_xavier_init",
        ),
    ),
    "lfm2_moe": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1e6,
            "tie_word_embeddings": True, "conv_L_cache": 3, "moe_intermediate_size": 1792, "num_experts": 32,
            "num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        },
        windows=windows.beside_mixers,
        norms=_LFM2_NORMS,
        head_norm=True,
        names=_LFM2,
        eps="norm_eps",
        mixers=mixers.short_conv,
        fixed={"use_expert_bias": (True,)},
    ),
    "olmo_hybrid": ArchSpec(
        defaults={
            "num_key_value_heads": None, "max_position_embeddings": 65536, "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        windows=windows.beside_mixers,
        norms=AFTER,
        mixer_norms=BEFORE,
        whole_norm=True,
        rope="given",
        mixers=mixers.apart_delta,
        keys=keys.olmo_hybrid,
        idle=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
        renames=(
            (r"\.attention_layer_norm\.", ".input_layernorm."),
            (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
        ),
        **_BIASED,
    ),
    "ministral3": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
        windows=windows.uniform,
        query_scaling=True,
    ),
    "olmo3": ArchSpec(
        defaults={
            "num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
            "sliding_window": 4096,
        },
        windows=windows.three_of_four,
        norms=AFTER,
        whole_norm=True,
        two_ropes=True,
        **_BIASED,
    ),
    "minimax_m2": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6,
            "num_local_experts": 256, "num_experts_per_tok": 8,
        },
        whole_norm=True,
        partial=1.0,
        fixed={
            "scoring_func": ("sigmoid",), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,), "shared_intermediate_size": (0,), "attn_type_list": (1,),
            "layernorm_full_attention_beta": (1,), "layernorm_linear_attention_beta": (1,), "layernorm_mlp_beta": (1,),
        },
        idle=("mlp_intermediate_size", "shared_moe_mode", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ),
    "deepseek_v3": ArchSpec(defaults=_DEEPSEEK_V3, **_LATENT),
    "kimi_k2": ArchSpec(defaults=_DEEPSEEK_V3, **_LATENT),
    "deepseek_v32": ArchSpec(
        defaults=_DEEPSEEK_V3 | _INDEX | {"max_position_embeddings": 163840}, windows=windows.indexed, **_LATENT
    ),
    "glm_moe_dsa": ArchSpec(
        defaults=_DEEPSEEK_V3 | _INDEX | {
            "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
            "v_head_dim": 256, "n_group": 1, "topk_group": 1, "index_n_heads": 32, "indexer_rope_interleave": True,
            "indexer_types": None,
        },
        windows=windows.indexed,
        **_LATENT,
    ),
    "mistral4": ArchSpec(
        defaults=_DEEPSEEK_V3 | {
            "max_position_embeddings": 1048576, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64,
            "num_experts_per_tok": 4, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
        latent=True,
        query_scaling=True,
        fixed={"n_group": (1,), "topk_group": (1,), "routed_scaling_factor": (1,)},
    ),
    "kimi_linear": ArchSpec(
        defaults=_DEEPSEEK_V3 | {
            "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "q_lora_rank": None, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 2.446, "moe_intermediate_size": 1024, "mlp_layer_types": None,
            "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "num_nextn_predict_layers": 0,
            "n_routed_experts": None, "num_experts": 256, "first_k_dense_replace": 1,
        },
        windows=windows.beside_mixers,
        latent=True,
        rope="never",
        mixers=mixers.kimi_delta,
        keys=keys.kimi_linear,
        fixed={
            "moe_router_activation_func": ("sigmoid",), "moe_layer_freq": (1,), "mla_use_nope": (True,),
            "use_grouped_topk": (True,),
        },
        renames=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.self_attn\.(f_[ab]_proj|dt_bias|A_log)\b", r".self_attn.forget_gate.\1"),
        ),
    ),
    "nemotron_h": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5,
            "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
            "time_step_limit": [0.0, math.inf], "use_conv_bias": True, "n_routed_experts": 8, "norm_topk_prob": True,
            "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
            "mtp_layers_block_type": ["full_attention", "moe"],
        },
        windows=windows.beside_mixers,
        norms=Norms("norm", None, None, None),
        relu2=True,
        single=True,
        rope="never",
        draft=_HALVES,
        names=_NEMOTRON,
        eps="layer_norm_epsilon",
        mixers=mixers.single,
        keys=keys.nemotron_h,
        fixed={
            "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "mamba_ssm_cache_dtype": ("float32",),
            "residual_in_fp32": (False,), "mlp_bias": (False,), "mamba_proj_bias": (False,),
        },
        idle=(
            "chunk_size", "expand", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual",
            "num_logits_to_keep", "use_mamba_kernels", "moe_shared_expert_overlap", "n_shared_experts", "norm_eps",
        ),
        renames=(
            (r"^backbone\.", "model."),
            (r"^model\.embeddings\b", "model.embed_tokens"),
            (r"^model\.norm_f\b", "model.norm"),
        ),
        **_BIASED,
    ),
    "glm4_moe_lite": ArchSpec(
        defaults=_DEEPSEEK_V3 | {
            "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192,
            "v_head_dim": 256, "moe_intermediate_size": 1536, "num_experts_per_tok": 4, "n_routed_experts": 64,
            "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "mlp_layer_types": None,
        },
        **_LATENT,
    ),
    "deepseek_v2": ArchSpec(
        defaults=_DEEPSEEK_V3 | {
            "max_position_embeddings": 2048, "moe_intermediate_size": 1407, "n_shared_experts": 2,
            "n_routed_experts": 64, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "norm_topk_prob": False,
            "num_nextn_predict_layers": 0,
        },
        latent=True,
        # Others multiply the weights that they chose in groups by a factor.
        fixed={
            "topk_method": ("greedy",), "scoring_func": ("softmax",), "routed_scaling_factor": (1,),
            "norm_topk_prob": (False,), "moe_layer_freq": (1,), "num_nextn_predict_layers": (0,),
        },
        idle=("n_group", "topk_group", "ep_size", "seq_aux", "aux_loss_alpha"),
    ),
    "youtu": ArchSpec(
        defaults={
            "num_key_value_heads": 16, "max_position_embeddings": 131072, "kv_lora_rank": 512, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True,
            "tie_word_embeddings": True,
        },
        latent=True,
    ),
    "dots1": ArchSpec(
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096, "max_window_layers": 62,
            "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "norm_topk_prob": False,
        },
        windows=windows.above,
        head_norm=True,
        fixed={"scoring_func": ("noaux_tc", "sigmoid"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
        **_BIASED,
    ),
    "solar_open": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "moe_intermediate_size": 1280, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": True,
        },
        qkv_bias="attention_bias",
        partial=1.0,
    ),
    "hy_v3": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
            "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "first_k_dense_replace": 1,
            "mlp_layer_types": None, "num_nextn_predict_layers": 0,
        },
        head_norm=True,
        mlp_bias="mlp_bias",
        keys=keys.hy_v3,
        fixed={
            "qk_norm": (True,), "route_norm": (True,), "moe_router_use_sigmoid": (True,),
            "moe_router_enable_expert_bias": (True,),
        },
        idle=("enable_moe_fp32_combine",),
        renames=(
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.expert_bias\b", ".mlp.e_score_correction_bias"),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
        ),
        **_BIASED,
    ),
    "exaone4": ArchSpec(
        defaults=_EXAONE, windows=windows.exaone, rotates=windows.in_windows, norms=AFTER, head_norm=True
    ),
    "exaone_moe": ArchSpec(
        defaults=_EXAONE | {
            "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "mlp_layer_types": None, "num_nextn_predict_layers": 0,
        },
        windows=windows.exaone,
        rotates=windows.in_windows,
        head_norm=True,
        fixed={"scoring_func": ("sigmoid",)},
    ),
    "seed_oss": ArchSpec(
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
        },
        qkv_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "arcee": ArchSpec(
        defaults={"num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        relu2=True,
        names=Names(gate_up=("mlp.up_proj",)),
        mlp_bias="mlp_bias",
        **_BIASED,
    ),
    "qwen2_vl_text": ArchSpec(defaults=_QWEN2_VL, windows=windows.upper, qkv_bias=True, mrope=True),
    "qwen2_5_vl_text": ArchSpec(defaults=_QWEN2_VL, windows=windows.upper, qkv_bias=True, mrope=True),
    "qwen3_vl_moe_text": ArchSpec(
        defaults={
            "num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 5e5,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
        },
        head_norm=True,
        mrope=True,
        fixed={"norm_topk_prob": (True,)},
        **_BIASED,
    ),
    "qwen3_vl_text": ArchSpec(
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 128000, "head_dim": 128, "rope_theta": 5e5,
        },
        head_norm=True,
        mrope=True,
        **_BIASED,
    ),
}  # fmt: skip
