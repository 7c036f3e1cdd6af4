"""Qwen3.5 as it is published: a text model beside a tower for images, with a draft layer; run, quantized, drafted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models import Decoder, hf_model
from onegraph.api.llm import LLM
from onegraph.api.memory import Memory
from onegraph.api.quantize import quantize
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models.llama import Llama
from onegraph.nn.moe import MoE
from test_mtp import Reference
from test_wrapper import save_tokenizer, tokens, truth

EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 128, "patch_size": 4}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 4}
NEVER = "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "mtp.", "visual", "mlp.gate.", "shared_expert_gate"


def save(variant: str, path: Path) -> Any:
    """A multimodal checkpoint under the published names, its experts in stacks; the text model."""
    import transformers

    text = hf_model(variant, **WIDE, **({} if variant == "qwen3_5" else EXPERTS))
    kind = "Qwen3_5" if variant == "qwen3_5" else "Qwen3_5Moe"
    config = getattr(transformers, f"{kind}Config")(text_config=text.config.to_dict(), vision_config=EYES)
    both = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    tensors = both.state_dict() | Reference(text).tensors(0)
    told = config.to_dict()
    told["text_config"] |= {
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32",
        "attn_output_gate": True, "full_attention_interval": 4,
    }  # fmt: skip
    write_checkpoint(path, told, [(name, tensor.contiguous()) for name, tensor in tensors.items()])
    save_tokenizer(path)
    return text


def logits_of(path: Path, row: list[int], decode: bool = True) -> torch.Tensor:
    """decode: linears are dense; else experts in codes hold the shared one, of which 16 tokens at once are few."""
    with Checkpoint.open(path) as checkpoint:
        model = Llama.load(checkpoint, decode=decode)
    halves = [block.mlp for block in model.blocks if isinstance(block.mlp, MoE)]
    assert decode or all(half.together for half in halves)
    decoder = Decoder(model, rows=1, max_context=len(row))
    return torch.cat([decoder.feed([row[:16]])[0], decoder.feed([row[16:]])[0]])


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_a_published_model_is_run_quantized_and_drafted(variant: str, tmp_path: Path) -> None:
    text, row = save(variant, tmp_path / "m"), tokens(24)
    names = Checkpoint.open(tmp_path / "m").names
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in names
    assert any(name.startswith("model.visual.") for name in names)
    assert (logits_of(tmp_path / "m", row) - truth(text, row)).abs().max() < 1e-4
    quantize(
        tmp_path / "m", tmp_path / "q", bits=4, recipe="quick", tokens=256, sequence=64, device="cpu",
        calibration=" ".join(str(i * 7 % 131) for i in range(600)),
    )  # fmt: skip
    coded = [name for name in Checkpoint.open(tmp_path / "q").names if name.endswith(".codes")]
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.codes" in coded
    assert not [name for name in coded if any(part in name for part in NEVER)]
    got, want = logits_of(tmp_path / "q", row), truth(text, row)
    assert (got - want).norm() < 0.75 * want.norm()
    torch.testing.assert_close(logits_of(tmp_path / "q", row, decode=False), got, atol=1e-4, rtol=1e-4)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    for path in (tmp_path / "m", tmp_path / "q"):
        told: list[Memory] = []
        with LLM(path, device="cpu", dtype="float32", max_context=64, on_memory=told.append) as llm:
            plain = llm.generate("1 2 3 5 8 13", params).text
            assert llm.skipped.keys() == {"model.visual", "mtp"}
        with LLM(
            path, device="cpu", dtype="float32", max_context=64, draft="mtp", draft_tokens=2, on_memory=told.append
        ) as llm:
            assert llm.generate("1 2 3 5 8 13", params).text == plain
            assert llm.stats.drafted_tokens
            speculation = llm.engine.executor.speculation
            assert speculation is not None
            drafter: Any = speculation.drafter
        own = sum(tensor.nbytes for name, tensor in drafter.head.named_buffers() if not name.endswith((".cos", ".sin")))
        assert told[1].weights - told[0].weights == pytest.approx(own, rel=0.01)
        each = sum(tensor[0].nbytes for tensor in (*drafter.cache.keys, *drafter.cache.values)) // 16
        assert told[1].cache - told[0].cache == each * told[0].tokens


def test_nvfp4_leaves_what_is_never_rounded(tmp_path: Path) -> None:
    text, row = save("qwen3_5", tmp_path / "m"), tokens(24)
    quantize(tmp_path / "m", tmp_path / "q", format="nvfp4", device="cpu")
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        coded = [name for name in checkpoint.names if name.endswith(".weight_scale_2")]
    assert len(coded) == 3 * 3 + 4 + 4 * 3
    assert not [name for name in coded if any(part in name for part in NEVER)]
    got, want = logits_of(tmp_path / "q", row), truth(text, row)
    assert (got - want).norm() < 0.75 * want.norm()
