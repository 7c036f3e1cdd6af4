"""Kinds of sequence state: what is cleared, copied and taken back."""

import pytest
import torch

from onegraph.nn.attention import PagedCache
from onegraph.nn.state import Pages, RecurrentSlots, Rings, StateKind


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("kind", [Pages, lambda tensors: Rings(tensors, 3), RecurrentSlots])
def test_places_are_copied_and_all_are_cleared(kind: type[StateKind]) -> None:
    tensors = [torch.randn(5, 2, 3), torch.randn(5, 4)]
    before = [tensor.clone() for tensor in tensors]
    state = kind(tensors)  # type: ignore[call-arg]
    state.copy(torch.tensor([1, 2]), torch.tensor([4, 3]))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[0, 1, 2, 2, 1]])
    state.clear()
    assert not any(tensor.any() for tensor in tensors)


def test_a_text_begins_with_zeros_whatever_its_slot_holds() -> None:
    state = RecurrentSlots([torch.full((4, 2), torch.nan)])
    assert torch.equal(state.read(0, ints(3, 0), ints(0, 0)), torch.zeros(2, 2))
    state.tensors[0][2] = 5
    assert torch.equal(state.read(0, ints(2, 1), ints(7, 0)), torch.tensor([[5.0, 5.0], [0.0, 0.0]]))


def test_a_row_without_tokens_keeps_its_state() -> None:
    state = RecurrentSlots([torch.ones(4, 2), torch.ones(4, 2)])
    state.write(1, ints(3, 1), ints(0, 2), torch.full((2, 2), 9.0))
    assert state.tensors[1].tolist() == [[1, 1], [9, 9], [1, 1], [1, 1]]
    assert state.tensors[0].eq(1).all()


def test_a_snapshot_is_restored_into_any_slot() -> None:
    state = RecurrentSlots([torch.randn(5, 2, 3), torch.randn(5, 1)])
    before = [tensor.clone() for tensor in state.tensors]
    kept = state.snapshot(torch.tensor([1, 3]))
    state.clear()
    state.restore(torch.tensor([2, 3]), kept)
    for tensor, old in zip(state.tensors, before, strict=True):
        assert torch.equal(tensor[[2, 3]], old[[1, 3]])
        assert not tensor[[0, 1, 4]].any()


def test_a_cache_takes_back_what_its_kinds_allow() -> None:
    cache = PagedCache(
        layers=1, pages=3, page_size=4, kv_heads=1, head_dim=8, rows=3, pages_per_row=2, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip
    assert cache.rollback is None
    cache.positions.copy_(ints(6, 2, 3))
    cache.truncate(ints(4, 4, 0))
    assert cache.positions.tolist() == [4, 2, 0]
    assert [kind.rollback for kind in (Pages([]), Rings([], 3), RecurrentSlots([]))] == [None, 3, 0]
