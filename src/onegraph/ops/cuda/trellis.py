"""Trellis-coded linear on a GPU: which kernel a call runs, by its shape and dtype and by what can be built for its GPU.

    1 to FEW tokens     trellis_portable
    up to 128           trellis_batch, 64 at once
    more                trellis_dequantize

Where results must not depend on what runs beside them (`ops/invariant.py`), 1 to 16 tokens are run by trellis_portable,
as 16 are. float32, dimensions that are no multiples of 64, and GPUs for which nothing here can be built take torch's
calls. exllamav3's codes run by the same kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onegraph.ops import invariant
from onegraph.ops.calls import TrellisLinear
from onegraph.ops.cuda import trellis_batch, trellis_dequantize, trellis_portable
from onegraph.ops.cuda.launcher import aligned, on_device
from onegraph.ops.cuda.trellis_common import Linear

FEW = 8  # tokens that trellis_portable computes; more are quicker by trellis_batch

Kernel = Callable[[Linear], None]


def choose(tokens: int, n: int, k: int, dtype: torch.dtype, device: int, steady: bool = False) -> Kernel | None:
    """What computes a shape; None where nothing here does. `steady`: with the sums of `invariant.AT_ONCE` tokens."""
    few = trellis_portable.supports_shape(tokens, n, k, dtype) and trellis_portable.KERNELS.is_built(device)
    if few and (steady or tokens <= FEW):
        return trellis_portable.run
    if trellis_batch.supports_shape(tokens, n, k, dtype) and trellis_batch.KERNELS.is_built(device):
        return trellis_batch.run
    if few:
        return trellis_portable.run
    fits = tokens > 0 and n % 64 == 0 and k % 64 == 0 and dtype in (torch.bfloat16, torch.float16)
    return trellis_dequantize.run if fits and trellis_dequantize.KERNEL.is_built(device) else None


def supports_weight(n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    """Whether a kernel here computes one token of this shape."""
    return choose(1, n, k, dtype, device) is not None


def steady(n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    """Whether what runs `invariant.AT_ONCE` tokens of this shape can run fewer in the same order of sums."""
    return choose(invariant.AT_ONCE, n, k, dtype, device, steady=True) is trellis_portable.run


def linear(call: TrellisLinear) -> Tensor | None:
    """See `onegraph.ops.trellis.trellis_linear`; None for a call that nothing here computes."""
    x, tokens = call.x, call.tokens
    steady = invariant.on() and 0 < tokens <= invariant.AT_ONCE
    if not x.is_cuda:
        return None
    run = choose(tokens, call.n, call.k, x.dtype, x.device.index, steady)
    if run is None:
        return None
    shape, dtype = call.result
    out = torch.empty(shape, dtype=dtype, device=x.device)
    call = replace(call, x=x.contiguous(), bias=None if call.bias is None else call.bias.float())
    given: list[Any] = [aligned(each) if isinstance(each, Tensor) else each for each in call]
    with on_device(out.device.index):
        run(Linear(*given, out=out, steady=steady))
    return out
