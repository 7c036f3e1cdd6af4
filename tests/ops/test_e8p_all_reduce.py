"""The E8P linear that sums over ranks: on CPUs each rank a thread, on GPUs within graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpus import Chains, devices
from onegraph.formats.e8p import E8P, codebook
from onegraph.nn.linear import Linear
from onegraph.nn.peers import Peers
from onegraph.ops.e8p import random_codes, random_scales
from onegraph.ops.e8p_all_reduce import e8p_all_reduce
from test_exchange import parts, peers, together


def layer(n: int, k: int, bits: int, bias: bool = False) -> Linear:
    g = torch.Generator().manual_seed(n + bits)
    codes, residual = random_codes(n, k, bits, torch.device("cpu"), g)
    tensors = {"codes": codes, **({} if residual is None else {"residual": residual})}
    tensors |= dict(zip(("in_scale", "out_scale"), random_scales(n, k, torch.device("cpu"), g), strict=True))
    return Linear(E8P[bits], tensors, torch.randn(n, generator=g) if bias else None)


def shares(whole: Linear, ranks: int) -> list[Linear]:
    """Each rank's inputs; the first one has the bias."""
    k = whole.in_features
    return [
        whole.part(columns=(k * rank // ranks, k * (rank + 1) // ranks), keep_bias=rank == 0) for rank in range(ranks)
    ]


def cut(x: Tensor, rank: int, ranks: int, silu: bool) -> Tensor:
    """A rank's columns of x [..., k], or of gate and up [..., 2k]."""
    halves = x.chunk(2, dim=-1) if silu else (x,)
    return torch.cat([half.chunk(ranks, dim=-1)[rank] for half in halves], dim=-1)


@pytest.mark.parametrize(("ranks", "bits", "tokens", "silu"), [(2, 2, 1, False), (3, 3, 4, True), (2, 4, 3, True)])
def test_ranks_together_are_the_whole_layer(ranks: int, bits: int, tokens: int, silu: bool) -> None:
    whole, group = layer(256, 128 * ranks, bits, bias=True), peers(ranks, 2048)
    mine = shares(whole, ranks)
    x, add = (parts(1, tokens, size)[0] for size in (128 * ranks * (1 + silu), 256))
    got = together(
        group, lambda peer: mine[peer.index].summed(cut(x, peer.index, ranks, silu), peer, add, silu=silu)
    )  # fmt: skip
    want = whole(x, silu=silu) + add
    assert all(torch.equal(each, got[0]) for each in got)
    assert torch.allclose(got[0], want, atol=1e-5)


def test_what_crosses_is_not_rounded() -> None:
    whole, group = layer(256, 256, 4), peers(2, 2048)
    mine = shares(whole, 2)
    x, add = (parts(1, 2, 256, dtype=torch.bfloat16)[0] for _ in range(2))
    own = [one(cut(x, i, 2, False), float32=True) for i, one in enumerate(mine)]
    got = together(group, lambda peer: mine[peer.index].summed(cut(x, peer.index, 2, False), peer, add))
    assert all(torch.equal(each, (own[0] + own[1] + add.float()).to(torch.bfloat16)) for each in got)


def test_more_tokens_cross_in_a_launch_of_their_own() -> None:
    whole, group = layer(128, 256, 2), peers(2, 2048)
    mine, x = shares(whole, 2), parts(1, 5, 256)[0]
    got = together(group, lambda peer: mine[peer.index].summed(cut(x, peer.index, 2, False), peer))
    assert all(torch.allclose(each, whole(x), atol=1e-5) for each in got)


def test_what_cannot_cross_is_refused() -> None:
    one, group = layer(128, 128, 2), peers(2, 256)
    weight = one.given["codes"], None, codebook(), one.given["in_scale"], one.given["out_scale"], None, 2, None, False
    for tokens, words in (
        (5, "x has 5 tokens; allowed are 1 to 4: run e8p_linear, then all_reduce"),
        (3, "e8p_all_reduce: a rank sends 384 words of 4 bytes, a peer buffer has room for 256"),
    ):
        with pytest.raises(ValueError, match=words):
            e8p_all_reduce(torch.zeros(tokens, 128), *weight, *group.rank(0).group)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 4])
def test_sums_within_graphs(count: int, bits: int, dtype: torch.dtype) -> None:
    """Of linears whose slices one block has, or several, and a small one whose exchange has a launch of its own, one
    behind the other many times: the same bits on all GPUs, and the sum of what each has alone."""
    places = devices(count)
    group = Peers(places, 8 * 4 * 1024)
    cases: list[tuple[list[Linear], int, bool]] = []
    for n, k, tokens, silu in (
        (4096, 4096, 1, False),
        (4096, 14336, 1, True),
        (4096, 14336, 4, True),
        (192, 512, 3, False),
    ):
        cases.append((shares(layer(n, k, bits, bias=True), count), tokens, silu))
    g = torch.Generator().manual_seed(0)
    given = []
    for each, tokens, silu in cases:
        x = [torch.randn(tokens, each[0].in_features * (1 + silu), generator=g).to(dtype) for _ in each]
        add = torch.randn(tokens, each[0].out_features, generator=g).to(dtype)
        given.append(([own.to(place) for own, place in zip(x, places, strict=True)], [add.to(p) for p in places]))
    layers = [[one.to(place) for one, place in zip(each, places, strict=True)] for each, *_ in cases]

    def work(peer: Any) -> list[Tensor]:
        i, found = peer.index, []
        for _ in range(6):
            for each, (x, add), (_, _, silu) in zip(layers, given, cases, strict=True):
                found.append(each[i].summed(x[i], peer, add[i], silu=silu))
        return found

    alone = []
    for each, (x, add), (_, _, silu) in zip(layers, given, cases, strict=True):
        own = [one(x[i], silu=silu, float32=True).cpu() for i, one in enumerate(each)]
        alone.append(sum(own[1:], own[0]) + add[0].cpu().float())
    chains = Chains(group, work)
    for _ in range(50):
        for rank in chains.out:
            for out in rank:
                out.fill_(float("nan"))
        chains.wait()
        for _ in range(20):
            chains.replay()
        chains.wait()
        group.check()
        first = [out.cpu() for out in chains.out[0]]
        assert all(torch.equal(a, b.cpu()) for rank in chains.out[1:] for a, b in zip(first, rank, strict=True))
        for i, out in enumerate(first):
            want = alone[i % len(alone)]
            assert (out.float() - want).norm() <= (8e-3 if dtype == torch.bfloat16 else 1e-3) * want.norm()
