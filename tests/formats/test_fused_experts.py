"""Experts that a file holds in one tensor: gpt-oss's blocks and dense stacks, against the layers one by one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.formats.fused import BlocksConfig, expected_stack
from onegraph.formats.quantization import parse_quantization
from onegraph.models.experts import read_stacks
from onegraph.models.loader import Loader
from onegraph.models.parts import Parts
from onegraph.nn.experts import Experts
from onegraph.ops.activation import SwiGLU
from onegraph.ops.mxfp4 import mxfp4_dequantize, random_weight

CPU, GATE, E, D, F = torch.device("cpu"), SwiGLU(7.0, 1.702, 1.0), 3, 64, 96
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def interleaved(rows: Tensor) -> Tensor:
    """[E, 2F, ..], gate rows first, as a file has them that alternates gate and up."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


def blocks(coded: bool, mixed: bool, biases: bool = True) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What a file holds, and the dense float32 weights and biases that it stands for, gate rows first."""
    file, dense = {}, []
    for i, (name, n, k) in enumerate((("x.gate_up_proj", 2 * F, D), ("x.down_proj", D, F))):
        bias = torch.randn(E, n, generator=rng(i)).bfloat16()
        order = interleaved if mixed and i == 0 else lambda t: t
        if coded:
            codes, scale = random_weight((E, n, k), "cpu", rng(i + 2))
            file[f"{name}_blocks"] = order(codes).unflatten(-1, (-1, 16)).contiguous()
            file[f"{name}_scales"] = order(scale).contiguous()
            dense.append(mxfp4_dequantize(codes, scale))
        else:
            dense.append(torch.randn(E, n, k, generator=rng(i + 2)).bfloat16().float() * 0.125)
            file[name] = order(dense[-1]).bfloat16().contiguous()
        if biases:
            file[f"{name}_bias"] = order(bias).contiguous()
        dense.append(bias.float() if biases else torch.zeros(E, n))
    return file, dense


def load(path: Path, file: dict[str, Tensor]) -> Loader:
    write_checkpoint(path / "model", {"model_type": "x"}, file.items())
    config = SimpleNamespace(
        parts=Parts(linears={}, embedding=("e", (1, 1)), head="h", tensors={}), quantization=None,
        family_name=lambda name: name,
    )  # fmt: skip
    return Loader(Checkpoint.open(path / "model"), config, torch.float32)


def truth(x: Tensor, chosen: Tensor, gains: Tensor, gate_up: Tensor, first: Tensor, down: Tensor, second: Tensor):
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for e, gain in zip(chosen[t].tolist(), gains[t], strict=True):
            gate, up = (gate_up[e] @ x[t] + first[e]).chunk(2)
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            out[t] += gain * (down[e] @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + second[e])
    return out


def run(experts: Experts) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    x, gains = torch.randn(2, D, generator=rng(9)), torch.rand(2, 2, generator=rng(8))
    chosen = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    return (x, chosen, gains), experts(x, chosen, gains)


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("coded", [True, False], ids=["mxfp4", "dense"])
def test_a_stack_is_its_experts(tmp_path: Path, coded: bool, mixed: bool, biases: bool) -> None:
    file, dense = blocks(coded, mixed, biases)
    loader = load(tmp_path, file)
    experts = read_stacks(loader, "x.gate_up_proj", "x.down_proj", GATE, CPU, interleaved=mixed)
    assert (experts.biases is not None) == biases
    assert experts.gate_up.format.name == ("mxfp4" if coded else "dense")
    given, got = run(experts)
    torch.testing.assert_close(got, truth(*given, *dense), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("coded", [True, False], ids=["mxfp4", "dense"])
def test_dense_stacks_may_lie_transposed(tmp_path: Path, coded: bool) -> None:
    """As transformers writes gpt-oss; blocks have one way to lie. The sizes of down tell nothing where D is F."""
    file, dense = blocks(coded, True)
    turned = {name: tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 and not coded else tensor
              for name, tensor in file.items()}  # fmt: skip
    loader = load(tmp_path, turned)
    loader.checkpoint.check(
        expected_stack(loader, "x.gate_up_proj", E, 2 * F, D, bias=True, transposed=True)
        | expected_stack(loader, "x.down_proj", E, D, F, bias=True, transposed=True)
    )
    given, got = run(read_stacks(loader, "x.gate_up_proj", "x.down_proj", GATE, CPU, interleaved=True, transposed=True))
    torch.testing.assert_close(got, truth(*given, *dense), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("coded", [True, False], ids=["mxfp4", "dense"])
def test_what_a_stack_must_hold(tmp_path: Path, coded: bool) -> None:
    file, _ = blocks(coded, True)
    loader = load(tmp_path, file)
    expected = expected_stack(loader, "x.gate_up_proj", E, 2 * F, D, bias=True)
    expected |= expected_stack(loader, "x.down_proj", E, D, F, bias=True)
    loader.checkpoint.check(expected)
    with pytest.raises(CheckpointError, match=r"neither 'y' nor 'y_blocks'"):
        expected_stack(loader, "y", E, 2 * F, D, bias=True)
    if coded:
        with pytest.raises(ValueError, match="groups of 32"):
            expected_stack(loader, "x.down_proj", E, D, 40, bias=True)


def test_stacks_of_two_kinds_are_refused(tmp_path: Path) -> None:
    coded, dense = blocks(True, True)[0], blocks(False, True)[0]
    mixed = {name: tensor for name, tensor in coded.items() if "gate_up" in name} | {
        name: tensor for name, tensor in dense.items() if "down" in name
    }
    with pytest.raises(CheckpointError, match=r"x.gate_up_proj is mxfp4 with biases and x.down_proj dense with biases"):
        read_stacks(load(tmp_path, mixed), "x.gate_up_proj", "x.down_proj", GATE, CPU, interleaved=True)
    del coded["x.down_proj_bias"]
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"mxfp4 with biases and x.down_proj mxfp4 without biases"):
        read_stacks(load(tmp_path / "other", coded), "x.gate_up_proj", "x.down_proj", GATE, CPU, interleaved=True)


def test_a_scale_that_is_nan_names_its_expert(tmp_path: Path) -> None:
    file, _ = blocks(True, True)
    file["x.down_proj_scales"][1, 5, 0] = 255
    with pytest.raises(CheckpointError, match=r"'x.down_proj of expert 1' has scales that are NaN"):
        read_stacks(load(tmp_path, file), "x.gate_up_proj", "x.down_proj", GATE, CPU, interleaved=True)


@pytest.mark.parametrize("scale", [103, 141])
def test_what_float16_does_not_hold_is_refused_in_float16(tmp_path: Path, scale: int) -> None:
    file, _ = blocks(True, True)
    file["x.down_proj_scales"][2, 5, 1] = scale
    loader = load(tmp_path, file)
    read_stacks(loader, "x.gate_up_proj", "x.down_proj", GATE, CPU, interleaved=True)
    loader.dtype = torch.float16
    with pytest.raises(CheckpointError, match=r"'x.down_proj of expert 2' has scales beyond 2\^-23 to 2\^13"):
        read_stacks(loader, "x.gate_up_proj", "x.down_proj", GATE, CPU, interleaved=True)
    file["x.down_proj_blocks"][2, 5, 1] = 0x80  # zeros are zeros at any scale
    (tmp_path / "other").mkdir()
    loader = load(tmp_path / "other", file)
    loader.dtype = torch.float16
    read_stacks(loader, "x.gate_up_proj", "x.down_proj", GATE, CPU, interleaved=True)


def test_gpt_oss_says_mxfp4() -> None:
    config = parse_quantization(GPT_OSS)
    assert isinstance(config, BlocksConfig)
    assert config.to_dict() == GPT_OSS
    layer = config.format_of("model.layers.0.self_attn.q_proj", None)
    assert layer.name == "dense"
