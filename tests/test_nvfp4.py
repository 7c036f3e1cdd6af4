"""NVFP4 by its definition: numbers, layouts, layers. (Files: tests/test_nvfp4_files.py.)"""

import math

import pytest
import torch
from torch import Tensor

from onegraph.formats.nvfp4 import E2M1, E4M3, NVFP4
from onegraph.nn.experts import Experts
from onegraph.nn.linear import GroupedLinear, Linear, Weight, join
from onegraph.ops.activation import SwiGLU
from onegraph.ops.nvfp4 import (
    decode_e2m1,
    encode_e2m1,
    global_scale_of,
    nvfp4_dequantize_cache_rows,
    nvfp4_quantize,
    nvfp4_quantize_cache_rows,
)
from onegraph.ops.nvfp4_linear import nvfp4_dequantize, nvfp4_linear, random_weight
from onegraph.quant.nvfp4 import quantize_weight

VALUES = [*E2M1, *(-v for v in E2M1)]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(codes: Tensor, scale: Tensor, global_scale: float) -> Tensor:
    """The format's definition, element by element."""
    n, k = codes.shape[0], codes.shape[1] * 2
    out = torch.empty(n, k, dtype=torch.float64)
    factors = scale.view(E4M3).double()
    for i in range(n):
        for j in range(k):
            byte = int(codes[i, j // 2])
            out[i, j] = VALUES[byte >> 4 if j % 2 else byte & 15] * factors[i, j // 16] * global_scale
    return out


def test_every_code_decodes_to_its_number() -> None:
    pairs = torch.arange(256, dtype=torch.uint8)
    got = decode_e2m1(pairs.unsqueeze(1))
    for byte in range(256):
        assert got[byte].tolist() == [VALUES[byte & 15], VALUES[byte >> 4]]


def test_encoding_is_nearest_with_ties_to_even_and_saturates() -> None:
    x = torch.cat((torch.linspace(-8, 8, 3203), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
    x = torch.cat((x, -x))
    got = decode_e2m1(encode_e2m1(x))
    grid = torch.tensor(E2M1)
    for value, found in zip(x.tolist(), got.tolist(), strict=True):
        distance = (grid - abs(value)).abs()
        nearest = [i for i in range(8) if distance[i] == distance.min()]
        best = next(i for i in nearest if len(nearest) == 1 or i % 2 == 0)  # an even code has an even mantissa
        assert found == math.copysign(E2M1[best], value)


def test_dequantizing_a_weight_is_the_definition() -> None:
    codes, scale, _ = random_weight((5, 48), "cpu", rng())
    got = nvfp4_dequantize(codes, scale, torch.full((5,), 0.0123))
    torch.testing.assert_close(got.double(), by_hand(codes, scale, 0.0123), rtol=1e-6, atol=0)


def test_quantizing_rounds_to_nearest_under_the_nearest_scale() -> None:
    x = torch.randn(4, 64, generator=rng())
    unit = global_scale_of(x)
    assert float(unit) == pytest.approx(float(x.abs().max()) / 2688)
    codes, scale = nvfp4_quantize(x, unit)
    factors = scale.view(E4M3).float()
    assert factors.max() == 448
    for row, group in ((0, 0), (3, 2)):
        part = x[row, group * 16 : group * 16 + 16]
        wanted = (part.abs().max() / 6 / unit).to(E4M3).float()
        assert factors[row, group] == wanted
        step = wanted * unit
        got = nvfp4_dequantize(codes[row : row + 1], scale[row : row + 1], unit.reshape(1))
        grid = torch.tensor(VALUES) * step
        best = (part.unsqueeze(1) - grid).abs().min(1).values
        torch.testing.assert_close((got[0, group * 16 : group * 16 + 16] - part).abs(), best, rtol=1e-4, atol=1e-7)


def test_the_scale_search_is_worth_its_time() -> None:
    """A quarter less squared error on Gaussian weights, no group worse than round to nearest."""
    weight = torch.randn(64, 512, generator=rng())

    def errors(search: bool) -> Tensor:
        made = quantize_weight(weight, search=search)
        got = nvfp4_dequantize(made["codes"], made["scale"], made["global_scale"].expand(64).contiguous())
        return (got - weight).square().unflatten(1, (-1, 16)).sum(-1)

    nearest, searched = errors(False), errors(True)
    assert (searched <= nearest).all()
    assert searched.sum() < 0.78 * nearest.sum()
    assert nearest.sum() / weight.square().sum() < 0.0095


@pytest.mark.parametrize("x", [torch.zeros(2, 32), torch.full((2, 32), 1e-30), torch.full((1, 16), 1e30)])
def test_quantizing_extremes_stays_finite(x: Tensor) -> None:
    unit = global_scale_of(x)
    codes, scale = nvfp4_quantize(x, unit)
    got = nvfp4_dequantize(codes, scale, unit.expand(x.shape[0]).contiguous())
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, x, rtol=0.1, atol=1e-30)


def test_a_cache_row_is_not_a_weight() -> None:
    x = torch.randn(3, 2, 128, generator=rng())
    rows = nvfp4_quantize_cache_rows(x)
    assert rows.shape == (3, 2, 72)
    got = nvfp4_dequantize_cache_rows(rows, 128)
    codes, scale = nvfp4_quantize(x, torch.ones(()))
    assert torch.equal(rows[..., :64], codes)
    assert torch.equal(rows[..., 64:], scale)
    assert (got - x).norm() / x.norm() < 0.12
    with pytest.raises(ValueError, match="the scale of codes"):
        nvfp4_dequantize(rows.reshape(6, 72), rows.reshape(6, 72)[:, 64:].contiguous(), torch.ones(6))


def test_ops_refuse_scales_of_another_size() -> None:
    codes, scale, gain = random_weight((64, 128), "cpu", rng())
    x = torch.randn(1, 128)
    for bad in (scale[:, :4].contiguous(), scale.t().contiguous()):
        with pytest.raises(ValueError, match=r"scale of codes is .*\(64, 8\)"):
            nvfp4_linear(x, codes, bad, gain, None, False)
    with pytest.raises(ValueError, match="contiguous"):
        nvfp4_linear(x, codes, scale.t().contiguous().t(), gain, None, False)
    with pytest.raises(ValueError, match="last dimension of 128"):
        nvfp4_linear(x[:, :64].contiguous(), codes, scale, gain, None, False)


# ------------------------------------------------------------------------------------------------------------ layers


def test_fused_layers_keep_their_global_scales() -> None:
    parts = [
        Linear(NVFP4, {"codes": codes, "scale": scale, "global_scale": torch.full((len(codes),), 0.01 * (i + 1))})
        for i, (codes, scale, _) in enumerate(random_weight((16 * (i + 1), 64), "cpu", rng(i)) for i in range(3))
    ]
    x = torch.randn(2, 64, generator=rng(9))
    one = join(parts)
    assert isinstance(one, Linear)
    torch.testing.assert_close(one(x), torch.cat([part(x) for part in parts], -1), rtol=1e-5, atol=1e-5)
    assert torch.equal(parts[1].dense().weight, nvfp4_dequantize(*parts[1].tensors.values()))


def test_a_grouped_linear_is_one_linear_a_group() -> None:
    codes, scale, gain = random_weight((3, 16, 64), "cpu", rng())
    x = torch.randn(2, 5, 3, 64, generator=rng(1))
    whole = GroupedLinear(NVFP4, {"codes": codes, "scale": scale, "global_scale": gain})
    got = whole(x)
    for g in range(3):
        part = Linear(NVFP4, whole.at(g))
        torch.testing.assert_close(got[:, :, g], part(x[:, :, g].contiguous()), rtol=1e-5, atol=1e-5)


def test_experts_are_their_linears_one_by_one() -> None:
    dim, wide, limit = 64, 32, 0.7
    gate_up, down = random_weight((4, 2 * wide, dim), "cpu", rng()), random_weight((4, dim, wide), "cpu", rng(1))
    names = NVFP4.fields
    weights = [Weight(NVFP4, dict(zip(names, part, strict=True))) for part in (gate_up, down)]
    layer = Experts(*weights, SwiGLU(limit))
    x = torch.randn(3, dim, generator=rng(2))
    experts = torch.tensor([[0, 3], [2, 2], [1, 0]], dtype=torch.int32)
    gains = torch.rand(3, 2, generator=rng(3))
    got = layer(x, experts, gains)
    for t in range(3):
        total = torch.zeros(dim)
        for e, gain in zip(experts[t].tolist(), gains[t], strict=True):
            gate, up = nvfp4_linear(x[t], *(part[e] for part in gate_up), None, False).chunk(2)
            hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            total += gain * nvfp4_linear(hidden, *(part[e] for part in down), None, False)
        torch.testing.assert_close(got[t], total, rtol=1e-4, atol=1e-5)
