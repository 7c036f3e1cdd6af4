"""Routed experts of the Llama kind of decoder: routing, the block's half that has them, what a config says of them."""

import importlib
import json
from collections.abc import Callable
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
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.models.chain import chained
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.rope import Rope
from onegraph.nn import attention
from onegraph.nn.attention import CausalAttention
from onegraph.nn.block import MLP
from onegraph.nn.experts import Experts
from onegraph.nn.linear import Weight
from onegraph.nn.moe import MoE
from onegraph.ops.activation import SwiGLU
from onegraph.ops.attention import paged_attention
from onegraph.ops.decode_attention import paged_decode
from onegraph.ops.normed_route import normed_route
from onegraph.ops.route import softmax_route

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


def edited(variant: str, path: Path, change: Callable[[str, Tensor], Tensor]) -> tuple[Llama, Any]:
    """A tiny model with other tensors, ours and transformers'."""
    import transformers

    save_hf(variant, path / "plain")
    source = Checkpoint.open(path / "plain")
    tensors = ((name, change(name, source.tensor(name).clone()).contiguous()) for name in source.names)
    write_checkpoint(path / "edited", source.config, tensors)
    hf = transformers.AutoModelForCausalLM.from_pretrained(path / "edited", attn_implementation="eager")
    return load(path / "edited"), hf.eval()


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
    experts, weights = softmax_route(logits, bias, 5, normalise, False, False)
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
    experts, weights = route(logits, None, 5, True, False, False)
    for row, weight in zip(experts.tolist(), weights, strict=True):
        assert row[:2] == [7, 4]
        assert len(set(row)) == 5
        assert all(0 <= e < 9 for e in row)
        assert torch.equal(weight[2:], weight[2].expand(3))
    torch.testing.assert_close(weights.sum(1), torch.ones(3))


def test_of_equal_logits_the_kernel_takes_the_first() -> None:
    experts, _ = kernel(torch.tensor([[1.0, 5.0, 1.0, 5.0, 1.0]]), None, 4, False, False, False)
    assert experts.tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("route", [softmax_route, kernel])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_names_experts_that_exist(route: Any, value: float) -> None:
    """The experts' kernels read whatever is named. NaN stays NaN: an engine reports it by the logits."""
    some, all_of_it = torch.randn(2, 11, generator=rng()), torch.full((1, 11), value)
    some[0, 3] = value
    experts, weights = route(torch.cat((some, all_of_it)), None, 4, False, False, False)
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 11 for row in experts.tolist())
    assert weights[1].isfinite().all()
    assert weights[2].isnan().all()
    assert bool(weights[0].isnan().all()) == (value != float("-inf"))


def test_a_shut_out_expert_is_never_chosen() -> None:
    logits, bias = torch.randn(200, 6, generator=rng()), torch.tensor([0.0, 0, -1e4, 0, 0, 0])
    assert 2 not in softmax_route(logits, bias, 5, True, False, False)[0]


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
        softmax_route(*args, False, False)


@pytest.mark.parametrize("route", [softmax_route, kernel])
def test_a_shared_expert_is_chosen_last(route: Any) -> None:
    """Whatever its gate's logit is, which is no expert's; without a gate its weight is 1."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 9.0], [3.0, 0.0, 1.0, -2.0]])
    experts, weights = route(logits, None, 2, True, True, True)
    assert experts.tolist() == [[1, 2, 3], [0, 2, 3]]
    torch.testing.assert_close(weights[:, 2], torch.tensor([9.0, -2.0]).sigmoid())
    torch.testing.assert_close(weights[:, :2].sum(1), torch.ones(2))
    experts, weights = route(logits, None, 2, True, True, False)
    assert experts.tolist() == [[3, 1, 4], [0, 2, 4]]
    assert weights[:, 2].tolist() == [1.0, 1.0]


def test_a_gate_of_no_shared_expert_is_refused() -> None:
    with pytest.raises(ValueError, match="gated is True and shared is False"):
        softmax_route(torch.zeros(2, 4), None, 2, True, False, True)
    with pytest.raises(ValueError, match=r"top_k is 4; logits \(2, 4\) must be .* and a column more"):
        softmax_route(torch.zeros(2, 4), None, 4, True, True, True)


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

    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("block_sparse_moe.gate.weight"):
            tensor[:3], tensor[3:] = tensor[:1].clone(), 0.0
        return tensor

    model, hf = edited("mixtral", tmp_path, change)
    row = tokens(1, 24)[0].tolist()
    assert (logits_of(model, row) - truth(hf, row)).abs().max() < 1e-4


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_a_router_is_never_rounded(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    hf = save_hf("mixtral", tmp_path)
    hf.to(stored).save_pretrained(tmp_path)
    block = load(tmp_path, dtype=dtype).blocks[0]
    assert block.mlp.gate.dtype == torch.float32
    assert torch.equal(block.mlp.gate, hf.model.layers[0].mlp.gate.weight.float())
    assert block.mlp.experts.gate_up.weight.dtype == dtype


# ------------------------------------------------------------------------------------------------------------- gpt-oss


def test_sinks_matter_and_are_those_of_transformers(tmp_path: Path) -> None:
    """Of heads that give them nearly all, nearly nothing, and some."""
    heads = torch.tensor([12.0, -40.0, 0.5, 3.0, -2.0, 6.0])
    model, hf = edited("gpt_oss", tmp_path, lambda name, t: heads if name.endswith("sinks") else t)
    row = tokens(1, 40)[0].tolist()
    want = truth(hf, row)
    assert (logits_of(model, row) - want).abs().max() < 1e-4
    for block in model.blocks:
        block.attention.sinks.fill_(-60.0)
    assert (logits_of(model, row) - want).abs().max() > 0.1


@pytest.mark.parametrize("at_once", [1, 7, 40, 512])
def test_whole_sequences_with_sinks_are_taken_in_parts(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = save_hf("gpt_oss", tmp_path)
    monkeypatch.setattr(attention, "AT_ONCE", at_once)
    model, batch = load(tmp_path), tokens(2, 40)
    with torch.inference_mode():
        got = model.logits(model(batch, CausalAttention()))
    assert (got[1] - truth(hf, batch[1].tolist())).abs().max() < 1e-4


def test_an_expert_that_the_bias_shuts_out_is_not_read(tmp_path: Path) -> None:
    """Whatever it holds; the others tie."""

    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("router.weight"):
            return torch.zeros_like(tensor)
        if name.endswith("router.bias"):
            return torch.tensor([0.0, 0.0, -1e4, 0.0, 0.0, 0.0])
        if "experts.gate_up_proj" in name:
            tensor[2] = 1e30
        return tensor

    model, hf = edited("gpt_oss", tmp_path, change)
    row = tokens(1, 30)[0].tolist()
    assert (logits_of(model, row) - truth(hf, row)).abs().max() < 1e-4


def test_a_cache_in_codes_is_refused(tmp_path: Path) -> None:
    save_hf("gpt_oss", tmp_path, head_dim=64)
    model = load(tmp_path)
    with pytest.raises(ValueError, match="gpt_oss has attention sinks, which a cache in codes does not know"):
        model.new_cache(rows=1, pages=4, page_size=16, pages_per_row=3, kv=TurboQuantConfig(k_bits=4, v_bits=4))


def extreme(sink: float) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """(with that sink, without sinks) of an op's case."""

    def run(op: Any) -> tuple[Tensor, Tensor]:
        case = next(case for case in op.cases if case.name == "gpt_oss")
        with_sinks, without = (list(case.make(DEVICE, torch.float32, rng())) for _ in range(2))
        at = list(op.call.__dataclass_fields__).index("sinks")
        with_sinks[at], without[at] = torch.full_like(with_sinks[at], sink), None
        module, _, name = op.kernel.replace(".ops.cuda.", ".ops.triton.").partition(":")
        run = op.unpacked(getattr(importlib.import_module(module), name))
        return run(*with_sinks), run(*without)

    return run


@pytest.mark.parametrize("op", [paged_attention, paged_decode], ids=lambda op: op.name)
def test_kernels_stand_sinks_of_any_size(op: Any) -> None:
    """As far above all scores as float32's exponential reaches and beyond, and as far below."""
    pytest.importorskip("triton")
    if not GPU:
        import interpreter_fixes  # noqa: F401
    got, _ = extreme(500.0)(op)
    assert got.eq(0).all()
    for sink in (-500.0, float("-inf")):
        got, want = extreme(sink)(op)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert want.abs().max() > 0.1


# -------------------------------------------------------------------------------------------------------- config.json

MIXTRAL: dict[str, Any] = SIZES | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GPT_OSS: dict[str, Any] = SIZES | {"model_type": "gpt_oss", "num_local_experts": 8}
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
        (GPT_OSS | {"sliding_window": None}, "sliding_window is missing"),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit is 0; it must be a number"),
        (GPT_OSS | {"swiglu_limit": None}, "swiglu_limit is None; it must be a number"),
        (QWEN | {"model_type": "qwen3"}, "num_experts is 8; this feature is not supported"),
        *(
            (
                QWEN | {"model_type": kind},
                f"model_type '{kind}' is not supported; .*models.md lists the",
            )
            for kind in ("gemma", "granitemoe", "starcoder2", "olmo")
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
    for family, name in (("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe"), ("gpt_oss", "GptOss")):
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
        assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]
        assert ours.windows == ((128, 0, 128) if family == "gpt_oss" else (0, 0, 0))
        if family != "gpt_oss":
            continue
        assert ours.qkv_bias
        assert ours.out_bias
        told = {"rope_parameters": theirs.rope_parameters}
        assert ours.ropes[0] == Rope.from_dict(told, default_theta=0.0, max_positions=theirs.max_position_embeddings)


def test_tensors_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    save_hf("mixtral", tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"num_local_experts": 6}, r"block_sparse_moe.experts.5.w1.weight"),
        ({"num_local_experts": 4}, r"unexpected: 'model.layers.0.block_sparse_moe.experts.4"),
        ({"intermediate_size": 96}, r"experts.0.w1.weight' has shape \[104, 72\], the config needs \[96, 72\]"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 104}, "missing: .*mlp.experts.0.gate_proj.weight"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(told | change))
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


# ----------------------------------------------------------------------------------------------------- other commands


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


def test_biases_of_experts_are_not_rounded_with_them(tmp_path: Path) -> None:
    save_hf("gpt_oss", tmp_path, hidden_size=96, intermediate_size=64)
    model = load(tmp_path, fused=False)
    before, after = model.blocks[0].mlp.experts, in_nvfp4(model)["experts"]()["blocks.0.mlp.experts"]
    assert torch.equal(after.gate_up_bias, before.gate_up_bias)
    assert torch.equal(after.down_bias, before.down_bias)
    assert not torch.equal(after.down.weight, before.down.weight)


def test_experts_in_one_tensor_are_refused_for_nvfp4_by_name(tmp_path: Path) -> None:
    save_hf("gpt_oss", tmp_path)
    with pytest.raises(ValueError, match="hold all experts in one tensor, which nvfp4 has no form for"):
        plan(tmp_path, format="nvfp4")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.zeros(1, 2, 8)}, "x is .1, 2, 8.; it must be .T, D.: flatten it"),
        ({"post": torch.ones(8)}, "post is given without residual"),
        ({"residual": torch.zeros(2, 4)}, "residual is .2, 4. torch.float32; it must be float32 .2, 8."),
        ({"gate": torch.zeros(6, 8, dtype=torch.bfloat16)}, "gate is .6, 8. torch.bfloat16; it must be float32"),
        ({"gated": True}, "gated is True and shared is False"),
        ({"top_k": 7}, "top_k is 7 and the router has 6 experts; it must be 1 to as many"),
        ({"scales": torch.ones(5)}, "scales is .5,. torch.float32; it must be float32 .6."),
        ({"groups": 2}, "scores by sigmoid .groups is 2. take a bias and no scales; give zeros"),
        ({"groups": 4, "bias": torch.zeros(6)}, "1 of 4 groups of 6 experts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_route_that_does_not_fit_is_refused(change: dict[str, Any], told: str) -> None:
    given = {
        "x": torch.zeros(2, 8), "norm": torch.ones(8), "eps": 1e-6, "gate": torch.zeros(6, 8), "bias": None,
        "scales": None, "top_k": 2, "normalise": True, "groups": 0, "top_groups": 1, "factor": 1.0, "shared": False,
        "gated": False, "residual": None, "post": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match="normed_route: " + told):
        normed_route(*(given | change).values())
