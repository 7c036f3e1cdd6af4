"""Trellis-coded models where an engine runs them: steps that may be captured, drafts, `eval --ab`, a server."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import simulated_step
from fuzz import tiny
from models import TILED, save_rotated
from onegraph import LLM
from onegraph.check import check_step
from onegraph.engine.ab import costs, exchanged
from onegraph.engine.draft import NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.evaluate import evaluate
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.trellis import TRELLIS, TrellisConfig
from onegraph.models.llama import Llama
from onegraph.models.load import load_decoder
from test_e8p_experts import checkpoint_of
from test_server import Running


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every linear, the head and the embedding in codes, of mixed rates."""
    path = tmp_path_factory.mktemp("trellis") / "m"
    rates = TrellisConfig(bits=3, layers={"model.layers.0.mlp.up_proj": 6}, lm_head=4, embed_tokens=5)
    save_rotated(rates, "qwen3", path, **TILED, num_hidden_layers=1)
    return path


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trellis") / "m"
    checkpoint_of("mixtral", path, 2, written=TrellisConfig, **TILED, num_hidden_layers=1)
    return path


@pytest.mark.parametrize("which", ["coded", "experts"])
def test_the_step_may_be_captured(which: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(which)

    def factory() -> Any:
        with Checkpoint.open(path) as checkpoint:
            model = Llama.load(checkpoint, "cuda", decode=False)
        assert model.blocks[0].out.linear.format in TRELLIS.values()  # type: ignore[union-attr]
        engine = Engine(model, max_batch=3, max_context=128, page_size=16, chunk=16, capture=False)
        return simulated_step(engine, "decode", limit=120)

    report = check_step(factory)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []


@pytest.mark.parametrize("which", ["coded", "experts"])
def test_drafts_change_no_token(which: str, request: pytest.FixtureRequest) -> None:
    """From codes: one token a step, verify passes of several, and prompts in chunks."""
    prompts, params = [[5, 6, 5, 6, 5, 6], [7, 8, 9] * 5], SamplingParams(max_tokens=16)
    sizes: dict[str, Any] = {"max_batch": 2, "max_context": 64, "page_size": 8, "chunk": 8, "capture": False}
    with Checkpoint.open(request.getfixturevalue(which)) as checkpoint:
        model = Llama.load(checkpoint, decode=False)
    plain = Engine(model, **sizes).generate(prompts, params)
    engine = Engine(model, **sizes, draft=NgramDrafter, draft_tokens=3)
    assert engine.generate(prompts, params) == plain
    assert engine.stats.drafted_tokens > 0


def test_components_one_by_one(tmp_path: Path) -> None:
    """`eval --ab`: the parts of a model whose rates differ, each against the dense weights that others keep."""
    tokens = torch.randint(0, 144, (60,), generator=torch.Generator().manual_seed(1))
    rates = {"model.layers.0.mlp.down_proj": 1, "model.layers.1.mlp.down_proj": 1}
    save_rotated(TrellisConfig(bits=8, layers=rates), "smollm2", tmp_path / "m", **TILED, num_hidden_layers=2)
    other = TrellisConfig(bits=8, layers=dict.fromkeys(rates, 16))
    save_rotated(other, "smollm2", tmp_path / "dense", **TILED, num_hidden_layers=2)
    mine, dense = (
        load_decoder(Checkpoint.open(tmp_path / name), "cpu", torch.float32, max_context=64, fused=False)
        for name in ("m", "dense")
    )
    found = {cost.component: cost for cost in costs(dense, exchanged(mine, dense), tokens, window=30)}
    assert list(found) == ["mlp down", "all"]  # the same codes elsewhere
    wanted = evaluate(mine, tokens, reference=dense, window=30)
    assert found["mlp down"].kl == wanted.kl > 0


def test_a_server_writes_what_generate_does(tmp_path: Path) -> None:
    """Of random codes: quantizing takes a minute."""
    rates = TrellisConfig(bits=3, layers={"model.layers.0.mlp.down_proj": 5})
    sizes = TILED | {"num_hidden_layers": 1, "vocab_size": len(tiny.TOKENS)}
    save_rotated(rates, "qwen3", tmp_path / "m", **sizes)
    tiny.write_tokenizer(tmp_path / "m")
    how: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 5}
    prompts = ["the thing", "in the inn"]
    with LLM(tmp_path / "m", max_model_len=96, device="cpu") as llm:
        wanted = [output.text for output in llm.generate(prompts, **how)]
    server = Running(tmp_path / "m")
    try:
        made = server.client.completions.create(model="m", prompt=prompts, **how)
    finally:
        server.end()
    assert [choice.text for choice in made.choices] == wanted
