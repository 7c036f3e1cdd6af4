"""Kinds of sequence state: what is cleared, copied and taken back."""

import pytest
import torch

from onegraph.nn.attention import PagedCache
from onegraph.nn.state import Pages, RecurrentSlots, Rings, SequenceState, StateKind


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("kind", [Pages, lambda tensors: Rings(tensors, 3), RecurrentSlots])
def test_all_places_are_cleared(kind: type[StateKind]) -> None:
    tensors = [torch.randn(5, 2, 3), torch.randn(5, 4)]
    kind(tensors).clear()  # type: ignore[call-arg]
    assert not any(tensor.any() for tensor in tensors)


def test_a_slot_is_copied_of_recurrent_state_alone() -> None:
    states, rings = [torch.randn(5, 2, 3), torch.randn(5, 4)], [torch.randn(5, 3)]
    before = [tensor.clone() for tensor in (*states, *rings)]

    class Both(SequenceState):
        @property
        def kinds(self) -> list[StateKind]:
            return [Rings(rings, 3), RecurrentSlots(states)]

    Both().copy_slot(1, 4)
    for tensor, old in zip(states, before, strict=False):
        assert torch.equal(tensor, old[[0, 1, 2, 3, 1]])
    assert torch.equal(rings[0], before[2])


def test_a_cache_takes_back_what_its_kinds_allow() -> None:
    cache = PagedCache(
        layers=1, pages=3, page_size=4, kv_heads=1, head_dim=8, rows=3, pages_per_row=2, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip
    assert cache.rollback is None
    cache.positions.copy_(ints(6, 2, 3))
    cache.truncate(ints(4, 4, 0))
    assert cache.positions.tolist() == [4, 2, 0]
    assert [kind.rollback for kind in (Pages([]), Rings([], 3), RecurrentSlots([]))] == [None, 3, 7]
