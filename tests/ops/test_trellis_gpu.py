"""Trellis codes on a GPU against the float32 truth: routed experts, and exllamav3's three codes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.formats.trellis import BITS, CODES, OWN, TILE, UNIT
from onegraph.ops.cuda import build, trellis
from onegraph.ops.cuda import trellis_experts as kernels
from onegraph.ops.registry import reference_ops
from onegraph.ops.trellis import _linear_case, trellis_linear
from onegraph.ops.trellis_experts import TrellisExperts, trellis_experts

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 8e-4}  # mostly the result's own rounding
PLAIN, GPT_OSS = (float("inf"), 1.0, 0.0), (7.0, 1.702, 1.0)
# experts, chosen, hidden, width, gate, biases
SHAPES = {
    "qwen3": (128, 8, 2048, 768, PLAIN, False),
    "mixtral": (8, 2, 1024, 3584, PLAIN, False),
    "gpt-oss": (32, 4, 2880, 2880, GPT_OSS, True),
    "small": (5, 3, 64, 64, GPT_OSS, True),
}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layers(shape: str, bits: int, code: int) -> list[Tensor | None]:
    count, _, dim, wide, _, biases = SHAPES[shape]
    found: list[Tensor | None] = []
    for seed, (n, k) in enumerate(((2 * wide, dim), (dim, wide))):
        g = torch.Generator("cuda").manual_seed(seed)
        size = count, n // TILE, k * bits
        found.append(torch.randint(-(2**15), 2**15, size, generator=g, dtype=torch.int16, device="cuda"))
        for width, gain in ((k, 1.0), (n, k**-0.5 / (UNIT if code == OWN else 1))):
            signs = torch.randn(count, width, generator=g, device="cuda").sign()
            found.append(gain * (0.5 + torch.rand(count, width, generator=g, device="cuda")) * signs)
        found.append(torch.randn(count, n, generator=g, device="cuda") if biases else None)
    return found


def routed(shape: str, tokens: int, seed: int, crowded: bool = False) -> tuple[Tensor, Tensor]:
    count, top_k, *_ = SHAPES[shape]
    chosen = torch.rand(tokens, count, generator=rng(seed)).argsort(1)[:, :top_k].int()
    if crowded:
        chosen[:] = chosen[:1]
    return chosen.contiguous().cuda(), torch.rand(tokens, top_k, generator=rng(seed + 1)).cuda()


def run(x: Tensor, routes: tuple[Tensor, Tensor], rest: list[Any]) -> Tensor:
    """By the kernels, or the test fails."""
    made = kernels.experts(TrellisExperts(x, *routes, *rest))
    assert made is not None
    return made


def error(got: Tensor, x: Tensor, routes: tuple[Tensor, Tensor], rest: list[Any]) -> float:
    with reference_ops():
        want = trellis_experts(x.float(), *routes, *rest)
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(
    ("shape", "bits"),
    [*(("qwen3", bits) for bits in (2, 3, 4)), ("mixtral", 2), ("gpt-oss", 4), *(("small", bits) for bits in BITS)],
)
def test_experts(shape: str, bits: int, kernel_family: str) -> None:
    """Of each count that is launched otherwise, and twice the same bits."""
    _, top_k, dim, _, gate, _ = SHAPES[shape]
    rest = [*layers(shape, bits, OWN), bits, *gate, OWN]
    for tokens in (1, 2, 8, 16, 31):
        if tokens * top_k > kernels.MAX_PAIRS:
            continue
        for dtype in (torch.bfloat16, torch.float16) if tokens in (1, 8) else (torch.bfloat16,):
            x = torch.randn(tokens, dim, generator=rng(tokens)).to("cuda", dtype)
            for crowded in (False, True) if tokens > 1 else (False,):
                routes = routed(shape, tokens, tokens, crowded)
                got = run(x, routes, rest)
                assert got.dtype == dtype
                assert error(got, x, routes, rest) < TOLERANCE[dtype], (tokens, dtype, crowded)
                assert torch.equal(got, run(x, routes, rest))


def test_many_tokens_run_one_linear_after_the_other() -> None:
    rest = [*layers("small", 3, OWN), 3, *GPT_OSS, OWN]
    x, routes = torch.randn(200, 64, generator=rng(0)).cuda().bfloat16(), routed("small", 200, 0)
    assert kernels.experts(TrellisExperts(x, *routes, *rest)) is None
    assert error(trellis_experts(x, *routes, *rest), x, routes, rest) < 8e-3


def test_a_number_that_is_no_expert_is_the_nearest_one() -> None:
    rest = [*layers("qwen3", 2, OWN), 2, *PLAIN, OWN]
    x, (chosen, gains) = torch.randn(4, 2048, generator=rng(0)).cuda().bfloat16(), routed("qwen3", 4, 1)
    chosen[:, 0], chosen[:, 1], chosen[:, 2] = 1 << 20, -3, -5  # the second times of an expert are chunks too
    assert error(run(x, (chosen, gains), rest), x, (chosen.clamp(0, 127), gains), rest) < 4e-3


@pytest.mark.parametrize("shape", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 16])
def test_captured_is_eager_on_other_inputs(tokens: int, shape: str) -> None:
    """Of two layers behind one another, whose launches overlap; the result is poisoned before each replay."""
    _, _, dim, _, gate, _ = SHAPES[shape]
    rest = [*layers(shape, 4, OWN), 4, *gate, OWN]
    x = torch.randn(tokens, dim, generator=rng(0)).to("cuda", torch.bfloat16)
    chosen, gains = routed(shape, tokens, 0)

    def step() -> Tensor:
        return run(run(x, (chosen, gains), rest), (chosen, gains), rest)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = step()
    for seed in range(1, 6):
        x.copy_(torch.randn(tokens, dim, generator=rng(seed)))
        for now, new in zip((chosen, gains), routed(shape, tokens, seed, crowded=seed == 3), strict=True):
            now.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, step()), seed


def test_a_token_that_is_not_finite_stays_alone() -> None:
    rest = [*layers("qwen3", 2, OWN), 2, *PLAIN, OWN]
    for tokens in (3, 16):
        x = torch.randn(tokens, 2048, generator=rng(0)).to("cuda", torch.bfloat16)
        routes = routed("qwen3", tokens, 0)
        clean = run(x, routes, rest)
        x[1, 5] = float("nan")
        got = run(x, routes, rest)
        assert not got[1].isfinite().any()
        assert torch.equal(got[[0, 2]], clean[[0, 2]])


# ------------------------------------------------------------------------------------------------ exllamav3's codes


@pytest.mark.parametrize("code", [code for code in CODES if code != OWN])
@pytest.mark.parametrize("bits", BITS)
def test_a_linear_in_a_code_of_exllamav3(bits: int, code: int, kernel_family: str) -> None:
    for tokens in (1, 4, 8, 16, 64, 130):
        for with_ in (("bias",), ("add", "silu")):
            case = _linear_case((tokens,), 384, 1088, bits, *with_, code=code)
            for dtype in (torch.bfloat16, torch.float16):
                args = case.make(torch.device("cuda"), dtype, rng(tokens))
                assert trellis.choose(tokens, 384, 1088, dtype, 0) is not None
                got = trellis_linear(*args)
                with reference_ops():
                    want = trellis_linear(
                        *(a.float() if isinstance(a, Tensor) and a.dtype == dtype else a for a in args)
                    )
                off = ((got.float() - want).norm() / want.norm()).item()
                assert off < {torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype], (tokens, with_, dtype)
                assert torch.equal(got, trellis_linear(*args))


@pytest.mark.parametrize("code", [code for code in CODES if code != OWN])
def test_experts_in_a_code_of_exllamav3(code: int, kernel_family: str) -> None:
    for bits, shape in ((3, "qwen3"), (6, "small"), (4, "gpt-oss")):
        _, _, dim, _, gate, _ = SHAPES[shape]
        rest = [*layers(shape, bits, code), bits, *gate, code]
        if shape == "qwen3":  # gate and up each with their own
            rest[1] = torch.stack((rest[1], rest[1].flip(1)), 1)
        for tokens in (1, 8):
            x, routes = torch.randn(tokens, dim, generator=rng(tokens)).cuda().half(), routed(shape, tokens, 0)
            assert error(run(x, routes, rest), x, routes, rest) < 1.5e-3, (bits, shape, tokens)


def test_what_the_kernels_take_is_built() -> None:
    assert kernels.KERNELS.is_built(0)
    assert build.device(0).sms > 0
