"""Multi-head latent attention in codes inside the real vLLM, on a CPU: tokens of our own engine. Decode steps read the
products that vLLM absorbs `kv_b_proj` into, prompts run the linear itself."""

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_experts import places
from test_generate import PROMPTS, ours, serving, tokens_of

from models import hf_model
from onegraph.formats.trellis import TrellisConfig
from test_e8p_experts import checkpoint_of
from test_quant_experts import made, write_tokenizer
from test_wrapper import save_kimi

# vLLM's decode kernel on a CPU takes latents of 512 and 64 numbers alone. Its model reads `topk_method`, which
# published files have and transformers' class does not.
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": None, "q_lora_rank": 128, "kv_lora_rank": 512,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
PUBLISHED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
TOWER = {
    "model_type": "pixtral", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16,
    "num_attention_heads": 2, "head_dim": 8,
}  # fmt: skip
REFERENCE = {"attention_backend": "CPU_MLA"}  # also where the CPU has AMX, whose attention rounds to bfloat16


def save(path: Path, **changes: Any) -> Path:
    checkpoint_of("deepseek_v3", path, 4, **SIZES | PUBLISHED | changes)
    return path


def test_deepseek(tmp_path: Path) -> None:
    """A dense block and one of experts beside shared ones, chosen by sigmoids with a bias, in groups. Reloaded, the
    absorbed products follow the weights, in the same places."""
    first, second = save(tmp_path / "first"), save(tmp_path / "second", seed=1)
    with serving(first, **REFERENCE) as llm:
        assert tokens_of(llm, PROMPTS, 6) == ours(first, PROMPTS, 6)
        before = llm.apply_model(places)
        assert any("W_UK_T" in name for name in before[0])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        assert llm.apply_model(places) == before
        assert tokens_of(llm, PROMPTS, 6) == ours(second, PROMPTS, 6) != ours(first, PROMPTS, 6)


def test_kimi(tmp_path: Path) -> None:
    """One group of experts, under the family's own name; trellis codes; queries without a low rank."""
    path = save(tmp_path / "m", n_shared_experts=1, n_group=1, topk_group=1, q_lora_rank=None, written=TrellisConfig)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    with serving(path, **REFERENCE) as llm:
        assert tokens_of(llm, PROMPTS, 6) == ours(path, PROMPTS, 6)


def test_kimi_k25(tmp_path: Path) -> None:
    """Under its wrapper, as `onegraph quantize` writes it: the tower stays dense, the text is in codes."""
    save_kimi(tmp_path, **SIZES)
    write_tokenizer(tmp_path / "model")
    made(tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "kimi_k25"
    with serving(tmp_path / "out", **REFERENCE, language_model_only=True) as llm:
        assert tokens_of(llm, PROMPTS, 6) == ours(tmp_path / "out", PROMPTS, 6)


MEDIA = {  # how published files have images prepared
    "in_patch_limit": 64, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2,
    "fixed_output_tokens": None, "patch_limit_on_one_side": 512, "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": 64, "sample_fps": 2.0, "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4,
}  # fmt: skip


def patches(frames: Any, out: Any, at: int, _h: int, _w: int, height: int, width: int, size: int, table: Any) -> None:
    """What vLLM's kernel in numba writes: `table` [256, 3] of uint8 frames [T, height, width, 3], in patches."""
    whole = np.zeros((len(frames), height, width, 3), np.uint8)
    whole[:, : frames.shape[1], : frames.shape[2]] = frames
    values = np.stack([table[whole[..., c], c] for c in range(3)], axis=-1)
    cut = values.reshape(len(frames), height // size, size, width // size, size, 3).transpose(0, 1, 3, 5, 2, 4)
    out[at : at + cut.size // (3 * size * size)] = cut.reshape(-1, 3, size, size)


def test_kimi_k25_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, with an image in a prompt: transformers' tokens on the same codes."""
    import transformers
    from PIL import Image
    from vllm.model_executor.models import kimi_k25
    from vllm.sampling_params import SamplingParams
    from vllm.transformers_utils.processors import kimi_k25_vision_fused as fused

    import onegraph.integrations.hf  # noqa: F401

    save_kimi(tmp_path, **SIZES)
    write_tokenizer(tmp_path / "model")
    file, pad = tmp_path / "model" / "tokenizer.json", "<|media_pad|>"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {pad if at == 120 else word: at for word, at in words.items()}
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [{"id": 120, "content": pad, "special": True} | marks]
    file.write_text(json.dumps(tokenizer))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": MEDIA}))
    made(tmp_path)

    monkeypatch.setattr(kimi_k25, "is_numba_available", lambda: True)
    for name, value in (
        ("njit", True),
        ("_write_fused_patches", patches),
        ("numba_workqueue_threading_layer", nullcontext),
    ):
        monkeypatch.setattr(fused, name, value, raising=False)
    image = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    media = {"vision_chunk": [{"type": "image", "image": Image.fromarray(image), "uuid": None}]}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    settings = {"skip_tokenizer_init": False, "mm_hasher_algorithm": "sha256", "max_num_batched_tokens": 2048}
    with serving(tmp_path / "out", **REFERENCE, **settings) as llm:
        (done,) = llm.generate([{"prompt_token_ids": [5, 9, 120, 77, 3], "multi_modal_data": media}], params)
    prompt, answer = list(done.prompt_token_ids), list(done.outputs[0].token_ids)
    assert prompt == [5, 9, *[120] * 6, 77, 3]

    hf = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    pixels = np.zeros((24, 3, 14, 14), np.float32)
    patches(image[None], pixels, 0, 56, 84, 56, 84, 14, (np.arange(256) / 127.5 - 1)[:, None].repeat(3, axis=1))
    seen = {"pixel_values": torch.tensor(pixels), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    text = torch.tensor([prompt + answer])
    with torch.inference_mode():
        right = hf(input_ids=text, **seen).logits[0].argmax(-1)[len(prompt) - 1 : -1].tolist()
        blind = hf(input_ids=text, **seen | {"pixel_values": seen["pixel_values"] * 0}).logits[0].argmax(-1)
    assert answer == right != blind[len(prompt) - 1 : -1].tolist()


def test_mistral4_as_plain_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' model inside vLLM, under its wrapper: vLLM has no model of its own, and its latent attention does
    not take heads of 128 numbers."""
    import transformers

    model = tmp_path / "model"
    text = hf_model("mistral4", **SIZES | {"kv_lora_rank": 256, "v_head_dim": 128})
    config = transformers.Mistral3Config(
        text_config=text.config.to_dict(), vision_config=TOWER, image_token_index=128, tie_word_embeddings=False
    )
    both = transformers.Mistral3ForConditionalGeneration(config).float().eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(model)
    write_tokenizer(model)
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    marks = {f"image_{name}token": f"w{i}" for name, i in (("", 128), ("break_", 129), ("end_", 130))}
    images = transformers.PixtralImageProcessor()
    transformers.PixtralProcessor(images, words, patch_size=16, **marks).save_pretrained(model)
    made(tmp_path)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    settings = {"model_impl": "transformers", "language_model_only": True, "skip_tokenizer_init": False}
    with serving(tmp_path / "out", **settings, max_num_batched_tokens=2048) as llm:
        assert tokens_of(llm, PROMPTS, 6) == ours(tmp_path / "out", PROMPTS, 6)
