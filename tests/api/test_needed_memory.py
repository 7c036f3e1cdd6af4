"""What a model takes is known before it is loaded, and the default cache fits the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deepseek
from eagle import net_of, write_head
from fuzz import tiny
from models import save_hf
from onegraph import LLM
from onegraph.api import memory
from onegraph.api.memory import Memory
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import parse_kv
from onegraph.models import shares
from onegraph.models.config import LlamaConfig
from onegraph.models.eagle import EagleHead
from onegraph.models.expert_memory import ExpertMemory
from onegraph.models.llama import Llama, config_of
from onegraph.models.loader import Loader
from onegraph.models.ranks import Ranks
from test_e8p_experts import checkpoint_of
from test_serve_adapters import write_adapter
from test_wrapper import save_tokenizer

KIMI = Path(__file__).parents[1] / "models" / "configs" / "Kimi-Linear-48B-A3B-Instruct.json"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("memory") / "tiny")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_is_told_is_what_is_taken(path: Path, dtype: str) -> None:
    told: list[Memory] = []
    with LLM(path, device="cpu", max_num_seqs=3, max_model_len=96, dtype=dtype, on_memory=told.append) as llm:
        weights = sum(tensor.nbytes for _, tensor in llm.engine.model.named_buffers())
        (found,) = told
        assert found.weights == pytest.approx(weights, rel=0.25), "tables of positions are not weights"
        cache: Any = llm.engine.executor.cache
        pages = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
        assert found.tokens == 3 * 96
        assert found.cache == pages - pages // llm.engine.executor.sizes.pages, "all but the sentinel's page"


def told_and_taken(path: Path, dtype: str = "float32", **how: Any) -> tuple[Memory, Any]:
    """What is told, and the model that was loaded then."""
    told: list[Memory] = []
    with LLM(path, device="cpu", max_num_seqs=3, max_model_len=96, dtype=dtype, on_memory=told.append, **how) as llm:
        return told[0], llm.engine


@pytest.mark.parametrize("kind", ["model", "eagle"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_drafts_is_in_the_sums(path: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    method = str(tiny.write_model(tmp_path / "other", seed=3))
    if kind == "eagle":
        with Checkpoint.open(path) as checkpoint:
            whole = Llama.load(checkpoint, max_context=96)
        layers, vocabulary = (0, 0, 1), torch.arange(whole.config.vocab_size - 8)
        method = f"eagle:{write_head(tmp_path / 'head', net_of(whole, layers, vocabulary), layers, vocabulary)}"
    alone, _ = told_and_taken(path, dtype)
    both, engine = told_and_taken(path, dtype, speculative=method)
    drafter = engine.executor.speculation.drafter
    module = drafter.model if kind == "model" else drafter.head
    weights = sum(tensor.nbytes for name, tensor in module.named_buffers() if not name.endswith((".cos", ".sin")))
    assert both.weights - alone.weights == pytest.approx(weights, rel=0.02)
    pages = sum(tensor.nbytes for tensor in (*drafter.cache.keys, *drafter.cache.values))
    assert both.cache - alone.cache == pages - pages // engine.executor.sizes.pages
    assert both.tokens == alone.tokens


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_of_what_drafts_a_rank_counts_its_share(
    path: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a head's layer and output head on two ranks, and half of the heads of keys."""
    method, cpu = str(path), torch.device("cpu")
    with Checkpoint.open(path) as checkpoint:
        if kind == "eagle":
            whole = Llama.load(checkpoint, max_context=96)
            layers, vocabulary = (0, 0, 1), torch.arange(whole.config.vocab_size - 8)
            method = f"eagle:{write_head(tmp_path / 'head', net_of(whole, layers, vocabulary), layers, vocabulary)}"

        def needed(speculative: str | None) -> Memory:
            found = memory.needed_memory(
                checkpoint, cpu, torch.float32, None, None, rows=3, context=96, tokens=None, gpus=2,
                speculative=speculative,
            )  # fmt: skip
            assert found is not None
            return found

        alone, all_of_it = needed(None), needed(method)
        monkeypatch.setattr(shares, "EXCHANGE_S", 0.0)
        shared = needed(method)
        assert 2 * (shared.cache - alone.cache) == all_of_it.cache - alone.cache > 0
        if kind == "model":
            assert shared.weights == 2 * alone.weights, "it drafts for itself"
            return
        ranks = Ranks.load(checkpoint, ["cpu"] * 2, max_context=96)
    with Checkpoint.open(tmp_path / "head") as checkpoint:
        heads = [EagleHead.load(checkpoint, rank) for rank in ranks.ranks]
    buffers = [each for head in heads for each in head.named_buffers()]
    taken = sum(tensor.nbytes for name, tensor in buffers if not name.endswith((".cos", ".sin"))) / 2
    assert shared.weights - alone.weights == pytest.approx(taken, rel=0.02), "tokens go to ranks in blocks of 128"
    assert all_of_it.weights - alone.weights > 1.2 * taken


def test_experts_on_the_host_leave_more_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_of("qwen3_moe", tmp_path / "m", 4)
    cuda = torch.device("cuda")
    sizes: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "exact", "max_num_seqs": 8, "max_model_len": 256}
    sizes |= {"kv_cache_tokens": None, "gpus": 1}
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        config = config_of(checkpoint)
        size = sum(Loader(checkpoint, config, torch.bfloat16).expert_bytes.values()) * 7 // 8
        experts = ExpertMemory(Loader(checkpoint, config, torch.bfloat16), config, size, cuda)
        monkeypatch.setattr(memory, "free_cache_memory", lambda device: 1_000_000)
        all_there, some = (
            memory.plan_load(checkpoint, cuda, **sizes, expert_memory=given).memory for given in (None, size / 1e9)
        )
    assert all_there is not None
    assert some is not None
    assert not experts.fits
    assert experts.device_bytes <= size
    assert all_there.weights - some.weights == experts.host_bytes - experts.device_bytes > 0
    assert some.tokens > all_there.tokens
    assert (all_there.experts, some.experts) == (0, experts.host_bytes)
    assert " and experts " in str(some)


def test_experts_and_prefixes_share_the_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_of("qwen3_moe", tmp_path / "m", 4)
    cuda, free = torch.device("cuda"), 1_000_000
    sizes: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "exact", "max_num_seqs": 8, "max_model_len": 256}
    sizes |= {"kv_cache_tokens": None, "gpus": 1}
    monkeypatch.setattr(memory, "free_cache_memory", lambda device: free)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        loader = Loader(checkpoint, config_of(checkpoint), torch.bfloat16)
        size = sum(loader.expert_bytes.values()) * 7 // 8 / 1e9
        prefixes = 0.99 * free / 2**30
        memory.plan_load(checkpoint, cuda, **sizes, kv_offloading_size=prefixes)
        with pytest.raises(ValueError, match=r"GiB of host memory are free beside 0\.00 GiB of experts: allowed is"):
            memory.plan_load(checkpoint, cuda, **sizes, kv_offloading_size=prefixes, expert_memory=size)


def test_prefixes_that_are_not_shared_are_refused_before_loading(path: Path) -> None:
    with pytest.raises(ValueError, match="kv_offloading_size: got 1; prefix caching is unsupported with batch_inv"):
        LLM(path, device="cpu", kv_offloading_size=1, batch_invariant=True)


def test_what_drafts_leaves_less_to_the_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = told_and_taken(path)
    free = alone.weights + 8 * alone.cache
    monkeypatch.setattr(memory, "free_cache_memory", lambda device: free)
    assert told_and_taken(path)[0].tokens == 3 * 96
    less, engine = told_and_taken(path, speculative=str(path))
    assert less.tokens < 3 * 96 // 2 + 16, "of the same size, with a cache of the same size"
    assert engine.executor.sizes.pages == 1 + -(-less.tokens // 16)


def test_adapters_are_in_the_sums(path: Path, tmp_path: Path) -> None:
    """Slots for two and for none, of the larger rank, over joined linears."""
    adapters = {name: write_adapter(tmp_path / name, i) for i, name in enumerate(("red", "blue"))}
    alone, _ = told_and_taken(path)
    both, engine = told_and_taken(path, adapters=adapters)
    own = [tensor.nbytes for name, tensor in engine.model.named_buffers() if name.endswith((".down", ".up"))]
    assert both.weights - alone.weights == sum(own) > 0
    (tmp_path / "blue" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: cannot be read"):
        told_and_taken(path, adapters=adapters)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("NGRAM", "speculative: got 'NGRAM'; allowed are 'ngram'"),
        ("mtp", "speculative: 'mtp' are the draft layers of"),
        ("eagle:", "speculative: 'eagle:' names no head"),
        ("nowhere", "speculative: nowhere"),
    ],
)
def test_what_cannot_draft_is_refused_as_such(path: Path, method: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        told_and_taken(path, speculative=method)


def test_the_default_cache_fits_what_is_free(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Memory] = []
    with LLM(path, device="cpu", max_num_seqs=4, max_model_len=96, on_memory=told.append) as llm:
        assert llm.engine.executor.sizes.pages == 1 + 4 * 96 // 16
    each = told[0].cache // told[0].tokens
    for room, tokens in ((200, 200), (10, 96)):
        free = told[0].weights + 8 * room * each
        monkeypatch.setattr(memory, "free_cache_memory", lambda device, free=free: free)
        with LLM(path, device="cpu", max_num_seqs=4, max_model_len=96, on_memory=told.append) as llm:
            assert told[-1].tokens == tokens
            assert llm.engine.executor.sizes.pages == 1 + -(-tokens // 16)
            assert [len(each.token_ids) > 0 for each in llm.generate(["the", "a", "in", "12"], max_tokens=60)] == [
                True
            ] * 4
        with LLM(path, device="cpu", max_num_seqs=4, max_model_len=96, kv_cache_tokens=300) as llm:
            assert llm.engine.executor.sizes.pages == 1 + 19, "what is asked for is taken"


class Gpus:
    """GPUs of so many bytes each, of which so many are free, and `LLM`'s plan for a checkpoint there."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, total: int, *free: int) -> None:
        self.path, self.free = path, free or (total,)
        monkeypatch.setattr(memory, "free_cache_memory", lambda device: self.free[device.index or 0])
        monkeypatch.setattr(memory, "gpu_memory", lambda device: total)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.free))

    def plan(self, share: float | None, **how: Any) -> Memory:
        sizes: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "exact", "max_num_seqs": 2, "gpus": 1}
        sizes |= {"max_model_len": 96, "kv_cache_tokens": None, "gpu_memory_utilization": share}
        with Checkpoint.open(self.path) as checkpoint:
            found = memory.plan_load(checkpoint, torch.device("cuda"), **sizes | how).memory
        assert found is not None
        return found


GB = 10**9


def test_a_share_of_the_gpu_is_filled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights, cache, what drafts and 750 MB for CUDA, whatever the sequences need; by default they decide."""
    gpus = Gpus(path, monkeypatch, 10 * GB)
    assert gpus.plan(None).tokens == 2 * 96
    for share in (0.1, 0.5, 1):
        for how in ({}, {"speculative": str(path)}, {"max_num_seqs": 200}, {"kv_cache_dtype": "turboquant:4"}):
            if "kv_cache_dtype" in how:
                save_hf("smollm2", path.parent / "wide", head_dim=64)
                gpus.path = path.parent / "wide"
            found = gpus.plan(share, **how)
            gpus.path = path
            taken = found.weights + found.cache + memory.CUDA_BYTES
            assert 0 <= share * 10 * GB - taken < found.cache / found.tokens + 1
            assert found.fits
            memory.check_share(found, share)


def test_a_share_counts_experts_on_the_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_of("qwen3_moe", tmp_path / "m", 4)
    gpus = Gpus(tmp_path / "m", monkeypatch, GB)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        size = sum(Loader(checkpoint, config_of(checkpoint), torch.bfloat16).expert_bytes.values()) * 7 // 8 / 1e9
    all_there, some = gpus.plan(0.8), gpus.plan(0.8, expert_memory=size)
    assert some.experts > 0
    assert some.tokens > all_there.tokens
    assert abs(some.weights + some.cache - all_there.weights - all_there.cache) <= some.cache / some.tokens


def test_a_share_is_of_each_gpu_and_the_fullest_one_decides(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(path, monkeypatch, 10 * GB, 9 * GB, 3 * GB)
    alone, both = gpus.plan(0.5), gpus.plan(0.5, gpus=2)
    assert both.weights < alone.weights
    assert both.tokens > 1.9 * alone.tokens, "each has half of the heads"
    assert (alone.free, both.free) == (9 * GB, 3 * GB)
    assert (alone.fits, both.fits) == (True, False)
    with pytest.raises(
        ValueError, match=r"gpu_memory_utilization: got 0\.5; weights and cache take 4\.25 GB, and "
    ) as e:
        memory.check_share(both, 0.5)
    assert str(e.value).endswith(
        "and 3.00 GB of the GPU's memory are free: give 0.37 or less, or end what else runs there"
    )
    memory.check_share(gpus.plan(0.37, gpus=2), 0.37)
    assert gpus.plan(0.5, gpus=4).free == 3 * GB, "that there are two is said while loading"


def test_a_share_that_holds_no_sequence_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(path, monkeypatch, GB)
    says = (
        r"gpu_memory_utilization: got 0\.5, which is 500\.0 MB; weights take .* and a cache of 96 tokens .* kB: give 0"
    )
    with pytest.raises(ValueError, match=says + r"\.76 or more, or a smaller max_model_len$"):
        gpus.plan(0.5)
    assert gpus.plan(0.76).tokens >= 96
    with pytest.raises(ValueError, match=r"kB: take fewer bits, more GPUs, or a smaller max_model_len$"):
        Gpus(path, monkeypatch, GB // 2).plan(1)


def test_a_share_that_is_not_for_this_device_or_cache(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^gpu_memory_utilization: got 0\.9 on a CPU; it is for GPUs: leave it out$"):
        LLM(path, device="cpu", gpu_memory_utilization=0.9)
    gpus = Gpus(path, monkeypatch, 10 * GB)
    with pytest.raises(ValueError, match=r"^gpu_memory_utilization and kv_cache_tokens: got 0\.9 and 4096; both size"):
        gpus.plan(0.9, kv_cache_tokens=4096)
    deepseek.save_hf("flash", tmp_path / "v4")
    gpus.path = tmp_path / "v4"
    with pytest.raises(
        ValueError, match=r"^gpu_memory_utilization: got 0\.9; the cache of DeepSeek-V4 has the size of"
    ):
        gpus.plan(0.9)


def plan_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tokens: int, free: int = GB) -> list[tuple[float | None, Memory]]:
    """`LLM` on a CPU takes its share for one that leaves a GPU's cache so many tokens. The shares, and what is told."""
    told: list[tuple[float | None, Memory]] = []

    def plan(*about: Any, gpu_memory_utilization: float | None, **how: Any) -> memory.LoadPlan:
        found = memory.plan_load(*about, **how)
        made = found.memory
        assert made is not None
        if gpu_memory_utilization is not None:
            more = (tokens - made.tokens) * made.token
            made = replace(made, tokens=tokens, cache=made.cache + more, free=free)
        told.append((gpu_memory_utilization, made))
        return replace(found, memory=made)

    monkeypatch.setattr("onegraph.api.llm.plan_load", plan)
    return told


HOW: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 96}


def test_the_cache_has_the_size_of_the_share(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pages than two full sequences have."""
    told = plan_for_a_gpu(monkeypatch, 1000)
    with LLM(path, **HOW, gpu_memory_utilization=0.25) as llm:
        assert llm.engine.executor.sizes.pages == 1 + -(-1000 // 16)
    with LLM(path, **HOW) as llm:
        assert llm.engine.executor.sizes.pages == 1 + 2 * 6
    assert [share for share, _ in told] == [0.25, None]


def test_a_share_that_is_not_free_is_an_error_before_loading(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_for_a_gpu(monkeypatch, 1000, free=1000)
    monkeypatch.setattr("onegraph.api.llm.load_decoder", None)
    with pytest.raises(ValueError, match=r"^gpu_memory_utilization: got 0\.25; weights and cache take"):
        LLM(path, **HOW, gpu_memory_utilization=0.25)


@pytest.mark.parametrize(
    ("variant", "changes", "kv"), [("qwen3_next", {}, "exact"), ("qwen2", {"head_dim": 64}, "turboquant:4")]
)
def test_what_only_the_loaded_model_says_leaves_less_of_the_share(
    variant: str, changes: dict[str, Any], kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states, and layers that biases keep exact."""
    save_hf(variant, tmp_path, **changes)
    save_tokenizer(tmp_path)
    told = plan_for_a_gpu(monkeypatch, 4000)
    monkeypatch.setattr(Llama, "biased", [0])
    with LLM(tmp_path, **HOW, kv_cache_dtype=kv, gpu_memory_utilization=0.5) as llm:
        cache, pages = llm.engine.executor.cache, llm.engine.executor.sizes.pages
    ((_, planned),) = told
    page = cache.nbytes // pages
    assert planned.cache - 2 * page < cache.nbytes - page <= planned.cache + page
    assert pages * 16 < 0.99 * 4000


def test_states_that_leave_no_sequence_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf("qwen3_next", tmp_path)
    save_tokenizer(tmp_path)
    plan_for_a_gpu(monkeypatch, 96)
    says = r"got 0\.5, which leaves .* beside the weights; a cache of 96 tokens and the recurrent states of 2 sequences"
    with pytest.raises(
        ValueError, match=rf"^gpu_memory_utilization: {says} take .*: give 0\.51 or more, or a smaller max_num_seqs"
    ):
        LLM(tmp_path, **HOW, gpu_memory_utilization=0.5)


def test_the_sums_are_a_line() -> None:
    assert str(Memory(269_100_000, 1_510_000_000, 32768, None)) == (
        "memory: weights 269.1 MB, KV cache 1.51 GB for 32768 tokens"
    )
    assert str(Memory(1 << 20, 1 << 20, 32, 3_000_000)).endswith("; 3.0 MB are free")
    assert str(Memory(1 << 20, 1 << 20, 32, None, 2_000_000)).endswith(
        "for 32 tokens, offloaded prefixes 2.0 MB of host memory"
    )


def test_memory_for_offloaded_prefixes_is_taken_from_a_cpus(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = told_and_taken(path)
    monkeypatch.setattr(memory, "free_cache_memory", lambda device: 1 << 30)
    both, engine = told_and_taken(path, kv_offloading_size=0.25)
    assert (both.free, both.offloaded) == (3 << 28, 1 << 28)
    page = alone.cache // alone.tokens * 16
    assert len(engine.executor.host_pages) == (1 << 28) // page
    with pytest.raises(ValueError, match=r"kv_offloading_size: got 1.5 GiB; 1.00 GiB of host memory are free"):
        told_and_taken(path, kv_offloading_size=1.5)


@pytest.mark.parametrize("variant", ["llama", "deepseek_v32"])
def test_bytes_of_a_token_are_those_of_the_cache(variant: str, tmp_path: Path) -> None:
    """Indexers' keys count; each rank has latents whole, and heads of keys and values that ranks repeat."""
    save_hf(variant, tmp_path)
    sizes: dict[str, int] = {"rows": 2, "page_size": 16, "pages_per_row": 6}
    with Checkpoint.open(tmp_path) as checkpoint:
        model = Llama.load(checkpoint, "cpu", torch.float32)
    one, two = (model.new_cache(pages=pages, **sizes).nbytes for pages in (8, 9))
    about: dict[str, Any] = {"rows": 2, "context": 96}
    given = model.config, torch.device("cpu"), torch.float32, None
    assert memory._cache_bytes(*given, **about, gpus=1) == ((two - one) // 16, one - 8 * (two - one))
    each = {count: memory._cache_bytes(*given, **about, gpus=count)[0] for count in (1, 2, 4)}
    heads = {count: 1 if variant == "deepseek_v32" else min(count, model.config.kv_heads) for count in each}
    assert {count: each[1] // share for count, share in heads.items()} == each


def test_layers_that_do_not_attend_have_no_bytes_of_a_token() -> None:
    config = LlamaConfig.from_dict(json.loads(KIMI.read_text()))
    each, _ = memory._cache_bytes(config, torch.device("cpu"), torch.float32, None, rows=1, context=32, gpus=1)
    assert config.latent is not None
    assert each == config.attention_layers * config.latent.width * 4 < config.layers * config.latent.width * 4


@pytest.mark.parametrize("kv", ["exact", "turboquant:4"])
@pytest.mark.parametrize("size", [1.0, 24.0])
def test_what_fits_a_gpu_is_what_llm_would_give_it(
    kv: str, size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many full sequences as the default cache of a GPU with that memory has, and not one more."""
    path, gpu, free = tmp_path / "model", torch.device("cuda"), int(size * 1e9) - memory.CUDA_BYTES
    save_hf("smollm2", path, head_dim=64)
    monkeypatch.setattr(memory, "free_cache_memory", lambda device: free)
    with Checkpoint.open(path) as checkpoint:
        found = memory.fit(checkpoint, int(size * 1e9), dtype=torch.bfloat16, kv=parse_kv(kv), context=96)

        def tokens(rows: int) -> int:
            needed = memory.needed_memory(
                checkpoint, gpu, torch.bfloat16, None, parse_kv(kv), rows=rows, context=96, tokens=None, gpus=1
            )
            assert needed is not None
            assert needed.weights == found.weights
            return needed.tokens

        assert found.sequences > 100
        assert tokens(found.sequences) == found.sequences * 96
        assert tokens(found.sequences + 1) < (found.sequences + 1) * 96
        assert found.longest == config_of(checkpoint).max_positions


def test_a_gpu_that_is_too_small_or_a_cache_that_cannot_be(path: Path, tmp_path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        none = memory.fit(checkpoint, memory.CUDA_BYTES, dtype=torch.bfloat16, kv=None, context=96)
        assert (none.sequences, none.longest) == (0, 0)
        with pytest.raises(ValueError, match="context: got 10000; the model allows 1 to 256"):
            memory.fit(checkpoint, 1 << 34, dtype=torch.bfloat16, kv=None, context=10000)
    save_hf("deepseek_v3", tmp_path / "latent")
    with Checkpoint.open(tmp_path / "latent") as checkpoint:
        exact, fp8 = (
            memory.fit(checkpoint, 1 << 34, dtype=torch.bfloat16, kv=None, context=16, fp8=fp8) for fp8 in (False, True)
        )
        assert fp8.token_bytes < exact.token_bytes
    save_hf("gpt_oss", tmp_path / "sinks")
    with Checkpoint.open(tmp_path / "sinks") as checkpoint, pytest.raises(ValueError, match="attention sinks"):
        memory.fit(checkpoint, 1 << 34, dtype=torch.bfloat16, kv=parse_kv("turboquant:4"), context=16)
