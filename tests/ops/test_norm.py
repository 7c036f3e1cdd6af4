"""RMSNorm against torch's own, the fused op against its parts, and what is refused."""

import math

import pytest
import torch

from onegraph.ops.activation import SwiGLU, geglu, swiglu
from onegraph.ops.norm import add_rms_norm, rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 4, 80), (7, 1000)])
def test_rms_norm_is_torchs_in_float64_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)
    want = torch.nn.functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    ulp = torch.finfo(dtype).eps * want.abs().clamp_min(torch.finfo(dtype).tiny)
    assert ((got.double() - want).abs() <= (0.51 if dtype != torch.float32 else 4) * ulp).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_equals_its_parts_bit_for_bit(dtype: torch.dtype) -> None:
    residual, x, weight = draw(5, 576, dtype=dtype), draw(5, 576, dtype=dtype) * 3, draw(576, dtype=dtype)
    total = residual + x
    want = rms_norm(total, weight, 1e-6)
    before = residual.clone()
    got, normed = add_rms_norm(residual, x, weight, 1e-6)
    assert torch.equal(normed, want)
    assert torch.equal(got, total)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_behind_a_norm_is_rounded_once(dtype: torch.dtype) -> None:
    """(add + weight * norm(x)) * scale in float64, and the norms of that sum equal those of their own."""
    add, x, scale = draw(5, 576, dtype=dtype), draw(4, 576, dtype=dtype)[:1].repeat(5, 1) * 3, torch.tensor([0.7])
    weight, weights = draw(576, dtype=dtype), draw(3, 576)
    want = torch.nn.functional.rms_norm(x.double(), (576,), weight.double(), 1e-6) + add.double()
    ulp = torch.finfo(dtype).eps * want.abs().clamp_min(1)
    for factor in (None, scale):
        exact = want if factor is None else want * factor.double()
        got = rms_norm(x, weight, 1e-6, add, factor)
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= (0.51 if dtype != torch.float32 else 4) * ulp).all()
        total, normed = add_rms_norm(add, x, weights, 1e-6, weight, factor)
        assert torch.equal(total, got)
        assert torch.equal(normed, torch.stack([rms_norm(got, each, 1e-6) for each in weights]))
        assert torch.equal(add_rms_norm(add, x, weights[1], 1e-6, weight, factor)[1], normed[1])


def test_two_parts_are_normed_summed_and_normed() -> None:
    add, x, beside, weights = draw(5, 64), draw(5, 65)[:, :64], draw(5, 66)[:, :64].contiguous(), draw(3, 64)
    norm = lambda x, i: torch.nn.functional.rms_norm(x.double(), (64,), weights[i].double(), 1e-6)  # noqa: E731
    want = (add.double() + norm(norm(x, 0) + norm(beside, 1), 2)) * 0.7
    got = rms_norm(x, weights, 1e-6, add, torch.tensor([0.7]), beside)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    total, normed = add_rms_norm(add, x, weights[0], 1e-6, weights, torch.tensor([0.7]), beside)
    assert torch.equal(total, got)
    assert torch.equal(normed, rms_norm(got, weights[0], 1e-6))


def test_large_and_tiny_values_survive() -> None:
    """300² overflows float16 and 1e-4² underflows it: the sum runs in float32."""
    for value in (300.0, 1e-4):
        x = torch.full((1, 64), value, dtype=torch.float16)
        assert rms_norm(x, torch.ones(64, dtype=torch.float16), 0.0).sub(1).abs().max() < 1e-3


def test_swiglu_is_gate_times_sigmoid_times_up() -> None:
    x = draw(4, 202) * 4
    gate, up = x.double().chunk(2, dim=-1)
    assert (swiglu(x).double() - gate * torch.sigmoid(gate) * up).abs().max() < 1e-5
    wild = torch.tensor([[-3e4, 3e4, 1.0, 1.0]], dtype=torch.float16)
    assert swiglu(wild).tolist() == [[0.0, 3e4]]
    limited = swiglu(x, 1.5).double()
    assert (limited - torch.nn.functional.silu(gate.clamp(max=1.5)) * up.clamp(-1.5, 1.5)).abs().max() < 1e-5
    gpt_oss = gate.clamp(max=1.5) * torch.sigmoid(1.702 * gate.clamp(max=1.5)) * (up.clamp(-1.5, 1.5) + 1)
    assert (SwiGLU(1.5, 1.702, 1.0)(x).double() - gpt_oss).abs().max() < 1e-5
    assert torch.equal(SwiGLU()(x), swiglu(x))
    assert torch.equal(SwiGLU(math.inf, 1.0, 0.0)(x), swiglu(x))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(2, 4, dtype=torch.int32), torch.ones(4), 1e-5), "x is torch.int32"),
        ((torch.ones(2, 4), torch.ones(5), 1e-5), r"weight has shape \(5,\), x has \(2, 4\)"),
        ((torch.ones(4, 2).t(), torch.ones(4), 1e-5), "must be contiguous"),
        ((torch.tensor(1.0), torch.ones(1), 1e-5), "one entry per element"),
        ((torch.ones(2, 4), torch.ones(4), -1.0), "eps is -1.0"),
        ((torch.ones(2, 4), torch.ones(4), float("nan")), "eps is nan"),
    ],
)
def test_rms_norm_refuses(args: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(*args)


def test_add_rms_norm_refuses_another_shape_or_dtype() -> None:
    weight = torch.ones(4)
    for residual in (torch.ones(1, 4), torch.ones(2, 4).half(), torch.ones(4, 2).t()):
        with pytest.raises(ValueError, match="residual"):
            add_rms_norm(residual, torch.ones(2, 4), weight, 1e-5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"add": torch.ones(1, 4)}, r"rms_norm: add is \(1, 4\)"),
        ({"add": torch.ones(2, 4, dtype=torch.half)}, "add is .* torch.float16"),
        ({"add": torch.ones(4, 2).t()}, "add has strides"),
        ({"scale": torch.ones(1)}, "scale or beside is given without add"),
        ({"add": torch.ones(2, 4), "scale": torch.ones(2)}, r"scale is \(2,\).*must be one float"),
        ({"add": torch.ones(2, 4), "scale": torch.ones(1, dtype=torch.int)}, "scale is .*must be one float"),
        ({"add": torch.ones(2, 4), "weight": torch.ones(3, 4)}, r"add is given and weight has shape \(3, 4\)"),
        ({"beside": torch.ones(2, 4)}, "scale or beside is given without add"),
        ({"add": torch.ones(2, 4), "beside": torch.ones(2, 4)}, r"weight has shape \(4,\); it must be \[D\], or"),
        ({"weight": torch.ones(0, 4)}, r"weight has shape \(0, 4\)"),
        ({"weight": torch.ones(4, 4)}, "up to 3 rows"),
    ],
)
def test_sums_and_scales_that_are_refused(args: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.ones(2, 4), args.pop("weight", torch.ones(4)), 1e-5, **args)


def test_add_rms_norm_refuses_a_scale_without_a_norm_or_another_norm() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(ValueError, match="scale or beside is given without post"):
        add_rms_norm(x, x, weight, 1e-5, None, torch.ones(1))
    with pytest.raises(ValueError, match=r"weight has shape \(5,\)"):
        add_rms_norm(x, x, weight, 1e-5, torch.ones(5))


def test_geglu_of_halves_apart_is_that_of_halves_together() -> None:
    x = draw(3, 5, 82) * 4
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(geglu(gate.contiguous(), up), geglu(x))
    for bad, message in (
        ((gate, up), "must be contiguous|be contiguous"),
        ((gate.contiguous(), up[..., :3]), "shapes must agree"),
        ((gate.contiguous(), up.half()), "up torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            geglu(*bad)


def test_swiglu_refuses() -> None:
    for bad, message in (
        (torch.ones(2, 3), "must be even"),
        (torch.ones(2, 4).long(), "gate_up is torch.int64"),
        (torch.ones(4, 2).t(), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            swiglu(bad)
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            swiglu(torch.ones(2, 4), limit)
    for numbers in ((1.0, 0.0, 0.0), (1.0, math.inf, 0.0), (1.0, 1.0, math.nan)):
        with pytest.raises(ValueError, match=r"must be (finite|above 0)"):
            SwiGLU(*numbers)
