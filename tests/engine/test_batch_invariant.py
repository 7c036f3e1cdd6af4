"""Results that do not depend on what runs beside them: kernels on a CPU (each thread a fiber: test_decode_kernel.py),
how they are cut, and engines, whose texts are those without drafts and without other rows. On a GPU:
test_batch_invariant_gpu.py."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import test_decode_kernel
from engines import MODES, maker
from fuzz import tiny
from fuzz.run import invoke
from h200 import H200, PLAIN
from models import save_e8p, save_hf
from onegraph import LLM, SamplingParams
from onegraph.cli.common import UsageError, options
from onegraph.engine.decoder import AuxHiddenStates, Decoder, SplitAttention
from onegraph.engine.draft import NgramDrafter, OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.per_token import check_invariant
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.nn.attention import PagedCache
from onegraph.ops import family, invariant
from onegraph.ops.calls import MAX_TOKENS, PagedDecode
from onegraph.ops.cases import Draw
from onegraph.ops.cuda import build, decode_attention, decode_round, e8p, e8p_batch, e8p_decode, e8p_portable
from onegraph.ops.decode_attention import paged_decode
from onegraph.runtime.graph import Runner
from test_e8p_build import SHAPES
from test_graph import RecordedPool

# --------------------------------------------------------------------------------------- attention: the kernel's source

HEADS = {  # heads, kv heads, head size, page, window, norm
    "smollm2": (9, 3, 64, 16, 0, False),
    "eight": (8, 1, 128, 16, 0, True),
    "window": (5, 1, 64, 32, 21, True),
}
STARTS = [0, 11, 16, 121, 124, 300]  # rounds that lie in one tile and in two; few tiles and many
ALONE = {1: [1] * 6, 3: [3, 5], 5: [1] * 5}  # rounds without other rows, into the next tile


def texts(name: str, tokens: int, starts: list[int]) -> PagedDecode:
    """Rows that have `starts` tokens in the cache and bring `tokens` more."""
    heads, kv_heads, dim, page, window, norm = HEADS[name]
    draw = Draw(torch.device("cpu"), torch.bfloat16, torch.Generator().manual_seed(1))
    counts = [tokens] * len(starts)
    *brought, table = draw.tokens(heads, kv_heads, dim, tokens, starts, counts, page, norm, rope=True)
    caches = [draw.randn(1 + table.numel(), page, kv_heads, dim) for _ in range(2)]
    tickets = torch.zeros(len(starts), kv_heads, dtype=torch.int32)
    return PagedDecode(*brought, table, *caches, tickets, heads, dim**-0.5, window)


def in_rounds(call: PagedDecode, sizes: list[int], rows: slice, attend: Callable[[PagedDecode], Tensor]) -> Tensor:
    """Some rows' tokens in rounds of these sizes, on a copy of the caches."""
    caches = {"k_cache": call.k_cache.clone(), "v_cache": call.v_cache.clone()}
    found, first = [], 0
    for size in sizes:
        own = {
            "qkv": call.qkv[rows, first : first + size].contiguous(),
            "positions": call.positions[rows] + first,
            "counts": torch.full_like(call.counts[rows], size),
            "block_table": call.block_table[rows],
        }
        found.append(attend(replace(call, **own, **caches)))
        first += size
    return torch.cat(found, dim=1)


@pytest.fixture(scope="module", params=["portable", "clusters"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    portable, folder = request.param == "portable", tmp_path_factory.mktemp("steady")
    return portable, test_decode_kernel.compiled(folder, decode_round.KERNEL.path, portable)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("name", "sms"), [("smollm2", 24), ("eight", 1), ("window", 340)])
def test_attention_of_a_token_is_that_of_any_round(
    kernel, name: str, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable, made_of = kernel
    monkeypatch.setattr(decode_round.KERNEL, "is_portable", lambda device: portable)
    test_decode_kernel.instead(monkeypatch, made_of)
    monkeypatch.setattr(build, "device", lambda index: replace(PLAIN, sms=sms) if portable else H200)
    call = texts(name, 8, STARTS)
    with invariant.batch_invariant():
        found = in_rounds(call, [8], slice(None), decode_round.attend)
        assert torch.equal(in_rounds(call, [1, 2, 5], slice(None), decode_round.attend), found)
        for i, sizes in ALONE.items():
            wanted = found[i : i + 1, : sum(sizes)]
            assert torch.equal(in_rounds(call, sizes, slice(i, i + 1), decode_round.attend), wanted), i
    truth = in_rounds(call, [1] * 8, slice(None), lambda call: paged_decode.reference(*call))
    assert float((found.float() - truth.float()).norm() / truth.float().norm()) < 8e-3


@pytest.mark.parametrize("dim", decode_attention.DIMS)
@pytest.mark.parametrize("group", range(1, decode_attention.MAX_GROUP + 1))
def test_the_largest_round_fits(dim: int, group: int) -> None:
    """Of as many blocks as share the keys of one row, on either family; fewer tokens are cut alike."""
    for device, clusters in ((H200, True), (PLAIN, False)):
        for kv_heads in (1, 8, 200):
            warps, size = decode_round.share(kv_heads, decode_round.SETS[dim], device, clusters)
            for tokens in range(1, MAX_TOKENS + 1):
                plan = replace(decode_round.EXAMPLE, dim=dim, group=group, tokens=tokens, warps=warps, size=size)
                plan = replace(plan, slices=decode_round.slices(tokens, group, decode_round.SETS[dim]), steady=True)
                assert plan.shared(clusters) <= device.shared
                assert plan.columns * dim % (2 * size) == 0


def test_more_groups_of_blocks_than_are_counted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_round.KERNEL, "is_portable", lambda device: True)
    monkeypatch.setattr(build, "device", lambda index: replace(PLAIN, sms=60))
    rows = decode_round.decode_portable.MAX_GROUPS // 3 + 1
    call = texts("smollm2", 1, [0] * rows)
    told = pytest.raises(ValueError, match=f"batch_invariant: {rows} rows of 3 kv heads .* give a smaller max_batch")
    with told, invariant.batch_invariant():
        decode_round.attend(call)


def test_a_token_of_a_round_is_a_step() -> None:
    """What Triton's kernel is given where no kernel of rounds can be had."""
    call, truth = texts("eight", 4, STARTS), texts("eight", 4, STARTS)
    call.counts[2] = truth.counts[2] = 3
    found = torch.cat([paged_decode(*call.token(i)) for i in range(4)], dim=1)
    wanted = paged_decode(*truth)
    real = torch.arange(4) < call.counts[:, None]
    assert torch.allclose(found[real].float(), wanted[real].float(), atol=0.02)
    assert torch.equal(call.k_cache, truth.k_cache)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled on this machine")
@pytest.mark.parametrize("what", [{}, {"softcap": 2.0, "window": 40}])
def test_tritons_attention_of_a_token_is_that_of_any_round(what: dict[str, float]) -> None:
    """Interpreted: a size that the other kernel does not take, with what it does not know."""
    pytest.importorskip("triton")
    import interpreter_fixes  # noqa: F401
    from onegraph.ops.triton.decode_attention import paged_decode as attend

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HEADS, "80", (4, 2, 80, 8, 0, False))
        call = replace(texts("80", 3, [0, 62, 300]), sinks=torch.randn(4), **what)
    with invariant.batch_invariant():
        alone = torch.cat([in_rounds(call, [1] * 3, slice(i, i + 1), attend) for i in range(3)])
        for sizes in ([1, 2], [3]):
            assert torch.equal(in_rounds(call, sizes, slice(None), attend), alone), sizes
        longer = replace(call, block_table=torch.nn.functional.pad(call.block_table, (0, 500)))
        assert torch.equal(in_rounds(longer, [3], slice(None), attend), alone)


# -------------------------------------------------------------------------------------------------------------- linears


@pytest.mark.parametrize("device", [H200, replace(H200, sms=114), replace(H200, sms=78)], ids=lambda d: f"{d.sms}")
def test_the_batch_kernel_cuts_up_to_16_tokens_alike(device: build.Device) -> None:
    """Its sums are of integers within a block, and in the order of a cluster's blocks, then of clusters, beyond."""
    for n, k in SHAPES:
        for bits in (2, 3, 4):
            plans = {e8p_batch.plan(n, k, bits, tokens, device) for tokens in range(1, invariant.AT_ONCE + 1)}
            assert len({(plan.cluster, plan.parts, plan.per_block, plan.tiles, plan.groups) for plan in plans}) == 1


@pytest.mark.parametrize("had", [{"e8p_decode", "e8p_batch"}, {"e8p_portable"}, {"e8p_decode", "e8p_portable"}, set()])
def test_few_tokens_run_what_16_run(had: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (e8p_decode, e8p_batch, e8p_portable, e8p.e8p_prefill, e8p.e8p_dequantize):
        name = kernel.__name__.rpartition(".")[2]
        source = next(each for each in vars(kernel).values() if isinstance(each, build.Source))
        monkeypatch.setattr(source, "is_built", lambda device, name=name: name in had)
    wanted = e8p_batch.run if "e8p_batch" in had else e8p_portable.run if "e8p_portable" in had else None
    assert e8p.steady(4096, 4096, 2, torch.bfloat16, 0) is (wanted is not None)
    assert e8p.choose(invariant.AT_ONCE, 4096, 4096, 2, 0) is wanted
    assert not e8p.steady(4096, 4096, 2, torch.float32, 0)
    assert not e8p.steady(4096, 4100, 2, torch.bfloat16, 0)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (16,), (40, 1)])
def test_linears_run_in_passes_of_one_shape(steady: bool, shape: tuple[int, ...]) -> None:
    weight, passes = torch.randn(5, 7), []

    def run(x: Tensor, add: Tensor | None) -> Tensor:
        passes.append(len(x))
        y = x @ weight.T
        return y if add is None else y + add

    x, add = torch.randn(*shape, 7), torch.randn(*shape, 5)
    for more in (None, add):
        y = invariant.in_passes(run, x, more, steady=steady)
        assert y.shape == (*shape, 5)
        assert torch.allclose(y, run(x, more), atol=1e-5)
        passes.pop()
    tokens = torch.Size(shape).numel()
    full, left = divmod(tokens, 16)
    once = [16] * full + [left if steady else 16] * (left > 0)
    assert passes == once * 2


def test_what_a_graph_breaks_at_runs_as_it_was_captured() -> None:
    """A split step's attention runs at each replay, outside of the step."""

    class Cache:
        def attend(self, attention: object, qkv: Tensor) -> Tensor:
            return qkv + invariant.on()

    step = SplitAttention(Cache()).attend

    def run(x: Tensor) -> Tensor:
        with invariant.batch_invariant():
            return step(None, x)

    runner = Runner(run, {"x": torch.zeros(2)}, capture=True, pool=RecordedPool(), split="attention")
    assert runner(x=torch.ones(2)).tolist() == [2.0, 2.0]
    assert not invariant.on()


def test_a_tracer_sees_nothing_of_it() -> None:
    """It would follow no context variable: who compiles a model still gets one graph."""
    compiled = torch.compile(lambda x: x + invariant.on(), backend="eager", fullgraph=True)
    with invariant.batch_invariant():
        assert compiled(torch.ones(2)).tolist() == [1.0, 1.0]


# -------------------------------------------------------------------------------------------------------------- engines

PROMPTS = [[(7 * n + 3 * k) % 131 for n in range(length)] for k, length in enumerate((1, 20, 7, 16, 33))]
KINDS = {
    "dense": ("smollm2", {}),
    "e8p": ("smollm2", {}),
    "gates": ("gemma2", {}),
    "window": ("qwen3_window_bias", {"layer_types": ["sliding_attention", "full_attention"]}),
}
DRAFTS = {
    "eager": ((OracleDrafter, "auto"), (OracleDrafter, 1)),
    "captured": ((NgramDrafter, 3), (OracleDrafter, 3)),
    "split": ((OracleDrafter, 7),),
}
SIZES = {"max_context": 64, "page_size": 4, "chunk": 8, "batch_invariant": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Llama, list[list[int]]]]:
    """A model, and what each prompt gets from it without others: made once, whatever order tests run in."""

    @cache
    def made(kind: str) -> tuple[Llama, list[list[int]]]:
        path, (variant, changes) = tmp_path_factory.mktemp("invariant") / "model", KINDS[kind]
        if kind == "e8p":
            save_e8p(variant, path, rates={"bits": 2}, num_hidden_layers=2)
        else:
            save_hf(variant, path, num_hidden_layers=2, **changes)
        with Checkpoint.open(path) as checkpoint:
            model = Llama.load(checkpoint, "cpu", torch.bfloat16, decode=False)
        engine = Engine(model, max_batch=1, capture=False, **SIZES)
        return model, [engine.generate([p], q)[0] for p, q in zip(PROMPTS, MIXED, strict=True)]

    return made


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(kind: str, models: Any) -> Llama:
    return models(kind)[0]


@pytest.fixture
def alone(kind: str, models: Any) -> list[list[int]]:
    return models(kind)[1]


@pytest.fixture(params=MODES)
def make(request: pytest.FixtureRequest, model: Llama, monkeypatch: pytest.MonkeyPatch):
    return maker(request.param, model, monkeypatch, **SIZES)


MIXED = [
    SamplingParams(max_tokens=16, seed=35 + i, **({} if i % 2 else {"temperature": 0.8, "top_k": 50}))
    for i in range(len(PROMPTS))
]
"""Greedy rows and sampling ones beside each other; seeds tell `OracleDrafter` which text it is."""


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("dense", "captured"), ("dense", "split"), ("e8p", "eager"), ("gates", "eager"), ("gates", "captured"),
        ("window", "eager"), ("window", "split"),
    ],
    indirect=True,
)  # fmt: skip
def test_the_text_is_that_without_drafts_and_alone(make, alone: list[list[int]]) -> None:
    first = make()
    if first.mode != "eager":  # whose block table is cut to the pages in use, which changes how a CPU adds up
        one = make(max_batch=1)
        alone = [one.generate([p], q)[0] for p, q in zip(PROMPTS, MIXED, strict=True)]
    assert first.generate(PROMPTS, MIXED) == alone
    whole = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, alone, strict=True)]
    for drafter, tokens in DRAFTS[first.mode]:
        draft = partial(drafter, whole, 0.8, 131) if drafter is OracleDrafter else drafter
        engine = make(draft=draft, draft_tokens=tokens)
        assert engine.generate(PROMPTS, MIXED) == alone
    assert engine.stats.accepted_tokens > 25


def test_a_sequence_that_made_room_goes_on_as_it_was(model: Llama, alone: list[list[int]]) -> None:
    """Its own tokens are decoded again, since prefill would round otherwise; nor are pages shared."""
    engine = Engine(model, max_batch=4, pages=17, draft=NgramDrafter, draft_tokens=3, **SIZES)
    assert not engine.executor.prefix_cacheable
    assert engine.generate(PROMPTS, MIXED) == alone
    assert engine.stats.preemptions > 0


def test_what_an_earlier_text_left_is_not_read(model: Llama) -> None:
    """As a server shares pages: those that decode steps wrote are not those of a prompt."""

    def answer(engine: Engine, prompt: list[int]) -> list[int]:
        with engine.executor.running():
            scheduler = engine.scheduler.open()
            sequence = engine.request(prompt, SamplingParams(max_tokens=12))
            scheduler.add(sequence)
            while not scheduler.idle:
                scheduler.step()
            scheduler.close()
        return sequence.output

    used, fresh = (Engine(model, max_batch=2, **SIZES) for _ in range(2))
    first = answer(used, PROMPTS[1])
    assert answer(used, [*PROMPTS[1], *first]) == answer(fresh, [*PROMPTS[1], *first])
    assert used.stats.shared_tokens == 0


def read(decoder: Decoder, tokens: Tensor, cache: PagedCache, taps: AuxHiddenStates | None = None) -> Tensor:
    return decoder.leave(decoder.run(0, decoder.enter(tokens), tokens, SplitAttention(cache), taps))


def test_rows_do_differ_without_it(tmp_path: Path) -> None:
    """Or the tests above would hold anyway: hidden states of a token alone and of the same one in a round. What a
    drafter asks for of the layers is that of either."""
    save_hf("smollm2", tmp_path / "model")
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = Llama.load(checkpoint, "cpu", torch.float32)
    found, tapped = [], []
    for wanted in (False, True):
        engine = Engine(model, max_batch=4, max_context=96, page_size=4, batch_invariant=wanted, draft=NgramDrafter)
        decoder, cache = engine.executor.ranks[0].decoder, engine.executor.cache.view()
        tokens = torch.arange(32).view(4, 8)
        cache.block_table, cache.slots = torch.arange(1, 97).view(4, 24).int(), torch.arange(4).int()
        cache.positions, cache.counts = torch.zeros(4).int(), torch.full((4,), 8).int()
        taps: AuxHiddenStates = {0: None, 2: None}
        together, alone = read(decoder, tokens, cache, taps), []
        tapped.append(taps)
        for i in range(8):
            one = cache.view(slice(0, 1))
            one.positions, one.counts, one.slots = torch.tensor([i]).int(), torch.ones(1).int(), cache.slots[:1]
            one.block_table = cache.block_table[:1]
            alone.append(read(decoder, tokens[:1, i : i + 1], one))
        found.append(torch.equal(decoder.logits(together[:1]), decoder.logits(torch.cat(alone, dim=1))))
    assert found == [False, True]
    for layer, states in tapped[0].items():
        assert torch.allclose(tapped[1][layer], states, atol=1e-3)
        assert states.shape == (4, 8, model.config.hidden_size)


# ------------------------------------------------------------------------------------------------------ who asks for it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": "turboquant:4"}, "the KV cache is 'turboquant:4"),
        ({"fused": False}, "loaded with fused=False"),
        ({"variant": "qwen3_moe"}, "routed experts"),
        ({"devices": 2}, "on 2 devices; allowed is one"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    save_hf(change.get("variant", "smollm2"), tmp_path / "model", head_dim=64)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = Llama.load(checkpoint, "cpu", fused=change.get("fused", True))
    if "devices" in change:
        twice = {"ranks": [model, model], "devices": model.devices}
        with pytest.raises(ValueError, match=f"batch_invariant: .*{message}"):
            check_invariant(SimpleNamespace(**twice), None)
        return
    with pytest.raises(ValueError, match=f"batch_invariant: .*{message}"):
        Engine(model, max_context=64, kv=change.get("kv"), batch_invariant=True)


def test_references_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "FORCED", "reference")
    cache = PagedCache(
        layers=1, pages=2, page_size=4, kv_heads=1, head_dim=8, rows=1, pages_per_row=1, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip
    model = SimpleNamespace(devices=[torch.device("cuda:0")])
    model.ranks = [model]
    with pytest.raises(ValueError, match="ONEGRAPH_KERNELS is reference"):
        check_invariant(model, cache)
    model.devices = [torch.device("cpu")]
    check_invariant(model, cache)


def test_the_api_and_the_command_line(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "model")
    with LLM(path, device="cpu", max_model_len=128, batch_invariant=True, speculative="ngram") as llm:
        assert llm.engine.executor.batch_invariant
        drafted = llm.generate("the thing the thing", max_tokens=20)
    with LLM(path, device="cpu", max_model_len=128) as llm:
        assert not llm.engine.executor.batch_invariant
    command = ["generate", path, "--raw", "--prompt", "the thing the thing", "--max-tokens", 20, "--device", "cpu"]
    status, out, errors = invoke([*command, "--batch-invariant"])
    assert (status, out.strip()) == (0, drafted.text.strip()), errors
    with pytest.raises(UsageError, match=r"^--batch-invariant: the model has"), options("batch_invariant:"):
        raise ValueError("batch_invariant: the model has routed experts")


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("chat",), ("serve", "--port", 0)])
def test_commands_hand_their_switches_on(
    command: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tiny.write_model(tmp_path / "model"), []

    def refuse(self: LLM, model: str, **options: Any) -> None:
        seen.append(options)
        raise ValueError("seen")

    monkeypatch.setattr(LLM, "__init__", refuse)
    name, *rest = command
    for switches in ([], ["--batch-invariant"]):
        status, _, errors = invoke([name, path, *rest, "--device", "cpu", *switches])
        assert (status, "seen" in errors) == (2, True), errors
    assert [each["batch_invariant"] for each in seen] == [False, True]
