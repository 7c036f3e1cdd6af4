"""`onegraph quantize` through transformers' own modules: models that our decoder does not run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import onegraph.integrations.hf  # registers the method
from models import Decoder, hf_model
from onegraph.api.outline import outline
from onegraph.api.plan import plan
from onegraph.api.quantize import Quantization, quantize
from onegraph.cli import main
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.integrations.hf.experts import CodedStack
from onegraph.integrations.hf.modules import CodedLinear
from onegraph.integrations.hf.skeleton import Skeleton
from onegraph.integrations.hf.source import ModulesSource
from onegraph.models.families import FAMILIES as OWN
from onegraph.models.llama import Llama
from onegraph.models.load import parse_config

assert onegraph.integrations.hf is not None
WORDS = 128
TOKENS = torch.randint(0, WORDS, (1, 40), generator=torch.Generator().manual_seed(1))
TEXT = " ".join(f"w{i}" for i in torch.randint(0, WORDS, (600,), generator=torch.Generator().manual_seed(0)).tolist())
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1}  # fmt: skip
MLA = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
       "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
DSA = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 16}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
# family -> what differs from SIZES
FAMILIES: dict[str, dict[str, Any]] = {
    "Olmoe": MOE, "Qwen2Moe": MOE | {"shared_expert_intermediate_size": 32}, "GraniteMoe": MOE,
    "DeepseekV2": MOE | MLA, "DeepseekV3": MOE | MLA | {"q_lora_rank": 24}, "Gemma2": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 16}, "GPTNeoX": {}, "Olmo2": {}, "Phi3": {}, "Granite": {},
    "Cohere": {}, "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2}, "StableLm": {}, "GPT2": GPT2,
    "Bamba": MAMBA | {"attn_layer_indices": [1]}, "FalconH1": MAMBA | {"mamba_d_ssm": 128},
    "GraniteMoeHybrid": MOE | MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2},
    "NemotronH": {
        "hybrid_override_pattern": "M*", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 1, "head_dim": 16,
    },
    "Gemma4": {
        "head_dim": 16, "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 16,
    },
    "GlmMoeDsa": MOE | MLA | DSA | {"q_lora_rank": 24},
}  # fmt: skip
ROUTERS = {"Olmoe", "Qwen2Moe", "GraniteMoe", "DeepseekV2", "DeepseekV3", "GraniteMoeHybrid", "GlmMoeDsa"}


def source(family: str, path: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [f"{family}ForCausalLM", f"{family}LMHeadModel"]
    kind = next(found for name in names if (found := getattr(transformers, name, None)) is not None)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES | FAMILIES[family])).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * (1.2 / parameter.shape[-1] ** 0.5))
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return model


def made(path: Path, **options: Any) -> Quantization:
    options = {"bits": 4, "recipe": "quick", "tokens": 128, "sequence": 32} | options
    return quantize(path / "model", path / "out", calibration=TEXT, device="cpu", **options)


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits[0]


@pytest.mark.parametrize("family", ["GPT2", "Olmoe", "Bamba"])
def test_rates_are_chosen_by_gradients_through_their_modules(family: str, tmp_path: Path) -> None:
    source(family, tmp_path / "model")
    told = made(tmp_path, bits=2.6)
    assert len(set(told.config["layers"].values()) | {told.config["bits"]}) > 1
    costs = json.loads((tmp_path / "out" / "onegraph.json").read_text())["allocation"]["costs"]
    assert sum(cost > 0 for cost in costs.values()) > 0.8 * len(costs)


@pytest.mark.parametrize("family", ["StableLm", "GPT2", "Olmoe"])
def test_the_best_recipe_takes_them_too(family: str, tmp_path: Path) -> None:
    """Gradients through the model's own blocks and head: closer than the quick recipe's rounding."""
    hf, errors = source(family, tmp_path / "model"), {}
    for recipe in ("quick", "best"):
        quantize(
            tmp_path / "model", tmp_path / recipe, calibration=TEXT, device="cpu", bits=2, recipe=recipe, tokens=512,
            sequence=32,
        )  # fmt: skip
        errors[recipe] = float((logits(load(tmp_path / recipe)) - logits(hf)).square().mean())
    assert errors["best"] < errors["quick"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoint_is_the_model_with_its_weights_rounded(family: str, tmp_path: Path) -> None:
    hf = source(family, tmp_path / "model")
    told = made(tmp_path)
    quantized = load(tmp_path / "out")
    got = logits(quantized)
    rounded, left = set(), set()
    head = quantized.get_output_embeddings()
    with torch.no_grad():  # the oracle: the model itself, each weight replaced by what the codes stand for
        for name, module in quantized.named_modules():
            if isinstance(module, CodedLinear):
                twin = hf.get_submodule(name)
                weight = module.plain(torch.float32).weight
                twin.weight.copy_(weight.T if isinstance(twin, Conv1D) else weight)
                rounded.add(f"{name}.weight")
            elif isinstance(module, CodedStack):
                hf.get_parameter(name).copy_(module.plain(torch.float32))
                rounded.add(name)
            elif isinstance(module, nn.Linear | Conv1D) and module is not head:
                left.add(name)
    torch.testing.assert_close(got, logits(hf), atol=1e-4, rtol=0)
    # every matrix is rounded, or said to be left
    own = plan(tmp_path / "model", device="cpu").own
    ends = ("embed", "lm_head", "wte")
    for name, parameter in hf.named_parameters():
        if parameter.dim() > 1 and name not in rounded and not any(end in name for end in ends):
            if own and name.endswith(("gate.weight", "router.weight", "indexer.weights_proj.weight", "conv1d.weight")):
                continue  # routers and convolutions are no linears to our decoder
            assert name in told.left or name.removesuffix(".weight") in told.left, name
    assert {name for name in left if not (own and name.endswith("weights_proj"))} <= set(told.left)
    assert bool(told.experts) == (family in ROUTERS)
    config = Checkpoint.open(tmp_path / "out").config
    if config["model_type"] not in OWN:
        with pytest.raises(
            ValueError, match=r"not supported.*runs in transformers: `import onegraph\.integrations\.hf`"
        ):
            parse_config(config)
    quantized.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), got)
    torch.testing.assert_close(logits(load(tmp_path / "out").dequantize()), got, atol=1e-4, rtol=0)
    found = plan(tmp_path / "model", bits=4, recipe="quick", device="cpu")
    assert found.after.total_bytes == Checkpoint.open(tmp_path / "out").nbytes


@pytest.mark.parametrize("family", ["Gemma2", "Olmoe", "GPT2"])
def test_running_block_by_block_is_running_the_model(family: str, tmp_path: Path) -> None:
    hf = source(family, tmp_path / "model")
    model = ModulesSource(Checkpoint.open(tmp_path / "model"))
    hidden = model.embed(TOKENS)
    for i in range(model.num_blocks):
        hidden = model.run_block(model.load_block(i), hidden)
    with torch.no_grad():
        torch.testing.assert_close(model.head(hidden)[0], logits(hf), atol=1e-4, rtol=0)
        torch.testing.assert_close(hf.get_output_embeddings()(model.final_norm(hidden))[0].softmax(-1),
                                   model.head(hidden)[0].softmax(-1), atol=0.2, rtol=0)  # fmt: skip
    assert all(parameter.is_meta for parameter in model.skeleton.blocks.parameters())  # none is kept


def test_linears_that_share_an_input_are_one_group(tmp_path: Path) -> None:
    source("Qwen2Moe", tmp_path / "model")
    model = ModulesSource(Checkpoint.open(tmp_path / "model"))
    groups = [[name for name, _ in group] for group in model.linear_groups(model.load_block(0))]
    assert ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] in groups
    assert ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"] in groups
    assert not any("shared_expert_gate" in name for group in groups for name in group)


def test_what_our_decoder_quantizes_loads_with_its_gates_as_they_were(tmp_path: Path) -> None:
    """A shared expert's gate is a linear to transformers and none to our decoder: the rate map does not name it."""
    source("Qwen2Moe", tmp_path / "model")
    hf = hf_model("qwen2_moe", vocab_size=WORDS)
    hf.save_pretrained(tmp_path / "model")
    assert plan(tmp_path / "model", bits=4, device="cpu").own
    made(tmp_path)
    quantized = load(tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        ours = Decoder(Llama.load(checkpoint), rows=1, max_context=64).feed([TOKENS[0].tolist()])[0]
    torch.testing.assert_close(logits(quantized), ours, atol=1e-4, rtol=0)
    gate = "model.layers.0.mlp.shared_expert_gate"
    assert torch.equal(quantized.get_parameter(f"{gate}.weight"), hf.get_parameter(f"{gate}.weight"))
    assert isinstance(quantized.get_submodule("model.layers.0.mlp.shared_expert.up_proj"), CodedLinear)


def test_codes_that_no_layer_takes_are_an_error(tmp_path: Path) -> None:
    source("Olmo2", tmp_path / "model")
    made(tmp_path)
    from onegraph.formats.checkpoint import write_checkpoint

    with Checkpoint.open(tmp_path / "out") as checkpoint:
        extra = ("model.layers.0.mlp.side_proj.codes", torch.zeros(8, 8, dtype=torch.int16))
        every = [(name, checkpoint.tensor(name)) for name in checkpoint.names]
        write_checkpoint(tmp_path / "odd", checkpoint.config, [*every, extra])
    with pytest.raises(CheckpointError, match=r"side_proj\.codes.* is codes of a layer that this model does not have"):
        load(tmp_path / "odd")


def test_what_cannot_be_run_block_by_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source("StableLm", tmp_path / "model")
    from transformers.models.stablelm import modeling_stablelm

    forward = modeling_stablelm.StableLmModel.forward

    def with_text(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        return forward(self, input_ids=input_ids, text=input_ids, **kwargs)

    monkeypatch.setattr(modeling_stablelm.StableLmModel, "forward", with_text)
    with pytest.raises(ValueError, match="stablelm: blocks are given more of the text than the residual stream"):
        made(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source("StableLm", tmp_path / "model")
    from onegraph.formats.checkpoint import write_checkpoint

    with Checkpoint.open(tmp_path / "model") as checkpoint:
        names = [name for name in checkpoint.names if "layers.1.mlp.up_proj" not in name]
        write_checkpoint(tmp_path / "less", checkpoint.config, [(n, checkpoint.tensor(n)) for n in names])
    with pytest.raises(CheckpointError, match=r"1 missing: .*layers\.1\.mlp\.up_proj"):
        plan(tmp_path / "less", device="cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "abc"), ("num_hidden_layers", None), ("rope_scaling", [1]), ("num_attention_heads", 0),
     ("hidden_act", "nosuch"), ("vocab_size", -1)],
)  # fmt: skip
def test_a_damaged_config_is_told_in_a_line_that_names_the_field(field: str, value: Any, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES).to_dict() | {"architectures": ["LlamaForCausalLM"], field: value}
    del config["rope_parameters"]  # which would go before rope_scaling
    with pytest.raises(ValueError, match=field) as caught:
        outline(Checkpoint(tmp_path, config, {}))
    assert "transformers, which could run it instead, cannot build it: " in str(caught.value)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=field):
        plan(tmp_path, device="cpu")


def test_no_memory_for_the_modules_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(checkpoint: Checkpoint) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("onegraph.integrations.hf.skeleton.outline_of", refuse)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        outline(Checkpoint(tmp_path, {"model_type": "gpt_neox"}, {}))


def test_that_only_transformers_will_run_it_is_told_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = transformers.LlamaConfig(**SIZES).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    odd = own | {"hidden_act": "gelu"}
    for name, config in (("own", own), ("odd", odd)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert main(["quantize", str(tmp_path / "odd"), str(tmp_path / "out"), "--dry-run", "--device", "cpu"]) == 0
    told = r"; onegraph's own decoder does not run this \(.*gelu.*\): OUT will run in transformers only\n"
    assert re.search(told, capsys.readouterr().out)
    found = plan(tmp_path / "odd", device="cpu").as_dict()
    assert not found["own"]
    assert "gelu" in found["why"]
    found = plan(tmp_path / "own", device="cpu").as_dict()
    assert found["own"]
    assert found["why"] == ""
    assert "own decoder" not in str(plan(tmp_path / "own", device="cpu"))


def test_a_run_tells_that_only_transformers_will_run_it(tmp_path: Path) -> None:
    source("StableLm", tmp_path / "model")
    said: list[str] = []
    made(tmp_path, remark=said.append)
    assert any("OUT will run in transformers only" in line and "stablelm" in line for line in said)


@pytest.mark.parametrize(
    ("option", "words"),
    [({"lm_head": 4}, "lm_head: got 4, and this model runs in transformers only"),
     ({"embed_tokens": 3}, "embed_tokens: got 3, and this model runs in transformers only"),
     ({"calibration": "self"}, "calibration 'self' needs onegraph's own decoder, and .*; give a text")],
)  # fmt: skip
def test_what_needs_our_own_decoder_is_refused_before_anything_is_read(
    option: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**SIZES).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan(tmp_path, device="cpu", **option)
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(ValueError, match=words) as caught:
        plan(tmp_path, device="cpu", **option)
    assert "\n" not in str(caught.value)


def test_the_checkpoints_config_is_left_as_it_is() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = {"model_type": "stablelm", **SIZES, "rope_theta": 5000.0, "rope_scaling": scaling}
    before = json.dumps(config)
    Skeleton(config)
    assert json.dumps(config) == before


def test_modules_are_built_without_memory_for_their_weights() -> None:
    """Experts of 70 TB, which no CPU would allocate; what a forward around the blocks reads is computed."""
    sizes = {"hidden_size": 1 << 14, "num_experts": 1 << 12, "moe_intermediate_size": 1 << 17}
    skeleton = Skeleton({"model_type": "qwen2_moe", **SIZES, **sizes, "head_dim": 64})
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    rotation = dict(skeleton.model.named_buffers())["model.rotary_emb.inv_freq"]
    torch.testing.assert_close(rotation, 10000.0 ** -(torch.arange(0, 64, 2) / 64), msg=str(rotation))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_counted_once_from_the_config_alone(tied: bool, tmp_path: Path) -> None:
    config = transformers.StableLmConfig(**SIZES, tie_word_embeddings=tied)
    (tmp_path / "config.json").write_text(config.to_json_string())
    hf = transformers.StableLmForCausalLM(config)
    found = plan(tmp_path, device="cpu")
    assert not found.own
    assert found.before.parameters == sum(parameter.numel() for parameter in hf.parameters())
