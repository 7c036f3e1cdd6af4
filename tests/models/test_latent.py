"""Multi-head latent attention in the decoder: DeepSeek-V3 and its relatives against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import STEPS, simulated_step
from models import Decoder, hf_config, hf_model, save_hf
from onegraph.api.quantize import quantize
from onegraph.check.api import check_step
from onegraph.engine.draft import NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.source import LlamaSource
from onegraph.nn.latent import LatentCache


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(path: Path, device: str = "cpu") -> Llama:
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, device)


@torch.inference_mode()
def truth(hf: Any, row: list[int]) -> torch.Tensor:
    logits: torch.Tensor = hf(torch.tensor([row]), use_cache=False).logits[0].float()
    return logits


@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v3_plain", "deepseek_v32", "glm_moe_dsa", "mistral4"])
def test_prefill_chunks_and_decode_of_unequal_rows(variant: str, tmp_path: Path) -> None:
    """Prompts in one call, their continuation by chunks, then token by token; pages hold NaN before."""
    hf = save_hf(variant, tmp_path)
    decoder = Decoder(load(tmp_path), rows=3, max_context=48, page_size=4)
    assert isinstance(decoder.cache, LatentCache)
    assert decoder.cache.pools[0].shape[2] == 40 + 8
    for pool in (*decoder.cache.pools, *decoder.cache.index_pools.values()):
        pool.fill_(float("nan"))
    rows = [tokens(21), tokens(9, 1), tokens(32, 2)]
    cuts = [(0, 13), (13, 17), (17, 18), (18, 32)]
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    for first, last in cuts:
        for mine, logits in zip(got, decoder.feed([row[first:last] for row in rows]), strict=True):
            mine.append(logits)
    for row, mine in zip(rows, got, strict=True):
        want = truth(hf, row)
        assert (torch.cat(mine) - want).abs().max() < 1e-4 * max(1.0, float(want.abs().max()))


def test_tokens_are_taken_back(tmp_path: Path) -> None:
    hf, row = save_hf("deepseek_v3", tmp_path), tokens(20)
    decoder = Decoder(load(tmp_path), rows=1, max_context=32, page_size=4)
    decoder.feed([row[:10]])
    decoder.feed([tokens(4, 5)])
    decoder.cache.truncate(torch.tensor([10], dtype=torch.int32))
    (got,) = decoder.feed([row[10:]])
    assert (got - truth(hf, row)[10:]).abs().max() < 1e-4


def test_whole_sequences_are_those_of_the_absorbed_form(tmp_path: Path) -> None:
    """What calibration and evaluation run, with the up-projection as a linear and absorbed."""
    hf, row = save_hf("deepseek_v3", tmp_path), torch.tensor([tokens(24)])
    with Checkpoint.open(tmp_path) as checkpoint, torch.inference_mode():
        source = LlamaSource(checkpoint)
        hidden = source.embed(row)
        for i in range(source.num_blocks):
            block = source.load_block(i)
            names = [name for group in source.linear_groups(block) for name, _ in group]
            assert {"self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.kv_a_proj_with_mqa"} <= set(names)
            hidden = source.run_block(block, hidden)
        assert (source.head(hidden)[0] - truth(hf, row[0].tolist())).abs().max() < 1e-4
        model = load(tmp_path)
        dense = model.logits(model(row, model.dense_attention))[0]
        assert (dense - truth(hf, row[0].tolist())).abs().max() < 1e-4


def test_low_precision_stays_near_float32(tmp_path: Path) -> None:
    hf, row = save_hf("deepseek_v3", tmp_path), tokens(32)
    want, low = truth(hf, row), truth(hf.bfloat16(), row)
    with Checkpoint.open(tmp_path) as checkpoint:
        decoder = Decoder(Llama.load(checkpoint, dtype=torch.bfloat16), rows=1, max_context=32, page_size=4)
    got = torch.cat([decoder.feed([part])[0] for part in (row[:16], *([token] for token in row[16:]))])
    assert (got - want).norm() <= 1.3 * (low - want).norm()


def test_in_codes_it_is_the_model_of_its_weights(tmp_path: Path) -> None:
    """E8P of every linear, the up-projection too, which loading decodes; transformers reads the same files."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    import onegraph.integrations.hf  # noqa: F401

    sizes = {"hidden_size": 128, "moe_intermediate_size": 32, "intermediate_size": 64, "q_lora_rank": 32}
    save_hf("deepseek_v3", tmp_path / "m", num_hidden_layers=2, **sizes)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(131)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "m" / "tokenizer.json"))
    text = " ".join(map(str, range(131)))
    how: dict[str, Any] = {"recipe": "quick", "tokens": 128, "sequence": 32, "calibration": text * 3, "device": "cpu"}
    quantize(tmp_path / "m", tmp_path / "q", bits=4, **how)
    stored = Checkpoint.open(tmp_path / "q")
    assert {"self_attn.kv_b_proj.codes", "self_attn.q_a_proj.codes"} <= {
        name.removeprefix("model.layers.1.") for name in stored.names
    }
    hf, row = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32), tokens(24)
    for decode in (True, False):
        with Checkpoint.open(tmp_path / "q") as checkpoint:
            decoder = Decoder(Llama.load(checkpoint, decode=decode), rows=1, max_context=32)
        (got,) = decoder.feed([row])
        assert (got - truth(hf, row)).abs().max() < 1e-3 * got.abs().max()


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm_moe_dsa"])
def test_the_engine_drafts_and_shares_prefixes(variant: str, tmp_path: Path) -> None:
    """Drafts change no token, and a prompt's pages serve one that begins alike."""
    hf = save_hf(variant, tmp_path)
    start = tokens(24, 3)
    prompts = [[5, 6, 5, 6, 5, 6], [*start, 7, 8], [*start, 9]]
    params = SamplingParams(max_tokens=20)
    sizes: dict[str, Any] = {"max_batch": 2, "max_context": 96, "page_size": 8, "chunk": 16, "capture": False}
    plain = Engine(load(tmp_path), **sizes).generate(prompts, params)
    engine = Engine(load(tmp_path), **sizes, draft=NgramDrafter, draft_tokens=3)
    assert engine.generate(prompts, params) == plain
    assert engine.stats.drafted_tokens > 0
    assert engine.generate(prompts, params) == plain, "of pages that are there already"
    for prompt, written in zip(prompts, plain, strict=True):
        logits = truth(hf, prompt + written)[len(prompt) - 1 : -1]
        best = logits.max(1).values - logits.gather(1, torch.tensor(written).unsqueeze(1)).squeeze(1)
        assert best.max() < 1e-3


def simulated(path: Path, kind: str, spoil: Any = lambda cache: None) -> Any:
    def factory() -> Any:
        engine = Engine(load(path, "cuda"), max_batch=4, max_context=128, page_size=16, chunk=16, capture=False)
        spoil(engine.executor.cache)
        return simulated_step(engine, kind, limit=120)

    return check_step(factory, steps=STEPS[kind])


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("variant", ["deepseek_v3", "glm_moe_dsa"])
def test_the_step_may_be_captured(variant: str, kind: str, tmp_path: Path) -> None:
    changes = {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"]}
    save_hf(variant, tmp_path, num_hidden_layers=2, **(changes if variant == "glm_moe_dsa" else {}))
    report = simulated(tmp_path, kind)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []


def test_a_length_read_on_the_host_is_found(tmp_path: Path) -> None:
    save_hf("deepseek_v3", tmp_path, num_hidden_layers=2)

    def spoil(cache: LatentCache) -> None:
        view = LatentCache.view

        def narrowed(rows: slice = slice(None), pages: int | None = None) -> LatentCache:
            return view(cache, rows, 1 + int(cache.positions.max()) // cache.page_size)

        cache.view = narrowed  # type: ignore[method-assign]

    assert simulated(tmp_path, "decode", spoil).findings


def test_draft_layers_are_passed_over(tmp_path: Path) -> None:
    """Layers behind the last, as the published files have one."""
    from onegraph.formats.checkpoint import write_checkpoint

    hf, row = save_hf("deepseek_v3", tmp_path / "m"), tokens(9)
    source = Checkpoint.open(tmp_path / "m")
    tensors = {name: source.tensor(name) for name in source.names} | {
        "model.layers.3.eh_proj.weight": torch.zeros(2, 2)
    }
    write_checkpoint(tmp_path / "d", source.config | {"num_nextn_predict_layers": 1}, tensors.items())
    (got,) = Decoder(load(tmp_path / "d"), rows=1, max_context=16).feed([row])
    assert (got - truth(hf, row)).abs().max() < 1e-4
    write_checkpoint(tmp_path / "n", source.config | {"num_nextn_predict_layers": 0}, tensors.items())
    with pytest.raises(CheckpointError, match=r"unexpected: 'model.layers.3.eh_proj.weight'"):
        load(tmp_path / "n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; with latent attention it is num_attention_heads 6"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7|head_dim is 7"),
        ({"head_dim": 5}, "head_dim is 5; qk_nope_head_dim and qk_rope_head_dim say 16 [+] 8"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an integer"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; supported: noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; supported: 1"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: sigmoid"),
        ({"index_topk": 2048}, "index_topk is 2048"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["shared", "full", "full"]}, "begins with a shared indexer"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"]}, "indexer_types is .*; it must list full or shared"),
        (
            {"model_type": "deepseek_v32", "index_head_dim": 4},
            "index_head_dim is 4, of which qk_rope_head_dim 8 rotate",
        ),
        ({"model_type": "deepseek_v32", "layer_types": ["full_attention"] * 3}, "layer_types is"),
        ({"model_type": "deepseek_v32", "mlp_layer_types": ["dense"]}, "mlp_layer_types is"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = json.loads(hf_config("deepseek_v3").to_json_string(use_diff=False))
    LlamaConfig.from_dict(config)
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict(config | change)


def test_few_tokens_are_all_chosen(tmp_path: Path) -> None:
    """Up to index_topk tokens DeepSeek-V3.2 is V3: a cache of no more than that keeps no keys of the indexer."""
    hf, row = save_hf("deepseek_v32", tmp_path, index_topk=16), tokens(16)
    decoder = Decoder(load(tmp_path), rows=1, max_context=16, page_size=4)
    assert isinstance(decoder.cache, LatentCache)
    assert not decoder.cache.index_pools
    got = torch.cat([decoder.feed([part])[0] for part in (row[:8], row[8:])])
    assert (got - truth(hf, row)).abs().max() < 1e-4
    model = load(tmp_path)
    assert (model.logits(model(torch.tensor([row]), model.dense_attention))[0] - truth(hf, row)).abs().max() < 1e-4


def test_a_block_alone_does_not_know_another_ones_choice(tmp_path: Path) -> None:
    """Calibration reads blocks one at a time: sequences of up to index_topk tokens."""
    save_hf("glm_moe_dsa", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint, torch.inference_mode():
        source = LlamaSource(checkpoint)
        hidden = source.embed(torch.tensor([tokens(12)]))
        hidden = source.run_block(source.load_block(1), hidden)
        with pytest.raises(ValueError, match="a sequence of 12 tokens exceeds index_topk 6"):
            source.run_block(source.load_block(2), hidden)


def test_what_the_indexer_does_not_choose_is_not_attended_to(tmp_path: Path) -> None:
    """Another number of tokens is another model, in transformers and here."""
    hf, row = save_hf("glm_moe_dsa", tmp_path), tokens(32)
    (got,) = Decoder(load(tmp_path), rows=1, max_context=32).feed([row])
    wide = hf_model("glm_moe_dsa", index_topk=64)
    assert (got - truth(hf, row)).abs().max() < 1e-4
    assert (got - truth(wide, row)).abs().max() > 1e-2


def test_the_indexer_is_not_rounded(tmp_path: Path) -> None:
    """Of what is written its linears stay as they were."""
    save_hf(
        "glm_moe_dsa", tmp_path, num_hidden_layers=2, indexer_types=["full", "shared"], mlp_layer_types=["dense"] * 2
    )
    with Checkpoint.open(tmp_path) as checkpoint:
        source = LlamaSource(checkpoint)
    assert list(source.kept) == [f"model.layers.0.self_attn.indexer.{name}" for name in ("wq_b", "wk")]
    assert not any("indexer" in name for name in source.shapes(0))


def test_the_scale_has_the_square_of_mscale() -> None:
    """DeepSeek-V3's own numbers: YaRN by 40, 192 numbers a query."""
    rope = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
    rope["original_max_position_embeddings"] = 4096
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128}
    more = {"vocab_size": 129280, "max_position_embeddings": 163840, "rope_scaling": rope, "rope_theta": 10000}
    config = LlamaConfig.from_dict({"model_type": "deepseek_v3", **sizes, **more})
    assert config.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert config.latent is not None
    assert config.latent.width == 576
    assert config.ropes[0] is not None
    assert config.ropes[0].attention_factor == 1.0
