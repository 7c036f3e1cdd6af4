"""A small Llama in E8P, end to end with each family of kernels: replays are eager steps, texts are eager texts.

In bfloat16, with heads of 64 and 128, exact keys and values and codes of 4 bits. On a CPU, where the references run,
graphs are recorded ones, and a text without them is another: the last chunk of a prompt is not padded there.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import save_e8p
from onegraph.engine import executor
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.ops.cuda import e8p_portable
from onegraph.runtime.prove import prove
from test_graph import RecordedPool

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
RATES = {64: {"bits": 2, "lm_head": 4}, 128: {"bits": 3}}  # by head size
PROMPTS = [[(7 * n + 3 * k) % 512 for n in range(length)] for k, length in enumerate((90, 1, 33))]
PLACES, PAGES = 160, 10  # of a row
KINDS = {"exact": None, "codes": "turboquant:4,window=16"}


@pytest.fixture(scope="module", params=RATES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families") / "model"
    save_e8p("llama", path, rates=RATES[request.param], head_dim=request.param, **SIZES)
    return path


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_proven_and_texts_are_eager_ones_on_a_gpu(
    folder: Path, kind: str, sampling: bool, kernel_family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, run = [], e8p_portable.run
    monkeypatch.setattr(e8p_portable, "run", lambda call: (launched.append(call.tokens), run(call))[1])
    check(folder, "cuda:0", KINDS[kind], sampling)
    if kernel_family == "portable":
        assert {1, 2, 32} <= set(launched)
    elif torch.cuda.get_device_capability() == (9, 0):
        assert not launched


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_proven_and_texts_are_eager_ones(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    check(folder, "cpu", KINDS[kind], sampling=True)


def check(folder: Path, device: str, kv: str | None, sampling: bool) -> None:
    with Checkpoint.open(folder) as checkpoint:
        model = Llama.load(checkpoint, device, torch.bfloat16)
    warm = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if sampling else {}
    params = [SamplingParams(max_tokens=24, seed=i, **warm) for i in range(len(PROMPTS))]
    sizes = {"max_batch": 2, "max_context": PLACES, "page_size": 16, "chunk": 32, "kv": kv}
    texts = {}
    for capture in (True, "split", False) if device != "cpu" else (True, "split"):
        engine = Engine(model, **sizes, capture=capture)
        texts[engine.mode] = engine.generate(PROMPTS, params)
        if capture:
            proven(engine, sampling)
    assert [len(text) for text in texts["captured"]] == [24] * len(PROMPTS)
    assert all(each == texts["captured"] for each in texts.values())


def proven(engine: Engine, sampling: bool) -> None:
    """Every step, from what the texts before have left in the cache."""
    state = kept(engine)
    start = {name: tensor.clone() for name, tensor in state.items()}
    g = torch.Generator().manual_seed(0)

    def reset() -> None:
        for name, tensor in state.items():
            tensor.copy_(start[name])

    def rows(n: int) -> dict[str, Tensor]:
        return {
            "positions": torch.randint(0, 110, (n,), generator=g).int(),
            "limits": torch.randint(110, PLACES, (n,), generator=g).int(),
            "table": (1 + torch.randperm(2 * PAGES, generator=g)[: n * PAGES]).view(n, PAGES).int(),
            "slots": torch.arange(1, n + 1).int(),
            "temperature": torch.rand(n, generator=g),
            "top_k": torch.randint(0, 50, (n,), generator=g).int(),
            "top_p": torch.rand(n, generator=g),
            "seed": torch.randint(0, 2**60, (n,), generator=g),
        }

    (decode,) = engine.executor.step("decode", sampling=sampling).stages
    cases = [{"drawn": torch.randint(0, 512, (n,), generator=g)} | rows(n) for n in (2, 1, 2)]
    assert [str(each) for each in prove(decode, cases, reset=reset, state=state)] == []
    (prefill,) = engine.executor.step("prefill", sampling=sampling).stages
    cases = [{"tokens": torch.randint(0, 512, (1, 32), generator=g)} | rows(1) for _ in range(2)]
    assert [str(each) for each in prove(prefill, cases, reset=reset, state=state)] == []


def kept(engine: Engine) -> dict[str, Tensor]:
    """Keys and values by name, but for page 0 and ring 0, which take what padding rows write."""
    cache = engine.executor.cache
    if hasattr(cache, "paged"):
        found = {f"codes {i}": layer.codes[1:] for i, layer in enumerate(cache.layers)}
        return found | {f"ring {i}": layer.ring[1:] for i, layer in enumerate(cache.layers)}
    return {f"{name} {i}": t[1:] for name in ("keys", "values") for i, t in enumerate(getattr(cache, name))}
