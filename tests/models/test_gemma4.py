"""Gemma 4's own parts: heads of two sizes, keys as values, shared keys, caches in codes, and what its config may say.

Logits against transformers' are tests of every family (test_llama.py, tests/engine/test_engine_llama.py)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import maker
from models import Decoder, block_launches, hf_config, save_e8p, save_hf
from onegraph import quantize
from onegraph.api.outline import outline
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.turboquant import TurboQuantConfig, parse_kv
from onegraph.models.config import LlamaConfig
from onegraph.models.heads import Heads
from onegraph.models.llama import Llama, unread_layers
from onegraph.models.ranks import Ranks
from onegraph.models.source import LlamaSource
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.registry import reference_ops
from test_ranks import of_ranks
from test_wrapper import save_tokenizer

SIZES: dict[str, Any] = {"head_dim": 64, "global_head_dim": 128}  # which there are codebooks for


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def told(variant: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hf_config(variant, **changes).to_json_string(use_diff=False))
    return found


@torch.inference_mode()
def logits_of(path: Path, rows: list[list[int]], kv: TurboQuantConfig | None = None, chunk: int = 9) -> list[Any]:
    """Prompts of unequal lengths in chunks, then a token at a time."""
    with Checkpoint.open(path) as checkpoint:
        model = Llama.load(checkpoint)
    most = max(map(len, rows))
    decoder = Decoder(model, rows=len(rows), max_context=-(-most // 16) * 16, page_size=16, kv=kv)
    prompts = [max(1, len(row) - 12 - 5 * i) for i, row in enumerate(rows)]
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    done = [0] * len(rows)
    while any(at < len(row) for at, row in zip(done, rows, strict=True)):
        takes = [
            min(chunk, prompt - at) if at < prompt else min(1, len(row) - at)
            for at, prompt, row in zip(done, prompts, rows, strict=True)
        ]
        parts = [row[at : at + take] for row, at, take in zip(rows, done, takes, strict=True)]
        for each, logits in zip(found, decoder.feed(parts), strict=True):
            each.append(logits)
        done = [at + take for at, take in zip(done, takes, strict=True)]
    return [torch.cat(each) for each in found]


def truth(hf: Any, row: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = hf(torch.tensor([row]), use_cache=False).logits[0].float()
    return logits


@pytest.mark.parametrize("variant", ["gemma4", "gemma4_moe", "gemma4_e"])
def test_unequal_prompts_in_chunks(variant: str, tmp_path: Path) -> None:
    hf, rows = save_hf(variant, tmp_path), [tokens(50, 1), tokens(23, 2), tokens(36, 3)]
    for got, row in zip(logits_of(tmp_path, rows), rows, strict=True):
        assert (got - truth(hf, row)).abs().max() < 1e-4


PRODUCTS = {"aten::linear", "aten::mm", "aten::addmm"}


@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "gemma4", "gemma4_moe", "gemma4_e"])
def test_a_block_runs_nothing_elementwise_of_torch(variant: str, tmp_path: Path) -> None:
    """Norms behind sublayers, sums, the layer's scalar, gates and the router's scales are in ops of ours: each of
    torch's ops would be a launch of its own, 60 times a step."""
    save_hf(variant, tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        model = Llama.load(checkpoint)
    blocks = block_launches(model)
    assert len(blocks) == len(model.blocks)
    for ops in blocks:
        assert {name for name in ops if not name.startswith("onegraph::")} <= PRODUCTS, ops
    norms = [name for name in blocks[1] if name.endswith("rms_norm")]
    assert len(norms) == 3 if variant == "gemma4_e" else 2, "one with each sum"


@pytest.mark.parametrize("variant", ["gemma4", "gemma4_moe"])
def test_a_cache_in_codes(variant: str, tmp_path: Path) -> None:
    """Within its window it is exact; beyond, both sizes of heads are read from codes, near what they stand for."""
    hf, row = save_hf(variant, tmp_path, **SIZES), tokens(60)
    exact = truth(hf, row)
    assert (logits_of(tmp_path, [row], parse_kv("turboquant:4,window=64"), 60)[0] - exact).abs().max() < 3e-4
    errors = [
        (logits_of(tmp_path, [row], parse_kv(f"turboquant:{bits},window=8"), 60)[0] - exact).norm() / exact.norm()
        for bits in (4, 2)
    ]
    assert 0 < errors[0] < 0.5 * errors[1] < 0.5, errors
    with Checkpoint.open(tmp_path) as checkpoint:
        model = Llama.load(checkpoint)
    kv = TurboQuantConfig(k_bits=4, v_bits=4, window=16)
    cache = model.new_cache(rows=1, pages=3, page_size=16, pages_per_row=2, kv=kv)
    assert isinstance(cache, TurboQuantCache)
    sizes = {(layer.layout.head_dim, layer.codes.shape[1]) for layer in cache.layers if layer is not None}
    assert sizes == {(64, 2), (128, 1)}
    page = 16 * cache.config.token_bytes_of(model.config.cached)
    assert sum(layer.codes[0].numel() for layer in cache.layers if layer is not None) == page


@pytest.mark.parametrize(
    ("variant", "kv"), [("gemma4", None), ("gemma4", "turboquant:4,window=16"), ("gemma4_moe", None)]
)
def test_ranks_draw_the_tokens_of_one_device(
    variant: str, kv: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured graphs; logits are compared with transformers' in tests/engine/test_ranks.py."""
    save_hf(variant, tmp_path, **SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        models = Llama.load(checkpoint), Ranks.load(checkpoint, ["cpu"] * 2)
    params = [SamplingParams(max_tokens=20, temperature=i * 0.8, seed=4) for i in range(2)]
    made = (maker("captured", model, monkeypatch, max_batch=2, page_size=16, kv=kv)() for model in models)
    one, two = (engine.generate([tokens(23), tokens(4, 1)], params) for engine in made)
    assert one == two


def test_ranks_that_cannot_share_its_heads_are_refused(tmp_path: Path) -> None:
    """Of the layers with a window three heads, of the others one, which each of three ranks may have."""
    save_hf("gemma4", tmp_path, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(ValueError, match=r"gpus is 2: 3 KV heads cannot be split evenly or replicated evenly; use 1"):
        Ranks.load(Checkpoint.open(tmp_path), ["cpu", "cpu"])


def test_ranks_cut_its_codes(tmp_path: Path) -> None:
    """E8P: of the wide layers each rank has the one head of keys whole."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128, "global_head_dim": 256}
    hf = save_e8p("gemma4", tmp_path / "m", rates={"bits": 4}, **sizes)
    row = tokens(9)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = Ranks.load(checkpoint, ["cpu"] * 2, decode=False)
        (got,) = of_ranks(model, [row])
    assert (got - truth(hf, row)).abs().max() < 1e-4 * truth(hf, row).abs().max()


def test_heads_that_no_kernel_reads_codes_of_stay_exact_on_a_gpu() -> None:
    config = LlamaConfig.from_dict(told("gemma4", head_dim=256, global_head_dim=512))
    assert unread_layers(config, "cuda") == [5]
    assert unread_layers(config, "cpu") == []


def test_layers_that_share_keys_are_not_in_codes(tmp_path: Path) -> None:
    save_hf("gemma4_e", tmp_path, **SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        model = Llama.load(checkpoint)
    kv = TurboQuantConfig(k_bits=4, v_bits=4)
    with pytest.raises(ValueError, match="layers that read the keys and values of others, which a cache in codes"):
        model.new_cache(rows=1, pages=9, page_size=16, pages_per_row=8, kv=kv)
    assert len(model.new_cache(rows=1, pages=9, page_size=16, pages_per_row=8).keys) == 3


def test_the_calibration_stream_carries_what_layers_share(tmp_path: Path) -> None:
    """Block by block it gives transformers' logits; gradients of late layers reach the keys that they read."""
    hf, row = save_hf("gemma4_e", tmp_path), torch.tensor([tokens(30)])
    source = LlamaSource(Checkpoint.open(tmp_path))
    with reference_ops():
        stream = source.embed(row)
        assert stream.shape[2] + 2 * (32 + 64) == 72 + outline(Checkpoint.open(tmp_path)).carried
        blocks = [source.load_block(i) for i in range(source.num_blocks)]
        for block in blocks[:3]:
            stream = source.run_block(block, stream)
        lent = stream.detach().clone().requires_grad_()
        made = lent
        for block in blocks[3:]:
            made = source.run_block(block, made)
        logits = source.head(made)[0]
    assert (logits - truth(hf, row[0].tolist())).abs().max() < 1e-4
    (gradient,) = torch.autograd.grad(logits.square().sum(), lent)
    assert gradient[..., -2 * (32 + 64) :].abs().sum() > 0


@pytest.mark.parametrize("recipe", ["quick", "good", "best"])
def test_what_shares_is_quantized(recipe: str, tmp_path: Path) -> None:
    """4 bits of every linear of a block, of late layers the queries alone; what the model gives stays near."""
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    hf, row = save_hf("gemma4_e", tmp_path / "m", **sizes), tokens(30)
    save_tokenizer(tmp_path / "m")
    quantize(
        tmp_path / "m", tmp_path / "q", bits=4, recipe=recipe, num_calibration_tokens=256, calibration_seq_len=32,
        device="cpu", calibration=" ".join(str(i * 7 % 131) for i in range(600)),
    )  # fmt: skip
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        coded = {name.removesuffix(".codes") for name in checkpoint.names if name.endswith(".codes")}
    late = {name.removeprefix("model.layers.5.") for name in coded if name.startswith("model.layers.5.")}
    mlp = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert late == mlp | {"self_attn.q_proj", "self_attn.o_proj"}
    assert len(coded) == 6 * 5 + 3 * 2
    (got,), want = logits_of(tmp_path / "q", [row]), truth(hf, row)
    assert (got - want).norm() < 0.5 * want.norm()


# As transformers' conversion has them.
WHOLE: dict[str, dict[str, Any]] = {
    "31B": {"hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
            "num_global_key_value_heads": 4, "attention_k_eq_v": True, "intermediate_size": 21504,
            "sliding_window": 1024, "hidden_size_per_layer_input": 0},
    "26B-A4B": {"hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
                "num_global_key_value_heads": 2, "attention_k_eq_v": True, "intermediate_size": 2112,
                "sliding_window": 1024, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
                "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "E2B": {"hidden_size": 1536, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1,
            "intermediate_size": 6144, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
    "E4B": {"hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2,
            "intermediate_size": 10240, "num_kv_shared_layers": 18},
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_the_tensors_of_the_published_sizes(name: str) -> None:
    """Every tensor that transformers' model of this size has, by name and shape."""
    import transformers

    config = transformers.Gemma4TextConfig(**WHOLE[name], final_logit_softcapping=30.0)
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(config)
    theirs = {key: tuple(each.shape) for key, each in model.state_dict().items() if key != "lm_head.weight"}
    ours = LlamaConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    if ours.routed is not None:
        ours = replace(ours, routed=replace(ours.routed, in_stacks=True))
    parts = ours.parts
    found = {f"{key}.weight": size[:2] for key, size in parts.linears.items() if key != "lm_head"}
    found |= {key: shape for key, (shape, _) in parts.tensors.items()}
    found |= {key: (stack.experts, stack.n, stack.k) for key, stack in parts.stacks.items()}
    found[f"{parts.embedding[0]}.weight"] = parts.embedding[1]
    assert found == theirs


def test_the_text_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Names as published, with towers beside, which are passed over."""
    hf, row = save_hf("gemma4", tmp_path / "text"), tokens(20)
    source = Checkpoint.open(tmp_path / "text")
    tensors = {name.replace("model.", "model.language_model.", 1): source.tensor(name).clone() for name in source.names}
    for tower in ("vision_tower.encoder.x", "embed_vision.embedding_projection", "audio_tower.y", "embed_audio.z"):
        tensors[f"model.{tower}.weight"] = torch.zeros(3, 3)
    config = {"model_type": "gemma4", "text_config": source.config, "vision_config": {"hidden_size": 8}}
    config |= {"audio_config": {"hidden_size": 8}, "image_token_id": 5, "boi_token_id": 6, "tie_word_embeddings": True}
    write_checkpoint(tmp_path / "whole", config, tensors.items())
    from onegraph.models.wrapper import text_checkpoint

    with Checkpoint.open(tmp_path / "whole") as whole:
        model = Llama.load(text_checkpoint(whole))
    got = Decoder(model, rows=1, max_context=32).feed([row])[0]
    assert (got - truth(hf, row)).abs().max() < 1e-4


def test_the_layers_of_a_published_config() -> None:
    """31B as published: sizes of full layers at the top of the config, no per_layer_config."""
    config = told("gemma4", num_hidden_layers=6) | {
        "per_layer_config": None, "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    }  # fmt: skip
    found = LlamaConfig.from_dict(config)
    assert found.attention == (Heads(16, 256),) * 5 + (Heads(4, 512, values=False),)
    assert found.windows == (11,) * 5 + (0,)
    assert found.cached == [(16, 256)] * 5 + [(4, 512)]
    assert found.scale == 1.0
    cos, sin = found.ropes[5].tables(512, 3)
    assert cos.shape == (3, 256)
    assert (sin[1] != 0).sum() == 64, "a quarter of the pairs turn"


def test_shared_layers_read_the_last_of_their_kind() -> None:
    found = LlamaConfig.from_dict(told("gemma4_e"))
    assert [each.source for each in found.attention] == [None, None, None, 1, 1, 2]
    assert [found.attention_index(i) for i in range(6)] == [0, 1, 2, 1, 1, 2]
    assert [found.inner_at(i) // found.intermediate_size for i in range(6)] == [1, 1, 1, 2, 2, 2]
    assert not [name for name in found.parts.linears if ".3." in name and "k_proj" in name]


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; supported: vision"),
        ("gemma4", {"per_layer_config": {"9": {"head_dim": 64}}}, "per_layer_config is .*; it must have numbers of"),
        ("gemma4", {"per_layer_config": {"5": {"scale": 2}}}, "per_layer_config.5 is .*; it may have head_dim and"),
        ("gemma4", {"per_layer_config": {"5": {"num_key_value_heads": 3}}}, "layer 5 has 3 heads of keys"),
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6 of 6 layers; some must have"),
        ("gemma4_e", {"num_kv_shared_layers": 4}, "no layer before layer 2 is of layer_types' kind of layer 2"),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "x"}}}, "has the rope type 'x'"),
        ("gemma4", {"layer_types": ["full_attention"] * 3}, "layer_types is .*; it must list 6 of"),
        ("gemma4", {"attention_k_eq_v": "yes"}, "attention_k_eq_v is 'yes'; it must be true or false"),
        ("gemma4_moe", {"top_k_experts": 7}, "top_k_experts is 7; it must be an integer from 1 to 6"),
        ("gemma4_moe", {"num_experts": None}, "it must say once how many experts a layer has"),
        ("gemma4", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ("gemma4_e", {"hidden_size_per_layer_input": "24"}, "hidden_size_per_layer_input is '24'; it must be"),
        ("gemma4", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ("gemma4", {"altup_num_inputs": 4}, "altup_num_inputs is 4; gemma4_text is not known to have this key"),
    ],
)
def test_refused_by_name(variant: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        LlamaConfig.from_dict(told(variant) | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["layers.0.layer_scalar", "layers.5.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"]
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    save_hf("gemma4", tmp_path / "m")
    source = Checkpoint.open(tmp_path / "m")
    kept = {each: source.tensor(each).clone() for each in source.names if each != f"model.{name}"}
    write_checkpoint(tmp_path / "out", source.config, kept.items())
    with pytest.raises(ValueError, match=name.removesuffix(".weight")):
        Llama.load(Checkpoint.open(tmp_path / "out"))
