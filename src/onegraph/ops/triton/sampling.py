"""From logits to tokens, in launches whose grids depend on the shape only.

**Greedy**: the row in chunks, then the chunks' winners.

**Sampling** sorts nothing. What top-k and top-p keep is a prefix of the row in descending order, so a histogram over
bins of that order, counts and masses, says of all bins but one or two whether they are kept. Elements of the others
("in doubt") go into a list; their rank among each other decides. Who is kept takes part in an exponential race:

    _best_of_chunk    the maximum, which weights are relative to
    _histogram        counts and masses of the bins, integers, so that the order of additions does not matter
    _sift             the race among those surely kept; the list of those in doubt
    _rank             rank and mass before each in the list, by comparison with its bin's others
    _draw             who of the list is kept, and the winner

Bins are finer where weights are large (a float's exponent and upper mantissa), so that the list is short; many equal
logits make it long and `_rank` quadratic in it, which is slow (4 ms for 128256 equal ones) and right.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

BINS = 2048
LOWEST = tl.constexpr(0x3D80)  # upper half of the float32 1/16: the first bin
RANKERS = 32  # programs a row that share the list
UNIT = tl.constexpr(2.0**40)  # of a mass: the likeliest token's weight in these
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64, as in ops/sampling.py
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
CHUNK = 2048  # logits a program reads: 49152 (SmolLM2) makes 24 programs a row, 128256 (Llama 3) 63


@triton.jit
def _ordered(x):
    """What torch.argmax compares by: NaN above everything. (A NaN ties with +inf here.)"""
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _best_of_chunk(logits, best, where, width, CHUNK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    x = _ordered(tl.load(logits + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32))
    winner = tl.argmax(x, axis=0, tie_break_left=True)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + at, tl.max(x, axis=0))
    tl.store(where + at, tl.program_id(1) * CHUNK + winner)


@triton.jit
def _best_of_row(best, where, out, chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    wait_for_previous(PDL)
    x = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    winner = tl.argmax(x, axis=0, tie_break_left=True)  # chunks are in order, so ties stay with the lowest index
    tl.store(out + row, tl.load(where + row * chunks + winner).to(tl.int64))


def greedy(logits: Tensor) -> Tensor:
    """See `onegraph.ops.sampling.greedy`."""
    logits = logits.contiguous()
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    chunks = triton.cdiv(width, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    with on_device(logits):
        opts = options(logits)
        _best_of_chunk[(rows, chunks)](logits, best, where, width, CHUNK=CHUNK, num_warps=4, **opts)
        _best_of_row[(rows,)](best, where, out, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **opts)
    return out


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _race(weight, index, seed, position):
    """weight / Exp(1), the latter a function of (seed, position, index): who has the largest is drawn."""
    key = _mix(_mix(seed.to(tl.uint64) + GOLDEN) + position.to(tl.int64).to(tl.uint64) * GOLDEN)
    bits = _mix(key + (index.to(tl.int64).to(tl.uint64) + 1) * GOLDEN)
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52
    return weight / -tl.log(uniform)


@triton.jit
def _weigh(x, high, temperature):
    """(weight relative to the maximum's, its mass in units, its bin) of logits x; everything monotone in x."""
    below = (x.to(tl.float64) - high.to(tl.float64)) / temperature.to(tl.float64)
    weight = tl.exp(below)
    bits = (0.0625 - below).to(tl.float32).to(tl.int32, bitcast=True)
    bin = tl.minimum(tl.maximum((bits >> 16) - LOWEST, 0), 2047)
    return weight, (weight * UNIT).to(tl.int64), bin


@triton.jit
def _row(best, temperature, top_k, top_p, row, chunks, width, CHUNKS: tl.constexpr):
    """What a row asks for: (its maximum, temperature, whether any token may be drawn but the likeliest, k, p)."""
    chunk = tl.arange(0, CHUNKS)
    high = tl.max(tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), axis=0)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    k = tl.where((k <= 0) | (k > width), width, k)
    warm = (heat > 0) & (high < float("inf")) & (high > float("-inf"))
    return high, tl.where(heat > 0, heat, 1.0), warm, k, tl.load(top_p + row)


@triton.jit
def _histogram(
    logits, best, temperature, top_k, top_p, counts, masses, width, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    high, heat, warm, k, p = _row(best, temperature, top_k, top_p, row, chunks, width, CHUNKS)
    if warm & ((k < width) | (p < 1.0)):
        x = tl.load(logits + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
        weight, units, bin = _weigh(x, high, heat)
        some = (column < width) & (weight > 0.0)  # others win no race and weigh nothing
        tl.atomic_add(counts + row * BINS + bin, tl.full((CHUNK,), 1, tl.int64), mask=some, sem="relaxed")
        tl.atomic_add(masses + row * BINS + bin, units, mask=some, sem="relaxed")


@triton.jit
def _sift(
    logits, best, temperature, top_k, top_p, seed, position, counts, masses, listed, rows_state, races, winners,
    list_index, width, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Also leaves, in place of counts and masses, what precedes each bin; and in rows_state the bin that k cuts and the
    mass before it."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    high, heat, warm, k, p = _row(best, temperature, top_k, top_p, row, chunks, width, CHUNKS)
    if warm:
        cut = tl.full((), BINS, tl.int32)
        sure, last = cut, cut
        if (k < width) | (p < 1.0):
            bins = tl.arange(0, BINS)
            count = tl.load(counts + row * BINS + bins)
            mass = tl.load(masses + row * BINS + bins)
            count_to, mass_to = tl.cumsum(count, axis=0), tl.cumsum(mass, axis=0)
            if k < width:
                cut = tl.sum((count_to < k).to(tl.int32), axis=0)
            least = tl.sum(tl.where(bins < cut, mass, 0), axis=0)
            most = tl.sum(tl.where(bins <= cut, mass, 0), axis=0)
            sure, last = cut, cut
            if p < 1.0:
                reached = mass_to.to(tl.float64)
                wide = p.to(tl.float64)
                sure = tl.minimum(cut, tl.sum((reached < wide * least.to(tl.float64)).to(tl.int32), axis=0))
                last = tl.minimum(cut, tl.sum((reached < wide * most.to(tl.float64)).to(tl.int32), axis=0))
            if chunk == 0:
                tl.store(rows_state + row * 2, cut.to(tl.int64))
                tl.store(rows_state + row * 2 + 1, least)
                place = (tl.num_programs(0) + row) * BINS + bins
                tl.store(counts + place, count_to - count)
                tl.store(masses + place, mass_to - mass)
        x = tl.load(logits + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
        weight, _units, bin = _weigh(x, high, heat)
        some = (column < width) & (weight > 0.0)
        race = _race(weight, column, tl.load(seed + row), tl.load(position + row))
        race = tl.where(some & (bin < sure), race, 0.0)
        tl.store(races + row * chunks + chunk, tl.max(race, axis=0))
        tl.store(winners + row * chunks + chunk, chunk * CHUNK + tl.argmax(race, axis=0, tie_break_left=True))
        doubt = some & (bin >= sure) & ((bin <= last) | (bin == cut))
        found = doubt.to(tl.int32)
        if tl.sum(found, axis=0) > 0:
            first = tl.atomic_add(listed + row, tl.sum(found, axis=0).to(tl.int64), sem="relaxed")
            place = row * width + first + tl.cumsum(found, axis=0) - found
            tl.store(list_index + place, column, mask=doubt)


@triton.jit
def _rank(
    logits, best, temperature, top_k, top_p, counts, masses, listed, list_index, list_rank, list_before,
    width, chunks, CHUNKS: tl.constexpr, BINS: tl.constexpr, MINE: tl.constexpr, THEIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    size = tl.load(listed + row).to(tl.int32)
    high, heat, _warm, _k, _p = _row(best, temperature, top_k, top_p, row, chunks, width, CHUNKS)
    for start in range(tl.program_id(1) * MINE, size, tl.num_programs(1) * MINE):
        i = start + tl.arange(0, MINE)
        index = tl.load(list_index + row * width + i, mask=i < size, other=0)
        x = tl.load(logits + row * width + index).to(tl.float32)
        _weight, _units, bin = _weigh(x, high, heat)
        place = (tl.num_programs(0) + row) * BINS + bin
        rank = tl.load(counts + place)
        before = tl.load(masses + place)
        for other in range(0, size, THEIRS):
            j = other + tl.arange(0, THEIRS)
            index_j = tl.load(list_index + row * width + j, mask=j < size, other=0)
            x_j = tl.load(logits + row * width + index_j).to(tl.float32)
            _weight_j, units_j, bin_j = _weigh(x_j, high, heat)
            higher = (x_j[None, :] > x[:, None]) | ((x_j[None, :] == x[:, None]) & (index_j[None, :] < index[:, None]))
            counted = higher & (bin_j[None, :] == bin[:, None]) & (j < size)[None, :]
            rank += tl.sum(counted.to(tl.int32), axis=1)
            before += tl.sum(tl.where(counted, units_j[None, :], 0), axis=1)
        tl.store(list_rank + row * width + i, rank.to(tl.int32), mask=i < size)
        tl.store(list_before + row * width + i, before, mask=i < size)


@triton.jit
def _draw(
    logits, best, where, temperature, top_k, top_p, seed, position, listed, rows_state, races, winners,
    list_index, list_rank, list_before, out, width, chunks,
    CHUNKS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    wait_for_previous(PDL)
    high, heat, warm, k, p = _row(best, temperature, top_k, top_p, row, chunks, width, CHUNKS)
    if warm:
        race = tl.load(races + row * chunks + chunk, mask=chunk < chunks, other=0.0)
        fastest = tl.max(race, axis=0)
        token = tl.load(winners + row * chunks + tl.argmax(race, axis=0, tie_break_left=True)).to(tl.int64)
        size = tl.load(listed + row).to(tl.int32)
        if size > 0:
            cut = tl.load(rows_state + row * 2)
            mass = tl.load(rows_state + row * 2 + 1)
            for start in range(0, size, TILE):
                i = start + tl.arange(0, TILE)
                rank = tl.load(list_rank + row * width + i, mask=i < size, other=width)
                index = tl.load(list_index + row * width + i, mask=i < size, other=0)
                x = tl.load(logits + row * width + index).to(tl.float32)
                _weight, units, bin = _weigh(x, high, heat)
                mass += tl.sum(tl.where((i < size) & (rank < k) & (bin == cut), units, 0), axis=0)
            reach = tl.where(p < 1.0, p.to(tl.float64) * mass.to(tl.float64), float("inf"))
            for start in range(0, size, TILE):
                i = start + tl.arange(0, TILE)
                rank = tl.load(list_rank + row * width + i, mask=i < size, other=width)
                before = tl.load(list_before + row * width + i, mask=i < size, other=0)
                index = tl.load(list_index + row * width + i, mask=i < size, other=0)
                x = tl.load(logits + row * width + index).to(tl.float32)
                weight, _units, _bin = _weigh(x, high, heat)
                kept = (i < size) & (rank < k) & ((rank == 0) | (before.to(tl.float64) < reach))
                race_i = tl.where(kept, _race(weight, index, tl.load(seed + row), tl.load(position + row)), 0.0)
                quick = tl.max(race_i, axis=0)
                name = tl.min(tl.where(race_i == quick, index, width), axis=0).to(tl.int64)
                token = tl.where(quick > fastest, name, token)
                fastest = tl.maximum(fastest, quick)
        tl.store(out + row, token)
    else:
        x = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
        winner = tl.argmax(x, axis=0, tie_break_left=True)
        tl.store(out + row, tl.load(where + row * chunks + winner).to(tl.int64))


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """See `onegraph.ops.sampling.sample`."""
    logits = logits.contiguous()
    rows, width = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    chunks = triton.cdiv(width, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    where = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    # counts, masses (of each bin, then before each bin: the second half) and the lists' lengths
    zeros = torch.zeros(4 * rows * BINS + rows, dtype=torch.int64, device=device)
    counts, masses, listed = zeros.split((2 * rows * BINS, 2 * rows * BINS, rows))
    state = torch.empty(rows, 2, dtype=torch.int64, device=device)
    races = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    winners = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    index, rank = (torch.empty(rows, width, dtype=torch.int32, device=device) for _ in range(2))
    before = torch.empty(rows, width, dtype=torch.int64, device=device)
    asked = temperature, top_k, top_p
    sizes = {"CHUNKS": triton.next_power_of_2(chunks), "BINS": BINS, "num_warps": 4}
    with on_device(logits):
        opts = options(logits)
        _best_of_chunk[(rows, chunks)](logits, best, where, width, CHUNK=CHUNK, num_warps=4, **opts)
        _histogram[(rows, chunks)](logits, best, *asked, counts, masses, width, chunks, CHUNK=CHUNK, **sizes, **opts)
        _sift[(rows, chunks)](
            logits, best, *asked, seed, position, counts, masses, listed, state, races, winners, index,
            width, chunks, CHUNK=CHUNK, **sizes, **opts,
        )  # fmt: skip
        _rank[(rows, RANKERS)](
            logits, best, *asked, counts, masses, listed, index, rank, before, width, chunks,
            MINE=128, THEIRS=32, **sizes, **opts,
        )  # fmt: skip
        _draw[(rows,)](
            logits, best, where, *asked, seed, position, listed, state, races, winners, index, rank, before, out,
            width, chunks, TILE=512, **sizes, **opts,
        )  # fmt: skip
    return out
