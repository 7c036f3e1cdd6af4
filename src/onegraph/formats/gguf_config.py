"""The metadata of a GGUF file as a Hugging Face config: every key of the model is read, or an error names it.

Keys and their meaning: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's hyperparameters
(src/llama-model.cpp).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onegraph.formats.checkpoint import TensorInfo
from onegraph.formats.files import CheckpointError, quote

_READ = {  # key -> what a Hugging Face config calls it
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scale_linear": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_ABOUT = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}  # change no number
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys that are not supported, and the values with which they do nothing
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.layer_norm_epsilon": (0, np.float32(1e-5).item()),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}
_TOKENIZER = {  # under tokenizer.: read, or of no effect on byte-level BPE
    "chat_template", "ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges", "ggml.scores",
    "ggml.add_bos_token", "ggml.add_space_prefix", "ggml.remove_extra_whitespaces", "ggml.token_type_count",
    "huggingface.json",
}  # fmt: skip
_TOKENIZER_NEUTRAL: dict[str, tuple[Any, ...]] = {"ggml.add_eos_token": (False,), "ggml.add_sep_token": (False,)}
_TOKENIZER_FREE = re.compile(r"ggml\.[a-z_]+_token_ids?|chat_template\..*|chat_templates")
_ORIGINAL = tuple(1024 << i for i in range(8))  # context lengths that Llama 3's scaling may start from


class GGUFConfig(dict[str, Any]):
    """A Hugging Face config whose keys are named as the file has them in errors: `explain`."""

    def explain(self, message: object) -> str:
        """An error about this config in the words of the file."""
        names = {hf: f"llama.{key}" for key, hf in reversed(_READ.items())}
        text = str(message).replace("rope_scaling.", "").replace("rope_scaling", "llama.rope.scaling")
        return re.sub(r"\b[a-z_]+\b", lambda found: names.get(found[0], found[0]), text)


def read_config(
    path: Path, meta: Mapping[str, Any], tensors: Mapping[str, TensorInfo], factors: np.ndarray | None
) -> GGUFConfig:
    """Every key that changes the mathematics is read or refused. factors: of `rope_freqs.weight`."""
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{path}: architecture {quote(architecture)}, from GGUF only 'llama' is supported")
    if meta.get("llama.expert_count", 0):
        raise CheckpointError(f"{path}: llama.expert_count is set; mixtures of experts are not read from GGUF")
    _check_keys(path, meta)

    def get(key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
        value = meta.get(f"llama.{key}", default)
        if type(value) is not kind or not 0 < value < 2**31:  # also refuses NaN, bool and per-layer lists
            raise CheckpointError(f"{path}: llama.{key} is {quote(value)}, a positive {kind.__name__} is expected")
        # 1e-5 is stored as float32: its shortest decimal form is the number that was meant
        return float(str(np.float32(value))) if kind is float else value

    hidden, heads = get("embedding_length", int), get("attention.head_count", int)
    if hidden % heads and "llama.attention.key_length" not in meta:
        raise CheckpointError(f"{path}: llama.attention.head_count {heads} does not divide the embedding's {hidden}")
    head_dim = get("attention.key_length", int, hidden // heads or 1)
    if get("attention.value_length", int, head_dim) != head_dim or head_dim % 2:
        raise CheckpointError(f"{path}: key and value heads of unequal or odd length are not supported")
    if get("rope.dimension_count", int, head_dim) != head_dim:
        raise CheckpointError(f"{path}: partial rotary embedding (llama.rope.dimension_count) is not supported")
    scale = meta.get("llama.attention.scale", 0)
    if not isinstance(scale, int | float) or (scale != 0 and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6)):
        raise CheckpointError(f"{path}: llama.attention.scale is {quote(scale)}; supported is 1/sqrt({head_dim})")
    kv_heads = get("attention.head_count_kv", int, heads)
    for layer, module, n in ((i, m, n) for m, n in (("q", heads), ("k", kv_heads)) for i in range(2)):
        name = f"model.layers.{layer}.self_attn.{module}_proj.weight"
        if name in tensors and tensors[name].shape != (n * head_dim, hidden):
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensors[name].shape)}, the metadata needs {[n * head_dim, hidden]}"
            )
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: token_embd.weight is missing or not a matrix")
    config = GGUFConfig(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        dtype="float16",
        hidden_act="silu",
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length", int),
        num_hidden_layers=get("block_count", int),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position_embeddings=get("context_length", int),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon", float),
        rope_theta=get("rope.freq_base", float, 10000.0),
        attention_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in tensors,
        tie_word_embeddings="lm_head.weight" not in tensors,
    )
    scaling = _scaling(path, meta, get, config["max_position_embeddings"])
    if factors is not None and not np.all(factors == 1):
        if scaling is not None:
            raise CheckpointError(
                f"{path}: has rope_freqs.weight and llama.rope.scaling.type {scaling['rope_type']!r}; one is supported"
            )
        scaling = _llama3(path, factors, config["rope_theta"], head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        index = token_id(path, meta, key)
        if index is not None:
            config[f"{role}_token_id"] = index
    return config


def _check_keys(path: Path, meta: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a key of the model or its tokenizer that is not known, or needs what is not
    supported. Other keys (general., quantize., those of who made the file) describe it."""
    for name, value in meta.items():
        room, _, key = name.partition(".")
        neutral = {"llama": _NEUTRAL, "tokenizer": _TOKENIZER_NEUTRAL}.get(room, {}).get(key)
        if neutral is not None:
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
                raise CheckpointError(
                    f"{path}: {name} is {quote(value)}, which is not supported; use the model's safetensors directory"
                )
        elif room == "llama":
            known = key in _READ or key in _ABOUT or key == "attention.scale"
            if not known:
                raise CheckpointError(
                    f"{path}: has the key {quote(name)}, which is not known here and may change what the model "
                    "computes; use the model's safetensors directory"
                )
        elif room == "tokenizer" and key not in _TOKENIZER and not _TOKENIZER_FREE.fullmatch(key):
            raise CheckpointError(
                f"{path}: has the key {quote(name)}, which is not known here and may change the tokens; use the "
                "model's safetensors directory"
            )


def _scaling(path: Path, meta: Mapping[str, Any], get: Any, positions: int) -> dict[str, Any] | None:
    """rope_scaling of the keys llama.rope.scaling.*; without a type a factor is linear, as in llama.cpp."""
    keys = [key for key in ("rope.scaling.factor", "rope.scale_linear") if f"llama.{key}" in meta]
    factor = get(keys[0], float) if keys and meta[f"llama.{keys[0]}"] != 0 else 1.0
    kind = meta.get("llama.rope.scaling.type", "linear")
    attention = [key for key in ("attn_factor", "yarn_attn_factor") if f"llama.rope.scaling.{key}" in meta]
    scale = math.prod(get(f"rope.scaling.{key}", float) for key in attention)
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{path}: llama.rope.scaling.type is {quote(kind)}; supported are none, linear and yarn: use the model's "
            "safetensors directory"
        )
    if kind != "yarn" and scale != 1:
        raise CheckpointError(f"{path}: llama.rope.scaling.{attention[0]} is {scale:g}; it is supported with yarn only")
    if kind == "none" or (factor == 1 and kind == "linear"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": get("rope.scaling.original_context_length", int, positions),
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if f"llama.rope.scaling.{key}" in meta:
            found[name] = get(f"rope.scaling.{key}", float)
    if scale != 1:  # llama.cpp multiplies it into YaRN's own
        found["attention_factor"] = scale * (1 + 0.1 * math.log(factor))
    return found


def _llama3(path: Path, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """rope_scaling of type llama3 that gives these factors. The tensor's are computed from four numbers, of which
    config.json has the names; published models have low_freq_factor 1 and high_freq_factor 4."""
    low, high = 1.0, 4.0
    factor = float(factors.max())
    if len(factors) == head_dim // 2 and np.isfinite(factors).all() and 1 < factor < 1e6:
        wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        for original in _ORIGINAL:
            smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
            if np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise CheckpointError(
        f"{path}: rope_freqs.weight is not the scaling of Llama 3.1, which is what is supported; use the model's "
        "safetensors directory"
    )


def token_id(path: Path, meta: Mapping[str, Any], role: str) -> int | None:
    value, tokens = meta.get(f"tokenizer.ggml.{role}_token_id"), meta.get("tokenizer.ggml.tokens", [])
    if value is None or value == 2**32 - 1:  # llama.cpp's "none"
        return None
    if type(value) is not int or not 0 <= value < len(tokens):
        raise CheckpointError(f"{path}: {role} token id is {quote(value)}, the vocabulary has {len(tokens)} tokens")
    return value
