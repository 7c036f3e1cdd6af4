"""LoRA of the real peft on coded layers: injected, trained with transformers' Trainer, saved, loaded, merged."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import onegraph.integrations.hf  # noqa: F401  registers the method
from models import save_e8p
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.integrations.hf.modules import CodedLinear
from onegraph.models.load import load_decoder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # noqa: E402

TOKENS = torch.tensor([[5, 17, 99, 4, 3, 2, 1, 0, 130, 7]])
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "model"
    save_e8p("qwen2", folder, rates={"bits": 4})
    return folder


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module")
def trained(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """After one epoch of the Trainer on one text, and what was saved."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = peft.get_peft_model(load(path), peft.LoraConfig(**CONFIG))
    before = logits(model)
    rows = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 4
    how = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, num_train_epochs=2, learning_rate=2e-2, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model=model, args=how, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model.eval()
    model.save_pretrained(folder / "adapter")
    return model, before, losses, folder / "adapter"


def test_an_adapter_starts_as_nothing_and_learns(path: Path, trained: Any) -> None:
    model, before, losses, _ = trained
    torch.testing.assert_close(before, logits(load(path)))
    assert losses[-1] < 0.9 * losses[0], losses
    coded = [module for module in model.modules() if isinstance(module, CodedLinear)]
    assert coded
    assert not any(list(module.parameters()) for module in coded), "codes are not trained"
    assert {"lora_A" in name or "lora_B" in name for name, p in model.named_parameters() if p.requires_grad} == {True}


def test_it_is_saved_alone_and_loaded_again(path: Path, trained: Any) -> None:
    model, before, _, folder = trained
    assert {file.name for file in folder.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    again = peft.PeftModel.from_pretrained(load(path), folder)
    torch.testing.assert_close(logits(again), logits(model))
    assert (logits(again) - before).abs().max() > 0.1
    with again.disable_adapter():
        torch.testing.assert_close(logits(again), before)


def test_merging_decodes_and_unmerging_gives_the_codes_back(path: Path, trained: Any) -> None:
    model, _, _, folder = trained
    again = peft.PeftModel.from_pretrained(load(path), folder)
    coded = {id(module) for module in again.modules() if isinstance(module, CodedLinear)}
    again.merge_adapter()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-4)
    again.unmerge_adapter()
    assert {id(module) for module in again.modules() if isinstance(module, CodedLinear)} == coded
    torch.testing.assert_close(logits(again), logits(model))


def test_a_merged_model_is_saved_dense(path: Path, trained: Any, tmp_path: Path) -> None:
    model, _, _, folder = trained
    merged = peft.PeftModel.from_pretrained(load(path), folder).merge_and_unload().dequantize()
    assert not any(isinstance(module, CodedLinear) for module in merged.modules())
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not getattr(plain, "is_quantized", False)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


def test_what_peft_saved_runs_in_the_engine(path: Path, trained: Any) -> None:
    model, _, _, folder = trained
    prompt = TOKENS[0].tolist()
    with Checkpoint.open(path) as checkpoint:
        own = load_decoder(checkpoint, "cpu", torch.float32, adapters={"a": folder})
    engine = Engine(own, max_batch=2, max_context=32)
    asked = [SamplingParams(max_tokens=8, adapter=name) for name in ("a", None)]
    found = engine.generate([prompt] * 2, asked)
    for tokens, off in zip(found, (False, True), strict=True):
        with model.disable_adapter() if off else nullcontext():
            made = model.generate(input_ids=TOKENS, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert tokens == made[0, len(prompt) :].tolist()
    assert found[0] != found[1], "the case would not show an adapter"


def test_codes_pass_the_gradient_of_their_input_on(path: Path) -> None:
    """As on a GPU, where the weight is not decoded beforehand."""
    model = load(path)
    layer = next(module for module in model.modules() if isinstance(module, CodedLinear))
    x = torch.randn(3, layer.in_features, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(x).square().sum(), x)
    layer.dense = None
    (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not layer(x.detach()).requires_grad
