"""Experts in E8P from a checkpoint on: stacks of codes, what is refused, the module, and the op where its cases end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import TILED, Decoder, e8p_tensors, hf_model, rotated_tensors
from onegraph.api.size import component_bits, size_of
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.e8p import BITS, E8P, E8PConfig, codebook
from onegraph.formats.files import CheckpointError
from onegraph.formats.fused import stacked
from onegraph.formats.rotated import RotatedConfig
from onegraph.formats.trellis import TrellisConfig
from onegraph.models.llama import Llama
from onegraph.nn.linear import Linear
from onegraph.nn.shared_expert import SharedExpert
from onegraph.ops.activation import SwiGLU
from onegraph.ops.e8p_experts import e8p_experts, random_weight


def interleaved(rows: Tensor) -> Tensor:
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def checkpoint_of(
    variant: str, path: Path, bits: int, *, written: type[RotatedConfig] = E8PConfig, **changes: Any
) -> Any:
    """A checkpoint of random codes as onegraph writes it, and transformers' model with the numbers they stand for."""
    hf, config = hf_model(variant, **changes), written(bits=bits)
    format, make = config.formats[bits], rotated_tensors(config)
    tensors: dict[str, Tensor] = {}
    feed = ".block_sparse_moe." if variant in ("mixtral", "minimax_m2") else ".mlp."
    for seed, (name, parameter) in enumerate(hf.named_parameters()):
        own = name.replace(".mlp.", feed)
        layer, _, kind = own.rpartition(".")
        with torch.no_grad():
            if parameter.dim() == 3:
                turned = variant == "gpt_oss"
                count, n, k = parameter.transpose(1, 2).shape if turned else parameter.shape
                made = [make(n, k, bits, 100 * seed + i) for i in range(count)]
                tensors |= stacked(format, own, [stored for stored, _ in made])
                for one, (_, dense) in zip(parameter, made, strict=True):
                    rows = interleaved(dense) if turned and "gate_up" in own else dense
                    one.copy_(rows.T if turned else rows)
            elif "proj" in layer and kind == "weight":
                found, dense = make(*parameter.shape, bits, seed)
                tensors |= {f"{layer}.{key}": tensor for key, tensor in found.items()}
                parameter.copy_(dense)
            else:
                tensors[own] = parameter.detach().clone()
    bias = "e_score_correction_bias"
    tensors |= {name.replace(".mlp.", feed): each for name, each in hf.named_buffers() if name.endswith(bias)}
    told = {"architectures": [type(hf).__name__], "quantization_config": config.to_dict()}
    write_checkpoint(path, hf.config.to_dict() | told, tensors.items())
    return hf


@pytest.mark.parametrize(("written", "bits"), [*((E8PConfig, bits) for bits in BITS), (TrellisConfig, 3)])
@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_checkpoint_with_stacks_is_the_model_of_its_numbers(
    variant: str, written: type[RotatedConfig], bits: int, tmp_path: Path
) -> None:
    moe = {"moe_intermediate_size": 48} if variant == "qwen3_moe" else {}
    sizes = TILED | moe if written is TrellisConfig else {}
    hf = checkpoint_of(variant, tmp_path / "m", bits, written=written, **sizes)
    row = torch.randint(0, 131, (24,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = hf(row.unsqueeze(0)).logits[0]
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        for decode in (True, False):
            model = Llama.load(checkpoint, decode=decode)
            got = Decoder(model, rows=1, max_context=32).feed([row.tolist()])[0]
            assert (got - want).abs().max() < 1e-4 * want.abs().max()
        assert model.blocks[0].mlp.experts.gate_up.format is written.formats[bits]
        parameters = sum(p.numel() for name, p in hf.named_parameters() if not name.endswith("bias"))
        assert size_of(checkpoint).parameters == parameters
        assert bits < component_bits(checkpoint)["experts"] < bits + 4  # scales of tiny experts


def test_a_stack_without_its_residual_or_of_another_size_is_refused(tmp_path: Path) -> None:
    checkpoint_of("qwen3_moe", tmp_path / "m", 3)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        tensors = {name: checkpoint.unrounded(name) for name in checkpoint.names}
        config = checkpoint.config
    name = "model.layers.0.mlp.experts.down_proj"
    changes = (
        ({f"{name}.scale": torch.ones(8)}, r"scale' has shape \[8\].*\[9\]"),
        ({f"{name}.residual": tensors[f"{name}.residual"][:, :, 1:]}, "residual' has shape"),
        ({f"{name}.codes": tensors[f"{name}.codes"].int()}, "codes"),
        ({f"{name}.scale": torch.zeros(9)}, "scale' is 0.0; a scale is above zero"),
    )
    for i, (changed, why) in enumerate(changes):
        write_checkpoint(tmp_path / f"bad{i}", config, (tensors | changed).items())
        with Checkpoint.open(tmp_path / f"bad{i}") as checkpoint, pytest.raises(CheckpointError, match=why):
            Llama.load(checkpoint)


def test_stacks_are_of_one_size_and_rate() -> None:
    layers = [e8p_tensors(16, 8, bits, 0)[0] for bits in (4, 3)]
    with pytest.raises(ValueError, match=r"x.residual of expert 1 is torch.uint8 .* must be of one size and rate"):
        stacked(E8P[4], "x", layers)


def test_many_tokens_are_the_tokens_one_by_one() -> None:
    """Beyond as many pairs as there are experts the reference walks over experts."""
    g = torch.Generator().manual_seed(0)
    both = [[*random_weight(5, n, k, 3, "cpu", g), torch.randn(5, n, generator=g)] for n, k in ((96, 72), (72, 48))]
    x, gains = torch.randn(9, 72, generator=g), torch.rand(9, 2, generator=g)
    chosen = torch.randint(-1, 6, (9, 2), generator=g).int()  # also numbers that are no expert, and one chosen twice
    rest = codebook(), *both[0], *both[1], 3, 7.0, 1.702, 1.0
    whole = e8p_experts(x, chosen, gains, *rest)
    each = [e8p_experts(x[i : i + 1], chosen[i : i + 1], gains[i : i + 1], *rest) for i in range(9)]
    torch.testing.assert_close(whole, torch.cat(each), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("bits", BITS)
def test_a_shared_expert_in_codes_is_its_dense_one(bits: int, tokens: int) -> None:
    gate_up, down = (Linear(E8P[bits], E8P[bits].fold(e8p_tensors(n, 64, bits, n)[0])) for n in (128, 64))
    x = torch.randn(tokens, 2, 64, generator=torch.Generator().manual_seed(tokens))
    want = down.dense()(SwiGLU()(gate_up.dense()(x)))
    got = SharedExpert(gate_up, down, SwiGLU())(x)
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)


def test_what_is_wrong_with_a_call_is_said() -> None:
    g = torch.Generator().manual_seed(0)
    first, second = (random_weight(4, n, k, 3, "cpu", g) for n, k in ((96, 72), (72, 48)))
    x, chosen, gains = torch.randn(2, 72), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)
    good = [x, chosen, gains, codebook(), *first, None, *second, None, 3, 7.0, 1.0, 0.0]
    for at, bad, why in (
        (14, 5, "bits is 5; allowed: 2, 3, 4"),
        (5, None, "gate_up_residual must be torch.uint8 at 3 bits"),
        (0, x[:, :40].contiguous(), r"gate_up is \(4, 96, 9\) torch.int16; it must be int16 \[4, 96, 5\]"),
        (6, first[2][:1], r"gate_up_in_scale is \(1, 72\)"),
        (11, second[2].t(), r"down_in_scale is \(48, 4\)"),
        (1, chosen.long(), "experts is torch.int64"),
        (15, 0.0, "limit is 0.0"),
    ):
        with pytest.raises(ValueError, match=why):
            e8p_experts(*good[:at], bad, *good[at + 1 :])
