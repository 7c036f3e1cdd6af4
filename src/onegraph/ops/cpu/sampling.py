"""Sampling on a CPU: a row sorts no more of the vocabulary than its top-k and top-p can keep."""

import torch
from torch import Tensor

from onegraph.ops.sampling import UNIT, outputs, sample_sorted, stream

FEW = 1024, 16384
"""Tokens that are sorted first, then where top-p keeps more, which it seldom does of a text's distribution."""


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """See `ops.sampling.sample`; of logits that have a NaN or an infinity, the reference's answer."""
    given = logits, temperature, top_k, top_p, seed, position
    found, keys = [], stream(seed, position)
    for row, (heat, most, mass) in enumerate(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True)):
        one = tuple(tensor[row : row + 1] for tensor in given)
        drawn = _drawn(one[0].float(), heat, most, mass, keys[row : row + 1])
        found.append(sample_sorted(*one) if drawn is None else drawn)
    return torch.cat(found) if found else logits.new_empty(0, dtype=torch.int64)


def _drawn(logits: Tensor, heat: float, most: int, mass: float, key: Tensor) -> Tensor | None:
    """The token [1] of one row, float32 [1, V]; None where that takes the whole vocabulary in order."""
    best, first = logits.max(dim=-1, keepdim=True)
    if not best.isfinite().item():
        return None
    if heat <= 0:
        return first.squeeze(1)
    every = logits.shape[-1]
    most = every if most <= 0 else min(most, every)
    if most == every and mass >= 1:
        index = torch.arange(every).unsqueeze(0)
        return _raced(_weights(logits, best, heat), index, key)
    total = (_weights(logits, best, heat) * UNIT).long().sum() if most == every else None
    for count in FEW if most == every else (most,):
        kept = _kept(logits, best, heat, min(count, every), mass, total)
        if kept is not None:
            return _raced(*kept, key)
    return None


def _kept(
    logits: Tensor, best: Tensor, heat: float, count: int, mass: float, total: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Weights float64 [1, N] and indices of tokens, among them all that have a weight: of the `count` likeliest, those
    that reach `mass` of `total`. None where more than these do. Without `total` the rest of the vocabulary has none."""
    last = logits.topk(count, dim=-1).values[:, -1:].clamp_min(torch.finfo(torch.float32).min)
    index = (logits >= last).nonzero()[:, 1].unsqueeze(0)  # equals of the last one among them, in their order
    values, order = logits.gather(1, index).sort(dim=-1, descending=True, stable=True)
    index, weights = index.gather(1, order), _weights(values, best, heat)
    if total is None:
        weights[:, count:] = 0.0
    if mass >= 1:
        return weights, index
    units = (weights * UNIT).long()
    reached = units.cumsum(dim=-1)
    whole = units.sum() if total is None else total
    kept = reached - units < torch.tensor(mass, dtype=torch.float64) * whole
    kept[:, 0] = True
    if total is not None and kept[0, -1].item() and reached[0, -1].item() < total.item():
        return None
    return weights.masked_fill(~kept, 0.0), index


def _weights(logits: Tensor, best: Tensor, heat: float) -> Tensor:
    """float64: e to what a token is colder by than the likeliest."""
    return logits.double().sub_(best.double()).div_(heat).exp_()


def _raced(weights: Tensor, index: Tensor, key: Tensor) -> Tensor:
    race = weights / -outputs(key, index).log()
    return index.gather(1, race.argmax(dim=-1, keepdim=True)).squeeze(1)
