"""The linears between two attentions in one launch: what it takes on any machine, results and hazards on a GPU."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from h200 import H200
from models import Decoder, save_e8p
from onegraph.check import declared
from onegraph.check.simulate.run import simulate_step
from onegraph.engine.draft import NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.chain import Chain, ChainedLlama, chained
from onegraph.models.llama import Llama
from onegraph.ops.cuda import e8p_chain as cuda_chain
from onegraph.ops.e8p_chain import _case, e8p_chain
from onegraph.ops.registry import reference_ops

gpu = pytest.mark.gpu
SMOL = (576, 576, 1536, 960)  # k of the output linear, width, k of down, n of qkv: SmolLM2-135M
# What the kernel takes: also the last layer, tails of slices, clusters with idle blocks, blocks of 64 and 128
SIZES = [SMOL, (576, 576, 1536, 0), (256, 320, 128, 192), (128, 192, 384, 512), (384, 256, 640, 64)]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_small_models_are_taken(sizes: tuple[int, int, int, int], bits: int) -> None:
    assert all(cuda_chain.supports_shape(tokens, sizes, bits, torch.bfloat16) for tokens in (1, cuda_chain.MAX_TOKENS))
    assert cuda_chain.shared(sizes, bits) <= H200.shared


def test_what_is_not_taken() -> None:
    for tokens, sizes, dtype in (
        (0, SMOL, torch.bfloat16),
        (cuda_chain.MAX_TOKENS + 1, SMOL, torch.bfloat16),
        (1, SMOL, torch.float32),
        (1, (960, 960, 2560, 1600), torch.bfloat16),  # SmolLM2-360M: codes of a layer are more than a cluster holds
        (1, (4096, 4096, 14336, 6144), torch.bfloat16),  # Llama-3-8B
        (1, (256, 320, 192, 192), torch.bfloat16),  # a rotation of 128 rows would mix gate and up
        (1, (40, 192, 128, 192), torch.bfloat16),
        (1, (64, 64, 64, 1600), torch.bfloat16),  # more slices than there are warps for them
    ):
        assert not cuda_chain.supports_shape(tokens, sizes, 4, dtype), sizes


def test_constants_agree_with_the_source() -> None:
    text = cuda_chain.KERNEL.path.read_text()
    told = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)}
    assert told["WORKERS"] == cuda_chain.WORKERS
    fields = re.search(r"Shared \{.*?\n(.*?)\};", text, re.DOTALL)[1]
    sizes = [
        {"u64": 8, "u32": 4, "int": 4, "float": 4}[kind]
        * math.prod(told[size] if size in told else int(size) for size in re.findall(r"\[(\w+)\]", shape))
        for kind, shape in re.findall(r"(u64|u32|int|float) \w+((?:\[\w+\])+);", fields)
    ]
    assert -(-sum(sizes) // 128) * 128 == cuda_chain.SHARED_STRUCT


def test_links_that_do_not_fit_together_are_refused() -> None:
    def example(inner: int) -> list:
        return list(_case((1,), 256, 128, inner, 256, 2).make(torch.device("cpu"), torch.float32, torch.Generator()))

    args, other = example(192), example(320)
    mixed = [a[:2] + b[2:] if i in (2, 5, 6) else a for i, (a, b) in enumerate(zip(args, other, strict=True))]
    with pytest.raises(ValueError, match="fit together"):
        e8p_chain(*mixed)
    for at, value, message in (
        (7, [None], "3 or 4 of each"),
        (1, args[1][:, :64], "links need"),
        (9, -1.0, "eps is"),
    ):
        with pytest.raises(ValueError, match=message):
            e8p_chain(*args[:at], value, *args[at + 1 :])


MODEL = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens_go_through_chains(tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, on a CPU the same bits, as layer by layer; and a prefill does not need them."""
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3}, **MODEL)
    row = torch.randint(0, 131, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        plain = Llama.load(checkpoint, "cpu", torch.bfloat16, decode=False)
    one = chained(plain)
    assert isinstance(one, ChainedLlama)
    assert all(block.attention.chained == one.most == cuda_chain.MAX_TOKENS for block in plain.blocks)
    assert [len(chain.links) for chain in one.chains] == [4, 4, 3]
    calls = []
    call = Chain.__call__
    monkeypatch.setattr(Chain, "__call__", lambda self, *args: calls.append(self) or call(self, *args))
    for model in (one, plain):
        calls.clear()
        decoder = Decoder(model, rows=1, max_context=32)
        decoder.feed([row[:9]])
        assert not calls
        logits.append(torch.cat([decoder.feed([row[at : at + tokens]])[0] for at in range(9, 21, tokens)]))
        assert calls == (12 // tokens * one.chains if model is one else [])
    assert torch.equal(*logits)


def test_auto_reads_no_more_drafts_than_a_chain_takes(tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3}, **MODEL)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = Llama.load(checkpoint, "cpu", torch.bfloat16, decode=False)
    most = cuda_chain.MAX_TOKENS - 1
    one = chained(model)
    for of, tokens, counts in ((model, "auto", (0, 1, 3, 7)), (one, "auto", (0, 1, 3, most)), (one, 7, (0, 7))):
        assert Engine(of, max_context=64, draft=NgramDrafter, draft_tokens=tokens).executor.speculation.counts == counts


def test_the_step_of_chains_replays_as_eager_on_a_simulated_gpu(tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3, "lm_head": 4}, **MODEL)

    def factory() -> tuple[Any, Any]:
        model = chained(Llama.load(Checkpoint.open(tmp_path / "model"), "cuda", torch.bfloat16))
        assert isinstance(model, ChainedLlama)
        cache = Decoder(model, rows=1, max_context=32).cache
        cache.counts.fill_(1)
        token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")

        @torch.no_grad()
        def step(token: torch.Tensor) -> torch.Tensor:
            logits = model.logits(model(token, cache))
            cache.positions.add_(cache.counts)
            return logits

        return step, lambda i: (token.fill_(17 * i % 131),)

    with declared("onegraph::*"):
        report = simulate_step(factory)
    assert not report.findings, [str(finding) for finding in report.findings]


def _error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return ((y.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30)).item()


def _arguments(sizes: tuple[int, ...], bits: int, dtype: torch.dtype = torch.bfloat16, tokens: int = 1) -> list:
    return list(
        _case((tokens,), *sizes, bits, "bias").make(torch.device("cuda"), dtype, torch.Generator().manual_seed(1))
    )


def _launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a launch: the blocks of its cluster."""
    launches: list[int] = []
    launch = cuda_chain.build.Kernel.launch

    def counted(self, grid, threads, shared, cluster, *rest) -> None:
        launches.append(cluster)
        launch(self, grid, threads, shared, cluster, *rest)

    monkeypatch.setattr(cuda_chain.build.Kernel, "launch", counted)
    return launches


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_one_launch_is_as_right_as_four(
    tokens: int, sizes: tuple[int, ...], bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each link rounds its result, so both are held to what separate launches are off by."""
    args = _arguments(sizes, bits, dtype, tokens)
    with reference_ops():
        truth = e8p_chain(*[a.float() if isinstance(a, torch.Tensor) and a.dtype == dtype else a for a in args])
    launches = _launches(monkeypatch)
    got = e8p_chain(*args)
    assert launches == [cuda_chain.CLUSTER]
    own = cuda_chain.one_by_one(*args)
    for a, b, t in zip(got, own, truth, strict=True):
        assert a.shape == t.shape
        assert _error(a, t) <= 1.5 * _error(b, t)


@gpu
@pytest.mark.parametrize("tokens", [1, cuda_chain.MAX_TOKENS])
def test_same_bits_each_time_in_a_graph_and_beside_another(tokens: int) -> None:
    """Chains one behind the other, which start before the one in front ends, on two streams at once."""
    x, residual, *rest = _arguments(SMOL, 4, tokens=tokens)
    calls = 12

    def chained() -> list[torch.Tensor]:
        stream, y, found = residual, x, []
        for _ in range(calls):
            stream, qkv = e8p_chain(y, stream, *rest)
            y = qkv[..., : x.shape[-1]].contiguous()
            found += [stream, qkv]
        return found

    expected = chained()
    graphs, results, streams = [], [], [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append(chained())
        graphs.append(graph)
    for _ in range(20):
        for found in results:
            for tensor in found:
                tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for found in results:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@gpu
@pytest.mark.parametrize("tokens", [2, cuda_chain.MAX_TOKENS])
def test_a_token_has_the_same_bits_alone_and_among_others(tokens: int) -> None:
    x, residual, *rest = _arguments(SMOL, 4, tokens=tokens)
    together = e8p_chain(x, residual, *rest)
    for i in range(tokens):
        alone = e8p_chain(x[i : i + 1], residual[i : i + 1], *rest)
        assert all(torch.equal(a, b[i : i + 1]) for a, b in zip(alone, together, strict=True))


@gpu
@pytest.mark.parametrize("tokens", [1, cuda_chain.MAX_TOKENS])
@pytest.mark.parametrize("at", [0, 1])
def test_nan_reaches_all_of_its_token(at: int, tokens: int) -> None:
    """Of x and of the residual stream; infinity of the attention becomes NaN, as it does one by one."""
    for value in (float("nan"), float("inf")):
        args = _arguments(SMOL, 4, tokens=tokens)
        args[at][-1, 7] = value
        for result in e8p_chain(*args):
            assert not result[-1].isfinite().any()
            assert result[:-1].isfinite().all()


@gpu
def test_what_one_launch_does_not_take_runs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_chain, "launch", None)
    for tokens, sizes in ((cuda_chain.MAX_TOKENS + 1, SMOL), (1, (960, 960, 2560, 1600))):
        args = _arguments(sizes, 4, tokens=tokens)
        got = e8p_chain(*args)
        assert all(torch.equal(a, b) for a, b in zip(got, cuda_chain.one_by_one(*args), strict=True))
