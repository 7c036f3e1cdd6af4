"""Trellis-coded linear for many tokens: `trellis_dequantize.cu` writes the weight, rotations undone, strip by strip,
and cuBLAS multiplies by it, as `e8p_dequantize.py` tells."""

from torch import Tensor

from onegraph.ops.cuda import build, e8p_dequantize
from onegraph.ops.cuda.e8p_common import ROWS, block
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.trellis_common import Linear

TILE = 16
SHARED = (8 * 8 + 2) * 32 * 16 + 128 * 4  # bytes, as in the kernel

KERNEL = build.Source(
    "trellis_dequantize",
    ops=("trellis_linear",),
    functions=("trellis_dequantize",),
    arguments=build.Arguments(
        pointers=("codes", "in_scale", "out_scale", "weight"), ints=("n", "k", "row_block"), floats=("norm",)
    ),
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example={"BITS": 2, "HALF": 0, "CODE": 0},
    shared=SHARED,
    otherwise="few tokens have a kernel of their own; torch computes many",
)


def weight(call: Linear, rows: slice, to: Tensor) -> None:
    """Writes these rows of the layer's W into `to` [rows, k]."""
    launch(
        KERNEL, {"BITS": call.bits, "HALF": int(call.half)} | call.defines,
        Launch((-(-call.k // 128), -(-len(to) // ROWS), 1), 256, SHARED),
        codes=call.codes[rows.start // TILE : -(-rows.stop // TILE)], in_scale=call.in_scale,
        out_scale=call.out_scale[rows], weight=to, n=len(to), k=call.k, row_block=block(call.n), norm=call.norm,
    )  # fmt: skip


def run(call: Linear) -> None:
    """`call`, of any number of tokens."""
    e8p_dequantize.multiply(call, weight)
