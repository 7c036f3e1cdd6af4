"""MXFP4 on a GPU: every number of tokens, both float types, biases, scales far apart, against float64; and one launch
behind the other. (Each op by itself: its cases, test_ops.py.)"""

import pytest
import torch
from torch import Tensor

from onegraph.ops.activation import SwiGLU
from onegraph.ops.cuda import nvfp4, nvfp4_one
from onegraph.ops.mxfp4 import mxfp4_dequantize, mxfp4_experts, mxfp4_grouped_linear, mxfp4_linear, random_weight

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_family")]
HALVES = torch.bfloat16, torch.float16
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
TOKENS = 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64
GPT_OSS, V4 = SwiGLU(7.0, 1.702, 1.0), SwiGLU(10.0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert torch.isfinite(got).all()
    error = float((got.double() - wanted).norm() / wanted.norm())
    assert error < tolerance, error


def test_kernels_run_here(kernel_family: str) -> None:
    """Else what follows would prove torch."""
    assert nvfp4.STREAM.source.is_built(0)
    assert nvfp4_one.KERNEL.is_built(0) == (kernel_family == "own")
    experts = nvfp4.MX_STREAM.weight((4, 2880, 2880), {}, ())
    assert nvfp4.MX_STREAM.reads(experts)
    if kernel_family == "own":
        assert nvfp4_one.experts_plans(1, 2880, 2880, 4, nvfp4.build.device(0), 32) is not None


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize(("k", "n"), [(4096, 14336), (2880, 5120), (4160, 1000), (14336, 4096), (2880, 33), (64, 16)])
def test_linear(k: int, n: int, float32: bool, dtype: torch.dtype) -> None:
    codes, scale = random_weight((n, k), "cuda", rng())
    dense, bias = mxfp4_dequantize(codes, scale).double(), torch.randn(n, generator=rng(1)).cuda()
    for tokens in TOKENS:
        x = torch.randn(tokens, k, generator=rng(tokens)).to("cuda", dtype)
        got, wanted = mxfp4_linear(x, codes, scale, bias, float32), x.double() @ dense.T + bias.double()
        assert got.dtype == (torch.float32 if float32 else dtype)
        # Where no kernel takes the shape, cuBLAS multiplies: its own error is the yardstick.
        theirs = torch.nn.functional.linear(x, dense.to(dtype), bias.to(dtype)) if n * k % 128 else wanted
        own = float((theirs.double() - wanted).norm() / wanted.norm())
        close(got, wanted, (3e-4 if float32 else TOLERANCE[dtype]) + 1.5 * own)


@pytest.mark.parametrize("dtype", HALVES)
def test_grouped_linear(dtype: torch.dtype) -> None:
    codes, scale = random_weight((8, 1024, 4096), "cuda", rng())
    dense = mxfp4_dequantize(codes, scale).double()
    for tokens in TOKENS:
        x = torch.randn(tokens, 8, 4096, generator=rng(tokens)).to("cuda", dtype)
        wanted = torch.einsum("tgk,gnk->tgn", x.double(), dense)
        close(mxfp4_grouped_linear(x, codes, scale), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("experts", "dim", "wide", "top_k", "gate", "biases"),
    [(32, 2880, 2880, 4, GPT_OSS, True), (24, 4096, 2048, 6, V4, False), (8, 1024, 448, 3, SwiGLU(), True)],
    ids=["gpt-oss", "v4", "small"],
)
def test_experts(experts: int, dim: int, wide: int, top_k: int, gate: SwiGLU, biases: bool, dtype: torch.dtype) -> None:
    layers = [random_weight((experts, n, k), "cuda", rng(i)) for i, (n, k) in enumerate(((2 * wide, dim), (dim, wide)))]
    added = [torch.randn(experts, n, generator=rng(3)).cuda() if biases else None for n in (2 * wide, dim)]
    dense = [mxfp4_dequantize(*layer) for layer in layers]
    for tokens in (1, 2, 8, 9, 16, 17, 64):
        x = torch.randn(tokens, dim, generator=rng(tokens)).to("cuda", dtype)
        chosen = torch.rand(tokens, experts, generator=rng(5)).argsort(1)[:, :top_k].int().contiguous().cuda()
        gains = torch.rand(tokens, top_k, generator=rng(6)).cuda()
        got = mxfp4_experts(x, chosen, gains, *layers[0], added[0], *layers[1], added[1], *gate.numbers)
        wanted = torch.zeros(tokens, dim, dtype=torch.float64, device="cuda")
        for t in range(tokens):
            for e, gain in zip(chosen[t].tolist(), gains[t].double(), strict=True):
                hidden = dense[0][e].double() @ x[t].double() + (0 if added[0] is None else added[0][e].double())
                g, u = hidden.chunk(2)
                g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
                hidden = (g * torch.sigmoid(gate.alpha * g) * (u + gate.shift)).to(dtype).double()
                out = dense[1][e].double() @ hidden + (0 if added[1] is None else added[1][e].double())
                wanted[t] += gain * out
        close(got, wanted, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("high", "dtype"), [*((high, torch.bfloat16) for high in (128, 129, 200, 252)), (140, torch.float16)]
)
def test_scales_far_apart(high: int, dtype: torch.dtype) -> None:
    """0, 1 and 254 among ordinary ones: no result is lost or infinite where float32's is neither."""
    n, k = 512, 4096
    codes, scale = random_weight((n, k), "cpu", rng())
    x = torch.randn(64, k, generator=rng(1))
    scale[0::3, 0], scale[1::3, 1] = 0, 1 if dtype == torch.bfloat16 else 104
    scale[:, 2], scale[:, 3] = high, 254
    x[:, 64:96] *= 2.0 ** max(120 - high, -90)
    codes[:, 48:64] = 0x80
    x, codes, scale = x.to("cuda", dtype), codes.cuda(), scale.cuda()
    dense = mxfp4_dequantize(codes, scale).double()
    for tokens in TOKENS:
        got = mxfp4_linear(x[:tokens], codes, scale, None, True)
        close(got, x[:tokens].double() @ dense.T, 1e-3)


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_launches_that_overlap_wait_for_one_another(tokens: int) -> None:
    """As tests/ops/test_nvfp4_gpu.py has it for NVFP4."""
    linears = [random_weight((2880, 2880), "cuda", rng(i)) for i in range(3)]
    first, second = (random_weight((16, n, 2880), "cuda", rng(5)) for n in (5760, 2880))
    biases = torch.randn(16, 5760, generator=rng(6)).cuda(), torch.randn(16, 2880, generator=rng(7)).cuda()
    x = torch.empty(tokens, 2880, device="cuda", dtype=torch.bfloat16)
    chosen = torch.zeros(tokens, 4, dtype=torch.int32, device="cuda")
    gains = torch.rand(tokens, 4, generator=rng(8)).cuda()

    def step(wait: bool) -> Tensor:
        h = x
        for i in range(12):
            if i % 4 == 3:
                h = mxfp4_experts(h, chosen, gains, *first, biases[0], *second, biases[1], *GPT_OSS.numbers)
            else:
                h = mxfp4_linear(h, *linears[i % 3], None, False)
            if wait:
                torch.cuda.synchronize()
        return h

    stream, graph, g = torch.cuda.Stream(), torch.cuda.CUDAGraph(), rng(9)
    with torch.cuda.stream(stream):
        step(wait=False)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = step(wait=False)
    for _ in range(10):
        x.copy_(torch.randn(tokens, 2880, generator=g))
        chosen.copy_(torch.rand(tokens, 16, generator=g).argsort(1)[:, :4])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        got = out.clone()
        assert torch.isfinite(got).all()
        assert torch.equal(got, step(wait=True))
