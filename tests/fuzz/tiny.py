"""A Llama of 2 layers with a byte-level tokenizer, as a directory and as a GGUF file: commands in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onegraph.formats.checkpoint import write_checkpoint

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, the rest move up from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


MERGES = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("i", "n"), ("Ġ", "a")]
TOKENS = [*SPECIAL, *byte_letters(), *("".join(pair) for pair in MERGES)]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float16",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tensors(seed: int = 0, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """Hugging Face names -> random weights of the scale that trained models have."""
    generator = torch.Generator().manual_seed(seed)
    d, f, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 2 * CONFIG["head_dim"]
    shapes = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    shapes |= {"self_attn.o_proj": (d, d), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    found = {
        "model.embed_tokens.weight": torch.randn(len(TOKENS), d, generator=generator) * 0.15
    }  # logits of 1 or so: draws differ
    for i in range(CONFIG["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = 1 + 0.1 * torch.randn(d, generator=generator)
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            found[f"model.layers.{i}.{name}.weight"] = weight
    found["model.norm.weight"] = torch.ones(d)
    return {name: value.to(dtype) for name, value in found.items()}


def tokenizer_json() -> dict[str, Any]:
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, token in enumerate(SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]},
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(TOKENS)}, "merges": MERGES},
    }


def write_model(path: Path, config: dict[str, Any] | None = None, seed: int = 0, shard_bytes: int = 1 << 30) -> Path:
    """The model as a directory. Returns `path`."""
    write_checkpoint(path, config or CONFIG, tensors(seed).items(), shard_bytes=shard_bytes)
    write_tokenizer(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": False}))
    return path


def write_tokenizer(path: Path) -> None:
    settings = {"eos_token": SPECIAL[2], "bos_token": SPECIAL[1], "chat_template": TEMPLATE}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path,
    kinds: tuple[str, ...] = ("F32", "F16", "BF16", "Q8_0", "Q4_1"),
    tied: bool = True,
    factors: np.ndarray | None = None,
    **keys: Any,
) -> Path:
    """The model as a GGUF file, matrices in `kinds` by turns; `keys` override metadata, with '__' for '.'. factors: of
    `rope_freqs.weight`."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    meta: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(TOKENS),
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    } | {key.replace("__", "."): value for key, value in keys.items()}
    for key, value in meta.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_array("tokenizer.ggml.merges", [" ".join(pair) for pair in MERGES])
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    count = 0
    weights = tensors()
    if not tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0)
    for name, tensor in weights.items():
        value = tensor.float().numpy()
        if name == "model.embed_tokens.weight":
            short = "token_embd.weight"
        elif name == "model.norm.weight":
            short = "output_norm.weight"
        elif name == "lm_head.weight":
            short = "output.weight"
        else:
            _, _, layer, module = name.removesuffix(".weight").split(".", 3)
            short = f"blk.{layer}.{names[module]}.weight"
            if module.endswith("q_proj"):
                value = permute(value, 4)
            elif module.endswith("k_proj"):
                value = permute(value, 2)
        kind = gguf.GGMLQuantizationType[kinds[count % len(kinds)] if value.ndim == 2 else "F32"]
        count += value.ndim == 2
        writer.add_tensor(short, gguf.quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
