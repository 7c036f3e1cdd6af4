"""Tuning of scales on the tiny decoder of test_quant.py: it helps, is judged by what it has not seen, and resumes."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.quant.quantize import quantize
from onegraph.quant.recipe import Recipe, Tune
from onegraph.quant.result import Quantized
from onegraph.quant.resumable import ResumableWork
from onegraph.quant.tune import PATIENCE, _Best, held_out
from test_quant import VOCAB, Tiny, divergence, same


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (24, 32), generator=torch.Generator().manual_seed(1))


def test_tuning_brings_the_divergence_down_and_keeps_codes(tokens: Tensor) -> None:
    model = Tiny()
    before = quantize(model, tokens, Recipe(bits=2))
    steps: list[tuple[int, int, str]] = []
    recipe = Recipe(bits=2, tune=Tune(epochs=20, batch=8, rate=3e-3))
    after = quantize(model, tokens, recipe, progress=lambda *step: steps.append(step))
    assert divergence(model, after, tokens) < 0.8 * divergence(model, before, tokens)
    for name, tensors in before.layers.items():
        assert torch.equal(tensors["codes"], after.layers[name]["codes"])
    assert torch.equal(after.layers["blocks.0.k"]["in_scale"], after.layers["blocks.0.v"]["in_scale"])
    assert steps[-1][0] == steps[-1][1]
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)


def test_tuning_that_makes_it_worse_is_given_up(tokens: Tensor) -> None:
    """Judged by sequences that are not learnt from: far too large steps leave the scales as they were."""
    steps: list[tuple[int, int, str]] = []
    recipe = Recipe(bits=2, tune=Tune(epochs=20, batch=8, rate=3.0))
    after = quantize(Tiny(), tokens, recipe, progress=lambda *step: steps.append(step))
    assert same(after, quantize(Tiny(), tokens, Recipe(bits=2)))
    tuning = [step for step in steps if step[2].startswith("tuning")]
    assert len({step[0] for step in tuning}) == PATIENCE * 3, "three steps an epoch"
    assert tuning[-1][0] == tuning[-1][1]


def test_the_best_epoch_counts(tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KL on what was held out is the lowest that any epoch had there, and its scales are those of that epoch."""
    seen: list[tuple[float, list[Tensor]]] = []
    look = _Best.look

    def looked(self: _Best, kl: float) -> None:
        seen.append((kl, [delta.detach().clone() for delta in self.now]))
        look(self, kl)

    monkeypatch.setattr(_Best, "look", looked)
    tuned = Tune(epochs=8, batch=8, rate=0.1, held_out=0.25)
    quantize(Tiny(), tokens, Recipe(bits=2, tune=tuned))
    best = min(range(len(seen)), key=lambda i: seen[i][0])
    assert 0 < best < len(seen) - 1, "neither the first nor the last, or this proves nothing"
    monkeypatch.setattr(_Best, "look", look)
    kept: list[list[Tensor]] = []
    put_back = _Best.put_back

    def put(self: _Best) -> None:
        put_back(self)
        kept.append([delta.detach().clone() for delta in self.now])

    monkeypatch.setattr(_Best, "put_back", put)
    quantize(Tiny(), tokens, Recipe(bits=2, tune=tuned))
    assert all(torch.equal(a, b) for a, b in zip(kept[0], seen[best][1], strict=True))


def test_a_killed_tuning_repeats_no_epoch(tokens: Tensor, tmp_path: Any) -> None:
    recipe = Recipe(bits=2, tune=Tune(epochs=4, batch=8))

    def run(partial: ResumableWork, stop: int = -1) -> tuple[Quantized | None, int]:
        steps = 0

        def count(done: int, total: int, what: str) -> None:
            nonlocal steps
            steps += what.startswith("tuning")
            if steps == stop:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            return quantize(Tiny(), tokens, recipe, partial, progress=count), steps
        return None, steps

    with ResumableWork(tmp_path / "work", "tiny") as partial:
        assert run(partial, stop=8) == (None, 8)
    with ResumableWork(tmp_path / "work", "tiny") as partial:
        made, steps = run(partial)
        assert steps == 12 - 6, "three steps an epoch, two epochs done"
        assert made is not None
        assert same(made, quantize(Tiny(), tokens, recipe))
        assert not (tmp_path / "work" / "tuning.safetensors").exists()


@pytest.mark.parametrize(
    ("count", "share", "held"), [(24, 1 / 16, 2), (8, 1 / 16, 1), (7, 1 / 16, 0), (24, 0.0, 0), (1, 0.5, 0)]
)
def test_sequences_held_out(count: int, share: float, held: int) -> None:
    judges, learnt = held_out(count, Tune(held_out=share), seed=3)
    assert len(judges) == held
    assert sorted([*judges.tolist(), *learnt.tolist()]) == list(range(count))


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}, {"held_out": 0.6}, {"held_out": float("nan")}])
def test_tuning_that_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="tune: "):
        Tune(**wrong)
