"""Hyper-connections: the streams updated and the mixing weights in slices, then mixture and RMSNorm beside Sinkhorn."""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

SLICE = 512  # elements of the flattened streams that one program multiplies
TILE = 128  # columns of all streams that one program updates and multiplies


@triton.jit
def _dots(
    streams, fn, dots, squares, size, M: tl.constexpr, WIDE: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr
):
    """One slice of fn · flat and of |flat|²: dots [T, slices, M], squares [T, slices]."""
    let_next_start(PDL)
    at, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = at * SLICE + tl.arange(0, SLICE)
    row = tl.arange(0, WIDE)
    inside = (row < M)[:, None] & (column < size)[None, :]
    weight = tl.load(fn + row[:, None] * size + column[None, :], mask=inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(streams + token * size + column, mask=column < size, other=0.0).to(tl.float32)
    place = token * tl.num_programs(0) + at
    tl.store(dots + place * M + row, tl.sum(weight * x[None, :], axis=1), mask=row < M)
    tl.store(squares + place, tl.sum(x * x, axis=0))


@triton.jit
def _update_dots(
    streams, x, post, comb, fn, dots, squares, dim, floor,
    H: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    ITERATIONS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns of the streams updated, and what `_dots` makes of them for the next sublayer."""
    let_next_start(PDL)
    at, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, k, row = at * TILE + tl.arange(0, TILE), tl.arange(0, HP), tl.arange(0, WIDE)
    inside = (k < H)[:, None] & (column < dim)[None, :]
    weight = tl.load(
        fn + row[:, None, None] * (H * dim) + k[None, :, None] * dim + column[None, None, :],
        mask=(row < M)[:, None, None] & inside[None, :, :],
        other=0.0,
    )
    wait_for_previous(PDL)
    new = _updated(streams, x, post, comb, token, column, k, dim, floor, H, ITERATIONS)
    tl.store(streams + (token * H + k)[:, None] * dim + column[None, :], new, mask=inside)
    value = tl.where(inside, new.to(tl.float32), 0.0)
    place = token * tl.num_programs(0) + at
    tl.store(dots + place * M + row, tl.sum(tl.sum(weight * value[None, :, :], axis=2), axis=1), mask=row < M)
    tl.store(squares + place, tl.sum(tl.sum(value * value, axis=1), axis=0))


@triton.jit
def _sinkhorn(c, real, floor, ITERATIONS: tl.constexpr):
    """The mixing matrix of logits c [HP, HP], of which `real` are there; zeros elsewhere."""
    top = tl.max(tl.where(real, c, -1e30), axis=1)
    c = tl.where(real, tl.exp(c - top[:, None]), 0.0)
    total = tl.sum(c, axis=1)
    c = tl.where(real, c / tl.where(total > 0.0, total, 1.0)[:, None] + floor, 0.0)
    c = tl.where(real, c / (tl.sum(c, axis=0) + floor)[None, :], 0.0)
    for _ in range(ITERATIONS - 1):
        c = tl.where(real, c / (tl.sum(c, axis=1) + floor)[:, None], 0.0)
        c = tl.where(real, c / (tl.sum(c, axis=0) + floor)[None, :], 0.0)
    return c


@triton.jit
def _updated(streams, x, post, comb, token, column, k, dim, floor, H: tl.constexpr, ITERATIONS: tl.constexpr):
    """Columns of the streams after the update, [len(k), len(column)] of their type; `comb` are logits where there are
    iterations."""
    inside = column < dim
    if ITERATIONS > 0:
        real = (k < H)[:, None] & (k < H)[None, :]
        matrix = tl.load(comb + token * (H * H) + k[:, None] * H + k[None, :], mask=real, other=0.0)
        matrix = _sinkhorn(matrix, real, floor, ITERATIONS)
    value = tl.load(x + token * dim + column, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(post + token * H + k, mask=k < H, other=0.0)[:, None] * value[None, :]
    for j in tl.static_range(H):
        row = tl.load(streams + (token * H + j) * dim + column, mask=inside, other=0.0).to(tl.float32)
        if ITERATIONS > 0:
            weight = tl.sum(tl.where((k == j)[:, None], matrix, 0.0), axis=0)
        else:
            weight = tl.load(comb + (token * H + j) * H + k, mask=k < H, other=0.0)
        out += weight[:, None] * row[None, :]
    # Several warps read each column, in layouts of the compiler's choice: none may write before all have read.
    tl.debug_barrier()
    return out.to(streams.dtype.element_ty)


@triton.jit
def _gather(dots, token, slices, first, index, inside, scale, M: tl.constexpr, SLICES: tl.constexpr):
    """scale * the sum over slices of the dots numbered first + index."""
    part = tl.arange(0, SLICES)
    at = (token * slices + part[:, None]) * M + first + index[None, :]
    return scale * tl.sum(tl.load(dots + at, mask=(part < slices)[:, None] & inside[None, :], other=0.0), axis=0)


@triton.jit
def _mix(
    streams, dots, squares, base, scale, norm, x, post, comb, dim, eps, floor, slices,
    H: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, SLICES: tl.constexpr, WIDTH: tl.constexpr,
    ITERATIONS: tl.constexpr, HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token: the mixture and its RMSNorm. Program 1, which a head has not: post and comb. Side by side,
    since the chain of Sinkhorn's iterations is as long as the rest."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HP)
    there = i < H
    column = tl.arange(0, WIDTH)
    inside = column < dim
    mixes = tl.program_id(1) == 0
    gain = tl.load(norm + column, mask=inside & mixes, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    stream = streams + (token * H + i)[:, None] * dim + column[None, :]
    rows = tl.load(stream, mask=there[:, None] & inside[None, :] & mixes, other=0.0).to(tl.float32)
    part = tl.arange(0, SLICES)
    square = tl.sum(tl.load(squares + token * slices + part, mask=part < slices, other=0.0), axis=0)
    unit = 1.0 / tl.sqrt_rn(square / (H * dim) + eps)
    if mixes:
        pre = _gather(dots, token, slices, 0, i, there, unit * tl.load(scale), M, SLICES)
        pre = tl.sigmoid(pre + tl.load(base + i, mask=there, other=0.0)) + floor
        total = tl.sum(pre[:, None] * rows, axis=0)
        total = total.to(x.dtype.element_ty).to(tl.float32)
        unit = 1.0 / tl.sqrt_rn(tl.sum(total * total, axis=0) / dim + eps)
        tl.store(x + token * dim + column, (total * unit * gain).to(x.dtype.element_ty), mask=inside)
    elif not HEAD:
        y = _gather(dots, token, slices, H, i, there, unit * tl.load(scale + 1), M, SLICES)
        y = 2.0 * tl.sigmoid(y + tl.load(base + H + i, mask=there, other=0.0))
        tl.store(post + token * H + i, y, mask=there)
        pair = tl.arange(0, HP * HP)
        first, second = pair // HP, pair % HP
        both = (first < H) & (second < H)
        index = first * H + second
        c = _gather(dots, token, slices, 2 * H, index, both, unit * tl.load(scale + 2), M, SLICES)
        c += tl.load(base + 2 * H + index, mask=both, other=0.0)
        c = tl.reshape(c, (HP, HP))
        real = there[:, None] & there[None, :]
        if ITERATIONS > 0:
            c = _sinkhorn(c, real, floor, ITERATIONS)
        at = token * (H * H) + i[:, None] * H + i[None, :]
        tl.store(comb + at, c, mask=real)


@triton.jit
def _update(
    streams, x, post, comb, dim, floor,
    H: tl.constexpr, HP: tl.constexpr, TILE: tl.constexpr, ITERATIONS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, HP)
    wait_for_previous(PDL)
    new = _updated(streams, x, post, comb, token, column, k, dim, floor, H, ITERATIONS)
    at = (token * H + k)[:, None] * dim + column[None, :]
    tl.store(streams + at, new, mask=(k < H)[:, None] & (column < dim)[None, :])


def _collapse(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, floor: float, iterations: int,
    before: tuple[Tensor, Tensor, Tensor] | None = None, *, of_logits: int = 0, head: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The mixture and, but for a head, post and comb, which without iterations are logits; `before` is a `hyper_update`
    to make first, with so many iterations where its matrix is of logits."""
    *lead, h, dim = streams.shape
    tokens, size, m = streams.numel() // (h * dim), h * dim, fn.shape[0]
    wide, high = triton.next_power_of_2(m), triton.next_power_of_2(h)
    slices = triton.cdiv(size, SLICE) if before is None else triton.cdiv(dim, TILE)
    x = streams.new_empty((*lead, dim))
    post = x if head else fn.new_empty((*lead, h))
    comb = x if head else fn.new_empty((*lead, h, h))
    if tokens == 0:
        return x, post, comb
    dots, squares = fn.new_empty((tokens, slices, m)), fn.new_empty((tokens, slices))
    with on_device(streams):
        opts = options(streams)
        if before is None:
            _dots[(slices, tokens)](streams, fn, dots, squares, size, M=m, WIDE=wide, SLICE=SLICE, num_warps=8, **opts)
        else:
            _update_dots[(slices, tokens)](
                streams, *before, fn, dots, squares, dim, floor,
                H=h, HP=high, M=m, WIDE=wide, TILE=TILE, ITERATIONS=of_logits, num_warps=8, **opts,
            )  # fmt: skip
        _mix[(tokens, 1 if head else 2)](
            streams, dots, squares, base, scale, norm, x, post, comb, dim, eps, floor, slices,
            H=h, HP=high, M=m, SLICES=triton.next_power_of_2(slices),
            WIDTH=triton.next_power_of_2(dim), ITERATIONS=iterations, HEAD=head,
            num_warps=4 if dim <= 2048 else 16, **opts,
        )  # fmt: skip
    return x, post, comb


def hyper_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, floor: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `onegraph.ops.deepseek_hyper.hyper_mix`."""
    return _collapse(streams, fn, base, scale, norm, eps, floor, iterations)


def hyper_update_mix(
    streams: Tensor, x: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor,
    eps: float, floor: float, iterations: int, *, logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `onegraph.ops.deepseek_hyper.hyper_update_mix`; with `logits` the matrix comes and goes as logits."""
    many, of_logits = (0, iterations) if logits else (iterations, 0)
    return _collapse(streams, fn, base, scale, norm, eps, floor, many, (x, post, comb), of_logits=of_logits)


def hyper_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, floor: float
) -> Tensor:
    """See `onegraph.ops.deepseek_hyper.hyper_head`."""
    return _collapse(streams, fn, base, scale, norm, eps, floor, 0, head=True)[0]


def hyper_update(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor, floor: float, iterations: int) -> None:
    """See `onegraph.ops.deepseek_hyper.hyper_update`."""
    *_, h, dim = streams.shape
    if streams.numel() == 0:
        return
    with on_device(streams):
        _update[(triton.cdiv(dim, 256), streams.numel() // (h * dim))](
            streams, x, post, comb, dim, floor,
            H=h, HP=triton.next_power_of_2(h), TILE=256, ITERATIONS=iterations, num_warps=2, **options(streams),
        )  # fmt: skip
