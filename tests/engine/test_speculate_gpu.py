"""Rounds that check drafts, on a GPU: the text is that without drafts, and replays equal eager rounds."""

from functools import partial

import pytest
import torch

from onegraph.engine.draft import ModelDrafter, NgramDrafter, OracleDrafter
from onegraph.engine.params import SamplingParams
from onegraph.ops.cuda import decode_round
from onegraph.runtime.prove import prove
from test_engine import dense
from test_engine_gpu import PROMPTS, engine
from test_speculate import CODES, TURNS, held, kept_and_not, near, round_inputs
from tiny_decoder import TinyDecoder

pytestmark = pytest.mark.gpu

KINDS = ["ngram", "same", "other", "oracle"]


@pytest.fixture(scope="module")
def model():
    return TinyDecoder(device="cuda:0")


def drafter(kind, model, texts=((0,),)):
    return {
        "ngram": NgramDrafter,
        "same": partial(ModelDrafter, model),
        "other": partial(ModelDrafter, TinyDecoder(device="cuda:0", seed=5)),
        "oracle": partial(OracleDrafter, texts, 0.8, 101),
    }[kind]


@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_without_drafts(model, kind, warm):
    fields = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if warm else {}
    params = [SamplingParams(max_tokens=40, seed=len(PROMPTS) * 5 + i, **fields) for i in range(len(PROMPTS))]
    expected = [dense(model, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    for capture, tokens in ((None, 3), (None, "auto"), ("split", 7), (False, 1)):
        e = engine(model, draft=drafter(kind, model, texts), draft_tokens=tokens, capture=capture)
        assert e.generate(PROMPTS, params) == expected, (capture, tokens)
    if kind in ("same", "oracle"):
        assert e.stats.decode_steps < e.stats.decode_tokens


@pytest.mark.parametrize("kind", ["ngram", "same", "oracle"])
def test_rounds_know_min_p_and_log_probabilities(model, kind):
    fields = {"temperature": 1.2, "top_p": 0.95, "min_p": 0.1}
    params = [SamplingParams(max_tokens=30, seed=i, logprobs=3, **fields if i else {}) for i in range(len(PROMPTS))]
    expected = engine(model).complete(PROMPTS, params)
    texts = [[*prompt, *s.output] for prompt, s in zip(PROMPTS, expected, strict=True)]
    for capture in (None, False):
        e = engine(model, draft=drafter(kind, model, texts), draft_tokens=3, capture=capture)
        for found, wanted in zip(e.complete(PROMPTS, params), expected, strict=True):
            assert [told.token for told in found.logprobs] == found.output == wanted.output
            values = [[told.logprob for told in s.logprobs] for s in (found, wanted)]
            assert values[0] == pytest.approx(values[1], abs=1e-3)
        assert e.stats.accepted_tokens > (0 if kind == "ngram" else 10)


@pytest.mark.parametrize("kv", [CODES, TURNS])
@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["ngram", "near", "oracle"])
def test_the_text_from_codes_is_that_without_drafts(kind, warm, kv):
    """In float32; window and turn are crossed with wrong drafts under way."""
    model = TinyDecoder(device="cuda:0", head_dim=64)
    fields = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if warm else {}
    params = [SamplingParams(max_tokens=60, seed=len(PROMPTS) * 5 + i, **fields) for i in range(len(PROMPTS))]
    exact = engine(model).generate(PROMPTS, params)
    for capture, counts in ((True, (3, 7)), ("split", (7,)), (False, (1,))):
        expected = engine(model, **held(kv), capture=capture).generate(PROMPTS, params)
        assert expected != exact, "the case would show no codes"
        texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
        draft = partial(ModelDrafter, near(model)) if kind == "near" else drafter(kind, model, texts)
        for tokens in counts:
            e = engine(model, **held(kv), draft=draft, draft_tokens=tokens, capture=capture)
            assert e.generate(PROMPTS, params) == expected, (capture, tokens)
            assert kept_and_not(e) > (5 if kind == "ngram" else 20)
            assert {exact for *_, exact in e.executor.groups} == ({True, False} if kv == TURNS else {False})


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rounds_are_proven(model, kind, sampling):
    proven(engine(model, draft=drafter(kind, model), draft_tokens=3), 3, sampling)


@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_rounds_that_attend_in_one_launch_are_proven(drafts, monkeypatch):
    model, sizes = TinyDecoder(device="cuda:0", head_dim=64, dtype=torch.bfloat16), []
    attend = decode_round.attend
    monkeypatch.setattr(decode_round, "attend", lambda call: (sizes.append(call.qkv.shape[1]), attend(call))[1])
    proven(engine(model, draft=NgramDrafter, draft_tokens=drafts), drafts, sampling=False)
    assert set(sizes) == {1 + drafts}


@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_rounds_from_codes_are_proven(drafts, dtype):
    """Both ways to attend to them: in one launch in 16 bits, with the ring apart in float32."""
    model = TinyDecoder(device="cuda:0", head_dim=64, dtype=dtype)
    proven(engine(model, kv=CODES, draft=partial(ModelDrafter, near(model)), draft_tokens=drafts), drafts, False)


def proven(e, most, sampling):
    """Replays of rounds of an engine without drafts, and with `most`, equal eager ones."""
    place = e.executor.speculation.state
    caches = [e.executor.cache, getattr(e.executor.speculation.drafter, "cache", e.executor.cache)]
    state = {f"{i} {j}": t for i, cache in enumerate(caches) for j, t in enumerate(cache.tensors()) if t.numel()}
    g = torch.Generator().manual_seed(0)
    start = {
        # Of bytes in codes two may be a norm, which these make 0.1 to 1.
        name: torch.randn(t.shape, generator=g).to(t) if t.is_floating_point()
        else torch.randint(0x30, 0x3C, t.shape, generator=g).to(t)
        for name, t in state.items()
    }  # fmt: skip
    for name, high in (("history", 3), ("drafts", 3), ("found", 4)):
        state[name] = getattr(place, name)
        start[name] = torch.randint(0, high, state[name].shape, generator=g).to(state[name])

    def reset():
        for name, tensor in state.items():
            tensor.copy_(start[name])

    # Page 0 and ring 0 take what is nobody's, several tokens in one place.
    owned = {name: t if name in ("history", "drafts", "found") else t[1:] for name, t in state.items()}
    for drafts in (0, most):
        (runner,) = e.executor.step("decode", sampling=sampling, drafts=drafts).stages
        tables = [1 + torch.randperm(50, generator=g)[: n * 10].view(n, 10) for n in (5, 1, 3)]
        cases = [round_inputs(g, 100, table) for table in tables]
        assert prove(runner, cases, reset=reset, state=owned) == []
