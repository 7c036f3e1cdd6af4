"""What does not fit into memory is refused before it is made, with the sums."""

from pathlib import Path

import pytest
import torch

from models import save_e8p, save_hf
from onegraph.engine.engine import Engine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import parse_kv
from onegraph.models import memory
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.loader import Loader

CPU = torch.device("cpu")


def load(path: Path, *, decode: bool = True) -> Llama:
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, "cpu", torch.float32, decode=decode)


def has(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device, reserve=0: nbytes)
    monkeypatch.setattr(memory, "system_memory", lambda: nbytes)


@pytest.mark.parametrize("kv", [None, "turboquant:4"])
def test_a_cache_is_refused_by_the_byte(kv: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf("llama", tmp_path / "model", head_dim=64)
    model = load(tmp_path / "model")
    sizes = {"rows": 3, "pages": 31, "page_size": 16, "pages_per_row": 10, "kv": parse_kv(kv or "exact")}
    needed = model.new_cache(**sizes).nbytes
    has(monkeypatch, needed)
    assert model.new_cache(**sizes).nbytes == needed
    has(monkeypatch, needed - 1)
    with pytest.raises(
        ValueError, match=r"the cache takes .* GB on cpu \(3 sequences, 480 tokens of .* kB\); .* are free"
    ) as e:
        Engine(model, max_batch=3, max_context=160, page_size=16, kv=kv)
    assert ("turboquant:4" in str(e.value)) == (kv is None)


@pytest.mark.parametrize("variant", ["e8p", "mixtral", "gpt_oss"])
def test_weights_are_refused_by_the_byte(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    save_e8p("smollm2", path, rates={"bits": 3}) if variant == "e8p" else save_hf(variant, path)
    model = load(path, decode=False)
    taken = sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    with Checkpoint.open(path) as checkpoint:
        loader = Loader(checkpoint, LlamaConfig.from_dict(checkpoint.config), torch.float32)
        weights, beside = sum(loader.device_bytes().values()), max(loader.unit_bytes)
    assert 0.5 * taken < weights <= 1.01 * taken
    has(monkeypatch, weights + beside)
    load(path, decode=False)
    has(monkeypatch, weights - 1)
    with pytest.raises(ValueError, match=r"the weights take [\d.]+ GB on cpu, and [\d.]+ more while they are read"):
        load(path, decode=False)


def test_a_cpu_bounds_caches_and_not_weights_which_are_read_where_they_lie() -> None:
    assert memory.free_memory(CPU) > 1 << 40
    assert 0 < memory.free_cache_memory(CPU) < 1 << 45


def test_a_cache_is_held_against_what_the_machine_has(tmp_path: Path) -> None:
    save_hf("llama", tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"the cache takes .* GB on cpu \(9000000 sequences, .* take fewer or shorter sequences"
    ):
        Engine(load(tmp_path / "model"), max_batch=9_000_000, max_context=160)


def test_a_gpu_has_what_is_free_unused_and_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 of 80 free to the driver; of torch's own 6 held, 4 used; then a bound of a fifth."""
    for name, value in {"mem_get_info": (70, 80), "memory_allocated": 4, "memory_reserved": 6}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for fraction, free in ((1.0, 72), (0.2, 12), (0.01, 0)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, f=fraction: f)
        assert memory.free_memory(torch.device("cuda", 0)) == free
    assert memory.gpu_memory(torch.device("cuda", 0)) == 80
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    assert memory.free_memory(torch.device("cuda", 0), reserve=70) == 2
