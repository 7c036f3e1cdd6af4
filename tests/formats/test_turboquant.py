"""The quantizer against its theory: tables recomputed, distortions exact, `prod` unbiased, bounds and settings."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onegraph.formats.turboquant import (
    BITS,
    HEAD_DIMS,
    TurboQuantConfig,
    codebook,
    hadamard_matrix,
    mean_abs_coordinate,
    parse_kv,
    projection,
    rotation,
)
from onegraph.ops.turboquant import dequantize, quantize

GAUSSIAN = {1: 0.3634, 2: 0.1175, 3: 0.03455, 4: 0.00950}  # the limit of large d


def cells(d: int, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mass, integral of t) of each positive centroid's cell under the exact law, by Gauss-Legendre quadrature."""
    log_c = math.lgamma(d / 2) - math.lgamma((d - 1) / 2) - 0.5 * math.log(math.pi)
    edges = np.concatenate(([0.0], (centroids[1:] + centroids[:-1]) / 2, [1.0]))
    nodes, weights = np.polynomial.legendre.leggauss(64)
    mass = np.zeros(len(centroids))
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        cuts = np.linspace(low, high, 17)
        middle, half = (cuts[1:] + cuts[:-1]) / 2, (cuts[1:] - cuts[:-1]) / 2
        t = middle[:, None] + half[:, None] * nodes
        mass[i] = (np.exp(log_c + (d - 3) / 2 * np.log1p(-t * t)) * weights * half[:, None]).sum()
    antiderivative = -math.exp(log_c) * np.maximum(1 - edges**2, 0.0) ** ((d - 1) / 2) / (d - 1)
    return mass, np.diff(antiderivative)


def centroids(d: int, bits: int) -> np.ndarray:
    return codebook(d, bits)[::2].double().numpy()


def distortion(d: int, bits: int) -> float:
    """E ||x - x~||^2 of a unit vector: 1 - d E[c^2], as every centroid is the mean of its cell; 1 at 0 bits."""
    if bits == 0:
        return 1.0
    c = centroids(d, bits)
    return 1 - 2 * d * float((cells(d, c)[0] * c * c).sum())


def unit_vectors(count: int, d: int, seed: int = 0) -> Tensor:
    x = torch.randn(count, d, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_tables_are_lloyd_max_for_the_exact_law(d: int, bits: int) -> None:
    """The density is log-concave, so the stationary codebook is the optimal one: each centroid its cell's mean."""
    table = codebook(d, bits)
    assert torch.equal(table[1::2], -table[::2])
    assert (table[::2].diff() > 0).all()
    found = centroids(d, bits)
    mass, moment = cells(d, found)
    assert np.abs(moment / mass - found).max() * math.sqrt(d) < 2e-7
    assert abs(mass.sum() - 0.5) < 1e-12


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_tables_recomputed_from_a_poor_start(bits: int) -> None:
    for d in HEAD_DIMS:
        c = np.linspace(0.3, 1.9, 2 ** (bits - 1)) / math.sqrt(d)
        for _ in range(400):
            before, (mass, moment) = c, cells(d, c)
            c = moment / mass
            if np.abs(c - before).max() * math.sqrt(d) < 1e-9:  # one bit is there at once
                break
        assert np.abs(c - centroids(d, bits)).max() * math.sqrt(d) < 1e-6


def test_distortion_falls_as_4_to_the_minus_bits_between_the_bounds() -> None:
    for d in HEAD_DIMS:
        for bits in BITS:
            times = distortion(d, bits) * 4**bits
            assert 1 < times < math.sqrt(3) * math.pi / 2, (d, bits)  # lower bound of any quantizer, the paper's upper
            assert times > distortion(d, bits - 1) * 4 ** (bits - 1)  # rises to the bound, that of high rates
    for bits, limit in GAUSSIAN.items():
        gaps = [limit - distortion(d, bits) for d in (64, 128, 256)]
        assert gaps[0] > gaps[1] > gaps[2] > -5e-5  # to the Gaussian value from below, about as 1 / d
        assert gaps[2] < limit * 0.015


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_measured_distortion_is_the_exact_one(d: int) -> None:
    x = unit_vectors(2000, d)
    for kind in ("hadamard", "qr"):
        y = x @ rotation(d, kind).T / math.sqrt(d)
        for bits in BITS:
            table = codebook(d, bits)
            errors = (dequantize(quantize(y, table), table) - y).square().sum(1)
            spread = float(errors.std()) / math.sqrt(len(x))
            assert abs(float(errors.mean()) - distortion(d, bits)) < 4 * spread + 1e-6, (kind, bits)


def test_any_vector_meets_the_law_over_random_rotations() -> None:
    """The worst case for a coordinate-wise quantizer, one non-zero entry, costs what a random vector costs."""
    d, bits = 64, 3
    x = torch.zeros(d)
    x[5] = 7.0
    table = codebook(d, bits)
    errors = []
    for seed in range(300):
        y = rotation(d, "qr", seed) @ x / math.sqrt(d)
        errors.append(float((dequantize(quantize(y, table), table) - y).square().sum()) / 49)
    spread = np.std(errors) / math.sqrt(len(errors))
    assert abs(np.mean(errors) - distortion(d, bits)) < 4 * spread


@pytest.mark.parametrize("bits", BITS)
def test_prod_is_unbiased_and_mse_is_not(bits: int) -> None:
    """Fixed x and y, random rotation and projection: the mean of <y, x~> over them."""
    d = 64
    x, y = unit_vectors(2, d, seed=4)
    y = (x + 0.7 * y) / (x + 0.7 * y).norm()
    truth = float(x @ y)
    table, codes = codebook(d, bits), codebook(d, bits - 1)
    prod, mse = [], []
    for seed in range(1200):
        turn = rotation(d, "qr", seed) / math.sqrt(d)
        s = projection(d, seed)
        prod.append(float(dequantize(quantize(turn @ x, codes, s), codes, s) @ (turn @ y)))
        mse.append(float(dequantize(quantize(turn @ x, table), table) @ (turn @ y)))
    error, spread = np.mean(prod) - truth, np.std(prod) / math.sqrt(len(prod))
    assert abs(error) < 4 * spread + 2e-4  # float16 norms
    shrink = truth * distortion(d, bits)  # E <y, x~> = (1 - D) <y, x>
    assert abs(np.mean(mse) - (truth - shrink)) < 4 * np.std(mse) / math.sqrt(len(mse)) + 2e-4
    if bits < 4:
        assert abs(np.mean(mse) - truth) > 10 * np.std(mse) / math.sqrt(len(mse))


@pytest.mark.parametrize("bits", BITS)
def test_prod_distortion_is_exact_and_within_the_bound(bits: int) -> None:
    """||r||^2 (1 / (d E|t|^2) - 1) for an orthogonal S, some pi/2 - 1; the paper's normal S loses pi/2."""
    d = 128
    x, y = unit_vectors(3000, d, seed=1), unit_vectors(3000, d, seed=2)
    codes, s = codebook(d, bits - 1), projection(d)
    error = dequantize(quantize(x, codes, s), codes, s) - x
    squares = error.square().sum(1)
    factor = 1 / (d * mean_abs_coordinate(d) ** 2) - 1
    assert 0.56 < factor < 0.59
    exact = factor * distortion(d, bits - 1)
    assert abs(float(squares.mean()) - exact) < 4 * float(squares.std()) / math.sqrt(len(x)) + 2e-5
    products = (error * y).sum(1).square()
    assert abs(float(products.mean()) - exact / d) < 4 * float(products.std()) / math.sqrt(len(x))
    assert 4**-bits / d < math.sqrt(3) * math.pi**2 / d * 4**-bits
    assert exact / d < math.sqrt(3) * math.pi**2 / d * 4**-bits
    g = torch.randn(d, d, generator=torch.Generator().manual_seed(9))  # the paper's S and its factor, on the same r
    rest = x - dequantize(quantize(x, codes), codes)
    paper = math.sqrt(math.pi / 2) / d * rest.norm(dim=1, keepdim=True) * ((rest @ g.T).sign() @ g)
    worse = ((paper - rest) * y).sum(1).square().mean()
    assert abs(float(worse) * d / distortion(d, bits - 1) - math.pi / 2) < 0.25


@pytest.mark.parametrize("bits", BITS)
def test_scales_keep_what_they_promise(bits: int) -> None:
    d = 96
    y, table = 50 * unit_vectors(500, d), codebook(96, bits)
    matched, unbiased = (dequantize(quantize(y, table, None, s), table) for s in ("matched", "unbiased"))
    assert (matched.norm(dim=1) / 50 - 1).abs().max() < 1e-3
    assert ((unbiased * y).sum(1) / 2500 - 1).abs().max() < 1e-3


def test_vectors_without_a_direction_or_beyond_float16_give_no_nan() -> None:
    table, s = codebook(64, 2), projection(64)
    y = torch.stack((torch.zeros(64), torch.full((64,), 1e-12), torch.full((64,), 3e4), torch.eye(64)[3] * 1e-3))
    for scale in ("norm", "matched", "unbiased"):
        out = dequantize(quantize(y, table, None, scale), table)
        assert out.isfinite().all()
        assert out[0].abs().max() == 0
    assert dequantize(quantize(y, table, s), table, s).isfinite().all()


@pytest.mark.parametrize("d", [*HEAD_DIMS, 1, 2, 12, 20, 24, 1024])
def test_hadamard_matrices(d: int) -> None:
    h = hadamard_matrix(d).int()
    assert torch.equal(h @ h.T, d * torch.eye(d, dtype=torch.int32))
    assert set(h.unique().tolist()) <= {-1, 1}


def test_no_hadamard_matrix_where_there_is_none() -> None:
    for order in (3, 6, 10, 28, 7 * 64):
        with pytest.raises(ValueError, match="no Hadamard matrix"):
            hadamard_matrix(order)


@pytest.mark.parametrize("kind", ["hadamard", "qr"])
def test_rotations_are_orthogonal_seeded_and_apart(kind: str) -> None:
    for d in HEAD_DIMS:
        p = rotation(d, kind, 3)
        assert (p @ p.T / d - torch.eye(d)).abs().max() < 1e-5
        assert torch.equal(p, rotation(d, kind, 3))
        assert not torch.equal(p, rotation(d, kind, 4))
        assert (projection(d, 3) @ p / math.sqrt(d) - torch.eye(d)).abs().max() > 0.1


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("turboquant:4", {"k_bits": 4, "v_bits": 4, "mode": "hybrid", "window": 64}),
        ("turboquant:4,mode=full", {"mode": "full", "window": 0}),
        ("turboquant:k3v4", {"k_bits": 3, "v_bits": 4}),
        ("turboquant:2,window=32", {"k_bits": 2, "mode": "hybrid", "window": 32}),
        ("turboquant:k3v2,first=1,last=2,edge=k4v4,rotation=qr,seed=7", {"first": 1, "last": 2, "seed": 7}),
        ("turboquant:4,exact=0+27,biased=coded", {"exact": (0, 27), "biased": "coded"}),
        ("turboquant:3,mode=shadow,keys=prod", {"mode": "shadow", "keys": "prod", "values": "mse"}),
    ],
)
def test_settings_are_read_and_written_back(text: str, fields: dict[str, Any]) -> None:
    config = parse_kv(text)
    assert config is not None
    assert {name: getattr(config, name) for name in fields} == fields
    assert parse_kv(str(config)) == config


def test_rates_by_layer() -> None:
    config = parse_kv("turboquant:k2v3,first=1,last=2,edge=k4v3")
    assert config is not None
    assert [config.rate(i, 6) for i in range(6)] == [(4, 3), (2, 3), (2, 3), (2, 3), (4, 3), (4, 3)]
    exact = parse_kv("turboquant:4,first=1")
    assert exact is not None
    assert [exact.rate(i, 3) for i in range(3)] == [(16, 16), (4, 4), (4, 4)]
    assert parse_kv("exact") is None


BAD = {
    "": "kv is ''",
    "fp8": "allowed are exact, turboquant:4",
    "turboquant": "allowed are exact",
    "turboquant:": "allowed are exact",
    "turboquant:0": "0 bits for keys; allowed are 1, 2, 3 and 4",
    "turboquant:5": "5 bits for keys",
    "turboquant:k3v9": "9 bits for values",
    "turboquant:k3": "written like 4 or k3v4",
    "turboquant:4.5": "written like 4 or k3v4",
    "turboquant:٤": "written like 4 or k3v4",
    "turboquant:-1": "written like 4 or k3v4",
    "turboquant:4,": "option '' is not understood",
    "turboquant:4,window": "option 'window' is not understood",
    "turboquant:4,wnidow=3": "allowed are name=value with mode, window",
    "turboquant:4,window=": "is not understood",
    "turboquant:4,window=-3": "window is '-3'; it must be a number",
    "turboquant:4,window=1e3": "it must be a number",
    "turboquant:4,window=99999999": "allowed is 0 to",
    "turboquant:4,window=8,window=8": "window is given twice",
    "turboquant:4,window=0": "mode=hybrid needs a window",
    "turboquant:4,mode=full,window=9": "the others have none (window=0)",
    "turboquant:4,mode=capture_only": "allowed are hybrid, full and shadow",
    "turboquant:4,rotation=dct": "allowed are hadamard and qr",
    "turboquant:4,keys=qjl": "allowed are mse and prod",
    "turboquant:4,first=1,edge=17": "17 bits for keys",
    "turboquant:4,exact=2+1": "each once and in order",
    "turboquant:4,exact=1+": "exact is '1+'; it must be numbers with + between them",
    "turboquant:4,exact=5000": "it must be numbers of layers from 0 on",
    "turboquant:4,biased=kept": "allowed are exact and coded",
    "turboquant:4,k_bits=3": "is not understood",
    "turboquant:4," + "x" * 5000: "is not understood",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:40])
def test_bad_settings_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_kv(text)
    message = str(caught.value)
    assert BAD[text] in message
    assert "\n" not in message
    assert len(message) < 260


def test_whatever_is_written_it_is_a_setting_or_one_line() -> None:
    random = np.random.default_rng(0)
    pieces = ["turboquant", ":", "4", "k", "v", "3", ",", "=", "window", "edge", "mode", "hybrid", "16", "\n", "é", "0"]
    good = bad = 0
    for _ in range(5000):
        text = "".join(random.choice(pieces, size=random.integers(0, 9)))
        text = random.choice(["", "turboquant:", "turboquant:4,", "turboquant:4,window="]) + text
        try:
            config = parse_kv(text)
        except ValueError as error:
            bad += "\n" in str(error)
        else:
            assert isinstance(config, TurboQuantConfig)
            assert parse_kv(str(config)) == config
            good += 1
    assert good > 30
    assert not bad


def test_an_unsupported_head_size_is_refused() -> None:
    with pytest.raises(ValueError, match="head size of 72; it has them for 64, 80, 96, 128, 192, 256 and 512"):
        codebook(72, 4)
