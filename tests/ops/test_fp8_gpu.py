"""FP8 kernels on a GPU against float64, in every form of scales, and one behind the other."""

import pytest
import torch
from torch import Tensor

from onegraph.ops.cuda import fp8
from onegraph.ops.fp8 import fp8_dequantize, fp8_experts, fp8_grouped_linear, fp8_linear, random_weight
from onegraph.ops.registry import reference_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_family")]
BLOCKS = {"128": (128, 128), "32": (32, 32), "mx": (1, 32), "rows": (1, 0)}
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4}  # a result's own rounding, and a decoded weight's
DTYPES = torch.bfloat16, torch.float16


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(weight: tuple[Tensor, Tensor], kind: str) -> Tensor:
    """float64 [..., n, k], computed without a kernel of ours."""
    with reference_ops():
        return fp8_dequantize(*weight, *BLOCKS[kind]).double()


def check(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert got.shape == wanted.shape
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    assert error < tolerance, (tuple(got.shape), error)  # also where it is not a number


@pytest.mark.parametrize("kind", list(BLOCKS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k"), [(1536, 4096), (4096, 1024), (100, 528), (33, 16), (4097, 2064), (1, 4096), (512, 14336)]
)
def test_linear(kind: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Of every pass, its tail, and beyond; twice the same bits."""
    weight = random_weight((n, k), *BLOCKS[kind], "cuda", rng())
    bias = torch.randn(n, generator=rng(1)).cuda()
    w = exact(weight, kind)
    for tokens in (1, 2, 3, 4, 8, 9, 16, 17, 31, 32, 33, 64, fp8.MAX_TOKENS + 1, 200):
        x = torch.randn(tokens, k, generator=rng(tokens)).to("cuda", dtype)
        wanted = x.double() @ w.T
        # Many tokens go through cuBLAS, whose own error on the decoded weight is the yardstick.
        theirs = torch.nn.functional.linear(x, w.to(dtype)) if tokens > fp8.MAX_TOKENS else wanted
        tolerance = TOLERANCE[dtype] + 1.5 * ((theirs.double() - wanted).norm() / wanted.norm()).item()
        got = fp8_linear(x, *weight, None, *BLOCKS[kind], False)
        assert got.dtype == dtype
        check(got, wanted, tolerance)
        assert torch.equal(got, fp8_linear(x, *weight, None, *BLOCKS[kind], False))
        wide = fp8_linear(x, *weight, bias, *BLOCKS[kind], True)
        assert wide.dtype == torch.float32
        check(wide, wanted + bias, 1e-5 if tokens <= fp8.MAX_TOKENS else tolerance)
        check(fp8_linear(x, *weight, bias.to(dtype), *BLOCKS[kind], False), wanted + bias.to(dtype), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype: torch.dtype) -> None:
    """The instructions that decode, on every number of E4M3, through one-hot activations."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(16, 1)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = torch.ones(16, device="cuda")
    with reference_ops():
        wanted = fp8_dequantize(codes, scale, 1, 0)
    assert torch.equal(fp8_dequantize(codes, scale, 1, 0), wanted)
    for first in range(0, 256, 32):
        x = torch.eye(256, dtype=dtype, device="cuda")[first : first + 32].contiguous()
        assert torch.equal(fp8_linear(x, codes, scale, None, 1, 0, True).T, wanted[:, first : first + 32])


@pytest.mark.parametrize("kind", list(BLOCKS))
@pytest.mark.parametrize(("groups", "n", "k"), [(8, 1024, 4096), (3, 50, 272), (140, 32, 64)])
def test_grouped_linear(kind: str, groups: int, n: int, k: int) -> None:
    weight = random_weight((groups, n, k), *BLOCKS[kind], "cuda", rng())
    w = exact(weight, kind)
    for dtype in DTYPES:
        for tokens in (1, 5, 16, 40, fp8.MAX_TOKENS + 1):
            x = torch.randn(tokens, groups, k, generator=rng(tokens)).to("cuda", dtype)
            wanted = torch.einsum("tgk,gnk->tgn", x.double(), w)
            check(fp8_grouped_linear(x, *weight, *BLOCKS[kind]), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", list(BLOCKS))
@pytest.mark.parametrize(
    ("total", "dim", "wide", "top_k", "gate"),
    [
        (128, 2048, 768, 8, (torch.inf, 1.0, 0.0)),
        (16, 1024, 2048, 6, (10.0, 1.0, 0.0)),
        (5, 144, 80, 3, (7.0, 1.702, 1.0)),
    ],
)
def test_experts(kind: str, total: int, dim: int, wide: int, top_k: int, gate: tuple[float, float, float]) -> None:
    gate_up = random_weight((total, 2 * wide, dim), *BLOCKS[kind], "cuda", rng())
    down = random_weight((total, dim, wide), *BLOCKS[kind], "cuda", rng(1))
    first, second, (limit, alpha, shift) = exact(gate_up, kind), exact(down, kind), gate
    for dtype in DTYPES:
        for tokens in (1, 2, 7, 8, 9, 16, 17, 50):
            x = (2 * torch.randn(tokens, dim, generator=rng(tokens))).to("cuda", dtype)
            chosen = torch.rand(tokens, total, generator=rng(tokens)).argsort(1)[:, :top_k].int().contiguous().cuda()
            gains = torch.rand(tokens, top_k, generator=rng(tokens)).cuda()
            wanted = torch.zeros(tokens, dim, dtype=torch.float64, device="cuda")
            for j in range(top_k):
                g, u = torch.einsum("td,tfd->tf", x.double(), first[chosen[:, j].long()]).chunk(2, 1)
                g, u = g.clamp(max=limit), u.clamp(-limit, limit) + shift
                h = (g * torch.sigmoid(alpha * g) * u).to(dtype).double()
                wanted += gains[:, j, None] * torch.einsum("tf,tdf->td", h, second[chosen[:, j].long()])
            got = fp8_experts(x, chosen, gains, *gate_up, *down, *BLOCKS[kind], *gate)
            check(got, wanted, TOLERANCE[dtype])
            assert torch.equal(got, fp8_experts(x, chosen, gains, *gate_up, *down, *BLOCKS[kind], *gate))


@pytest.mark.parametrize("kind", ["128", "mx"])
@pytest.mark.parametrize("tokens", [1, 2, 16, 32])
def test_launches_that_overlap_wait_for_one_another(kind: str, tokens: int) -> None:
    """Linears and experts behind one another in a graph, as each lets the next begin before it ends, give the bits that
    they give one at a time; also where tokens and experts changed since the capture."""
    linears = [random_weight((2048, 2048), *BLOCKS[kind], "cuda", rng(i)) for i in range(3)]
    layers = (
        *random_weight((16, 1024, 2048), *BLOCKS[kind], "cuda", rng(3)),
        *random_weight((16, 2048, 512), *BLOCKS[kind], "cuda", rng(4)),
        *BLOCKS[kind], 10.0, 1.0, 0.0,
    )  # fmt: skip
    x = torch.empty(tokens, 2048, device="cuda", dtype=torch.bfloat16)
    chosen, gains = torch.zeros(tokens, 6, dtype=torch.int32, device="cuda"), torch.rand(tokens, 6, device="cuda")

    def step(wait: bool) -> Tensor:
        h = x
        for i in range(12):
            if i % 4 == 3:
                h = fp8_experts(h, chosen, gains, *layers)
            else:
                h = fp8_linear(h, *linears[i % 3], None, *BLOCKS[kind], False)
            if wait:
                torch.cuda.synchronize()
        return h

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        x.normal_()
        step(wait=False)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = step(wait=False)
    for i in range(10):
        x.copy_(torch.randn(tokens, 2048, generator=rng(i)))
        chosen.copy_(torch.rand(tokens, 16, generator=rng(i)).argsort(1)[:, :6])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        got = out.clone()
        assert torch.isfinite(got).all()
        assert torch.equal(got, step(wait=True))
