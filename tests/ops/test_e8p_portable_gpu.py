"""What the portable E8P linear alone has on a GPU: cuts of other cards, counters. The rest: test_e8p_cuda.py."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernel_family import forced
from onegraph.ops.cuda import build, e8p_dequantize, e8p_portable
from onegraph.ops.cuda import e8p as cuda_e8p
from test_e8p_cuda import _arguments, _error, _linear, _truth

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def portable() -> Iterator[str]:
    """Every call here runs the portable kernel, or fails."""
    yield from forced("portable")


def test_the_portable_kernel_is_what_runs() -> None:
    for tokens in (1, 4, 5, 16, 64):
        assert cuda_e8p.choose(tokens, 4096, 4096, 2, 0) is e8p_portable.run
    assert cuda_e8p.choose(65, 4096, 4096, 2, 0) is e8p_dequantize.run


def test_streams_and_graphs_at_the_same_time() -> None:
    """What counts the blocks that arrived belongs to one stream, and to one capture, wherever that is replayed."""
    args = _arguments(1, 4096, 4096, 2)
    xs = [args[0] * scale for scale in (1, 3)]
    wanted = [_linear(x, *args[1:]) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    graphs, results = [], []
    for x in xs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):  # both on torch's one stream for captures
            results.append([_linear(x, *args[1:]) for _ in range(20)])
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
                found.append([_linear(x, *args[1:]) for _ in range(20)])
        torch.cuda.synchronize()
        assert all(torch.equal(y, want) for want, ys in zip(wanted, found, strict=True) for y in ys)


def test_every_way_to_cut_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for other cards: fewer SMs, rounds of sums, strips that cut blocks of rows."""
    args = _arguments(3, 1536, 2304, 4)
    truth, device = _truth(*args), build.device(0)
    plans = [p for sms in (8, 20, 82) for p in e8p_portable.E8PTiling.plans(1536, 2304, 4, 3, replace(device, sms=sms))]
    for plan in sorted(set(plans))[::5]:
        monkeypatch.setattr(e8p_portable.E8PTiling, "plan", lambda *_, plan=plan: plan)
        y = _linear(*args)
        assert _error(y, truth) < 2e-3, plan
        assert torch.equal(_linear(*args), y), plan
