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
