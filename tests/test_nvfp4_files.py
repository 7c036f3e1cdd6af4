"""NVFP4 on the disk: the files and configs of other tools, what of them is refused, models read from ours."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import Decoder, save_hf
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.files import CheckpointError
from onegraph.formats.nvfp4 import E4M3, NVFP4, written_config
from onegraph.formats.published import Published
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.nn.linear import Linear
from onegraph.ops.nvfp4_linear import nvfp4_dequantize, random_weight
from onegraph.quant.nvfp4 import quantize_weight, quantized_tensors
from test_nvfp4 import by_hand, rng


def checkpoint(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Checkpoint:
    write_checkpoint(path, config or {}, tensors.items())
    return Checkpoint.open(path)


def modelopt(layer: str, codes: Tensor, scale: Tensor, gain: float, inputs: float) -> dict[str, Tensor]:
    return {
        f"{layer}.weight": codes,
        f"{layer}.weight_scale": scale.view(E4M3),
        f"{layer}.weight_scale_2": torch.tensor(gain),
        f"{layer}.input_scale": torch.tensor(inputs),
    }


def compressed(layer: str, codes: Tensor, scale: Tensor, gain: float, inputs: float) -> dict[str, Tensor]:
    return {
        f"{layer}.weight_packed": codes,
        f"{layer}.weight_scale": scale.view(E4M3),
        f"{layer}.weight_global_scale": torch.tensor([1 / gain]),  # a divisor, of one dimension
        f"{layer}.input_global_scale": torch.tensor([1 / inputs]),
    }


class Reader:
    """A checkpoint as a format reads it, on the CPU."""

    def __init__(self, found: Checkpoint) -> None:
        self.found = found

    def __contains__(self, name: object) -> bool:
        return name in self.found

    def info(self, name: str) -> Any:
        return self.found.info(name)

    def read(self, name: str, field: Any, part: Any) -> Tensor:
        return field.cut(self.found.tensor(name), part)

    def require(self, ok: torch.Tensor, message: Callable[[], str]) -> None:
        if not ok:
            raise CheckpointError(message())


def read(found: Checkpoint, layer: str, n: int, k: int) -> dict[str, Tensor]:
    """A layer as a loader reads it: what the file holds is held against what is asked for first."""
    found.check(NVFP4.expected(Reader(found), layer, n, k), optional=set(found.names) - set(NVFP4.names(found, layer)))
    return NVFP4.read(Reader(found), layer)


@pytest.mark.parametrize("form", [modelopt, compressed])
def test_reads_what_both_tools_write(form: Any, tmp_path: Path) -> None:
    codes, scale, _ = random_weight((5, 48), "cpu", rng())
    with checkpoint(
        tmp_path / "model", form("a.b", codes, scale, 0.0123, 0.25) | {"c.weight": torch.ones(2, 2)}
    ) as found:
        published = Published.from_dict(written_config([]))
        assert published.format_of("a.b", found) is NVFP4
        assert published.format_of("c", found) is DENSE
        layer = Linear(NVFP4, read(found, "a.b", 5, 48))
    x = torch.randn(2, 48, generator=rng(1))
    wanted = x.double() @ by_hand(codes, scale, 0.0123).T
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-4, atol=1e-6)


def test_a_negative_zero_among_the_scales_is_a_zero(tmp_path: Path) -> None:
    codes, scale, _ = random_weight((5, 48), "cpu", rng())
    scale[2, 1] = 0x80
    with checkpoint(tmp_path / "model", modelopt("a", codes, scale, 0.01, 0.25)) as found:
        assert read(found, "a", 5, 48)["scale"][2, 1] == 0


DAMAGE: list[tuple[str, Any, str]] = [
    (
        "scale of groups of 32",
        {"a.weight_scale": torch.zeros(64, 4).to(E4M3)},
        r"a.weight_scale' .*\[64, 4\].*\[64, 8\]",
    ),
    ("scale padded", {"a.weight_scale": torch.zeros(128, 8).to(E4M3)}, r"a.weight_scale' .*\[128, 8\].*\[64, 8\]"),
    ("scale transposed", {"a.weight_scale": torch.zeros(8, 64).to(E4M3)}, r"\[8, 64\].*\[64, 8\]"),
    ("scale in bfloat16", {"a.weight_scale": torch.zeros(64, 8).bfloat16()}, "a.weight_scale' is bfloat16"),
    ("codes cut", {"a.weight": torch.zeros(64, 32, dtype=torch.uint8)}, r"a.weight' .*\[64, 32\].*\[64, 64\]"),
    ("a scale a row", {"a.weight_scale_2": torch.ones(64)}, r"a.weight_scale_2' has shape \[64\]"),
    ("a global scale of zero", {"a.weight_scale_2": torch.zeros(())}, "above zero"),
    ("a scale that is NaN", {"a.weight_scale": torch.full((64, 8), math.nan).to(E4M3)}, "NaN or negative"),
    ("a negative scale", {"a.weight_scale": torch.full((64, 8), -1.0).to(E4M3)}, "NaN or negative"),
    ("no global scale", {"a.weight_scale_2": None}, "missing: 'a.weight_scale_2'"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_a_tensor_that_does_not_fit_is_named_with_both_sizes(change: Any, message: str, tmp_path: Path) -> None:
    codes, scale, _ = random_weight((64, 128), "cpu", rng())
    tensors = modelopt("a", codes, scale, 0.01, 0.25) | change
    with (
        checkpoint(tmp_path / "m", {name: t for name, t in tensors.items() if t is not None}) as found,
        pytest.raises(CheckpointError, match=message),
    ):
        read(found, "a", 64, 128)


# ------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("variant", ["smollm2", "qwen2", "llama_bias_mha"])
def test_a_model_in_nvfp4_is_what_its_codes_stand_for(variant: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 112, "head_dim": 16}
    hf = save_hf(variant, tmp_path / "dense", **sizes)
    source = Checkpoint.open(tmp_path / "dense")
    config = LlamaConfig.from_dict(source.config)
    linears = [name for name in config.parts.linears if name != "lm_head"]
    kept = "model.layers.1.self_attn.k_proj"
    linears.remove(kept)
    told = source.config | {"quantization_config": written_config([kept, "lm_head"])}
    write_checkpoint(tmp_path / "coded", told, quantized_tensors(source.names, source.tensor, linears))
    for name in linears:
        codes, scale, gain = quantize_weight(source.tensor(f"{name}.weight")).values()
        dense = nvfp4_dequantize(codes, scale, gain.expand(codes.shape[0]).contiguous())
        hf.get_submodule(name).weight.data.copy_(dense)
    row = torch.randint(0, 131, (24,), generator=rng())
    with torch.no_grad():
        wanted = hf(row.unsqueeze(0)).logits[0]
    for decode in (True, False):
        with Checkpoint.open(tmp_path / "coded") as coded:
            model = Llama.load(coded, decode=decode)
        got = Decoder(model, rows=1, max_context=32).feed([row.tolist()])[0]
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_a_model_with_a_damaged_scale_is_refused(tmp_path: Path) -> None:
    save_hf("smollm2", tmp_path / "dense")
    source = Checkpoint.open(tmp_path / "dense")
    name = "model.layers.0.mlp.up_proj"
    tensors = dict(quantized_tensors(source.names, source.tensor, [name]))
    tensors[f"{name}.weight_scale"] = torch.zeros(104, 3).to(E4M3)
    config = source.config | {"quantization_config": written_config([])}
    with (
        checkpoint(tmp_path / "bad", tensors, config) as coded,
        pytest.raises(CheckpointError, match=r"up_proj.weight_scale' has shape \[104, 3\], .* \[104, 6\]"),
    ):
        Llama.load(coded)
