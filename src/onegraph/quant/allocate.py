"""Rates for the parts of a model within a budget: the least sum of losses, exactly, by dynamic programming.

A part takes one of a few options, each with a cost and a loss, and losses add up: a knapsack with one choice from each
part. One table over the budget answers every smaller budget too, which is the curve of loss against bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# Squared error of a format, by rate, relative to unit variance (docs/benchmarks/quality.md); 16 keeps a layer.
ERRORS = {
    "e8p": {2: 0.0916, 3: 0.0296, 4: 0.0079, 16: 0.0},
    "trellis": {1: 0.275, 2: 0.0690, 3: 0.0175, 4: 0.0045, 5: 0.0012, 6: 3.1e-4, 7: 8e-5, 8: 2e-5, 16: 0.0},
}
STEPS = 1 << 14  # of a budget that has no common unit


@dataclass(frozen=True)
class Option:
    """Rates by layer, what they cost (bits) and what they lose (KL, nats per token)."""

    rates: Mapping[str, int]
    cost: int
    loss: float


Part = Sequence[Option]


@dataclass(frozen=True)
class Allocation:
    """An option of each part, taken together."""

    rates: Mapping[str, int]
    cost: int
    loss: float


class Knapsack:
    """The best options for every budget up to `limit`.

    parts: each with an option at the least. limit: bits. Raises ValueError where even the cheapest options cost more.
    """

    def __init__(self, parts: Sequence[Part], limit: int) -> None:
        self._parts = [sorted(part, key=lambda option: (option.cost, option.loss)) for part in parts]
        self.floor = sum(part[0].cost for part in self._parts)
        self.ceiling = sum(part[-1].cost for part in self._parts)
        if limit < self.floor:
            raise ValueError(f"a budget of {limit} bits is under the least that there is, {self.floor}")
        extra = [[option.cost - part[0].cost for option in part] for part in self._parts]
        room = min(limit, self.ceiling) - self.floor
        common = math.gcd(*(more for each in extra for more in each)) or 1
        self._unit = max(common, -(-room // STEPS))
        self._extra = [[-(-more // self._unit) for more in each] for each in extra]  # up: a budget is never exceeded
        steps = room // self._unit
        least = torch.zeros(steps + 1, dtype=torch.float64)  # by budget, of the parts so far
        self._picks = []
        for part, more in zip(self._parts, self._extra, strict=True):
            found = torch.full((len(part), steps + 1), math.inf, dtype=torch.float64)
            for i, (option, units) in enumerate(zip(part, more, strict=True)):
                if units <= steps:
                    found[i, units:] = least[: steps + 1 - units] + option.loss
            least, pick = found.min(0)
            self._picks.append(pick.to(torch.int8))

    def within(self, budget: int) -> Allocation:
        """The options with the least loss that cost at most so many bits. Raises ValueError where there are none."""
        if budget < self.floor:
            raise ValueError(f"a budget of {budget} bits is under the least that there is, {self.floor}")
        at = min((budget - self.floor) // self._unit, len(self._picks[0]) - 1 if self._picks else 0)
        chosen: list[Option] = []
        for part, more, pick in zip(reversed(self._parts), reversed(self._extra), reversed(self._picks), strict=True):
            i = int(pick[at])
            chosen.append(part[i])
            at -= more[i]
        chosen = self._filled(chosen[::-1], budget)
        rates = {layer: rate for option in chosen for layer, rate in option.rates.items()}
        return Allocation(rates, sum(option.cost for option in chosen), sum(option.loss for option in chosen))

    def _filled(self, chosen: list[Option], budget: int) -> list[Option]:
        """The same with what rounding up to units left over spent on the changes that gain most."""
        while True:
            left = budget - sum(option.cost for option in chosen)
            gain, at, better = max(
                (
                    ((now.loss - option.loss) / max(1, option.cost - now.cost), i, option)
                    for i, (part, now) in enumerate(zip(self._parts, chosen, strict=True))
                    for option in part
                    if option.cost - now.cost <= left and option.loss < now.loss
                ),
                key=lambda change: change[:2],
                default=(0.0, 0, None),
            )
            if better is None or gain <= 0:
                return chosen
            chosen = [*chosen[:at], better, *chosen[at + 1 :]]


def plot(points: Sequence[tuple[float, float]], chosen: float, unit: str, width: int = 48) -> list[str]:
    """Lines of text that draw loss against bits: a bar a point on a logarithmic scale, and which was chosen."""
    losses = [math.log(max(loss, 1e-9)) for _, loss in points]
    low, high = min(losses), max(losses)
    nearest = min(range(len(points)), key=lambda i: abs(points[i][0] - chosen), default=0)
    lines = []
    for i, (bits, loss) in enumerate(points):
        length = 1 + round((width - 1) * (losses[i] - low) / (high - low)) if high > low else width
        lines.append(f"{bits:8.2f} {unit}  KL {loss:.4f}  {'#' * length}{'  <- chosen' if i == nearest else ''}")
    return lines
