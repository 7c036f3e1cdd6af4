"""The engine with the real decoder: tokens against transformers, and the captured step proven on a GPU."""

import json

import pytest
import torch

from models import FAMILIES, save_e8p, save_hf
from onegraph.engine import executor
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.runtime.prove import prove
from published import LAYOUTS, save
from test_graph import RecordedPool

PROMPTS = [[5, 17, 99, 4, 3, 2, 1, 0, 130, 7, 7, 7, 21], [9], [(31 * n) % 131 for n in range(40)]]
PARAMS = SamplingParams(max_tokens=10)
PUBLISHED = ("Qwen3-FP8, bfloat16 scales", "NVIDIA FP8", "Qwen3-MoE FP8", "compressed-tensors MXFP4")


def load(path, device="cpu", dtype=torch.float32):
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, device, dtype)


@torch.no_grad()
def transformers_tokens(hf, prompt):
    tokens = torch.tensor([prompt])
    for _ in range(PARAMS.max_tokens):
        tokens = torch.cat((tokens, hf(tokens).logits[:, -1:].argmax(-1)), dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "variant", ["smollm2", "mistral_window", "smollm3", "mixtral", "qwen3_moe", "gpt_oss", "e8p", *FAMILIES]
)
def test_tokens_are_those_of_transformers(variant, tmp_path, monkeypatch):
    path = tmp_path / "model"
    hf = save_e8p("smollm2", path, rates={"bits": 3}) if variant == "e8p" else save_hf(variant, path)
    expected = [transformers_tokens(hf, prompt) for prompt in PROMPTS]
    model = load(path)
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    for capture in (False, True, "split"):
        engine = Engine(model, max_batch=2, max_context=64, page_size=8, chunk=16, capture=capture)
        assert engine.generate(PROMPTS, PARAMS) == expected, engine.mode


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "variant",
    [
        *("smollm2", "qwen3_window_bias", "smollm3", "mixtral", "qwen3_moe", "gpt_oss", "gemma3_256", *FAMILIES),
        *("e8p2", "e8p3", "e8p4", *PUBLISHED),
    ],
)
def test_the_captured_step_is_proven(variant, dtype, tmp_path):
    """Bit for bit: outputs, row state and KV cache, in full and split graphs, at every bucket."""
    path = tmp_path / "model"
    if variant.startswith("e8p"):
        save_e8p("smollm2", path, rates={"bits": int(variant[3:])})
    elif variant in PUBLISHED:
        save(LAYOUTS[variant], path)
    else:
        save_hf(variant, path)
    model = load(path, "cuda:0", dtype)
    g = torch.Generator().manual_seed(0)
    tokens = {}
    for capture in (True, "split", False):
        engine = Engine(model, max_batch=4, max_context=96, page_size=8, chunk=16, capture=capture)
        state = {str(i): tensor[1:] for i, tensor in enumerate(engine.executor.cache.tensors())}
        start = {name: torch.randn(t.shape, generator=g).to(t) for name, t in state.items()}

        def reset(state=state, start=start):
            for name, tensor in state.items():
                tensor.copy_(start[name])

        def rows(n):
            return {
                "positions": torch.randint(0, 60, (n,), generator=g).int(),
                "limits": torch.randint(0, 96, (n,), generator=g).int(),
                "table": (1 + torch.randperm(48, generator=g)[: n * 12]).view(n, 12).int(),
                "slots": torch.arange(1, n + 1).int(),
                "temperature": torch.rand(n, generator=g),
                "top_k": torch.randint(0, 50, (n,), generator=g).int(),
                "top_p": torch.rand(n, generator=g),
                "seed": torch.randint(0, 2**60, (n,), generator=g),
            }

        if capture:
            for sampling in (False, True):
                cases = [{"drawn": torch.randint(0, 131, (n,), generator=g)} | rows(n) for n in (4, 1, 3, 2)]
                assert (
                    prove(engine.executor.step("decode", sampling=sampling).stages[0], cases, reset=reset, state=state)
                    == []
                )
            cases = [{"tokens": torch.randint(0, 131, (1, 16), generator=g)} | rows(1) for _ in range(2)]
            assert prove(engine.executor.step("prefill").stages[0], cases, reset=reset, state=state) == []
        reset()
        tokens[engine.mode] = engine.generate(PROMPTS, PARAMS)
    assert tokens["captured"] == tokens["split"] == tokens["eager"]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["smollm2", "qwen3_moe", "gpt_oss", "e8p3", "gemma3_256", *FAMILIES])
def test_captured_text_is_eager_text_at_near_ties_too(variant, tmp_path):
    """A random model in bfloat16 has near-ties at every token, and a context of 4096 splits attention: an eager step of
    another shape (fewer pages, a shorter chunk) would round in another order and write another text."""
    path = tmp_path / "model"
    if variant.startswith("e8p"):
        save_e8p("smollm2", path, rates={"bits": int(variant[3:])})
    else:
        save_hf(variant, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    model = load(path, "cuda:0", torch.bfloat16)
    texts = [
        Engine(model, max_batch=2, max_context=4096, capture=capture).generate(PROMPTS, SamplingParams(max_tokens=200))
        for capture in (True, "split", False)
    ]
    assert texts[1:] == texts[:1] * 2
