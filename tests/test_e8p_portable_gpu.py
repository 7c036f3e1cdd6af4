"""The portable E8P linear on a GPU against float64, with the cases and bounds of tests/test_e8p_cuda.py. From compute
capability 9.0 on it is compiled for 8.0, as under `ONEGRAPH_KERNELS=portable`."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from onegraph.ops import family
from onegraph.ops.cuda import build, e8p_batch, e8p_decode, e8p_dequantize, e8p_portable, e8p_prefill
from onegraph.ops.cuda import e8p as cuda_e8p
from onegraph.ops.registry import OPS
from test_e8p_cuda import SHAPES, _arguments, _codes, _error, _poison, _truth

pytestmark = pytest.mark.gpu
BOUNDS = {torch.bfloat16: 2e-3, torch.float16: 4e-4}


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call here runs the portable kernel, or fails."""
    modules = e8p_decode, e8p_batch, e8p_portable, e8p_prefill, e8p_dequantize
    monkeypatch.setattr(family, "FORCED", "portable")
    for module in modules:
        module.available.cache_clear()
    caches = e8p_portable._kernels, e8p_dequantize._kernel
    for each in caches:
        each.cache_clear()
    yield
    for module in modules:
        module.available.cache_clear()
    for each in caches:
        each.cache_clear()


def test_the_portable_kernel_is_what_runs() -> None:
    for tokens in (1, 4, 5, 16, 64):
        assert cuda_e8p.launcher(tokens, 4096, 4096, 2, 0) is e8p_portable.launch
    assert cuda_e8p.launcher(65, 4096, 4096, 2, 0) is e8p_dequantize.launch


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_matches_float64(bits: int, n: int, k: int) -> None:
    """Only the result is rounded: half a unit in the last place of bfloat16 or float16 is all that shows."""
    for tokens, dtype in ((1, torch.bfloat16), (3, torch.float16), (6, torch.bfloat16), (16, torch.float16)):
        args = _arguments(tokens, n, k, bits, dtype, bias=tokens % 2 == 0)
        _poison((tokens, n), dtype)
        assert _error(cuda_e8p.linear(*args), _truth(*args)) < BOUNDS[dtype], (tokens, dtype)


def test_every_token_count() -> None:
    """From 17 on in passes over the codes."""
    for tokens in (*range(1, 19), 33, 50, 64):
        args = _arguments(tokens, 256, 1024, 4)
        _poison((tokens, 256), torch.bfloat16)
        assert _error(cuda_e8p.linear(*args), _truth(*args)) < 2e-3, tokens


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_many_tokens_through_the_weight(bits: int) -> None:
    """Which is rounded too: half a unit in the last place each."""
    for n, k in ((192, 576), (960, 1536)):
        args = _arguments(70, n, k, bits, bias=True)
        _poison((70, n), torch.bfloat16)
        assert _error(cuda_e8p.linear(*args), _truth(*args)) < 3.5e-3, (n, k)


@pytest.mark.parametrize("tokens", [1, 4, 7, 16])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_stands_around_the_linear(bits: int, tokens: int) -> None:
    """RMSNorm, SwiGLU, residual, float32 out: one block of rows a block, and sums that meet in memory."""
    shapes = (192, 1536, torch.bfloat16), (1536, 576, torch.float16), (4096, 4096, torch.bfloat16)
    for i, (n, k, dtype) in enumerate(shapes):
        x, *rest = _arguments(tokens, n, k, bits, bias=True)
        x = x * (1 + torch.arange(tokens, device="cuda")).unsqueeze(1)  # another norm for each token
        both = torch.cat([x, x.flip(-1)], dim=-1)
        add = torch.randn(tokens, n, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).to(dtype)
        around = (
            (add, 1e-5, False, False),
            (add, None, True, False),
            (add.float(), 1e-5, False, True),
            (None, None, True, True),
        )
        for options in (around[i], around[i + 1]):
            args = ((both if options[2] else x).to(dtype), *rest)
            y = cuda_e8p.linear(*args, *options)
            assert y.dtype == (torch.float32 if options[3] else dtype)
            truth = _truth(*args, *options)
            rounding = 0.0 if options[3] else _error(truth.to(dtype), truth)
            assert _error(y, truth) < math.hypot(rounding, 1e-4), (n, k, options[1:])


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_same_bits_each_time_and_in_a_graph(bits: int, tokens: int) -> None:
    args = _arguments(tokens, 4096, 4096, bits)
    expected = cuda_e8p.linear(*args)
    for _ in range(20):
        assert torch.equal(cuda_e8p.linear(*args), expected)
    x = args[0].clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        once = cuda_e8p.linear(x, *args[1:])
        again = cuda_e8p.linear(once, *args[1:])  # reads what the launch before it writes
    second = cuda_e8p.linear(expected, *args[1:])
    x.copy_(args[0])
    for _ in range(20):
        once.fill_(float("nan"))
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(once, expected)
        assert torch.equal(again, second)
    other = _arguments(tokens, 4096, 4096, bits)[0].flip(-1).contiguous()
    x.copy_(other)
    graph.replay()
    assert torch.equal(once, cuda_e8p.linear(other, *args[1:]))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (28672, 4096)])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_same_bits_under_load(tokens: int, n: int, k: int, bits: int) -> None:
    """All SMs busy, layers that alternate: a block that reads sums before all are there shows here."""
    x, *first = _arguments(tokens, n, k, bits)
    layers = [first, [*_codes(n, k, bits, seed=7), *first[2:]]]
    x2, add = torch.cat([x, x], 1), x[:, :1].expand(tokens, n).contiguous()

    def results() -> list[torch.Tensor]:
        around = [(x, (None, 1e-5)), (x2, (add, None, True))]
        return [cuda_e8p.linear(given, *layer, *more) for layer in layers for given, more in around]

    wanted = results()
    for _ in range(40):
        for y, want in zip(results(), wanted, strict=True):
            assert torch.equal(y, want)


def test_streams_and_graphs_at_the_same_time() -> None:
    """What counts the blocks that arrived belongs to one stream, and to one capture, wherever that is replayed."""
    args = _arguments(1, 4096, 4096, 2)
    xs = [args[0] * scale for scale in (1, 3)]
    wanted = [cuda_e8p.linear(x, *args[1:]) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    graphs, results = [], []
    for x in xs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):  # both on torch's one stream for captures
            results.append([cuda_e8p.linear(x, *args[1:]) for _ in range(20)])
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, want) for want, ys in zip(wanted, results, strict=True) for y in ys)
    for _ in range(20):
        found = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                found.append([cuda_e8p.linear(x, *args[1:]) for _ in range(20)])
        torch.cuda.synchronize()
        assert all(torch.equal(y, want) for want, ys in zip(wanted, found, strict=True) for y in ys)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Within one kernel, that is for 2 to 4, 5 to 8 and 9 to 16 tokens."""
    x, *rest = _arguments(16, 1536, 576, 3)
    whole = cuda_e8p.linear(x, *rest)
    assert torch.equal(cuda_e8p.linear(x[:9], *rest), whole[:9])
    four = cuda_e8p.linear(x[:4], *rest)
    assert torch.equal(cuda_e8p.linear(x[1:3], *rest), four[1:3])


@pytest.mark.parametrize(("bad", "tokens"), product([float("nan"), float("inf")], [2, 9]))
def test_nan_and_infinity_come_out(bad: float, tokens: int) -> None:
    args = _arguments(tokens, 128, 512, 2)
    args[0][1, 300] = bad
    y = cuda_e8p.linear(*args)
    assert not y[1].isfinite().any()
    assert y[0].isfinite().all()


def test_zeros_and_offsets_in_memory() -> None:
    x, codes, *rest = _arguments(1, 128, 512, 2)
    assert cuda_e8p.linear(torch.zeros_like(x), codes, *rest).eq(0).all()
    odd = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    shifted = torch.empty(codes.numel() + 1, dtype=codes.dtype, device="cuda")[1:].view_as(codes).copy_(codes)
    assert torch.equal(cuda_e8p.linear(odd, shifted, *rest), cuda_e8p.linear(x, codes, *rest))


def test_every_way_to_cut_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for other cards: fewer SMs, rounds of sums, strips that cut blocks of rows."""
    args = _arguments(3, 1536, 2304, 4)
    truth, device = _truth(*args), build.device(0)
    plans = [p for sms in (8, 20, 82) for p in e8p_portable.plans(1536, 2304, 4, 3, replace(device, sms=sms))]
    for plan in sorted(set(plans))[::5]:
        e8p_portable._kernels.cache_clear()
        monkeypatch.setattr(e8p_portable, "plan", lambda *_, plan=plan: plan)
        y = cuda_e8p.linear(*args)
        assert _error(y, truth) < 2e-3, plan
        assert torch.equal(cuda_e8p.linear(*args), y), plan


def test_the_op_runs_it() -> None:
    """Through dispatch, in the shapes of the op's own cases."""
    op = OPS["e8p_linear"]
    for case in op.cases:
        args = case.make(torch.device("cuda"), torch.bfloat16, torch.Generator().manual_seed(0))
        x, n = args[0], args[1].shape[0]
        if not 0 < x.shape[:-1].numel() <= 16 or n % 64 or args[1].shape[1] % 8:
            continue
        assert _error(op(*args), _truth(*args)) < 2e-3, case.name
