"""Models whose experts stay in host memory: the same tokens, the slots that a budget gives, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import MODES, maker
from models import hf_model
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models import expert_memory
from onegraph.models.llama import Llama, config_of
from onegraph.models.load import load_decoder
from onegraph.models.loader import Loader
from onegraph.nn.expert_cache import CachedExperts
from test_e8p_experts import checkpoint_of

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [7, 1, 8, 2, 8, 1]]
CPU = torch.device("cpu")


def experts_of(path: Path) -> Loader:
    checkpoint = Checkpoint.open(path)
    return Loader(checkpoint, config_of(checkpoint), torch.float32)


def budget(path: Path, slots: int) -> int:
    """Bytes for so many experts of each layer, and one layer."""
    loader = experts_of(path)
    layers: dict[str, int] = {}
    for name, size in loader.expert_bytes.items():
        block = name.split(".")[2]
        layers[block] = layers.get(block, 0) + size
    routed = config_of(loader.checkpoint).routed
    assert routed is not None
    return max(layers.values()) + slots * (sum(layers.values()) // routed.count)


def caches(model: Llama) -> list[CachedExperts]:
    return [module for module in model.modules() if isinstance(module, CachedExperts)]


def dense_checkpoint(variant: str, path: Path) -> None:
    """Experts one by one, as the family publishes them, unquantized."""
    hf_model(variant).save_pretrained(path)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "m"
    checkpoint_of("qwen3_moe", path, 3)
    return path


TEXTS = [
    (prompts, params)
    for params in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=0.9, seed=7))
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[1:2])
]


@pytest.fixture(scope="module")
def wanted(quantized: Path) -> list[list[list[int]]]:
    """What a model with all experts on the device writes for each of TEXTS."""
    with Checkpoint.open(quantized) as checkpoint:
        whole = Llama.load(checkpoint, decode=False)
    with pytest.MonkeyPatch.context() as patch:
        engine = maker("eager", whole, patch, chunk=16)()
        return [engine.generate(*text) for text in TEXTS]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_all_experts_on_the_device(
    mode: str, quantized: Path, wanted: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, whose experts have slots, and rows whose experts do not fit the slots, in turn; greedy and sampled."""
    with Checkpoint.open(quantized) as checkpoint:
        model = Llama.load(checkpoint, decode=False, expert_memory=budget(quantized, 4))
    assert [cache.count for cache in caches(model)] == [9, 9]
    assert {len(cache.resident) for cache in caches(model)} == {4}
    engine = maker(mode, model, monkeypatch, chunk=16)()
    before = [cache.resident.clone() for cache in caches(model)]
    for text, want in zip(TEXTS, wanted, strict=True):
        assert engine.generate(*text) == want
    assert any(not torch.equal(now.resident, was) for now, was in zip(caches(model), before, strict=True))
    for cache in caches(model):  # what slots hold is what they say
        for slots, host in zip(cache._slots, cache._host, strict=True):
            assert torch.equal(slots, host[cache.resident.long()])
        assert len(set(cache.resident.tolist())) == 4


@pytest.mark.parametrize("variant", ["gpt_oss", "qwen3_moe", "glm4_moe", "gemma4_moe", "mixtral"])
def test_every_form_of_experts(variant: str, tmp_path: Path) -> None:
    """One by one or in a stack, with biases, dense; beside shared experts."""
    dense_checkpoint(variant, tmp_path / "m")
    tokens = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        whole = Llama.load(checkpoint)
        model = Llama.load(checkpoint, expert_memory=budget(tmp_path / "m", 3))
    assert caches(model)
    for part in (tokens, tokens[:1, :1]):
        assert torch.equal(model(part, model.dense_attention), whole(part, whole.dense_attention))


def test_the_bytes_are_those_that_are_taken(quantized: Path) -> None:
    size = budget(quantized, 4) + 1
    with Checkpoint.open(quantized) as checkpoint:
        config = config_of(checkpoint)
        loader = Loader(checkpoint, config, torch.float32)
        memory = expert_memory.ExpertMemory(loader, config, size, CPU)
        model = Llama.load(checkpoint, decode=False, expert_memory=size)
    assert (memory.slots, memory.fits) == (4, False)

    def nbytes(tensors: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    found = caches(model)
    assert memory.host_bytes == sum(nbytes(cache._host) for cache in found)
    held = sum(nbytes(cache._slots) for cache in found) + nbytes(found[0]._shared)
    assert memory.device_bytes == held <= size
    assert all(cache.shared is found[0].shared for cache in found)
    every = loader.weight_bytes
    loader.expert_memory = memory
    assert loader.weight_bytes == every - memory.host_bytes + memory.device_bytes
    asked = {name for unit in Loader.units.func(loader) for name in unit}  # type: ignore[attr-defined]
    assert not any(".experts." in name for name in asked)
    assert {name for name in loader.stored.values() if ".experts." not in name} == asked


def test_experts_that_fit_stay_on_the_device(quantized: Path) -> None:
    with Checkpoint.open(quantized) as checkpoint:
        assert not caches(Llama.load(checkpoint, decode=False, expert_memory=1 << 30))


def test_what_cannot_be_is_refused(quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model("qwen3").save_pretrained(tmp_path / "dense")
    none = pytest.raises(ValueError, match=r"expert_memory: got 1 GB; qwen3 has no routed experts: leave it out")
    with Checkpoint.open(tmp_path / "dense") as checkpoint, none:
        Llama.load(checkpoint, expert_memory=10**9)
    with Checkpoint.open(quantized) as checkpoint:
        with pytest.raises(ValueError, match=r"got .* GB; a token uses 3 experts .*: allowed is 0.01 GB and more"):
            Llama.load(checkpoint, expert_memory=budget(quantized, 3) - 1)
        monkeypatch.setattr(expert_memory, "system_memory", lambda: 1000)
        loader = Loader(checkpoint, config_of(checkpoint), torch.float32)
        with pytest.raises(ValueError, match=r"of host memory, and 0.00 GB are free there: free some"):
            expert_memory.ExpertMemory(loader, config_of(checkpoint), budget(quantized, 4), torch.device("cuda"))
        monkeypatch.setattr(expert_memory, "system_memory", lambda: None)
        memory = expert_memory.ExpertMemory(loader, config_of(checkpoint), budget(quantized, 4), torch.device("cuda:0"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
        with pytest.raises(ValueError, match="the kernel that copies experts cannot be had: it is written for compute"):
            memory.empty(4, {"codes": torch.zeros(3)})
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr("onegraph.models.load.check_card", lambda device: None)
        with pytest.raises(ValueError, match="expert_memory: got 1 GB for 'qwen3_moe' on 2 devices; allowed are"):
            load_decoder(checkpoint, "cpu", torch.float32, gpus=2, expert_memory=10**9)
