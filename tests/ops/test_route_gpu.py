"""Norms, router and choice on a GPU: many launches in a graph, whose words each leaves as it found them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.ops.calls import NormedRoute
from onegraph.ops.cuda import route
from onegraph.ops.normed_route import composed, normed_route
from test_ops import error, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_family")]
CASES = {case.name: case for case in normed_route.cases}
TAKEN = [name for name in CASES if name not in ("many_experts", "many_tokens", "all_of_three")]


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_takes_what_it_is_for(name: str) -> None:
    call = NormedRoute(*make(CASES[name], torch.bfloat16, "cuda"))
    assert (route.supports(call) and route.KERNEL.is_built(0)) == (name in TAKEN)


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_what_its_parts_are(name: str, dtype: torch.dtype) -> None:
    """Sums in another order: nearly the same bits of what is rounded, the same experts."""
    call = NormedRoute(*make(CASES[name], dtype, "cuda"))
    *got, experts, weights = route.compute(call)
    *want, chosen, gains = composed(call)
    assert torch.equal(experts, chosen)
    for a, b in zip((*got, weights), (*want, gains), strict=True):
        assert error(a, b) <= 2e-3


def step(layers: list[tuple[Any, ...]], x: Tensor) -> list[Tensor]:
    """Layers one behind the other, each on what the one before gave."""
    found = []
    for layer in layers:
        _, normed, experts, weights = normed_route(x, *layer)
        x = (normed[-1].float() * (1 + weights.sum(1, keepdim=True))).to(x.dtype)
        found += [normed, experts, weights]
    return found


@pytest.mark.parametrize(
    ("tokens", "experts", "gated"), [(1, 256, True), (1, 32, False), (4, 128, False), (3, 512, True)]
)
def test_replays_are_eager_steps(tokens: int, experts: int, gated: bool) -> None:
    """Also two graphs that are replayed at once: each has words of its own."""
    g = torch.Generator().manual_seed(0)

    def layer() -> tuple[Any, ...]:
        gate = torch.randn(experts + gated, 2048, generator=g) / 2048**0.5
        norm = 1 + 0.2 * torch.randn(2048, generator=g)
        return norm.cuda(), 1e-6, gate.cuda().bfloat16(), None, None, 8, True, 0, 1, 1.0, gated, gated

    layers = [layer() for _ in range(20)]
    given = [torch.randn(tokens, 2048, generator=g).cuda().bfloat16() for _ in range(6)]
    want = [step(layers, x) for x in given]
    graphs = []
    for _ in range(2):
        x, stream, graph = given[0].clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(layers, x)
            with torch.cuda.graph(graph, stream=stream):
                out = step(layers, x)
        graphs.append((stream, graph, x, out))
    torch.cuda.synchronize()
    for at in range(len(given)):
        for i, (stream, graph, x, out) in enumerate(graphs):
            with torch.cuda.stream(stream):
                for tensor in out:
                    tensor.fill_(-1)
                x.copy_(given[at - i])
                for _ in range(5):
                    graph.replay()
        torch.cuda.synchronize()
        for i, (*_, out) in enumerate(graphs):
            assert all(torch.equal(a, b) for a, b in zip(out, want[at - i], strict=True))
