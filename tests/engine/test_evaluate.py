"""Evaluation against the definitions, written position by position in float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from onegraph.engine import choice
from onegraph.engine.evaluate import evaluate
from onegraph.nn.attention import CausalAttention
from tiny_decoder import TinyDecoder

TOKENS = torch.randint(0, 101, (150,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return TinyDecoder()


@pytest.fixture(scope="module")
def other():
    """The same model with its weights a little moved, as quantizing would."""
    model = TinyDecoder()
    g = torch.Generator().manual_seed(9)
    for out in model.out:
        out.weight += 0.1 * torch.randn(out.weight.shape, generator=g) * out.weight.std()
    return model


def by_definition(model, reference, tokens, window):
    nll, reference_nll, kl, same = [], [], [], []
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window].tolist()
        for i in range(1, len(part)):
            q = model.dense_logits(part[:i])[0].double().softmax(0)
            p = reference.dense_logits(part[:i])[0].double().softmax(0)
            nll.append(-q[part[i]].log().item())
            reference_nll.append(-p[part[i]].log().item())
            kl.append((p * (p / q).log()).sum().item())
            same.append(q.argmax().item() == p.argmax().item())
    kl = torch.tensor(kl, dtype=torch.float64)
    return {
        "tokens": len(nll),
        "perplexity": math.exp(sum(nll) / len(nll)),
        "reference_perplexity": math.exp(sum(reference_nll) / len(nll)),
        "kl": kl.mean().item(),
        "kl_error": kl.std(correction=0).item() / math.sqrt(len(kl)),
        "top1": sum(same) / len(same),
    }


@pytest.mark.parametrize(
    ("window", "batch", "at_once"), [(40, 1, 1 << 24), (40, 2, 101 * 7), (16, 3, 1), (150, 1, 5000)]
)
def test_figures_are_those_of_the_definition(model, other, monkeypatch, window, batch, at_once):
    monkeypatch.setattr(choice, "LOGITS_AT_ONCE", at_once)
    expected = by_definition(other, model, TOKENS, window)
    assert 1e-3 < expected["kl"] < 1, "the case must be one between equal and unrelated models"
    assert 0.5 < expected["top1"] < 1
    seen = []
    got = evaluate(other, TOKENS, reference=model, window=window, batch=batch, progress=lambda *n: seen.append(n))
    windows = -(-150 // window)
    assert got.windows == windows
    assert seen[-1] == (windows, windows)
    for name, value in expected.items():
        assert getattr(got, name) == pytest.approx(value, rel=2e-5), name
    alone = evaluate(other, TOKENS, window=window)
    assert alone.perplexity == pytest.approx(expected["perplexity"], rel=1e-6)
    assert (alone.kl, alone.top1, alone.reference_perplexity) == (None, None, None)


def test_a_last_token_on_its_own_predicts_nothing(model):
    assert evaluate(model, TOKENS[:41], window=40).tokens == 39
    assert evaluate(model, TOKENS[:42], window=40).tokens == 40


def test_a_model_does_not_differ_from_itself(model):
    result = evaluate(model, TOKENS, reference=model, window=64)
    assert result.kl == 0
    assert result.kl_error == 0
    assert result.top1 == 1
    assert result.perplexity == result.reference_perplexity
    assert set(result.as_dict()) >= {"kl", "top1", "perplexity", "tokens"}


def test_logits_are_made_in_slices(model, monkeypatch):
    monkeypatch.setattr(choice, "LOGITS_AT_ONCE", 101 * 10)
    largest = []
    real = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: largest.append(len(hidden)) or real(hidden))
    evaluate(model, TOKENS, window=100, batch=1)
    assert max(largest) == 10
    assert sum(largest) == 99 + 49


class Fixed:
    """A model that gives the same logits everywhere."""

    def __init__(self, logits):
        self.row, self.max_context, self.devices = torch.tensor(logits), 1000, [torch.device("cpu")]
        self.dense_attention = CausalAttention()
        self.config = SimpleNamespace(vocab_size=len(logits))

    def __call__(self, tokens, cache):
        return torch.zeros(*tokens.shape, 1)

    def logits(self, hidden):
        return self.row.expand(len(hidden), -1).clone()


def test_impossible_tokens_of_the_reference_cost_nothing():
    """0 * log 0 counts as 0: a reference that excludes a token says nothing about what the model gives it."""
    result = evaluate(
        Fixed([0.0, 0.0, 0.0]), torch.tensor([0, 1, 0, 1]), reference=Fixed([0.0, 0.0, -math.inf]), window=4
    )
    assert result.kl == pytest.approx(math.log(3 / 2), rel=1e-6)
    assert result.perplexity == pytest.approx(3)
    assert result.reference_perplexity == pytest.approx(2)


@pytest.mark.parametrize(
    ("logits", "reference", "message"),
    [
        ([0.0, math.nan], None, "^model: gives NaN in windows 0 to 0"),
        ([0.0, 0.0], [math.nan, 0.0], "^reference model: gives NaN in windows 0 to 0"),
        ([0.0, -math.inf], None, "^model: gives a token of windows 0 to 0 no probability"),
    ],
)
def test_nan_and_infinite_losses_never_pass(logits, reference, message):
    with pytest.raises(FloatingPointError, match=message):
        evaluate(Fixed(logits), torch.tensor([0, 1, 1]), reference=Fixed(reference) if reference else None, window=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS[:1]}, "tokens: got 1; at least 2"),
        ({"tokens": TOKENS[None]}, r"tokens: got torch.int64 \[1, 150\]"),
        ({"tokens": TOKENS.float()}, "tokens: got torch.float32"),
        ({"tokens": TOKENS + 1}, "tokens: got token 101; the model's vocabulary is 0 to 100"),
        ({"tokens": TOKENS - 1}, "tokens: got token -1"),
        ({"window": 1}, "window: got 1; the model was loaded for 2 to 256"),
        ({"window": 257}, "window: got 257"),
        ({"batch": 0}, "batch: got 0"),
        (
            {"reference": TinyDecoder(vocabulary=99)},
            "vocabularies of different sizes {'model': 101, 'reference model': 99}",
        ),
        ({"reference": TinyDecoder(max_context=64)}, "the reference model was loaded for 2 to 64 tokens"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(model, change, message):
    arguments = {"tokens": TOKENS, "window": 100} | change
    tokens = arguments.pop("tokens")
    with pytest.raises(ValueError, match=message):
        evaluate(model, tokens, **arguments)
