"""FP8: every code and scale, every shape of scales that files have, blocks cut short, what is refused and how it is
named. What all formats share is in test_weight_format.py."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.formats.files import CheckpointError
from onegraph.formats.fp8 import FP8, FP8Format, fp8_of
from onegraph.formats.mxfp4 import E8M0
from onegraph.formats.nvfp4 import E4M3
from onegraph.formats.weight import Part
from onegraph.nn.linear import ConcatLinear, Linear, join
from onegraph.ops.fp8 import fp8_dequantize, fp8_experts, fp8_linear, random_weight
from test_weight_format import Held, made

BLOCKS, SMALL, MX, ROWS = FP8[128, 128], FP8[32, 32], FP8[1, 32], FP8[None]
each_format = pytest.mark.parametrize("format", FP8.values(), ids=str)


def e4m3(code: int) -> float:
    """The definition: sign, four bits of exponent biased by 7, three of mantissa; no infinities."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9))


TABLE = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


def by_hand(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """float64 [n, k] by the definition, each number's scale looked up by its own place."""
    i, j = torch.meshgrid(*(torch.arange(size) for size in codes.shape), indexing="ij")
    return TABLE[codes.int()] * (scale[i // rows, j // columns] if columns else scale[i]).double()


def layer(scale: Tensor, n: int, k: int, name: str = "weight_scale", seed: int = 0) -> Held:
    codes = random_weight((n, k), 1, 0, "cpu", torch.Generator().manual_seed(seed))[0]
    return Held({"a.weight": codes.view(E4M3), f"a.{name}": scale})


def test_every_code_is_what_the_definition_says() -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).unsqueeze(0)
    got = fp8_dequantize(codes, torch.ones(1), 1, 0)
    assert got[0].tolist() == [e4m3(c) for c in codes[0].tolist()]
    assert got.abs().max() == 448


def test_every_exponent_is_a_power_of_two() -> None:
    """All 255 bytes of E8M0 as either dtype, in front of every code that float32 can hold with it."""
    scale = torch.arange(255, dtype=torch.uint8).unsqueeze(1)
    for stored in (scale, scale.view(E8M0)):
        tensors = MX.read(layer(stored, 255, 32), "a")
        assert tensors["scale"][:, 0].tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    exponents = torch.arange(127 - 116, 127 + 119)  # 2^-9 times the least is float32's least subnormal's neighbour
    gains = torch.ldexp(torch.ones(len(exponents)), exponents - 127)
    got = fp8_dequantize(codes.repeat(len(gains), 1), gains, 1, 0).double()
    want = torch.tensor([e4m3(c) for c in codes.tolist()], dtype=torch.float64) * gains.double().unsqueeze(1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_of_a_scale_is_its_number(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    scale = (torch.rand(2, 3, generator=g) * 1e-3 + 1e-4).to(dtype)
    got = BLOCKS.read(layer(scale, 200, 300, "weight_scale_inv"), "a")
    assert got["scale"].dtype == torch.float32
    assert torch.equal(got["scale"], scale.float())
    want = by_hand(got["codes"], scale.double(), 128, 128)
    weight = fp8_dequantize(*got.values(), 128, 128)
    assert torch.equal(weight, want.float())
    if dtype != torch.float32:
        assert torch.equal(weight.double(), want)


@each_format
@pytest.mark.parametrize("n", [1, 127, 129, 200])
def test_blocks_at_the_ends_may_be_cut_short(format: FP8Format, n: int) -> None:
    k = 150
    codes, scale = random_weight((n, k), format.rows, format.columns, "cpu", torch.Generator().manual_seed(n))
    want = by_hand(codes, scale, format.rows, format.columns)
    linear = Linear(format, {"codes": codes, "scale": scale})
    assert torch.equal(linear.dense().weight, want.float())
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(1))
    assert ((linear(x).double() - x.double() @ want.T).norm() <= 1e-6 * (x.double() @ want.T).norm()).item()


# --------------------------------------------------------------------------------------------------- shapes of scales

SHAPES: list[tuple[str, FP8Format, tuple[int, ...], torch.dtype, str]] = [
    ("DeepSeek-V4", BLOCKS, (2, 3), E8M0, "scale"),
    ("its bytes", BLOCKS, (2, 3), torch.uint8, "scale"),
    ("DeepSeek-V4 Base", BLOCKS, (2, 3), torch.float32, "scale"),
    ("V4.1", SMALL, (7, 10), E8M0, "scale"),
    ("Qwen3", BLOCKS, (2, 3), torch.bfloat16, "weight_scale_inv"),
    ("FP8_PB_WO", BLOCKS, (2, 1, 3, 1), torch.float32, "weight_scale"),
    ("MXFP8", MX, (200, 10), torch.uint8, "weight_scale_inv"),
    ("a tensor", ROWS, (), torch.float32, "weight_scale"),
    ("a tensor of one", ROWS, (1,), torch.bfloat16, "weight_scale"),
    ("a channel", ROWS, (200,), torch.float32, "weight_scale"),
    ("a channel, upright", ROWS, (200, 1), torch.bfloat16, "weight_scale"),
]


@pytest.mark.parametrize(("format", "shape", "dtype", "name"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES])
def test_the_shape_of_the_scales_tells_the_format(
    format: FP8Format, shape: tuple[int, ...], dtype: torch.dtype, name: str
) -> None:
    n, k = 200, 300
    g = torch.Generator().manual_seed(3)
    exponents = torch.randint(110, 120, shape, generator=g, dtype=torch.uint8)
    number = torch.ldexp(torch.ones(shape), exponents.int() - 127)
    stored = exponents.view(dtype) if dtype in (E8M0, torch.uint8) else number.to(dtype)
    held = layer(stored, n, k, name)
    assert fp8_of(held, "a") is format
    if format.block not in (None, (1, 32)):
        assert fp8_of(held, "a", format.block) is format
    expected = format.expected(held, "a", n, k)
    assert expected[f"a.{name}"][0] == shape
    assert dtype in expected[f"a.{name}"][1]
    tensors = format.read(held, "a")
    grid = (7, 10) if format is SMALL else (2, 3)
    full = number.expand(200) if number.numel() == 1 else number
    full = full.reshape({BLOCKS: grid, SMALL: grid, MX: (200, 10), ROWS: (200,)}[format])
    assert torch.equal(tensors["scale"], full)
    weight = Linear(format, tensors).dense().weight
    assert torch.equal(weight.double(), by_hand(tensors["codes"], full, format.rows, format.columns))
    unit = max(format.rows, 1) if format.block else 1
    first = unit if unit < n else 0
    part = Part(rows=(first, n), columns=(128, 300))
    assert torch.equal(Linear(format, format.read(held, "a", part)).dense().weight, weight[first:, 128:])


def test_scales_of_no_known_shape_are_named() -> None:
    for shape in ((3, 2), (4, 5), (200, 3), (1, 200), (2, 3, 1), (199,)):
        with pytest.raises(CheckpointError, match=r"'a.weight_scale' has .*; scales of a weight of 200 x 300 are"):
            fp8_of(layer(torch.ones(shape), 200, 300), "a")
    with pytest.raises(CheckpointError, match=r"shape \[7, 10\]; .* are \[2, 3\] .* or \[200\]"):
        fp8_of(layer(torch.ones(7, 10), 200, 300), "a", (128, 128))
    with pytest.raises(CheckpointError, match=r"'a.weight' is float8_e4m3fn and has no scale"):
        fp8_of(Held({"a.weight": torch.zeros(2, 2).to(E4M3)}), "a")
    with pytest.raises(CheckpointError, match=r"'a.weight' is float8_e4m3fn \[2\]"):
        fp8_of(Held({"a.weight": torch.zeros(2).to(E4M3)}), "a")


@pytest.mark.parametrize("bad", [0.0, -1.0, -0.0, math.inf, -math.inf, math.nan])
@each_format
def test_a_scale_that_is_no_factor_is_named(format: FP8Format, bad: float) -> None:
    scale = torch.ones(format.fields["scale"].shape(200, 300))
    scale.view(-1)[-1] = bad
    with pytest.raises(CheckpointError, match=r"'a.weight_scale' holds scales that are zero, negative"):
        format.read(layer(scale, 200, 300), "a")


def test_an_exponent_of_255_is_nan() -> None:
    for dtype in (torch.uint8, E8M0):
        scale = torch.full((200, 10), 127, dtype=torch.uint8)
        scale[7, 3] = 255
        with pytest.raises(CheckpointError, match=r"'a.weight_scale' holds scales that are .* NaN"):
            MX.read(layer(scale.view(dtype), 200, 300), "a")


def test_a_scale_of_integers_is_never_a_number() -> None:
    """Bytes of E8M0 are exponents; any other integer is refused, whatever it would be worth as a number."""
    assert MX.read(layer(torch.full((4, 1), 126, dtype=torch.uint8), 4, 32), "a")["scale"].eq(0.5).all()
    for dtype in (torch.int8, torch.int32, torch.int64, E4M3):
        with pytest.raises(CheckpointError, match=r"'a.weight_scale' holds codes of .*; they are never taken"):
            MX.read(layer(torch.ones(4, 1).to(dtype), 4, 32), "a")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@each_format
def test_a_code_that_is_nan_is_named(format: FP8Format, code: int) -> None:
    held = layer(torch.ones(format.fields["scale"].shape(200, 300)), 200, 300)
    held.tensors["a.weight"].view(torch.uint8)[199, 299] = code
    with pytest.raises(CheckpointError, match=r"'a.weight' holds NaN codes"):
        format.read(held, "a")
    held.tensors["a.weight"].view(torch.uint8)[199, 299] = code ^ 1  # 448, the largest
    assert Linear(format, format.read(held, "a")).dense().weight.abs().max() == 448


# ---------------------------------------------------------------------------------------------------- cut and joined


def test_siblings_join_where_rows_keep_their_blocks() -> None:
    for format, n, joins in ((BLOCKS, 128, True), (BLOCKS, 100, False), (SMALL, 96, True), (SMALL, 100, False)):
        parts = [made(format, n, 96, seed=1), made(format, 130, 96, seed=2)]
        one, x = join(parts), torch.randn(3, 96)
        assert isinstance(one, Linear) is joins
        assert isinstance(one, ConcatLinear) is not joins
        want = torch.cat([part(x) for part in parts], -1)
        assert (one(x) - want).norm() <= 1e-6 * want.norm()
    for format in (MX, ROWS):
        assert isinstance(join([made(format, n, 96, seed=n) for n in (5, 7)]), Linear)
    assert isinstance(join([made(BLOCKS, 128, 96), made(ROWS, 128, 96)]), ConcatLinear)


def test_cuts_are_between_blocks() -> None:
    linear = made(BLOCKS, 300, 200)
    assert linear.part(rows=(256, 300), columns=(128, 200)).scale.shape == (1, 1)
    for span in ((64, 300), (0, 64)):
        with pytest.raises(ValueError, match=r"rows .* cuts a group of 128"):
            linear.part(rows=span)
    with pytest.raises(ValueError, match=r"columns .* cuts a group of 128"):
        linear.part(columns=(32, 160))
    assert made(ROWS, 300, 200).part(rows=(7, 9), columns=(3, 11)).codes.shape == (2, 8)
    assert made(MX, 300, 200).part(rows=(7, 9), columns=(32, 64)).codes.shape == (2, 32)


# ---------------------------------------------------------------------------------------------------------------- ops


def args(n: int = 64, k: int = 96) -> list[Any]:
    codes, scale = random_weight((n, k), 32, 32, "cpu", torch.Generator().manual_seed(0))
    return [torch.randn(2, k), codes, scale, None, 32, 32, False]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.randn(2, 95), "last dimension of 96"),
        (0, torch.ones(2, 96, dtype=torch.int32), "x is torch.int32"),
        (1, torch.zeros(64, 96), "codes is torch.float32"),
        (1, torch.zeros(64, dtype=torch.uint8), "codes is torch.uint8"),
        (2, torch.ones(2, 3).half(), "needs float32"),
        (2, torch.ones(3, 3), r"needs float32 \(2, 3\)"),
        (2, torch.ones(2, 6)[:, ::2], "contiguous"),
        (3, torch.ones(63), "bias is"),
        (4, 0, "makes no sense"),
        (5, 0, "makes no sense"),
        (5, 64, "needs float32"),
    ],
)
def test_a_linear_refuses_what_does_not_fit(index: int, value: Any, message: str) -> None:
    given = args()
    assert fp8_linear(*given).shape == (2, 64)
    given[index] = value
    with pytest.raises(ValueError, match=message):
        fp8_linear(*given)


def test_experts_of_few_and_of_many_tokens_are_the_same() -> None:
    g = torch.Generator().manual_seed(5)
    gate_up, down = random_weight((4, 64, 64), 32, 32, "cpu", g), random_weight((4, 64, 32), 32, 32, "cpu", g)
    x, gains = torch.randn(9, 64, generator=g), torch.rand(9, 2, generator=g)
    chosen = torch.rand(9, 4, generator=g).argsort(1)[:, :2].int().contiguous()
    rest = (*gate_up, *down, 32, 32, 0.5, 1.702, 1.0)
    whole = fp8_experts(x, chosen, gains, *rest)
    each = torch.cat([fp8_experts(x[i : i + 1], chosen[i : i + 1], gains[i : i + 1], *rest) for i in range(9)])
    assert (whole - each).norm() <= 1e-6 * each.norm()
    first, second = (fp8_dequantize(*pair, 32, 32).double() for pair in (gate_up, down))
    gate, up = (x[3].double() @ first[chosen[3].long()].transpose(1, 2)).chunk(2, -1)
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    hidden = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    want = sum(gains[3, i] * (second[e] @ hidden[i]) for i, e in enumerate(chosen[3].tolist()))
    assert (whole[3].double() - want).norm() <= 1e-5 * want.norm()
