"""Ranks on real GPUs: the exchange within graphs, the engine's tokens, a rank that is late and one that never comes."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepseek_published as published
from eagle import load_head, net_of, write_head
from gpus import Chains, devices
from models import save_hf
from onegraph.api.drafting import own_layers
from onegraph.engine.draft import ModelDrafter, NgramDrafter, OracleDrafter
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models import shares
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.llama import Llama
from onegraph.models.ranks import Ranks
from onegraph.nn.peers import PeerError, Peers
from onegraph.ops.ranks import part_of
from test_exchange import summed
from test_ranks import PARAMS, text
from test_ranks_drafts import (
    LONG,
    MIXED,
    PROMPTS,
    WIDE,
    asked,
    drafts_like,
    same_everywhere,
    sizes_of,
)
from test_speculate import CODES, TURNS, kept_and_not

pytestmark = pytest.mark.gpu
SIZES = {
    "head_dim": 64,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_sums_and_parts_within_graphs(count: int, dtype: torch.dtype) -> None:
    peers = Peers(devices(count), 8192)
    x = [torch.randn(3, 512, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(count)]
    whole = torch.randn(2, 1000, generator=torch.Generator().manual_seed(99))
    there = [part.to(device) for part, device in zip(x, peers.devices, strict=True)]
    own = [
        whole[:, slice(*part_of(1000, 8, count, i))].contiguous().to(device) for i, device in enumerate(peers.devices)
    ]

    def work(peer: Any) -> list[Tensor]:
        found = [peer.all_reduce(there[peer.index])]
        found += [peer.all_reduce(there[peer.index], found[0]) for _ in range(10)]
        return [*found, peer.all_gather(own[peer.index], 1000, 8)]

    chains = Chains(peers, work)
    for round in range(100):
        chains.replay()
        if round % 33 == 0:
            chains.wait()
            first = summed(x)
            for out in chains.out:
                assert torch.equal(out[0].cpu(), first)
                assert all(torch.equal(each.cpu(), summed(x, first)) for each in out[1:11])
                assert torch.equal(out[11].cpu(), whole)
    chains.wait()
    peers.check()


def test_a_late_rank_is_waited_for_and_a_missing_one_is_named() -> None:
    peers = Peers(devices(2), 8192, patience=0.5)
    x = [torch.randn(1, 512, device=device) for device in peers.devices]
    chains = Chains(peers, lambda peer: [peer.all_reduce(x[peer.index]) for _ in range(5)])
    want = (x[0].cpu() + x[1].cpu()).float()
    for late in (0, 1):
        with torch.cuda.device(late), torch.cuda.stream(chains.streams[late]):
            torch.cuda._sleep(100_000_000)  # some 50 ms
        chains.replay()
        chains.wait()
        assert all(torch.equal(out[-1].cpu(), want) for out in chains.out)
    peers.check()
    started = time.perf_counter()
    chains.replay([0])
    chains.wait()
    assert time.perf_counter() - started < 2.0, "it waited once, not five times"
    with pytest.raises(PeerError, match=r"rank 0 \(cuda:0\) waited for rank 1 \(cuda:1\) at exchange"):
        peers.check()
    assert torch.ones(3, device=peers.devices[0]).sum().item() == 3.0, "the context is alive"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_hf("qwen3", path, **SIZES)
    return path


@pytest.mark.parametrize("kv", [None, "turboquant:4"])
@pytest.mark.parametrize("count", [2, 4])
def test_the_engine_draws_the_tokens_of_one_gpu(folder: Path, count: int, kv: str | None) -> None:
    same_tokens(folder, count, kv)


@pytest.mark.parametrize("variant", ["minimax_m2", "olmo2", "olmo3", "olmoe", "olmo_hybrid"])
def test_a_norm_of_all_heads_is_that_of_one_gpu(variant: str, tmp_path: Path) -> None:
    save_hf(variant, tmp_path, hidden_size=384, **({} if variant == "olmoe" else {"head_dim": 64}))
    same_tokens(tmp_path, 2, None)


def same_tokens(folder: Path, count: int, kv: str | None) -> None:
    prompts = [text(19), text(3, 1), text(8, 2), text(1, 3)]
    sizes: dict[str, Any] = {"max_batch": 3, "max_context": 64, "chunk": 8, "page_size": 16, "kv": kv}
    with Checkpoint.open(folder) as checkpoint:
        one = Llama.load(checkpoint, "cuda:0", torch.float32)
        model = Ranks.load(checkpoint, devices(count), torch.float32)
    want = [s.output for s in Engine(one, **sizes).complete(prompts, PARAMS)]
    for capture in (True, False):
        engine = Engine(model, **sizes, capture=capture)
        for _ in range(2):
            assert [s.output for s in engine.complete(prompts, PARAMS)] == want, f"capture={capture}"


@pytest.mark.parametrize("kv", [None, CODES, TURNS])
@pytest.mark.parametrize("kind", ["ngram", "model", "shared model", "oracle", "eagle", "shared eagle"])
def test_the_text_with_drafts_is_that_of_one_gpu_without(
    folder: Path, kind: str, kv: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, captured and eagerly; what waits for the next round is the same on all ranks."""
    with Checkpoint.open(folder) as checkpoint:
        one = Llama.load(checkpoint, "cuda:0", torch.float32)
        model = Ranks.load(checkpoint, devices(2), torch.float32)
        drafting = [Llama.load(checkpoint, device, torch.float32) for device in model.devices]
    sizes = sizes_of(kv)
    draft: Any = NgramDrafter
    if kind == "model":
        draft = [partial(ModelDrafter, each) for each in drafting]
    if kind == "shared model":
        with Checkpoint.open(folder) as checkpoint:
            shared = Ranks.load(checkpoint, devices(2), torch.float32, peers=model.peers)
        draft = [partial(ModelDrafter, each) for each in shared.ranks]
    if kind.endswith("eagle"):
        if kind == "shared eagle":
            monkeypatch.setattr(shares, "EXCHANGE_S", 0.0)
        layers, vocabulary = (0, 0, 1), torch.arange(one.config.vocab_size, device="cuda:0")
        head = write_head(tmp_path / "head", net_of(one, layers, vocabulary), layers, vocabulary)
        heads = [load_head(head, rank) for rank in model.ranks]
        assert [each.peer is not None for each in heads] == [kind == "shared eagle"] * 2
        draft = [partial(HeadDrafter, each) for each in heads]
    for params in asked(kv):
        want = Engine(one, **sizes).generate(PROMPTS, params)
        if kv is not None:
            assert want != Engine(one, **sizes_of(None)).generate(PROMPTS, params), "the case would show no codes"
        if kind == "oracle":
            texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, want, strict=True)]
            draft = partial(OracleDrafter, texts, 0.7, one.config.vocab_size)
        for capture, tokens in ((True, 3), (True, "auto"), (False, 7)):
            engine = Engine(model, **sizes, capture=capture, draft=draft, draft_tokens=tokens)
            assert engine.generate(PROMPTS, params) == want, (capture, tokens)
            same_everywhere(engine)
            if kind == "oracle" and kv is not None and tokens != "auto":
                assert kept_and_not(engine) > 20
    if kind in ("model", "shared model", "oracle"):
        assert engine.stats.accepted_tokens > 12


@pytest.mark.parametrize("split", ["tensor", "layer"])
def test_draft_layers_draft_over_two_gpus(split: str, tmp_path: Path) -> None:
    """DeepSeek-V4's, cut like its decoder or beside its last layers."""
    published.write(tmp_path / "m", published.plain(published.TINY), published.make(published.TINY)[1])
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        one = DeepseekV4.load(checkpoint, "cuda:0", max_context=256)
        if split == "tensor":
            model: Any = Ranks.load(checkpoint, devices(2), kind=DeepseekV4, max_context=256)
        else:
            model = DeepseekV4.load(checkpoint, devices(2), max_context=256)
    alone = Engine(one, **WIDE, capture=False, draft=own_layers(one, tmp_path / "m"), draft_tokens=3)
    want = Engine(one, **WIDE).generate(LONG, MIXED)
    assert alone.generate(LONG, MIXED) == want
    for capture in (True, False):
        draft = [own_layers(rank, tmp_path / "m") for rank in model.ranks]
        engine = Engine(model, **WIDE, capture=capture, draft=draft, draft_tokens=3)
        assert engine.generate(LONG, MIXED) == want
        same_everywhere(engine)
    drafts_like(engine, alone)


@pytest.mark.parametrize("shared", [False, True])
def test_many_rounds_end_and_ranks_agree(shared: bool, folder: Path) -> None:
    """Thousands of rounds of changing sizes, in bfloat16, with joins and leaves: who accepted otherwise would hang."""
    with Checkpoint.open(folder) as checkpoint:
        model = Ranks.load(checkpoint, devices(2), torch.bfloat16)
        if shared:
            models: list[Any] = Ranks.load(checkpoint, devices(2), torch.bfloat16, peers=model.peers).ranks
        else:
            models = [Llama.load(checkpoint, each, torch.bfloat16) for each in model.devices]
        drafting = [partial(ModelDrafter, each) for each in models]
    engine = Engine(model, max_batch=8, max_context=256, chunk=32, draft=drafting)
    params = [SamplingParams(max_tokens=40 + 17 * (i % 9), temperature=1.0, seed=i) for i in range(600)]
    texts = engine.generate([text(1 + i % 30, i) for i in range(600)], params)
    assert [len(each) for each in texts] == [p.max_tokens for p in params]
    assert engine.stats.accepted_tokens > 1000
    same_everywhere(engine)
