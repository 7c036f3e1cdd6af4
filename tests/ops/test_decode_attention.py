"""Decode attention: how the CUDA kernel is cut, and that it is the one that runs. Its results: test_ops.py."""

from dataclasses import replace

import pytest
import torch

from h200 import H200
from onegraph.nn.attention import PagedCache
from onegraph.ops.cuda import decode_attention as kernel
from onegraph.ops.cuda.build import RESERVED
from onegraph.ops.decode_attention import paged_decode
from onegraph.ops.strided_decode import strided_decode


@pytest.mark.parametrize("dim", kernel.DIMS)
@pytest.mark.parametrize("group", range(1, kernel.MAX_GROUP + 1))
@pytest.mark.parametrize("groups", [1, 8, 32, 128])
def test_sixteen_warps_fit_an_sm(dim: int, group: int, groups: int) -> None:
    """In one block or in two."""
    warps, size = kernel.share(groups, H200)
    plan = replace(kernel.EXAMPLE, dim=dim, group=group, warps=warps, size=size)
    assert 16 // warps * (plan.shared + RESERVED) <= H200.sm_shared


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        (1, (16, 8)),
        (14, (16, 8)),
        (15, (16, 4)),
        (28, (16, 4)),
        (32, (16, 2)),
        (63, (16, 2)),
        (64, (8, 2)),
        (999, (8, 2)),
    ],
)
def test_a_cluster_is_as_large_as_the_gpu_has_room_for(groups: int, share: tuple[int, int]) -> None:
    assert kernel.share(groups, H200) == share


def test_what_the_kernel_does_not_take() -> None:
    cache = torch.zeros(64, dtype=torch.bfloat16)
    assert kernel.supports_input(torch.bfloat16, 128, 4, 16, cache)
    assert not kernel.supports_input(torch.float32, 128, 4, 16, cache)
    assert not kernel.supports_input(torch.bfloat16, 80, 4, 16, cache)
    assert not kernel.supports_input(torch.bfloat16, 64, 9, 16, cache)
    assert not kernel.supports_input(torch.bfloat16, 64, 4, 16, cache[1:])
    assert not kernel.supports_input(torch.bfloat16, 64, 4, 24, cache)


def test_a_step_and_a_round_attend_in_one_op_and_a_chunk_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """And `fused=False` never in one."""
    from onegraph.nn import attention

    seen: list[str] = []
    for name in ("paged_decode", "rope_cache_write", "paged_attention"):
        op = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *a, op=op: (seen.append(op.name), op(*a))[1])
    layer = attention.Attention(index=0, heads=2, kv_heads=1, head_dim=8)
    for fused in (True, False):
        cache = PagedCache(
            layers=1, pages=6, page_size=4, kv_heads=1, head_dim=8, rows=1, pages_per_row=5, device="cpu",
            dtype=torch.float32, fused=fused,
        )  # fmt: skip
        cache.block_table.copy_(torch.arange(1, 6).view(1, 5))
        for length in (9, 1, 8):
            cache.counts.fill_(length)
            assert cache.attend(layer, torch.randn(1, length, 32)).shape == (1, length, 16)
            cache.positions.add_(length)
    apart = ["rope_cache_write", "paged_attention"]
    assert seen == [*apart, "paged_decode", "paged_decode", *apart * 3]


def test_a_row_without_a_sequence_gives_zeros_and_writes_nothing() -> None:
    """Whatever its pages hold."""
    arguments = list(paged_decode.cases[0].make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0)))
    arguments[7] = torch.zeros_like(arguments[7])  # counts
    arguments[9].fill_(float("nan"))
    before = arguments[10].clone()
    assert paged_decode(*arguments).eq(0).all()
    assert arguments[10][1:].equal(before[1:])


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.zeros(1, 9, 960), "holds 9 tokens a row; a decode step has 1, a round up to 8"),
        (11, torch.zeros(2, dtype=torch.int32), "it must be int32 of 3 zeros or more"),
        (11, torch.zeros(3), "it must be int32 of 3 zeros or more"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(at: int, value: torch.Tensor, message: str) -> None:
    arguments = list(paged_decode.cases[0].make(torch.device("cpu"), torch.float32, torch.Generator()))
    arguments[at] = value
    with pytest.raises(ValueError, match=message):
        paged_decode(*arguments)


@pytest.mark.parametrize(("chained", "rows", "early"), [(2, 1, True), (2, 2, True), (2, 3, False), (0, 1, False)])
def test_the_next_launch_is_let_go_early_in_front_of_a_chain(
    chained: int, rows: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of nothing else: not of narrow q, k and v, nor of more rows, whose linears are launches of their own."""
    from onegraph.nn import attention

    sizes = {"kv_heads": 1, "head_dim": 16}
    layer = attention.Attention(index=0, heads=2, **sizes)
    layer.chained = chained
    said: list[bool] = []
    given = lambda qkv, *rest: said.append(rest[-5]) or qkv[..., :32]  # noqa: E731
    monkeypatch.setattr(attention, "paged_decode", given)
    cache = PagedCache(
        layers=1, pages=3, page_size=16, rows=rows, pages_per_row=1, device="cpu", dtype=torch.float32, **sizes
    )
    cache.attend(layer, torch.zeros(rows, 1, 64))
    assert said == [early]


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
def test_a_cache_that_lies_as_vllms_on_a_gpu() -> None:
    _as_vllms("cuda")


def test_a_cache_that_lies_as_vllms() -> None:
    _as_vllms("cpu")


def _as_vllms(device: str) -> None:
    """Values beside keys, heads before tokens: as `paged_decode` on a copy, and one place of each row is written."""
    args = strided_decode.cases[1].make(torch.device(device), torch.bfloat16, torch.Generator().manual_seed(0))
    qkv, turns, lengths, table, keys, values, out, scale = args
    cache = torch.cat((keys, values), dim=-1).transpose(1, 2).contiguous()
    before, dim = cache.clone(), keys.shape[3]
    k, v, (cos, sin) = keys.contiguous(), values.contiguous(), (t.contiguous() for t in turns.chunk(2, dim=1))
    tickets = torch.zeros(len(lengths), keys.shape[2], dtype=torch.int32, device=device)
    paged = paged_decode if device == "cuda" else paged_decode.reference  # of the other's reference, bit for bit
    wanted = paged(
        qkv.unsqueeze(1), None, None, 0.0, cos, sin, lengths - 1, lengths, table, k, v, tickets, out.shape[1], scale, 0
    )
    strided_decode(qkv, turns, lengths, table, *cache.transpose(1, 2).split(dim, dim=-1), out, scale)
    assert out.equal(wanted.squeeze(1))
    assert cache[1:].equal(torch.cat((k, v), dim=-1).transpose(1, 2)[1:])
    changed = (cache != before)[1:].any(dim=(1, 3)).sum()
    assert changed == (lengths > 0).sum()
