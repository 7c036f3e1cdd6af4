"""Which experts get a slot: the policy of the expert cache, by its reference. Its kernel is held to that elsewhere."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.ops.calls import DECAY, GAIN, MAX_EXPERTS
from onegraph.ops.expert_cache import expert_cache


class Cache:
    """Experts whose weight is their number and a half."""

    def __init__(self, experts: int, slots: int) -> None:
        self.host = [torch.arange(experts).view(-1, 1) + torch.tensor([0.0, 0.5])]
        self.slots, self.shared = [self.host[0][:slots].clone()], [torch.full_like(self.host[0], float("nan"))]
        self.resident, self.score = torch.arange(slots).int(), torch.zeros(experts).int()
        self.arrived = torch.zeros(1).int()

    def __call__(self, *tokens: list[int]) -> Tensor:
        """Where the experts of these tokens lie, which is held to be true."""
        experts, before = torch.tensor(tokens).int(), self.resident.clone()
        places: Tensor = expert_cache(
            experts, self.host, self.slots, self.shared, self.resident, self.score, self.arrived
        )
        stack = self.shared if experts.numel() > len(before) else self.slots
        assert torch.equal(stack[0][places.long()], self.host[0][experts.clamp(0, len(self.score) - 1).long()])
        assert torch.equal(self.slots[0], self.host[0][self.resident.long()])
        assert len(set(self.resident.tolist())) == len(before)
        return places

    @property
    def held(self) -> set[int]:
        return set(self.resident.tolist())


def test_the_least_used_makes_room() -> None:
    cache = Cache(8, 4)
    for chosen in ([0, 1], [0, 2], [0, 1]):
        cache(chosen)
        assert cache.held == {0, 1, 2, 3}
    cache([0, 6])
    assert cache.held == {0, 1, 2, 6}, "3 was never used"
    assert cache([7, 5]).tolist() == [[3, 2]], "2 was used longer ago than 6, and goes to the lower number"
    assert cache.held == {0, 1, 5, 7}


def test_a_chosen_expert_never_makes_room() -> None:
    cache = Cache(8, 4)
    cache([0, 1, 2, 3])
    cache([0, 1, 2, 3])
    cache([3, 4, 5, 6])  # 4, 5 and 6 are new, and 3 is one of those with the lowest score
    assert cache.held == {3, 4, 5, 6}


def test_often_used_experts_stay_while_others_pass() -> None:
    cache = Cache(32, 6)
    for turn in range(60):
        cache([20, 21, 4 + turn % 12])
    assert {20, 21} <= cache.held
    before = cache.resident.clone()
    cache([20, 21, 3])
    assert (cache.resident != before).sum() == 1


def test_a_score_fades() -> None:
    cache = Cache(8, 4)
    for _ in range(100):
        cache([7])
    high = int(cache.score[7])
    assert high == pytest.approx((1 - (1 - 2.0**-DECAY) ** 100) * 2.0 ** (GAIN + DECAY), rel=0.01)
    for turn in range(3 << DECAY):
        cache([turn % 2])
    assert 0 < int(cache.score[7]) < high // 15
    highest = torch.tensor([31 << GAIN + DECAY], dtype=torch.int32)
    assert int(highest - (highest >> DECAY) + (31 << GAIN)) <= int(highest), "no sum leaves an int32"


def test_many_tokens_take_slots_only_for_what_is_used_more() -> None:
    cache = Cache(8, 2)
    for _ in range(3):
        cache([0], [1], [0], [1])  # more pairs than slots: 0 and 1 have slots
    places = cache([4, 5], [6, 6])
    assert places.tolist() == [[4, 5], [6, 6]], "numbers of experts, in the shared stack"
    assert cache.held == {0, 1}, "used six times each, the others once or twice"
    for _ in range(3):
        cache([6, 6], [6, 5])
    assert cache.held == {6, 0} or cache.held == {6, 1}
    assert cache.shared[0][[2, 3, 7]].isnan().all(), "nobody chose them"


@pytest.mark.parametrize(("slots", "least"), [(61, 0.80), (29, 0.62)])
def test_the_hit_rate_is_what_the_docs_say(slots: int, least: float) -> None:
    """docs/how-it-works/expert-cache.md: Qwen3-30B-A3B's layer with 50 % and 25 % of the bytes."""
    g, hits = torch.Generator().manual_seed(0), 0
    cache, order = Cache(128, slots), torch.randperm(128, generator=g)
    for turn in range(900):
        gumbel = -torch.log(-torch.log(torch.rand(128, generator=g).clamp(1e-9, 1 - 1e-7)))
        chosen = (gumbel - torch.log1p(order)).topk(8).indices.tolist()
        hits += len(cache.held & set(chosen)) if turn >= 500 else 0
        cache(chosen)
    assert least < hits / (400 * 8) < least + 0.07


def test_what_is_wrong_with_a_call_is_said() -> None:
    cache, experts = Cache(8, 4), torch.zeros(1, 2).int()
    good: list[Any] = [experts, cache.host, cache.slots, cache.shared, cache.resident, cache.score, cache.arrived]
    wide = torch.zeros(MAX_EXPERTS + 1).int()
    for at, bad, why in (
        (0, experts.long(), r"experts is torch.int64 \(1, 2\); it must be a contiguous int32 of 2 dimensions"),
        (1, [], "0 tensors on the host, 1 of slots and 1 shared; give as many of each, 1 to 16"),
        (2, [cache.slots[0].double()], r"slots\[0\] is torch.float64 .* must be a contiguous torch.float32 \(4, 2\)"),
        (3, [cache.shared[0][:4]], r"shared\[0\] is torch.float32 \(4, 2\); it must be .* \(8, 2\)"),
        (4, torch.arange(9).int(), "9 slots for 8 experts; allowed are 1 slot to one each, and 512 experts"),
        (5, wide, "4 slots for 513 experts"),
        (6, torch.zeros(2).int(), "arrived is torch.int32"),
    ):
        with pytest.raises(ValueError, match=why):
            expert_cache(*good[:at], bad, *good[at + 1 :])
