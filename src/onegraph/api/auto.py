"""`format="auto"`: which of the calibrated formats a model is rounded to, by what each would lose and take.

Nothing is measured here. Sizes are exact, as of any plan. Errors are those of a Gaussian source (`ERRORS`). Times are
those of one linear for one token on an H200, scaled: by SMs and clock where decoding is the limit, else by the
bandwidth of this GPU's memory. A CPU decodes weights at load, whatever their format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from onegraph.api.choices import Choices
from onegraph.api.size import human_bytes
from onegraph.quant.allocate import ERRORS

if TYPE_CHECKING:
    from onegraph.api.plan import Plan

Prefer = Literal["quality", "speed"]
# A linear of 4096 -> 14336, one token, one H200, by rate: docs/benchmarks/kernels.md. Trellis rates that were not timed
# have the times of those next to them.
WEIGHTS = 4096 * 14336
MICROSECONDS: Mapping[str, Mapping[int, float]] = {
    "e8p on Hopper": {2: 6.7, 3: 9.1, 4: 10.5},
    "e8p": {2: 8.9, 3: 12.8, 4: 13.7},
    "trellis": {1: 14.5, 2: 14.5, 3: 16.4, 4: 15.0, 5: 15.0, 6: 15.0, 7: 15.0, 8: 15.0},
}
SMS, MHZ = 132, 1980  # of the H200
REACHED = 0.9  # of a memory's nominal bandwidth
NEAR = 1.05  # times within this factor count as equal


@dataclass(frozen=True)
class Estimate:
    """What a plan's format loses (squared error, of the weights' variance) and takes: bytes of OUT, and microseconds
    that one token's pass over all quantized weights takes; None on a CPU."""

    format: str
    size: int
    error: float
    time: float | None

    def __str__(self) -> str:
        time = "" if self.time is None else f", {self.time:.0f} us per token in quantized weights"
        return f"{self.format} {human_bytes(self.size)}, {100 * self.error:.2g} % squared error{time}"


def estimate(plan: Plan, device: torch.device) -> Estimate:
    total = sum(plan.weights.values())
    error = sum(count * ERRORS[plan.format][rate] for rate, count in plan.weights.items()) / total
    time = None if device.type == "cpu" else _microseconds(plan, torch.cuda.get_device_properties(device))
    return Estimate(plan.format, plan.after.total_bytes, error, time)


def _microseconds(plan: Plan, properties: object) -> float:
    """properties: torch's of a GPU; where a version of torch does not have clock or memory, an H200's are taken."""
    hopper = (getattr(properties, "major", 0), getattr(properties, "minor", 0)) == (9, 0)
    kernel = f"{plan.format} on Hopper" if hopper and f"{plan.format} on Hopper" in MICROSECONDS else plan.format
    clock = getattr(properties, "clock_rate", MHZ * 1000) / 1000
    speed = getattr(properties, "multi_processor_count", SMS) * clock / (SMS * MHZ)
    decoding = sum(count * MICROSECONDS[kernel][rate] for rate, count in plan.weights.items()) / WEIGHTS / speed
    width, memory = (getattr(properties, name, 0) for name in ("memory_bus_width", "memory_clock_rate"))
    bandwidth = 2 * memory * 1000 * width / 8 * REACHED or float("inf")  # kHz, two transfers a clock, bits
    codes = sum(count * rate for rate, count in plan.weights.items()) / 8
    return max(decoding, 1e6 * codes / bandwidth)


def pick(found: list[Estimate], prefer: Prefer) -> Estimate:
    """The least error; of "speed", among those that are as fast as the fastest."""
    least = min((each.time for each in found if each.time is not None), default=0.0)
    fast = [each for each in found if each.time is None or each.time <= NEAR * least]
    return min(fast if prefer == "speed" else found, key=lambda each: each.error)


def settle(choices: Choices, build: Callable[[Choices], Plan]) -> tuple[Choices, Plan, str | None]:
    """The choices with a format, the plan that is built for them, and where that was to be chosen a line that says why.
    Raises ValueError where no format suits."""
    if not choices.either:
        return choices, build(choices), None
    plans: dict[str, tuple[Choices, Plan]] = {}
    refused, error = dict(choices.refused), ValueError()
    for each in choices.either:
        try:
            plans[each.format] = each, build(each)
        except ValueError as failed:
            error, refused[each.format] = failed, str(failed)
    if not plans:
        raise error
    found = [estimate(plan, choices.device) for _, plan in plans.values()]
    best = pick(found, choices.prefer)
    source = "error: of a Gaussian source"
    if choices.device.type == "cpu":
        source += "; a CPU decodes weights at load: the speed is the same"
    else:
        source += "; time: one H200, one token, scaled to this GPU"
    others = [f"not {each}" for each in found if each is not best]
    others += [f"{format} is unsupported: {why}" for format, why in refused.items()]
    line = f"format auto, prefer {choices.prefer}: {best}; {'; '.join(others)} ({source})"
    decided, plan = plans[best.format]
    return decided, plan, line
