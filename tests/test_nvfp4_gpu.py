"""NVFP4 kernels one behind the other. (Each by itself: the cases of the ops, tests/test_ops.py.)"""

import pytest
import torch
from torch import Tensor

from onegraph.ops.nvfp4_linear import nvfp4_experts, nvfp4_linear, random_weight


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_launches_that_overlap_wait_for_one_another(tokens: int) -> None:
    """Linears and experts behind one another in a graph, as each lets the next begin before it ends, give the bits that
    they give one at a time; also where tokens and experts changed since the capture."""
    g = torch.Generator().manual_seed(0)
    linears = [random_weight((2048, 2048), "cuda", g) for _ in range(3)]
    layers = *random_weight((16, 1024, 2048), "cuda", g), *random_weight((16, 2048, 512), "cuda", g), 10.0, 1.0, 0.0
    x = torch.empty(tokens, 2048, device="cuda", dtype=torch.bfloat16)
    chosen, gains = torch.zeros(tokens, 6, dtype=torch.int32, device="cuda"), torch.rand(tokens, 6, generator=g).cuda()

    def step(wait: bool) -> Tensor:
        h = x
        for i in range(12):
            h = (
                nvfp4_experts(h, chosen, gains, *layers)
                if i % 4 == 3
                else nvfp4_linear(h, *linears[i % 3], None, False)
            )
            if wait:
                torch.cuda.synchronize()
        return h

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step(wait=False)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = step(wait=False)
    for _ in range(10):
        x.copy_(torch.randn(tokens, 2048, generator=g))
        chosen.copy_(torch.rand(tokens, 16, generator=g).argsort(1)[:, :6])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        got = out.clone()
        assert torch.isfinite(got).all()
        assert torch.equal(got, step(wait=True))
