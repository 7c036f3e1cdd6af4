"""Draft layers (MTP) of DeepSeek-V3 and GLM-4.5 inside the real vLLM, on a CPU: dense as `onegraph quantize` keeps them
and in codes. The drafts are our own draft layer's, and greedy texts are those without drafts."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_generate import PROMPTS, ours, serving, tokens_of
from test_latent_vllm import PUBLISHED, REFERENCE
from test_latent_vllm import SIZES as LATENT

from models import Decoder
from onegraph.formats.checkpoint import Checkpoint
from onegraph.integrations.vllm import config
from onegraph.integrations.vllm.config import OnegraphConfig
from test_mtp import load, save
from test_quant_experts import made, write_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "moe_intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [], "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # sizes, published keys, settings
    "deepseek_v3": (LATENT, PUBLISHED, REFERENCE),
    "glm4_moe": (SIZES, {}, {}),
}
RATES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, head in codes": {"lm_head": 4},
    "codes": {"draft_layers": 4},
    "codes, projection dense": {"draft_layers": 3, "layers": {"*.eh_proj": 16}, "lm_head": 4},
}


def write(path: Path, variant: str, **rates: Any) -> Path:
    """A quantized checkpoint with its draft layer, by the keys of published files."""
    sizes, keys, _ = FAMILIES[variant]
    save(variant, path, **sizes)
    file = path / "model" / "config.json"
    told = json.loads(file.read_text()) | keys | {"num_nextn_predict_layers": 1}
    told.pop("num_mtp_layers", None)
    file.write_text(json.dumps(told))
    write_tokenizer(path / "model")
    made(path, **rates)
    return path / "out"


@torch.inference_mode()
def first_drafts(path: Path, text: list[int]) -> list[int]:
    """What our draft layer names behind each two tokens of a text. vLLM has no embedding beside the first hidden
    state."""
    model, draft = load(path)
    tokens = torch.tensor([text])
    embedded = model.embed(tokens[:, 1:]).index_fill(1, torch.tensor(0), 0)
    cache = Decoder(draft, rows=1, max_context=128, spare=1).cache
    cache.counts.fill_(len(text) - 1)
    hidden = draft.run(draft.inputs(embedded, model(tokens[:, :-1], model.dense_attention)), cache)
    return draft.logits(hidden.normed(draft.norm, draft.config.eps)[0])[0].argmax(-1).tolist()


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("variant", FAMILIES)
def test_drafts(variant: str, rates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five prompts in four rows, two drafts each; then one prompt, whose first drafts are recorded."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    path, settings = write(tmp_path, variant, **RATES[rates]), FAMILIES[variant][2]
    coded = any(".layers.2." in name for name in Checkpoint.open(path).names if name.endswith(".codes"))
    assert coded == ("draft_layers" in RATES[rates])
    propose, seen = SpecDecodeBaseProposer.propose, list[Tensor]()

    def recorded(*args: Any, **keywords: Any) -> Tensor:
        seen.append(found := propose(*args, **keywords))
        return found

    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", recorded)
    drafts = {"method": "mtp", "num_speculative_tokens": 2} | settings
    with serving(path, **settings, speculative_config=drafts) as llm:
        assert tokens_of(llm, PROMPTS, 12) == ours(path, PROMPTS, 12)
        seen.clear()
        (answer,) = tokens_of(llm, PROMPTS[1:2], 12)
    text, at = PROMPTS[1] + answer, len(PROMPTS[1])
    wanted = first_drafts(path, text)
    for drafted in seen:
        if at >= len(text) - 3:
            break
        first, second = drafted[0].tolist()
        assert first == wanted[at - 1]
        at += 1 if first != text[at + 1] else 2 if second != text[at + 2] else 3
    assert at >= len(text) - 3


def test_a_hybrids_draft_layer_loads_in_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next's, whose projection is beside its blocks. test_hybrid.py verifies drafts of it."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from onegraph.integrations.vllm.linear import OnegraphLinearMethod

    save("qwen3_next", tmp_path, **HYBRID)
    write_tokenizer(tmp_path / "model")
    made(tmp_path, draft_layers=4)
    load_model, found = SpecDecodeBaseProposer.load_model, dict[str, Any]()

    def loaded(self: Any, target: Any) -> None:
        load_model(self, target)
        found.update(self.model.named_modules())

    monkeypatch.setattr(SpecDecodeBaseProposer, "load_model", loaded)
    with serving(tmp_path / "out", dtype="bfloat16", speculative_config={"method": "mtp", "num_speculative_tokens": 2}):
        for name in ("model.fc", "model.layers.0.self_attn.qkv_proj"):
            assert isinstance(found[name].quant_method, OnegraphLinearMethod)


def test_a_draft_layer_that_vllm_does_not_run_in_codes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of DeepSeek-V3.2 and GLM-5, whose classes on GPUs are others than DeepSeek-V3's."""
    layer = SimpleNamespace(architectures=["DeepseekV32MTPModel"], num_hidden_layers=2)
    drafts = SimpleNamespace(method="mtp", draft_model_config=SimpleNamespace(hf_config=layer))
    current = SimpleNamespace(speculative_config=drafts)
    monkeypatch.setattr(config, "get_current_vllm_config_or_none", lambda: current)
    known = {"quant_method": "onegraph", "format": "e8p", "format_version": 1, "bits": 4}
    made = OnegraphConfig.from_config(known)
    made.coded = frozenset({"model.layers.1.self_attn.o_proj"})
    assert made.get_quant_method(torch.nn.Module(), "model.layers.0.mlp") is None
    made.coded |= {"model.layers.2.eh_proj"}
    with pytest.raises(ValueError, match=r"layers.2.eh_proj: vLLM's DeepseekV32MTPModel runs no quantized draft layer"):
        made.get_quant_method(torch.nn.Module(), "model.layers.0.mlp")
