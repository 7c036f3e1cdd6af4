"""DeepSeek-V4 as it is published: the configs, and tiny directories in exactly those layouts.

The configs are written from the published ones; the writer and the numbers that its codes stand for use nothing of ours
but the table of names (`models/deepseek_v4_published.py`), whose counts and bytes are held to the published indexes.
"""

import functools
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from onegraph.models.deepseek_v4_published import published

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "expert_dtype": "fp4",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "quantization_config": FP8,
}
PRO = FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}


def dspark(config: Mapping[str, Any], taps: list[int], rank: int) -> dict[str, Any]:
    """The form of 0731 and 0813: three stages, while num_nextn_predict_layers stays 1."""
    return dict(config) | {
        "compress_ratios": [*config["compress_ratios"], 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": config["vocab_size"] - 481 if config["vocab_size"] > 481 else 1,
        "dspark_target_layer_ids": taps,
        "dspark_markov_rank": rank,
    }


def nvidia(config: Mapping[str, Any]) -> dict[str, Any]:
    """NVIDIA's NVFP4 form: DeepSeek's config, and what was exchanged."""
    layers = config["num_hidden_layers"]
    changed = {f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(layers)}
    floats = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return dict(config) | {
        "quantization_config": dict(config["quantization_config"])
        | {
            "moe_quant_algo": "NVFP4",
            "quant_algo": "MIXED_PRECISION",
            "group_size": 16,
            "kv_cache_quant_algo": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": floats, "input_activations": floats}},
            "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
            "quantized_layers": changed,
            "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
        }
    }


FLASH_0731, PRO_0813 = dspark(FLASH, [40, 41, 42], 256), dspark(PRO, [58, 59, 60], 512)

# Tiny: every FP8 matrix is made of whole blocks, as the published ones and as transformers asks.
TINY: dict[str, Any] = FLASH | {
    "vocab_size": 97,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "moe_intermediate_size": 128,
    "swiglu_limit": 1.5,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 8,
    "max_position_embeddings": 2048,
    "rope_scaling": FLASH["rope_scaling"] | {"factor": 4, "original_max_position_embeddings": 256},
    "compress_ratios": [0, 4, 128, 4, 0],
    "hc_sinkhorn_iters": 4,
    "eos_token_id": None,
    "bos_token_id": None,
}
TINY_LESS = TINY | {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}  # every kind of layer once
TINY_BASE = TINY | {"expert_dtype": "fp8"}
TINY_DSPARK = dspark(TINY, [1, 2, 3], 16)

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _fp8(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Codes and one exponent for 128 x 128, and the numbers that they stand for."""
    n, k = w.shape
    rows, columns = -(-n // 128), -(-k // 128)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[:n, :k] = w
    blocks = padded.view(rows, 128, columns, 128)
    exponent = (blocks.abs().amax((1, 3)) / 448).clamp(min=2**-100).log2().ceil()
    factor = torch.exp2(exponent).repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    codes = (w / factor).to(torch.float8_e4m3fn)
    return {"weight": codes, "scale": _e8m0(exponent)}, codes.float() * factor


def _mxfp4(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = w.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(2) / 6).clamp(min=2**-100).log2().ceil()
    factor = torch.exp2(exponent).unsqueeze(2)
    packed, values = _four_bits(groups / factor)
    return {"weight": packed.view(torch.int8), "scale": _e8m0(exponent)}, (values * factor).flatten(1)


def _nvfp4(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = w.unflatten(1, (-1, 16))
    whole = w.abs().amax() / (6 * 448)
    scale = (groups.abs().amax(2) / 6 / whole).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    factor = scale.float().unsqueeze(2) * whole
    packed, values = _four_bits(groups / factor)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole.reshape(())}
    return tensors | {"input_scale": torch.tensor(0.02)}, (values * factor).flatten(1)


def _four_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, two in a byte, the even column low; and their values."""
    middle = (_E2M1[1:8] + _E2M1[:7]) / 2
    codes = torch.bucketize(x.abs(), middle) + 8 * (x < 0)
    flat = codes.flatten(1)
    return (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8), _E2M1[codes]


def _e8m0(exponent: Tensor) -> Tensor:
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def make(config: Mapping[str, Any], seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random tensors of a checkpoint in which every part matters, and all of them dense: what they stand for. A layer's
    numbers depend on its name alone, but for their rounding. Nobody writes to the tensors: others have them too."""
    tensors, dense = _made(json.dumps(dict(config)), seed)
    return dict(tensors), dict(dense)


@functools.lru_cache(maxsize=4)
def _made(text: str, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    config: dict[str, Any] = json.loads(text)
    table, tensors, dense = published(config), {}, {}
    for name, (dtype, shape) in table.items():
        if name in tensors:
            continue
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        layer, _, kind = name.rpartition(".")
        if kind == "tid2eid":
            order = torch.rand(shape[0], config["n_routed_experts"], generator=g).argsort(1)
            made, whole = {name: order[:, : shape[1]].contiguous()}, order[:, : shape[1]].contiguous()
        elif dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
            k = shape[1] * (1 if dtype == torch.float8_e4m3fn else 2)
            pack = {torch.float8_e4m3fn: _fp8, torch.int8: _mxfp4, torch.uint8: _nvfp4}[dtype]
            found, whole = pack(torch.randn(shape[0], k, generator=g) * 1.5 / k**0.5)
            made = {f"{layer}.{suffix}": tensor for suffix, tensor in found.items()}
            if (scale := table.get(f"{layer}.scale")) is not None and scale[0] == torch.float32:
                made[f"{layer}.scale"] = made[f"{layer}.scale"].float()
        else:
            if "norm" in name and len(shape) == 1:
                whole = 1 + 0.3 * torch.randn(shape, generator=g)
            elif len(shape) == 1 or kind == "ape":
                whole = torch.randn(shape, generator=g) * 0.7
            else:
                whole = torch.randn(shape, generator=g) * 1.5 / shape[-1] ** 0.5
            made = {name: whole.to(dtype)}
            whole = made[name].float()
        tensors |= made
        dense[name] = whole
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == table
    return tensors, dense


def shard_of(name: str, layers: int) -> int:
    """As in Flash-0731: the embedding, a shard for each layer, the ends, a shard for each draft stage."""
    if found := re.match(r"(layers|mtp)\.(\d+)\.", name):
        return int(found[2]) + (1 if found[1] == "layers" else layers + 2)
    return 0 if name.startswith("embed") else layers + 1


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, unlisted: str = r"^$") -> None:
    """A sharded directory; names that match `unlisted` lie in the shards and not in the index."""
    path.mkdir(parents=True)
    shards: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        shards.setdefault(shard_of(name, config["num_hidden_layers"]), {})[name] = tensor.contiguous()
    weight_map = {}
    for at, number in enumerate(sorted(shards)):
        file = f"model-{at + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shards[number], path / file, metadata={"format": "pt"})
        weight_map |= {name: file for name in shards[number] if not re.search(unlisted, name)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(dict(config)))


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model dense."""
    return {key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype")}


def oracle(path: Path) -> Any:
    """transformers' model of a directory, in float32 on a CPU, where it dequantizes what it knows, in part to bfloat16,
    which holds every value of these formats."""
    from transformers import AutoModelForCausalLM

    with mock.patch("torch.cuda.is_available", return_value=False):  # else it keeps FP8 for kernels of a GPU
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.float().eval()
