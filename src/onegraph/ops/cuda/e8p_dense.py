"""E8P linear for prefill: `e8p_dense.cu` writes the weight, rotations undone, strip by strip; cuBLAS multiplies by it.

The strip is the workspace, `STRIP_BYTES` at most, whatever the layer, and where bias or `add` follow or the result is
float32 its product of `AT_ONCE` tokens. RMSNorm and SwiGLU in front are launches of their own, rounded in between; bias
and `add` join the float32 product before the result is rounded.
"""

import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_name("e8p_dense.cu")
LEAST_TOKENS = 1280  # up to 1024 are quicker through e8p_many.cu (benchmarks/results/e8p-few-variants-h200.jsonl)
STRIP_BYTES = 128 << 20  # of the weight at a time
AT_ONCE = 4096  # tokens whose float32 product is kept
THREADS, ROWS, SLICE = 128, 128, 256  # as in the kernel
SHARED = ROWS * (SLICE // 2 + 4) * 4 + 768 * 4 + ROWS * 4


@cache
def _kernel(bits: int, half: bool, device: int) -> build.Kernel:
    return build.load(SOURCE, {"BITS": bits, "HALF": int(half)}, ("e8p_dense",), device, SHARED)[0]


def weight(
    codes: Tensor, residual: Tensor | None, codebook: Tensor, in_scale: Tensor, out_scale: Tensor, bits: int,
    block: int, norm: float, to: Tensor,
) -> None:  # fmt: skip
    """Writes the rows of W that `codes` [rows, k/8] and `out_scale` [rows] stand for into `to` [rows, k].

    `block` is what the rotation of the layer's rows mixes; `norm` belongs to both rotations.
    """
    n, k = to.shape
    rest = codes if residual is None else residual
    pointers = [t.data_ptr() for t in (codes, rest, codebook, in_scale, out_scale, to)]
    arguments = struct.pack("6Q3if", *pointers, n, k, block, norm)
    kernel = _kernel(bits, to.dtype == torch.float16, to.device.index)
    stream = torch._C._cuda_getCurrentRawStream(to.device.index)
    kernel.launch((-(-k // SLICE), -(-n // ROWS), 1), THREADS, SHARED, 1, stream, arguments)


def linear(
    inputs: list[Tensor | None], out: Tensor, bits: int, block: int, norm: float, options: tuple[float, bool, bool]
) -> None:
    """`inputs` (x, codes, residual, codebook, in_scale, out_scale, bias, add) -> out, on the current device.

    `options`: eps (negative: none), silu, wide. `block`: of the rotation of the rows.
    """
    from onegraph.ops.triton.activation import swiglu  # kernels are compiled or interpreted as of their import
    from onegraph.ops.triton.norm import rms_norm

    x, codes, residual, codebook, in_scale, out_scale, bias, add = inputs
    assert x is not None
    assert codes is not None
    assert codebook is not None
    assert in_scale is not None
    assert out_scale is not None
    eps, silu, wide = options
    n, k = codes.shape[0], codes.shape[1] * 8
    if silu:
        x = swiglu(x)
    elif eps >= 0:
        x = rms_norm(x, torch.ones(k, dtype=x.dtype, device=x.device), eps)
    rows, y = x.view(-1, k), out.view(-1, n)
    more = None if add is None else add.view(-1, n)
    strip = min(n, max(ROWS, STRIP_BYTES // (2 * k) // ROWS * ROWS))
    workspace = torch.empty((strip, k), dtype=x.dtype, device=x.device)
    for first in range(0, n, strip):
        some = slice(first, min(first + strip, n))
        w = workspace[: some.stop - first]
        rest = None if residual is None else residual[some]
        weight(codes[some], rest, codebook, in_scale, out_scale[some], bits, block, norm, w)
        if not wide and bias is None and more is None:
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
