"""Experts in E8P on a GPU against the float32 truth: every launch that a call may take, captured and eager."""

import pytest
import torch
from torch import Tensor

from onegraph.formats.e8p import BITS, codebook
from onegraph.ops.cuda import e8p_experts as kernels
from onegraph.ops.e8p_experts import GPT_OSS, e8p_experts, random_weight
from onegraph.ops.registry import reference_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_family")]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}  # mostly the result's own rounding
PLAIN = (float("inf"), 1.0, 0.0)
# experts, chosen, hidden, width, gate, biases
SHAPES = {
    "qwen3": (128, 8, 2048, 768, PLAIN, False),
    "mixtral": (8, 2, 1024, 3584, PLAIN, False),
    "gpt-oss": (32, 4, 2880, 2880, GPT_OSS, True),
    "nine of many": (40, 9, 576, 256, PLAIN, True),
    "small": (5, 3, 64, 64, GPT_OSS, True),
    "qwen3.5": (257, 9, 2048, 512, PLAIN, False),  # with the shared expert
}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layers(shape: str, bits: int) -> list[Tensor | None]:
    experts, _, dim, wide, _, biases = SHAPES[shape]
    found: list[Tensor | None] = []
    for seed, (n, k) in enumerate(((2 * wide, dim), (dim, wide))):
        found += random_weight(experts, n, k, bits, "cuda", rng(seed))
        found.append(torch.randn(experts, n, generator=rng(seed + 2)).cuda() if biases else None)
    return found


def routed(shape: str, tokens: int, seed: int, crowded: bool = False) -> tuple[Tensor, Tensor]:
    experts, top_k, *_ = SHAPES[shape]
    chosen = torch.rand(tokens, experts, generator=rng(seed)).argsort(1)[:, :top_k].int()
    if crowded:
        chosen[:] = chosen[:1]
    return chosen.contiguous().cuda(), torch.rand(tokens, top_k, generator=rng(seed + 1)).cuda()


def truth(x: Tensor, chosen: Tensor, gains: Tensor, rest: list) -> Tensor:
    with reference_ops():
        return e8p_experts(x.float(), chosen, gains, *rest)


def error(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(
    ("shape", "bits"),
    [
        *(("qwen3", bits) for bits in BITS),
        ("mixtral", 2),
        ("gpt-oss", 4),
        ("nine of many", 3),
        ("small", 3),
        ("qwen3.5", 4),
    ],
)
def test_experts(shape: str, bits: int) -> None:
    """Of each count that is launched otherwise, and twice the same bits."""
    _, _, dim, _, gate, _ = SHAPES[shape]
    rest = [codebook("cuda"), *layers(shape, bits), bits, *gate]
    for tokens in (1, 3, 16, 64, 70):
        for dtype in (torch.bfloat16, torch.float16) if tokens in (1, 16) else (torch.bfloat16,):
            x = torch.randn(tokens, dim, generator=rng(tokens)).to("cuda", dtype)
            routes = routed(shape, tokens, tokens)
            got = e8p_experts(x, *routes, *rest)
            assert got.dtype == dtype
            assert error(got, truth(x, *routes, rest)) < TOLERANCE[dtype], (tokens, dtype)
            assert torch.equal(got, e8p_experts(x, *routes, *rest))


def test_float32_and_many_tokens_are_tritons() -> None:
    rest = [codebook("cuda"), *layers("small", 3), 3, *GPT_OSS]
    for tokens, dtype in ((3, torch.float32), (200, torch.bfloat16)):
        x = torch.randn(tokens, 64, generator=rng(tokens)).to("cuda", dtype)
        routes = routed("small", tokens, tokens)
        assert error(e8p_experts(x, *routes, *rest), truth(x, *routes, rest)) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [4, 64])
def test_all_tokens_choose_the_same(tokens: int) -> None:
    """Many chunks of one expert; a number that is no expert is the nearest one."""
    rest = [codebook("cuda"), *layers("qwen3", 2), 2, *PLAIN]
    x = torch.randn(tokens, 2048, generator=rng(0)).to("cuda", torch.bfloat16)
    chosen, gains = routed("qwen3", tokens, 1, crowded=True)
    chosen[0, 0], chosen[0, 1] = 1 << 20, -3
    assert error(e8p_experts(x, chosen, gains, *rest), truth(x, chosen.clamp(0, 127), gains, rest)) < 4e-3


@pytest.mark.parametrize("shape", ["qwen3", "gpt-oss", "qwen3.5"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 64])
def test_captured_is_eager_on_other_inputs(tokens: int, shape: str) -> None:
    """Of two layers behind one another, whose launches overlap; the result is poisoned before each replay."""
    _, _, dim, _, gate, _ = SHAPES[shape]
    rest = [codebook("cuda"), *layers(shape, 4), 4, *gate]
    x = torch.randn(tokens, dim, generator=rng(0)).to("cuda", torch.bfloat16)
    chosen, gains = routed(shape, tokens, 0)

    def step() -> Tensor:
        first = e8p_experts(x, chosen, gains, *rest)
        return e8p_experts(first, chosen, gains, *rest)

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
    rest = [codebook("cuda"), *layers("qwen3", 2), 2, *PLAIN]
    for tokens in (3, 16):
        x = torch.randn(tokens, 2048, generator=rng(0)).to("cuda", torch.bfloat16)
        routes = routed("qwen3", tokens, 0)
        clean = e8p_experts(x, *routes, *rest)
        x[1, 5] = float("nan")
        got = e8p_experts(x, *routes, *rest)
        assert got[1].isnan().any()
        assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_what_the_kernels_take_is_built() -> None:
    assert kernels.KERNELS.is_built(0)
