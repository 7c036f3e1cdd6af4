"""TurboQuant as transformers' KV cache: right, compileable, and out of the way of other caches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models import hf_model
from onegraph.integrations.hf import TurboQuantCache
from onegraph.integrations.hf.cache import ATTENTION, ExactLayer, TurboQuantLayer

transformers = pytest.importorskip("transformers")
from transformers import CompileConfig, StaticCache  # noqa: E402

SIZES = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
TOKENS = torch.arange(20).unsqueeze(0) * 5 % 131
IMPLEMENTATIONS = (ATTENTION, "sdpa", "eager")


def model(variant: str, implementation: str, **changes: Any) -> Any:
    found = hf_model(variant, **(SIZES | changes))
    found.set_attn_implementation(implementation)
    return found


def greedy(hf: Any, tokens: Tensor = TOKENS, count: int = 12, **options: Any) -> list[list[int]]:
    tokens = tokens.to(hf.device)
    return hf.generate(tokens, max_new_tokens=count, do_sample=False, **options)[:, tokens.shape[1] :].tolist()


def layer(kv: str) -> TurboQuantLayer:
    config = hf_model("llama", **(SIZES | {"num_hidden_layers": 1})).config
    config._attn_implementation = "sdpa"  # `update` stores; with "turboquant" attention does
    found = TurboQuantCache(config, 96, kv).layers[0]
    assert isinstance(found, TurboQuantLayer)
    return found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", ["llama", "mistral_window", "qwen3_window_bias", "smollm3"])
def test_inside_the_exact_window_nothing_changes(variant: str, implementation: str) -> None:
    """32 tokens, 64 of them exact: the cache's bookkeeping, masks, windows and merging leave the model's own tokens."""
    hf = model(variant, implementation)
    expected = greedy(model(variant, "sdpa"))
    assert greedy(hf, past_key_values=TurboQuantCache(hf.config, 48, "turboquant:2,window=64")) == expected


def test_attention_may_be_chosen_after_the_cache() -> None:
    hf = model("llama", ATTENTION)
    expected, cache = greedy(hf), TurboQuantCache(hf.config, 48, "turboquant:2,window=64,first=1")
    for implementation in ("sdpa", ATTENTION, "eager"):
        hf.set_attn_implementation(implementation)
        cache.reset()
        assert greedy(hf, past_key_values=cache) == expected


@pytest.mark.parametrize("variant", ["llama", "mistral_window"])
def test_other_caches_are_left_alone(variant: str) -> None:
    hf, plain = model(variant, ATTENTION), model(variant, "sdpa")
    assert greedy(hf) == greedy(plain)
    for each in (hf, plain):
        each.generation_config.disable_compile = True
    assert greedy(hf, cache_implementation="static") == greedy(plain, cache_implementation="static")


@pytest.mark.parametrize("kv", ["turboquant:4", "turboquant:k3v4,window=8", "turboquant:3,mode=full,keys=prod"])
def test_what_is_stored_is_near_what_was_given(kv: str) -> None:
    g = torch.Generator().manual_seed(0)
    found = layer(kv)
    keys, values = torch.randn(2, 1, 2, 80, 64, generator=g)
    found.update(keys, values)
    found.update(*torch.randn(2, 1, 2, 1, 64, generator=g))
    window = found.config.window
    for got, given in zip(found.whole(keys[:, :, -1:], values[:, :, -1:]), (keys, values), strict=True):
        old, near = got[:, :, : min(80, 81 - window)], got[:, :, 81 - window : 80]
        assert 1e-4 < (old - given[:, :, : old.shape[2]]).square().mean() < 0.08
        if window:
            torch.testing.assert_close(near, given[:, :, 80 - near.shape[2] :])


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("kv", ["turboquant:4,window=16", "turboquant:3,window=70", "turboquant:4,mode=full"])
def test_attending_on_codes_is_attending_on_what_they_decode_to(kv: str, window: int) -> None:
    """Up to the 8 bits that the codes' kernel rounds levels to."""
    g = torch.Generator().manual_seed(1)
    found = layer(kv)
    found.update(*torch.randn(2, 2, 2, 80, 64, generator=g))
    new = torch.randn(2, 2, 2, 1, 64, generator=g)
    found.update(*new)
    query = torch.randn(2, 6, 1, 64, generator=g)
    keys, values = (t.repeat_interleave(3, 1) for t in found.whole(*new))
    place = torch.arange(96)
    seen = (place <= 80) & (place > 80 - window) if window else place <= 80
    want = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen.unsqueeze(0), scale=0.2)
    got = found.attend(query, *new, 0.2, window).transpose(1, 2)  # stores the new token again, where it is
    assert (got - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize("implementation", [ATTENTION, "sdpa"])
@pytest.mark.parametrize("kv", ["turboquant:4,window=8,first=1", "turboquant:k3v2,mode=full"])
@pytest.mark.slow
def test_the_compiled_decode_step_is_one_graph(kv: str, implementation: str) -> None:
    hf = model("llama", implementation)
    expected = greedy(hf, past_key_values=TurboQuantCache(hf.config, 64, kv))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    torch._dynamo.reset()
    cache = TurboQuantCache(hf.config, 64, kv)
    assert cache.is_compileable
    assert greedy(hf, past_key_values=cache, compile_config=config) == expected
    assert greedy(hf, past_key_values=TurboQuantCache(hf.config, 64, kv), compile_config=config) == expected
    assert len(graphs) == 1  # of both caches
    attention = "turboquant_attention" if "full" in kv else "turboquant_hybrid"
    layers = sum(isinstance(found, TurboQuantLayer) for found in cache.layers)
    for wanted in ("turboquant_write", attention) if implementation == ATTENTION else ("turboquant_write",):
        assert sum(wanted in str(node.target) for node in graphs[0].graph.nodes) == layers


@pytest.mark.parametrize("implementation", [ATTENTION, "sdpa"])
def test_a_padded_batch_gives_the_tokens_of_its_rows(implementation: str) -> None:
    hf = model("llama", implementation)
    rows = [TOKENS[0], TOKENS[0, 7:]]
    alone = [greedy(hf, row.unsqueeze(0))[0] for row in rows]
    tokens = torch.stack((rows[0], torch.cat((torch.zeros(7, dtype=torch.long), rows[1]))))
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    cache = TurboQuantCache(hf.config, 48, "turboquant:2,window=64")
    assert greedy(hf, tokens, attention_mask=mask, past_key_values=cache) == alone


def test_bytes_and_layers_are_what_the_setting_says() -> None:
    hf = model("llama", ATTENTION)
    cache = TurboQuantCache(hf.config, 256, "turboquant:4,mode=full,first=1")
    assert [type(found) for found in cache.layers] == [ExactLayer, TurboQuantLayer, TurboQuantLayer]
    static = StaticCache(config=hf.config, max_cache_len=256)
    for each in (cache, static):
        greedy(hf, past_key_values=each, disable_compile=True)
    exact = 2 * static.layers[0].keys.nbytes
    coded = cache.layers[1].nbytes  # one page more than its rows have
    assert coded == exact * (64 * 8 + 4 * 8) // (64 * 2 * 32) * 5 // 4
    assert cache.nbytes == exact + 2 * coded


def test_a_cache_that_was_reset_starts_anew() -> None:
    hf = model("llama", ATTENTION)
    cache = TurboQuantCache(hf.config, 64, "turboquant:3,window=4")
    first = greedy(hf, past_key_values=cache)
    greedy(hf, TOKENS[:, 5:], count=3, past_key_values=TurboQuantCache(hf.config, 64))
    cache.reset()
    assert greedy(hf, past_key_values=cache) == first


def test_too_many_tokens_are_refused() -> None:
    hf = model("llama", ATTENTION)
    with pytest.raises(ValueError, match="20 tokens do not fit a TurboQuantCache of max_cache_len 16"):
        greedy(hf, past_key_values=TurboQuantCache(hf.config, 16))
    with pytest.raises(RuntimeError, match="TurboQuantCache is full"):
        greedy(hf, past_key_values=TurboQuantCache(hf.config, 24))


@pytest.mark.parametrize(
    ("length", "kv", "message"),
    [
        (64, "exact", "takes turboquant"),
        (64, "turboquant:4,mode=shadow", "modes hybrid"),
        (64, 4, "kv is '4'; TurboQuantCache takes"),
        (64, "turboquant:5", "5 bits for keys"),
        (64, "turboquant:4,widow=8", "'widow=8' is not understood"),
        (0, "turboquant:4", "max_cache_len is 0"),
        ("64", "turboquant:4", "max_cache_len is '64'"),
    ],
)
def test_settings_it_does_not_have_are_refused(length: Any, kv: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        TurboQuantCache(hf_model("llama", **SIZES).config, length, kv)
    assert "\n" not in str(error.value)


def test_another_number_of_rows_is_refused() -> None:
    hf = model("llama", ATTENTION)
    cache = TurboQuantCache(hf.config, 64)
    greedy(hf, past_key_values=cache)
    cache.reset()
    with pytest.raises(ValueError, match="2 rows do not fit a TurboQuantCache that began with 1"):
        greedy(hf, TOKENS.repeat(2, 1), past_key_values=cache)


def test_a_conversation_goes_on_with_its_cache() -> None:
    hf = model("llama", ATTENTION)
    cache = TurboQuantCache(hf.config, 64, "turboquant:2,window=64")
    tokens = torch.cat((TOKENS, torch.tensor(greedy(hf, past_key_values=cache)), torch.tensor([[3, 4, 5]])), dim=1)
    assert greedy(hf, tokens, past_key_values=cache) == greedy(hf, tokens)


def test_sampling_draws_what_it_draws_from_a_plain_cache() -> None:
    hf = model("llama", ATTENTION)
    drawn = []
    for cache in (None, TurboQuantCache(hf.config, 48, "turboquant:2,window=64")):
        torch.manual_seed(0)
        options = {"do_sample": True, "temperature": 0.9, "top_k": 30, "num_return_sequences": 2}
        drawn.append(hf.generate(TOKENS, max_new_tokens=8, past_key_values=cache, **options).tolist())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("implementation", "kv"),
    [(ATTENTION, "turboquant:3,mode=full,keys=prod"), ("sdpa", "turboquant:4,window=8,first=1")],
)
@pytest.mark.slow
def test_a_user_may_compile_forward_with_it(implementation: str, kv: str) -> None:
    """Without `generate`: decode after an eager prefill, with and without a mask; prefill where it was made early."""
    hf = model("llama", implementation, num_hidden_layers=2)
    new = TOKENS[:, :1]
    eager, cache, early = (TurboQuantCache(hf.config, 64, kv) for _ in range(3))
    early.early_initialization(batch_size=1, num_heads=2, head_dim=64, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        expected = [hf(tokens, past_key_values=eager).logits for tokens in (TOKENS, new, new)]
        hf(TOKENS, past_key_values=cache)
        torch._dynamo.reset()
        forward = torch.compile(hf.forward, fullgraph=True, backend="eager")
        mask = torch.ones(1, 22, dtype=torch.long)
        got = [
            forward(input_ids=TOKENS, past_key_values=early).logits,
            forward(input_ids=new, past_key_values=cache).logits,
            forward(input_ids=new, past_key_values=cache, attention_mask=mask).logits,
        ]
    for found, wanted in zip(got, expected, strict=True):  # with a mask, codes are decoded before attention
        assert (found - wanted).norm() / wanted.norm() < 0.02


def test_beam_search_is_refused_in_words() -> None:
    hf = model("llama", ATTENTION)
    with pytest.raises(NotImplementedError, match="no beam search"):
        greedy(hf, num_beams=2, past_key_values=TurboQuantCache(hf.config, 64))
