"""Documents that ask for what stood in them, and what is counted of the answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import tiny
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import parse_kv
from onegraph.models.llama import Llama

WORDS = "the keeper of the light walked down to the harbour and counted the boats that came home "
LENGTH = 1500


@pytest.fixture
def bench(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    import turboquant_recall

    return turboquant_recall


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("hidden_size", 256), ("head_dim", 64), ("max_position_embeddings", 2048)):
            patch.setitem(tiny.CONFIG, name, value)
        return tiny.write_model(tmp_path_factory.mktemp("recall") / "model")


@pytest.fixture
def tokenizer(model: Path) -> Tokenizer:
    with Checkpoint.open(str(model)) as checkpoint:
        return Tokenizer(checkpoint)


class Knowing:
    """In a decoder's place: what it holds likeliest is the next token, but for those at `wrong`."""

    def __init__(self, tokens: list[int], vocabulary: int, wrong: set[int]) -> None:
        self.devices, self.dense_attention, self.vocabulary = [torch.device("cpu")], object(), vocabulary
        self.next = [*((t + 1) % vocabulary if i in wrong else t for i, t in enumerate(tokens)), 0][1:]

    def __call__(self, tokens: Tensor, cache: Any) -> Tensor:
        return torch.tensor(self.next, dtype=torch.float32).view(1, -1, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return 50.0 * torch.nn.functional.one_hot(hidden[:, 0].long(), self.vocabulary).float()


def test_what_is_hidden_is_asked_at_the_end(bench: Any, tokenizer: Tokenizer) -> None:
    text = tokenizer.encode(WORDS * 200)[:LENGTH]
    one, other = (bench.document(tokenizer, text, seed) for seed in (0, 1))
    assert len(one.tokens) == len(other.tokens) == LENGTH
    assert one.tokens != other.tokens
    for first, again in zip(one.first, one.again, strict=True):
        assert one.tokens[first] == one.tokens[again]
        assert again.stop - again.start == bench.PASSAGE
    assert one.distances == sorted(one.distances, reverse=True)
    assert one.distances[0] - one.distances[-1] > LENGTH / 4
    whole = tokenizer.decode(one.tokens)
    for where in one.answers:
        code = tokenizer.decode(one.tokens[where]).strip()
        assert len(code) == 5
        assert code.isdigit()
        assert whole.count(code) == 2
        question = tokenizer.decode(one.tokens[where.start - 60 : where.start])
        place = question.rsplit("of the ", 1)[1].removesuffix(" is")
        assert bench.SENTENCE.format(place=place, code=code).strip() in whole
    with pytest.raises(ValueError, match="tokens more to hide things in"):
        bench.document(tokenizer, text[:700], 0)


def test_what_counts_as_known(bench: Any, tokenizer: Tokenizer) -> None:
    asked = bench.document(tokenizer, tokenizer.encode(WORDS * 200)[:LENGTH], 0)
    vocabulary = 1 + max(asked.tokens)
    all_of_it = bench.PASSAGE - bench.GIVEN
    perfect = bench.recall(Knowing(asked.tokens, vocabulary, set()), asked, None)
    assert perfect.found == [True] * 4
    assert perfect.nats == pytest.approx([0] * 4, abs=1e-3)
    assert perfect.first == perfect.again == [all_of_it] * 4
    given, asked_for = asked.again[1].start, asked.again[1].start + bench.GIVEN
    wrong = {asked.answers[2].stop - 1, given, asked_for - 1, asked_for, asked.again[3].stop - 1, asked.first[0].stop}
    found = bench.recall(Knowing(asked.tokens, vocabulary, wrong), asked, None)
    assert found.found == [True, True, False, True]
    assert found.nats == pytest.approx([0, 0, 50, 0], abs=1e-3)
    assert found.first == [all_of_it] * 4
    assert found.again == [all_of_it, all_of_it - 1, all_of_it, all_of_it - 1]


def test_codes_are_read(bench: Any, model: Path, tokenizer: Tokenizer) -> None:
    """Answers of a random model are no likelier than any, but through coarser codes they differ more."""
    with Checkpoint.open(str(model)) as checkpoint:
        decoder = Llama.load(checkpoint, torch.device("cpu"), torch.float32, max_context=LENGTH)
    asked = bench.document(tokenizer, tokenizer.encode(WORDS * 200)[:LENGTH], 0)
    exact, *coded = (
        torch.tensor(bench.recall(decoder, asked, parse_kv(kv)).nats)
        for kv in ("exact", "turboquant:4", "turboquant:1")
    )
    four, one = ((exact - nats).abs().max() for nats in coded)
    assert 0 < 2 * four < one
