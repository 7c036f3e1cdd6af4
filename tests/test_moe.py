"""Routed experts of the Llama kind of decoder: routing, the block's half that has them, what a config says of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import SIZES, Decoder, save_hf
from onegraph.api.plan import plan
from onegraph.api.size import component_bits
from onegraph.engine.ab import components_of, costs, in_nvfp4
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.nvfp4 import NVFP4, written_config
from onegraph.models.chain import chained
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama, LlamaSource
from onegraph.nn.block import MLP
from onegraph.nn.experts import Experts
from onegraph.nn.linear import Weight
from onegraph.nn.moe import MoE
from onegraph.ops.activation import SwiGLU
from onegraph.ops.nvfp4 import nvfp4_dequantize_weight
from onegraph.ops.route import softmax_route
from onegraph.quant.nvfp4 import quantize_weight, quantized_tensors

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 131, (rows, length), generator=rng(seed))


def load(path: Path, **options: Any) -> Llama:
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, **options)


@torch.inference_mode()
def logits_of(model: Llama, row: list[int]) -> Tensor:
    """Prefill of half of the row, then token by token."""
    decoder, half = Decoder(model, rows=1, max_context=len(row)), len(row) // 2
    return torch.cat([decoder.feed([part])[0] for part in (row[:half], *([token] for token in row[half:]))])


@torch.inference_mode()
def truth(hf: Any, row: list[int]) -> Tensor:
    return hf(torch.tensor([row]), use_cache=False).logits[0].float()


# ------------------------------------------------------------------------------------------------------------- routing


def kernel(*args: Any) -> tuple[Tensor, Tensor]:
    """Triton's, interpreted where there is no GPU."""
    pytest.importorskip("triton")
    if not GPU:
        import interpreter_fixes  # noqa: F401
    from onegraph.ops.triton.route import softmax_route

    experts, weights = softmax_route(*(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args))
    return experts.cpu(), weights.cpu()


@pytest.mark.parametrize("normalise", [True, False])
def test_weights_are_those_of_softmax_over_all_experts(normalise: bool) -> None:
    logits, bias = 3 * torch.randn(40, 24, generator=rng()), torch.randn(24, generator=rng(1))
    experts, weights = softmax_route(logits, bias, 5, normalise)
    whole = (logits.double() + bias).softmax(1)
    wanted, order = whole.sort(1, descending=True)
    assert torch.equal(experts.long(), order[:, :5])
    wanted = wanted[:, :5] / wanted[:, :5].sum(1, keepdim=True) if normalise else wanted[:, :5]
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-7)
    assert experts.dtype == torch.int32
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("route", [softmax_route, kernel])
def test_equal_logits_choose_each_expert_once(route: Any) -> None:
    """Seven tie for the last three of five places; whichever are chosen, none is chosen twice and all weigh alike."""
    logits = torch.zeros(3, 9)
    logits[:, 4], logits[:, 7] = 2.0, 3.0
    experts, weights = route(logits, None, 5, True)
    for row, weight in zip(experts.tolist(), weights, strict=True):
        assert row[:2] == [7, 4]
        assert len(set(row)) == 5
        assert all(0 <= e < 9 for e in row)
        assert torch.equal(weight[2:], weight[2].expand(3))
    torch.testing.assert_close(weights.sum(1), torch.ones(3))


def test_of_equal_logits_the_kernel_takes_the_first() -> None:
    experts, _ = kernel(torch.tensor([[1.0, 5.0, 1.0, 5.0, 1.0]]), None, 4, False)
    assert experts.tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("route", [softmax_route, kernel])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_names_experts_that_exist(route: Any, value: float) -> None:
    """The experts' kernels read whatever is named. NaN stays NaN: an engine reports it by the logits."""
    some, all_of_it = torch.randn(2, 11, generator=rng()), torch.full((1, 11), value)
    some[0, 3] = value
    experts, weights = route(torch.cat((some, all_of_it)), None, 4, False)
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 11 for row in experts.tolist())
    assert weights[1].isfinite().all()
    assert weights[2].isnan().all()
    assert bool(weights[0].isnan().all()) == (value != float("-inf"))


def test_a_shut_out_expert_is_never_chosen() -> None:
    logits, bias = torch.randn(200, 6, generator=rng()), torch.tensor([0.0, 0, -1e4, 0, 0, 0])
    assert 2 not in softmax_route(logits, bias, 5, True)[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(2, 3), None, 4, True), "top_k is 4"),
        ((torch.zeros(2, 3), None, 0, True), "top_k is 0"),
        ((torch.zeros(3), None, 1, True), r"\[T, E\]"),
        ((torch.zeros(2, 3).half(), None, 1, True), "float32"),
        ((torch.zeros(2, 3), torch.zeros(4), 1, True), "bias"),
    ],
)
def test_what_no_router_gives_is_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        softmax_route(*args)


# ----------------------------------------------------------------------------------------------------------- the block


def dense_experts(count: int, dim: int = 8, size: int = 6) -> Experts:
    gate_up, down = torch.randn(count, 2 * size, dim, generator=rng()), torch.randn(count, dim, size, generator=rng(1))
    return Experts(Weight(DENSE, {"weight": gate_up}), Weight(DENSE, {"weight": down}), SwiGLU())


@pytest.mark.parametrize(("rows", "top_k"), [(3, 2), (5, 2), (4, 5), (4, 0)])
def test_a_router_that_does_not_fit_its_experts_is_refused(rows: int, top_k: int) -> None:
    with pytest.raises(ValueError, match=rf"router is \({rows}, 8\) and chooses {top_k} of 4 experts"):
        MoE(
            norm=torch.ones(8), eps=1e-6, gate=torch.zeros(rows, 8), bias=None, experts=dense_experts(4), top_k=top_k,
            normalise=True,
        )  # fmt: skip


def test_dense_layers_and_layers_of_experts_are_one_model(tmp_path: Path) -> None:
    save_hf("qwen3_moe", tmp_path)
    model = load(tmp_path)
    assert [type(block.mlp) for block in model.blocks] == [MoE, MLP, MoE]
    assert model.blocks[0].mlp.experts.count == 9
    assert not model.blocks[0].fused
    assert chained(model) is model, "passes for small dense models leave it alone"


def test_ties_at_the_edge_are_chosen_as_transformers_chooses(tmp_path: Path) -> None:
    """Three of the experts have one router row, so that which two of them a token uses is decided by a tie."""
    save_hf("mixtral", tmp_path / "plain")
    source = Checkpoint.open(tmp_path / "plain")
    tensors = {name: source.tensor(name).clone() for name in source.names}
    for name, tensor in tensors.items():
        if name.endswith("block_sparse_moe.gate.weight"):
            tensor[:3], tensor[3:] = tensor[:1], 0.0
    write_checkpoint(tmp_path / "tied", source.config, tensors.items())
    import transformers

    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tied", attn_implementation="eager").eval()
    row = tokens(1, 24)[0].tolist()
    assert (logits_of(load(tmp_path / "tied"), row) - truth(hf, row)).abs().max() < 1e-4


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_a_router_is_never_rounded(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    hf = save_hf("mixtral", tmp_path)
    hf.to(stored).save_pretrained(tmp_path)
    block = load(tmp_path, dtype=dtype).blocks[0]
    assert block.mlp.gate.dtype == torch.float32
    assert torch.equal(block.mlp.gate, hf.model.layers[0].mlp.gate.weight.float())
    assert block.mlp.experts.gate_up.weight.dtype == dtype


# -------------------------------------------------------------------------------------------------------- config.json

MIXTRAL: dict[str, Any] = SIZES | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN: dict[str, Any] = SIZES | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL | {"num_local_experts": None}, "neither num_experts nor num_local_experts"),
        (QWEN | {"num_local_experts": 4}, "num_experts 8 and num_local_experts 4"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts is 0"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be an integer from 1 to 8"),
        (QWEN | {"mlp_only_layers": ["0"]}, "mlp_only_layers is"),
        (QWEN | {"mlp_only_layers": 0}, "mlp_only_layers is 0"),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN | {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (QWEN | {"moe_intermediate_size": "40"}, "moe_intermediate_size is '40'"),
        (QWEN | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64; this feature is not"),
        (QWEN | {"n_shared_experts": 1}, "n_shared_experts is 1; this feature is not"),
        (QWEN | {"n_routed_experts": 8}, "n_routed_experts is 8; this feature is not"),
        (QWEN | {"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
        (QWEN | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (
            QWEN | {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"] * 3},
            "layer_types",
        ),
        (QWEN | {"model_type": "qwen3"}, "num_experts is 8; this feature is not supported"),
        *(
            (QWEN | {"model_type": kind}, f"model_type '{kind}' is not supported; supported: .*mixtral, qwen3_moe")
            for kind in ("qwen3_next", "glm4_moe", "qwen2_moe", "gemma3_text", "olmoe")
        ),
    ],
)
def test_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict(config)


def test_which_layers_have_experts_follows_transformers() -> None:
    def layers(**changes: Any) -> tuple[bool, ...]:
        routed = LlamaConfig.from_dict(QWEN | changes | {"num_hidden_layers": 5}).routed
        assert routed is not None
        return routed.layers

    assert layers() == (True,) * 5
    assert layers(mlp_only_layers=[0, 3, 9]) == (False, True, True, False, True)
    assert layers(decoder_sparse_step=2) == (False, True, False, True, False)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[1]) == (False, False, False, True, False)


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    left_out = ("max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "head_dim", "intermediate_size")
    for family, name in (("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe")):
        given = {k: v for k, v in SIZES.items() if k not in left_out} | {"num_attention_heads": 64, "hidden_size": 4096}
        theirs = getattr(transformers, f"{name}Config")(**given)
        told = given | {"model_type": family, "intermediate_size": 17, "num_experts": theirs.num_local_experts}
        ours = LlamaConfig.from_dict(told)
        assert ours.routed is not None
        assert ours.routed.top_k == theirs.num_experts_per_tok
        assert ours.routed.normalise == getattr(theirs, "norm_topk_prob", True)
        assert ours.routed.size == (theirs.moe_intermediate_size if family == "qwen3_moe" else 17)
        assert all(ours.routed.layers)
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64)
        assert ours.max_positions == theirs.max_position_embeddings
        assert ours.eps == theirs.rms_norm_eps
        assert ours.tied == theirs.tie_word_embeddings
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.windows == (0, 0, 0)


def test_published_configs_are_read() -> None:
    """Qwen3-30B-A3B and Mixtral-8x7B, their keys as the hub has them."""
    qwen = LlamaConfig.from_dict(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
            "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
            "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
            "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
            "use_sliding_window": False, "vocab_size": 151936,
        }
    )  # fmt: skip
    assert qwen.routed is not None
    assert len(qwen.parts.linears) == 48 * (4 + 128 * 3) + 1
    assert qwen.parts.linears["model.layers.47.mlp.experts.127.down_proj"] == (2048, 768, False)
    mixtral = LlamaConfig.from_dict(
        {
            "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
            "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
            "vocab_size": 32000,
        }
    )  # fmt: skip
    assert mixtral.parts.linears["model.layers.31.block_sparse_moe.experts.7.w2"] == (4096, 14336, False)
    assert mixtral.parts.tensors["model.layers.0.block_sparse_moe.gate.weight"][0] == (8, 4096)
    assert not any(".mlp." in name for name in mixtral.parts.linears)


def test_tensors_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    save_hf("mixtral", tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"num_local_experts": 6}, r"block_sparse_moe.experts.5.w1.weight"),
        ({"num_local_experts": 4}, r"unexpected: 'model.layers.0.block_sparse_moe.experts.4"),
        ({"intermediate_size": 96}, r"experts.0.w1.weight' has shape \[104, 72\], the config asks for \[96, 72\]"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 104}, "missing: .*mlp.experts.0.gate_proj.weight"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(told | change))
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


# ------------------------------------------------------------------------------------------------------------- formats

WIDE = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}


def coded(variant: str, path: Path, **changes: Any) -> Any:
    """A checkpoint whose experts and attention are in NVFP4, one by one, under `path`, and the transformers model that
    holds what the codes stand for."""
    hf = save_hf(variant, path / "dense", **WIDE, **changes)
    source = Checkpoint.open(path / "dense")
    linears = [name for name in LlamaConfig.from_dict(source.config).parts.linears if name != "lm_head"]
    told = source.config | {"quantization_config": written_config(["lm_head"])}
    write_checkpoint(path / "coded", told, quantized_tensors(source.names, source.tensor, linears))
    stand_in = dict(quantized_tensors(source.names, source.tensor, []))
    for name in linears:
        codes, scale, gain = quantize_weight(source.tensor(f"{name}.weight")).values()
        stand_in[f"{name}.weight"] = nvfp4_dequantize_weight(codes, scale, gain.expand(codes.shape[0]).contiguous())
    write_checkpoint(path / "stand_in", source.config, stand_in.items())
    return type(hf).from_pretrained(path / "stand_in", attn_implementation="eager").eval()


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_experts_in_nvfp4_are_what_their_codes_stand_for(variant: str, tmp_path: Path) -> None:
    hf = coded(variant, tmp_path, **({"moe_intermediate_size": 32} if variant == "qwen3_moe" else {}))
    model = load(tmp_path / "coded", decode=False)
    assert model.blocks[0].mlp.experts.gate_up.format is NVFP4
    row = tokens(1, 30)[0].tolist()
    torch.testing.assert_close(logits_of(model, row), truth(hf, row), rtol=1e-3, atol=1e-3)


def test_experts_of_two_formats_in_a_layer_are_refused(tmp_path: Path) -> None:
    coded("mixtral", tmp_path)
    source = Checkpoint.open(tmp_path / "dense")
    one = "model.layers.1.block_sparse_moe.experts.3.w1"
    told = source.config | {"quantization_config": written_config(["lm_head"])}
    write_checkpoint(tmp_path / "mixed", told, quantized_tensors(source.names, source.tensor, [one]))
    with pytest.raises(CheckpointError, match=rf"{one} is nvfp4 and other experts of its layer are dense"):
        load(tmp_path / "mixed")


def test_components_one_by_one(tmp_path: Path) -> None:
    """Router and experts are components of their own; what a dense layer has, it keeps."""
    save_hf("qwen3_moe", tmp_path, hidden_size=96, moe_intermediate_size=32, intermediate_size=64)
    model = load(tmp_path, fused=False)
    changes = in_nvfp4(model)
    assert list(changes) == list(components_of(model))
    assert set(changes["router"]()) == {"blocks.0.mlp.gate", "blocks.2.mlp.gate"}
    assert set(changes["experts"]()) == {"blocks.0.mlp.experts", "blocks.2.mlp.experts"}
    assert set(changes["mlp down"]()) == {"blocks.1.mlp.down.linear"}
    assert all(cost.kl > 0 for cost in costs(model, changes, tokens(1, 96).flatten(), window=48))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(component_bits(checkpoint)) == set(components_of(model))


def test_no_component_is_empty_where_all_layers_have_experts(tmp_path: Path) -> None:
    save_hf("mixtral", tmp_path)
    model = load(tmp_path, fused=False)
    changes = in_nvfp4(model)
    assert list(changes) == list(components_of(model))
    assert "mlp down" not in changes
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(component_bits(checkpoint)) == set(changes)


@pytest.mark.parametrize("format", ["e8p", "nvfp4"])
def test_quantizing_experts_is_refused_by_name(format: str, tmp_path: Path) -> None:
    save_hf("mixtral", tmp_path)
    with pytest.raises(ValueError, match="mixtral has routed experts, which are not quantized"):
        plan(tmp_path, format=format)
    with pytest.raises(ValueError, match="mixtral has routed experts, which are not quantized"):
        LlamaSource(Checkpoint.open(tmp_path))
