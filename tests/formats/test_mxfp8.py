"""MXFP8: every code and exponent by the definition, which files are in it, what is refused. (What all formats share:
test_weight_format.py. Whole checkpoints: test_published.py.)"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.formats.fp8 import FP8
from onegraph.formats.mxfp4 import E8M0
from onegraph.formats.mxfp8 import MXFP8
from onegraph.formats.nvfp4 import E4M3
from onegraph.formats.published import Published
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.weight import Part
from onegraph.models.ranks import Ranks
from onegraph.nn.linear import Linear
from onegraph.ops.mxfp8 import mxfp8_dequantize, mxfp8_experts, mxfp8_linear, random_weight
from published import LAYOUTS, save
from test_fp8 import TABLE
from test_ranks import of_ranks
from test_weight_format import Held

MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def layer(n: int, k: int, dtype: torch.dtype = torch.uint8, name: str = "weight_scale") -> Held:
    codes, scale = random_weight((n, k), "cpu", torch.Generator().manual_seed(0))
    return Held({"a.weight": codes.view(E4M3), f"a.{name}": scale.view(dtype)})


def by_hand(codes: Tensor, scale: Tensor) -> Tensor:
    """float64 [n, k] by the definition, each number's exponent looked up by its own place."""
    i, j = torch.meshgrid(*(torch.arange(size) for size in codes.shape), indexing="ij")
    return TABLE[codes.int()] * torch.exp2(scale[i, j // 32].double() - 127)


def test_every_code_under_every_exponent_is_what_the_definition_says() -> None:
    scale = torch.arange(247, dtype=torch.uint8).view(-1, 1).expand(-1, 8).contiguous()  # above, 448 of it is infinite
    codes = CODES.repeat(247, 1)
    got, want = mxfp8_dequantize(codes, scale).double(), by_hand(codes, scale)
    assert torch.equal(got, want.float().double())
    assert torch.equal(got[11:], want[11:])  # float32 has no subnormals so small as those below


@pytest.mark.parametrize("dtype", [torch.uint8, E8M0])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_scales_of_a_byte_tell_it(dtype: torch.dtype, name: str) -> None:
    """In memory they stay bytes; parts are cut between groups, and the last one may be short."""
    file = layer(6, 150, dtype, name)
    for config in (MODELOPT, {"quant_method": "fp8", "weight_block_size": [1, 32]}):
        assert Published.from_dict(config).format_of("a", file) is MXFP8
    assert MXFP8.expected(file, "a", 6, 150)[f"a.{name}"] == ((6, 5), (torch.uint8, E8M0))
    tensors = MXFP8.read(file, "a")
    assert {key: (each.dtype, tuple(each.shape)) for key, each in tensors.items()} == {
        "codes": (torch.uint8, (6, 150)),
        "scale": (torch.uint8, (6, 5)),
    }
    want = by_hand(tensors["codes"], tensors["scale"])
    assert torch.equal(Linear(MXFP8, tensors).dense().weight.double(), want)
    part = Linear(MXFP8, MXFP8.read(file, "a", Part(rows=(1, 4), columns=(64, 150))))
    assert torch.equal(part.dense().weight.double(), want[1:4, 64:])


def test_other_scales_are_fp8() -> None:
    published = parse_quantization(MODELOPT)
    assert published is not None
    file = layer(6, 160)
    file.tensors["a.weight_scale"] = torch.full((6, 5), 0.3)
    assert published.format_of("a", file) is FP8[1, 32]
    blocks = Published.from_dict({"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(CheckpointError, match=r"'a.weight_scale' has shape \[6, 5\]; .* are \[1, 2\]"):
        blocks.format_of("a", layer(6, 160))


def test_nan_is_named() -> None:
    file = layer(4, 64)
    file.tensors["a.weight_scale"][2, 1] = 255
    with pytest.raises(CheckpointError, match=r"'a.weight_scale' holds scales that are NaN"):
        MXFP8.read(file, "a")
    file = layer(4, 64)
    file.tensors["a.weight"].view(torch.uint8)[3, 7] = 0xFF
    with pytest.raises(CheckpointError, match=r"'a.weight' holds NaN codes"):
        MXFP8.read(file, "a")


def test_ops_refuse_scales_of_another_kind() -> None:
    codes, scale = random_weight((64, 96), "cpu", torch.Generator().manual_seed(0))
    x = torch.randn(2, 96)
    assert mxfp8_linear(x, codes, scale, None, False).shape == (2, 64)
    for bad in (scale[:, :2].contiguous(), scale.float(), scale.view(E8M0)):
        with pytest.raises(ValueError, match=r"the scale of codes is .* needs uint8 \(64, 3\)"):
            mxfp8_linear(x, codes, bad, None, False)


def test_experts_of_few_and_of_many_tokens_are_the_same() -> None:
    """Also where an expert that a token did not choose would give infinity."""
    g = torch.Generator().manual_seed(5)
    layers = *random_weight((4, 64, 64), "cpu", g), *random_weight((4, 64, 32), "cpu", g)
    layers[3][0] = 254
    x, gains = torch.randn(9, 64, generator=g), torch.rand(9, 2, generator=g)
    chosen = 1 + torch.rand(9, 3, generator=g).argsort(1)[:, :2].int().contiguous()
    whole = mxfp8_experts(x, chosen, gains, *layers, 7.0, 1.702, 1.0)
    each = [mxfp8_experts(*(t[i : i + 1] for t in (x, chosen, gains)), *layers, 7.0, 1.702, 1.0) for i in range(9)]
    assert torch.isfinite(whole).all()
    assert (whole - torch.cat(each)).norm() <= 1e-6 * whole.norm()


def test_ranks_hold_parts_in_codes(tmp_path: Path) -> None:
    """Tensor parallel: the logits of transformers with the numbers of the file, from two ranks."""
    hf = save(LAYOUTS["NVIDIA MIXED of MXFP8"], tmp_path / "m")
    row = torch.randint(0, 131, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = Ranks.load(checkpoint, ["cpu"] * 2, decode=False)
        (got,) = of_ranks(model, [row])
    assert model.ranks[1].blocks[0].out.linear.format is MXFP8
    with torch.no_grad():
        want = hf(torch.tensor([row])).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
