"""Families in codes inside the real vLLM, on a CPU: log-probabilities are our own engine's on the same codes, which
other tests hold against transformers. Published multimodal checkpoints run with their towers, which stay dense."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_generate import serving

from models import Decoder, hf_model, save_hf
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from test_quant_experts import made, write_tokenizer
from test_wrapper import save_qwen

SIZES: dict[str, Any] = {
    "hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "num_hidden_layers": 2,
}  # fmt: skip
GATED_DELTA: dict[str, Any] = SIZES | {
    "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = SIZES | WINDOWS | {"global_head_dim": 64}
LFM2 = {"conv_dim": 128, "block_dim": 128, "block_ff_dim": 192, "intermediate_size": 192}  # keys of published files
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.3}
MAMBA = {"mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1, "moe_latent_size": None}
GRANITE = {"head_dim": None, "shared_intermediate_size": 128, "attention_bias": False}
GRANITE_MAMBA = {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_d_head": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": GATED_DELTA | EXPERTS | {"shared_expert_intermediate_size": 128},
    "gemma4_moe": GEMMA | {"moe_intermediate_size": 64},
    "gemma4_e": GEMMA | {
        "hidden_size_per_layer_input": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": WINDOWS["layer_types"] * 2,
    },
    "olmo2": SIZES,
    "olmo3": SIZES | WINDOWS,
    "olmoe": SIZES | {"head_dim": None, "intermediate_size": 64, "norm_topk_prob": False},
    "lfm2": SIZES | LFM2 | {"layer_types": ["full_attention", "conv"], "full_attn_idxs": None},
    "lfm2_moe": SIZES | {"layer_types": ["full_attention", "conv"], "moe_intermediate_size": 64},
    "nemotron_h without experts": SIZES | MAMBA | {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "gemma2": SIZES,
    "granite": SIZES,
    "granite4_h": SIZES | GRANITE | GRANITE_MAMBA | {"mamba_conv_bias": True},
    "granite4_moe": SIZES | GRANITE | GRANITE_MAMBA | {"intermediate_size": 64},
    "granitemoeshared": SIZES | GRANITE | {"intermediate_size": 64},
    "exaone_moe": SIZES | WINDOWS | {"moe_intermediate_size": 64},
}  # fmt: skip
# What transformers calls a multimodal model -> its text model here, and the keys beside the text model's config.
EYES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 128, "intermediate_size": 16}
TOWER = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
SEEN = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3_5": ("qwen3_5", GATED_DELTA, SEEN | {"vision_config": EYES}),
    "Gemma4": ("gemma4", GEMMA, {"audio_config": None, "vision_config": TOWER}),
    "Mistral3": ("ministral3", SIZES | {"rope_parameters": YARN}, {"vision_config": TOWER | {"model_type": "pixtral"}}),
}
QWEN_VL = {"Qwen3VL": {}, "Qwen3VLMoe": {"moe_intermediate_size": 64, "norm_topk_prob": True}, "Qwen2_5_VL": {}}
PROMPTS = [[7, 1, 8, 2, 8, 1, 8, 2, 5, 9], [3], [5] * 4]


def save_multimodal(kind: str, path: Path) -> None:
    """A published checkpoint with a tower beside its text model."""
    import transformers

    if kind in QWEN_VL:
        save_qwen(kind, path, **SIZES, **QWEN_VL[kind], tie_word_embeddings=False)
        return
    variant, sizes, beside = WRAPPED[kind]
    text = hf_model(variant, **sizes)
    tied = text.config.tie_word_embeddings
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.config.to_dict(), tie_word_embeddings=tied, **beside
    )
    both = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(path)


@pytest.mark.parametrize("name", [*FAMILIES, *WRAPPED, *QWEN_VL])
def test_families(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests at once, of unequal lengths: each token is as likely as in our engine, and the likeliest."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.sampling_params import SamplingParams

    if name in FAMILIES:
        save_hf(name.split()[0], tmp_path / "model", **FAMILIES[name])
    else:
        save_multimodal(name, tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    made(tmp_path)
    if name.startswith("lfm2"):  # the CPU's kernel reads queries of three dimensions wrongly
        monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
    half = "qwen3_5" in name.lower()  # whose gated delta rule runs in bfloat16 alone on a CPU
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False, logprobs=0)
    settings = {"dtype": "bfloat16"} if half else {}
    with serving(tmp_path / "out", **settings, language_model_only=name not in FAMILIES) as llm:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        model = Llama.load(checkpoint, "cpu", torch.float32, max_context=64)
    off = []
    for request in found:
        prompt, answer = list(request.prompt_token_ids), request.outputs[0]
        logits = Decoder(model, rows=1, max_context=64).feed([prompt + list(answer.token_ids)])[0]
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for token, mine, want in zip(answer.token_ids, answer.logprobs, scores, strict=True):
            off.append(abs(mine[token].logprob - float(want[token])))
            assert want.max() - want[token] < (0.3 if half else 1e-3), "another token would have been much likelier"
    assert max(off) < (0.3 if half else 1e-3)
    assert sum(off) / len(off) < (0.04 if half else 1e-4)
