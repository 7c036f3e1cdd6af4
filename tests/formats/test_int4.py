"""INT4 as AWQ, GPTQ and compressed-tensors publish it: every layout packed here by hand, one number at a time, and held
against what is read of it; what is refused; models against transformers with the weights that the files stand for."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models import Decoder, hf_model
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.files import CheckpointError
from onegraph.formats.int4 import ALL, INT4Format, is_int4
from onegraph.formats.int4_config import INT4Config
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.weight import Part
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.loader import Loader
from onegraph.nn.linear import ConcatLinear, Linear, join
from onegraph.ops.int4 import int4_linear, random_weight
from test_weight_format import Held

CPU = torch.device("cpu")
LAYOUTS = ("awq", "gptq", "gptq_v2", "packed", "packed asymmetric")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Truth:
    """A layer by its numbers: q int [n, k], scale and zero [n, groups], group [k]: that of each input."""

    q: Tensor
    scale: Tensor
    zero: Tensor
    group: Tensor

    @property
    def weight(self) -> Tensor:
        """float64 [n, k]"""
        zero, scale = self.zero[:, self.group], self.scale.double()[:, self.group]
        return (self.q - zero).double() * scale


def truth(n: int, k: int, columns: int, seed: int = 0, *, act_order: bool = False, zero: int | None = None) -> Truth:
    g, columns = rng(seed), k if columns == -1 else columns
    q = torch.randint(0, 16, (n, k), generator=g)
    scale = ((0.5 + torch.rand(n, k // columns, generator=g)) * (k**-0.5 / 6.5)).half()
    # 1 to 15: AutoGPTQ's first form has no way to write a zero of 0
    zeros = (
        torch.randint(1, 16, (n, k // columns), generator=g) if zero is None else torch.full((n, k // columns), zero)
    )
    group = torch.arange(k) // columns
    return Truth(q, scale, zeros, group[torch.randperm(k, generator=g)] if act_order else group)


def word(numbers: list[int]) -> int:
    """Eight numbers of four bits, lowest first, as an int32."""
    value = sum(number << (4 * i) for i, number in enumerate(numbers))
    return value - (1 << 32) if value >= 1 << 31 else value


def words(rows: list[list[int]], order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[a][8 b] numbers -> int32 [a, b]; number order[i] of its eight is i-th from the low end."""
    return torch.tensor(
        [[word([row[at + i] for i in order]) for at in range(0, len(row), 8)] for row in rows], dtype=torch.int32
    )


def packed(layout: str, layer: str, t: Truth) -> dict[str, Tensor]:
    """The tensors of a layer as a tool writes them."""
    awq = (0, 2, 4, 6, 1, 3, 5, 7)
    if layout == "awq":
        found = {
            "qweight": words(t.q.T.tolist(), awq),
            "qzeros": words(t.zero.T.tolist(), awq),
            "scales": t.scale.T.contiguous(),
        }
    elif layout.startswith("gptq"):
        found = {
            "qweight": words(t.q.tolist()).T.contiguous(),
            "qzeros": words((t.zero - int(layout == "gptq")).T.tolist()),
            "scales": t.scale.T.contiguous(),
            "g_idx": t.group.int(),
        }
    else:
        found = {
            "weight_packed": words(t.q.tolist()),
            "weight_scale": t.scale,
            "weight_shape": torch.tensor(t.q.shape),
        }
        if layout == "packed asymmetric":
            filled = torch.nn.functional.pad(t.zero, (0, 0, 0, -len(t.zero) % 8))
            found["weight_zero_point"] = words(filled.T.tolist()).T.contiguous()
        if not torch.equal(t.group, t.group.sort().values):
            found["weight_g_idx"] = t.group.int()
    return {f"{layer}.{suffix}": tensor for suffix, tensor in found.items()}


def config(layout: str, columns: int, *, act_order: bool = False, sym: bool = False) -> dict[str, Any]:
    """The quantization_config beside it."""
    if layout == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": columns, "zero_point": True, "version": "gemm"}
    if layout.startswith("gptq"):
        told = {"desc_act": act_order, "sym": sym, "checkpoint_format": layout}
        return {"quant_method": "gptq", "bits": 4, "group_size": columns} | told
    weights = {"num_bits": 4, "type": "int", "symmetric": layout == "packed"}
    weights |= {"strategy": "channel"} if columns == -1 else {"strategy": "group", "group_size": columns}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}


def made(layout: str, n: int, k: int, columns: int, **choices: Any) -> tuple[Truth, Held, INT4Format]:
    t = truth(n, k, columns, zero=8 if layout == "packed" else choices.pop("zero", None), **choices)
    held = Held(packed(layout, "a", t))
    told = parse_quantization(config(layout, columns, act_order=choices.get("act_order", False)))
    assert told is not None
    format = told.format_of("a", held)
    assert isinstance(format, INT4Format)
    return t, held, format


def rows_are(held: Held, format: INT4Format, weight: Tensor, part: Part = Part()) -> Linear:  # noqa: B008  # frozen
    layer = Linear(format, format.read(held, "a", part))
    assert torch.equal(layer.dense().weight, weight.float())
    x = torch.randn(3, weight.shape[1], generator=rng(9))
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T, rtol=1e-5, atol=1e-5)
    return layer


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k", "columns"), [(16, 64, 32), (8, 128, 64), (40, 256, 128), (24, 96, -1), (8, 32, 32)])
def test_each_layout_is_what_it_stands_for(layout: str, n: int, k: int, columns: int) -> None:
    t, held, format = made(layout, n, k, columns)
    assert is_int4(held, "a")
    assert format.columns == (ALL if columns in (-1, k) else columns)
    assert {name: tuple(held.info(name).shape) for name in held.tensors} == {
        name: shape for name, (shape, _) in format.expected(held, "a", n, k).items()
    }
    layer = rows_are(held, format, t.weight)
    assert not hasattr(layer, "order")
    assert layer.scale.dtype == torch.float16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_with_every_zero(layout: str) -> None:
    zeros = [8] if layout == "packed" else range(1 if layout == "gptq" else 0, 16)
    rows = -(-len(zeros) // 8) * 8
    t = Truth(
        torch.arange(32).remainder(16).repeat(rows, 1),
        torch.ones(rows, 1).half(),
        torch.tensor([zeros[min(i, len(zeros) - 1)] for i in range(rows)]).unsqueeze(1),
        torch.zeros(32, dtype=torch.int64),
    )
    told = INT4Config.from_dict(config(layout, -1))
    held = Held(packed(layout, "a", t))
    weight = Linear(format := told.format_of("a", held), format.read(held, "a")).dense().weight
    for i, row in enumerate(weight.tolist()):
        assert row == [code - int(t.zero[i]) for code in (*range(16), *range(16))]


@pytest.mark.parametrize("layout", ["packed", "packed asymmetric"])
def test_numbers_of_outputs_that_fill_no_word(layout: str) -> None:
    t, held, format = made(layout, 13, 64, 32)
    rows_are(held, format, t.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_keep_their_dtype(dtype: torch.dtype) -> None:
    t = truth(8, 64, 32, zero=8)
    t = replace(t, scale=(t.scale.float() * 1.01).to(dtype))
    held = Held(packed("packed", "a", t))
    format = INT4Config.from_dict(config("packed", 32)).format_of("a", held)
    assert format.fields["scale"].dtype == dtype
    rows_are(held, format, t.weight)


def test_gptq_models_own_subtraction_is_undone() -> None:
    """It takes 0x11111111 from whole words: a zero of 0 borrows from the number above it."""
    t = truth(16, 64, 32)
    t.zero[:] = torch.tensor([0, 5, 0, 0, 1, 15, 8, 0] * 2).unsqueeze(1)
    tensors = packed("gptq_v2", "a", t)
    tensors["a.qzeros"] = tensors["a.qzeros"] - 0x11111111
    held = Held(tensors)
    rows_are(held, INT4Config.from_dict(config("gptq", 32)).format_of("a", held), t.weight)


@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
def test_a_symmetric_file_has_zeros_of_8_whatever_form_it_announces(stored: str) -> None:
    t = truth(16, 64, 32, zero=8)
    held = Held(packed(stored, "a", t))
    rows_are(held, INT4Config.from_dict(config("gptq", 32, sym=True)).format_of("a", held), t.weight)
    if stored == "gptq_v2":  # not symmetric: 8 is a 9
        format = INT4Config.from_dict(config("gptq", 32)).format_of("a", held)
        rows_are(held, format, replace(t, zero=t.zero + 1).weight)


# ----------------------------------------------------------------------------------------------------------- act-order


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "packed", "packed asymmetric"])
def test_act_order(layout: str) -> None:
    t, held, format = made(layout, 24, 256, 64, act_order=True)
    layer = rows_are(held, format, t.weight)
    assert format.order
    assert layer.order.dtype == torch.int32
    assert torch.equal(t.group[layer.order.long()], torch.arange(256) // 64)
    rows_are(held, format, t.weight[8:20], Part(rows=(8, 20)))
    with pytest.raises(ValueError, match="act-order cannot be cut"):
        layer.part(columns=(0, 64))


@pytest.mark.parametrize("told", [{"desc_act": True}, {"desc_act": True, "static_groups": True}, {}])
def test_groups_in_order_need_no_order(told: dict[str, Any]) -> None:
    t = truth(8, 128, 32)
    for g_idx in (t.group.int(), torch.zeros(128, dtype=torch.int32), None):  # zeros: never filled in
        tensors = packed("gptq_v2", "a", t) | {"a.g_idx": g_idx}
        held = Held({name: tensor for name, tensor in tensors.items() if tensor is not None})
        if g_idx is None and told == {"desc_act": True}:
            continue
        format = INT4Config.from_dict(config("gptq_v2", 32) | told).format_of("a", held)
        assert format.order == (told == {"desc_act": True})
        layer = rows_are(held, format, t.weight)
        if format.order:
            assert torch.equal(layer.order, torch.arange(128, dtype=torch.int32))


def test_one_group_has_no_order() -> None:
    t = truth(8, 64, -1)
    held = Held(packed("gptq_v2", "a", t))
    format = INT4Config.from_dict(config("gptq_v2", -1, act_order=True)).format_of("a", held)
    assert not format.order
    rows_are(held, format, t.weight)


def test_siblings_join_where_they_have_one_order() -> None:
    t, _, format = made("gptq_v2", 8, 128, 32, act_order=True)
    other = replace(truth(16, 128, 32, seed=1), group=t.group)
    third = truth(8, 128, 32, seed=2, act_order=True)
    layers = [Linear(format, format.read(Held(packed("gptq_v2", "a", one)), "a")) for one in (t, other, third)]
    joined = join(layers[:2])
    assert isinstance(joined, Linear)
    assert torch.equal(joined.dense().weight, torch.cat([t.weight, other.weight]).float())
    assert isinstance(join(layers), ConcatLinear)


# --------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [32, -1])
def test_parts_are_slices(layout: str, columns: int) -> None:
    t, held, format = made(layout, 24, 128, columns)
    whole = Linear(format, format.read(held, "a"))
    for part in (Part(rows=(8, 24)), Part(rows=(3, 13)), Part(columns=(32, 96)), Part(rows=(5, 6), columns=(64, 128))):
        format.check_part(24, 128, part)
        rows, cols = (slice(None) if span is None else slice(*span) for span in (part.rows, part.columns))
        rows_are(held, format, t.weight[rows, cols], part)
        assert torch.equal(
            whole.part(rows=part.rows, columns=part.columns).dense().weight, t.weight[rows, cols].float()
        )
    for span in ((16, 64), (0, 40)):
        with pytest.raises(ValueError, match="cuts a group of 32"):
            format.check_part(24, 128, Part(columns=span))


# ------------------------------------------------------------------------------------------------------------- refusals

I32 = {"dtype": torch.int32}
DAMAGE: list[tuple[str, str, dict[str, Any], str]] = [
    ("no scales", "awq", {"scales": None}, "'a.scales' is missing"),
    ("no scales", "packed", {"weight_scale": None}, "'a.weight_scale' is missing"),
    ("scales of another layer", "gptq", {"scales": torch.ones(2, 24).half()}, r"'a.qweight' has shape \[8, 16\]"),
    ("gemv's words", "awq", {"qweight": torch.zeros(16, 8, **I32)}, r"'a.qweight' has shape \[16, 8\]"),
    ("scales of no groups", "gptq", {"scales": torch.ones(3, 16).half()}, "'a.scales' has 3 groups for 64 inputs"),
    ("groups of 16", "packed", {"weight_scale": torch.ones(16, 4).half()}, "'a.weight_scale' has 4 groups for 64"),
    ("other groups", "gptq", {"scales": torch.ones(1, 16).half()}, "says groups of 32"),
    ("integer scales", "packed", {"weight_scale": torch.ones(16, 2, **I32)}, "'a.weight_scale' is torch.int32"),
    ("flat words", "packed", {"weight_packed": torch.ones(16, **I32)}, "both have two dimensions"),
    ("flat scales", "awq", {"scales": torch.ones(16).half()}, "'a.scales'"),
    ("no zeros", "gptq", {"qzeros": None}, "missing: 'a.qzeros'"),
    ("no zeros", "packed asymmetric", {"weight_zero_point": None}, "missing: 'a.weight_zero_point'"),
    ("zeros of another layer", "awq", {"qzeros": torch.zeros(2, 3, **I32)}, r"'a.qzeros' has shape \[2, 3\]"),
    ("zeros not packed", "gptq", {"qzeros": torch.zeros(2, 16, **I32)}, r"'a.qzeros' has shape \[2, 16\]"),
    ("g_idx of another layer", "gptq", {"g_idx": torch.zeros(32, **I32)}, r"'a.g_idx' has shape \[32\]"),
    ("words of bytes", "awq", {"qweight": torch.zeros(64, 2, dtype=torch.uint8)}, "'a.qweight' is uint8"),
    ("NaN", "awq", {"scales": torch.full((2, 16), float("nan")).half()}, "'a.scales' holds NaN"),
    ("infinity", "packed", {"weight_scale": torch.full((16, 2), float("inf"))}, "'a.weight_scale' holds NaN"),
    ("a group too many", "gptq", {"g_idx": torch.arange(64, **I32) // 16}, "'a.g_idx' is no division of 64 inputs"),
    ("a negative group", "gptq", {"g_idx": torch.arange(64, **I32) // 32 - 1}, "'a.g_idx' is no division"),
    ("unequal groups", "gptq", {"g_idx": (torch.arange(64) > 40).int()}, "'a.g_idx' is no division"),
    ("a lie about order", "gptq", {"g_idx": 1 - torch.arange(64, **I32) // 32}, "does not say desc_act"),
    (
        "a shape of another layer",
        "packed",
        {"weight_shape": torch.tensor([16, 32])},
        r"'a.weight_shape' says \[16, 32\]",
    ),
]


@pytest.mark.parametrize(
    ("layout", "change", "message"), [d[1:] for d in DAMAGE], ids=[f"{d[1]}: {d[0]}" for d in DAMAGE]
)
def test_damage_is_refused_by_name(layout: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = packed(layout, "a", truth(16, 64, 32, zero=8 if layout == "packed" else None))
    tensors |= {f"a.{suffix}": tensor for suffix, tensor in change.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, INT4Config.from_dict(config(layout, 32)))


def load(path: Path, told: INT4Config) -> None:
    """Layer "a" of 16 x 64 as a loader takes it: what the file holds against what is asked for, then the values."""
    with Checkpoint.open(path) as file:
        held = Held({name: file._read(name, None) for name in file.names})
        format = told.format_of("a", held)
        file.check(format.expected(held, "a", 16, 64))
        format.read(held, "a")


def test_a_layout_that_the_config_does_not_say_is_refused() -> None:
    for layout, other in (("awq", "gptq"), ("gptq", "awq"), ("packed", "gptq"), ("gptq", "packed")):
        held = Held(packed(layout, "a", truth(16, 64, 32, zero=8)))
        with pytest.raises(CheckpointError, match=r"'a' has the tensors of .* the two disagree"):
            INT4Config.from_dict(config(other, 32)).format_of("a", held)


def test_bad_arguments_are_refused() -> None:
    codes, scale, zero = random_weight(8, 64, 32, "cpu", rng())
    x = torch.ones(2, 64)
    for args, message in (
        ((x, codes.int(), scale, zero, None, None, False), "codes is torch.int32"),
        ((x, codes, scale[:, :1].expand(8, 3).contiguous(), zero, None, None, False), "scale of codes is"),
        (
            (x, codes, scale.repeat(1, 2), zero.repeat(1, 2), None, None, False),
            "groups of a multiple of 32",
        ),
        ((x, codes, scale.int(), zero, None, None, False), "scale of codes is torch.int32"),
        ((x, codes, scale, zero.int(), None, None, False), "zero of codes is torch.int32"),
        ((x, codes, scale, zero, torch.arange(64), None, False), "order of codes is torch.int64"),
        ((x, codes, scale, zero, torch.arange(32).int(), None, False), "order of codes is torch.int32"),
        ((x, codes, scale.t().contiguous().t(), zero, None, None, False), "scale of codes on cpu has strides"),
        ((x[:, :32], codes, scale, zero, None, None, False), "x is torch.float32"),
        ((x, codes, scale, zero, None, torch.ones(7), False), "bias is torch.float32"),
        (
            (x, codes.unsqueeze(0), scale.unsqueeze(0), zero.unsqueeze(0), None, None, False),
            r"uint8 \[n, k/2\]",
        ),
        ((x, codes.to("meta"), scale, zero, None, None, False), "contiguous on meta needed"),
    ):
        with pytest.raises(ValueError, match=message):
            int4_linear(*args)


# -------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("layout", "act_order"), [(layout, on) for layout in LAYOUTS for on in (False, True) if layout != "awq" or not on]
)
def test_a_model_in_each_layout_is_transformers_with_the_same_numbers(
    layout: str, act_order: bool, tmp_path: Path
) -> None:
    """Every linear of the blocks but one, which was kept; whole and decoded."""
    hf = hf_model("qwen2", hidden_size=96, intermediate_size=128, head_dim=16)
    kept, columns = "model.layers.1.mlp.up_proj", 32
    tensors: dict[str, Tensor] = {}
    order: dict[tuple[str, int], Tensor] = {}
    for seed, (name, parameter) in enumerate(hf.named_parameters()):
        layer, _, kind = name.rpartition(".")
        if "proj" not in layer or kind == "bias" or layer == kept:
            tensors[name] = parameter.detach()
            continue
        t = truth(*parameter.shape, columns, seed, act_order=act_order, zero=8 if layout == "packed" else None)
        if not layer.endswith("v_proj"):  # siblings of one order, and one of another
            t.group = order.setdefault((layer.rpartition(".")[0], parameter.shape[1]), t.group)
        tensors |= packed(layout, layer, t)
        if layout == "gptq" and f"{layer}.bias" not in dict(hf.named_parameters()):  # as older versions of AutoGPTQ
            tensors[f"{layer}.bias"] = torch.zeros(len(t.q)).half()
        with torch.no_grad():
            parameter.copy_(t.weight)
    told = {"quantization_config": config(layout, columns, act_order=act_order)}
    (tmp_path / "config.json").write_text(json.dumps(hf.config.to_dict() | told, default=str))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    if layout == "gptq":
        spare = "model.layers.0.self_attn.o_proj.bias"
        (tmp_path / "bias").mkdir()
        (tmp_path / "bias" / "config.json").write_text((tmp_path / "config.json").read_text())
        changed = tensors | {spare: torch.ones_like(tensors[spare])}
        save_file({name: t.contiguous() for name, t in changed.items()}, tmp_path / "bias" / "model.safetensors")
        with Checkpoint.open(tmp_path / "bias") as checkpoint, pytest.raises(CheckpointError, match="bias is not zero"):
            Llama.load(checkpoint)
    row = torch.randint(0, 131, (24,), generator=rng(3))
    with torch.no_grad():
        want = hf(row.unsqueeze(0)).logits[0]
    with Checkpoint.open(tmp_path) as checkpoint:
        for decode in (True, False):
            model = Llama.load(checkpoint, decode=decode)
            got = Decoder(model, rows=1, max_context=32).feed([row.tolist()])[0]
            assert (got - want).abs().max() < 1e-4 * want.abs().max()
        loader = Loader(checkpoint, LlamaConfig.from_dict(checkpoint.config), torch.float32)
        assert loader.linear(kept, CPU).format is DENSE
        name = "model.layers.0.mlp.down_proj"
        whole = loader.linear(name, CPU)
        assert isinstance(whole.format, INT4Format)
        assert whole.format.order == act_order
        cut = loader.linear(name, CPU, Part(rows=(32, 60)))
        assert torch.equal(cut.dense().weight, whole.dense().weight[32:60])
        if not act_order:
            cut = loader.linear(name, CPU, Part(columns=(64, 128)))
            assert torch.equal(cut.dense().weight, whole.dense().weight[:, 64:])
