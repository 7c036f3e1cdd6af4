"""Every weight format by its record: cut, joined, checked, loaded and run as the dense weight that it stands for."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import Decoder, e8p_tensors, hf_model, save_hf, trellis_tensors
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.e8p import E8P, E8PConfig
from onegraph.formats.exl3 import EXL3, EXL3Format
from onegraph.formats.files import CheckpointError
from onegraph.formats.fp8 import FP8, FP8Format
from onegraph.formats.int4 import ALL, INT4Format, int4
from onegraph.formats.int4_config import INT4Config
from onegraph.formats.mxfp4 import E8M0, MXFP4
from onegraph.formats.mxfp8 import MXFP8
from onegraph.formats.nvfp4 import E4M3, NVFP4, written_config
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.trellis import TRELLIS, TrellisConfig
from onegraph.formats.weight import Part, WeightFormat
from onegraph.models.config import LlamaConfig
from onegraph.models.experts import read_experts
from onegraph.models.llama import Llama
from onegraph.models.loader import Loader
from onegraph.nn.embedding import Embedding
from onegraph.nn.experts import Experts
from onegraph.nn.linear import ConcatLinear, GroupedLinear, Linear, Weight, join
from onegraph.ops.activation import SwiGLU
from onegraph.ops.fp8 import random_weight as random_fp8
from onegraph.ops.mxfp4 import mxfp4_dequantize
from onegraph.ops.mxfp8 import random_weight as random_mxfp8
from onegraph.ops.weight import weight_ops
from onegraph.quant.nvfp4 import quantize_weight

INT4, INT4_ROWS = int4(32, torch.float16), int4(ALL, torch.bfloat16)
ROTATED = [*E8P.values(), *TRELLIS.values(), *EXL3.values()]
FORMATS = [
    DENSE,
    *E8P.values(),
    *(TRELLIS[bits] for bits in (1, 3, 8)),
    *(EXL3[kind] for kind in ((3, "3inst"), (4, "mcg"), (6, "mul1"))),
    NVFP4,
    MXFP4,
    MXFP8,
    *FP8.values(),
    INT4,
    INT4_ROWS,
]
CPU = torch.device("cpu")
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def stored(format: WeightFormat, n: int, k: int, seed: int) -> dict[str, Tensor]:
    """A random layer as a file holds it, by the names of the format's `stored`."""
    g = torch.Generator().manual_seed(seed)
    if isinstance(format, EXL3Format):
        tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in format.layout(n, k).items()}
        format.fill(tensors, k, g)
        for key in ("in_scale", "out_scale"):
            factors = torch.randn(tensors[key].shape, generator=g)
            tensors[key] *= factors.sign() * (0.5 + torch.rand(factors.shape, generator=g))
        return tensors
    if format in ROTATED:
        return (e8p_tensors if format in E8P.values() else trellis_tensors)(n, k, format.rate, seed)[0]
    if format is MXFP4:
        codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
        return {"codes": codes, "scale": torch.randint(118, 124, (n, k // 32), generator=g, dtype=torch.uint8)}
    if format is MXFP8:
        codes, scale = random_mxfp8((n, k), "cpu", g)
        return {"codes": codes.view(E4M3), "scale": scale}
    if isinstance(format, FP8Format):
        codes, scale = random_fp8((n, k), format.rows, format.columns, "cpu", g)
        return {"codes": codes.view(E4M3), "scale": scale}
    if isinstance(format, INT4Format):  # words of eight
        groups = 1 if format.columns == ALL else k // format.columns
        info = torch.iinfo(torch.int32)
        codes, zero = (
            torch.randint(info.min, info.max + 1, shape, generator=g).int()
            for shape in ((n, k // 8), (-(-n // 8), groups))
        )
        return {"codes": codes, "scale": torch.rand(n, groups, generator=g).to(format.dtype) * k**-0.5, "zero": zero}
    weight = torch.randn(n, k, generator=g) * k**-0.5
    if format is NVFP4:
        made = quantize_weight(weight)
        return made | {"scale": made["scale"].view(E4M3)}
    return {"weight": weight}


class Held:
    """Tensors in memory as a format reads them from a file."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def info(self, name: str) -> Tensor:
        return self.tensors[name]

    def read(self, name: str, field: Any, part: Part) -> Tensor:
        return field.cut(self.tensors[name], part)

    def require(self, ok: Tensor, message: Callable[[], str]) -> None:
        if not ok:
            raise CheckpointError(message())


def named(format: WeightFormat, layer: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = format.names((), layer)
    return {names[key]: tensor for key, tensor in tensors.items()}


def made(format: WeightFormat, n: int, k: int, seed: int = 0, bias: bool = False) -> Linear:
    tensors = format.read(Held(named(format, "a", stored(format, n, k, seed))), "a")
    return Linear(format, tensors, torch.linspace(-1, 1, n) if bias else None)


def near(got: Tensor, want: Tensor, error: float = 3e-6) -> bool:
    return bool((got - want).norm() <= error * want.norm())


@each_format
def test_a_linear_is_its_decoded_weight(format: WeightFormat) -> None:
    layer = made(format, 96, 160, bias=True)
    x = torch.randn(2, 3, 160, generator=torch.Generator().manual_seed(1))
    want = x @ layer.dense().weight.T + layer.bias
    assert near(layer(x), want)
    assert layer(x, float32=True).dtype == torch.float32
    half = layer.dense(torch.bfloat16) if format is DENSE else layer
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert near(half(x.bfloat16(), float32=True), want, 8e-3)
    assert (layer.out_features, layer.in_features, layer.count) == (96, 160, 1)


@each_format
def test_what_a_format_fuses_is_the_composition(format: WeightFormat) -> None:
    layer, gain = made(format, 128, 160), 1 + torch.rand(160, generator=torch.Generator().manual_seed(1))
    x, add = torch.randn(3, 160), torch.randn(3, 128)
    if "add" in format.fuses:
        assert near(layer(x, add=add), layer(x) + add)
    if "silu" in format.fuses:
        gate, up = torch.randn(3, 320).chunk(2, -1)
        assert near(layer(torch.cat([gate, up], -1), silu=True), layer(torch.nn.functional.silu(gate) * up))
    if "norm" in format.fuses:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain
        assert near(layer.after_norm(gain)(x, eps=1e-5), layer(normed))
    else:
        with pytest.raises(AssertionError, match="does not fuse"):
            layer.after_norm(gain)


@each_format
def test_parts_are_the_slices_of_the_weight(format: WeightFormat) -> None:
    whole = made(format, 384, 512, bias=True)
    weight, x = whole.dense().weight, torch.randn(2, 512)
    rows, columns = [(0, 128), (128, 384)], [(0, 256), (256, 384), (384, 512)]
    for r, c in itertools.product(rows, columns):
        assert near(whole.part(rows=r, columns=c).dense().weight, weight[slice(*r), slice(*c)])
    assert near(torch.cat([whole.part(rows=r)(x) for r in rows], -1), whole(x))
    parts = [whole.part(columns=c, keep_bias=c[0] == 0)(x[:, slice(*c)].contiguous()) for c in columns]
    assert near(sum(parts), whole(x))


@each_format
@pytest.mark.parametrize("span", [(0, 0), (128, 128), (-128, 0), (256, 640), (256, 128)])
def test_bounds_outside_of_a_layer_are_refused(format: WeightFormat, span: tuple[int, int]) -> None:
    layer = made(format, 512, 512)
    with pytest.raises(ValueError, match=r"rows .* is no part of 512"):
        layer.part(rows=span)
    with pytest.raises(ValueError, match=r"columns .* is no part of 512"):
        layer.part(columns=span)


@pytest.mark.parametrize(
    ("format", "unit"),
    [
        (NVFP4, 16),
        (MXFP4, 32),
        (MXFP8, 32),
        (INT4, 32),
        (INT4_ROWS, 32),
        (E8P[2], 128),
        (TRELLIS[5], 128),
        (FP8[128, 128], 128),
    ],
    ids=str,
)
def test_columns_are_cut_between_groups(format: WeightFormat, unit: int) -> None:
    layer = made(format, 256, 512)
    assert layer.part(columns=(unit, 2 * unit)).in_features == unit
    for span in ((unit // 2, 2 * unit), (0, unit // 2)):
        with pytest.raises(ValueError, match=r"columns .* cut"):
            layer.part(columns=span)


@each_format
def test_joined_layers_are_the_layers_one_after_the_other(format: WeightFormat) -> None:
    parts = [made(format, n, 128, seed=n, bias=n == 384) for n in (128, 384)]
    if "in_scale" in format.fields:  # what siblings share
        parts[1] = Linear(format, parts[1].tensors | {"in_scale": parts[0].in_scale}, parts[1].bias)
    one, x = join(parts), torch.randn(3, 128)
    assert isinstance(one, Linear)
    assert near(one(x), torch.cat([part(x) for part in parts], -1))
    other = made(DENSE if format is not DENSE else MXFP4, 128, 128)
    assert isinstance(join([parts[0], other]), ConcatLinear)


@each_format
def test_a_file_holds_what_the_layout_says(format: WeightFormat) -> None:
    n, k = 64, 96
    layout, tensors = format.layout(n, k), stored(format, n, k, 0)
    expected = format.expected(Held({}), "a", n, k, bias=True)
    names = format.names((), "a")
    for key, tensor in tensors.items():
        shape, dtypes = expected.pop(names[key])
        assert tuple(tensor.shape) == shape == layout[key][0]
        assert tensor.dtype in dtypes
    assert list(expected) == ["a.bias"]
    assert format.bits(n, k) == 8 * sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
    with pytest.raises(ValueError, match=r"cannot be stored"):
        format.layout(n, 0 if format is DENSE or isinstance(format, FP8Format) else 100)


@each_format
@pytest.mark.parametrize("bias", [False, True])
def test_bytes_on_a_device_are_those_of_what_is_read(format: WeightFormat, bias: bool) -> None:
    """Scales of a byte in the file are four in memory: of MXFP8, a tenth of the whole."""
    held = format.read(Held(named(format, "a", stored(format, 96, 160, 0))), "a")
    biases = 96 * (4 if format.coded else 2) if bias else 0
    assert format.device_bytes(96, 160, torch.bfloat16, bias) == biases + sum(
        tensor.numel() * (2 if format is DENSE else tensor.itemsize) for tensor in held.values()
    )


@each_format
def test_tensors_that_disagree_are_refused(format: WeightFormat) -> None:
    good = made(format, 129 if isinstance(format, FP8Format) else 64, 96).tensors  # the last block of one row
    for key, tensor in good.items():
        for bad in (tensor[:-1] if tensor.dim() else tensor.expand(2), tensor.to(torch.complex64)):
            if format is DENSE and bad.dtype == tensor.dtype:
                continue  # any matrix is a dense layer
            with pytest.raises(ValueError, match=r"needs|need"):
                Linear(format, good | {key: bad})
        with pytest.raises(ValueError, match=f"{key} is missing"):
            Linear(format, {name: value for name, value in good.items() if name != key})
    with pytest.raises(ValueError, match="zero_point is given"):
        Linear(format, good | {"zero_point": torch.zeros(())})


@each_format
def test_grouped_and_expert_weights_are_their_matrices(format: WeightFormat) -> None:
    ops = weight_ops(format)
    layers = [made(format, 64, 64, seed=i) for i in range(3)]
    tensors = {key: torch.stack([layer.tensors[key] for layer in layers]) for key in format.fields}
    x = torch.randn(2, 3, 64)
    if ops.grouped is None:
        with pytest.raises(ValueError, match="no grouped linear"):
            GroupedLinear(format, tensors)(x)
    else:
        got = GroupedLinear(format, tensors)(x)
        assert near(got, torch.stack([layer(x[:, i].contiguous()) for i, layer in enumerate(layers)], 1))
    down = {key: torch.stack([made(format, 64, 32, seed=i).tensors[key] for i in range(3)]) for key in format.fields}
    if ops.experts is None:
        with pytest.raises(ValueError, match="cannot be run"):
            Experts(Weight(format, tensors), Weight(format, down), SwiGLU(7.0))
        return
    experts = Experts(Weight(format, tensors), Weight(format, down), SwiGLU(7.0))
    chosen, gains = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([[0.25, 0.75]])
    want = torch.zeros(1, 64)
    for e, gain in zip(chosen[0].tolist(), gains[0], strict=True):
        gate, up = layers[e](x[:1, 0]).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate.clamp(max=7)) * up.clamp(-7, 7)
        want += gain * (hidden @ made(format, 64, 32, seed=e).dense().weight.T)
    assert near(experts(x[:1, 0], chosen, gains), want, 1e-5)


@each_format
def test_experts_with_biases_add_them_or_say_that_they_cannot(format: WeightFormat) -> None:
    if weight_ops(format).experts is None:
        return
    parts = [(made(format, 64, 64, seed=i), made(format, 64, 32, seed=i)) for i in range(3)]
    weights = [
        Weight(format, {key: torch.stack([pair[side].tensors[key] for pair in parts]) for key in format.fields})
        for side in (0, 1)
    ]
    biases, gate = (torch.randn(3, 64), torch.randn(3, 64)), SwiGLU(2.0, 1.702, 1.0)
    with pytest.raises(ValueError, match=r"bias of down is \(3, 63\); its weight needs \(3, 64\)"):
        Experts(*weights, gate, (biases[0], biases[1][:, 1:]))
    experts = Experts(*weights, gate, biases)
    x, chosen, gains = torch.randn(1, 64), torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([[0.25, 0.75]])
    if format.name.startswith(("nvfp4", "fp8", "mxfp8", "int4")):
        with pytest.raises(ValueError, match="no experts with biases"):
            experts(x, chosen, gains)
        return
    want = torch.zeros(1, 64)
    for e, gain in zip(chosen[0].tolist(), gains[0], strict=True):
        hidden = gate(parts[e][0](x) + biases[0][e])
        want += gain * (parts[e][1](hidden) + biases[1][e])
    assert near(experts(x, chosen, gains), want, 1e-5)


@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=str)
def test_an_embedding_needs_a_look_up(format: WeightFormat) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        Embedding(format, made(format, 64, 96).tensors, torch.float32)


@pytest.mark.parametrize("format", [NVFP4, INT4], ids=str)
def test_experts_need_a_format_that_has_them(
    format: WeightFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything of them is read: there is nothing to read here."""
    config = LlamaConfig.from_dict(hf_model("qwen2", hidden_size=96).config.to_dict())
    loader = Loader(Checkpoint(tmp_path, {}, {}), config, torch.float32)
    monkeypatch.setattr(loader, "format_of", lambda layer: format)
    without = dataclasses.replace(weight_ops(format), experts=None)
    monkeypatch.setattr("onegraph.models.experts.weight_ops", lambda format: without)
    with pytest.raises(CheckpointError, match=r"experts.0.w2 is .*, which routed experts cannot be run in"):
        read_experts(loader, [("experts.0.w1", "experts.0.w3")], ["experts.0.w2"], SwiGLU(), CPU)


CONFIGS: dict[WeightFormat, Any] = {
    E8P[2]: E8PConfig(bits=2).to_dict(),
    E8P[4]: E8PConfig(bits=4).to_dict(),
    TRELLIS[3]: TrellisConfig(bits=3).to_dict(),
    EXL3[4, "mcg"]: {"quant_method": "exl3", "bits": 4.0, "head_bits": 6, "codebook": "mcg"},
    NVFP4: written_config([]),
    MXFP4: {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    MXFP8: {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"},
    INT4: INT4Config("compressed-tensors", (32,)).to_dict(),
    **{
        format: {"quant_method": "fp8", "weight_block_size": None if block is None else list(block)}
        for block, format in FP8.items()
    },
}


@pytest.mark.parametrize("format", CONFIGS, ids=str)
def test_a_checkpoint_loads_to_the_model_of_its_numbers(format: WeightFormat, tmp_path: Path) -> None:
    """A model with every linear of its blocks in the format, but one that was kept where tensors tell it, against
    transformers with the numbers that the codes stand for; whole and decoded, and part by part."""
    hf = hf_model("qwen2", hidden_size=96, intermediate_size=128, head_dim=16)
    kept = None if format in ROTATED else "model.layers.1.mlp.up_proj"
    tensors: dict[str, Tensor] = {}
    for seed, (name, parameter) in enumerate(hf.named_parameters()):
        layer, _, kind = name.rpartition(".")
        if "proj" not in layer or kind == "bias" or layer == kept:
            tensors[name] = parameter.detach()
            continue
        found = stored(format, *parameter.shape, seed)
        tensors |= named(format, layer, found)
        read = Linear(format, format.read(Held(named(format, "a", found)), "a"))
        with torch.no_grad():
            parameter.copy_(read.dense().weight)
    config = hf.config.to_dict() | {"quantization_config": CONFIGS[format]}
    write_checkpoint(tmp_path / "m", config, tensors.items())
    row = torch.randint(0, 131, (24,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = hf(row.unsqueeze(0)).logits[0]
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        for decode in (True, False):
            model = Llama.load(checkpoint, decode=decode)
            got = Decoder(model, rows=1, max_context=32).feed([row.tolist()])[0]
            assert (got - want).abs().max() < 1e-4 * want.abs().max()
            assert model.blocks[0].qkv.fused == ("norm" in format.fuses and not decode and _joins(model))
        loader = Loader(checkpoint, LlamaConfig.from_dict(checkpoint.config), torch.float32)
        name = "model.layers.0.mlp.down_proj"
        whole = loader.linear(name, CPU)
        assert whole.format is format
        for part in (Part(rows=(0, 96), columns=(0, 128)), Part(rows=(32, 64)), Part(columns=(0, 128))):
            if part.rows == (32, 64) and format in (*ROTATED, FP8[128, 128]):
                part = Part(rows=(0, 96))
            cut = loader.linear(name, CPU, part)
            assert near(cut.dense().weight, whole.dense().weight[_slice(part.rows), _slice(part.columns)])
        if kept is not None:
            assert loader.linear(kept, CPU).format is DENSE


def _slice(span: tuple[int, int] | None) -> slice:
    return slice(None) if span is None else slice(*span)


def _joins(model: Llama) -> bool:
    return isinstance(model.blocks[0].qkv.linear, Linear)


def test_the_bias_is_with_the_first_part_of_the_inputs(tmp_path: Path) -> None:
    save_hf("qwen2", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        loader = Loader(checkpoint, LlamaConfig.from_dict(checkpoint.config), torch.float32)
        name = "model.layers.0.self_attn.q_proj"
        whole, x = loader.linear(name, CPU), torch.randn(2, 72)
        parts = [(0, 24), (24, 72)]
        linears = [loader.linear(name, CPU, Part(columns=span)) for span in parts]
        assert near(sum(layer(x[:, slice(*span)]) for layer, span in zip(linears, parts, strict=True)), whole(x))
        rows = loader.linear(name, CPU, Part(rows=(16, 48)))
        assert near(rows(x), whole(x)[:, 16:48])


# -------------------------------------------------------------------------------------------------------------- MXFP4


def test_mxfp4_is_transformers_own_for_gpt_oss() -> None:
    """Bit for bit, in bfloat16, for all codes and the scales that published files have."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 3, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 64, 3), generator=g, dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, scales)  # [experts, inputs, outputs]
    got = mxfp4_dequantize(blocks.flatten(-2), scales).bfloat16()
    assert torch.equal(got, want.transpose(1, 2))


def test_every_mxfp4_number_is_exact() -> None:
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    codes = torch.arange(16, dtype=torch.uint8).repeat(253, 1)  # the halves of each byte: the code, and zero
    scale = torch.arange(253, dtype=torch.uint8).unsqueeze(1)  # 6 times a larger one is beyond float32
    got = mxfp4_dequantize(codes, scale).double()
    for row, exponent in enumerate(range(-127, 126)):
        want = [sign * math.ldexp(value, exponent) for sign in (1, -1) for value in values]
        assert got[row, 0::2].tolist() == want
        assert not got[row, 1::2].any()


def test_deepseeks_names_are_read() -> None:
    codes, scale = stored(MXFP4, 4, 64, 0).values()
    file = Held({"a.weight": codes.view(torch.int8), "a.scale": scale.view(E8M0)})
    assert MXFP4.expected(file, "a", 4, 64) == {
        "a.weight": ((4, 32), (torch.uint8, torch.int8)),
        "a.scale": ((4, 2), (torch.uint8, E8M0, torch.float32, torch.bfloat16, torch.float16)),
    }
    assert all(torch.equal(a, b) for a, b in zip(MXFP4.read(file, "a").values(), (codes, scale), strict=True))


def test_scales_that_are_factors_become_exponents() -> None:
    """Each power of two that E8M0 has, the subnormal one too; any other number is named."""
    scale = torch.arange(255, dtype=torch.uint8).view(-1, 1)
    codes = torch.zeros(255, 16, dtype=torch.int8)
    file = {"a.weight": codes, "a.scale": scale.view(E8M0).float()}
    assert torch.equal(MXFP4.read(Held(file), "a")["scale"], scale)
    for wrong in (3.0, 0.0, -1.0, torch.inf, torch.nan, 2.0**-128):
        file["a.scale"][7] = wrong
        with pytest.raises(CheckpointError, match="'a' is in MXFP4 and has scales that are no powers of two"):
            MXFP4.read(Held(file), "a")


def test_a_scale_that_is_nan_is_named() -> None:
    tensors = stored(MXFP4, 4, 32, 0)
    tensors["scale"][2] = 255
    with pytest.raises(CheckpointError, match=r"'a' has scales that are NaN"):
        MXFP4.read(Held(named(MXFP4, "a", tensors)), "a")


# ------------------------------------------------------------------------------------------------------------ configs


def test_a_config_is_read_by_its_own_format() -> None:
    assert parse_quantization(None) is None
    for data in CONFIGS.values():
        config = parse_quantization(data)
        assert config is not None
        assert config.to_dict() == data
        assert parse_quantization(config.to_dict()) == config
    for data, message in (
        ("e8p", "must be an object"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not supported"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24', which is not"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "format 'int-quantized', which is not"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": "x"}, "no list"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": [1]}, "no list"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_quantization(data)


@each_format
def test_made_up_layers_keep_the_size_of_what_they_read(format: WeightFormat) -> None:
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in format.layout(256, 512).items()}
    format.fill(tensors, 512, torch.Generator().manual_seed(0))
    layer = Linear(format, format.read(Held(named(format, "a", tensors)), "a"))
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(1))
    assert 0.2 < float(layer(x.to(layer.weight.dtype) if format is DENSE else x).std()) < 5


def test_what_a_file_may_hold_beside_the_layers() -> None:
    configs = [parse_quantization(data) for data in CONFIGS.values()]
    assert (
        sum(config.ignored("model.layers.0.self_attn.k_proj.k_scale") for config in configs) == len(configs) - 4
    )  # neither E8P nor the trellis, nor EXL3
    for config in configs:
        assert not config.ignored("model.layers.0.self_attn.k_proj.weight_shape")
