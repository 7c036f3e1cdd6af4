"""Addresses of tensors that a step makes: in a graph's private pool they are the same in every replay.

Eager memory lies elsewhere each time, so such a number says nothing by itself: steps are compared by which tensor of
the step it is an address of.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MOST = 4096
"""Numbers of a table that are looked at."""


@dataclass(frozen=True, slots=True)
class Address:
    """A number that was the address of the step's `made`-th storage, `offset` bytes into it."""

    made: int
    offset: int

    def __repr__(self) -> str:
        return f"the address of tensor {self.made} of the step" + (f" + {self.offset}" if self.offset else "")


class Addresses:
    """What a step was told of where the storages lie that it made."""

    def __init__(self) -> None:
        self._first = 0
        self._spans: list[tuple[int, int, int]] = []

    def begin(self, numbers: int) -> None:
        """A step begins; `numbers` storages were made before it."""
        self._first = numbers
        self._spans.clear()

    def __bool__(self) -> bool:
        return bool(self._spans)

    def told(self, number: int, start: int, nbytes: int) -> None:
        """The step asked for an address of storage `number`, which it made itself and which begins at `start`."""
        self._spans.append((start, start + max(nbytes, 1), number - self._first))

    def named(self, value: Any) -> Any:
        """`value`, also deep in lists and tuples, with an `Address` for each number that is one."""
        if not self._spans:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            found = (Address(made, value - low) for low, high, made in reversed(self._spans) if low <= value < high)
            return next(found, value)
        if isinstance(value, list | tuple):
            items = [self.named(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


def point_alike(ours: Tensor, mine: Addresses, theirs: Tensor, other: Addresses) -> bool:
    """Whether two tables of int64, of two steps, say the same where an address counts as the tensor that it is of."""
    if not (mine and other) or ours.dtype is not torch.int64 or theirs.dtype is not torch.int64:
        return False
    if ours.shape != theirs.shape or ours.numel() > _MOST:
        return False
    return bool(mine.named(ours.flatten().tolist()) == other.named(theirs.flatten().tolist()))
