"""Hybrid models: states over odd cuts and unequal lengths, published forms, what is refused, and what `check` finds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import STEPS, simulated_step
from models import HYBRIDS, Decoder, hf_config, save_hf
from onegraph.check.api import check_step
from onegraph.engine.engine import Engine
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.formats.dense import DENSE
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama, config_of
from onegraph.models.load import load_decoder
from onegraph.models.mixers import GatedDelta
from onegraph.nn.block import Stream
from onegraph.nn.recurrent import Inputs
from test_int4 import config as int4_config
from test_int4 import packed as int4_packed
from test_int4 import truth as int4_truth
from test_moe_published import FP8_SAID, NVFP4_SAID, fp8, nvfp4

ROWS = [torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (150, 37, 88)]
TWO: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
WIDE: dict[str, Any] = TWO | {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}  # fmt: skip
GRANITE = {
    "hidden_size": 128, "intermediate_size": 128, "shared_intermediate_size": 128, "num_attention_heads": 4,
    "mamba_n_heads": 8, "mamba_d_head": 32,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}


def load(path: Path, device: str = "cpu", **options: Any) -> Llama:
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, device, torch.float32, **options)


@torch.inference_mode()
def truth(hf: Any, row: list[int]) -> Tensor:
    logits: Tensor = hf(torch.tensor([row]), use_cache=False).logits[0]
    return logits


def told(variant: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hf_config(variant).to_json_string(use_diff=False))
    return found | changes


# ------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("variant", HYBRIDS)
def test_states_go_over_any_cuts(variant: str, tmp_path: Path) -> None:
    """Rows of unequal lengths, in chunks of odd sizes (records below 9 tokens, solved at once above), then alone."""
    hf = save_hf(variant, tmp_path)
    decoder = Decoder(load(tmp_path), rows=3, max_context=160, page_size=16)
    cuts = [(63, 1, 0), (1, 9, 65), (3, 0, 2), (64, 2, 8), (9, 24, 1), (0, 0, 9), (1, 1, 1), (8, 0, 0), (1, 0, 2)]
    found: list[list[Tensor]] = [[], [], []]
    at = [0, 0, 0]
    for cut in cuts:
        fed = decoder.feed([ROWS[i][at[i] : at[i] + n] for i, n in enumerate(cut)])
        for i, logits in enumerate(fed):
            found[i].append(logits)
            at[i] += cut[i]
    assert at == [150, 37, 88]
    for row, parts in zip(ROWS, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), truth(hf, row), atol=1e-4, rtol=1e-4)
    states = [tensor for state in decoder.cache.states.values() for tensor in state]
    assert not any(tensor[0].any() for tensor in states), "slot 0 belongs to nobody"


@pytest.mark.parametrize("variant", ["lfm2", "qwen3_5"])
def test_tokens_are_taken_back_by_the_position(variant: str, tmp_path: Path) -> None:
    """Seven drafts that are all wrong, again and again, leave what they never were."""
    hf, row = save_hf(variant, tmp_path), ROWS[1]
    decoder = Decoder(load(tmp_path), rows=1, max_context=64)
    decoder.feed([row[:10]])
    found = []
    for at in range(10, len(row)):
        wrong = [(token + 3) % 131 for token in row[at + 1 : at + 8]]
        found.append(decoder.feed([[row[at], *wrong]])[0][:1])
        decoder.cache.truncate(torch.tensor([at + 1], dtype=torch.int32))
    torch.testing.assert_close(torch.cat(found), truth(hf, row)[10:], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------- published forms


@pytest.mark.parametrize(("code", "said"), [(fp8, FP8_SAID), (nvfp4, NVFP4_SAID)], ids=["fp8", "nvfp4"])
@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("everything", [False, True])
def test_published_checkpoints_are_what_their_codes_stand_for(
    variant: str, code: Any, said: dict[str, Any], everything: bool, tmp_path: Path
) -> None:
    """Experts one by one; beta and decay in 16 bits as the official files have them, or (`everything`) in codes."""
    hf = save_hf(variant, tmp_path / "dense", **WIDE, **({} if variant == "qwen3_5" else EXPERTS))
    source = Checkpoint.open(tmp_path / "dense")
    config = config_of(source)
    linears = [name for name in config.parts.linears if name != "lm_head" and (everything or name not in config.steady)]
    coded, stand_in = ({name: source.tensor(name) for name in source.names} for _ in range(2))
    for name in linears:
        made, stand_in[f"{name}.weight"] = code(name, coded.pop(f"{name}.weight"))
        coded |= made
    inside = {"quantization_config": said} if "quant_method" in said else {}
    write_checkpoint(tmp_path / "coded", source.config | inside, coded.items())
    if not inside:
        (tmp_path / "coded" / "hf_quant_config.json").write_text(json.dumps(said))
    write_checkpoint(tmp_path / "stand_in", source.config, stand_in.items())
    hf = type(hf).from_pretrained(tmp_path / "stand_in", attn_implementation="eager").eval()
    row = ROWS[1]
    for decode in (True, False):
        model = load(tmp_path / "coded", decode=decode)
        assert model.blocks[0].qkv.rates.format is DENSE
        got = Decoder(model, rows=1, max_context=64).feed([row])[0]
        torch.testing.assert_close(got, truth(hf, row), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("code", "said"), [(fp8, FP8_SAID), (nvfp4, NVFP4_SAID)], ids=["fp8", "nvfp4"])
def test_experts_of_granite_in_codes_lie_one_by_one(code: Any, said: dict[str, Any], tmp_path: Path) -> None:
    """As tools that split the two stacks write them; mixers and the shared MLP in codes too."""
    hf = save_hf("granite4_moe", tmp_path / "dense", **GRANITE)
    source = Checkpoint.open(tmp_path / "dense")
    coded = {name: source.tensor(name) for name in source.names}
    for name in LlamaConfig.from_dict(source.config).parts.linears:
        if name == "lm_head":
            continue
        block, _, within = name.partition(".experts.")
        if within:
            expert, leaf = within.split(".")
            owner = "output_linear" if leaf == "down_proj" else "input_linear"
            held = hf.get_parameter(f"{block}.experts.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}")
            weight = held.data[int(expert)]
            weight = weight if leaf == "down_proj" else weight.chunk(2)[leaf == "up_proj"]
            coded.pop(f"{block}.{owner}.weight", None)
        else:
            weight = hf.get_parameter(f"{name}.weight").data
            del coded[f"{name}.weight"]
        made, numbers = code(name, weight.clone())
        coded |= made
        weight.copy_(numbers)
    inside = {"quantization_config": said} if "quant_method" in said else {}
    write_checkpoint(tmp_path / "coded", source.config | inside, coded.items())
    if not inside:
        (tmp_path / "coded" / "hf_quant_config.json").write_text(json.dumps(said))
    for decode in (True, False):
        got = Decoder(load(tmp_path / "coded", decode=decode), rows=1, max_context=64).feed([ROWS[1]])[0]
        torch.testing.assert_close(got, truth(hf, ROWS[1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("layout", ["awq", "gptq", "packed asymmetric"])
def test_int4_as_published_is_what_it_stands_for(variant: str, layout: str, tmp_path: Path) -> None:
    """AWQ, GPTQ and compressed-tensors: beta, decay and experts in 16 bits beside linears of integers."""
    sizes = {"qwen3_5": WIDE, "qwen3_next": WIDE | EXPERTS}.get(variant, {"hidden_size": 128, "head_dim": 32})
    if variant == "lfm2":
        sizes |= {"intermediate_size": 96, "block_auto_adjust_ff_dim": False}
    hf = save_hf(variant, tmp_path / "dense", **sizes)
    source = Checkpoint.open(tmp_path / "dense")
    parsed = config_of(source)
    tensors = {name: source.tensor(name) for name in source.names}
    stand_in = dict(tensors)
    for seed, (name, (n, k, _)) in enumerate(parsed.parts.linears.items()):
        if name in parsed.steady or name == "lm_head" or ".experts." in name:
            continue
        numbers = int4_truth(n, k, 32, seed)
        del tensors[f"{name}.weight"]
        tensors |= int4_packed(layout, name, numbers)
        stand_in[f"{name}.weight"] = numbers.weight.float()
    write_checkpoint(tmp_path / "stand_in", source.config, stand_in.items())
    write_checkpoint(
        tmp_path / "coded", source.config | {"quantization_config": int4_config(layout, 32)}, tensors.items()
    )
    hf = type(hf).from_pretrained(tmp_path / "stand_in", attn_implementation="eager").eval()
    for decode in (True, False):
        got = Decoder(load(tmp_path / "coded", decode=decode), rows=1, max_context=64).feed([ROWS[1]])[0]
        torch.testing.assert_close(got, truth(hf, ROWS[1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_lie_as_the_file_has_them(stacked: bool, tmp_path: Path) -> None:
    """One by one, as transformers writes them, or all of a layer in one tensor each, as Qwen publishes them."""
    hf = save_hf("qwen3_5_moe", tmp_path / "single")
    source = Checkpoint.open(tmp_path / "single")
    rest = {name: source.tensor(name) for name in source.names if ".experts." not in name}
    stacks = {name: tensor for name, tensor in hf.state_dict().items() if ".experts." in name}
    assert all(tensor.dim() == 3 for tensor in stacks.values())
    write_checkpoint(tmp_path / "stacked", source.config, (rest | stacks).items())
    path = tmp_path / ("stacked" if stacked else "single")
    got = Decoder(load(path), rows=1, max_context=64).feed([ROWS[1]])[0]
    torch.testing.assert_close(got, truth(hf, ROWS[1]), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("qwen3_5", {"layer_types": ["full_attention", "mamba"] * 2}, "layer_types is .*must list 4 of full_attention"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 3}, "layer_types is .* it must list 4"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "without a layer of full_attention is not supported"),
        ("qwen3_5", {"full_attention_interval": 2}, "full_attention_interval is 2 and layer_types .* must agree"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_h"),
        ("qwen3_5", {"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be an integer from 2"),
        ("qwen3_5", {"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype is 'float16'; supported: float32"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate is False; supported: True"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; supported"),
        ("qwen3_5", {"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers is -1"),
        ("lfm2", {"full_attn_idxs": [0, 9]}, "full_attn_idxs is .*must list numbers of layers, 0 to 3"),
        ("lfm2", {"full_attn_idxs": [0]}, "full_attn_idxs is .* and layer_types .*must agree"),
        ("lfm2", {"conv_dim": 7}, "conv_dim is 7 and hidden_size 72; they must agree"),
        ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu is False; supported: True"),
        ("llama", {"layer_types": ["linear_attention"] * 3}, "layer_types is"),
        ("nemotron_h", {"layers_block_type": ["mamba3"] * 5}, "layers_block_type is .*must list 5 of linear_attention"),
        ("nemotron_h", {"layers_block_type": ["mlp"] * 5}, "layers_block_type has no full_attention; a model without"),
        ("nemotron_h", {"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern is 'MX.'; it must be made of M"),
        ("nemotron_h", {"hybrid_override_pattern": "M*E"}, "layers_block_type is .* and, by another name, "),
        ("nemotron_h", {"num_hidden_layers": 4}, "layers_block_type is .* it must list 4 of"),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads 4 is not a multiple of n_groups 3"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is .* two numbers, 0 to 1 and infinity"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported: relu2"),
        ("granite4_h", {"mamba_n_groups": 2}, "mamba_n_groups is 2; supported: 1"),
        ("granite4_h", {"mamba_d_head": 16}, "mamba_n_heads is 6 and mamba_d_head 16; .* hidden_size numbers, 144"),
        ("granite4_h", {"mamba_n_heads": 7}, "mamba_n_heads is 7 and mamba_d_head 24; all heads together must have"),
        ("granite4_h", {"mamba_d_state": 0}, "mamba_d_state is 0; it must be an integer"),
        ("granite4_h", {"layer_types": ["mamba"] * 3}, "none of 3 layers attends"),
        ("granite4_h", {"layer_types": ["mamba"] * 2}, "layer_types is .*must list 3 of full_attention"),
        ("granite4_h", {"normalization_function": "layernorm"}, "normalization_function is 'layernorm'; supported"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias is False; supported: True"),
        ("olmo_hybrid", {"linear_value_head_dim": 0}, "linear_value_head_dim is 0"),
        ("kimi_linear", {"norm_topk_prob": False}, "norm_topk_prob is False and, by another name, True; give one"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False; supported: True"),
        ("kimi_linear", {"linear_attn_config": {"heads": 4}}, "linear_attn_config has heads; known are head_dim"),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]}, "layer_types": None},
            r"full_attn_layers \[2\] and kda_layers \[1, 2\]; together they must number each of 3 layers once",
        ),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(variant: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LlamaConfig.from_dict(told(variant, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "name", "change"),
    [
        ("qwen3_5", "model.layers.1.linear_attn.conv1d.weight", None),
        ("qwen3_5", "model.layers.0.linear_attn.A_log", None),
        ("qwen3_5", "model.layers.0.linear_attn.dt_bias", (3,)),
        ("qwen3_5", "model.layers.2.linear_attn.norm.weight", (16,)),
        ("qwen3_5", "model.layers.2.linear_attn.in_proj_a.weight", None),
        ("qwen3_5", "model.layers.0.linear_attn.conv1d.weight", (160, 1, 3)),
        ("qwen3_5", "model.layers.3.self_attn.q_proj.weight", (96, 72)),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight", (200, 72)),
        ("qwen3_next", "model.layers.0.mlp.shared_expert_gate.weight", None),
        ("lfm2", "model.layers.0.conv.conv.weight", (72, 1, 4)),
        ("lfm2", "model.embedding_norm.weight", None),
        ("lfm2_bias", "model.layers.2.conv.conv.bias", None),
        ("lfm2_moe", "model.layers.1.feed_forward.expert_bias", None),
        ("nemotron_h", "backbone.layers.0.mixer.conv1d.bias", None),
        ("nemotron_h", "backbone.layers.4.mixer.in_proj.weight", (100, 72)),
        ("granite4_moe", "model.layers.2.mamba.conv1d.bias", None),
        ("granite4_moe", "model.layers.0.mamba.norm.weight", (24,)),
        ("granite4_moe", "model.layers.0.shared_mlp.input_linear.weight", (56, 72)),
        ("granite4_h", "model.layers.1.shared_mlp.output_linear.weight", None),
        ("olmo_hybrid", "model.layers.0.linear_attn.k_conv1d.weight", (64, 1, 3)),
        ("kimi_linear", "model.layers.2.self_attn.v_conv1d.weight", None),
        ("kimi_linear", "model.layers.0.self_attn.g_b_proj.weight", (64, 8)),
    ],
)
def test_a_tensor_that_is_missing_or_wrong_is_named(
    variant: str, name: str, change: tuple[int, ...] | None, tmp_path: Path
) -> None:
    save_hf(variant, tmp_path / "m")
    source = Checkpoint.open(tmp_path / "m")
    tensors = {each: source.tensor(each) for each in source.names}
    assert tensors.pop(name) is not None
    if change is not None:
        tensors[name] = torch.zeros(change)
    write_checkpoint(tmp_path / "w", source.config, tensors.items())
    own = name.removeprefix("backbone.")  # Nemotron-H's, which are `model.` here
    with pytest.raises(CheckpointError, match=own.replace(".", r"\.")):
        load(tmp_path / "w")


def test_other_ways_to_keep_keys_are_refused(tmp_path: Path) -> None:
    save_hf("lfm2", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ValueError, match="fp8 is a way to keep keys"):
        load_decoder(checkpoint, "cpu", torch.float32, fp8_kv=True)


@pytest.mark.parametrize(
    ("variant", "inside"), [("qwen3_5", True), ("qwen3_next", True), ("olmo_hybrid", True), ("kimi_linear", False)]
)
def test_beta_and_decay_are_projected_inside_the_layer(variant: str, inside: bool, tmp_path: Path) -> None:
    """It is called with x and the weights, beta's rows first, as its own order of heads is."""
    save_hf(variant, tmp_path)
    block = load(tmp_path).blocks[0]
    assert isinstance(block.qkv, Inputs)
    weight = block.qkv.rates.tensors["weight"]
    x = torch.randn(1, 2, weight.shape[1])
    (_, given, *rest), total = block.qkv(Stream(x))
    normed = torch.nn.functional.rms_norm(x, x.shape[-1:], block.qkv.norm.float(), block.qkv.eps)
    assert total is x
    if inside:
        assert rest[0] is weight
        torch.testing.assert_close(given, x if len(rest) > 1 else normed)
        assert len(weight) == 2 * block.attention.heads[1]
        assert block.attention.input_eps == block.qkv.eps
    else:
        assert not rest
        torch.testing.assert_close(given, normed @ weight.T)


def test_rows_grouped_by_head_of_keys_are_put_in_order() -> None:
    """Qwen3-Next: [q k v z] of each head of keys -> all q, all k, all v, all z."""
    mixer = GatedDelta(k_heads=2, v_heads=4, k_dim=1, v_dim=2, width=4, grouped=True)
    assert mixer.order == [0, 10, 1, 11, 2, 3, 4, 5, 12, 13, 14, 15, 6, 7, 8, 9, 16, 17, 18, 19]
    assert mixer.steady_order == [0, 1, 4, 5, 2, 3, 6, 7]


# --------------------------------------------------------------------------------------------------- what check finds


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("lfm2", "prefill"),
        ("lfm2", "decode"),
        ("qwen3_5", "prefill"),
        ("qwen3_5_moe", "decode"),
        ("qwen3_next", "decode"),
        ("kimi_linear", "decode"),
        ("nemotron_h", "decode"),
        ("granite4_moe", "prefill"),
        ("granite4_moe", "decode"),
        ("granite4_h", "decode"),
    ],
)
def test_the_step_may_be_captured(variant: str, kind: str, tmp_path: Path) -> None:
    """Captured, replayed and compared on a simulated GPU, with the ops as plain torch, which it sees into."""
    save_hf(variant, tmp_path, **(TWO if "qwen" in variant else {}))

    def factory() -> Any:
        model = load(tmp_path, "cuda", decode=False)
        engine = Engine(model, max_batch=3, max_context=128, chunk=16, capture=False)
        return simulated_step(engine, kind, limit=120)

    report = check_step(factory, steps=STEPS[kind])
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
