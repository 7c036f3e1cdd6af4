"""Nearest E8P codes of given vectors, one or two stages: in torch's calls, and on a CPU with a compiler in C.

Vectors are columns: x [8, N] float32 in units of w (the codebook's unit), so that each coordinate is one contiguous row
and every step below is one vector operation over N. Nothing here searches 65,536 candidates, and nothing is approximate
(within float32 rounding of the distances): `tests/formats/test_e8p.py` holds it to brute force.
"""

from functools import lru_cache

import torch
from torch import Tensor

from onegraph.formats.e8p import STAGE_RATIO, codebook
from onegraph.ops.cpu.e8p_encode import Encode, native

# The 227 absolute vectors of norm <= 10 are seven orbits under permutation. Of each: how much it exceeds
# (1/2, ..., 1/2) at its four largest coordinates, and whether the number of negative coordinates must be odd.
_ORBITS = (
    ((0, 0, 0, 0), 0),
    ((1, 0, 0, 0), 1),
    ((1, 1, 0, 0), 0),
    ((1, 1, 1, 0), 1),
    ((2, 0, 0, 0), 0),
    ((1, 1, 1, 1), 0),
    ((2, 1, 0, 0), 1),
)
_FIRST_29 = 227  # rows 227..255 of the codebook: the explicit vectors of norm 12


class _Tables:
    """Constants of the encoder on one device."""

    def __init__(self, device: torch.device) -> None:
        rows = codebook()[:256].int()
        absolute = (rows - 1).abs() // 2  # 2 |v|
        digits = (absolute - 1) // 2  # |v| - 1/2, in 0..2
        index = torch.full((4**8,), -1, dtype=torch.int32)
        index[(digits << 2 * torch.arange(8)).sum(1)] = torch.arange(256, dtype=torch.int32)
        self.index = index.to(device)  # base-4 digits of |v| - 1/2 -> row, -1 where the codebook has none
        self.odd = (absolute.sum(1) // 2 % 2).int().to(device)  # number of negatives is odd
        excess = torch.tensor([o[0] for o in _ORBITS])
        self.excess = excess.T.contiguous().to(device, torch.int32)  # [4, 7]
        self.absolute = (absolute.T.float() / 2).contiguous().to(device)  # [8, 256]
        self.orbit_odd = torch.tensor([[o[1]] for o in _ORBITS], dtype=torch.bool, device=device)
        # |s|^2 / 2 with s = 1/2 + excess, less the 1 of (1/2, ..., 1/2), which all share
        self.orbit_cost = (excess + excess * excess).sum(1, keepdim=True).float().div(2).to(device)
        self.halves = torch.stack([d.eq(0).nonzero()[:, 0] for d in digits[_FIRST_29:]]).T.contiguous().to(device)
        self.shifts = torch.tensor([0.25, -0.25], device=device).view(1, 2, 1)
        self.lanes = torch.arange(8, dtype=torch.int32, device=device).view(8, 1, 1)
        self.weights4 = (4.0**self.lanes).float()
        self.bit = (2**self.lanes).int()
        self.parity = (torch.arange(256)[:, None] >> torch.arange(8)).sum(1).bitwise_and(1).int().to(device)
        e81b = codebook()[256:].float() / 2
        self.e81b = e81b.T.contiguous().to(device)  # [8, 256]
        halves = e81b[113:241]
        half_row = torch.zeros(256, dtype=torch.int32)
        half_row[((halves < 0) << torch.arange(8)).sum(1)] = torch.arange(113, 241, dtype=torch.int32)
        self.half_row = half_row.to(device)  # sign bits -> row of E81B


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> _Tables:
    return _Tables(device)


def _tagged(x: Tensor, lanes: Tensor) -> Tensor:
    """|x| [8, ...] as int32 keys that sort like it and carry the coordinate in the three lowest mantissa bits.

    A maximum of keys is an argmax in one vectorised pass (torch's own argmax over a leading dimension is ten times
    slower); magnitudes closer than 2^-20 of each other count as equal.
    """
    return (x.view(torch.int32) & 0x7FFFFFF8) | lanes


def _round(x: Tensor, t: _Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nearest points of all of D8^ to x [8, N] for each shift: y = x - shift and v [8, 2, N], codebook row (-1 where it
    has none such) and sign bits, int32 [2, N]. Rounds, and moves the worst coordinate where the parity is wrong."""
    y = x.unsqueeze(1) - t.shifts
    v = y.floor() + 0.5
    error = y - v  # in [-1/2, 1/2)
    wrong = v.sum(0).remainder_(2)  # 0 or 1
    keys = _tagged(error, t.lanes)
    v += torch.where(keys == keys.amax(0), torch.where(error < 0, -wrong, wrong), 0.0)
    digits = (v.abs() - 0.5).clamp_max_(3)
    row = t.index[(digits * t.weights4).sum(0).int()]
    return y, v, row, ((v < 0) * t.bit).sum(0, dtype=torch.int32)


def nearest_per_shift(x: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest E8P vector of x [8, N] within each shift: codes int32 [2, N], +1/4 first, and values [8, 2, N].

    The nearest point of all of D8^ is the answer where the codebook has it. The rest, the far vectors, go through the
    orbits.
    """
    t = _tables(x.device)
    y, v, row, signs = _round(x, t)
    missed = row < 0
    if x.is_cuda:  # a boolean selection would wait for the device
        far_row, far_signs, far_v = _nearest_far(y.reshape(8, -1), t)
        row = torch.where(missed, far_row.view_as(row), row)
        signs = torch.where(missed, far_signs.view_as(row), signs)
        v = torch.where(missed, far_v.view_as(v), v)
    else:
        where = missed.view(-1).nonzero()[:, 0]
        if where.numel():
            far_row, far_signs, far_v = _nearest_far(y.view(8, -1).index_select(1, where), t)
            row.view(-1).index_copy_(0, where, far_row)
            signs.view(-1).index_copy_(0, where, far_signs)
            v.view(8, -1).index_copy_(1, where, far_v)
    code = row << 8 | (signs ^ t.odd[row])
    code[1] ^= 1  # the shift rides on the parity of the sign byte
    return code, v.add_(t.shifts)


def _nearest_far(y: Tensor, t: _Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest of the codebook's D8^ vectors to y [8, M], by orbits: row and sign bits, int32 [M], and v [8, M].

    Maximizes <y, v> - |v|^2 / 2. With signs as y has them, an orbit is best laid along the sorted magnitudes; where the
    number of negatives must change, the smallest magnitude is the one to flip: it meets a 1/2, so it costs itself.
    """
    a = y.abs()
    top, order = a.sort(dim=0, descending=True)
    smallest = top[7]
    negative = y < 0
    odd = (negative.sum(0, dtype=torch.int32) & 1).bool()
    total = a.sum(0)
    one, two, three, four = top[0], top[0] + top[1], top[0] + top[1] + top[2], top[:4].sum(0)
    score = torch.stack((torch.zeros_like(one), one, two, three, 2 * one, four, two + one))
    score -= t.orbit_cost + torch.where(t.orbit_odd != odd, smallest, 0.0)
    best, orbit = score.max(0)
    key = (t.excess[:, orbit] << 2 * order[:4].int()).sum(0, dtype=torch.int32)
    row, flip = t.index[key], order[7]
    # Norm 12 would gain this much at best, with the three halves under the smallest magnitudes:
    hope = total - 5.0 - top[5:].sum(0) - torch.where(odd, 0.0, smallest)
    if y.is_cuda:
        better, row12, flip12 = _norm12(a, odd, best, t)
        row, flip = torch.where(better, row12, row), torch.where(better, flip12, flip)
    else:
        where = (hope > best).nonzero()[:, 0]
        if where.numel():
            better, row12, flip12 = _norm12(a.index_select(1, where), odd[where], best[where], t)
            row.index_copy_(0, where, torch.where(better, row12, row[where]))
            flip = flip.index_copy(0, where, torch.where(better, flip12, flip[where]))
    bits = t.bit.view(8, 1)
    flipped = torch.where(t.odd[row] != odd, 1 << flip.int(), 0)
    signs = (negative * bits).sum(0, dtype=torch.int32) ^ flipped
    v = t.absolute.index_select(1, row)
    return row, signs, torch.where((signs & bits) != 0, -v, v)


def _norm12(a: Tensor, odd: Tensor, best: Tensor, t: _Tables) -> tuple[Tensor, Tensor, Tensor]:
    """The explicit vectors of norm 12, five 3/2 and three 1/2 in 29 of 56 placements, against what the orbits give.

    a [8, M] magnitudes; odd: whether an odd number of coordinates is negative, which these vectors ask for; best: score
    of the orbits. Returns whether one is better, its row, and the coordinate to flip where the parity is wrong, [M].
    """
    p, q, r = (a[i] for i in t.halves)  # [29, M] each
    least = torch.minimum(torch.minimum(p, q), r)
    smallest, at = a.min(0)
    flipped = torch.minimum(least, 3 * smallest)  # a 1/2, or the smallest of all where that lies under a 3/2
    score = a.sum(0) - 5.0 - (p + q + r)
    score -= torch.where(odd, 0.0, flipped)
    best29, j = score.max(0)
    among = t.halves[:, j]  # [3, M]
    inner = among.gather(0, a.gather(0, among).argmin(0, keepdim=True))[0]
    cheap = least.gather(0, j.unsqueeze(0))[0] <= 3 * smallest
    return best29 > best, j.int() + _FIRST_29, torch.where(cheap, inner, at)


def _nearest_e81b(r: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest of E81B to r [8, M]: rows int32 [M] counted from the codebook's row 256, and vectors [8, M].

    Maximizes <r, e> - |e|^2 / 2 over zero, the 112 roots +-e_i +- e_j, the 128 roots of halves and +-2 e_i.
    """
    t = _tables(r.device)
    a = r.abs()
    lanes, bits = t.lanes.view(8, 1), t.bit.view(8, 1)
    keys = _tagged(r, lanes)
    first = keys.amax(0)
    second = torch.where(keys == first, -1, keys).amax(0)
    i, j = first & 7, second & 7
    one, two = first.view(torch.float32), second.view(torch.float32)
    signs = ((r < 0) * bits).sum(0, dtype=torch.int32)
    odd = t.parity[signs]
    low = keys.amin(0)
    pair = one + two - 1.0
    half = 0.5 * a.sum(0) - odd * low.view(torch.float32) - 1.0
    # -2 e_7 is the one that was left out; a pair always beats its runner-up.
    double = torch.where((i == 7) & (signs >= 128), -1.0, 2 * one - 2.0)
    lo, hi = torch.minimum(i, j), torch.maximum(i, j)
    sign_i, sign_lo, sign_hi = (signs >> i) & 1, (signs >> lo) & 1, (signs >> hi) & 1
    pair_row = 1 + 4 * (lo * (15 - lo) // 2 + hi - lo - 1) + 2 * sign_lo + sign_hi
    half_row = t.half_row[signs ^ torch.where(odd != 0, 1 << (low & 7), 0)]
    row = torch.where(half > pair, half_row, pair_row)
    best = torch.maximum(half, pair)
    row = torch.where(double > best, 241 + 2 * i + sign_i, row)
    row = torch.where(torch.maximum(best, double) > 0, row, 0)
    return row, t.e81b.index_select(1, row)


def encode(x: Tensor, bits: int, metric: Tensor | None = None, *, wide: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x [8, N] float32 at a rate, in units of w.

    The stages are chosen together: of several first stages, each with its best residual stage, the best sum is kept.
    Candidates are the nearest vector of each shift, and with `wide` three of their neighbours each. At 4 bits a greedy
    first stage has 4 per cent more MSE than two candidates, and these 1.6 per cent more than eight.

    `metric` [8, 8] is a factor C of the quadratic form that says what better means, |C (x - value)|^2; [B, 8, 8] has
    one for each of B equal parts of the columns; None is the Euclidean one. Returns codes int32 [N], residual int32 [N]
    (zeros at 2 bits), and the decoded vectors [8, N].
    """
    if x.device.type == "cpu" and (run := _in_c(bits)) is not None:
        return run(x, metric, 8 if wide else 2)
    return encode_in_calls(x, bits, metric, wide=wide)


@lru_cache(maxsize=8)
def _in_c(bits: int) -> Encode | None:
    return native(bits, constants(torch.device("cpu")))


def constants(device: torch.device) -> tuple[Tensor, ...]:
    """What the kernels look up, in the order of their `Tables`."""
    t = _tables(device)
    return t.index, t.odd, t.absolute.T, t.halves.T.int(), t.half_row, t.e81b.T


def encode_in_calls(
    x: Tensor, bits: int, metric: Tensor | None = None, *, wide: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`encode`, in torch's calls."""
    codes, value = nearest_per_shift(x)  # [C, N], [8, C, N]
    if wide:
        codes, value = _neighbours(x, codes, value)
    residual = torch.zeros_like(codes)
    if bits > 2:
        ratio = STAGE_RATIO[bits]
        rest = ((x.unsqueeze(1) - value) * ratio).view(8, -1)
        found, fine = _nearest_e81b(rest) if bits == 3 else _nearest_e8p(rest)
        value += fine.view_as(value).div_(ratio)
        residual = found.view_as(codes)
    error = x.unsqueeze(1) - value
    if metric is not None:
        error = _under(metric, error)
    distance = error.square_().sum(0)
    while distance.shape[0] > 1:  # C is 2 or 8: halves against halves
        half = distance.shape[0] // 2
        pick = distance[:half] <= distance[half:]
        distance, codes, residual = (torch.where(pick, a[:half], a[half:]) for a in (distance, codes, residual))
        value = torch.where(pick, value[:, :half], value[:, half:])
    return codes[0], residual[0], value[:, 0]


def _under(metric: Tensor, error: Tensor) -> Tensor:
    """C times each column of error [8, candidates, N]; see `encode`."""
    if metric.dim() == 2:
        return (metric @ error.view(8, -1)).view_as(error)
    parts = error.view(8, error.shape[1], len(metric), -1).permute(2, 0, 1, 3)
    return (metric @ parts.reshape(len(metric), 8, -1)).view_as(parts).permute(1, 2, 0, 3).reshape(error.shape)


def _neighbours(x: Tensor, codes: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates near x [8, N] besides the nearest, codes [2, N] and values [8, 2, N]: codes [8, N], values [8, 8, N].

    A point of D8^ near x is x rounded, an even or odd number of coordinates (as the parity asks) moved to their second
    choice; the three worst coordinates give four such points a shift. One that the codebook lacks is replaced by the
    nearest.
    """
    t = _tables(x.device)
    y = x.unsqueeze(1) - t.shifts
    v = y.floor() + 0.5
    error = y - v
    odd = v.sum(0).remainder(2) != 0
    keys, moves = _tagged(error, t.lanes), []
    step = torch.where(error < 0, -1.0, 1.0)
    for _ in range(3):
        worst = keys == keys.amax(0)
        moves.append(torch.where(worst, step, 0.0))
        keys = torch.where(worst, -1, keys)
    one, two, three = moves
    others = torch.stack(  # [8, 3, 2, N]
        (
            v + torch.where(odd, two, one + two),
            v + torch.where(odd, three, one + three),
            v + torch.where(odd, one + two + three, two + three),
        ),
        dim=1,
    )
    digits = (others.abs() - 0.5).clamp_max_(3)
    bit = t.bit.unsqueeze(1)
    row = t.index[(digits * t.weights4.unsqueeze(1)).sum(0).int()]  # [3, 2, N]
    code = row << 8 | (((others < 0) * bit).sum(0, dtype=torch.int32) ^ t.odd[row])
    code[:, 1] ^= 1
    others += t.shifts
    there = row >= 0
    code = torch.where(there, code, codes)
    others = torch.where(there, others, value.unsqueeze(1))
    return (
        torch.cat((codes, code.view(6, -1))),
        torch.cat((value, others.view(8, 6, -1)), dim=1),
    )


def _nearest_e8p(x: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest E8P vectors to x [8, N], over both shifts: codes int32 [N] and values [8, N].

    The lattices' own nearest points bound what the codebook can do: where the closer of the two is in the codebook
    nothing beats it, and only the other columns are worth an exact answer for each shift.
    """
    if x.is_cuda:
        codes, value = nearest_per_shift(x)
        pick = _first_is_closer(x.unsqueeze(1), value)
        return torch.where(pick, codes[0], codes[1]), torch.where(pick, value[:, 0], value[:, 1])
    t = _tables(x.device)
    y, v, row, signs = _round(x, t)
    pick = _first_is_closer(y, v)
    one = torch.where(pick, row[0], row[1])
    code = one << 8 | (torch.where(pick, signs[0], signs[1]) ^ t.odd[one] ^ ~pick)
    value = torch.where(pick, v[:, 0] + 0.25, v[:, 1] - 0.25)
    where = (one < 0).nonzero()[:, 0]
    if where.numel():
        far = x.index_select(1, where)
        codes, values = nearest_per_shift(far)
        pick = _first_is_closer(far.unsqueeze(1), values)
        code.index_copy_(0, where, torch.where(pick, codes[0], codes[1]))
        value.index_copy_(1, where, torch.where(pick, values[:, 0], values[:, 1]))
    return code, value


def _first_is_closer(x: Tensor, value: Tensor) -> Tensor:
    """bool [N]: whether the first of the values [8, 2, N] is at least as near to x [8, 1 or 2, N] as the second."""
    distance = (x - value).square_().sum(0)
    return distance[0] <= distance[1]
