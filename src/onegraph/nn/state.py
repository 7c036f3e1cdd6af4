"""Kinds of sequence state, which a cache declares: pages, rings, recurrent slots.

A kind's tensors are made once at their final shape [places, ...]. The scheduler allocates places, by number: pages as a
text grows, and one slot for each sequence; place 0 belongs to no sequence, and padding is written there. The engine
clears, copies and rolls back kinds and knows no model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from onegraph.ops.calls import MAX_TOKENS


class StateKind:
    """tensors: each [places, ...]. rollback: how many of a sequence's latest tokens are taken back by its position
    alone, None for all of them."""

    def __init__(self, tensors: Sequence[Tensor], rollback: int | None) -> None:
        self.tensors, self.rollback = list(tensors), rollback

    def clear(self) -> None:
        """Forget everything: after a NaN, which masks keep out of results but nothing else removes."""
        for tensor in self.tensors:
            tensor.zero_()


class Pages(StateKind):
    """State that grows with a text: keys and values, exact or in codes, or compressed entries. A query sees only what
    lies before its position, and a step writes an entry before it is seen, so that all tokens can be taken back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors, None)


class Rings(StateKind):
    """The latest tokens of each sequence, one ring a slot, with `rollback` places more than queries see: no token that
    is taken back lies where a kept one is looked for."""


class RecurrentSlots(StateKind):
    """One state of fixed size for each sequence and layer, which every token changes: tensors [slots, ...].

    The state is applied up to a position that lies beside it; a ring holds what the tokens since have made of it
    (`nn/recurrent.py`), so that the latest ones are taken back by the position alone, and a text at position 0 begins
    with zeros whatever its slot holds.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors, MAX_TOKENS - 1)


class SequenceState:
    """What all caches do with their kinds.

    Attributes:
        positions: int32 [rows], where each row's next token stands.
        snapshot_slots: of its slots those that belong to no sequence and hold copies of others' states.
    """

    positions: Tensor
    snapshot_slots: Sequence[int] = ()

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

    def copy_slot(self, source: int, target: int) -> None:
        """The recurrent state in one slot becomes another one's; in any other kind nothing changes."""
        for kind in self.kinds:
            if isinstance(kind, RecurrentSlots):
                for tensor in kind.tensors:
                    tensor[target].copy_(tensor[source])

    def truncate(self, lengths: Tensor) -> None:
        """Takes back each row's tokens from lengths[row] on, int32 [rows]; a row that has no more than that stays.

        At most the latest `rollback` tokens that a row ever had may be taken back. Nothing but `positions` is written,
        so this may stand in a captured step.
        """
        self.positions.copy_(torch.minimum(self.positions, lengths))
