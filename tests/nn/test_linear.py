"""E8P layers: stored form, dense form and slices are one linear; a quantized checkpoint loads to its weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import Decoder, e8p_tensors, save_e8p
from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.formats.e8p import E8P
from onegraph.models.llama import Llama
from onegraph.models.source import LlamaSource
from onegraph.nn.linear import ConcatLinear, Linear, dense, join
from onegraph.ops.activation import swiglu
from onegraph.ops.norm import rms_norm


def layer(n: int, k: int, bits: int, *, seed: int = 0, bias: bool = False) -> tuple[Linear, Tensor]:
    tensors, weight = e8p_tensors(n, k, bits, seed)
    b = torch.randn(n, generator=torch.Generator().manual_seed(seed)) if bias else None
    return Linear(E8P[bits], E8P[bits].fold(tensors), b), weight


def inputs(k: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(9))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(576, 576), (192, 1536), (256, 384), (49, 200), (1, 8), (1088, 24)])
def test_stored_and_dense_forms_are_the_weight_of_the_formula(n: int, k: int, bits: int) -> None:
    coded, weight = layer(n, k, bits, bias=True)
    dense = coded.dense()
    assert error(dense.weight, weight) < 1e-6
    x = inputs(k)
    want = x @ weight.T + coded.bias
    assert error(coded(x), want) < 3e-6
    assert error(dense(x), want) < 3e-6
    assert error(coded(x.bfloat16(), float32=True), x.bfloat16().float() @ weight.T + coded.bias) < 3e-6


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_stands_around_the_linear_is_fused(bits: int) -> None:
    """RMSNorm or SwiGLU in front and the residual behind are the composition of the ops."""
    coded, _ = layer(192, 576, bits, bias=True)
    x, residual = inputs(576), inputs(192)
    gain = 1 + inputs(576, 1)[0] / 4
    normed = rms_norm(x, gain, 1e-5)
    assert error(coded.after_norm(gain)(x, eps=1e-5, add=residual), residual + coded(normed)) < 3e-6
    assert (
        error(coded.after_norm(gain)(x.half(), eps=1e-5, float32=True), coded(rms_norm(x.half().float(), gain, 1e-5)))
        < 3e-6
    )
    gate_up = torch.cat([x, inputs(576) + 1], dim=-1)
    assert error(coded(gate_up, silu=True), coded(swiglu(gate_up))) < 3e-6
    assert coded(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_slices_at_multiples_of_128_are_layers(bits: int) -> None:
    """Tensor parallelism: row parts give their outputs, column parts add up, and a part of a part is one too."""
    whole, weight = layer(512, 768, bits, bias=True)
    x = inputs(768)
    want = whole(x)
    cuts = [(0, 128), (128, 384), (384, 512)]
    assert error(torch.cat([whole.part(rows=cut)(x) for cut in cuts], dim=-1), want) < 1e-6
    for cut in cuts:
        assert error(whole.part(rows=cut).dense().weight, weight[slice(*cut)]) < 1e-6
        assert error(whole.part(columns=cut).dense().weight, weight[:, slice(*cut)]) < 1e-6
    parts = [(0, 256), (256, 768)]
    total = sum(
        whole.part(columns=cut, keep_bias=i == 0)(x[:, slice(*cut)].contiguous()) for i, cut in enumerate(parts)
    )
    assert error(total, want) < 1e-6
    corner = whole.part(rows=(128, 512)).part(rows=(0, 128), columns=(128, 256))
    assert error(corner.dense().weight, weight[128:256, 128:256]) < 1e-6


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ((0, 64), "in blocks of 128, the part would be in blocks of 64"),
        ((64, 256), "cut a rotation block"),
        ((128, 128), "is no part of 512"),
        ((384, 640), "is no part of 512"),
        ((-128, 128), "is no part of 512"),
    ],
)
def test_other_slices_are_refused(cut: tuple[int, int], message: str) -> None:
    whole, _ = layer(512, 512, 2)
    with pytest.raises(ValueError, match=message):
        whole.part(rows=cut)
    with pytest.raises(ValueError, match=message):
        whole.part(columns=cut)


def test_slices_that_change_the_rotation_block_are_refused() -> None:
    """576 = 9 * 64 is rotated in blocks of 64; its first 128 rows alone would be in one block of 128."""
    whole, _ = layer(576, 576, 2)
    with pytest.raises(ValueError, match="rotated in blocks of 64, the part would be in blocks of 128"):
        whole.part(rows=(0, 128))
    assert error(whole.part(rows=(192, 384)).dense().weight, whole.dense().weight[192:384]) < 1e-6


def with_scale(part: Linear, in_scale: Tensor) -> Linear:
    return Linear(part.format, part.tensors | {"in_scale": in_scale}, part.bias)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_siblings_fuse_where_that_is_exact(bits: int) -> None:
    q, k, v = (layer(n, 192, bits, seed=n, bias=n != 64)[0] for n in (192, 64, 128))
    x = inputs(192)
    apart = join([q, k, v])
    assert isinstance(apart, ConcatLinear), "in_scale differs"
    assert error(apart(x), torch.cat([part(x) for part in (q, k, v)], dim=-1)) == 0
    k, v = with_scale(k, q.in_scale), with_scale(v, q.in_scale)
    assert isinstance(join([q, k, v]), ConcatLinear), "output blocks differ: 64, 64 and 128"
    v = layer(320, 192, bits, seed=3)[0]
    one = join([q, k, with_scale(v, q.in_scale)])
    assert isinstance(one, Linear)
    assert error(one(x), torch.cat([part(x) for part in (q, k, with_scale(v, q.in_scale))], dim=-1)) < 1e-6
    nearly = q.in_scale.clone()
    nearly[0] *= 1 + 2**-20
    assert isinstance(join([q, with_scale(k, nearly)]), ConcatLinear), "one bit of in_scale differs"


def test_siblings_of_other_rates_or_kinds_stay_apart() -> None:
    q, k = layer(64, 64, 4)[0], layer(64, 64, 2, seed=1)[0]
    k = with_scale(k, q.in_scale)
    assert isinstance(join([q, k]), ConcatLinear)
    mixed = join([q, dense(torch.randn(8, 64))])
    assert isinstance(mixed, ConcatLinear)
    assert mixed.out_features == 72
    assert join([q]) is q
    both = join([dense(torch.ones(2, 4), torch.ones(2)), dense(torch.ones(3, 4))])
    assert isinstance(both, Linear)
    assert both.bias is not None
    assert both.bias.tolist() == [1, 1, 0, 0, 0]


def test_layers_with_tensors_that_disagree_are_refused() -> None:
    good, _ = layer(64, 64, 3)
    for change, message in (
        ({"residual": good.residual.short()}, r"residual is int16 .* needs uint8"),
        ({"codes": good.codes.int()}, "codes is int32 .* needs int16"),
        ({"codes": good.codes[0]}, r"codes is \(8,\); it must be"),
        ({"residual": good.residual[:, :4]}, r"residual is uint8 \(64, 4\)"),
        ({"in_scale": good.in_scale[:63]}, r"in_scale is float32 \(63,\)"),
        ({"out_scale": torch.ones(65)}, r"out_scale is float32 \(65,\)"),
        ({"scale": torch.ones(())}, "scale is given; a layer has codes, residual"),
    ):
        with pytest.raises(ValueError, match=message):
            Linear(good.format, good.tensors | change)
    with pytest.raises(ValueError, match="residual is missing"):
        Linear(good.format, {key: tensor for key, tensor in good.tensors.items() if key != "residual"})
    with pytest.raises(ValueError, match=r"bias is \(1,\)"):
        Linear(good.format, good.tensors, torch.ones(1))


RATES = [
    ("smollm2", {"bits": 4}),
    ("qwen2", {"bits": 3, "lm_head": 4}),
    ("qwen3", {"bits": 2, "embed_tokens": 4, "lm_head": 3}),
    ("llama_bias_mha", {"bits": 4, "embed_tokens": 2}),
    (
        "smollm3",
        {"bits": 3, "layers": {"model.layers.0.mlp.down_proj": 16, "model.layers.1.self_attn.k_proj": 4}},
    ),
]


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("variant", "rates"), RATES, ids=[variant for variant, _ in RATES])
def test_quantized_checkpoint_gives_the_logits_of_its_weights(
    variant: str, rates: dict, share: bool, decode: bool, tmp_path: Path
) -> None:
    """transformers with the weights that the codes stand for is the oracle; prefill and steps through the cache."""
    hf = save_e8p(variant, tmp_path / "m", share=share, rates=rates)
    model = Llama.load(Checkpoint.open(tmp_path / "m"), decode=decode)
    row = torch.randint(0, 131, (25,), generator=torch.Generator().manual_seed(2)).tolist()
    decoder = Decoder(model, rows=1, max_context=25)
    got = [decoder.feed([row[:20]])[0]] + [decoder.feed([[token]])[0] for token in row[20:]]
    with torch.inference_mode():
        want = hf(torch.tensor([row]), use_cache=False).logits[0]
    assert (torch.cat(got) - want).abs().max() < 1e-4 * want.abs().max()
    assert any(isinstance(module, Linear) and module.format.coded for module in model.modules()) != decode


def test_siblings_of_a_quantized_model_are_one_launch(tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "m", rates={"bits": 4}, intermediate_size=128)
    block = Llama.load(Checkpoint.open(tmp_path / "m"), decode=False).blocks[0]
    assert block.qkv.linear.format is E8P[4]
    assert block.mlp.gate_up.linear.format is E8P[4]
    assert block.mlp.gate_up.linear.out_features == 256


def test_quantized_embedding_gives_the_model_dtype(tmp_path: Path) -> None:
    save_e8p("qwen3", tmp_path / "m", rates={"bits": 2, "embed_tokens": 4})
    model = Llama.load(Checkpoint.open(tmp_path / "m"), dtype=torch.bfloat16)
    assert model.embed.format is E8P[4]
    assert model.embed(torch.tensor([[3, 5]])).dtype == torch.bfloat16


def test_what_is_wrong_with_a_quantized_checkpoint_is_named(tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "m", rates={"bits": 4})
    checkpoint = Checkpoint.open(tmp_path / "m")
    with pytest.raises(ValueError, match="is quantized already"):
        LlamaSource(checkpoint)
    quantization = checkpoint.config["quantization_config"]
    for change, kind, message in (
        ({"bits": 3}, CheckpointError, r"residual' is int16, allowed is uint8"),
        ({"bits": 2}, CheckpointError, r"unexpected: .*residual"),
        (
            {"layers": {"model.layers.0.mlp.up_proj": 16}},
            CheckpointError,
            r"missing: 'model.layers.0.mlp.up_proj.weight'",
        ),
        ({"layers": {"model.layers.9.mlp.up_proj": 3}}, ValueError, "model.layers.9.mlp.up_proj'.* is no linear"),
        ({"lm_head": 4}, CheckpointError, "missing: 'lm_head.codes'"),
        ({"group_size": 64}, ValueError, "unknown key group_size"),
        ({"quant_method": "hqq"}, ValueError, "quant_method 'hqq', which is not supported"),
        ({"format_version": 2}, ValueError, "format_version is 2"),
    ):
        checkpoint.config["quantization_config"] = quantization | change
        with pytest.raises(kind, match=message):
            Llama.load(checkpoint)
