"""Rounding under a Hessian: block LDLQ, then coordinate descent.

Both walk the blocks of 8 columns from last to first and encode, for each,

    target_k = W_k - sum_j A_kj E_j ,       E = W^ - W  so far

and differ in the coupling A only. LDLQ (QuIP#, arXiv 2402.04396, section 4.1): H = L D L^T with L unit block-lower, and
A_kj = L_jk^T for j > k; what remains of the loss is then sum |E'_k|^2 under D_k, whatever the later blocks do. Descent:
A_kj = H_kk^-1 H_kj for all j != k, the minimizer of tr(E H E^T) over block k with the others held; the loss is a
quadratic form H_kk around it, and a code is replaced only where that falls, so a pass never makes things worse.

Everything is held transposed, [k, n], so that a block is 8 contiguous rows. Feedback is applied 128 rows at a time
with one matrix product, and within those block by block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onegraph.quant.e8p import encode

_PANEL = 128
Encode = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass
class Rounded:
    """Codes and residual int32 [k/8, n] and decoded value float32 [k, n] (in units of w), transposed."""

    codes: Tensor
    residual: Tensor
    value: Tensor


@dataclass(frozen=True)
class Coupling:
    """The matrix A [k, k] and, per block, a factor C_k [k/8, 8, 8] of the metric |C_k e|^2 that a code is chosen in."""

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


def ldlq_coupling(factor: Tensor) -> Coupling:
    """From the lower Cholesky factor of H [k, k]."""
    k = factor.shape[0]
    at = torch.arange(k // 8, device=factor.device)
    diagonal = factor.view(k // 8, 8, k // 8, 8)[at, :, at]  # [k/8, 8, 8], lower triangular
    # L = factor @ inverse of its diagonal blocks, so A = L^T has block rows inv(C_k)^T factor_{:, k}^T
    ldlq = torch.empty(k // 8, 8, k, device=factor.device)
    columns = factor.T.reshape(k // 8, 8, k)
    for blocks in at.split(128):  # some at once: float64 of 14,336 columns takes 1.6 GB
        ldlq[blocks] = torch.linalg.solve_triangular(diagonal[blocks].mT, columns[blocks], upper=True).float()
    ldlq.view(k // 8, 8, k // 8, 8)[at, :, at] = 0.0
    return Coupling(ldlq.view(k, k), diagonal.mT.float().contiguous())


def descent_coupling(h: Tensor) -> Coupling:
    """From H [k, k]."""
    k = h.shape[0]
    at = torch.arange(k // 8, device=h.device)
    blocks = h.double().view(k // 8, 8, k // 8, 8)[at, :, at]
    own = torch.linalg.cholesky(blocks)
    descent = torch.cholesky_solve(h.double().reshape(k // 8, 8, k), own).reshape(k, k)
    descent.view(k // 8, 8, k // 8, 8)[at, :, at] = 0.0
    return Coupling(descent.float().contiguous(), own.mT.float().contiguous())


def sweep(w: Tensor, bits: int, coupling: Coupling, start: Rounded | None = None, encode: Encode = encode) -> Rounded:
    """One pass over all blocks of w [k, n]. `start` is what to improve; None begins with W^ = W, as LDLQ does."""
    k, n = w.shape
    a, metric = coupling.matrix, coupling.metric
    if start is None:
        codes = torch.zeros((k // 8, n), dtype=torch.int32, device=w.device)
        out = Rounded(codes, torch.zeros_like(codes), w.clone())
    else:
        out = Rounded(start.codes.clone(), start.residual.clone(), start.value.clone())
    for hi in range(k, 0, -_PANEL):
        lo = max(hi - _PANEL, 0)
        feedback = a[lo:hi] @ (out.value - w)
        for row in range(hi - 8, lo - 8, -8):
            rows, block = slice(row, row + 8), row // 8
            target = w[rows] - feedback[row - lo : row - lo + 8]
            codes, residual, value = encode(target, bits, metric[block])
            old = out.value[rows]
            if start is not None:
                both = metric[block] @ torch.cat((value - target, old - target), dim=1)
                now, before = both.square_().sum(0).view(2, n)
                better = now < before
                codes = torch.where(better, codes, out.codes[block])
                residual = torch.where(better, residual, out.residual[block])
                value = torch.where(better, value, old)
            feedback[: row - lo] += a[lo:row, rows] @ (value - old)
            out.codes[block], out.residual[block], out.value[rows] = codes, residual, value
    return out


def loss(error: Tensor, h: Tensor) -> Tensor:
    """tr(E^T H E) of an error [k, n], transposed as everything here; float32 scalar."""
    return (error * (h @ error)).sum()
