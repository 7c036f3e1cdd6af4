"""The expert cache on a GPU: reads of pinned host memory, captured and eager, held to the reference."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onegraph.ops.cuda.host_memory import pinned
from onegraph.ops.expert_cache import expert_cache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_family")]
EXPERTS, TOP_K, SLOTS = 128, 8, 40
SIZES = (786432, 393216, 8192, 6144, 12)  # bytes of an expert: Qwen3-30B-A3B's codes at 2 bits, scales, three floats


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_host() -> list[Tensor]:
    memory = [pinned(EXPERTS * size, torch.device("cuda")).view(EXPERTS, size) for size in SIZES]
    for seed, tensor in enumerate(memory):
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=rng(seed), dtype=torch.uint8))
    return memory


def state(host: list[Tensor]) -> list[Any]:
    slots, shared = (
        [torch.zeros(n, each.shape[1], dtype=torch.uint8).cuda() for each in host] for n in (SLOTS, EXPERTS)
    )
    for slot, each in zip(slots, host, strict=True):
        slot.copy_(each[:SLOTS])
    score, arrived = (torch.zeros(n, dtype=torch.int32).cuda() for n in (EXPERTS, 1))
    return [slots, shared, torch.arange(SLOTS, dtype=torch.int32).cuda(), score, arrived]


def chosen(tokens: int, seed: int) -> Tensor:
    """Some experts are chosen more than others."""
    scores = torch.rand(tokens, EXPERTS, generator=rng(seed)) ** torch.linspace(1, 4, EXPERTS)
    return scores.argsort(1, descending=True)[:, :TOP_K].int().contiguous().cuda()


def held(host: list[Tensor], mine: list[Any], experts: Tensor, places: Tensor) -> None:
    """What the result names holds the experts that were chosen."""
    which = mine[1] if experts.numel() > SLOTS else mine[0]
    for tensor, each in zip(which, host, strict=True):
        assert torch.equal(tensor[places.flatten().long()].cpu(), each[experts.flatten().long().cpu()])


def test_calls_in_turn_are_the_reference() -> None:
    host = on_host()
    mine = state(host)
    truth = tree_map(Tensor.cpu, mine)
    for turn in range(24):
        experts = chosen((1, 1, 3, 5, 64)[turn % 5], turn)
        places = expert_cache(experts, host, *mine)
        assert torch.equal(places.cpu(), expert_cache.reference(experts.cpu(), host, *truth)), turn
        assert torch.equal(mine[2].cpu(), truth[2]), turn
        assert torch.equal(mine[3].cpu(), truth[3]), turn
        assert not mine[4].any()
        held(host, mine, experts, places)
    for got, want in zip(mine[0], truth[0], strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_replay_copies_what_it_lacks(tokens: int) -> None:
    """Eight layers in a graph, whose launches overlap; the next call reads what this one wrote."""
    host = on_host()
    layers = [state(host) for _ in range(8)]
    for layer in layers:
        layer[1] = layers[0][1]  # as layers share it
    experts = chosen(tokens, 0)

    def step() -> list[Tensor]:
        found = []
        for layer in layers:
            places = expert_cache(experts, host, *layer)
            which = layer[1] if experts.numel() > SLOTS else layer[0]
            found.append(torch.stack([each[places.flatten().long(), :12].sum(0, dtype=torch.int64) for each in which]))
        return found

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = step()
    for seed in range(1, 12):
        experts.copy_(chosen(tokens, seed))
        graph.replay()
        torch.cuda.synchronize()
        at = experts.flatten().long().cpu()
        want = torch.stack([each[at, :12].sum(0, dtype=torch.int64) for each in host])
        for layer, got in zip(layers, out, strict=True):
            assert torch.equal(got.cpu(), want), seed
            for tensor, each in zip(layer[0], host, strict=True):
                assert torch.equal(tensor.cpu(), each[layer[2].long().cpu()])


def test_pinned_memory_is_freed_with_its_last_view() -> None:
    made = pinned(1 << 20, torch.device("cuda"))
    assert made.is_pinned()
    assert made.data_ptr() % 4096 == 0
    view = made[4096:].view(torch.int16)
    del made
    gc.collect()
    view.fill_(7)
    assert torch.equal(view.cuda(non_blocking=True).cpu(), view)


def test_memory_that_is_not_pinned_is_refused() -> None:
    host = on_host()
    given = [each.clone() for each in host]
    with pytest.raises(ValueError, match=r"host\[0\] is on cpu, the input on cuda:0; move it there, or pin its memory"):
        expert_cache(chosen(1, 0), given, *state(host))
