"""Rounding under a Hessian with two factors, of inputs and of outputs: LDLQ along both.

The loss of an error E [k, n] (transposed, as everything in `ldlq.py`) is tr(H_I E H_O E^T). With H_I = L_I D_I L_I^T
and H_O = L_O D_O L_O^T, L unit block-lower, it is the sum of squares of L_I^T E L_O under D_I and D_O, whose blocks are

    (L_I^T E L_O)_kr = E_kr + sum over k' >= k, r' >= r, not both equal, of L_I,k'k^T E_k'r' L_O,r'r

so that a block of some inputs and some outputs is encoded at W_kr less that sum, when all blocks behind it in both
directions are done (YAQA, arXiv 2505.22988, section 3.2, finds the same point by iterating over whole columns). Blocks
of one antidiagonal do not ask each other: a wave encodes them together, and there are k/8 + n/ROWS - 1 waves, hardly
more than LDLQ has steps. Where H_O is the identity this is LDLQ.
"""

import torch
from torch import Tensor

from onegraph.quant.ldlq import Coupling, Encode, Rounded

ROWS = 16  # outputs that are encoded without regard to each other: 1 gains a hundredth, 64 loses a fifth (docs/log.md)


def parts(k: int, n: int, block: int = 8) -> int:
    """Blocks of the largest waves of [k, n], each of `ROWS` vectors."""
    return min(k // block, -(-n // ROWS))


def output_weights(factor: Tensor) -> Tensor:
    """The diagonal of D_O [n / ROWS, ROWS], relative to the mean, from the lower Cholesky factor of H_O: what an error
    of each output counts where those of a block are coded together."""
    blocks = factor.shape[0] // ROWS
    at = torch.arange(blocks, device=factor.device)
    found = factor.view(blocks, ROWS, blocks, ROWS)[at, :, at].square().sum(-1).float()
    return found / found.mean()


def output_coupling(factor: Tensor) -> Tensor:
    """L_O [n, n] float32, unit block-lower in blocks of `ROWS`, n rounded up to whole ones, from the lower Cholesky
    factor of H_O, whose place it may take."""
    n = factor.shape[0]
    blocks = -(-n // ROWS)
    whole = factor
    if n % ROWS:
        whole = torch.eye(blocks * ROWS, dtype=factor.dtype, device=factor.device)
        whole[:n, :n] = factor
    at = torch.arange(blocks)
    diagonal = whole.view(blocks, ROWS, blocks, ROWS)[at, :, at]
    for first in range(0, blocks, 64):  # some columns at once: a matrix of 14,336 rows is large
        columns = whole[:, first * ROWS : (first + 64) * ROWS]
        each = columns.reshape(blocks * ROWS, -1, ROWS).permute(1, 0, 2)
        unit = torch.linalg.solve_triangular(diagonal[first : first + 64], each, upper=False, left=False)
        columns.copy_(unit.permute(1, 0, 2).reshape(columns.shape))
    return whole.float()


def sweep(
    w: Tensor, bits: int, inputs: Coupling, outputs: Tensor, encode: Encode, weights: Tensor | None = None
) -> Rounded:
    """Codes of w [k, n]. inputs: LDLQ's coupling (`ldlq_coupling`); outputs: `output_coupling`, of n rounded up.

    encode: takes targets [block, N] with a metric a column block [N / ROWS, block, block]; and, with `weights`
    (`output_weights`), those of its outputs [N / ROWS, ROWS].
    """
    k, n = w.shape
    device, size = w.device, inputs.metric.shape[-1]
    deep, wide = k // size, outputs.shape[0] // ROWS
    # Blocks of inputs are counted from the last one here, so that a wave is a diagonal of (inputs, outputs): a view of
    # what it reads, and a run of rows of what it adds to.
    target = torch.nn.functional.pad(w, (0, wide * ROWS - n)).view(deep, size, wide, ROWS).flip(0)
    along = inputs.matrix.T.reshape(deep, size, deep, size).flip(0, 2).view(deep, size, k)  # rows k of L_I - I
    across = outputs.view(wide, ROWS, wide * ROWS)
    metrics = inputs.metric.flip(0)
    deeper = torch.zeros(wide, k, ROWS, device=device)  # L_I^T E, of what is done, by block of outputs
    beside = torch.zeros(deep, size, wide * ROWS, device=device)  # (L_I^T E) (L_O - I), likewise, by block of inputs
    codes: list[Tensor] = []
    value = torch.zeros(deep, size, wide, ROWS, device=device)
    for offset in range(wide - 1, -deep, -1):  # the diagonal of the wave
        b = slice(max(0, offset), min(wide, deep + offset))
        a = slice(b.start - offset, b.stop - offset)

        def of_wave(tensor: Tensor, offset: int = offset) -> Tensor:  # [deep, size, wide, ROWS] -> [size, count, ROWS]
            return tensor.diagonal(offset, 0, 2).transpose(1, 2)

        goal, done = of_wave(target), of_wave(deeper.view(wide, deep, size, ROWS).permute(1, 2, 0, 3))
        want = goal - done - of_wave(beside.view(deep, size, wide, ROWS))
        given = () if weights is None else (weights[b],)
        *found, got = encode(want.reshape(size, -1), bits, metrics[a], *given)
        got = got.view(size, -1, ROWS)
        if not codes:
            codes = [each.new_zeros(deep, wide, *each.shape[:-1], ROWS) for each in found]
        for to, each in zip(codes, found, strict=True):
            to.diagonal(offset).copy_(each.unflatten(-1, (-1, ROWS)).transpose(-1, -2))
        of_wave(value).copy_(got)
        error = (got - goal).transpose(0, 1).contiguous()
        behind = error + done.transpose(0, 1)
        # Both factors are lower triangular: a block adds to blocks nearer the beginning alone, so the sums start behind
        # the wave's first block of inputs (counted from the last one) and end before its last block of outputs.
        inner, outer = (a.start + 1) * size, (b.stop - 1) * ROWS
        deeper[b, inner:].baddbmm_(along[a, :, inner:].transpose(1, 2), error)
        beside[a, :, :outer].baddbmm_(behind, across[b, :, :outer])
    kinds = tuple(each.flip(0).movedim(1, -2).flatten(-2)[..., :n] for each in codes)
    return Rounded(kinds, value.flip(0).view(k, wide * ROWS)[:, :n])
