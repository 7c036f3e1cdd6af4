"""Steps that run dry: the forms that `build` captures, and no trace in an engine's state."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kernel_family
from models import save_e8p, save_hf
from onegraph.engine import executor
from onegraph.engine.choice import PLAIN, Choice
from onegraph.engine.draft import NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.steps import Steps
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.ops.cuda import build
from test_graph import RecordedPool

PROMPTS = [[5, 17, 99, 4, 3, 2, 1, 0, 130, 7, 7, 7, 21], [9]]
SAMPLED = Choice(sampling=True).settled


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = tmp_path_factory.mktemp("model") / "model"
    save_hf("smollm2", path)
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, "cpu", torch.float32)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("choice", [PLAIN, SAMPLED])
def test_a_dry_run_has_the_forms_that_are_captured(
    model: Llama, drafts: bool, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    found: list[Any] = []
    real = Steps.of

    def of(self: Steps, *form: Any) -> Any:
        step = real(self, *form)

        def run(**inputs: torch.Tensor) -> torch.Tensor:
            shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()}
            if (form, shapes) not in found:
                found.append((form, shapes))
            return step(**inputs)

        return run

    monkeypatch.setattr(Steps, "of", of)
    made = Engine(model, max_batch=5, max_context=64, chunk=16, capture=True, draft=NgramDrafter if drafts else None)
    for decoding, kind in ((False, "prefill"), (True, "decode")):
        made.executor.ranks[0].run_once(decoding, choice, False)
        dry = found.copy()
        found.clear()
        made.executor.step(kind, **choice._asdict())
        captured = found.copy()
        found.clear()
        assert dry == captured
        counts = len(made.executor.speculation.counts) if drafts else 1
        assert len(dry) == (4 * counts if decoding else 1), "batches of 1, 2, 4 and 5"


def test_what_it_leaves_changes_no_text(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    params = SamplingParams(max_tokens=10)
    plain, used = (Engine(model, max_batch=2, max_context=64, chunk=16, capture=True) for _ in range(2))
    for decoding in (False, True):
        used.executor.ranks[0].run_once(decoding, PLAIN, False)
    assert used.generate(PROMPTS, params) == plain.generate(PROMPTS, params)


@pytest.mark.gpu
def test_a_first_run_on_a_gpu_writes_what_later_ones_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With empty caches the steps run dry once and no kernel is compiled twice; with full ones nothing runs dry."""
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3}, hidden_size=384, intermediate_size=256)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled: list[Any] = []
    dry: list[bool] = []
    compile_one, run_once = build._compile, Steps.run_once
    monkeypatch.setattr(build, "_compile", lambda *given: (compiled.append(given[1:4]), compile_one(*given))[1])
    monkeypatch.setattr(Steps, "run_once", lambda self, *given: (dry.append(given[0]), run_once(self, *given))[1])
    texts, runs = [], []
    for _ in range(2):
        kernel_family.forget()
        with Checkpoint.open(tmp_path / "model") as checkpoint:
            model = Llama.load(checkpoint, "cuda", torch.bfloat16)
        engine = Engine(model, max_batch=3, max_context=64, chunk=16)
        texts.append(engine.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0.0)))
        runs.append(dry.copy())
        assert compiled
        assert len(compiled) == len({(text, tuple(options)) for text, _, options in compiled})
    assert runs == [[False, True]] * 2
    assert texts[0] == texts[1]
    kernel_family.forget()
