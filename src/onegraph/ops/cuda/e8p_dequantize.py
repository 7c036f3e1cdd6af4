"""E8P linear for long prefills: `e8p_dequantize.cu` writes the weight, rotations undone, strip by strip, and cuBLAS
multiplies by it.

The strip is the workspace, `STRIP_BYTES` at most, whatever the layer, and where bias or `add` follow or the result is
float32 its product of `AT_ONCE` tokens. RMSNorm and SwiGLU in front are launches of their own, rounded in between; bias
and `add` join the float32 product before the result is rounded.
"""

from functools import cache

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import ROWS, SLICE, Linear, block

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
)


@cache
def _kernel(bits: int, half: bool, device: int) -> build.Kernel:
    return KERNEL.load({"BITS": bits, "HALF": int(half)}, device, SHARED)[0]


@cache
def available(device: int) -> bool:
    """Whether the kernel can be built for this GPU; warns once where not."""
    return KERNEL.usable(device, "another kernel runs many tokens of an E8P linear")


def weight(
    codes: Tensor, residual: Tensor | None, codebook: Tensor, in_scale: Tensor, out_scale: Tensor, bits: int,
    row_block: int, norm: float, to: Tensor,
) -> None:  # fmt: skip
    """Writes the rows of W that `codes` [rows, k/8] and `out_scale` [rows] stand for into `to` [rows, k].

    `row_block` is what the rotation of the layer's rows mixes; `norm` belongs to both rotations.
    """
    n, k = to.shape
    arguments = ARGUMENTS.pack(
        codes=codes.data_ptr(),
        residual=(codes if residual is None else residual).data_ptr(),
        codebook=codebook.data_ptr(),
        in_scale=in_scale.data_ptr(),
        out_scale=out_scale.data_ptr(),
        weight=to.data_ptr(),
        n=n,
        k=k,
        row_block=row_block,
        norm=norm,
    )
    kernel = _kernel(bits, to.dtype == torch.float16, to.device.index)
    stream = torch._C._cuda_getCurrentRawStream(to.device.index)
    kernel.launch((-(-k // SLICE), -(-n // ROWS), 1), THREADS, SHARED, 1, stream, arguments)


def launch(call: Linear) -> None:
    """`call` on the current device."""
    from onegraph.ops.triton.activation import swiglu  # kernels are compiled or interpreted as of their import
    from onegraph.ops.triton.norm import rms_norm

    x, codes, residual, n, k, bits, bias = call.x, call.codes, call.residual, call.n, call.k, call.bits, call.bias
    if call.silu:
        x = swiglu(x)
    elif call.eps >= 0:
        x = rms_norm(x, torch.ones(k, dtype=x.dtype, device=x.device), call.eps)
    rows, y = x.view(-1, k), call.out.view(-1, n)
    more = None if call.add is None else call.add.view(-1, n)
    strip = min(n, max(ROWS, STRIP_BYTES // (2 * k) // ROWS * ROWS))
    workspace = torch.empty((strip, k), dtype=x.dtype, device=x.device)
    for first in range(0, n, strip):
        some = slice(first, min(first + strip, n))
        w = workspace[: some.stop - first]
        rest = None if residual is None else residual[some]
        weight(codes[some], rest, call.codebook, call.in_scale, call.out_scale[some], bits, block(n), call.norm, w)
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
