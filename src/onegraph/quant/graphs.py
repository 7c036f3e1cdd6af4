"""The encoder on a GPU: a kernel; or, where that cannot be built, a CUDA graph of the some 150 small launches that a
step of a sweep takes in torch's calls, thousands of times in one shape."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from onegraph.ops import family
from onegraph.ops.cuda import e8p_encode
from onegraph.quant.e8p import constants, encode

Encode = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor, Tensor]]


def encoder(device: torch.device, n: int, bits: int, wide: bool = False, metrics: int = 0) -> Encode:
    """`encode` for targets [8, at most n]: itself on a CPU; on a GPU a kernel, or a replayed graph, whose results hold
    until the next call.

    metrics: parts of n columns that have one each, [at most metrics, 8, 8]; 0: all columns have one, [8, 8].
    """
    if device.type == "cpu":
        return partial(encode, wide=wide)
    here = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if family.FORCED == "reference" or not e8p_encode.KERNEL.is_built(here.index):
        return _captured(here, n, bits, wide, metrics)
    run = _kernel(here, bits, wide)

    def launched(target: Tensor, rate: int, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert rate == bits
        return run(target, factor)

    return launched


@lru_cache(maxsize=16)
def _kernel(device: torch.device, bits: int, wide: bool) -> e8p_encode.Encode:
    return e8p_encode.encoder(constants(device), bits, 8 if wide else 2)


@lru_cache(maxsize=16)
def _captured(device: torch.device, n: int, bits: int, wide: bool, metrics: int) -> Encode:
    x = torch.randn(8, n, device=device)
    metric = torch.eye(8, device=device)
    if metrics:
        metric = metric.repeat(metrics, 1, 1)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # tables, workspaces and kernels come into being outside the capture
            encode(x, bits, metric, wide=wide)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = encode(x, bits, metric, wide=wide)

    def replay(target: Tensor, rate: int, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert rate == bits
        count = target.shape[1]
        x[:, :count].copy_(target)
        metric[: len(factor)].copy_(factor)
        graph.replay()
        codes, residual, value = result
        return codes[:count], residual[:count], value[:, :count]

    return replay
