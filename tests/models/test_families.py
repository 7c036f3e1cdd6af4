"""Families of the one decoder: what their configs say is known or refused, and parts that only some of them have."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models import RELATIVES, SIZES, VARIANTS, Decoder, hf_config, hf_model, save_e8p, save_hf
from onegraph.api.plan import plan
from onegraph.engine.ab import components_of, in_nvfp4
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.models.config import LlamaConfig
from onegraph.models.families import FAMILIES, MISSING
from onegraph.models.fields import INERT, NEUTRAL
from onegraph.models.llama import Llama
from onegraph.models.source import LlamaSource
from onegraph.nn.block import InputLinear, Norm, Normed, WholeNorms
from onegraph.ops.route import sigmoid_route
from onegraph.quant.fisher import kl_factors

NEW = [
    "gemma2",
    "gemma3",
    "gemma3_256",
    "gemma4",
    "glm4_moe",
    "glm4_moe_groups",
    "qwen2_moe",
    "olmoe",
    "olmo2",
    "phi3",
    "granite",
    "lfm2",
    "lfm2_moe",
    "olmo_hybrid",
    "kimi_linear",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "ministral3",
    "olmo3",
    "minimax_m2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "mistral4",
    "granitemoe",
    "granitemoeshared",
    "granite4_moe",
    *RELATIVES,
]


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def told(variant: str) -> dict[str, Any]:
    """config.json of a variant, as transformers writes it."""
    found: dict[str, Any] = json.loads(hf_config(variant).to_json_string(use_diff=False))
    return found


@torch.inference_mode()
def logits_of(path: Path, row: list[int], **options: Any) -> torch.Tensor:
    """Prefill of half of the row, then token by token."""
    with Checkpoint.open(path) as checkpoint:
        decoder, half = Decoder(Llama.load(checkpoint, **options), rows=1, max_context=len(row)), len(row) // 2
    return torch.cat([decoder.feed([part])[0] for part in (row[:half], *([token] for token in row[half:]))])


@torch.inference_mode()
def truth(hf: Any, row: list[int]) -> torch.Tensor:
    logits: torch.Tensor = hf(torch.tensor([row]), use_cache=False).logits[0].float()
    return logits


# ------------------------------------------------------------------------------------------- a config's keys and values

# Keys without a meaning beside the others' values: variants whose config has them -> why.
IDLE = {
    "sliding_window": {"qwen2", "qwen3", "smollm3", "qwen3_moe", "qwen2_moe"},  # use_sliding_window is off
    "use_sliding_window": {"qwen2", "qwen3", "smollm3", "qwen3_moe"},  # there is no sliding_window
    "max_window_layers": {*VARIANTS},  # one of the two, or layer_types says which layers
    "no_rope_layer_interval": {"smollm3", "smollm3_listed"},  # no_rope_layers says which layers
    "_sliding_window_pattern": {"gemma3", "gemma3_256"},  # layer_types says which layers
    "full_attn_idxs": {"lfm2_bias"},  # layer_types says the same
    "block_ffn_dim_multiplier": {"lfm2_bias"},  # block_auto_adjust_ff_dim is off
    "block_multiple_of": {"lfm2_bias"},
    # mlp_layer_types says which layers
    "first_k_dense_replace": {"deepseek_v32", "glm_moe_dsa", "kimi_linear", "exaone_moe"},
    "sliding_window_pattern": {"exaone4", "exaone4_full", "exaone_moe"},  # layer_types says which layers
    "n_group": {"deepseek_v2"},  # experts are chosen among all
    "topk_group": {"deepseek_v2"},
    "enable_moe_fp32_combine": {"hy_v3"},  # of rounding alone
    # transformers overwrites it in kimi_linear; elsewhere it may be either size of a latent head's parts, or their sum
    "head_dim": {
        "kimi_linear",
        "deepseek_v3",
        "deepseek_v3_plain",
        "deepseek_v32",
        "glm_moe_dsa",
        "deepseek_v2",
        "youtu",
    },
    **{
        key: {"nemotron_h"}
        for key in (
            "chunk_size",
            "expand",
            "time_step_min",
            "time_step_max",
            "time_step_floor",
            "num_logits_to_keep",
            "rescale_prenorm_residual",
            "use_mamba_kernels",
            "moe_shared_expert_overlap",
            "mtp_layers_block_type",
            "n_shared_experts",
        )
    },
    **{f"linear_{key}": {"olmo_hybrid"} for key in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")},
    "rope_parameters": {"granite4_moe", "granite4_h"},  # position_embedding_type says that nothing rotates
    "mamba_chunk_size": {"granite4_moe", "granite4_h", "granite4"},
    "intermediate_size": {"granite4_h", "granite4"},  # of experts that there are not
    "num_experts_per_tok": {"granite4_h", "granite4"},
    **{f"mamba_{key}": {"granite4"} for key in ("conv_bias", "d_conv", "d_head", "d_state", "expand", "n_heads")},
    **{key: {"granite4"} for key in ("mamba_proj_bias", "time_step_limit")},  # no Mamba-2 layers
    "original_max_position_embeddings": {"phi3"},  # of RoPE types that phi3 may not have
    **{key: {"gemma4", "gemma4_e"} for key in ("num_experts", "top_k_experts", "moe_intermediate_size")},  # no experts
    "use_double_wide_mlp": {"gemma4", "gemma4_moe"},  # no layers that share keys
    "vocab_size_per_layer_input": {"gemma4", "gemma4_moe"},  # no embeddings of layers
}


def changed(value: Any) -> Iterator[Any]:
    """Other values of the kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2, value + 1, value + 0.37)
    elif isinstance(value, str):
        yield "another"
    elif isinstance(value, list):
        yield from (value[1:], ["another"])
    elif isinstance(value, dict):
        yield {**value, "another": 3}
        yield from ({**value, key: other} for key, old in value.items() for other in changed(old))
    else:
        yield from (True, 3, 0.5, "another", [1], {"another": 3})


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_value_that_changes_is_seen_or_refused(variant: str) -> None:
    """No key of any family's config is passed over: with another value the model is another, or refused."""
    config = told(variant)
    plain = LlamaConfig.from_dict(config)
    unseen = []
    for key in sorted(set(config) - INERT):
        if variant in IDLE.get(key, ()):
            continue
        for value in changed(config[key]):
            try:
                other = LlamaConfig.from_dict({**config, key: value})
            except ValueError:
                continue
            if other == plain and value != config[key]:
                unseen.append((key, config[key], value))
    assert not unseen


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_feature_of_others_is_read_or_refused(variant: str) -> None:
    """Each family's config with a key of another family, or with one that nobody knows, at a value that says "used"."""
    config = told(variant)
    plain, passed_over = LlamaConfig.from_dict(config), []
    for key in (*NEUTRAL, "a_key_of_tomorrow"):
        if key in config or variant in IDLE.get(key, ()):
            continue
        refusal = refused(config | {key: 3.25})
        if refusal is None and LlamaConfig.from_dict(config | {key: 3.25}) == plain:
            passed_over.append(key)
        assert refusal is None or (key in refusal and "\n" not in refusal)
    assert not passed_over


def refused(config: dict[str, Any]) -> str | None:
    try:
        LlamaConfig.from_dict(config)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("hy_v3", {"expert_hidden_dim": 25}, "moe_intermediate_size is 24 and, by another name, 25"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy"},
            "topk_method is 'group_limited_greedy'; supported: gre",
        ),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; supported: gelu_pytorch"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; this feature is not"),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters has rope_type; it must have sliding",
        ),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": 3}},
            "must have an object for each of sliding_attention, full",
        ),
        ("gemma3", {"layer_types": ["full_attention"] * 6 + ["chunked_attention"]}, "layer_types is"),
        ("gemma3", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0; it must be a number"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; this feature is not supported"),
        ("qwen3", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is 256; this feature is not supported"),
        ("qwen2", {"attention_bias": True}, "attention_bias is True; this feature is not supported for qwen2"),
        ("mistral_full", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; this feature is not supported"),
        ("glm4_moe", {"partial_rotary_factor": 0.3, "rope_parameters": None}, "of head_dim 16 is 4"),
        ("glm4_moe", {"n_group": 3}, "1 of 3 groups of 8 experts"),
        ("glm4_moe_groups", {"topk_group": 5}, "5 of 4 groups"),
        ("glm4_moe_groups", {"topk_group": 1, "num_experts_per_tok": 4}, "1 groups of 3 experts are fewer than the 4"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        ("qwen2_moe", {"use_sliding_window": True}, "qwen2_moe with a sliding window is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; this feature is not supported for olmoe"),
        ("olmo2", {"sliding_window": 8}, "olmo2 with a sliding window is not supported"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope type 'longrope'"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope type 'linear' is not supported for phi3; give 'default'",
        ),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0; it must be a number"),
        ("granitemoe", {"shared_intermediate_size": 64}, "granitemoe is not known to have this key"),
        ("granitemoe", {"num_local_experts": 0}, "num_local_experts is 0; it must be an integer"),
        ("granite4", {"position_embedding_type": "alibi"}, "_type is 'alibi'; supported: rope, nope"),
        ("granite4", {"shared_intermediate_size": 0}, "shared_intermediate_size is 0; it must be an integer"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": "a"}}, "scaling_beta is 'a'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}}, "has llama_4_scaling_beta"),
        ("llama", {"rope_parameters": {"rope_type": "mrope"}}, "has the rope type 'mrope', which is not supported"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: sigmoid"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list is .*; supported: 1"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm is False; supported: True"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64; supported: 0"),
        ("minimax_m2", {"rotary_dim": 5, "rope_parameters": None}, "of head_dim 16 is 5; it must be even"),
        ("minimax_m2", {"rotary_dim": 4}, "partial_rotary_factor is 0.25 and rope_parameters.* they must agree"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer_types is"),
        (
            "llama",
            {"mup_width_multiplier": 8.0},
            "llama is not known to have this key, which may change what the model",
        ),
    ],
)
def test_refused_by_name(variant: str, change: dict[str, Any], message: str) -> None:
    if message.endswith("of head_dim 16 is 4"):
        change = change | {"partial_rotary_factor": 0.2}
        message = "partial_rotary_factor 0.2 of head_dim 16 is 3; it must be even"
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict(told(variant) | change)


@pytest.mark.parametrize("kind", MISSING)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_part_that_is_not_built_is_named(kind: str, wrapped: bool) -> None:
    """In one line, whatever else the config holds; none of them is a family that runs."""
    assert kind not in FAMILIES
    config: dict[str, Any] = {"model_type": kind, "an_unknown_key": 3}
    with pytest.raises(ValueError, match=r"^config\.json: model_type '.*' is not supported: .* is not built$"):
        LlamaConfig.from_dict({"model_type": "seer", "text_config": config} if wrapped else config)


def test_a_window_may_be_told_twice() -> None:
    """Gemma-2-9B, whose window has two names."""
    gemma = told("gemma2") | {"sliding_window": 4096}
    assert LlamaConfig.from_dict(gemma | {"sliding_window_size": 4096}) == LlamaConfig.from_dict(gemma)
    with pytest.raises(ValueError, match="sliding_window_size is 512 and sliding_window 4096; where both"):
        LlamaConfig.from_dict(gemma | {"sliding_window_size": 512})


DOTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}


def test_defaults_are_those_of_transformers() -> None:
    """What a config.json leaves out is what the transformers class of the family would take."""
    import transformers

    left_out = ("max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "head_dim")
    given = {k: v for k, v in SIZES.items() if k not in left_out} | {"num_attention_heads": 32, "hidden_size": 4096}
    given["num_hidden_layers"] = 5  # of which hybrids have one that attends
    for variant in NEW:
        latent = FAMILIES[getattr(transformers, f"{VARIANTS[variant][0]}Config").model_type].latent
        more = {"num_key_value_heads": 32} if latent else {}  # whose default is a number of its own
        more |= {"deepseek_v2": {"num_experts_per_tok": 6}, "dots1": DOTS}.get(variant, {})  # None by default
        more |= {"layer_types": ["attention"] + ["mamba"] * 4} if variant == "granite4_moe" else {}  # none attends else
        theirs = getattr(transformers, f"{VARIANTS[variant][0]}Config")(**given, **more)
        ours = LlamaConfig.from_dict(given | more | {"model_type": theirs.model_type})
        whole = LlamaConfig.from_dict(json.loads(theirs.to_json_string(use_diff=False)))
        assert dataclasses.replace(ours, drafts=whole.drafts) == whole, variant


# ------------------------------------------------------------------------------------------------------------- parts


def test_parts_are_chosen_by_the_family(tmp_path: Path) -> None:
    made = {}
    for variant in ("gemma3", "olmo2", "phi3", "qwen3"):
        save_hf(variant, tmp_path / variant)
        made[variant] = Llama.load(Checkpoint.open(tmp_path / variant)).blocks[0]
    assert isinstance(made["gemma3"].qkv, Normed)
    assert isinstance(made["gemma3"].out.after, Norm)
    assert isinstance(made["olmo2"].qkv, InputLinear)
    assert isinstance(made["olmo2"].qkv.after, WholeNorms)
    assert not made["olmo2"].fused
    assert made["phi3"].attention.cos.shape[1] == 4
    assert made["phi3"].qkv.linear.weight.shape == (160, 72)
    assert made["qwen3"].out.after is None


def test_a_norm_stored_less_one_is_the_exact_sum(tmp_path: Path) -> None:
    """In bfloat16 1 + w has eight bits; what transformers multiplies by has float32's."""
    hf = save_hf("gemma3", tmp_path).bfloat16()
    hf.save_pretrained(tmp_path)
    model = Llama.load(Checkpoint.open(tmp_path), dtype=torch.bfloat16)
    own = hf.model.layers[0]
    for ours, theirs in (
        (model.norm, hf.model.norm),
        (model.blocks[0].qkv.norm, own.input_layernorm),
        (model.blocks[0].out.after.weight, own.post_attention_layernorm),
        (model.blocks[0].attention.q_norm, own.self_attn.q_norm),
    ):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, 1.0 + theirs.weight.float())
        assert not torch.equal(ours, ours.bfloat16().float())


@pytest.mark.parametrize("codes", [None, TurboQuantConfig(k_bits=4, v_bits=4)])
def test_queries_are_scaled_beyond_the_first_context(codes: TurboQuantConfig | None, tmp_path: Path) -> None:
    """Ministral 3's own numbers, whose queries grow from position 16,384 on. A window keeps what a query sees within
    the tokens that are given; attention over a whole sequence has them from its start on."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.9, "beta_fast": 32.0, "beta_slow": 1.0}
    more = {"max_position_embeddings": 65536, "rope_parameters": rope, "sliding_window": 4, "num_hidden_layers": 2}
    hf, row = save_hf("ministral3", tmp_path, **more | ({} if codes is None else {"head_dim": 64})), tokens(24)
    with Checkpoint.open(tmp_path) as checkpoint:
        config = LlamaConfig.from_dict(checkpoint.config)
        near, far = (Llama.load(checkpoint, max_context=n) for n in (16384, 49152))
    assert near.blocks[0].attention.query_scale is None
    assert far.blocks[0].attention.query_scale.unique().tolist() == [1.0, *(far_factor(config, n) for n in (2, 3))]
    for start in (0, 16372, 40000):
        more = {} if codes is None else {"kv": codes, "page_size": 16}
        decoder = Decoder(far, rows=1, max_context=start + 80, **more)
        decoder.cache.positions.fill_(start)
        got = torch.cat([decoder.feed([part])[0] for part in (row[:12], *([token] for token in row[12:]))])
        at = torch.arange(start, start + len(row)).unsqueeze(0)
        with torch.no_grad():
            want = hf(torch.tensor([row]), position_ids=at, use_cache=False).logits[0]
        assert (got - want)[8:].abs().max() < (1e-4 if codes is None else 0.3 * want.abs().max())


def far_factor(config: LlamaConfig, times: int) -> float:
    rope = config.ropes[0]
    assert rope is not None
    return float(torch.tensor(1 + rope.query_beta * math.log(times)))


@pytest.mark.parametrize("variant", ["gemma3", "gemma2", "granite", "olmo2", "phi3"])
def test_low_precision_stays_near_float32(variant: str, tmp_path: Path) -> None:
    """No further from the truth than transformers in bfloat16; the embedding's rows are transformers' to the bit."""
    hf, row = save_hf(variant, tmp_path), tokens(40)
    got, want = logits_of(tmp_path, row, dtype=torch.bfloat16), truth(hf, row)
    low = hf.bfloat16()
    assert (got - want).norm() <= 1.2 * (truth(low, row) - want).norm()
    if variant == "gemma3":
        rows = torch.tensor([row])
        embed = Llama.load(Checkpoint.open(tmp_path), dtype=torch.bfloat16).embed
        assert torch.equal(embed(rows), low.model.embed_tokens(rows))
        assert embed.factor == 8.5, "sqrt(72), rounded to bfloat16"


def test_a_cache_in_codes_is_refused(tmp_path: Path) -> None:
    save_hf("gemma2", tmp_path)
    model = Llama.load(Checkpoint.open(tmp_path))
    with pytest.raises(ValueError, match=r"a bound of attention scores.*which a cache in codes does not know"):
        model.new_cache(rows=1, pages=4, page_size=16, pages_per_row=3, kv=TurboQuantConfig(k_bits=4, v_bits=4))


def test_heads_of_which_a_part_rotates_may_be_in_codes(tmp_path: Path) -> None:
    """Within the window the cache is exact."""
    hf, row = save_hf("glm4_moe", tmp_path, head_dim=64), tokens(30)
    model = Llama.load(Checkpoint.open(tmp_path))
    decoder = Decoder(model, rows=1, max_context=32, page_size=16, kv=TurboQuantConfig(k_bits=4, v_bits=4, window=32))
    got = torch.cat([decoder.feed([part])[0] for part in (row[:20], *([token] for token in row[20:]))])
    assert (got - truth(hf, row)).abs().max() < 1e-4


def test_a_layer_that_only_drafts_is_passed_over(tmp_path: Path) -> None:
    hf = save_hf("glm4_moe", tmp_path / "plain")
    source = Checkpoint.open(tmp_path / "plain")
    tensors = {name: source.tensor(name).clone() for name in source.names}
    more = {"model.layers.3.eh_proj.weight": torch.zeros(72, 144)}
    write_checkpoint(tmp_path / "drafts", source.config, (tensors | more).items())
    row = tokens(12)
    assert (logits_of(tmp_path / "drafts", row) - truth(hf, row)).abs().max() < 1e-4
    write_checkpoint(tmp_path / "none", source.config | {"num_nextn_predict_layers": 0}, (tensors | more).items())
    with pytest.raises(CheckpointError, match=r"unexpected: 'model.layers.3.eh_proj.weight'"):
        logits_of(tmp_path / "none", row)


def test_experts_of_groups_that_are_not_chosen_are_not(tmp_path: Path) -> None:
    """The best expert alone does not make its group: two of another together do."""
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.6, 0.6, 0.5, 0.1, 0.3, 0.2]])
    logits = torch.logit(scores)
    experts, weights = sigmoid_route(logits, torch.zeros(9), 2, 3, 1, True, 2.5, False, False)
    assert sorted(experts[0].tolist()) == [3, 4]
    torch.testing.assert_close(weights, torch.full((1, 2), 1.25))
    bias = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0, 0])
    experts, weights = sigmoid_route(logits, bias, 2, 3, 1, False, 1.0, False, False)
    assert experts[0].tolist() == [0, 1]
    torch.testing.assert_close(weights, torch.tensor([[0.9, 0.1]]), msg="the bias is for the choice alone")


@pytest.mark.parametrize("variant", ["glm4_moe", "qwen2_moe"])
def test_a_shared_expert_is_a_component(variant: str, tmp_path: Path) -> None:
    changes = {"hidden_size": 96, "moe_intermediate_size": 32, "intermediate_size": 64}
    changes |= {"shared_expert_intermediate_size": 64} if variant == "qwen2_moe" else {}
    save_hf(variant, tmp_path, **changes)
    model = Llama.load(Checkpoint.open(tmp_path), fused=False)
    changed = in_nvfp4(model)
    assert list(changed) == list(components_of(model))
    routed = [i for i, on in enumerate(model.config.routed.layers) if on]
    paths = {f"blocks.{i}.mlp.shared.{part}" for i in routed for part in ("gate_up", "down")}
    assert set(changed["shared expert"]()) == paths


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("older", [False, True])
def test_the_text_of_a_model_that_sees_is_read(older: bool, tmp_path: Path) -> None:
    """Gemma3ForConditionalGeneration as transformers writes it, and under the names of the published files."""
    import transformers

    text = hf_model("gemma3")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )  # fmt: skip
    both = transformers.Gemma3ForConditionalGeneration(config)
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.save_pretrained(tmp_path / "m")
    if older:
        source = Checkpoint.open(tmp_path / "m")
        state = {name: both.state_dict()[name] for name in both.state_dict() if name != "lm_head.weight"}
        names = {
            name: name.removeprefix("model.").replace("language_model.", "language_model.model.") for name in state
        }
        write_checkpoint(tmp_path / "o", source.config, ((names[k], v.contiguous()) for k, v in state.items()))
    path, row = tmp_path / ("o" if older else "m"), tokens(24)
    assert any("vision_tower" in name for name in Checkpoint.open(path).names)
    assert (logits_of(path, row) - truth(text, row)).abs().max() < 1e-4
    assert plan(path).own, "quantizing keeps the rest: test_wrapper.py"


@pytest.mark.parametrize("change", [{"text_config": None}, {"text_config": {"model_type": "gemma2"}}])
def test_what_stands_around_no_text_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="text_config"):
        LlamaConfig.from_dict({"model_type": "gemma3"} | change)


@pytest.mark.parametrize("variant", ["gemma3", "gemma2", "olmo2", "phi3", "granite"])
def test_e8p_is_the_model_of_the_weights_that_codes_stand_for(variant: str, tmp_path: Path) -> None:
    hf = save_e8p(variant, tmp_path / "m", rates={"bits": 3, "lm_head": 4, "embed_tokens": 4})
    row = tokens(24)
    for options in ({}, {"decode": False}, {"decode": False, "fused": False}):
        got, want = logits_of(tmp_path / "m", row, **options), truth(hf, row)
        assert (got - want).abs().max() < 3e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "gemma4_e"])
def test_the_gradient_of_kl_reaches_every_linear(variant: str, tmp_path: Path) -> None:
    """What the recipe of a GPU rounds under; routed experts have none."""
    save_hf(variant, tmp_path / "model", **({"index_topk": 64} if "index_topk" in VARIANTS[variant][1] else {}))
    text = torch.randint(0, 131, (2, 16), generator=torch.Generator().manual_seed(0))
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = LlamaSource(checkpoint, "cpu", torch.float32)
        found = dict(kl_factors(model, text, seed=0))
        for i, factors in found.items():
            linears = [name for group in model.linear_groups(model.load_block(i)) for name, _ in group]
            wanted = {model.block_prefix(i) + name for name in linears}
            assert factors.triangles.keys() == factors.tokens.keys() == wanted
    assert len(found) == model.num_blocks
