"""Draft layers of a checkpoint that `quantize` writes: kept as they are, or rounded on what the model gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import test_hybrid_llm
from onegraph import LLM, SamplingParams, quantize
from onegraph.api.plan import plan
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8P
from onegraph.models.llama import Llama
from onegraph.models.mtp import DraftConfig, DraftLayer
from onegraph.models.source import LlamaSource
from test_mtp import save
from test_wrapper import save_tokenizer, tokens

WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4}
ROUTED = {"moe_intermediate_size": 64, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 64,
    "q_lora_rank": 64,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": WIDE,
    "qwen3_5_moe": WIDE | EXPERTS,
    "glm4_moe": WIDE | ROUTED | {"num_hidden_layers": 2},
    "deepseek_v3": WIDE | ROUTED | LATENT | {"num_hidden_layers": 2},
    "nemotron_h": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "mamba_head_dim": 32,
        "n_routed_experts": 4,
        "n_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 64,
        "intermediate_size": 128,
    },
}
ROOT = {"glm4_moe": "model.layers.2.", "deepseek_v3": "model.layers.2."} | dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe", "nemotron_h"), "mtp."
)
HOW: dict[str, Any] = {
    "recipe": "quick", "num_calibration_tokens": 256, "calibration_seq_len": 64, "device": "cpu",
    "calibration": " ".join(str(i * 7 % 131) for i in range(600)),
}  # fmt: skip


def made(variant: str, path: Path, **options: Any) -> tuple[Any, Any, Any]:
    hf, reference = save(variant, path, **SIZES[variant])
    save_tokenizer(path / "model")
    return hf, reference, quantize(path / "model", path / "q", **HOW | options)


def drafts_the_same_text(path: Path) -> None:
    params = [SamplingParams(max_tokens=12, temperature=i * 0.9, seed=5) for i in range(2)]
    prompts = ["1 2 3 5 8 13"] * 2
    with LLM(path, device="cpu", dtype="float32", max_model_len=64) as llm:
        plain = [each.text for each in llm.generate(prompts, params)]
    with LLM(path, device="cpu", dtype="float32", max_model_len=64, speculative="mtp", num_speculative_tokens=2) as llm:
        assert [each.text for each in llm.generate(prompts, params)] == plain
        assert llm.stats.drafted_tokens


def outputs_of(path: Path, text: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Of the draft layer, whatever the decoder gave: features for tokens and hidden states."""
    with Checkpoint.open(path) as checkpoint:
        model = Llama.load(checkpoint)
        draft = DraftLayer.load(checkpoint, model)
    with torch.inference_mode():
        x = draft.inputs(model.embed(text), hidden)
        return draft.run(x, model.dense_attention).normed(draft.norm, draft.config.eps)[0]


@pytest.mark.parametrize("variant", ["glm4_moe", "qwen3_5_moe"])
def test_a_draft_layer_is_kept_unless_asked(variant: str, tmp_path: Path) -> None:
    """Bit by bit, and the model that was quantized drafts with it."""
    made(variant, tmp_path, bits=4)
    with Checkpoint.open(tmp_path / "model") as before, Checkpoint.open(tmp_path / "q") as after:
        names = [name for name in before.names if name.startswith(ROOT[variant])]
        assert names == [name for name in after.names if name.startswith(ROOT[variant])]
        assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in names)
    drafts_the_same_text(tmp_path / "q")


@pytest.mark.parametrize(("variant", "recipe"), [
    ("qwen3_5", "quick"), ("qwen3_5_moe", "quick"), ("glm4_moe", "good"), ("deepseek_v3", "quick"),
    ("nemotron_h", "quick"),
])  # fmt: skip
def test_a_draft_layer_is_rounded(variant: str, recipe: str, tmp_path: Path) -> None:
    """Its linears, at a rate that is not the model's; the text stays that without drafts."""
    hf, reference, _ = made(variant, tmp_path, bits=2, draft_layers=4, recipe=recipe)
    root = ROOT[variant]
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        config = Llama.load(checkpoint).config
        assert config.quantization is not None
        assert not any(name.startswith(root) for name in config.quantization.layers), "the decoder has its own alone"
        own = DraftConfig.read(config, checkpoint)
        coded = {name.removesuffix(".codes") for name in checkpoint.names if name.endswith(".codes")}
        left = [name for name in checkpoint.names if name.startswith(root) and checkpoint.shape(name)[1:]]
    mine = {name for name in coded if name.startswith(root)}
    assert mine == {name for name in (*own.parts.linears, *own.parts.stacks) if name.startswith(root)}
    assert {own.quantization.format_of(name) for name in mine} == {E8P[4]}  # type: ignore[union-attr]
    dense = {name for name in left if name.endswith(".weight")}
    assert all("gate." in n or "embed_tokens" in n or "shared_head" in n or "shared_expert_gate" in n for n in dense)
    drafts_the_same_text(tmp_path / "q")
    text = torch.tensor([tokens(40)])
    with torch.inference_mode():
        hidden = hf.model(text[:, :-1], use_cache=False).last_hidden_state
        want = reference(hf, hidden, text[:, 1:])
    got = outputs_of(tmp_path / "q", text[:, 1:], hidden)
    off, wrong = ((x - want).norm(dim=-1) / want.norm(dim=-1) for x in (got, got.flip(1)))
    # Of most tokens: one that chooses another expert is far off, as all of another text are.
    assert off.median() < 0.5 < 0.9 < wrong.median()


def test_a_draft_layer_beside_a_multimodal_model_is_rounded(tmp_path: Path) -> None:
    """Under its own name, with the rate map and towers where they were."""
    test_hybrid_llm.save("qwen3_5", tmp_path / "m")
    quantize(tmp_path / "m", tmp_path / "q", **HOW, bits=2, draft_layers=3)
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        assert checkpoint.config["quantization_config"]["layers"]["mtp.layers.0.mlp.up_proj"] == 3
        assert {"mtp.fc.codes", "mtp.norm.weight"} <= {*checkpoint.names}
        assert any(name.startswith("model.visual.") for name in checkpoint.names)
    drafts_the_same_text(tmp_path / "q")


@pytest.mark.parametrize("variant", ["qwen3_5", "glm4_moe", "deepseek_v3", "nemotron_h"])
@torch.inference_mode()
def test_it_is_calibrated_on_what_the_model_gives_it(variant: str, tmp_path: Path) -> None:
    """The quantizer's draft block computes what the reference does on the decoder's hidden states."""
    hf, reference = save(variant, tmp_path, **SIZES[variant])
    source = LlamaSource(Checkpoint.open(tmp_path / "model"), draft=True)
    text = torch.tensor([tokens(30)])
    hidden = source.embed(text)
    for i in range(source.num_blocks):
        hidden = source.run_block(source.load_block(i), hidden)
    block: Any = source.load_block(source.num_blocks)
    found = source.run_block(block, source.draft_inputs(block, text, hidden))
    states = hf.model(text, use_cache=False).last_hidden_state
    norm = reference.norm(found)
    torch.testing.assert_close(norm, reference(hf, states[:, :-1], text[:, 1:]), atol=1e-4, rtol=1e-4)
    groups = source.linear_groups(block)
    assert {name for group in groups for name, _ in group} <= source.shapes(source.num_blocks).keys()


def test_transformers_passes_over_a_rounded_draft_layer(tmp_path: Path) -> None:
    import transformers

    import onegraph.integrations.hf  # noqa: F401

    made("glm4_moe", tmp_path, bits=4, draft_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    row = torch.tensor([tokens(12)])
    with Checkpoint.open(tmp_path / "q") as checkpoint, torch.inference_mode():
        own = Llama.load(checkpoint)
        torch.testing.assert_close(model(row).logits, own.logits(own(row, own.dense_attention)), atol=1e-3, rtol=1e-3)


def test_what_is_refused_in_a_line(tmp_path: Path) -> None:
    save("glm4_moe", tmp_path, without="layers.2.", **SIZES["glm4_moe"])
    path = tmp_path / "model"
    for options, said in (
        ({"draft_layers": 4}, "draft_layers: got 4, and this checkpoint has no draft layer"),
        ({"draft_layers": 5}, "draft_layers: got 5; allowed are 2, 3, 4, and 16 to keep them"),
        ({"draft_layers": 4, "format": "nvfp4"}, "draft_layers: got 4; allowed is 16 to keep them"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(path, tmp_path / "out", **{"calibration": "bundled", "device": "cpu", **options})
