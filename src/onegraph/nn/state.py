"""Kinds of sequence state, which a cache declares: pages, rings, recurrent slots.

A kind's tensors are made once at their final shape [places, ...]. The scheduler allocates places, by number: pages as a
text grows, and one slot for each sequence; place 0 belongs to no sequence, and padding is written there. The engine
clears, copies and rolls back kinds and knows no model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class StateKind:
    """tensors: each [places, ...]. rollback: how many of a sequence's latest tokens are taken back by its position
    alone, None for all of them."""

    def __init__(self, tensors: Sequence[Tensor], rollback: int | None) -> None:
        self.tensors, self.rollback = list(tensors), rollback

    def clear(self) -> None:
        """Forget everything: after a NaN, which masks keep out of results but nothing else removes."""
        for tensor in self.tensors:
            tensor.zero_()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Places `target` int64 [n], of another sequence, get what places `source` int64 [n] hold."""
        for tensor in self.tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))


class Pages(StateKind):
    """State that grows with a text: keys and values, exact or in codes, or compressed entries. A query sees only what
    lies before its position, and a step writes an entry before it is seen, so that all tokens can be taken back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors, None)


class Rings(StateKind):
    """The latest tokens of each sequence, one ring a slot, with `rollback` places more than queries see: no token that
    is taken back lies where a kept one is looked for."""


class RecurrentSlots(StateKind):
    """One state of fixed size for each sequence and layer, which every token changes: tensors [slots, ...] by layer.

    Positions take back nothing of it: a verify pass keeps a `snapshot` and restores it. All that follows may stand in a
    captured step.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors, 0)

    def read(self, layer: int, slots: Tensor, positions: Tensor) -> Tensor:
        """States [B, ...] of rows' slots int32 [B]; zeros for a text that begins, at positions int32 [B] of 0."""
        found = self.tensors[layer].index_select(0, slots.long())
        return torch.where(_each(positions == 0, found), 0, found)

    def write(self, layer: int, slots: Tensor, counts: Tensor, states: Tensor) -> None:
        """States [B, ...] after counts int32 [B] tokens; a row without tokens keeps what it has."""
        own, kept = slots.long(), self.tensors[layer]
        kept.index_copy_(0, own, torch.where(_each(counts > 0, states), states, kept.index_select(0, own)))

    def snapshot(self, slots: Tensor) -> list[Tensor]:
        """Of each layer a copy of the states in slots int64 [n]."""
        return [tensor.index_select(0, slots) for tensor in self.tensors]

    def restore(self, slots: Tensor, snapshot: Sequence[Tensor]) -> None:
        """Slots int64 [n], perhaps of other sequences, hold what a snapshot says."""
        for tensor, states in zip(self.tensors, snapshot, strict=True):
            tensor.index_copy_(0, slots, states)


class SequenceState:
    """What all caches do with their kinds.

    Attributes:
        positions: int32 [rows], where each row's next token stands.
    """

    positions: Tensor

    @property
    def kinds(self) -> list[StateKind]:
        raise NotImplementedError

    @property
    def rollback(self) -> int | None:
        """The smallest of its kinds': drafts that a round may read."""
        return min((kind.rollback for kind in self.kinds if kind.rollback is not None), default=None)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Everything that outlives a step, except which sequence owns it."""
        return [tensor for kind in self.kinds for tensor in kind.tensors]

    def reset(self) -> None:
        """Forget all sequences."""
        for kind in self.kinds:
            kind.clear()

    def truncate(self, lengths: Tensor) -> None:
        """Takes back each row's tokens from lengths[row] on, int32 [rows]; a row that has no more than that stays.

        At most the latest `rollback` tokens that a row ever had may be taken back. Nothing but `positions` is written,
        so this may stand in a captured step.
        """
        self.positions.copy_(torch.minimum(self.positions, lengths))


def _each(rows: Tensor, like: Tensor) -> Tensor:
    """bool [B] to broadcast over [B, ...]."""
    return rows.view(-1, *[1] * (like.dim() - 1))
