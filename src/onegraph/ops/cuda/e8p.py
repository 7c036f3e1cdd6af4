"""E8P linear on a GPU: which kernel a call runs.

That follows from its shape and dtype and from what can be built for its GPU (`ops/family.py`: hopper or portable). In
front stands what measured best, behind it what takes its place where it cannot be built:

    1 to 4 tokens       e8p_decode, e8p_portable
    5 to 8              e8p_decode up to 16384 outputs; e8p_batch, and as below
    9 to 64             e8p_batch, e8p_portable, e8p_prefill, e8p_dequantize
    65 to 1279          e8p_prefill, e8p_dequantize
    1280 and more       e8p_dequantize

Of more than `MAX_K` columns only e8p_decode, e8p_portable and e8p_dequantize.
Where results must not depend on what runs beside them (`ops/invariant.py`), 1 to 16 tokens are run as 16 are.

Triton's kernels take the rest: float32, dimensions that are no multiples of 64, and all for which nothing here can be
built.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onegraph.ops import invariant
from onegraph.ops.calls import E8PAllReduce, E8PLinear
from onegraph.ops.cuda import e8p_batch, e8p_decode, e8p_dequantize, e8p_portable, e8p_prefill, exchange
from onegraph.ops.cuda.e8p_common import MAX_K, ROWS, Linear
from onegraph.ops.cuda.launcher import aligned, on_device

Kernel = Callable[[Linear], None]


def supports_shape(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernels here compute this shape."""
    return tokens > 0 and n % 64 == 0 and k % 64 == 0 and dtype in (torch.bfloat16, torch.float16)


def choose(tokens: int, n: int, k: int, bits: int, device: int) -> Kernel | None:
    """What computes a shape that is supported: the first kernel of its row that can be built, None where none can."""
    if e8p_decode.supports_shape(tokens, n) and e8p_decode.KERNEL.is_built(device):
        return e8p_decode.run
    if tokens > e8p_decode.FEW and e8p_batch.supports_shape(tokens, k, bits) and e8p_batch.KERNELS.is_built(device):
        return e8p_batch.run
    if e8p_portable.supports_shape(tokens, n) and e8p_portable.KERNELS.is_built(device):
        return e8p_portable.run
    if tokens <= e8p_decode.FEW:
        return None
    if tokens < e8p_dequantize.LEAST_TOKENS and k <= MAX_K and e8p_prefill.KERNELS.is_built(device):
        return e8p_prefill.run
    return e8p_dequantize.run if e8p_dequantize.KERNEL.is_built(device) else None


def supports_weight(n: int, k: int, bits: int, dtype: torch.dtype, device: int) -> bool:
    """Whether a kernel here computes one token of this shape."""
    return supports_shape(1, n, k, dtype) and choose(1, n, k, bits, device) is not None


def steady(n: int, k: int, bits: int, dtype: torch.dtype, device: int) -> bool:
    """Whether what runs `invariant.AT_ONCE` tokens of this shape can run fewer in the same order of sums."""
    tokens = invariant.AT_ONCE
    chosen = choose(tokens, n, k, bits, device) if supports_shape(tokens, n, k, dtype) else None
    return chosen in (e8p_batch.run, e8p_portable.run)


def linear(call: E8PLinear) -> Tensor:
    """See `onegraph.ops.e8p.e8p_linear`."""
    x, n, k, tokens = call.x, call.n, call.k, call.tokens
    steady = invariant.on() and 0 < tokens <= invariant.AT_ONCE
    cut_as = invariant.AT_ONCE if steady else tokens
    supported = x.is_cuda and supports_shape(cut_as, n, k, x.dtype)
    run = choose(cut_as, n, k, call.bits, x.device.index) if supported else None
    if run is None:
        from onegraph.ops.triton.e8p import linear as fallback  # kernels are compiled or interpreted as of their import

        return fallback(call)
    if e8p_decode.KERNEL.is_built(x.device.index):
        # Now: 5 tokens and more, which may be all that runs before a capture, do without.
        e8p_decode.resident_tables(call.codebook)
    shape, dtype = call.result
    return _run(run, call, torch.empty(shape, dtype=dtype, device=x.device), steady=steady)


def linear_all_reduce(call: E8PAllReduce) -> Tensor:
    """See `onegraph.ops.e8p_all_reduce`."""
    x, n = call.x, call.n
    fits = supports_shape(call.tokens, n, call.k, x.dtype) and n % ROWS == 0
    if not fits or not e8p_decode.KERNEL.is_built(x.device.index):
        return exchange.all_reduce(linear(call.product()), call.add, *call.group)
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    return _run(e8p_decode.run, call.product(add=call.add), out, group=call.group)


def _run(run: Kernel, call: E8PLinear, out: Tensor, **how: Any) -> Tensor:
    """Weights may be read before a kernel's wait (`ops/triton/launch.py`), copies of them too: torch's kernels let
    nothing start before they end."""
    call = replace(call, x=call.x.contiguous(), bias=None if call.bias is None else call.bias.float())
    given: list[Any] = [aligned(each) if isinstance(each, Tensor) else each for each in call]
    with on_device(out.device.index):
        run(Linear(*given, out=out, **how))
    return out
