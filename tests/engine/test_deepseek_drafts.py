"""DeepSeek-V4's own draft layers as drafters: the text stays, drafts are those of the plain references."""

from functools import partial

import pytest
import torch

import test_deepseek_mtp as mtp
from deepseek_published import TINY, make, plain, write
from engines import maker
from onegraph.api.drafting import own_layers
from onegraph.check import check_step
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.ops.registry import reference_ops
from onegraph.runtime.prove import prove
from test_speculate import round_inputs

PROMPTS = [[5, 9, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], list(range(30, 56))]
GREEDY = [SamplingParams(max_tokens=9)] * 3
WARM = [SamplingParams(max_tokens=9, temperature=0.9, top_k=40, top_p=0.95, seed=i) for i in range(3)]
SIZES = {"max_batch": 2, "max_context": 256, "page_size": 128, "chunk": 16}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(decoder, what makes the drafter, the checkpoint's numbers)."""
    path = tmp_path_factory.mktemp("mtp") / "m"
    _, dense = make(TINY)
    write(path, plain(TINY), dense)
    with Checkpoint.open(path) as checkpoint:
        model = DeepseekV4.load(checkpoint, max_context=256)
    return model, own_layers(model, path), dense


@pytest.fixture(scope="module")
def texts(loaded):
    engine = Engine(loaded[0], **SIZES)
    return engine.generate(PROMPTS, GREEDY), engine.generate(PROMPTS, WARM)


@pytest.mark.parametrize(("mode", "tokens", "kinds"), [("eager", 7, 2), ("captured", 2, 1)])
def test_the_text_is_that_without_drafts(loaded, texts, mode, tokens, kinds, monkeypatch):
    """Three texts through two slots; windows of 16 that wrap."""
    model, drafter, _ = loaded
    engine = maker(mode, model, monkeypatch, **SIZES)(draft=drafter, draft_tokens=tokens)
    for params, text in zip((GREEDY, WARM)[:kinds], texts[:kinds], strict=True):
        assert engine.generate(PROMPTS, params) == text
    assert engine.stats.drafted_tokens > 0
    assert engine.executor.speculation.counts == (0, tokens)
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


def test_drafts_are_those_of_the_references(loaded, texts):
    """Each that was written at any place of any text, the first of a block and those that go on from it, against a
    plain reference over the whole text."""
    model, drafter, dense = loaded
    seen = []

    def watched(place):
        made = drafter(place)
        draft = made.draft

        def told(rows):
            found = draft(rows)
            for row, slot in enumerate(rows.inputs["slots"].tolist()):
                if found[row]:
                    at = int(rows.positions[row])
                    known = place.history[slot, : at + 1].tolist()
                    count = min(int(found[row]), int(rows.inputs["limits"][row]) - at)  # nobody reads those beyond
                    seen.append((known, place.drafts[slot, :count].tolist()))
            return found

        made.draft = told
        return made

    Engine(model, **SIZES, draft=watched, draft_tokens=3).generate(PROMPTS, GREEDY)
    assert len(seen) > 15
    for known, drafts in seen[::2]:
        assert drafts == expected(model, dense, known, len(drafts))


def expected(model, dense, known, count):
    text, reference = torch.tensor(known), mtp.Reference(dense)
    cache = model.new_cache(rows=1, pages=3, page_size=128, pages_per_row=2)
    cache.block_table.copy_(torch.tensor([[1, 2]]))
    cache.counts.fill_(len(known) - 1)
    with torch.inference_mode():
        tokens = text[None, :-1]
        streams, fed, found = model.run(0, model.enter(tokens), tokens, cache)[0], text[1:], []
        for _ in range(count):
            made, logits = reference(fed, streams)
            found.append(int(logits[-1].argmax()))
            fed, streams = torch.cat((fed, torch.tensor(found[-1:]))), torch.cat((streams, made[-1:]))
    return found


def test_the_rounds_are_proven(loaded, monkeypatch):
    """Replay equals eager on outputs, buffers, windows, rings and what waits."""
    model, drafter, _ = loaded
    engine = maker("captured", model, monkeypatch, **SIZES)(draft=drafter, draft_tokens=2)
    g, place = torch.Generator().manual_seed(0), engine.executor.speculation.state
    state = {"history": place.history, "drafts": place.drafts, "found": place.found}
    caches = engine.executor.cache, engine.executor.speculation.drafter.cache
    state |= {f"{i} {j}": t for i, cache in enumerate(caches) for j, t in enumerate(cache.tensors())}

    def reset():
        g = torch.Generator().manual_seed(1)
        for tensor in state.values():
            whole = torch.randint(0, 3, tensor.shape, generator=g)
            tensor.copy_(torch.randn(tensor.shape, generator=g) if tensor.is_floating_point() else whole)

    (runner,) = engine.executor.step("decode", drafts=2).stages
    case = round_inputs(g, 60, torch.arange(1, 5).view(2, 2))
    case["drawn"] %= TINY["vocab_size"]
    assert prove(runner, [case], reset=reset, state=state) == []


def test_the_round_may_be_captured(tmp_path):
    """`onegraph check` on the engine's own round with an MTP layer, in simulation."""
    write(tmp_path / "m", plain(TINY), make(TINY)[1])

    def factory():
        with Checkpoint.open(tmp_path / "m") as checkpoint:
            model = DeepseekV4.load(checkpoint, "cuda", max_context=256)
        engine = Engine(model, **SIZES, draft=own_layers(model, tmp_path / "m"), draft_tokens=2, capture=False)
        runner = engine.executor.step("decode", drafts=2)
        rows = round_inputs(torch.Generator().manual_seed(1), 60, torch.arange(1, 5).view(2, 2))
        rows |= {"limits": rows["positions"] + 60, "drawn": rows["drawn"] % TINY["vocab_size"]}
        runner.load(**rows)

        def step():
            with reference_ops():
                return runner.replay(2)

        return step, lambda index: ()

    report = check_step(factory, steps=3)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]


def test_a_checkpoint_without_draft_layers_is_refused(tmp_path):
    whole, tensors = plain(TINY), make(TINY)[1]
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    without = {"num_nextn_predict_layers": 0, "compress_ratios": whole["compress_ratios"][: TINY["num_hidden_layers"]]}
    for name, config, said in (
        ("told", whole | without, r"speculative: .* has no draft layers .*: use 'ngram'"),
        ("untold", whole, "speculative: .* missing: 'mtp.0"),
    ):
        write(tmp_path / name, config, tensors)
        with Checkpoint.open(tmp_path / name) as checkpoint:
            model = DeepseekV4.load(checkpoint, max_context=64)
        with pytest.raises(ValueError, match=said):
            own_layers(model, tmp_path / name)


def test_which_drafter_a_checkpoint_gives(loaded):
    _, drafter, _ = loaded
    assert isinstance(drafter, partial)
    assert drafter.func is HeadDrafter
