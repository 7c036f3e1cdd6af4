"""Ranks on real GPUs: the exchange within graphs, the engine's tokens, a rank that is late and one that never comes."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import save_hf
from onegraph.engine.generate import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.models.ranks import Ranks
from onegraph.nn.peers import PeerError, Peers
from onegraph.ops.ranks import part_of
from test_exchange import summed
from test_ranks import PARAMS, text

pytestmark = pytest.mark.gpu
SIZES = {
    "head_dim": 64,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
}


def devices(count: int) -> list[torch.device]:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return [torch.device("cuda", i) for i in range(count)]


class Chains:
    """On each GPU a graph of several exchanges, one behind the other."""

    def __init__(self, peers: Peers, work: Any) -> None:
        self.peers, self.streams = peers, [torch.cuda.Stream(device) for device in peers.devices]
        self.graphs, self.out = [], []
        for i, device in enumerate(peers.devices):
            with torch.cuda.device(device), torch.cuda.stream(self.streams[i]):
                work(peers.rank(i))  # alone: nobody is armed
                torch.cuda.synchronize(device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.streams[i]):
                    self.out.append(work(peers.rank(i)))
                self.graphs.append(graph)
        peers.arm()

    def replay(self, ranks: Any = None) -> None:
        for i in ranks or range(len(self.graphs)):
            with torch.cuda.device(self.peers.devices[i]), torch.cuda.stream(self.streams[i]):
                self.graphs[i].replay()

    def wait(self) -> None:
        for device in self.peers.devices:
            torch.cuda.synchronize(device)


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


def test_many_steps_end_and_ranks_agree(folder: Path) -> None:
    """20,000 steps one ahead of the host, with joins and leaves, prefill between them."""
    with Checkpoint.open(folder) as checkpoint:
        model = Ranks.load(checkpoint, devices(2), torch.bfloat16)
    engine = Engine(model, max_batch=8, max_context=256, chunk=32)
    params = [SamplingParams(max_tokens=40 + 17 * (i % 9), temperature=1.0, seed=i) for i in range(1800)]
    texts = engine.generate([text(1 + i % 30, i) for i in range(1800)], params)
    assert [len(each) for each in texts] == [p.max_tokens for p in params]
    assert engine.stats.decode_steps > 20_000
    runner: Any = engine.runner("decode", sampling=True)
    drawn = [rank.stages[0].inputs["drawn"].cpu() for rank in runner.ranks]
    assert torch.equal(drawn[0], drawn[1])
