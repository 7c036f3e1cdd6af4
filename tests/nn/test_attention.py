"""Paged attention against a plain loop over tokens in float64; what is written where; what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onegraph.nn.attention import Attention, CausalAttention, PagedCache
from onegraph.ops.attention import paged_attention, rope_cache_write
from onegraph.ops.registry import Case

CPU = torch.device("cpu")


def make(case: Case, dtype: torch.dtype = torch.float32) -> list[Any]:
    return list(case.make(CPU, dtype, torch.Generator().manual_seed(3)))


def slot(table: Tensor, row: int, position: int, page_size: int) -> tuple[int, int]:
    return int(table[row, position // page_size]), position % page_size


@pytest.mark.parametrize("case", paged_attention.cases, ids=lambda case: case.name)
def test_attention_is_softmax_over_the_keys_seen(case: Case) -> None:
    """Query by query, head by head; unseen slots hold NaN, so that reading one is not forgiven."""
    q, k_cache, v_cache, table, positions, scale, window, sinks, softcap, counts = make(case)
    rows, length, heads, _ = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    real = [length] * rows if counts is None else counts.tolist()
    seen = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for b in range(rows):
        for j in range(int(positions[b]) + real[b]):
            seen[slot(table, b, j, page_size)] = True
    k_cache[~seen], v_cache[~seen] = float("nan"), float("nan")
    got = paged_attention(q, k_cache, v_cache, table, positions, scale, window, sinks, softcap, counts)
    assert got.isfinite().all()
    for b in (b for b in range(rows) if real[b]):
        reach = int(positions[b]) + real[b]
        where = [slot(table, b, j, page_size) for j in range(reach)]
        keys = torch.stack([k_cache[w] for w in where]).double()
        values = torch.stack([v_cache[w] for w in where]).double()
        for i in range(real[b]):
            at = int(positions[b]) + i
            first = 0 if window == 0 else max(0, at - window + 1)
            for h in range(0, heads, max(1, heads // 3)):
                kv = h // (heads // kv_heads)
                scores = keys[first : at + 1, kv] @ q[b, i, h].double() * scale
                scores = softcap * (scores / softcap).tanh() if softcap else scores
                weights = scores.exp() / (scores.exp().sum() + (0.0 if sinks is None else sinks[h].double().exp()))
                assert (got[b, i, h] - weights @ values[first : at + 1, kv]).abs().max() < 1e-5


@pytest.mark.parametrize("case", rope_cache_write.cases, ids=lambda case: case.name)
def test_keys_and_values_land_in_their_pages_and_nowhere_else(case: Case) -> None:
    args = make(case)
    qkv, q_norm, k_norm, eps, cos, _, positions, counts, table, k_cache, v_cache, heads, slots = args
    rows, length, _ = qkv.shape
    page_size, kv_heads, dim = k_cache.shape[1:]
    before = k_cache.clone(), v_cache.clone()
    q = rope_cache_write(*args)
    written = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    written[0] = True  # the sentinel is anyone's
    vectors = qkv.view(rows, length, heads + 2 * kv_heads, dim).double()

    def turned(x: Tensor, norm: Tensor | None, at: int) -> Tensor:
        """RMSNorm and RoPE of a token's heads [H, D]: of the n coordinates that rotate each pair (j, j + n/2) as a
        complex number times e^(i angle)."""
        if norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
        if cos is None:
            return x
        half = cos.shape[1]
        pairs = torch.complex(x[:, :half], x[:, half : 2 * half])
        angles = at * 10000.0 ** -(torch.arange(0, dim, 2) / dim).double()[:half]
        pairs = pairs * torch.polar(torch.ones(half).double(), angles)
        return torch.cat((pairs.real, pairs.imag, x[:, 2 * half :]), dim=-1)

    for b in range(rows):
        for i in range(int(counts[b]) if slots is None else int(b < len(slots) and slots[b] >= 0)):
            at = int(positions[b]) + i
            page, offset = slot(table, b, at, page_size) if slots is None else divmod(int(slots[b]), page_size)
            written[page, offset] = True
            token = vectors[b, i]
            assert (q[b, i] - turned(token[:heads], q_norm, at)).abs().max() < 1e-4
            assert (k_cache[page, offset] - turned(token[heads : heads + kv_heads], k_norm, at)).abs().max() < 1e-4
            assert torch.equal(v_cache[page, offset], qkv.view(rows, length, -1, dim)[b, i, heads + kv_heads :])
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        assert torch.equal(cache[~written], old[~written])


def test_rope_is_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(1, 2, 9, 32, generator=torch.Generator().manual_seed(0))
    angle = torch.outer(torch.arange(9.0), 10000.0 ** -(torch.arange(0, 32, 2) / 32))
    cos, sin = angle.cos(), angle.sin()
    want, _ = apply_rotary_pos_emb(x, x, torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None])
    qkv = x.transpose(1, 2).repeat(1, 1, 2, 1)[:, :, :4].reshape(1, 9, -1)  # two q heads, one k, one v
    cache = torch.zeros(3, 8, 1, 32)
    ints = [torch.tensor(v, dtype=torch.int32) for v in ([0], [9], [[1, 2]])]
    got = rope_cache_write(qkv, None, None, 0.0, cos, sin, *ints, cache, cache.clone(), 2)
    assert torch.allclose(got.transpose(1, 2), want, atol=1e-6)


def test_tokens_beyond_the_block_table_are_dropped() -> None:
    """An overrun must not land in another sequence's page: two pages of 4, tokens at 6 to 9."""
    qkv, cache = torch.randn(1, 4, 3 * 8), torch.zeros(4, 4, 1, 8)
    ints = [torch.tensor(v, dtype=torch.int32) for v in ([6], [4], [[2, 3]])]
    rope_cache_write(qkv, None, None, 0.0, None, None, *ints, cache, cache.clone(), 1)
    touched = cache.flatten(2).abs().sum(-1) > 0
    assert touched[1:].nonzero().tolist() == [[2, 2], [2, 3]]


def test_rows_of_a_block_table_may_be_apart() -> None:
    args = make(paged_attention.cases[1])
    want = paged_attention(*args)
    table = args[3]
    args[3] = torch.cat((table, table.flip(0)), dim=1)[:, : table.shape[1]]
    assert not args[3].is_contiguous()
    assert torch.equal(paged_attention(*args), want)


def test_results_do_not_depend_on_batch_or_spare_pages() -> None:
    q, k, v, table, positions, scale, window, *_ = make(paged_attention.cases[1])
    together = paged_attention(q, k, v, table, positions, scale, window)
    for b in range(4):
        pages = int(positions[b]) // k.shape[1] + 1
        alone = paged_attention(q[b : b + 1], k, v, table[b : b + 1, :pages], positions[b : b + 1], scale, window)
        assert torch.allclose(alone, together[b : b + 1], atol=1e-6)


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_paged_and_dense_strategies_agree(window: int, norm: bool, rope: bool, gated: bool) -> None:
    g = torch.Generator().manual_seed(0)
    angle = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(0, 16, 2) / 16))
    attention = Attention(
        index=1,
        heads=6,
        kv_heads=2,
        head_dim=16,
        q_norm=torch.rand(16, generator=g) if norm else None,
        k_norm=torch.rand(16, generator=g) if norm else None,
        eps=1e-6,
        cos=angle.cos() if rope else None,
        sin=angle.sin() if rope else None,
        window=window,
        gated=gated,
    )
    cache = PagedCache(
        layers=2,
        pages=21,
        page_size=4,
        kv_heads=2,
        head_dim=16,
        rows=2,
        pages_per_row=10,
        device="cpu",
        dtype=torch.float32,
    )
    cache.block_table.copy_(1 + torch.randperm(20, generator=g).view(2, 10))
    qkv = torch.randn(2, 37, 256 if gated else 160, generator=g)
    dense = CausalAttention().attend(attention, qkv)
    if gated:  # query 0, gate 0, query 1, ...
        queries, rest = qkv.split((192, 64), dim=2)
        q, gates = queries.view(2, 37, 6, 2, 16).unbind(3)
        attention.gated = False
        plain = CausalAttention().attend(attention, torch.cat((q.flatten(2), rest), dim=2))
        assert torch.allclose(dense, plain * gates.flatten(2).sigmoid(), atol=1e-6)
        attention.gated = True
    parts = []
    for start, stop in ((0, 20), (20, 21), (21, 36), (36, 37)):
        cache.positions.fill_(start)
        cache.counts.fill_(stop - start)
        parts.append(cache.attend(attention, qkv[:, start:stop].contiguous()))
    assert torch.allclose(torch.cat(parts, dim=1), dense, atol=1e-5)
    assert not cache.keys[0].any(), "layer 1 wrote to layer 0"


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(1, 1, 9, 64).half(), "make them in that dtype"),
        (0, torch.zeros(1, 9, 64), r"must be .*\[batch, tokens, heads, head_dim\]"),
        (0, torch.zeros(1, 1, 9, 32), "head_dim must agree"),
        (0, torch.zeros(1, 1, 8, 64), "multiple of kv heads"),
        (1, torch.zeros(1, 16, 3, 64), r"both must be \[pages, page_size, kv_heads, head_dim\]"),
        (3, torch.zeros(1, 10).long(), "block_table is .* must be int32"),
        (3, torch.zeros(2, 10).int(), r"must be int32 \[1, any\]"),
        (3, torch.zeros(10, 1).int().t()[:, ::2], "rows of block_table"),
        (4, torch.zeros(1), "positions is .* must be int32"),
        (4, torch.zeros(1, 1).int(), "positions"),
        (6, -1, "window is -1"),
    ],
)
def test_paged_attention_refuses(index: int, value: Any, message: str) -> None:
    args = make(paged_attention.cases[0])
    args[index] = value
    with pytest.raises(ValueError, match=message):
        paged_attention(*args)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(1, 960), r"must be float32, .* \[batch, tokens"),
        (0, torch.zeros(1, 1, 959), "must hold 960"),
        (1, torch.ones(64), "go together"),
        (4, None, "go together"),
        (5, torch.zeros(38, 31), r"cos is \[38, 32\] and sin \[38, 31\]; .* must agree"),
        (6, torch.zeros(1).long(), "positions is"),
        (7, None, "neither slots nor counts"),
        (10, torch.zeros(4, 16, 3, 64).half(), "make them in that dtype"),
        (12, torch.zeros(2).long(), "of at most 1 rows"),
        (5, torch.zeros(10, 32), r"cos is \[38, 32\] and sin \[10, 32\]"),
        (7, torch.zeros(2).int(), "counts is"),
        (11, 8, "multiple of kv heads"),
        (11, 0, "multiple of kv heads"),
    ],
)
def test_rope_cache_write_refuses(index: int, value: Any, message: str) -> None:
    args = make(rope_cache_write.cases[0])
    args[index] = value
    with pytest.raises(ValueError, match=message):
        rope_cache_write(*args)


def test_a_cache_needs_a_page_besides_the_sentinel() -> None:
    sizes = {"layers": 1, "pages": 2, "page_size": 4, "kv_heads": 1, "head_dim": 8, "rows": 1, "pages_per_row": 1}
    assert PagedCache(**sizes, device="cpu", dtype=torch.float32).nbytes == 2 * 2 * 4 * 8 * 4
    with pytest.raises(ValueError, match="page 0 is the sentinel"):
        PagedCache(**(sizes | {"pages": 1}), device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="rows is 0"):
        PagedCache(**(sizes | {"rows": 0}), device="cpu", dtype=torch.float32)
