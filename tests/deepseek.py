"""Tiny random DeepSeek-V4 models, made and answered by transformers."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

# Sixteen index heads: with few of them many entries score exactly 0 (ReLU), and which of equals is chosen is anyone's.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 4, 128, 4, 128],
    "num_hash_layers": 2,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "max_position_embeddings": 2048,
    "swiglu_limit": 1.5,
    "eos_token_id": None,
    "bos_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "flash": {"rope_scaling": _YARN},
    "pro": {
        "compress_ratios": None,  # transformers' default schedule: two HCA layers, then HCA and CSA in turn
        "num_hidden_layers": 4,
        "num_hash_layers": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        "hc_mult": 2,
        "hc_sinkhorn_iters": 5,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 6,
        "o_groups": 3,
    },
}


def hf_model(variant: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model in float32 in which every part matters: no norm, bias, sink or table is trivial."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    settings = {k: v for k, v in {**SIZES, **VARIANTS[variant], **changes}.items() if v is not None or "token" in k}
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**settings)).float().eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if name.endswith("tid2eid"):
                p.copy_(torch.rand(p.shape[0], model.config.n_routed_experts, generator=g).argsort(1)[:, : p.shape[1]])
            elif p.dim() == 1 and "norm" in name:
                p.copy_(1 + 0.3 * torch.randn(p.shape, generator=g))
            elif p.dim() == 1 or "position_bias" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.7)
            else:
                p.copy_(torch.randn(p.shape, generator=g) * (1.5 / p.shape[-1] ** 0.5))
    return model


def save_hf(variant: str, path: Path, **changes: Any) -> Any:
    model = hf_model(variant, **changes)
    model.save_pretrained(path)
    return model


def prompts() -> list[list[int]]:
    """Five texts of unequal lengths, short of and beyond a window, an HCA entry and a chunk."""
    g = torch.Generator().manual_seed(4)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=g).tolist() for n in (1, 40, 7, 133, 16)]


@cache
def _greedy() -> tuple[Any, list[list[int]]]:
    """transformers' "flash" variant, and what it has generated so far."""
    return hf_model("flash"), [[] for _ in prompts()]


def continuations(count: int) -> list[list[int]]:
    """Greedy continuations of `prompts` by transformers' "flash" variant, the whole text anew for each token."""
    hf, found = _greedy()
    for prompt, tokens in zip(prompts(), found, strict=True):
        while len(tokens) < count:
            with torch.no_grad():
                tokens.append(int(hf(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].argmax()))
    some = [tokens[:count] for tokens in found]
    assert len({tuple(tokens) for tokens in some}) == len(some), "the texts would not show a mix-up of rows"
    return some
