"""DeepSeek-V4 through the engine: every way of capturing gives transformers' tokens, and the step may be captured.

On a CPU the graphs are recorded ones (test_graph.py), which replay ops and no Python.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from deepseek import continuations, prompts, save_hf
from onegraph.check import check_step
from onegraph.engine import executor
from onegraph.engine.draft import OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.ops.registry import reference_ops
from onegraph.runtime.prove import prove
from test_graph import RecordedPool

GREEDY = SamplingParams(max_tokens=12)
SMALL = {"max_batch": 3, "max_context": 256, "chunk": 32}


def load(path, device="cpu", variant="flash", **changes):
    save_hf(variant, path, **changes)
    with Checkpoint.open(path) as checkpoint:
        return DeepseekV4.load(checkpoint, device)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("deepseek") / "m")


@pytest.fixture(params=["eager", "captured", "split"])
def engine(request, model, monkeypatch):
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    engine = Engine(model, **SMALL, capture={"eager": False, "captured": True, "split": "split"}[request.param])
    assert engine.mode == request.param
    return engine


def test_tokens_are_those_of_transformers(engine):
    """Five prompts of unequal lengths through three rows, so that slots and pages change hands; then again, alone."""
    expected = continuations(GREEDY.max_tokens)
    assert engine.generate(prompts(), GREEDY) == expected
    assert engine.generate(prompts()[1:2], GREEDY) == expected[1:2]
    assert sorted(engine.scheduler.free_slots) == [1, 2, 3]
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


@pytest.mark.parametrize("tokens", [2, 7])
def test_drafts_are_taken_back_from_windows_and_compressors(model, tokens):
    """Rounds that check drafts, three in ten of them wrong: transformers' tokens."""
    expected = continuations(24)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts(), expected, strict=True)]
    drafter = partial(OracleDrafter, texts, 0.7, model.config.vocab_size)
    engine = Engine(model, **SMALL, draft=drafter, draft_tokens=tokens)
    params = [SamplingParams(max_tokens=24, seed=i) for i in range(len(texts))]
    assert engine.generate(prompts(), params) == expected
    assert engine.stats.accepted_tokens > 40
    assert engine.stats.drafted_tokens > engine.stats.accepted_tokens + 15


def rows(n: int, g: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "positions": torch.randint(0, 200, (n,), generator=g).int(),
        "limits": torch.randint(150, 256, (n,), generator=g).int(),
        "table": torch.arange(1, 1 + 2 * n).view(n, 2).int(),
        "slots": torch.randperm(3, generator=g)[:n].int() + 1,
        "temperature": torch.rand(n, generator=g),
        "top_k": torch.randint(0, 50, (n,), generator=g).int(),
        "top_p": torch.rand(n, generator=g),
        "seed": torch.randint(0, 2**60, (n,), generator=g),
    }


def prove_it(engine: Engine) -> None:
    g = torch.Generator().manual_seed(0)
    state = {f"state {i}": t for i, t in enumerate(engine.executor.cache.tensors())}
    start = {name: torch.randn(t.shape, generator=g).to(t) for name, t in state.items()}

    def reset():
        for name, tensor in state.items():
            tensor.copy_(start[name])

    cases = [{"drawn": torch.randint(0, 97, (n,), generator=g)} | rows(n, g) for n in (3, 1, 2)]
    assert prove(engine.executor.step("decode").stages[0], cases, reset=reset, state=state) == []
    cases = [{"tokens": torch.randint(0, 97, (1, 32), generator=g)} | rows(1, g) for _ in range(2)]
    assert prove(engine.executor.step("prefill").stages[0], cases, reset=reset, state=state) == []


def test_replay_equals_eager_in_outputs_and_state(engine):
    if engine.mode == "eager":
        pytest.skip("nothing is replayed")
    prove_it(engine)


# Where each row stands when the checked steps begin: the second, a replay, makes a CSA entry, an HCA entry, and wraps.
START = torch.tensor([2, 126, 46], dtype=torch.int32)
# For what is simulated, a layer of each kind.
CHANGES = {"flash": {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}, "pro": {}}


def decode_target(variant: str, tmp_path, spoil=lambda e: None, ops=reference_ops):
    """The engine's own decode step as a target of `onegraph check`; to simulate it, its ops as plain torch."""

    def factory():
        engine = Engine(load(tmp_path / "m", "cuda", variant, **CHANGES[variant]), **SMALL, capture=False)
        spoil(engine)
        runner = engine.executor.step("decode")
        values = rows(3, torch.Generator().manual_seed(1)) | {"positions": START, "limits": START + 40}
        runner.load(drawn=torch.tensor([5, 6, 7]), **values)

        def step():
            with ops():
                return runner.replay(3)

        return step, lambda index: ()

    return factory


@pytest.mark.parametrize("variant", ["flash", "pro"])
def test_the_decode_step_may_be_captured(variant, tmp_path):
    report = check_step(decode_target(variant, tmp_path), steps=3)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]


def host_boundary(engine):
    """What a plain port does: look at the position, and compress when a window is full."""
    attend = engine.executor.cache.attend
    kind = type(engine.executor.cache)

    def spoiled(cache, attention, q, kv, states, index_q):
        if states is not None and int(cache.positions[0] + 1) % 4:
            states = states * 0
        return attend.__func__(cache, attention, q, kv, states, index_q)

    engine.executor.cache.view = lambda *a: _with(kind.view(engine.executor.cache, *a), spoiled)


def _with(cache, attend):
    cache.attend = lambda *inputs: attend(cache, *inputs)
    return cache


def test_a_boundary_decided_on_the_host_is_found(tmp_path):
    assert check_step(decode_target("flash", tmp_path, host_boundary), steps=3).findings


@pytest.mark.gpu
def test_the_decode_step_is_clean_live(tmp_path):
    report = check_step(decode_target("flash", tmp_path, ops=nullcontext), simulate=False, live=True, steps=5)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]
    assert report.facts["tensor bytes left by them"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, "split"])
def test_on_a_gpu_replay_equals_eager_and_tokens_are_transformers(capture, tmp_path):
    """Graph replay against the eager step bit for bit; float32 with TF32 off, so that tokens are the oracle's."""
    engine, expected = (
        Engine(load(tmp_path / "m", "cuda:0"), **SMALL, capture=capture),
        continuations(GREEDY.max_tokens),
    )
    assert engine.generate(prompts(), GREEDY) == expected
    prove_it(engine)
    assert engine.generate(prompts(), GREEDY) == expected
