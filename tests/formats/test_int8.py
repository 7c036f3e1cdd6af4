"""Weights in int8 by row, as a CPU holds them: rounding, products, and whole models against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import tiny
from models import Decoder, save_e8p, save_hf, smollm2_gguf
from onegraph.api.device import pick_precision
from onegraph.api.llm import LLM
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.int8 import INT8, turned, turned_back
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.nn.linear import PackedLinear, dense
from onegraph.ops import int8
from onegraph.ops.activation import SwiGLU
from onegraph.ops.cpu.packed import packs
from onegraph.ops.weight import weight_ops

ROW = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(weight: Tensor) -> Tensor:
    return weight_ops(INT8).decode(INT8, INT8.encode(weight))


# ---- rounding


@pytest.mark.parametrize("k", [200, 576, 81])
def test_a_turned_weight_is_off_by_half_a_step_at_most(k: int) -> None:
    weight = randn(64, k) * torch.logspace(-6, 6, 64).unsqueeze(1)
    held = INT8.encode(weight)
    assert int(held["weight"].abs().max()) <= 127
    assert (turned(decoded(weight) - weight).abs() <= held["scale"].float().unsqueeze(1) * 0.501).all()
    assert (held["scale"].float() <= turned(weight).abs().amax(1) / 127 * (1 + 2**-7)).all()  # no coarser than need be


def test_turning_is_orthonormal_and_evens_out_what_is_large() -> None:
    """One large number in 512: a step of 1/127 of it by itself, a seventh of that turned."""
    weight = randn(8, 512)
    weight[:, 7] = 100
    assert torch.allclose(turned_back(turned(weight)), weight, atol=1e-4)
    assert (INT8.encode(weight)["scale"].float() < 100 / 127 / 7).all()


def test_rows_of_zeros_stay_zeros() -> None:
    assert torch.equal(decoded(torch.zeros(3, 64)), torch.zeros(3, 64))


# ---- products


@pytest.mark.parametrize("tokens", [1, 2, 3, int8.FEW, int8.FEW + 1, 70])
@pytest.mark.parametrize(("n", "k"), [(96, 64), (131, 72), (40, 1536)])
def test_linear_is_the_decoded_product_within_bfloat16(tokens: int, n: int, k: int) -> None:
    weight, x, bias = randn(n, k), randn(2, tokens, k, seed=1), randn(n, seed=2)
    layer = dense(weight, bias).int8()
    want = (x.double() @ decoded(weight).double().T + bias).float()
    got = layer(x)
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert (got - want).norm() < 4e-3 * want.norm()
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer(x.bfloat16(), float32=True).dtype == torch.float32


def test_a_wide_layer_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = dense(randn(50, 64)).int8(), randn(30, 64, seed=1)
    whole = layer(x)
    monkeypatch.setattr(int8, "AT_ONCE", 64 * 7)
    assert torch.equal(layer(x), whole)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_what_their_matrices_stand_for(tokens: int, biased: bool) -> None:
    gate_up, down = randn(6, 2 * 48, 64), randn(6, 64, 48, seed=1)
    both = [[INT8.encode(one) for one in stack] for stack in (gate_up, down)]
    held = [{key: torch.stack([one[key] for one in stack]) for key in INT8.fields} for stack in both]
    biases = (randn(6, 96, seed=3), randn(6, 64, seed=4)) if biased else None
    x, weights = randn(tokens, 64, seed=5), randn(tokens, 2, seed=6).softmax(1)
    experts = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:2] for i in range(tokens)])
    gate = SwiGLU()
    got = int8.WEIGHT.experts(INT8, x, experts.int(), weights, *held, gate, biases)
    want = torch.zeros_like(x)
    for t in range(tokens):
        for j, e in enumerate(experts[t].tolist()):
            hidden = decoded(gate_up[e]) @ x[t] + (biases[0][e] if biases else 0)
            want[t] += weights[t, j] * (decoded(down[e]) @ gate(hidden) + (biases[1][e] if biases else 0))
    assert (got - want).norm() < 1e-2 * want.norm()


# ---- models


def rounded(hf: Any, config: LlamaConfig) -> Any:
    """transformers' model with the weights that int8 stands for where the loader holds int8."""
    parts, parameters = config.parts, dict(hf.named_parameters())
    names = [f"{name}.weight" for name in parts.linears if name != parts.head]
    with torch.no_grad():
        for name in names:
            if name in parameters and parameters[name].dim() == 2:
                parameters[name].copy_(decoded(parameters[name]))
        for name, parameter in parameters.items():
            if parameter.dim() == 3:  # the experts of a layer, which its file may hold one by one
                transposed = name in parts.stacks and parts.stacks[name][3]
                for one in parameter:
                    one.copy_(decoded(one.T).T if transposed else decoded(one))
    return hf


def exact(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """The product of `ops/int8.py` without its roundings to bfloat16."""
    return turned(x) @ (codes.float() * scale.float().unsqueeze(-1)).T


@pytest.mark.parametrize(
    "variant",
    ["smollm2", "qwen2", "qwen3", "gemma3", "olmo2", "granite", "mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"],
)
def test_models_are_those_of_their_rounded_weights(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = save_hf(variant, tmp_path / "m")
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = Llama.load(checkpoint, held="int8")
        rounded(hf, LlamaConfig.from_dict(checkpoint.config))
    with torch.inference_mode():
        want = hf(torch.tensor([ROW])).logits[0]
    close = Decoder(model, rows=1, max_context=40).feed([ROW])[0]
    assert (close - want).norm() < 0.05 * want.norm()  # activations are rounded to bfloat16
    monkeypatch.setattr(int8, "_product", exact)
    decoder = Decoder(model, rows=1, max_context=40)
    got = torch.cat([*decoder.feed([ROW[:30]]), *(decoder.feed([[token]])[0] for token in ROW[30:])])
    assert (got - want).norm() < 2e-3 * want.norm()  # a number between two steps may fall either way


def test_what_is_held_in_what(tmp_path: Path) -> None:
    """Blocks take a byte a weight, the head two where torch packs it; an embedding stays as it is stored, unless it is
    also the head."""
    save_e8p("qwen3", tmp_path / "tied", rates={"bits": 4})
    save_hf("llama", tmp_path / "wide")
    wide = Checkpoint.open(tmp_path / "wide")
    write_checkpoint(tmp_path / "apart", wide.config, ((name, wide.tensor(name).bfloat16()) for name in wide.names))
    for name, embedding in (("tied", torch.float32), ("apart", torch.bfloat16)):
        with Checkpoint.open(tmp_path / name) as checkpoint:
            model = Llama.load(checkpoint, held="int8")
        assert {m.format for m in model.blocks.modules() if hasattr(m, "format")} == {INT8}
        assert isinstance(model.lm_head, PackedLinear) == packs()
        assert model.lm_head.tensors["weight"].dtype == torch.float32
        assert model.embed.tensors["weight"].dtype == embedding
        assert model.embed(torch.tensor([3])).dtype == torch.float32


@pytest.mark.parametrize(
    ("asked", "weights"), [("auto", "float16" if packs() else "float32"), ("int8", "int8"), ("float32", "float32")]
)
def test_int8_is_asked_for(asked: str, weights: str, tmp_path: Path) -> None:
    with LLM(tiny.write_model(tmp_path / "m"), device="cpu", dtype=asked, max_model_len=64) as llm:
        assert (llm.weights, llm.dtype) == (weights, torch.float32)
        assert (llm.engine.model.blocks[0].mlp.down.linear.format is INT8) == (weights == "int8")


def test_int8_is_refused_where_nothing_has_it() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ValueError, match="dtype: got int8, in which a CPU holds weights; on cuda float32"):
        pick_precision("int8", gpu, holds=True, packable=bool)
    with pytest.raises(ValueError, match="dtype: got int8, which this family does not have"):
        pick_precision("int8", cpu, holds=False, packable=bool)


@pytest.mark.skipif(smollm2_gguf() is None, reason="needs the weights of SmolLM2")
def test_the_real_model_says_the_same() -> None:
    """KL of the next token between float32 and int8 weights, of the dense model: far below what 4 bits cost (.035)."""
    with LLM(smollm2_gguf(), device="cpu", dtype="float32", max_model_len=256) as llm:
        tokens = llm.tokenizer.encode(Path(__file__).parents[1].joinpath("models.py").read_text())[:256]
        want = Decoder(llm.engine.model, rows=1, max_context=256).feed([tokens])[0].log_softmax(-1)
    with LLM(smollm2_gguf(), device="cpu", dtype="int8", max_model_len=256) as llm:
        got = Decoder(llm.engine.model, rows=1, max_context=256).feed([tokens])[0].log_softmax(-1)
    assert float((want.exp() * (want - got)).sum(-1).mean()) < 3e-3
