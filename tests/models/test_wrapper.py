"""The text model of a multimodal checkpoint: run as any other, and quantized with the rest of the files kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models import SIZES, Decoder, hf_config, hf_model
from onegraph.api.llm import LLM
from onegraph.api.plan import plan
from onegraph.api.quantize import quantize
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.wrapper import TextCheckpoint, family_name, is_other, skipped, text_checkpoint, text_config

EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EYES |= {"image_size": 28, "patch_size": 14}
# multimodal class -> its text model here, and what else its config takes
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral3": ("mistral_full", {"vision_config": {"model_type": "pixtral", "head_dim": 8} | EYES}),
    "Gemma3": ("gemma3", {"vision_config": EYES, "mm_tokens_per_image": 4}),
    "Llava": ("llama", {"vision_config": {"model_type": "clip_vision_model"} | EYES}),
}


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save(kind: str, path: Path, **changes: Any) -> Any:
    """A multimodal checkpoint at `path` as transformers writes it; its text model."""
    import transformers

    variant, more = KINDS[kind]
    text = hf_model(variant, hidden_size=128, intermediate_size=128, num_attention_heads=4, **changes)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.config.to_dict(), tie_word_embeddings=text.config.tie_word_embeddings, **more
    )
    torch.manual_seed(1)
    both = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(path)
    return text


def rewrite(path: Path, out: Path, name: Any, config: Any = lambda config: config, **more: torch.Tensor) -> None:
    """The checkpoint with other names, a changed config and more tensors."""
    source = Checkpoint.open(path)
    tensors = [(name(each), source.tensor(each)) for each in source.names]
    write_checkpoint(out, config(source.config), [*tensors, *more.items()])


@torch.inference_mode()
def logits_of(path: Path, row: list[int]) -> torch.Tensor:
    with Checkpoint.open(path) as checkpoint:
        decoder, half = Decoder(Llama.load(checkpoint), rows=1, max_context=len(row)), len(row) // 2
    return torch.cat([decoder.feed([part])[0] for part in (row[:half], *([token] for token in row[half:]))])


@torch.inference_mode()
def truth(hf: Any, row: list[int]) -> torch.Tensor:
    logits: torch.Tensor = hf(torch.tensor([row]), use_cache=False).logits[0].float()
    return logits


def newer(name: str) -> str:
    """The names of transformers 5's modules, from either kind: it writes some families' models under the older ones."""
    if name.startswith(("model.", "lm_head.")):
        return name
    if name.startswith("language_model."):
        rest = name.removeprefix("language_model.")
        return rest if rest.startswith("lm_head.") else f"model.language_model.{rest.removeprefix('model.')}"
    return f"model.{name}"


def older(name: str) -> str:
    """The names of before transformers 5."""
    name = newer(name)
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.removeprefix("model.").replace("language_model.", "language_model.model.")


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_multimodal_model_is_its_text_models(kind: str, tmp_path: Path) -> None:
    text, row = save(kind, tmp_path / "m"), tokens(24)
    rewrite(tmp_path / "m", tmp_path / "o", older, **{"mtp.fc.weight": torch.zeros(2, 2)})
    rewrite(tmp_path / "m", tmp_path / "n", newer)
    want = truth(text, row)
    for path in (tmp_path / "o", tmp_path / "n"):
        assert any("vision_tower" in name for name in Checkpoint.open(path).names)
        assert (logits_of(path, row) - want).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["Mistral3", "Gemma3"])
@pytest.mark.parametrize("old", [False, True])
def test_quantizing_keeps_the_other_modalities(kind: str, old: bool, tmp_path: Path) -> None:
    """What is written is a whole multimodal model: to onegraph, and to transformers, which finds every tensor."""
    import transformers

    import onegraph.integrations.hf  # noqa: F401

    text, row = save(kind, tmp_path / "m", num_hidden_layers=2), tokens(24)
    extra = {"mtp.fc.weight": torch.ones(2, 2)}
    rewrite(tmp_path / "m", tmp_path / "s", older if old else newer, **extra)
    save_tokenizer(tmp_path / "s")
    ends = {"lm_head": 4, "embed_tokens": 4}
    made = quantize(
        tmp_path / "s", tmp_path / "q", bits=4, recipe="quick", tokens=128, sequence=32,
        layers={"*0.mlp.down_proj": 16}, calibration=" ".join(map(str, range(400))), device="cpu", **ends,
    )  # fmt: skip
    source, out = Checkpoint.open(tmp_path / "s"), Checkpoint.open(tmp_path / "q")
    others = [name for name in source.names if is_other(name)]
    assert len(others) > 10
    assert all(torch.equal(source.tensor(name), out.tensor(name)) for name in others)
    body = "language_model.model." if old else "model.language_model."
    assert f"{body}layers.1.self_attn.q_proj.codes" in out
    assert out.config["quantization_config"] == made.config
    assert made.config["layers"] == {f"{body}layers.0.mlp.down_proj": 16}
    got = logits_of(tmp_path / "q", row)
    assert (got - truth(text, row)).norm() < 0.5 * truth(text, row).norm()
    hf, told = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "q", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert (truth(hf, row) - got).abs().max() < 1e-3 * got.abs().max()
    assert (truth(hf.dequantize(), row) - got).abs().max() < 1e-3 * got.abs().max()
    with pytest.raises(ValueError, match="quantized already"):
        plan(tmp_path / "q")


def test_nvfp4_keeps_the_other_modalities(tmp_path: Path) -> None:
    """The list of what stayed as it was, which others read, has the modules of the towers and the file's names."""
    text, row = save("Mistral3", tmp_path / "s"), tokens(24)
    rewrite(tmp_path / "s", tmp_path / "m", newer)
    save_tokenizer(tmp_path / "m")
    made = quantize(tmp_path / "m", tmp_path / "q", format="nvfp4", device="cpu")
    kept = made.config["ignore"]
    assert "model.vision_tower.transformer.layers.0.attention.q_proj" in kept
    assert "model.language_model.layers.0.mlp.up_proj" not in kept
    assert "model.language_model.layers.0.mlp.up_proj.weight_scale_2" in Checkpoint.open(tmp_path / "q")
    assert (logits_of(tmp_path / "q", row) - truth(text, row)).norm() < 0.5 * truth(text, row).norm()


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(i): i for i in range(131)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))


def test_quantization_is_read_inside_and_beside(tmp_path: Path) -> None:
    """FP8 as published: the config in text_config, the tensors under the prefix."""
    told = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = {"quantization_config": told} | hf_config("mistral_full").to_dict()
    inside = LlamaConfig.from_dict({"model_type": "mistral3", "text_config": text})
    plain = {key: value for key, value in text.items() if key != "quantization_config"}
    beside = LlamaConfig.from_dict({"model_type": "mistral3", "text_config": plain, "quantization_config": told})
    assert inside == beside
    assert inside.quantization is not None
    with pytest.raises(ValueError, match=r"quantization_config and text_config\.quantization_config differ"):
        LlamaConfig.from_dict(
            {"model_type": "mistral3", "text_config": text, "quantization_config": {"quant_method": "awq"}}
        )
    save("Mistral3", tmp_path / "m")
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert Checkpoint.open(tmp_path / "m").config["quantization_config"] == {"quantization": {"quant_algo": "NVFP4"}}
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["text_config"]["quantization_config"] = told
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert "quantization_config" not in Checkpoint.open(tmp_path / "m").config


def test_whether_the_head_is_tied(tmp_path: Path) -> None:
    """Either config may say it, transformers' class says it where none does, and a head in the file is the head."""
    text = hf_config("mistral_full").to_dict()
    silent = {key: value for key, value in text.items() if key != "tie_word_embeddings"}

    def tied(kind: str, text: dict[str, Any], **more: Any) -> bool:
        return LlamaConfig.from_dict({"model_type": kind, "text_config": text, **more}).tied

    assert tied("mistral3", silent)
    assert not tied("llava", silent)
    assert not tied("mistral3", silent | {"tie_word_embeddings": False})
    assert tied("llava", silent | {"tie_word_embeddings": True}, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="tie_word_embeddings is 'no'"):
        tied("mistral3", silent | {"tie_word_embeddings": "no"})
    hf, row = save("Mistral3", tmp_path / "m"), tokens(12)
    rewrite(tmp_path / "m", tmp_path / "s", lambda name: name, lambda config: config | {"tie_word_embeddings": True})
    assert (logits_of(tmp_path / "s", row) - truth(hf, row)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": 3}, "text_config is 3; mistral3 must have its text model's config there"),
        ({"text_config": {"model_type": "gemma2"}}, "of mistral3 it is mistral or ministral3 or mistral4"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5, beside text_config"),
        ({"num_attention_heads": 7}, "num_attention_heads is 7, beside text_config"),
        ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow is 1, beside text_config"),
        ({"model_type": "paligemma"}, "its prompt attends in both directions"),
        ({"model_type": "seer", "text_config": {"vocab_size": 3}}, "of seer it is the text model's"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = {"model_type": "mistral3", "text_config": hf_config("mistral_full").to_dict()}
    assert LlamaConfig.from_dict(config | {"num_attention_heads": 6, "image_token_index": 9}).nested
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict(config | change)


def test_names() -> None:
    for stored in ("model.language_model.layers.0.x", "language_model.model.layers.0.x", "model.text_model.layers.0.x"):
        assert family_name(stored) == "model.layers.0.x"
    assert family_name("language_model.lm_head.weight") == family_name("lm_head.weight") == "lm_head.weight"
    others = ["visual.blocks.0.x", "model.vision_tower.x", "multi_modal_projector.x", "model.image_newline", "mtp.fc.x"]
    assert all(map(is_other, [*others, "model.embed_audio.x", "model.audio_tower.x", "model.connector.proj.weight"]))
    assert not any(map(is_other, ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"]))
    assert skipped(["model.visual.a", "model.visual.b", "mtp.fc.weight", "model.norm.weight"]) == {
        "model.visual": 2, "mtp": 1,
    }  # fmt: skip


def test_what_is_skipped_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from onegraph.cli.common import tell_skipped

    save("Mistral3", tmp_path)
    save_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu", max_context=32) as llm:
        tell_skipped(llm.skipped)
    assert list(llm.skipped) == ["multi_modal_projector", "vision_tower"]
    told = capsys.readouterr().err
    assert "text only: 15 tensors are skipped: multi_modal_projector (4), vision_tower (11)\n" in told
    tell_skipped({})
    assert not capsys.readouterr().err


def test_a_tensor_of_no_known_module_is_refused(tmp_path: Path) -> None:
    save("Mistral3", tmp_path / "m")
    rewrite(tmp_path / "m", tmp_path / "s", lambda name: name, **{"model.oracle.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"unexpected: 'model.oracle.weight'"):
        logits_of(tmp_path / "s", tokens(4))


def test_a_text_models_checkpoint_is_itself(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert text_checkpoint(checkpoint) is checkpoint
    assert not isinstance(checkpoint, TextCheckpoint)
    assert text_config(checkpoint.config) is checkpoint.config


# -------------------------------------------------------------------------------------------------- Qwen's text models

QWEN: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 96, "mlp_ratio": 1}},
    "Qwen2_5_VL": {"vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 96}},
    "Qwen3VL": {
        "vision_config": {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 96, "deepstack_visual_indexes": [0],
        },
        "head_dim": 16,
    },
    "Qwen3VLMoe": {
        "vision_config": {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 96, "deepstack_visual_indexes": [0],
        },
        "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
}  # fmt: skip


def save_qwen(kind: str, path: Path, **changes: Any) -> Any:
    """A tiny model of Qwen-VL's kinds, saved to `path`; `changes` are of its text model."""
    import transformers

    more = dict(QWEN[kind])
    vision, sizes = more.pop("vision_config"), {k: v for k, v in SIZES.items() if k != "head_dim"}
    sizes |= {"hidden_size": 96, **more, **changes}
    half = changes.get("head_dim", 16) // 2
    section = [half // 4, half * 3 // 8, half * 3 // 8]
    rope = {"rope_type": "default", "rope_theta": 700.0, "mrope_section": section}
    config = getattr(transformers, f"{kind}Config")(
        text_config=sizes | {"rope_parameters": rope}, vision_config=vision | {"intermediate_size": 16},
        image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" not in name:
                one = parameter.dim() == 1
                parameter.copy_(torch.randn_like(parameter) * (0.3 if one else 1.5 / parameter.shape[-1] ** 0.5) + one)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("kind", QWEN)
def test_the_text_of_qwen_vl(kind: str, tmp_path: Path) -> None:
    hf, row = save_qwen(kind, tmp_path / "m"), tokens(24)
    assert (logits_of(tmp_path / "m", row) - truth(hf, row)).abs().max() < 1e-4
    (module,) = skipped(Checkpoint.open(tmp_path / "m").names)
    assert module.removeprefix("model.") == "visual"


def test_experts_in_one_tensor_lie_either_way(tmp_path: Path) -> None:
    """Qwen3-VL-MoE: [E, k, n] as published, [E, n, k] as transformers 5 writes it."""
    hf, row = save_qwen("Qwen3VLMoe", tmp_path / "m"), tokens(24)
    source = Checkpoint.open(tmp_path / "m")
    tensors = {name: source.tensor(name) for name in source.names}
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
    write_checkpoint(tmp_path / "t", source.config, turned.items())
    assert (logits_of(tmp_path / "t", row) - truth(hf, row)).abs().max() < 1e-4


def test_a_config_that_has_the_texts_keys_beside_the_others(tmp_path: Path) -> None:
    """Qwen2.5-VL as it was published: one flat config.json, `visual.` beside `model.layers.`."""
    hf, row = save_qwen("Qwen2_5_VL", tmp_path / "m"), tokens(24)

    def flat(config: dict[str, Any]) -> dict[str, Any]:
        text = dict(config.pop("text_config"))
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
        return {**text, **config}

    def name(stored: str) -> str:
        return stored.replace("model.visual.", "visual.").replace("model.language_model.", "model.")

    rewrite(tmp_path / "m", tmp_path / "f", name, flat)
    assert "visual.merger.mlp.0.weight" in Checkpoint.open(tmp_path / "f")
    assert (logits_of(tmp_path / "f", row) - truth(hf, row)).abs().max() < 1e-4
    config = Checkpoint.open(tmp_path / "f").config
    with pytest.raises(ValueError, match=r"mrope_section \[2, 3\] adds up to 5, not to 8"):
        LlamaConfig.from_dict(config | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}})


# ------------------------------------------------------------------------------------------------------------ Kimi-K2.5

KIMI_SIZES: dict[str, Any] = {"q_lora_rank": 64, "kv_lora_rank": 64, "n_group": 1, "topk_group": 1}
KIMI_TOWER = {
    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "pos_emb_height": 4,
    "pos_emb_width": 4,
}  # fmt: skip


def save_kimi(path: Path, **changes: Any) -> Any:
    """Kimi-K2.5 at `path` by the names and keys of published files, which transformers 5.17 reads and does not write;
    transformers' model. `changes` are of its text model."""
    import transformers

    text = hf_model("deepseek_v3", **KIMI_SIZES | changes)
    config = transformers.Kimi_K25Config(
        text_config=text.config.to_dict(), vision_config=KIMI_TOWER, projection_hidden_size=16, image_token_id=120,
        video_token_id=121, vision_start_token_id=122, vision_end_token_id=123, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    both = transformers.Kimi_K25ForConditionalGeneration(config).float().eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(path / "plain")

    def name(stored: str) -> str:
        found = stored.removeprefix("model.").replace("language_model.model.blocks.", "language_model.model.layers.")
        return found.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")

    def told(config: dict[str, Any]) -> dict[str, Any]:
        inside = {"model_type": "kimi_k2", "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
        more = {"architectures": ["KimiK25ForConditionalGeneration"], "media_placeholder_token_id": 120}
        return config | more | {"text_config": config["text_config"] | inside, "use_unified_vision_chunk": True}

    rewrite(path / "plain", path / "model", name, told)
    return both


def test_kimi_k25(tmp_path: Path) -> None:
    """The text is transformers'; quantized, the tower and its projector are kept, and transformers, which splits the
    tower's joint projections, runs the same text."""
    import transformers

    import onegraph.integrations.hf  # noqa: F401

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    hf, row = save_kimi(tmp_path, **sizes), [token % 120 for token in tokens(24)]  # no image among them
    assert (logits_of(tmp_path / "model", row) - truth(hf, row)).abs().max() < 1e-4
    save_tokenizer(tmp_path / "model")
    quantize(
        tmp_path / "model", tmp_path / "out", bits=4, recipe="quick", tokens=128, sequence=32,
        calibration=" ".join(map(str, range(400))), device="cpu",
    )  # fmt: skip
    source, out = Checkpoint.open(tmp_path / "model"), Checkpoint.open(tmp_path / "out")
    assert skipped(out.names) == skipped(source.names) == {"mm_projector": 6, "vision_tower": 17}
    assert all(torch.equal(source.tensor(name), out.tensor(name)) for name in source.names if is_other(name))
    assert "language_model.model.layers.1.mlp.experts.gate_up_proj.codes" in out
    got = logits_of(tmp_path / "out", row)
    made, told = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tower = made.model.vision_tower.state_dict()
    assert all(torch.equal(tensor, tower[name]) for name, tensor in hf.model.vision_tower.state_dict().items())
    assert (truth(made, row) - got).abs().max() < 1e-3 * got.abs().max()
    assert (truth(made.dequantize(), row) - got).abs().max() < 1e-3 * got.abs().max()
