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

import torch
from torch import Tensor

from onegraph.ops import invariant
from onegraph.ops.cuda import e8p_batch, e8p_decode, e8p_dequantize, e8p_portable, e8p_prefill, exchange
from onegraph.ops.cuda.e8p_common import MAX_K, NO_EXCHANGE, ROWS, Linear

ALIGNMENT = 16  # bytes, of every pointer


def takes(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernels here compute this shape."""
    return tokens > 0 and n % 64 == 0 and k % 64 == 0 and dtype in (torch.bfloat16, torch.float16)


def launcher(tokens: int, n: int, k: int, bits: int, device: int) -> Callable[[Linear], None] | None:
    """What computes a shape that `takes` allows: the first kernel of its row that can be built, None where none can."""
    if e8p_decode.takes(tokens, n) and e8p_decode.available(device):
        return e8p_decode.launch
    if tokens > e8p_decode.FEW and e8p_batch.takes(tokens, k, bits) and e8p_batch.available(device):
        return e8p_batch.launch
    if e8p_portable.takes(tokens, n) and e8p_portable.available(device):
        return e8p_portable.launch
    if tokens <= e8p_decode.FEW:
        return None
    if tokens < e8p_dequantize.LEAST_TOKENS and k <= MAX_K and e8p_prefill.available(device):
        return e8p_prefill.launch
    return e8p_dequantize.launch if e8p_dequantize.available(device) else None


def reads(n: int, k: int, bits: int, dtype: torch.dtype, device: int) -> bool:
    """Whether a kernel here computes one token of this shape."""
    return takes(1, n, k, dtype) and launcher(1, n, k, bits, device) is not None


def steady(n: int, k: int, bits: int, dtype: torch.dtype, device: int) -> bool:
    """Whether what runs `invariant.AT_ONCE` tokens of this shape can run fewer in the same order of sums."""
    tokens = invariant.AT_ONCE
    chosen = launcher(tokens, n, k, bits, device) if takes(tokens, n, k, dtype) else None
    return chosen in (e8p_batch.launch, e8p_portable.launch)


def linear(
    x: Tensor,
    codes: Tensor,
    residual: Tensor | None,
    codebook: Tensor,
    in_scale: Tensor,
    out_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    add: Tensor | None = None,
    eps: float | None = None,
    silu: bool = False,
    wide: bool = False,
) -> Tensor:
    """See `onegraph.ops.e8p.e8p_linear`."""
    n, k = codes.shape[0], codes.shape[1] * 8
    tokens = x.numel() // (2 * k if silu else k)
    alike = invariant.on() and 0 < tokens <= invariant.AT_ONCE
    class_of = invariant.AT_ONCE if alike else tokens
    taken = x.is_cuda and takes(class_of, n, k, x.dtype)
    launch = launcher(class_of, n, k, bits, x.device.index) if taken else None
    if launch is None:
        from onegraph.ops.triton.e8p import linear as fallback  # kernels are compiled or interpreted as of their import

        return fallback(x, codes, residual, codebook, in_scale, out_scale, bias, bits, add, eps, silu, wide)
    if e8p_decode.available(x.device.index):
        # Now: 5 tokens and more, which may be all that runs before a capture, do without.
        e8p_decode.have_tables(codebook)
    out = torch.empty((*x.shape[:-1], n), dtype=torch.float32 if wide else x.dtype, device=x.device)
    inputs = _inputs(x, codes, residual, codebook, in_scale, out_scale, bias, add)
    half, norm_eps = x.dtype == torch.float16, -1.0 if eps is None else eps
    rest = out, bits, tokens, n, k, half, norm_eps, silu, wide, alike
    _launched(launch, Linear._make((*inputs, *rest, 1, NO_EXCHANGE)))
    return out


def linear_all_reduce(
    x: Tensor,
    codes: Tensor,
    residual: Tensor | None,
    codebook: Tensor,
    in_scale: Tensor,
    out_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    add: Tensor | None,
    silu: bool,
    inboxes: list[Tensor],
    state: Tensor,
    alarm: Tensor,
    rank: int,
) -> Tensor:
    """See `onegraph.ops.e8p_all_reduce`."""
    n, k, tokens = codes.shape[0], codes.shape[1] * 8, x.shape[:-1].numel()
    weight, group = (codes, residual, codebook, in_scale, out_scale, bias), (inboxes, state, alarm, rank)
    if not (takes(tokens, n, k, x.dtype) and n % ROWS == 0 and e8p_decode.available(x.device.index)):
        own = linear(x, *weight, bits, None, None, silu)
        return exchange.all_reduce(own, add, *group)
    e8p_decode.have_tables(codebook)
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    rest = out, bits, tokens, n, k, x.dtype == torch.float16, -1.0, silu, False, False
    call = Linear._make((*_inputs(x, *weight, add), *rest, len(inboxes), exchange.given(*group)))
    _launched(e8p_decode.launch, call)
    return out


def _inputs(x: Tensor, *rest: Tensor | None) -> list[Tensor | None]:
    """As a launch takes them; the last but one is the bias.

    Weights may be read before a kernel's wait (`ops/triton/launch.py`), copies of them too: torch's kernels let nothing
    start before they end.
    """
    *weight, bias, add = rest
    given = (x.contiguous(), *weight, None if bias is None else bias.float(), add)
    return [tensor.clone() if tensor is not None and tensor.data_ptr() % ALIGNMENT else tensor for tensor in given]


def _launched(launch: Callable[[Linear], None], call: Linear) -> None:
    if torch.cuda.current_device() == call.x.device.index:
        launch(call)
    else:
        with torch.cuda.device(call.x.device):  # the driver launches in the current context
            launch(call)
