"""LoRA adapters in the engine, several in a batch, against transformers with their products added to its weights."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engines import MODES, maker
from models import save_e8p, save_hf
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.draft import NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.models.adapters import read_adapter
from onegraph.models.load import load_decoder
from onegraph.nn.lora import LoraLinear

ADAPTERS: dict[str, tuple[int, float, tuple[str, ...]]] = {  # rank, alpha, modules
    "some": (3, 6.0, ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")),
    "all": (5, 4.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [7, 1, 8, 2, 8, 1, 8, 2, 8], [100, 0]]
NAMES = [None, "some", "all", "some"]


def write_adapter(path: Path, name: str, dense: Any, **changes: Any) -> dict[str, torch.Tensor]:
    """As peft saves it; what it adds to each weight."""
    rank, alpha, modules = ADAPTERS[name]
    generator = torch.Generator().manual_seed(len(name))
    tensors, added = {}, {}
    for key, weight in dense.state_dict().items():
        if key.removesuffix(".weight").endswith(modules):
            layer = f"base_model.model.{key.removesuffix('.weight')}"
            a = torch.randn(rank, weight.shape[1], generator=generator) * 0.3
            b = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
            tensors |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            added[key] = b @ a * alpha / rank
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_dora": False}
    (path / "adapter_config.json").write_text(json.dumps(config | changes))
    return added


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Path, Any]:
    return folder / "plain", save_hf("llama", folder / "plain")


@pytest.fixture(scope="module", params=["llama", "e8p"])
def made(request: pytest.FixtureRequest, folder: Path, plain: Any) -> tuple[Any, dict[str | None, Any]]:
    """Our model with both adapters, and transformers' with each in its weights."""
    at = folder / request.param
    at.mkdir()
    path, dense = plain
    if request.param == "e8p":
        path, dense = at / "m", save_e8p("qwen2", at / "m", rates={"bits": 4})
    oracles: dict[str | None, Any] = {None: dense}
    for name in ADAPTERS:
        oracles[name] = copy.deepcopy(dense)
        with torch.no_grad():
            for key, more in write_adapter(at / name, name, dense).items():
                oracles[name].get_parameter(key).add_(more)
    with Checkpoint.open(path) as checkpoint:
        model = load_decoder(checkpoint, "cpu", torch.float32, adapters={name: at / name for name in ADAPTERS})
    return model, oracles


def greedy(oracle: Any, prompt: list[int], count: int) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = oracle.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def params(names: list[str | None], count: int = 8) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=count, adapter=name) for name in names]


@pytest.mark.parametrize("mode", MODES)
def test_each_sequence_of_a_batch_has_its_own(made: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, oracles = made
    expected = [greedy(oracles[name], prompt, 8) for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    assert expected[1] != greedy(oracles[None], PROMPTS[1], 8), "the case would not show an adapter"
    engine = maker(mode, model, monkeypatch)()
    assert engine.generate(PROMPTS, params(NAMES)) == expected
    names = NAMES[::-1]  # the same graphs, other slots
    expected = [greedy(oracles[name], prompt, 8) for name, prompt in zip(names, PROMPTS, strict=True)]
    assert engine.generate(PROMPTS, params(names)) == expected


def test_pages_are_shared_within_an_adapter_alone(made: Any) -> None:
    model, oracles = made
    engine = Engine(model, max_batch=2, max_context=64, page_size=4, chunk=8)
    prompt = PROMPTS[0] + PROMPTS[2]
    for names in (["some", "all"], [None, "some"]):
        expected = [greedy(oracles[name], prompt, 4) for name in names]
        assert engine.generate([prompt] * 2, params(names, 4)) == expected
    engine.generate([prompt] * 2, params(["all", "all"], 4))
    assert engine.stats.shared_tokens > 0


def test_drafts_are_checked_with_the_adapter(made: Any) -> None:
    model, oracles = made
    engine = Engine(model, max_batch=4, max_context=64, page_size=4, chunk=8, draft=NgramDrafter, draft_tokens=2)
    expected = [greedy(oracles[name], prompt, 12) for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    assert engine.generate(PROMPTS, params(NAMES, 12)) == expected


def test_linears_without_an_adapter_stay_as_they_are(folder: Path, made: Any) -> None:
    model, _ = made
    coded = [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]
    assert coded
    assert not any("lm_head" in name for name in coded)
    with pytest.raises(ArgumentError, match="adapter: got 'other'; allowed are some, all, and None for none"):
        Engine(model, max_batch=1, max_context=16).request([1], SamplingParams(adapter="other"))
    with pytest.raises(ValueError, match="batch_invariant: the model has adapters"):
        Engine(model, max_batch=1, max_context=16, batch_invariant=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; allowed is LORA"),
        ({"use_dora": True}, "use_dora is true; it is not supported"),
        ({"bias": "all"}, 'bias is "all"; it is not supported'),
        ({"use_qalora": True}, "use_qalora is true; it is not supported"),
        ({"from_a_later_peft": {"twist": 1}}, 'from_a_later_peft is {"twist": 1}; it is not supported'),
        (
            {"init_lora_weights": "pissa_niter_4"},
            'init_lora_weights is "pissa_niter_4"; its weights belong to a changed',
        ),
        ({"init_lora_weights": "corda"}, 'init_lora_weights is "corda"; its weights belong to a changed base model'),
        ({"lora_alpha": "big"}, "lora_alpha is 'big'; a number is expected"),
        ({"lora_alpha": 1e12}, "lora_alpha is 1000000000000.0; a number is expected, up to 1e+09"),
        (None, "has no adapter_config.json; give the directory of an adapter that peft saved"),
        ("layer", "changes model.layers.0.mlp.other; allowed are linears of attention and of dense MLPs"),
        ("size", "it belongs to another model"),
        ("nan", "has values that are not finite"),
        ("half", "lora_A and lora_B of 'model.layers.0.self_attn.q_proj' do not fit"),
        ("kind", "is no lora_A or lora_B of a linear"),
        ("rank 0", "lora_A and lora_B of 'model.layers.0.self_attn.q_proj' do not fit"),
    ],
)
def test_adapters_that_are_refused(change: Any, says: str, plain: Any, tmp_path: Path) -> None:
    path, dense = plain
    write_adapter(tmp_path / "a", "some", dense, **(change if isinstance(change, dict) else {}))
    if change is None:
        (tmp_path / "a" / "adapter_config.json").unlink()
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    size = (3, 72), (96, 3)
    tensors = {f"{q}.lora_A.weight": torch.ones(size[0]), f"{q}.lora_B.weight": torch.ones(size[1])}
    if change == "layer":
        tensors = {name.replace("self_attn.q_proj", "mlp.other"): tensor for name, tensor in tensors.items()}
    elif change == "size":
        tensors[f"{q}.lora_A.weight"] = torch.ones(3, 71)
    elif change == "nan":
        tensors[f"{q}.lora_A.weight"][0, 0] = float("nan")
    elif change == "half":
        del tensors[f"{q}.lora_B.weight"]
    elif change == "rank 0":
        tensors = {f"{q}.lora_A.weight": torch.ones(0, 72), f"{q}.lora_B.weight": torch.ones(96, 0)}
    elif change == "kind":
        tensors[f"{q}.lora_magnitude_vector.weight"] = torch.ones(3)
    if isinstance(change, str):
        save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    with Checkpoint.open(path) as checkpoint, pytest.raises(ValueError, match=re.escape(says)) as caught:
        load_decoder(checkpoint, "cpu", torch.float32, adapters={"a": tmp_path / "a"})
    assert isinstance(caught.value, CheckpointError) is (change not in ("layer", "size"))


def test_every_field_that_peft_writes_is_read(plain: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for change in ({}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"lora_dropout": 0.1}):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], **change)
        folder = tmp_path / str(change)
        write_adapter(folder, "some", plain[1])
        config.save_pretrained(folder)
        assert read_adapter(folder, str)


@pytest.mark.gpu
def test_a_captured_step_serves_every_mixture(folder: Path, tmp_path: Path) -> None:
    dense = save_e8p("llama", tmp_path / "m", rates={"bits": 4})
    for name in ADAPTERS:
        write_adapter(tmp_path / name, name, dense)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = load_decoder(checkpoint, "cuda", torch.float16, adapters={name: tmp_path / name for name in ADAPTERS})
    sizes: Any = {"max_batch": 4, "max_context": 64, "page_size": 16, "chunk": 16}
    captured, eager = (Engine(model, capture=capture, **sizes) for capture in (True, False))
    for names in (NAMES, NAMES[::-1], ["all"] * 4, [None] * 4):
        assert captured.generate(PROMPTS, params(names)) == eager.generate(PROMPTS, params(names))
