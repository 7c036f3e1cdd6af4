"""Orthonormal block Hadamard rotation along the last dimension (QuIP#, arXiv 2402.04396, section 3)."""

import torch
from torch import Tensor

from onegraph.formats.rotated import MAX_BLOCK
from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register

_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
_MULTIPLIES_INT8 = torch.backends.mkldnn.is_available() and _AVX512
"""Whether oneDNN multiplies int8 faster than float32: with AVX2 it takes 20 times as long, elsewhere torch has a plain
loop."""


def _reference(x: Tensor, block: int) -> Tensor:
    rows = x.float().reshape(-1, block)
    return _butterfly(rows, block).mul(block**-0.5).reshape(x.shape).to(x.dtype)


def _butterfly(y: Tensor, block: int, inner: int = 1) -> Tensor:
    """H_block times every `block` neighbours of y, each of them `inner` numbers; same order of sums for any `inner`."""
    half, size = inner, y.shape
    while half < block * inner:
        pairs = y.reshape(-1, 2, half)
        y = torch.empty_like(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=y[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=y[:, 1])
        half *= 2
    return y.reshape(size)


def rotate_rows(x: Tensor, block: int) -> Tensor:
    """`hadamard` along the first dimension of x float32 [n, k], block dividing n: the bits of the transposed call."""
    return _butterfly(x.contiguous(), block, x.shape[1]).mul(block**-0.5)


def rotate_integers(q: Tensor, block: int) -> Tensor:
    """`hadamard(q.float(), block)` of integers q [n, k], any dtype, below 2^24 / block, on a CPU: a product with the
    matrix, whose sums are exact in any order, so the bits are the same. In int8 it takes a tenth of the time, with
    AVX2 in float32 a third."""
    matrix, rows = _butterfly(torch.eye(block), block), q.reshape(-1, block)
    if _MULTIPLIES_INT8 and q.dtype == torch.int8:
        sums = torch._int_mm(rows, matrix.to(torch.int8)).float()
    else:
        sums = rows.float() @ matrix
    return sums.mul_(block**-0.5).reshape(q.shape)


def _check(x: Tensor, block: int) -> None:
    if block < 1 or block > MAX_BLOCK or block & (block - 1):
        raise ValueError(f"block is {block}; allowed: a power of two, at most {MAX_BLOCK}")
    if x.dim() == 0 or x.shape[-1] % block:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be a multiple of block = {block}")
    if x.dtype not in FLOATS:
        raise ValueError(f"x is {x.dtype}; allowed: float32, bfloat16, float16")
    if not x.is_contiguous():
        raise ValueError(f"x has strides {x.stride()}; it must be contiguous: call x.contiguous()")


def _case(*shape: int, block: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, int]:
        return torch.randn(shape, generator=generator).to(device, dtype), block

    return Case(name=f"{'x'.join(map(str, shape))}/{block}", make=make)


hadamard = register(
    Op(
        name="hadamard",
        schema="(Tensor x, int block) -> Tensor",
        reference=_reference,
        fake=lambda x, block: torch.empty_like(x),
        kernel="onegraph.ops.triton.hadamard:hadamard",
        check=_check,
        cases=(
            _case(1, 576, block=64),
            _case(3, 1536, block=128),
            _case(5, 192, block=64),
            _case(2, 3, 11008, block=128),
            _case(4, 1000, block=8),
            _case(7, 49, block=1),
            _case(2, 128, block=2),
            _case(0, 256, block=128),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda x, block: 2 * nbytes(x),
        flops=lambda x, block: x.numel() * (block.bit_length() - 1),
    )
)
"""`hadamard(x [..., d], block) -> [..., d]`: every `block` neighbours times H_block / sqrt(block); its own inverse.

float32 inside, result in x's dtype. `block` is a power of two, at most 128, that divides d.
"""
