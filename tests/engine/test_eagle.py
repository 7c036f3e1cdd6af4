"""EAGLE-3 heads as drafters: the text is the one without, entries line up with the target's, files as published."""

from functools import partial

import pytest
import torch

from eagle import load_head, net_of, overfit, write_head
from engines import MODES, maker
from models import save_e8p, save_hf
from onegraph.engine.draft import NgramDrafter
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.models.chain import ChainedLlama, chained
from onegraph.models.eagle import EagleConfig, EagleHead
from onegraph.models.llama import Llama
from onegraph.runtime.prove import prove
from test_speculate import round_inputs

LAYERS = (0, 1, 2)
PROMPTS = [[5, 9, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [77], [40, 41, 42, 43, 44, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
GREEDY = [SamplingParams(max_tokens=20)] * 4
WARM = [SamplingParams(max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, seed=i) for i in range(4)]
REDUCED = torch.arange(0, 131, 2)  # tokens of a head that names half of them


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("eagle")


@pytest.fixture(scope="module")
def model(path):
    save_hf("llama", path / "model")
    with Checkpoint.open(path / "model") as checkpoint:
        return Llama.load(checkpoint, max_context=256)


@pytest.fixture(scope="module")
def heads(model, path):
    """A directory with two random heads: `whole` may name every token, `reduced` half of them."""
    for name, vocabulary in (("whole", torch.arange(131)), ("reduced", REDUCED)):
        write_head(path / name, net_of(model, LAYERS, vocabulary), LAYERS, vocabulary)
    return path


@pytest.fixture(scope="module")
def whole(model, heads):
    return load_head(heads / "whole", model)


@pytest.fixture(scope="module")
def reduced(model, heads):
    return load_head(heads / "reduced", model)


@pytest.fixture(scope="module")
def plain(model):
    """Texts without drafts, greedy and sampled."""
    engine = Engine(model, max_batch=4, max_context=64, page_size=4, chunk=8)
    return engine.generate(PROMPTS, GREEDY), engine.generate(PROMPTS, WARM)


@pytest.fixture(params=MODES)
def make(request, model, monkeypatch):
    return maker(request.param, model, monkeypatch)


@pytest.mark.parametrize("kind", ["whole", "reduced"])
def test_the_text_is_that_without_drafts(make, plain, kind, request):
    """Batches and single rows, prompts in chunks, greedy and sampled; none of the drafts is likely to be right."""
    head = request.getfixturevalue(kind)
    for tokens in (1, 5) if kind == "whole" else (3,):
        engine = make(draft=partial(HeadDrafter, head), draft_tokens=tokens)
        for params, expected in zip((GREEDY, WARM), plain, strict=True):
            assert engine.generate(PROMPTS, params) == expected
            assert engine.generate(PROMPTS[1:2], params[1:2]) == expected[1:2]
        assert engine.stats.drafted_tokens > 0
        assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


@pytest.fixture(scope="module")
def trained(model, plain, path):
    """A head that knows the texts by heart, and those."""
    vocabulary = torch.arange(131)
    net = net_of(model, LAYERS, vocabulary)
    texts = [[*prompt, *answer] for answers in plain for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert overfit(model, net, texts, LAYERS, vocabulary) > 3
    return net, load_head(write_head(path / "trained", net, LAYERS, vocabulary), model)


def rate(engine):
    return engine.stats.accepted_tokens / engine.stats.drafted_tokens


def test_a_head_that_knows_the_text_is_nearly_always_right(model, plain, trained):
    """Taps, positions, tokens and feedback are those that it was trained with; one place off, and it knows nothing."""
    _, head = trained
    options = {"max_batch": 4, "max_context": 64, "page_size": 4, "chunk": 8, "draft_tokens": 3}
    for params, expected, least in zip((GREEDY, WARM), plain, (0.7, 0.35), strict=True):
        engine = Engine(model, draft=partial(HeadDrafter, head), **options)
        assert engine.generate(PROMPTS, params) == expected
        assert rate(engine) > least, (
            "what was drafted behind a text's end counts too; draws need the same probabilities"
        )
        assert engine.stats.decode_steps < (13 if params is WARM else 10)


class Late(HeadDrafter):
    """One place off: features of the token before."""

    def _read(self, passed):
        hidden = {i: tap.roll(1, dims=1) for i, tap in passed.made.hidden.items()}
        made = type(passed.made)(stream=passed.made.stream, hidden=hidden, following=passed.made.following)
        return super()._read(type(passed)(**{**passed.__dict__, "made": made}))


class Same(HeadDrafter):
    """One place off: the token itself, not the one behind it."""

    def _read(self, passed):
        made = type(passed.made)(stream=passed.made.stream, hidden=passed.made.hidden, following=passed.tokens)
        return super()._read(type(passed)(**{**passed.__dict__, "made": made}))


class Other(HeadDrafter):
    """One place off: the random numbers of the place before."""

    def _name(self, features, at, rows):
        return super()._name(features, at - 1, rows)


@pytest.mark.parametrize(("wrong", "kind", "most"), [(Late, 0, 0.4), (Same, 0, 0.4), (Other, 1, 0.25)])
def test_a_place_off_would_be_seen(model, plain, trained, wrong, kind, most):
    """What the test before holds to: drafts of a head that is fed otherwise fail, the text does not."""
    options = {"max_batch": 4, "max_context": 64, "page_size": 4, "chunk": 8, "draft_tokens": 3}
    engine = Engine(model, draft=partial(wrong, trained[1]), **options)
    assert engine.generate(PROMPTS, (GREEDY, WARM)[kind]) == plain[kind]
    assert rate(engine) < most


def test_served_features_are_those_of_training(model, trained, plain):
    """Each step of the unrolled net at each place, against the head over its paged cache."""
    net, head = trained
    text = torch.tensor([[*PROMPTS[3], *plain[0][3]]])
    taps = dict.fromkeys(LAYERS)
    model.run(0, model.enter(text), text, model.dense_attention, taps)
    with torch.no_grad():
        embedded = model.embed(torch.nn.functional.pad(text, (0, 3)))
        made = net.unroll(embedded, torch.cat([taps[i] for i in LAYERS], -1), 3)
        expected = [net.lm_head(each) for each in made]
    for t in (3, 17, 30):
        cache = head.new_cache(rows=1, pages=17, page_size=4, pages_per_row=16, spare=7)
        cache.block_table.copy_(1 + torch.randperm(16, generator=torch.Generator().manual_seed(t)).int())
        cache.counts.fill_(t + 1)
        features = head.features(None, {i: taps[i][:, : t + 1] for i in LAYERS})
        features = head(text[:, 1 : t + 2], features, cache)[:, -1:]
        cache.positions.fill_(t + 1)
        cache.counts.fill_(1)
        for step in range(3):
            logits = head.logits(head.leave(features))[:, 0]
            torch.testing.assert_close(logits, expected[step][:, t], atol=2e-4, rtol=2e-4)
            features = head(text[:, t + 2 + step : t + 3 + step], features, cache)
            cache.positions.add_(1)


def test_rows_share_beginnings_and_are_preempted(make, model, plain, trained):
    """Requests that join later, equal beginnings, few pages, one cancelled: the texts stay, and a head that knows them
    is as right as with pages of its own."""
    order = [3, 1, 3, 3, 1]
    for pages in (1 + 64, 1 + 18):
        engine = make(draft=partial(HeadDrafter, trained[1]), pages=pages, draft_tokens=3, max_batch=3)
        with engine.executor.running():
            scheduler = engine.scheduler.open()
            sequences = [engine.request(PROMPTS[i], GREEDY[i]) for i in order]
            for step in range(1000):
                if scheduler.idle and step > 12:
                    break
                if step % 3 == 0 and step // 3 < len(sequences):
                    scheduler.add(sequences[step // 3])
                if step == 14:
                    scheduler.cancel(sequences[4])
                scheduler.step()
            scheduler.close()
        assert [s.output for s in sequences[:4]] == [plain[0][i] for i in order[:4]]
        assert rate(engine) > 0.7
    assert engine.stats.preemptions > 0
    assert engine.stats.shared_tokens > 0


def test_what_a_page_holds_is_known_by_the_token_behind_it(model, whole):
    """Equal pages before unequal tokens: the head's entry of the last token differs, so the page is not shared."""
    engine = Engine(
        model, draft=partial(HeadDrafter, whole), draft_tokens=1, max_batch=2, max_context=64, page_size=4, chunk=8
    )
    shared = []
    with engine.executor.running():
        scheduler = engine.scheduler.open()
        for prompt in ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], [1, 2, 3, 4, 5, 6, 7, 8, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 3]):
            before = engine.stats.shared_tokens
            scheduler.add(engine.request(prompt, SamplingParams(max_tokens=2)))
            while not scheduler.idle:
                scheduler.step()
            shared.append(engine.stats.shared_tokens - before)
        scheduler.close()
    assert shared == [0, 4, 8]


@pytest.mark.parametrize("sampling", [False, True])
def test_the_rounds_are_proven(make, model, reduced, sampling):
    """Replay equals eager on outputs, buffers, caches and what waits."""
    engine = make(draft=partial(HeadDrafter, reduced), draft_tokens=3)
    if engine.mode == "eager":
        pytest.skip("nothing is replayed")
    g, place = torch.Generator().manual_seed(0), engine.executor.speculation.state
    state = {"history": place.history, "drafts": place.drafts, "found": place.found}
    caches = engine.executor.cache, engine.executor.speculation.drafter.cache
    state |= {f"{i} {j}": t for i, cache in enumerate(caches) for j, t in enumerate(cache.tensors())}

    def reset():
        g = torch.Generator().manual_seed(1)
        for name, tensor in state.items():
            high = 4 if name == "found" else 3
            whole = not tensor.is_floating_point()
            fresh = (
                torch.randint(0, high, tensor.shape, generator=g) if whole else torch.randn(tensor.shape, generator=g)
            )
            tensor.copy_(fresh)

    for drafts in (0, 3):
        (runner,) = engine.executor.step("decode", sampling=sampling, drafts=drafts).stages
        cases = [round_inputs(g, 20, torch.randint(1, 64, (n, 16), generator=g)) for n in (4, 1, 3)]
        assert prove(runner, cases, reset=reset, state=state) == []


def test_drafts_that_give_nan_change_no_text(make, model, plain, monkeypatch, tmp_path):
    """A head that names nothing but a token whose vector is NaN: what it left, in either cache, is cleared."""
    unused = min({*range(131)}.difference(*PROMPTS, *plain[0]))
    only = torch.tensor([unused])
    head = load_head(write_head(tmp_path / "h", net_of(model, LAYERS, only), LAYERS, only), model)
    embed = model.embed.forward
    poisoned = lambda tokens: embed(tokens).masked_fill((tokens == unused).unsqueeze(-1), torch.nan)  # noqa: E731
    monkeypatch.setattr(model.embed, "forward", poisoned)
    engine = make(draft=partial(HeadDrafter, head), draft_tokens=2, max_batch=2)
    params = [SamplingParams(max_tokens=5)] * 4
    assert engine.generate(PROMPTS, params) == [text[:5] for text in plain[0]]
    assert engine.stats.preemptions > 0, "no such draft was read"


def test_taps_are_in_the_models_own_basis(tmp_path):
    """Of E8P linears, which rotate what they read and turn back what they give, fused or chained: what the same model
    has with its weights decoded."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_e8p("llama", tmp_path / "m", rates={"bits": 4}, head_dim=64, **sizes)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        dense, coded = (Llama.load(checkpoint, decode=decode, max_context=64) for decode in (True, False))
    chain, found = chained(coded), []
    assert isinstance(chain, ChainedLlama)
    for model in (dense, coded, chain):
        cache = model.new_cache(rows=1, pages=2, page_size=16, pages_per_row=1)
        cache.block_table.fill_(1)
        cache.counts.fill_(1)
        for position, token in enumerate((5, 9)):
            taps, tokens = dict.fromkeys(LAYERS), torch.tensor([[token]])
            cache.positions.fill_(position)
            with torch.inference_mode():
                model.run(0, model.enter(tokens), tokens, cache, taps)
        found.append(torch.stack([taps[i] for i in LAYERS]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-3, rtol=2e-3)
    assert (found[0][0] - found[0][1]).abs().max() > 0.1


def test_who_asks_for_nothing_pays_nothing(model, monkeypatch):
    """No hidden states are kept aside where the drafter wants none."""
    seen = []
    run = Llama.run
    monkeypatch.setattr(Llama, "run", lambda *args: seen.append(len(args)) or run(*args))
    Engine(model, draft=NgramDrafter, draft_tokens=2, max_context=64).generate(PROMPTS[:1], GREEDY[:1])
    Engine(model, max_context=64).generate(PROMPTS[:1], GREEDY[:1])
    assert set(seen) == {5}, "self, stage, stream, tokens, cache"


# ------------------------------------------------------------------------------------------------------------- layouts


def rewritten(source, path, names, config):
    with Checkpoint.open(source) as checkpoint:
        tensors = {names(name): checkpoint.tensor(name) for name in checkpoint.names}
        write_checkpoint(path, config(checkpoint.config), [(n, t) for n, t in tensors.items() if n is not None])
    return path


def specforge(config, **more):
    """The same head as EAGLE and SpecForge write it: one object, layers counted by what comes out of them."""
    layer = config["transformer_layer_config"]
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["draft_vocab_size"]}
    return layer | own | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}} | more


def test_both_layouts_are_read(model, heads, reduced, plain, tmp_path):
    midlayer = rewritten(heads / "reduced", tmp_path / "m", lambda n: n.replace("layers.0.", "midlayer."), specforge)
    other = load_head(midlayer, model)
    assert other.layers == reduced.layers
    for (name, a), (_, b) in zip(reduced.named_buffers(), other.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, msg=name)


def test_a_head_without_ends_has_those_of_the_model(model, heads, tmp_path):
    """No embedding and no output head: the target's. With an embedding of its own: that one."""
    bare = rewritten(
        heads / "whole", tmp_path / "bare", lambda n: None if n in ("lm_head.weight", "d2t", "t2d") else n, dict
    )
    head, x = load_head(bare, model), torch.randn(2, 72)
    assert head.vocabulary is None
    torch.testing.assert_close(head.logits(x), model.logits(x))
    with Checkpoint.open(bare) as checkpoint:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
        own = torch.randn(131, 72)
        write_checkpoint(tmp_path / "own", checkpoint.config, (tensors | {"embed_tokens.weight": own}).items())
    head = load_head(tmp_path / "own", model)
    torch.testing.assert_close(head._embed[0](torch.tensor([7]))[0], own[7])


def test_layers_that_a_config_does_not_name_are_those_of_the_paper(model, heads):
    with Checkpoint.open(heads / "whole") as checkpoint:
        config = checkpoint.config | {"eagle_aux_hidden_state_layer_ids": None}
    assert EagleConfig.from_dict(config).behind(32) == (1, 15, 28)  # what goes into layers 2, 16 and 29


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; supported is 'eagle3'"),
        ({"norm_before_fc": True}, "norm_before_fc is True; an EAGLE-3 head is not known to have this key"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"behind the layers \[0, 1, 3\]; the model has 0 to 2"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, r"is \[0, 2, 3\]; it must list layers from 1 on"),
        ({"target_hidden_size": 80}, "target_hidden_size is 80, the model's is 72: it is another model's head"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None; it must be an object"),
    ],
)
def test_what_is_not_supported_is_said(model, heads, tmp_path, changes, said):
    other = rewritten(heads / "whole", tmp_path / "h", lambda n: n, lambda config: config | changes)
    with pytest.raises(ValueError, match=said):
        load_head(other, model)


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ({"model_type": "qwen3"}, "the head's layer is a 'qwen3'; supported is 'llama'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; supported are heads of 1 layer"),
        ({"vocab_size": 140}, "vocab_size is 140, the model's is 131"),
    ],
)
def test_layers_that_are_not_supported_are_said(model, heads, tmp_path, inside, said):
    def config(given):
        return given | {"transformer_layer_config": given["transformer_layer_config"] | inside}

    other = rewritten(heads / "whole", tmp_path / "h", lambda n: n, config)
    with pytest.raises(ValueError, match=said):
        load_head(other, model)


def test_damaged_files_are_said(model, heads, tmp_path):
    def without(*names):
        return lambda n: None if n in names else n

    with pytest.raises(CheckpointError, match=r"1 missing: 'fc.weight'"):
        load_head(rewritten(heads / "whole", tmp_path / "a", without("fc.weight"), dict), model)
    with pytest.raises(CheckpointError, match=r"1 missing: 'd2t'"):
        load_head(rewritten(heads / "reduced", tmp_path / "b", without("d2t"), dict), model)
    with Checkpoint.open(heads / "reduced") as checkpoint:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
        tensors["d2t"][-1] = 100
        write_checkpoint(tmp_path / "c", checkpoint.config, tensors.items())
    with pytest.raises(CheckpointError, match="d2t names tokens outside of 0 to 130"):
        load_head(tmp_path / "c", model)
    assert isinstance(load_head(heads / "reduced", model), EagleHead)
