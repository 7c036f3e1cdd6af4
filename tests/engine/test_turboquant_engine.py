"""The engine with a TurboQuant cache: batches, refusals, and its steps under capture, simulated and on a GPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import simulated_step
from onegraph.check import Verdict
from onegraph.check.api import check_step
from onegraph.engine.choice import PLAIN
from onegraph.engine.engine import Engine
from onegraph.engine.inputs import row_inputs
from onegraph.engine.params import SamplingParams
from onegraph.runtime.prove import prove
from tiny_decoder import TinyDecoder


def engine(text: str | None, **options: Any) -> Engine:
    settings = {"max_batch": 3, "max_context": 128, "chunk": 16, "capture": False}
    return Engine(TinyDecoder(head_dim=64, **options.pop("model", {})), kv=text, **(settings | options))


PROMPTS = [[5, 9, 2, 77], list(range(40, 83)), [3], list(range(7, 31)), [99, 98]]


@pytest.mark.parametrize("text", ["turboquant:4", "turboquant:k3v4,mode=full", "turboquant:2,window=16,first=1"])
def test_a_batch_gives_each_prompt_what_it_gets_alone(text: str) -> None:
    """Five prompts through three rows: sequences come and go, and move between rows with their rings."""
    params = [SamplingParams(max_tokens=n) for n in (40, 9, 25, 31, 12)]
    together = engine(text).generate(PROMPTS, params)
    for prompt, one, got in zip(PROMPTS, params, together, strict=True):
        assert engine(text, max_batch=1).generate([prompt], one) == [got]


def test_within_the_window_the_answer_is_that_of_the_exact_cache() -> None:
    prompts, params = [PROMPTS[i] for i in (0, 2, 3, 4)], SamplingParams(max_tokens=40)
    assert engine("turboquant:2", chunk=64).generate(prompts, params) == engine(None).generate(prompts, params)


def test_the_engine_refuses_bad_settings() -> None:
    for text, message in {
        "turboquant:7": "7 bits for keys",
        "turboquant:4,window=4096": "window is 4096 tokens, the pages of the cache hold",
    }.items():
        with pytest.raises(ValueError, match=message):
            engine(text)


def test_a_nan_is_reported_and_forgotten() -> None:
    e = engine("turboquant:4")
    good = e.generate(PROMPTS[:1], SamplingParams(max_tokens=8))
    saved = e.model.embed.weight[77].clone()
    e.model.embed.weight[77] = math.nan
    with pytest.raises(FloatingPointError):
        e.generate(PROMPTS[:1], SamplingParams(max_tokens=8))
    e.model.embed.weight[77] = saved
    assert e.generate(PROMPTS[:1], SamplingParams(max_tokens=8)) == good


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("turboquant:4", "decode"), ("turboquant:4", "prefill"), ("turboquant:k3v4,mode=full,keys=prod", "decode"),
        ("turboquant:k3v4,mode=full,keys=prod", "prefill"), ("turboquant:4,mode=shadow", "decode"),
        ("turboquant:2,first=1", "prefill"),
    ],
)  # fmt: skip
def test_the_step_may_be_captured(text: str, kind: str) -> None:
    """Captured, replayed and compared on a simulated GPU, with the ops as plain torch, which it sees into."""

    def factory():
        return simulated_step(engine(text, model={"device": "cuda"}), kind, limit=120)

    report = check_step(factory, steps=3)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []


# --------------------------------------------------------------------------------------------------------- a GPU

ON_GPU = ["turboquant:4", "turboquant:k3v4,mode=full", "turboquant:2,window=16,first=1", "turboquant:4,keys=prod"]


def gpu_engine(text: str, **options: Any) -> Engine:
    """In codes from the first token on."""
    return engine(f"{text},short=0", model={"device": "cuda:0"}, **({"capture": True} | options))


@pytest.mark.gpu
@pytest.mark.parametrize("text", [*ON_GPU, "turboquant:4,mode=shadow"])
def test_replay_is_proven_on_a_gpu(text: str) -> None:
    e = gpu_engine(text)
    layers = [found for found in e.executor.cache.layers if found is not None]
    state = {f"codes {i}": found.codes for i, found in enumerate(layers)} | {"squares": e.executor.cache.squares}
    state |= {f"ring {i}": found.ring for i, found in enumerate(layers) if found.ring is not None}
    g = torch.Generator().manual_seed(0)

    def rows(n: int) -> dict[str, Tensor]:
        found = {
            name: t.cpu()[:n] * 0
            for name, t in row_inputs(n, e.executor.sizes.per_row, PLAIN, torch.device("cpu")).items()
        }
        return found | {
            "positions": torch.randint(0, 110, (n,), generator=g).int(),
            "limits": torch.randint(100, 128, (n,), generator=g).int(),
            "table": 1 + torch.randperm(24, generator=g)[: 8 * n].view(n, 8).int(),
            "slots": 1 + torch.randperm(3, generator=g)[:n].int(),
        }

    decode = [{"drawn": torch.randint(0, 101, (n,), generator=g), **rows(n)} for n in (3, 1, 2, 3)]
    found = prove(e.executor.step("decode").stages[0], decode, reset=e.executor.cache.reset, state=state)
    assert [str(d) for d in found] == []
    prefill = [{"tokens": torch.randint(0, 101, (1, 16), generator=g), **rows(1)} for _ in range(3)]
    found = prove(e.executor.step("prefill").stages[0], prefill, reset=e.executor.cache.reset, state=state)
    assert [str(d) for d in found] == []


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("text", ON_GPU)
def test_captured_generation_is_the_eager_one_on_a_gpu(text: str) -> None:
    params = [SamplingParams(max_tokens=n) for n in (40, 9, 25, 31, 12)]
    captured = gpu_engine(text).generate(PROMPTS, params)
    assert gpu_engine(text, capture=False).generate(PROMPTS, params) == captured
    for prompt, one, got in zip(PROMPTS, params, captured, strict=True):
        assert gpu_engine(text, max_batch=1).generate([prompt], one) == [got]


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["turboquant:4", "turboquant:k3v4,mode=full"])
def test_the_step_is_clean_live(text: str) -> None:
    def factory():
        e = engine(text, model={"device": "cuda"}, max_context=64)
        rows = e.executor.ranks[0].inputs(0, True, PLAIN)
        rows["drawn"].copy_(torch.tensor([5, 9, 2]))
        rows["limits"].copy_(torch.tensor([60, 40, 3]))
        rows["table"].copy_(torch.arange(1, 1 + rows["table"].numel()).view_as(rows["table"]))
        rows["slots"].copy_(torch.tensor([2, 3, 1]))

        @torch.no_grad()
        def one():
            return e.executor.ranks[0].step(0, PLAIN, **rows)

        return one, lambda index: ()

    report = check_step(factory, simulate=False, live=True, steps=5)
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line, f.message) for f in report.findings]
    assert report.facts["replay equals eager"]
