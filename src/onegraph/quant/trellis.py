"""The trellis path nearest to given weights: Viterbi's algorithm over all 65,536 states of `formats/trellis.py`, in C
on a CPU with a compiler, in one launch on a GPU, else in torch's calls.

A step takes for each overlap of two states (the 16 - K bits that neighbours share) the least, over the K bits that a
state has besides, of what the path has cost so far and what the weight loses with the state's value. The string is a
ring: a first pass over the weights around its ends, `around` on either side, with any state in front, says what both
ends have in common; the second, over all, begins and ends with that (QTIP, arXiv 2406.11235, section 3.2, of half the
cost). A stored start state would cost 16 - K bits a tile, at 2 bits .055 a weight or 8 per cent of the error; the ring
costs 1.5 per cent (docs/log.md).

Errors are weighed by a diagonal: of each input, the diagonal of its block of LDLQ's D, and of each output likewise
where the Hessian has a second factor. What a block loses off the diagonal is not seen: a path has no feedback inside
of a tile.
"""

from functools import lru_cache

import torch
from torch import Tensor

from onegraph.formats.trellis import STATES, TILE, UNIT, WEIGHTS, pack, positions, values
from onegraph.ops.cpu import trellis_encode as cpu
from onegraph.quant.ldlq import Encode, Rounded

AROUND, AROUND_QUICK = 64, 16  # weights on either side of a tile's ends in the first pass
_AT_ONCE = 1 << 24  # costs, in torch's calls


@lru_cache(maxsize=8)
def levels(device: torch.device) -> Tensor:
    """float32 [65536]: the value of each state, in units of w."""
    return (values(torch.arange(STATES)).float() / UNIT).to(device)


@lru_cache(maxsize=8)
def _in_c(bits: int) -> cpu.Encode | None:
    return cpu.native(bits, levels(torch.device("cpu")))


def encode(
    x: Tensor, bits: int, weights: Tensor, outer: Tensor | None = None, around: int = AROUND
) -> tuple[Tensor, Tensor]:
    """Codes of x float32 [16, N] at a rate, in units of w; each 16 columns are the outputs of a tile.

    weights [P, 16]: of squared errors, by input, of each of P equal parts of the tiles. outer [P, 16]: likewise by
    output; None: 1. Returns codes int32 [K, N], word i of a tile's string at [i // 16, i % 16] of its columns, and the
    decoded values [16, N].
    """
    if x.device.type == "cpu" and (run := _in_c(bits)) is not None:
        return run(x, weights.float(), None if outer is None else outer.float(), around)
    if x.is_cuda:
        from onegraph.ops.cuda import trellis_encode as gpu

        if gpu.supports(bits, x.device):
            return gpu.encode(x, bits, weights.float(), None if outer is None else outer.float(), around)
    return encode_in_calls(x, bits, weights, outer, around)


def encode_in_calls(
    x: Tensor, bits: int, weights: Tensor, outer: Tensor | None = None, around: int = AROUND
) -> tuple[Tensor, Tensor]:
    """`encode`, in torch's calls."""
    tiles, place = x.shape[1] // TILE, positions(x.device).flatten().argsort()  # output * 16 + input, by place
    given = x.view(TILE, tiles, TILE).permute(1, 2, 0).flatten(1)[:, place]
    weight = weights.float().repeat_interleave(tiles // len(weights), 0).unsqueeze(1).expand(-1, TILE, -1)
    if outer is not None:
        weight = weight * outer.float().repeat_interleave(tiles // len(outer), 0).unsqueeze(2)
    weight = weight.flatten(1)[:, place]
    step = max(1, _AT_ONCE // STATES)
    parts = zip(given.split(step), weight.split(step), strict=True)
    states = torch.cat([_ring(*part, bits, around) for part in parts])
    codes = pack(states, bits).int() & 0xFFFF
    value = levels(x.device)[states][:, positions(x.device).flatten()].view(tiles, TILE, TILE)
    return codes.view(tiles, bits, TILE).transpose(0, 1).reshape(bits, -1), value.permute(2, 0, 1).reshape(TILE, -1)


def _ring(x: Tensor, weight: Tensor, bits: int, around: int) -> Tensor:
    """States int64 [T, 256] of weights x [T, 256]."""
    near = torch.arange(-around, around) % WEIGHTS
    _, ends = _path(x[:, near], weight[:, near], bits, None)
    states, _ = _path(x, weight, bits, ends[:, around])
    return states


def _path(x: Tensor, weight: Tensor, bits: int, overlap: Tensor | None) -> tuple[Tensor, Tensor]:
    """States int64 [T, L] of the best path through x [T, L], which begins and ends with the overlaps [T], or any; and
    the overlaps [T, L] in front of each state."""
    tiles, length = x.shape
    overlaps = STATES >> bits
    value = levels(x.device)
    costs = torch.zeros(tiles, overlaps, device=x.device)
    if overlap is not None:
        costs.fill_(1e30).scatter_(1, overlap.unsqueeze(1), 0.0)
    which = []
    for i in range(length):
        now = weight[:, i, None] * (value - x[:, i, None]).square()
        now = now.view(tiles, 1 << bits, overlaps) + costs.unsqueeze(1)  # a state's low bits are its overlap
        costs, oldest = now.view(tiles, overlaps, 1 << bits).min(2)
        which.append(oldest.to(torch.uint8))
    found = costs.argmin(1) if overlap is None else overlap
    states, fronts = [], []
    for oldest in reversed(which):
        states.append(found << bits | oldest.gather(1, found.unsqueeze(1)).squeeze(1).long())
        found = states[-1] % overlaps
        fronts.append(found)
    return torch.stack(states[::-1], 1), torch.stack(fronts[::-1], 1)


def rounder(bits: int, around: int) -> Encode:
    """`encode` as the sweeps of LDLQ call it: metric [.., 16, 16] are factors C of |C e|^2, of which the diagonal of
    C^T C counts."""

    def run(x: Tensor, rate: int, metric: Tensor, outer: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert rate == bits
        weights = metric.square().sum(-2).view(-1, TILE)
        return encode(x, bits, weights / weights.mean(), outer, around)

    return run


def stored(rounded: Rounded, bits: int) -> dict[str, Tensor]:
    """The codes of a layer as a checkpoint has them."""
    (codes,) = rounded.codes  # [k / 16, K, n]
    tiles = codes.unflatten(-1, (-1, TILE)).permute(2, 0, 1, 3)
    return {"codes": tiles.flatten(1).to(torch.int16).contiguous()}
