"""Heads that go on from the target's hidden states, on a GPU: captured, split and eager rounds, the text as without."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import deepseek_published as published
import test_assistant
import test_draft_layers
import test_mtp
from eagle import load_head, net_of, overfit, write_head
from models import save_e8p, save_hf
from onegraph.api.drafting import own_layers
from onegraph.engine.draft_assistant import AssistantDrafter
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.engine import Engine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8P
from onegraph.models.assistant import Assistant
from onegraph.models.chain import ChainedLlama, chained
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.llama import Llama
from onegraph.models.mtp import DraftLayer
from onegraph.runtime.prove import prove
from test_eagle import GREEDY, LAYERS, PROMPTS, WARM, rate
from test_speculate import CODES, TURNS, held, kept_and_not, round_inputs

pytestmark = pytest.mark.gpu
SIZES = {"max_batch": 4, "max_context": 64, "page_size": 16, "chunk": 16}


@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    """(model, head) in float32, the head trained on the model's texts."""
    path = tmp_path_factory.mktemp("eagle")
    save_hf("llama", path / "model", head_dim=64)
    with Checkpoint.open(path / "model") as checkpoint:
        model = Llama.load(checkpoint, "cuda:0", max_context=256)
    engine, vocabulary = Engine(model, **SIZES), torch.arange(131, device="cuda:0")
    answers = [engine.generate(PROMPTS, params) for params in (GREEDY, WARM)]
    texts = [[*prompt, *answer] for each in answers for prompt, answer in zip(PROMPTS, each, strict=True)]
    net = net_of(model, LAYERS, vocabulary)
    overfit(model, net, texts, LAYERS, vocabulary)
    return model, load_head(write_head(path / "head", net, LAYERS, vocabulary), model)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    path = tmp_path_factory.mktemp("mtp") / "m"
    published.write(path, published.plain(published.TINY), published.make(published.TINY)[1])
    with Checkpoint.open(path) as checkpoint:
        model = DeepseekV4.load(checkpoint, "cuda:0", max_context=256)
    return model, own_layers(model, path)


@pytest.mark.parametrize("capture", [None, "split", False])
def test_the_text_with_a_head_is_that_without(eagle, capture):
    model, head = eagle
    for params in (GREEDY, WARM):
        expected = Engine(model, **SIZES, capture=capture).generate(PROMPTS, params)
        for tokens in (3, "auto"):
            engine = Engine(model, **SIZES, capture=capture, draft=partial(HeadDrafter, head), draft_tokens=tokens)
            assert engine.generate(PROMPTS, params) == expected
    engine = Engine(model, **SIZES, capture=capture, draft=partial(HeadDrafter, head), draft_tokens=3)
    engine.generate(PROMPTS, GREEDY)
    assert rate(engine) > 0.6


@pytest.mark.parametrize("kv", [CODES, TURNS])
@pytest.mark.parametrize("capture", [True, "split", False])
def test_the_text_from_codes_with_a_head_is_that_without(eagle, capture, kv):
    """Longer than what the head has learned, so that many drafts are wrong."""
    model, head = eagle
    sizes = SIZES | {"max_context": 96, "capture": capture} | held(kv)
    for params in ([replace(each, max_tokens=70) for each in some] for some in (GREEDY, WARM)):
        expected = Engine(model, **sizes).generate(PROMPTS, params)
        exact = Engine(model, **sizes | {"kv": None}).generate(PROMPTS, params)
        assert expected != exact, "the case would show no codes"
        for tokens in (3, 7):
            engine = Engine(model, **sizes, draft=partial(HeadDrafter, head), draft_tokens=tokens)
            assert engine.generate(PROMPTS, params) == expected
            print("STATS", kv, tokens, engine.stats.drafted_tokens, engine.stats.accepted_tokens)
            assert kept_and_not(engine) > 20


@pytest.mark.parametrize("capture", [None, "split", False])
def test_the_text_with_draft_layers_is_that_without(deepseek, capture):
    model, drafter = deepseek
    sizes = SIZES | {"page_size": 128}
    for params in (GREEDY, WARM):
        expected = Engine(model, **sizes, capture=capture).generate(PROMPTS, params)
        engine = Engine(model, **sizes, capture=capture, draft=drafter, draft_tokens=3)
        assert engine.generate(PROMPTS, params) == expected
        assert engine.stats.drafted_tokens > 0


def proven(engine, vocabulary, pages, sampling, reach=60):
    g, place = torch.Generator().manual_seed(0), engine.executor.speculation.state
    state = {"history": place.history, "drafts": place.drafts, "found": place.found}
    caches = engine.executor.cache, engine.executor.speculation.drafter.cache
    state |= {f"{i} {j}": t for i, cache in enumerate(caches) for j, t in enumerate(cache.tensors())}

    def reset():
        g = torch.Generator().manual_seed(1)
        for tensor in state.values():
            # Of bytes in codes two may be a norm, which these make 0.1 to 1.
            low, high = (0x30, 0x3C) if tensor.dtype == torch.uint8 else (0, 3)
            whole = torch.randint(low, high, tensor.shape, generator=g)
            tensor.copy_(torch.randn(tensor.shape, generator=g) if tensor.is_floating_point() else whole)

    # Page 0 and ring 0 take what is nobody's, several tokens in one place.
    owned = {name: t if name in ("history", "drafts", "found") else t[1:] for name, t in state.items()}
    for drafts in (0, 3):
        (runner,) = engine.executor.step("decode", sampling=sampling, drafts=drafts).stages
        cases = [round_inputs(g, reach, torch.arange(1, 1 + n * pages).view(n, pages)) for n in (4, 1, 3)]
        for case in cases:
            case["drawn"] %= vocabulary
        assert prove(runner, cases, reset=reset, state=owned) == []


@pytest.mark.parametrize("kv", [None, CODES])
@pytest.mark.parametrize("sampling", [False, True])
def test_rounds_with_a_head_are_proven(eagle, sampling, kv):
    model, head = eagle
    sizes = SIZES | {"max_context": 96} | held(kv)
    proven(Engine(model, **sizes, draft=partial(HeadDrafter, head), draft_tokens=3), 131, 6, sampling)


SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
LATENT = {
    "num_key_value_heads": 4, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 64,
    "q_lora_rank": 64,
}  # fmt: skip
OWN = {
    "qwen3_5": SMALL | {"head_dim": 64, "layer_types": ["linear_attention", "full_attention"]},
    "glm4_moe": SMALL | {"head_dim": 64},
    "deepseek_v3": SMALL | LATENT,
    "gemma4": {"head_dim": 64, "global_head_dim": 128},
    "gemma4_e": {"head_dim": 64, "global_head_dim": 128},
    "nemotron_h": {
        "hidden_size": 128, "num_attention_heads": 4, "head_dim": 64, "mamba_head_dim": 32, "moe_latent_size": 64,
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", OWN)
@pytest.mark.parametrize("capture", [None, "split", False])
def test_the_text_with_the_models_own_drafts_is_that_without(variant, capture, tmp_path):
    """Layers behind the last, `mtp` layers, and assistants that read the model's own cache."""
    save = test_assistant.save if variant.startswith("gemma4") else test_mtp.save
    save(variant, tmp_path, **OWN[variant])
    target = tmp_path / ("target" if variant.startswith("gemma4") else "model")
    with Checkpoint.open(target) as checkpoint:
        model = Llama.load(checkpoint, "cuda:0", max_context=64)
        drafter = None if variant.startswith("gemma4") else partial(HeadDrafter, DraftLayer.load(checkpoint, model))
    if drafter is None:
        with Checkpoint.open(tmp_path / "assistant") as checkpoint:
            drafter = partial(AssistantDrafter, Assistant.load(checkpoint, model))
    for params in (GREEDY, WARM):
        expected = Engine(model, **SIZES, capture=capture).generate(PROMPTS, params)
        engine = Engine(model, **SIZES, capture=capture, draft=drafter, draft_tokens=3)
        assert engine.generate(PROMPTS, params) == expected
        assert engine.stats.drafted_tokens > 0


def test_a_quantized_draft_layer_runs_in_its_codes(tmp_path):
    """E8P in bfloat16, the projection and the block; it names what the layer decoded to dense names."""
    test_draft_layers.made("qwen3_5", tmp_path, bits=2, draft_layers=4)
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        model = Llama.load(checkpoint, "cuda:0", torch.bfloat16, max_context=64)
        draft, dense = DraftLayer.load(checkpoint, model), DraftLayer.load(checkpoint, Llama.load(checkpoint))
    assert draft.projection.format is E8P[4]
    g = torch.Generator().manual_seed(0)
    text, features = torch.randint(0, 131, (2, 9), generator=g), torch.randn(2, 9, 128, generator=g)
    found = []
    for layer, device in ((draft, "cuda:0"), (dense, "cpu")):
        given = layer._target[0].embed(text.to(device)), features.to(device, layer.dtype)
        found.append(layer.run(layer.inputs(*given), model.dense_attention).total().float().cpu())
    assert (found[0] - found[1]).norm() < 0.03 * found[1].norm()


@pytest.mark.parametrize("sampling", [False, True])
def test_rounds_with_draft_layers_are_proven(deepseek, sampling):
    model, drafter = deepseek
    engine = Engine(model, **SIZES | {"page_size": 128}, draft=drafter, draft_tokens=3)
    proven(engine, model.config.vocab_size, 1, sampling, reach=20)


@pytest.mark.parametrize("kv", [None, CODES])
def test_a_quantized_model_that_runs_in_chains_drafts_too(tmp_path, kv):
    """Fused E8P linears in bfloat16, one launch between attentions for a single token: taps are taken there too."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_e8p("llama", tmp_path / "model", rates={"bits": 4}, head_dim=64, **sizes)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = chained(Llama.load(checkpoint, "cuda:0", torch.bfloat16, max_context=256))
    assert isinstance(model, ChainedLlama)
    vocabulary = torch.arange(131, device="cuda:0")
    head = load_head(write_head(tmp_path / "head", net_of(model, LAYERS, vocabulary), LAYERS, vocabulary), model)
    sizes = SIZES | {"max_context": 96} | held(kv)
    engine = Engine(model, **sizes, draft=partial(HeadDrafter, head), draft_tokens=3)
    for prompt, params in zip(PROMPTS, GREEDY, strict=True):
        assert len(engine.generate([prompt], replace(params, max_tokens=70))[0]) == 70
        assert engine.stats.drafted_tokens > 0
    proven(engine, 131, 6, False)
