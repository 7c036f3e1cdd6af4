"""The whole path of a model through the quantizer: dense blocks out, a checkpoint written, the decoder back in."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from models import Decoder, save_e8p, save_hf
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.e8p import E8P
from onegraph.models.llama import Llama
from onegraph.models.source import LlamaSource
from onegraph.quant.quantize import quantize
from onegraph.quant.recipe import Recipe

SIZES = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}


def quantized(variant: str, path: Path, **recipe: Any) -> tuple[Checkpoint, Checkpoint, Any]:
    """The checkpoint that transformers saved, the one that the quantizer made of it, and transformers' model."""
    hf = save_hf(variant, path / "dense", **SIZES)
    source = Checkpoint.open(path / "dense")
    tokens = torch.randint(0, 131, (8, 64), generator=torch.Generator().manual_seed(0))
    made = quantize(
        LlamaSource(source),
        tokens,
        Recipe(**recipe),
        outer=lambda name: source.tensor(name if name in source else "model.embed_tokens.weight"),
    )
    config = source.config | {"quantization_config": made.config.to_dict()}
    write_checkpoint(path / "coded", config, made.tensors(source.names, source.tensor), copy_from=source)
    return source, Checkpoint.open(path / "coded"), hf


CASES = [
    ("smollm2", {"bits": 4}),
    ("qwen2", {"bits": 3}),
    ("qwen3", {"bits": 2, "lm_head": 4, "embed_tokens": 4}),
    ("llama_bias_mha", {"bits": 4, "layers": {"*.down_proj": 2, "*.1.mlp.up_proj": 16}}),
    ("gemma3", {"bits": 4, "lm_head": 4, "embed_tokens": 4}),
    ("olmo2", {"bits": 3}),
    ("phi3", {"bits": 4}),
    ("granite", {"bits": 3}),
]


@pytest.fixture(scope="module", params=CASES, ids=[case[0] for case in CASES])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Checkpoint, Any]:
    """A case: its model and recipe, the checkpoint that the quantizer made, and transformers' model."""
    variant, recipe = request.param
    return variant, recipe, *quantized(variant, tmp_path_factory.mktemp(variant), **recipe)[1:]


BEHIND = ("gemma3", "olmo2", "granite")  # a norm or a factor stands between a sublayer and the sum
MSE = {2: 0.0916, 3: 0.0297, 4: 0.0084, 16: 0.0}  # of E8P on Gaussian weights, relative


def divergence(want: torch.Tensor, got: torch.Tensor) -> float:
    """Mean KL(want ‖ got) in nats, of logits [T, V]."""
    p, q = want.log_softmax(-1), got.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_quantized_model_beats_noise_of_its_rate(made: tuple[str, dict, Checkpoint, Any]) -> None:
    """The yardstick is transformers' model with white noise on its weights, as large as E8P's error on Gaussian data:
    rounding without a look at the inputs. Calibrated rounding must diverge less, on tokens that it never saw."""
    _, _, coded, hf = made
    hf, model = copy.deepcopy(hf), Llama.load(coded)
    rates = model.config.quantization
    assert rates is not None
    row = torch.randint(0, 131, (160,), generator=torch.Generator().manual_seed(1)).tolist()
    got = Decoder(model, rows=1, max_context=160).feed([row])[0]
    with torch.inference_mode():
        want = hf(torch.tensor([row])).logits[0]
        for seed, (name, module) in enumerate(list(hf.named_modules())):
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and rates.bits_of(name) != 16:
                g = torch.Generator().manual_seed(seed)
                noise = torch.randn(module.weight.shape, generator=g) * module.weight.square().mean().sqrt()
                module.weight.add_(noise * MSE[rates.bits_of(name)] ** 0.5)
        noisy = hf(torch.tensor([row])).logits[0]
    assert 0 < divergence(want, got) < 0.85 * divergence(want, noisy)


def test_codes_and_decoded_weights_give_the_same_logits(made: tuple[str, dict, Checkpoint, Any]) -> None:
    _, _, coded, _ = made
    row = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = [
        Decoder(Llama.load(coded, decode=decode), rows=1, max_context=40).feed([row])[0] for decode in (True, False)
    ]
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_what_the_quantizer_writes_fuses(tmp_path: Path) -> None:
    _, coded, hf = quantized("qwen2", tmp_path, bits=4)
    block = Llama.load(coded, decode=False).blocks[0]
    assert block.qkv.linear.format is block.mlp.gate_up.linear.format is E8P[4]
    attention = hf.model.layers[0].self_attn
    bias = torch.cat([getattr(attention, f"{name}_proj").bias for name in "qkv"])
    assert torch.allclose(block.qkv.linear.bias, bias)


def test_embedding_and_head_come_back_quantized_and_untied(tmp_path: Path) -> None:
    _, coded, _ = quantized("qwen3", tmp_path, bits=4, lm_head=4, embed_tokens=3)
    model = Llama.load(coded, decode=False)
    assert model.embed.format is E8P[3]
    assert model.lm_head.format is E8P[4]
    assert Llama.load(coded).lm_head.format is DENSE


def test_kept_layers_keep_their_bits(tmp_path: Path) -> None:
    source, coded, _ = quantized("smollm2", tmp_path, bits=2, layers={"*.o_proj": 16})
    for name in source.names:
        if "o_proj" in name or "norm" in name or "embed" in name:
            assert torch.equal(source.tensor(name), coded.tensor(name)), name


def test_fused_layers_are_the_composition_of_their_parts(made: tuple[str, dict, Checkpoint, Any]) -> None:
    """The same greedy text and, in bfloat16, logits as far from the float32 truth as the composition's own."""
    variant, recipe, coded, _ = made
    prompts = [[5, 17, 99, 4, 3], list(range(40))]
    texts, logits = [], {}
    for dtype in (torch.float32, torch.bfloat16):
        for fused in (True, False):
            model = Llama.load(coded, "cpu", dtype, decode=False, fused=fused)
            joins = fused and variant not in BEHIND
            assert [block.fused for block in model.blocks] == [joins, joins and "layers" not in recipe]
            assert all(block.out.fused == joins for block in model.blocks)
            if dtype == torch.float32:
                engine = Engine(model, max_batch=2, max_context=80, page_size=16, chunk=16)
                texts.append(engine.generate(prompts, SamplingParams(max_tokens=24)))
            logits[dtype, fused] = Decoder(model, rows=1, max_context=80).feed([prompts[1]])[0].float()
    assert texts[0] == texts[1]
    truth = logits[torch.float32, False]
    assert relative_error(logits[torch.float32, True], truth) < 1e-5
    own = relative_error(logits[torch.bfloat16, False], truth)
    assert relative_error(logits[torch.bfloat16, True], truth) < 1.5 * own


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_fused_layers_on_a_gpu(bits: int, tmp_path: Path) -> None:
    """Decode steps one by one, whose attention and linears are one launch each, against the CPU's float32."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    save_e8p("smollm2", tmp_path / "model", rates={"bits": bits, "lm_head": 4}, **sizes)
    row = torch.randint(0, 131, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        for device, fused in (("cpu", False), ("cuda:0", True), ("cuda:0", False)):
            dtype = torch.float32 if device == "cpu" else torch.bfloat16
            model = Llama.load(checkpoint, device, dtype, decode=False, fused=fused)
            assert all(block.fused == fused for block in model.blocks)
            decoder = Decoder(model, rows=1, max_context=80)
            decoder.feed([row[:64]])
            logits.append(torch.cat([decoder.feed([[token]])[0].float().cpu() for token in row[64:]]))
    truth, fused_logits, own = logits
    assert relative_error(fused_logits, truth) < 1.5 * relative_error(own, truth)


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got - truth).norm() / truth.norm())
