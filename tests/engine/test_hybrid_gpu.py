"""Hybrid models on a GPU: captured steps proven bit by bit, drafts, padding, and heads as the published models have."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models import save_hf
from onegraph.engine.draft import NgramDrafter, OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.runtime.prove import prove

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 17, 99, 4, 3, 2, 1, 0, 130, 7, 7, 7, 21], [9], [(31 * n) % 131 for n in range(40)]]
SIZES: dict[str, dict[str, Any]] = {
    "lfm2": {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 192},
    "qwen3_5": {
        "hidden_size": 256, "head_dim": 256, "num_attention_heads": 6, "num_key_value_heads": 1,
        "partial_rotary_factor": 0.25, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "max_position_embeddings": 1024,
    },
    "qwen3_5_moe": {
        "hidden_size": 256, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 1,
        "partial_rotary_factor": 0.25, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 1024,
    },
}  # fmt: skip


@pytest.fixture(params=SIZES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    save_hf(request.param, tmp_path, **SIZES[request.param])
    with Checkpoint.open(tmp_path) as checkpoint:
        return Llama.load(checkpoint, "cuda", torch.bfloat16)


def test_the_captured_step_is_proven(model: Any) -> None:
    """Outputs, row state, keys and values, and every slot's state, at every bucket; rows of padding among them."""
    g = torch.Generator().manual_seed(0)
    engine = Engine(model, max_batch=4, max_context=96, page_size=8, chunk=16)
    engine.generate(PROMPTS, SamplingParams(max_tokens=8))  # states of the kind that steps meet
    tensors = engine.executor.cache.tensors()
    state = {str(i): tensor[1:] for i, tensor in enumerate(tensors)}
    start = {name: tensor.clone() for name, tensor in state.items()}

    def reset() -> None:
        for name, tensor in state.items():
            tensor.copy_(start[name])

    def rows(n: int) -> dict[str, torch.Tensor]:
        return {
            "positions": torch.randint(8, 60, (n,), generator=g).int(),
            "limits": torch.randint(0, 96, (n,), generator=g).int(),
            "table": (1 + torch.randperm(48, generator=g)[: n * 12]).view(n, 12).int(),
            "slots": torch.arange(1, n + 1).int(),
            "temperature": torch.rand(n, generator=g),
            "top_k": torch.randint(0, 50, (n,), generator=g).int(),
            "top_p": torch.rand(n, generator=g),
            "seed": torch.randint(0, 2**60, (n,), generator=g),
        }

    cases = [{"drawn": torch.randint(0, 131, (n,), generator=g)} | rows(n) for n in (4, 1, 3, 2)]
    assert prove(engine.executor.step("decode").stages[0], cases, reset=reset, state=state) == []
    cases = [{"tokens": torch.randint(0, 131, (1, 16), generator=g)} | rows(1) for _ in range(2)]
    assert prove(engine.executor.step("prefill").stages[0], cases, reset=reset, state=state) == []
    assert not any(tensor[0].any() for tensor in tensors[-1:]), "slot 0 belongs to nobody"


def test_captured_text_is_eager_text(model: Any) -> None:
    params = SamplingParams(max_tokens=120)
    texts = [
        Engine(model, max_batch=2, max_context=256, capture=capture).generate(PROMPTS, params)
        for capture in (True, "split", False)
    ]
    assert texts[1:] == texts[:1] * 2


@pytest.mark.parametrize("variant", SIZES)
def test_states_are_taken_back(variant: str, tmp_path: Path) -> None:
    """Drafts, all of them wrong or most of them right, change no text; float32, since bfloat16 ties."""
    save_hf(variant, tmp_path, **SIZES[variant])
    with Checkpoint.open(tmp_path) as checkpoint:
        model = Llama.load(checkpoint, "cuda", torch.float32)
    params = SamplingParams(max_tokens=48)
    plain = Engine(model, max_batch=4, max_context=256).generate(PROMPTS, params)
    texts = [prompt + new for prompt, new in zip(PROMPTS, plain, strict=True)]
    for draft in (NgramDrafter, partial(OracleDrafter, texts, 0.0, 131), partial(OracleDrafter, texts, 0.8, 131)):
        engine = Engine(model, max_batch=4, max_context=256, draft=draft, draft_tokens=3)
        assert engine.generate(PROMPTS, params) == plain
