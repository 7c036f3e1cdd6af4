"""Penalties, constraint and min-p, in launches whose grids depend on the shape only.

`adjust_logits` is elementwise; the program that holds the token to count counts it. `min_p` has one program a row,
which reads the row from the L2 as often as it must: three times, and 33 times more where top-k and top-p are on as well
and min-p keeps fewer than top-k would, to find the k-th largest logit by its bits. Rows without min-p cost nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import AdjustLogits
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

CHUNK = 2048
UNIT = tl.constexpr(2.0**40)  # as in ops/shaping.py


@triton.jit
def _adjust(
    logits, last, slots, seen, allowed, repetition, presence, frequency, constrained, out, width, words,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < width
    wait_for_previous(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    newest = tl.load(last + row)
    here = tl.load(seen + slot * width + token, mask=inside, other=0)
    here = tl.where(token == newest, here + 2, here)
    tl.store(seen + slot * width + token, here, mask=inside & (token == newest))
    x = tl.load(logits + row * width + token, mask=inside, other=0.0).to(tl.float64)
    divisor = tl.load(repetition + row).to(tl.float64)
    x = tl.where(here > 0, tl.where(x > 0, x / divisor, x * divisor), x)
    times = here >> 1
    x = x - tl.load(frequency + row).to(tl.float64) * times.to(tl.float64)
    x = x - tl.where(times > 0, tl.load(presence + row).to(tl.float64), 0.0)
    bits = tl.load(allowed + slot * words + token // 32, mask=inside, other=0)
    closed = (tl.load(constrained + row) != 0) & (((bits >> (token % 32)) & 1) == 0)
    tl.store(out + row * width + token, tl.where(closed, float("-inf"), x.to(tl.float32)), mask=inside)


def adjust_logits(call: AdjustLogits) -> Tensor:
    """See `onegraph.ops.shaping.adjust_logits`."""
    logits = call.logits
    rows, width = logits.shape
    out = torch.empty_like(logits, dtype=torch.float32)
    if rows:
        with on_device(logits):
            _adjust[(rows, triton.cdiv(width, CHUNK))](
                *call, out, width, call.allowed.shape[1], CHUNK=CHUNK, num_warps=4, **options(logits)
            )
    return out


@triton.jit
def _key(x):
    """An integer that orders as the float does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weigh(x, high, heat):
    """(weight relative to the likeliest token's, its mass in units)."""
    weight = tl.exp((x.to(tl.float64) - high.to(tl.float64)) / heat)
    return weight, (weight * UNIT).to(tl.int64)


@triton.jit
def _mass_of_largest(logits, high, heat, k, width, CHUNK: tl.constexpr):
    """Units of the k largest logits' masses, by bisection for the k-th one's key."""
    low, top = tl.full((), -(2**31), tl.int64), tl.full((), 2**31 - 1, tl.int64)
    for _ in range(32):
        middle = (low + top + 1) >> 1
        above = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, width, CHUNK):
            token = start + tl.arange(0, CHUNK)
            x = tl.load(logits + token, mask=token < width, other=0.0)
            above += ((token < width) & (_key(x).to(tl.int64) >= middle)).to(tl.int32)
        enough = tl.sum(above, axis=0) >= k
        low = tl.where(enough, middle, low)
        top = tl.where(enough, top, middle - 1)
    mass = tl.zeros((CHUNK,), tl.int64)
    each = tl.zeros((CHUNK,), tl.int64)
    above = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, width, CHUNK):
        token = start + tl.arange(0, CHUNK)
        x = tl.load(logits + token, mask=token < width, other=0.0)
        _weight, units = _weigh(x, high, heat)
        key = _key(x).to(tl.int64)
        more = (token < width) & (key > low)
        mass += tl.where(more, units, 0)
        above += more.to(tl.int32)
        each = tl.maximum(each, tl.where((token < width) & (key == low), units, 0))
    return tl.sum(mass, axis=0) + (k - tl.sum(above, axis=0)) * tl.max(each, axis=0)


@triton.jit
def _min_p(logits, temperature, top_k, top_p, min_p, out, width, CHUNK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    heat = tl.load(temperature + row).to(tl.float64)
    least = tl.load(min_p + row).to(tl.float64)
    p = tl.load(top_p + row)
    if (heat > 0) & (least > 0):
        logits += row * width
        k = tl.load(top_k + row)
        k = tl.where(k <= 0, width, k)
        highs = tl.full((CHUNK,), float("-inf"), tl.float32)
        for start in range(0, width, CHUNK):
            token = start + tl.arange(0, CHUNK)
            highs = tl.maximum(highs, tl.load(logits + token, mask=token < width, other=float("-inf")))
        high = tl.max(highs, axis=0)
        count = tl.zeros((CHUNK,), tl.int32)
        kept, total = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
        for start in range(0, width, CHUNK):
            token = start + tl.arange(0, CHUNK)
            x = tl.load(logits + token, mask=token < width, other=float("-inf"))
            weight, units = _weigh(x, high, heat)
            fine = (token < width) & ~(weight < least)  # NaN stays, to be told
            units = tl.where(token < width, units, 0)
            count += fine.to(tl.int32)
            kept += tl.where(fine, units, 0)
            total += units
        if (p < 1.0) & (tl.sum(count, axis=0) < k):
            mass = tl.sum(total, axis=0)
            if k < width:
                mass = _mass_of_largest(logits, high, heat, k, width, CHUNK)
            share = mass.to(tl.float64) / tl.sum(kept, axis=0).to(tl.float64)
            p = tl.minimum(p.to(tl.float64) * share, 1.0).to(tl.float32)
        for start in range(0, width, CHUNK):
            token = start + tl.arange(0, CHUNK)
            x = tl.load(logits + token, mask=token < width, other=float("-inf"))
            weight, _units = _weigh(x, high, heat)
            tl.store(logits + token, float("-inf"), mask=(token < width) & (weight < least))
    tl.store(out + row, p)


def min_p(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `onegraph.ops.shaping.min_p`."""
    out = torch.empty_like(top_p)
    rows, width = logits.shape
    if rows:
        with on_device(logits):
            _min_p[(rows,)](
                logits, temperature, top_k, top_p, min_p, out, width, CHUNK=CHUNK, num_warps=8, **options(logits)
            )
    return out
