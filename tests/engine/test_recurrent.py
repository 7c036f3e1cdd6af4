"""A model with recurrent state: one slot a sequence, whatever the engine does with its rows."""

from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import MODES, maker
from onegraph.engine.draft import ModelDrafter, NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.nn.attention import PagedCache
from onegraph.nn.state import RecurrentSlots, StateKind
from tiny_decoder import TinyDecoder

PROMPTS = [[7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [2], [7, 1, 8, 2, 8, 1, 8, 2, 50, 51], [100, 0, 3], [5] * 20]
PARAMS = [SamplingParams(max_tokens=14 + i, temperature=i % 2 * 1.0, seed=i) for i in range(len(PROMPTS))]


class HybridCache(PagedCache):
    """Keys and values in pages, and a recurrent state for each layer."""

    prefix_cacheable = False

    def __init__(self, *, recurrent: RecurrentSlots, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.recurrent, self.slots = recurrent, torch.arange(1, 1 + sizes["rows"], dtype=torch.int32)

    @property
    def kinds(self) -> list[StateKind]:
        return [*super().kinds, self.recurrent]

    def view(self, rows: slice = slice(None), pages: int | None = None) -> "HybridCache":
        other = object.__new__(HybridCache)
        other.__dict__.update(super().view(rows, pages).__dict__)
        other.recurrent, other.slots = self.recurrent, self.slots[rows]
        return other


class HybridDecoder(TinyDecoder):
    """Each layer adds what a recurrence h <- h / 2 + tanh(W x) has gathered of all tokens before."""

    def __init__(self) -> None:
        super().__init__()
        dim, g = self.embed.weight.shape[1], torch.Generator().manual_seed(9)
        self.mix = [torch.randn(dim, dim, generator=g) * dim**-0.5 for _ in self.layers]

    def run(self, stage: int, stream: Tensor, tokens: Tensor, cache: Any) -> Tensor:
        state = getattr(cache, "cache", None)  # None: whole sequences from their first token
        for i, (layer, qkv, out) in enumerate(zip(self.layers, self.qkv, self.out, strict=True)):
            if state is None:
                h = torch.zeros_like(stream[:, 0])
                counts = torch.full((len(stream),), stream.shape[1])
            else:
                h, counts = state.recurrent.read(i, state.slots, state.positions), state.counts
            gathered = []
            for at in range(stream.shape[1]):
                new = h / 2 + torch.tanh(stream[:, at] @ self.mix[i])
                h = torch.where((at < counts).unsqueeze(1), new, h)
                gathered.append(h)
            if state is not None:
                state.recurrent.write(i, state.slots, counts, h)
            stream = stream + torch.tanh(out(cache.attend(layer, qkv(stream)))) + torch.stack(gathered, dim=1)
        return stream

    def new_cache(self, *, rows: int, pages: int, page_size: int, pages_per_row: int, kv: Any = None, spare: int = 0):
        dim = self.embed.weight.shape[1]
        recurrent = RecurrentSlots([torch.zeros(rows + 1, dim) for _ in self.layers])
        return HybridCache(
            recurrent=recurrent, layers=len(self.layers), pages=pages, page_size=page_size, kv_heads=self.kv_heads,
            head_dim=self.head_dim, rows=rows, pages_per_row=pages_per_row, device="cpu", dtype=self.dtype,
        )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> HybridDecoder:
    return HybridDecoder()


@pytest.fixture(params=MODES)
def make(request: pytest.FixtureRequest, model: HybridDecoder, monkeypatch: pytest.MonkeyPatch) -> Any:
    return maker(request.param, model, monkeypatch)


def test_greedy_tokens_are_those_of_the_dense_recomputation(make: Any, model: HybridDecoder) -> None:
    wanted = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(model.dense_logits(tokens).argmax()))
        wanted.append(tokens[len(prompt) :])
    engine = make()
    for _ in range(2):  # a second time, over what the first left in its slots
        assert engine.generate(PROMPTS, SamplingParams(max_tokens=12)) == wanted


def test_a_preempted_sequence_goes_on_with_the_same_tokens(make: Any) -> None:
    """Five texts in three rows and few pages, admitted while others decode: slots change hands."""
    alone = [make().generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    engine = make(max_batch=3, pages=1 + 11)
    with engine.executor.running(), closing(engine.scheduler.open()) as scheduler:
        requests = [engine.request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        for request in requests:
            scheduler.add(request)
        while not scheduler.idle:
            scheduler.step()
    assert engine.stats.preemptions
    assert engine.stats.shared_tokens == 0, "a page does not tell the state at its end"
    assert [request.output for request in requests] == alone


def test_drafts_are_refused_where_state_cannot_be_taken_back(model: HybridDecoder) -> None:
    for draft in (NgramDrafter, partial(ModelDrafter, TinyDecoder())):
        with pytest.raises(ValueError, match="draft: a round takes back up to 7 tokens; the model's state allows 0"):
            Engine(model, max_context=64, draft=draft)
