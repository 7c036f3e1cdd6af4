"""Rounding under a Hessian: block LDLQ, then coordinate descent.

Both walk the blocks of columns that are coded together (8 of E8P, 16 of the trellis) from last to first and encode,
for each,

    target_k = W_k - sum_j A_kj E_j ,       E = W^ - W  so far

and differ in the coupling A only. LDLQ (QuIP#, arXiv 2402.04396, section 4.1): H = L D L^T with L unit block-lower, and
A_kj = L_jk^T for j > k; what remains of the loss is then sum |E'_k|^2 under D_k, whatever the later blocks do. Descent:
A_kj = H_kk^-1 H_kj for all j != k, the minimizer of tr(E H E^T) over block k with the others held; the loss is a
quadratic form H_kk around it, and a code is replaced only where that falls, so a pass never makes things worse.

Everything is held transposed, [k, n], so that a block is 8 contiguous rows. Feedback is applied 128 rows at a time
with one matrix product, and within those block by block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onegraph.quant.e8p import encode

_PANEL = 128
# (targets [block, N], rate, metric [.., block, block]) -> codes [.., N] of one or more kinds, then values [block, N]
Encode = Callable[..., tuple[Tensor, ...]]


@dataclass
class Rounded:
    """Codes int32 [k/block, .., n], of each kind that a format has, and decoded value float32 [k, n] (in units of w),
    transposed."""

    codes: tuple[Tensor, ...]
    value: Tensor

    def columns(self, start: int, stop: int) -> "Rounded":
        return Rounded(tuple(each[..., start:stop] for each in self.codes), self.value[:, start:stop])

    @classmethod
    def joined(cls, parts: "Sequence[Rounded]") -> "Rounded":
        """Parts in parallel."""
        kinds = zip(*(part.codes for part in parts), strict=True)
        return cls(tuple(torch.cat(each, dim=-1) for each in kinds), torch.cat([part.value for part in parts], dim=-1))


@dataclass(frozen=True)
class Coupling:
    """The matrix A [k, k] and, per block, a factor C_k [k/block, block, block] of the metric |C_k e|^2 that a code is
    chosen in."""

    matrix: Tensor
    metric: Tensor


def damped(hessian: Tensor, damping: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """H / mean(diag H) + damping I in float32, and its lower Cholesky factor; tenfold damping until the factorization
    succeeds.

    dtype: of the factor, and of what is computed. Raises ValueError for a Hessian that is not finite or has no mass.
    """
    h = hessian.to(dtype, copy=True)
    mean = h.diagonal().mean()
    if not torch.isfinite(h).all() or mean <= 0:
        raise ValueError("the Hessian of a layer is zero or not finite; calibrate with more, or other, text")
    h /= mean
    diagonal = h.diagonal().clone()
    while damping <= 10:
        h.diagonal().copy_(diagonal + damping)
        factor, failed = torch.linalg.cholesky_ex(h)
        if not failed:
            return h.float(), factor
        damping *= 10
    raise ValueError("the Hessian of a layer is not positive definite even with damping 10; its inputs are damaged")


def ldlq_coupling(factor: Tensor, block: int = 8) -> Coupling:
    """From the lower Cholesky factor of H [k, k]."""
    k = factor.shape[0]
    at = torch.arange(k // block, device=factor.device)
    diagonal = factor.view(k // block, block, k // block, block)[at, :, at]  # lower triangular
    # L = factor @ inverse of its diagonal blocks, so A = L^T has block rows inv(C_k)^T factor_{:, k}^T
    ldlq = torch.empty(k // block, block, k, device=factor.device)
    columns = factor.T.reshape(k // block, block, k)
    for blocks in at.split(1024 // block):  # some at once: float64 of 14,336 columns takes 1.6 GB
        ldlq[blocks] = torch.linalg.solve_triangular(diagonal[blocks].mT, columns[blocks], upper=True).float()
    ldlq.view(k // block, block, k // block, block)[at, :, at] = 0.0
    return Coupling(ldlq.view(k, k), diagonal.mT.float().contiguous())


def descent_coupling(h: Tensor, block: int = 8) -> Coupling:
    """From H [k, k]."""
    k = h.shape[0]
    at = torch.arange(k // block, device=h.device)
    blocks = h.double().view(k // block, block, k // block, block)[at, :, at]
    own = torch.linalg.cholesky(blocks)
    descent = torch.cholesky_solve(h.double().reshape(k // block, block, k), own).reshape(k, k)
    descent.view(k // block, block, k // block, block)[at, :, at] = 0.0
    return Coupling(descent.float().contiguous(), own.mT.float().contiguous())


def sweep(
    w: Tensor, bits: int, coupling: Coupling, start: Rounded | None = None, encode: Encode = encode, together: int = 1
) -> Rounded:
    """One pass over all blocks of w [k, n]. `start` is what to improve; None begins with W^ = W, as LDLQ does.
    together: outputs that are coded together."""
    k = len(w)
    a, metric = coupling.matrix, coupling.metric
    size = metric.shape[-1]
    codes = None if start is None else tuple(each.clone() for each in start.codes)
    result = (w if start is None else start.value).clone()
    for hi in range(k, 0, -_PANEL):
        lo = max(hi - _PANEL, 0)
        feedback = a[lo:hi] @ (result - w)
        for row in range(hi - size, lo - size, -size):
            rows, block = slice(row, row + size), row // size
            target = w[rows] - feedback[row - lo : row - lo + size]
            *found, value = encode(target, bits, metric[block])
            old = result[rows]
            if codes is None:
                codes = tuple(each.new_zeros(k // size, *each.shape) for each in found)
            if start is not None:
                both = metric[block] @ torch.cat((value - target, old - target), dim=1)
                now, before = both.square_().sum(0).view(2, -1, together).sum(-1)
                better = (now < before).repeat_interleave(together)
                found = [torch.where(better, each, kept[block]) for each, kept in zip(found, codes, strict=True)]
                value = torch.where(better, value, old)
            feedback[: row - lo] += a[lo:row, rows] @ (value - old)
            result[rows] = value
            for each, to in zip(found, codes, strict=True):
                to[block] = each
    assert codes is not None
    return Rounded(codes, result)


def loss(error: Tensor, h: Tensor) -> Tensor:
    """tr(E^T H E) of an error [k, n], transposed as everything here; float32 scalar."""
    return (error * (h @ error)).sum()
