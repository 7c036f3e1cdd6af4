"""Configs of published models (`tests/models/configs`) are read as the family each is of.

Their keys and values are those of the hub's files, written down and not fetched: what holds them to the models is that
the weights they need are as many as were published. Keys that no model reads may be left out, and vision_config. Where
they were read: model_configs of ai-dynamo/aiconfigurator at 095f58a (gpt-oss-120b, DeepSeek-V3.2, Kimi-K2, GLM-5, Qwen3
8B and 32B, Qwen3.5 122B and 397B, Llama-3.1, Nemotron 3 Super and Ultra); hf_model_configs.py of
AI-Hypercomputer/maxtext (Gemma 4, of which aiconfigurator's two say the same); sizes of Qwen3.5 4B and 9B in
scripts/models of radixark/miles, and of 0.8B in a public listing of its config.json; GLM-4.7 in a converter's tests;
sizes of Granite 4 in tests of public converters, its other keys from memory;
transformers' class defaults (Mistral Small 4, whose dtype is therefore not given).
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onegraph.api import cost
from onegraph.api.plan import plan
from onegraph.models import wrapper
from onegraph.models.config import LlamaConfig
from onegraph.models.mixers import Mamba
from onegraph.models.rope import Rope
from onegraph.ops.activation import SwiGLU
from tools.compatibility import without_quantization

FILES = {file.stem: file for file in sorted((Path(__file__).parent / "configs").glob("*.json"))}


GIBIBYTES = {"granite-4.0-h-tiny": 12.93, "granite-4.0-h-small": 59.99}  # of their files
COUNTED = "Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "gpt-oss-20b", *GIBIBYTES  # in a known number, below


def told(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILES[name].read_text())
    return found


def parsed(name: str) -> LlamaConfig:
    return LlamaConfig.from_dict(told(name))


def fewer_experts(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    cut = {key: max(8, value // 16) if key in keys and value >= 64 else value for key, value in config.items()}
    return cut | ({"text_config": fewer_experts(cut["text_config"])} if "text_config" in cut else {})


@pytest.mark.parametrize("name", FILES)
def test_a_published_model_is_the_one_that_transformers_makes_of_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers writes of the config reads alike, and from config.json alone `plan` counts its weights: of a
    sixteenth of the experts, since that takes time, where their number was not published by itself."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = told(name) if name in COUNTED else fewer_experts(told(name))
    text = json.dumps(without_quantization(config)).replace('"kimi_k2"', '"deepseek_v3"')  # as Moonshot's guide says
    dense = json.loads(text)
    theirs = CONFIG_MAPPING[dense["model_type"]].from_dict(json.loads(text))
    written = json.loads(theirs.to_json_string(use_diff=False))
    ours, whole = LlamaConfig.from_dict(dense), LlamaConfig.from_dict(written)
    tied = ours.tied if ours.nested else whole.tied  # a file's own head decides: test_wrapper.py
    assert dataclasses.replace(whole, eos=ours.eos, tied=tied) == ours
    assert whole.eos == ours.eos or not ours.eos, "which generation_config.json says then"
    with torch.device("meta"):
        auto: Any = AutoModelForImageTextToText if wrapper.is_wrapper(config) else AutoModelForCausalLM
        model = auto.from_config(theirs)
    held = [*model.named_parameters(), *((key, b) for key, b in model.named_buffers() if key.endswith("layer_scalar"))]
    sizes = {key: tensor.numel() for key, tensor in held if not wrapper.is_other(key)}
    tied = wrapper.is_wrapper(config) and not LlamaConfig.from_dict(dense).tied and "lm_head.weight" not in sizes
    weights = sum(size for key, size in sizes.items() if not key.endswith((".bias", "_proj_bias", "_correction_bias")))
    weights += tied * sizes.get("model.language_model.embed_tokens.weight", 0)  # by a default that the file corrects
    monkeypatch.setattr(cost, "_timed", lambda run, device, probe: 1.0)
    monkeypatch.setattr(cost, "_normal", lambda rows, columns, device: torch.empty(rows, columns, device=device))
    stored = config if config.get("quantization_config", {}).get("quant_method") == "mxfp4" else dense
    (tmp_path / "config.json").write_text(json.dumps(stored))
    found = plan(tmp_path, device="cpu")
    assert found.own
    assert found.before.parameters == weights
    if name == "Qwen3-30B-A3B":
        assert str(found).startswith("29.91B weights in 12480 linears ")
    if name == "Qwen3.5-35B-A3B":
        blocks = found.before.parameters - 2 * 248320 * 2048 - 2048  # without embedding, head and the last norm
        assert blocks == 33_643_489_920, "as the inventory of the published files counts them"
    if name in GIBIBYTES:
        assert found.before.total_bytes / 2**30 == pytest.approx(GIBIBYTES[name], abs=0.01)
    if name == "gpt-oss-20b":
        assert found.before.total_bytes == 13_761_264_768, "experts in MXFP4 blocks, as its index says"


def gemma(config: LlamaConfig) -> None:
    assert config.windows[:7] == (512, 512, 512, 512, 512, 0, 512)
    assert config.ropes[:6] == (Rope(theta=10000.0),) * 5 + (Rope(theta=1e6),)
    assert config.scale == 1 / 16
    assert config.tied


def air(config: LlamaConfig) -> None:
    assert config.ropes[0] == Rope(theta=1e6, partial=0.5)
    assert config.routed is not None
    assert config.routed.layers == (False,) + (True,) * 45
    assert config.parts.linears["model.layers.45.mlp.shared_experts.down_proj"] == (4096, 1408, False)
    assert config.parts.ignored("model.layers.46.eh_proj.weight")
    assert not config.parts.ignored("model.layers.45.eh_proj.weight")


def phi(config: LlamaConfig) -> None:
    assert config.parts.linears["model.layers.0.self_attn.qkv_proj"] == (60 * 128, 5120, False)


def qwen(config: LlamaConfig) -> None:
    assert len(config.parts.linears) == 48 * (4 + 128 * 3) + 1
    assert config.parts.linears["model.layers.47.mlp.experts.127.down_proj"] == (2048, 768, False)
    assert config.head_norm


def mixtral(config: LlamaConfig) -> None:
    assert config.parts.linears["model.layers.31.block_sparse_moe.experts.7.w2"] == (4096, 14336, False)
    assert config.parts.tensors["model.layers.0.block_sparse_moe.gate.weight"][0] == (8, 4096)
    assert not any(".mlp." in name for name in config.parts.linears)


def oss(config: LlamaConfig) -> None:
    assert config.windows == (128, 0) * 12
    assert config.traits.sinks
    assert config.ropes[0] is not None
    assert config.ropes[0].attention_factor == pytest.approx(1.3465735902799727), "0.1 ln(32) + 1"
    assert not config.ropes[0].truncate
    assert config.routed is not None
    assert config.routed.gate == SwiGLU(7.0, 1.702, 1.0)


def smollm3(config: LlamaConfig) -> None:
    assert [rope is not None for rope in config.ropes] == [True, True, True, False] * 9


def granite(config: LlamaConfig) -> None:
    assert (config.scale, config.embed_scale, config.residual_scale, config.logits_divisor) == (1 / 64, 12.0, 0.22, 8.0)


def granite4(config: LlamaConfig) -> None:
    assert [i for i, mixer in enumerate(config.mixers) if mixer is None] == [5, 15, 25, 35]
    assert set(config.ropes) == {None}
    assert config.routed is not None
    assert (config.routed.count, config.routed.top_k, config.routed.size) == (64, 6, 512)
    assert config.parts.linears["model.layers.0.shared_mlp.input_linear"] == (2048, 1536, False)
    assert config.parts.linears["model.layers.39.mamba.in_proj"] == (2 * 3072 + 256 + 48, 1536, False)
    assert config.family_name("model.layers.3.block_sparse_moe.output_linear.weight") == (
        "model.layers.3.block_sparse_moe.experts.down_proj"
    )


def granite_micro(config: LlamaConfig) -> None:
    assert set(config.mixers) == {None}
    assert config.ropes[0] == Rope(theta=10000.0)
    assert config.routed is None
    assert config.intermediate_size == 8192


def ministral(config: LlamaConfig) -> None:
    (rope,) = set(config.ropes)
    assert rope is not None
    assert (rope.query_beta, rope.original, rope.attention_factor) == (0.1, 16384, 1.0)
    assert rope.query_factors(16384) is None
    factors = rope.query_factors(40000)
    assert factors is not None
    assert factors[[16383, 16384, 32768]].tolist() == pytest.approx([1.0, 1.0693147, 1.1098612])


def olmo3(config: LlamaConfig) -> None:
    assert config.windows == (4096, 4096, 4096, 0) * 8
    assert [rope.kind for rope in config.ropes[:4] if rope is not None] == ["default"] * 3 + ["yarn"]


def minimax(config: LlamaConfig) -> None:
    assert config.ropes[0] == Rope(theta=5e6, partial=0.5)
    assert config.parts.tensors["model.layers.0.self_attn.q_norm.weight"][0] == (48 * 128,)
    assert config.parts.tensors["model.layers.0.block_sparse_moe.e_score_correction_bias"][0] == (256,)


def kimi(config: LlamaConfig) -> None:
    """Its YaRN ramps over one pair, since beta_fast is beta_slow."""
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = DeepseekV3Config.from_dict(told("Kimi-K2-Instruct") | {"model_type": "deepseek_v3"})
    (rope,) = set(config.ropes)
    assert rope is not None
    assert torch.allclose(rope.frequencies(64), ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))[0], rtol=1e-6)


def ultra(config: LlamaConfig) -> None:
    """Steps that 1e308 bounds are not bounded, and the number of blocks is that of their kinds."""
    assert config.layers == 108
    (mamba,) = {mixer for mixer in config.mixers if isinstance(mixer, Mamba)}
    assert mamba.dt_min == 0.0


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("Ministral-3-8B-Base-2512", ministral), ("Olmo-3-1025-7B", olmo3), ("MiniMax-M2", minimax),
        ("gemma-3-1b-it", gemma), ("GLM-4.5-Air", air), ("phi-4", phi), ("Qwen3-30B-A3B", qwen),
        ("Qwen3-Coder-30B-A3B-Instruct", qwen), ("Mixtral-8x7B-v0.1", mixtral), ("gpt-oss-20b", oss),
        ("SmolLM3-3B", smollm3), ("granite-3.1-2b-instruct", granite), ("granite-4.0-h-tiny", granite4),
        ("granite-4.0-micro", granite_micro), ("Kimi-K2-Instruct", kimi),
        ("NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", ultra),
    ],
)  # fmt: skip
def test_what_sets_a_model_apart(name: str, holds: Callable[[LlamaConfig], None]) -> None:
    holds(parsed(name))


def test_a_norm_of_heads_that_the_config_denies_is_refused() -> None:
    with pytest.raises(ValueError, match="use_qk_norm is False; qwen3_moe norms each head of q and k"):
        LlamaConfig.from_dict(told("Qwen3-Coder-30B-A3B-Instruct") | {"use_qk_norm": False})


def test_the_text_model_of_one_that_sees_is_read() -> None:
    """Gemma-3-4b, whose file says little more than what differs from the defaults."""
    sighted = LlamaConfig.from_dict(
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
            "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
            "mm_tokens_per_image": 256, "model_type": "gemma3", "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            }, "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
        }
    )  # fmt: skip
    assert sighted.nested
    assert (sighted.heads, sighted.kv_heads, sighted.head_dim, sighted.vocab_size) == (8, 4, 256, 262208)
    assert sighted.ropes[5] == Rope(kind="linear", theta=1e6, factor=8.0)
    assert sighted.ropes[4] == Rope(theta=10000.0)
    assert sighted.eos == (1, 106)
