"""Attention to codes stays as far from exact attention as the codebook says, however long the sequence."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.formats.turboquant import parse_kv
from onegraph.nn.attention import Attention

HEADS, KV_HEADS, DIM, TOKENS = 12, 6, 64, 3072
STEPS = [range(at - 64, at, 8) for at in (256, 1024, TOKENS)]
DISTORTION = {2: 0.117, 3: 0.03, 4: 0.009}  # of Lloyd-Max codes of a normal law: arXiv 2504.19874, theorem 1


@pytest.fixture
def bench(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    import turboquant_drift

    return turboquant_drift


def layer() -> Attention:
    angle = torch.outer(torch.arange(TOKENS).float(), 100000.0 ** -(torch.arange(0, DIM, 2) / DIM))
    return Attention(index=0, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, cos=angle.cos(), sin=angle.sin())


def random_layer(bench: Any, flat: bool = False) -> Tensor:
    """qkv of TOKENS tokens, of means and covariances that are random, too; `flat`: queries that attend to all alike,
    and values without a mean."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for _ in range(KV_HEADS):
        width = (HEADS // KV_HEADS + 2) * DIM
        root = torch.randn(width, width, generator=generator) / math.sqrt(width)
        sample = torch.randn(3 * width, width, generator=generator) @ root + torch.randn(width, generator=generator)
        samples.append(sample)
    qkv: Tensor = bench.drawn(samples, TOKENS, DIM)
    if flat:
        qkv[:, : HEADS * DIM] *= 1e-3
        qkv[:, -KV_HEADS * DIM :] = torch.randn(TOKENS, KV_HEADS * DIM, generator=generator)
    return qkv


def errors(bench: Any, qkv: Tensor, text: str, damage: str = "") -> list[float]:
    kv, attention = parse_kv(f"turboquant:{text}"), layer()
    cache = bench.new_cache(kv, attention, TOKENS)
    half = cache.block_table.shape[1] // 2
    if damage == "pages":  # the second half of a sequence overwrites the first
        cache.block_table[:, half:] = cache.block_table[:, :half].clone()
    if damage == "codebook":
        cache.layers[0].v_codebook.sign_()  # only signs are left, of keys as well: one codebook has both
    found: list[float] = bench.drift(attention, qkv, cache, STEPS)
    return found


@pytest.mark.parametrize("mode", ["", ",mode=full"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_is_that_of_the_codebook_at_any_position(bench: Any, bits: int, mode: str) -> None:
    """Of queries that attend to all alike only values' codes count. They keep the norm: so far are they off."""
    found = errors(bench, random_layer(bench, flat=True), f"{bits}{mode}")
    coded = [1.0 if mode else 1 - 64 / span.start for span in STEPS]  # the window of the latest is exact
    predicted = [math.sqrt(2 * (1 - math.sqrt(1 - DISTORTION[bits])) * share) for share in coded]
    assert found == pytest.approx(predicted, rel=0.15)


@pytest.mark.parametrize("mode", ["", ",mode=full"])
def test_errors_do_not_grow_along_a_random_layer(bench: Any, mode: str) -> None:
    qkv = random_layer(bench)
    found = {rate: errors(bench, qkv, f"{rate}{mode}") for rate in ("2", "3", "k3v4", "4")}
    for early, middle, late in found.values():
        assert late < 1.25 * max(early, middle)
    for worse, better in (("2", "3"), ("3", "k3v4"), ("k3v4", "4")):
        assert all(a > b for a, b in zip(found[worse], found[better], strict=True))


def test_what_breaks_with_the_position_shows(bench: Any) -> None:
    qkv = random_layer(bench)
    whole, wrapped = errors(bench, qkv, "4"), errors(bench, qkv, "4", "pages")
    assert wrapped[:2] == whole[:2]
    assert wrapped[2] > 3 * whole[2]
    assert all(a > 2 * b for a, b in zip(errors(bench, qkv, "4", "codebook"), whole, strict=True))


def test_planted_keys_have_half_of_the_weight_and_are_read_alike_at_any_distance(bench: Any) -> None:
    qkv, attention = random_layer(bench), layer()
    asking = [range(TOKENS - 32, TOKENS - 16), range(TOKENS - 16, TOKENS)]
    far = {t: distance for span, distance in zip(asking, (200, 3000), strict=True) for t in span}
    bench.plant(attention, qkv, far)
    exact = bench.Exact(attention, qkv)
    for t, distance in far.items():
        weight = exact.scores(t)[:, 0].softmax(-1)[:, t - distance]
        assert weight == pytest.approx(0.5, abs=0.1)
    cache = bench.new_cache(parse_kv("turboquant:4"), attention, TOKENS)
    near, distant = bench.drift(attention, qkv, cache, asking, first=True)
    assert 0.03 < near < 0.15
    assert distant == pytest.approx(near, rel=0.35)


def test_what_is_drawn_has_the_statistics_of_the_sample(bench: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(2000, 3 * DIM, generator=generator) * torch.linspace(0.5, 2, 3 * DIM) + 1
    sample[:, DIM : 2 * DIM] += sample[:, :DIM]  # a key that looks like the query
    drawn = bench.drawn([sample], 20000, DIM)
    assert torch.allclose(drawn.mean(0), sample.mean(0), atol=0.1)
    assert torch.allclose(drawn.T.cov(), sample.T.cov(), atol=0.35)
