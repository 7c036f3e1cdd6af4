"""The DeepSeek-V4 decoder against transformers' own implementation, over everything that changes with position.

Windows are 16 tokens, the indexer keeps 8 entries (32 tokens), CSA closes an entry every 4 tokens and HCA every 128 or
32: in 400 tokens each of these wraps or saturates, most many times over.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek import SIZES, VARIANTS, hf_model, save_hf
from models import Decoder
from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_config import CSA, HCA, SLIDING, DeepseekV4Config
from onegraph.models.deepseek_v4_names import official
from onegraph.models.loader import Loader

TOKENS = 720


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def pair(request, tmp_path_factory):
    """(transformers' model, ours, its checkpoint)."""
    path = tmp_path_factory.mktemp("deepseek") / request.param
    hf = save_hf(request.param, path, hc_sinkhorn_iters=4)
    with Checkpoint.open(path) as checkpoint:
        return hf, DeepseekV4.load(checkpoint), path


def texts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=g).tolist() for n in lengths]


@torch.no_grad()
def truth(hf, text: list[int]) -> torch.Tensor:
    """Logits of all positions [T, V], computed at once without a cache."""
    return hf(torch.tensor([text]), use_cache=False).logits[0]


def decoder(model: DeepseekV4, rows: int, context: int = 768) -> Decoder:
    return Decoder(model, rows, context, page_size=128)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.isfinite().all()
    error = (got - want).abs().amax(1)
    assert error.max() <= 1e-4, f"{error.max():.2e}, first at {int((error > 1e-4).nonzero()[0])}"


def test_prefill_and_140_decode_steps_of_a_batch_of_unequal_lengths(pair):
    hf, model, _ = pair
    prompts = [1, 37, 130]  # a decode step closes the first entry of 128 tokens, and the second one
    wanted = texts([140 + n for n in prompts])
    state = decoder(model, 3)
    for tensor in state.cache.tensors():
        tensor.fill_(torch.nan)  # whatever a predecessor left must not reach a result
    got = [[part] for part in state.feed([text[:n] for text, n in zip(wanted, prompts, strict=True)])]
    for step in range(140):
        fed = [[text[n + step]] for text, n in zip(wanted, prompts, strict=True)]
        for row, part in zip(got, state.feed(fed), strict=True):
            row.append(part)
    for row, text in zip(got, wanted, strict=True):
        close(torch.cat(row), truth(hf, text))


def test_chunks_of_every_size_and_rows_that_pause(pair):
    hf, model, _ = pair
    g = torch.Generator().manual_seed(3)
    wanted, state = texts([400, 300, 211], seed=5), decoder(model, 3)
    got: list[list[torch.Tensor]] = [[], [], []]
    at = [0, 0, 0]
    while any(a < len(t) for a, t in zip(at, wanted, strict=True)):
        counts = [int(torch.randint(0, 70, (), generator=g)) for _ in wanted]
        fed = [text[a : a + n] for text, a, n in zip(wanted, at, counts, strict=True)]
        for i, part in enumerate(state.feed(fed)):
            got[i].append(part)
            at[i] += len(part)
    for row, text in zip(got, wanted, strict=True):
        close(torch.cat(row), truth(hf, text))


def test_transformers_own_decode_agrees_with_its_single_pass(pair):
    """The oracle above is one pass over the whole text; here it steps through its own cache, over two windows."""
    hf, model, _ = pair
    (text,) = texts([80], seed=9)
    with torch.no_grad():
        out = hf(torch.tensor([text[:40]]), use_cache=True)
        logits, cache = [out.logits[0]], out.past_key_values
        for token in text[40:]:
            logits += [hf(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0]]
    stepped = torch.cat(logits)
    close(stepped, truth(hf, text))
    state = decoder(model, 1)
    close(state.feed([text])[0], stepped)


def test_a_slot_serves_one_sequence_after_the_other(pair):
    hf, model, _ = pair
    first, second = texts([150, 140], seed=11)
    state = decoder(model, 2)
    state.feed([first, first])
    state.cache.positions.zero_()
    close(state.feed([second, []])[0], truth(hf, second))


def test_what_the_tests_cross(pair):
    """The variants reach every kind of layer; otherwise the tests above would prove less than they say."""
    model = pair[1]
    assert {CSA, HCA} <= set(model.config.kinds)
    assert {True, False} == set(model.config.hashed)
    assert max(model.config.ratios) * 3 < TOKENS
    sinks = torch.cat([block.attention.sinks for block in model.blocks])
    assert sinks.abs().min() > 1e-4


@pytest.mark.parametrize("part", ["position_bias", "sinks", "e_score_correction_bias", "hc_head.hc_base", "q_a_norm"])
def test_every_small_tensor_matters(part, tmp_path):
    """A tensor that was read but not used would pass a comparison in which it does not matter."""
    save_hf("flash", tmp_path / "a")
    other = hf_model("flash")
    with torch.no_grad():
        for name, p in [*other.named_parameters(), *other.named_buffers()]:
            if part in name:
                p.add_(torch.randn(p.shape) * 0.5)
    other.save_pretrained(tmp_path / "b")
    (text,) = texts([140])
    out = []
    for name in ("a", "b"):
        with Checkpoint.open(tmp_path / name) as checkpoint:
            out.append(decoder(DeepseekV4.load(checkpoint), 1).feed([text])[0])
    assert (out[0] - out[1]).abs().max() > 1e-3
    close(out[1], truth(other, text))


# ------------------------------------------------------------------------------------------------------ checkpoints


def test_names_of_both_makers_are_one(tmp_path):
    """Module names, what save_pretrained writes, and DeepSeek's own come to the same."""
    hf = save_hf("flash", tmp_path / "m")
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        written = {official(name) for name in checkpoint.names}
        config = DeepseekV4Config.from_dict(checkpoint.config)
        expected = set(Loader(checkpoint, config, torch.float32).expected())
    modules = {official(name) for name in hf.state_dict() if "mlp.experts." not in name}
    assert written == expected
    assert modules == {name for name in expected if ".experts." not in name}
    assert official("model.layers.0.self_attn.compressor.indexer.gate_proj.weight") == (
        "layers.0.attn.indexer.compressor.wgate.weight"
    )
    assert official("layers.7.ffn.experts.31.w2.weight") == "layers.7.ffn.experts.31.w2.weight"
    assert official("model.layers.7.mlp.experts.31.down_proj.weight") == "layers.7.ffn.experts.31.w2.weight"


def test_the_mtp_layer_is_passed_over_and_anything_else_is_named(tmp_path):
    save_hf("flash", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.0.e_proj.weight": torch.zeros(2)}, file)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        DeepseekV4.load(checkpoint, max_context=64)
    save_file(
        {k: v for k, v in tensors.items() if "layers.1.attn.attn_sink" not in k} | {"extra": torch.zeros(1)}, file
    )
    with Checkpoint.open(tmp_path / "m") as checkpoint, pytest.raises(CheckpointError) as error:
        DeepseekV4.load(checkpoint)
    assert "missing: 'layers.1.attn.attn_sink'" in str(error.value)
    assert "unexpected: 'extra'" in str(error.value)


def test_a_table_that_names_no_expert_is_refused(tmp_path):
    save_hf("flash", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.ffn.gate.tid2eid"][5, 1] = 8
    save_file(tensors, file)
    with Checkpoint.open(tmp_path / "m") as checkpoint, pytest.raises(ValueError, match="experts 0 to 8"):
        DeepseekV4.load(checkpoint)


# ----------------------------------------------------------------------------------------------------------- config

FLASH = {
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def test_flash_as_published():
    config = DeepseekV4Config.from_dict(FLASH)
    assert config.layers == 43
    assert config.kinds[:4] == (SLIDING, SLIDING, CSA, HCA)
    assert config.ratios[42] == 4
    assert config.hashed == (True,) * 3 + (False,) * 40
    assert (config.rope_dim, config.main.theta, config.compress.theta) == (64, 1e4, 1.6e5)
    assert (config.compress.kind, config.compress.factor, config.compress.attention_factor) == ("yarn", 16.0, 1.0)
    assert config.main.kind == "default"


def test_transformers_reading_of_the_same_config_agrees():
    from transformers import DeepseekV4Config as Theirs

    theirs = Theirs(**{k: v for k, v in FLASH.items() if k != "model_type"})
    assert DeepseekV4Config.from_dict(theirs.to_dict()) == DeepseekV4Config.from_dict({**FLASH, "eos_token_id": 1})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'"),
        ({"vision_config": {"hidden_size": 8}}, "vision is not supported"),
        ({"speculative_config": {"method": "mtp"}}, "MTP drafting is not supported"),
        ({"engram_layer_ids": [1, 3]}, "Engram"),
        ({"num_key_value_heads": 2}, "one key-value head"),
        ({"scoring_func": "softmax"}, "sqrtsoftplus"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq'"),
        ({"compress_ratios": [0, 3] * 30}, "compress_ratios"),
        ({"compress_ratios": [0] * 7}, "must list 43"),
        ({"o_groups": 7}, "not a multiple of o_groups"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"index_head_dim": 32}, "rotary"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says) as error:
        DeepseekV4Config.from_dict({**FLASH, **change})
    assert "\n" not in str(error.value)


def test_a_page_that_cuts_an_entry_is_refused(pair):
    with pytest.raises(ValueError, match="multiple of the compression ratio"):
        pair[1].new_cache(rows=1, pages=3, page_size=2, pages_per_row=2)


def test_larger_pages_hold_the_same(tmp_path: Path):
    hf = save_hf("pro", tmp_path / "m")
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = DeepseekV4.load(checkpoint)
    (text,) = texts([300])
    close(Decoder(model, 1, 512, page_size=256).feed([text])[0], truth(hf, text))
