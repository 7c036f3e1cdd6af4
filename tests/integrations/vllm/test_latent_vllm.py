"""Multi-head latent attention in codes inside the real vLLM, on a CPU: tokens of our own engine. Decode steps read the
products that vLLM absorbs `kv_b_proj` into, prompts run the linear itself."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

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
