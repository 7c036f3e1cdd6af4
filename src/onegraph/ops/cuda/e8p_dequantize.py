"""E8P linear for long prefills: `e8p_dequantize.cu` writes the weight, rotations undone, strip by strip, and cuBLAS
multiplies by it.

The strip is the workspace, `STRIP_BYTES` at most, whatever the layer, and where bias or `add` follow or the result is
float32 its product of `AT_ONCE` tokens. RMSNorm and SwiGLU in front are launches of their own, rounded in between; bias
and `add` join the float32 product before the result is rounded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import ROWS, SLICE, Linear, block
from onegraph.ops.cuda.launcher import Launch, launch

LEAST_TOKENS = 1280  # up to 1024 are quicker through e8p_prefill.cu (docs/log.md)
STRIP_BYTES = 128 << 20  # of the weight at a time
AT_ONCE = 4096  # tokens whose float32 product is kept
THREADS = 128  # as in the kernel
SHARED = ROWS * (SLICE // 2 + 4) * 4 + 768 * 4 + ROWS * 4


ARGUMENTS = build.Arguments(
    pointers=("codes", "residual", "codebook", "in_scale", "out_scale", "weight"),
    ints=("n", "k", "row_block"),
    floats=("norm",),
)
KERNEL = build.Source(
    "e8p_dequantize",
    ops=("e8p_linear",),
    functions=("e8p_dequantize",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    example={"BITS": 2, "HALF": 0},
    shared=SHARED,
    otherwise="another kernel runs many tokens of an E8P linear",
)


def weight(call: Linear, rows: slice, to: Tensor) -> None:
    """Writes these rows of the layer's W into `to` [rows, k]."""
    launch(
        KERNEL, {"BITS": call.bits, "HALF": int(call.half)},
        Launch((-(-call.k // SLICE), -(-len(to) // ROWS), 1), THREADS, SHARED),
        **{name: each[rows] for name, each in call.stages.items()}, codebook=call.codebook, in_scale=call.in_scale,
        out_scale=call.out_scale[rows], weight=to, n=len(to), k=call.k, row_block=block(call.n), norm=call.norm,
    )  # fmt: skip


def run(call: Linear) -> None:
    """`call`, of any number of tokens."""
    multiply(call, weight)


def multiply(call: Any, weight: Callable[[Any, slice, Tensor], None]) -> None:
    """A call as the launches take it, by what writes rows of its weight."""
    from onegraph.ops.triton.activation import swiglu  # kernels are compiled or interpreted as of their import
    from onegraph.ops.triton.norm import rms_norm

    x, n, k, bias = call.x, call.n, call.k, call.bias
    if call.silu:
        x = swiglu(x)
    elif call.eps is not None:
        x = rms_norm(x, torch.ones(k, dtype=x.dtype, device=x.device), call.eps)
    rows, y = x.view(-1, k), call.out.view(-1, n)
    more = None if call.add is None else call.add.view(-1, n)
    strip = min(n, max(ROWS, STRIP_BYTES // (2 * k) // ROWS * ROWS))
    workspace = torch.empty((strip, k), dtype=x.dtype, device=x.device)
    for first in range(0, n, strip):
        some = slice(first, min(first + strip, n))
        w = workspace[: some.stop - first]
        weight(call, some, w)
        if not call.wide and bias is None and more is None:
            torch.mm(rows, w.t(), out=y[:, some])
            continue
        for begin in range(0, len(rows), AT_ONCE):
            here = slice(begin, begin + AT_ONCE)
            product = torch.mm(rows[here], w.t(), out_dtype=torch.float32)
            if bias is not None:
                product += bias[some]
            if more is not None:
                product += more[here, some]
            y[here, some] = product
