"""What `--bits 2.5` and `--size 3.2GB` mean: which rates are free, what each costs, and what is chosen of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from onegraph.api.size import human_bytes
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.quantization import OWN
from onegraph.formats.rotated import KEEP, fits
from onegraph.quant.allocate import ERRORS, Allocation, Knapsack, Option, plot
from onegraph.quant.result import EMBED, HEAD
from onegraph.quant.sensitivity import LOWEST, Cost, Costs, Parts

if TYPE_CHECKING:
    from onegraph.api.outline import Outline

ENDS = (EMBED, HEAD)
AVERAGE = "bits on average count codes alone: of linears, and of embedding and head where their rates are chosen too"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What rates are to be chosen within: one of

        bits: a weight, codes alone, averaged over the linears and experts of the blocks that are rounded, and over the
            ends whose rate is chosen too. A tied end is one matrix, also where rounding makes it two.
        size: bytes of all tensors.

    ends: of "model.embed_tokens" and "lm_head" those whose rate is to be chosen as well. per_linear: linears that share
    an input may have different rates.
    """

    format: str = "e8p"
    bits: float | None = None
    size: int | None = None
    ends: frozenset[str] = frozenset()
    per_linear: bool = False

    def __str__(self) -> str:
        return f"{self.bits:g} bits on average" if self.size is None else f"at most {human_bytes(self.size)}"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Rates by layer and end; their average over what is counted, and the KL that the layers' own KLs add up to; the
    same for other budgets."""

    rates: Mapping[str, int]
    bits: float
    loss: float
    curve: list[tuple[float, float]]

    @property
    def lines(self) -> list[str]:
        """The curve as text."""
        return plot(self.curve, self.bits, "bits")


@dataclass(frozen=True)
class Layers:
    """The layers of a model as a budget sees them.

    Args:
        fixed: rate by name of those that the user has set.
        ends: rate of each end, None where it is to be chosen; KEEP leaves it as it is. tied: the head is the embedding.
    """

    found: Outline
    checkpoint: Checkpoint
    budget: Budget
    fixed: Mapping[str, int]
    ends: Mapping[str, int | None]
    tied: bool

    @classmethod
    def of(
        cls, found: Outline, checkpoint: Checkpoint, budget: Budget, patterns: Mapping[str, int],
        ends: Mapping[str, int | None],
    ) -> Layers:  # fmt: skip
        """patterns: {pattern: bits} that the user gave; the last match wins. ends: rates of the ends that are set."""
        fixed = {
            name: rate for pattern, rate in patterns.items() for name in found.shapes if fits(name, pattern)
        } | dict.fromkeys(found.kept, KEEP)
        tied = f"{HEAD}.weight" not in checkpoint

        def is_storable(end: str) -> bool:
            """Whether an end has a size that the format holds; one that has not is kept."""
            try:
                OWN[budget.format].formats[LOWEST].check_size(*checkpoint.shape(f"{EMBED if tied else end}.weight"))
            except ValueError:
                return False
            return True

        chosen = {end for end in budget.ends if is_storable(end)}
        rates = {end: None if end in chosen else ends.get(end) or KEEP for end in ENDS}
        return cls(found, checkpoint, budget, fixed, rates, tied)

    @property
    def free(self) -> dict[str, bool]:
        """What `sensitivity.measure` asks: whether the rate of a layer, or of an end, is to be chosen."""
        return {name: name not in self.fixed for name in self.found.shapes} | {
            end: rate is None for end, rate in self.ends.items()
        }

    def alike(self) -> Costs:
        """Costs as if all weights mattered alike, for sizes before anything is measured."""
        costs: Costs = {}
        for prefix, names in self.found.blocks.items():
            stacks = [prefix + name for name, shape in names.items() if len(shape) == 3]
            pairs = list(zip(stacks[::2], stacks[1::2], strict=True))
            alone = [(prefix + name,) for name, shape in names.items() if len(shape) != 3]
            for parts in (*alone, *pairs):
                if not any(name in self.fixed for name in parts):
                    costs[parts] = self._alike(sum(math.prod(self.found.shapes[name]) for name in parts))
        return costs | {(end,): self._alike(self._weights(end)) for end, rate in self.ends.items() if rate is None}

    def _alike(self, weights: int) -> Cost:
        """Of a part with so many weights."""
        return Cost(ERRORS[self.budget.format][LOWEST], (0.5 * weights, 1.0 * weights))

    def choose(self, costs: Costs, rest: int) -> Chosen:
        """The rates of the parts of `costs` within the budget.

        rest: bits on disk of all that is not chosen; for a size. Raises ValueError for a budget that nothing meets.
        """
        parts = self._parts(costs)
        counted, set_bits = self._counted(costs)
        if self.budget.size is not None:
            set_bits = rest
        whole = Knapsack(parts, 1 << 62)
        limit = 8 * self.budget.size if self.budget.size is not None else round((self.budget.bits or 0) * counted)
        if limit - set_bits < whole.floor:
            least = whole.floor + set_bits
            got, lowest = (
                (f"size: got {human_bytes(self.budget.size)}", f"{human_bytes(math.ceil(least / 8))}")
                if self.budget.size is not None
                else (f"bits: got {self.budget.bits:g}", f"{least / counted:.3g}")
            )
            raise ValueError(f"{got}; this model takes {lowest} at the least: {self._cure}")
        found = Knapsack(parts, limit - set_bits).within(limit - set_bits)
        return Chosen(
            rates=found.rates,
            bits=self._average(found, counted),
            loss=found.loss,
            curve=self._curve(whole, counted),
        )

    @property
    def _cure(self) -> str:
        """What makes room for a budget: rates that the user has set, where they count in it."""
        size = self.budget.size is not None
        above = [
            "experts" if len(self.found.shapes[name]) == 3 else "linears whose rate is set"
            for name, rate in self.fixed.items()
            if name not in self.found.kept and rate > LOWEST and (size or rate != KEEP)
        ]
        if size and self.found.own:
            above += [end.rpartition(".")[2] for end, rate in self.ends.items() if rate is not None and rate > LOWEST]
        if above:
            return f"ask for that, or for lower rates of {', '.join(dict.fromkeys(above))}"
        return f"ask for that; all that can be rounded has {LOWEST} bits then, the lowest rate"

    def least(self, costs: Costs) -> Allocation:
        """The lowest rates that there are."""
        whole = Knapsack(self._parts(costs), 1 << 62)
        return whole.within(whole.floor)

    def common(self, rates: Mapping[str, int]) -> int | None:
        """The rate that most weights of `rates` have; None where there are none."""
        weights: dict[int, int] = {}
        for name, rate in sorted(rates.items()):
            weights[rate] = weights.get(rate, 0) + self._weights(name)
        return max(weights, key=lambda rate: (weights[rate], rate), default=None)

    # ------------------------------------------------------------------------------------------------------- options

    def _parts(self, costs: Costs) -> list[list[Option]]:
        if not costs:
            raise ValueError(
                f"{self.budget}: no rate is left to be chosen, the rates by pattern set all; leave some out"
            )
        parts = [self._options(names, cost) for names, cost in costs.items() if names[0] not in ENDS]
        ends = {end: costs[end,] for end in ENDS if self.ends[end] is None}
        if self.tied and ends:
            return [*parts, list(self._end_options(ends))]
        return parts + [list(self._end_options({end: cost})) for end, cost in ends.items()]

    def _options(self, names: Parts, cost: Cost) -> list[Option]:
        return [
            Option(
                dict.fromkeys(names, rate),
                sum(self._bits(name, rate) for name in names),
                cost.loss(ERRORS[self.budget.format][rate]),
            )
            for rate in self._rates
        ]

    def _end_options(self, costs: Mapping[str, Cost]) -> Iterator[Option]:
        """Of one end, or of both where they are tied: kept together they are one matrix."""
        ends = [end for end in ENDS if end in costs or (self.tied and self.ends[end] is not None)]
        allowed = [(*self._rates, KEEP) if end in costs else (self.ends[end] or KEEP,) for end in ends]
        for rates in product(*allowed):
            chosen = dict(zip(ends, rates, strict=True))
            loss = sum(cost.loss(ERRORS[self.budget.format][chosen[end]]) for end, cost in costs.items())
            counted = [end for end in ends if end in costs or self.budget.size is not None]
            if self.tied and set(rates) == {KEEP}:
                counted = counted[:1]
            yield Option(
                {end: chosen[end] for end in costs}, sum(self._bits(end, chosen[end]) for end in counted), loss
            )

    @property
    def _rates(self) -> list[int]:
        """Rates to choose from."""
        return [rate for rate in OWN[self.budget.format].formats if rate >= LOWEST]

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in ENDS:
            return self.found.shapes[name]
        return self.checkpoint.shape(self._end_tensor(name))

    def _end_tensor(self, end: str) -> str:
        return f"{EMBED if self.tied else end}.weight"

    def _weights(self, name: str) -> int:
        return math.prod(self._shape(name))

    def _bits(self, name: str, rate: int) -> int:
        """What a layer costs at a rate: codes alone where bits are counted, all that is stored where bytes are."""
        if self.budget.size is None:
            return rate * self._weights(name)
        if rate == KEEP:
            return 8 * self._weights(name) * self.checkpoint.info(self._end_tensor(name)).dtype.itemsize
        *lead, n, k = self._shape(name)
        return math.prod(lead) * OWN[self.budget.format].formats[rate].bits(n, k)

    def _counted(self, costs: Costs) -> tuple[int, int]:
        """Weights that bits are averaged over, and bits of those among them whose rates are set."""
        chosen = {name for names in costs for name in names}
        if self.tied and {EMBED, HEAD} <= chosen:
            chosen -= {HEAD}
        given = {name: rate for name, rate in self.fixed.items() if rate != KEEP}
        total = sum(self._weights(name) for name in (*chosen, *given))
        return total, sum(rate * self._weights(name) for name, rate in given.items())

    def _average(self, found: Allocation, counted: int) -> float:
        """Bits of codes a weight."""
        rates = {name: rate for name, rate in self.fixed.items() if rate != KEEP} | dict(found.rates)
        if self.tied and all(rates.get(end) == KEEP for end in ENDS):
            del rates[HEAD]
        return sum(rate * self._weights(name) for name, rate in rates.items()) / counted

    def _curve(self, whole: Knapsack, counted: int) -> list[tuple[float, float]]:
        """Bits and KL over what budgets can be, in some twenty steps."""
        points = [whole.within(whole.floor + round((whole.ceiling - whole.floor) * step / 20)) for step in range(21)]
        return [(self._average(point, counted), point.loss) for point in points]
