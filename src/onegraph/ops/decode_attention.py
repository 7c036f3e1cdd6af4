"""The attention of a decode step as one op: `rope_cache_write` and `paged_attention` for one token a row."""

from typing import Any

import torch
from torch import Tensor

from onegraph.ops.attention import (
    _TOLERANCE,
    _check_attention,
    _check_write,
    _keys_read,
    _write_case,
    paged_attention,
    rope_cache_write,
)
from onegraph.ops.registry import Case, Op, nbytes, register


def _paged_decode(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tickets: Tensor,
    heads: int,
    scale: float,
    window: int,
    early: bool = False,
) -> Tensor:
    q = rope_cache_write.reference(
        qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, k_cache, v_cache, heads
    )
    out = paged_attention.reference(q, k_cache, v_cache, block_table, positions, scale, window)
    real = (counts > 0) & (positions >= 0) & (positions < block_table.shape[1] * k_cache.shape[1])
    return out.masked_fill_(~real.view(-1, 1, 1, 1), 0.0)


def _check(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tickets: Tensor,
    heads: int,
    scale: float,
    window: int,
    early: bool = False,
) -> None:
    _check_write(qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, k_cache, v_cache, heads)
    if qkv.shape[1] != 1:
        raise ValueError(
            f"paged_decode: qkv holds {qkv.shape[1]} tokens a row; a decode step has 1: use rope_cache_write and "
            "paged_attention"
        )
    q = qkv.new_empty(qkv.shape[0], 1, heads, k_cache.shape[3])  # never filled: a check launches nothing
    _check_attention(q, k_cache, v_cache, block_table, positions, scale, window)
    wanted = qkv.shape[0] * k_cache.shape[2]
    if tickets.dtype != torch.int32 or tickets.numel() < wanted or tickets.device != qkv.device:
        raise ValueError(
            f"paged_decode: tickets is {tickets.dtype} {tuple(tickets.shape)} on {tickets.device}; it must be int32 of "
            f"{wanted} zeros or more on {qkv.device}"
        )


def _case(name: str, window: int = 0, early: bool = False, **options: Any) -> Case:
    """The write's case, its caches as long as the positions reach, and what attention needs besides."""
    write = _write_case(name, tokens=1, **options)

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        *tensors, heads = write.make(device, dtype, generator)
        batch, (_, _, kv_heads, dim) = tensors[0].shape[0], tensors[-1].shape
        tickets = torch.zeros(batch, kv_heads, dtype=torch.int32, device=device)
        return *tensors, tickets, heads, dim**-0.5, window, early

    return Case(name=name, make=make)


_SMOL: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64, "page_size": 16}

paged_decode = register(
    Op(
        name="paged_decode",
        schema=(
            "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? cos, Tensor? sin, Tensor positions, "
            "Tensor counts, Tensor block_table, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) tickets, "
            "int heads, float scale, int window, bool early=False) -> Tensor"
        ),
        reference=_paged_decode,
        fake=lambda qkv, qn, kn, eps, cos, sin, positions, counts, table, k_cache, v, tickets, heads, *rest: (
            qkv.new_empty((qkv.shape[0], 1, heads, k_cache.shape[3]))
        ),
        kernel="onegraph.ops.cuda.decode_attention:paged_decode",
        check=_check,
        cases=(
            _case("smollm2", positions=[137], counts=[1], early=True, **_SMOL),
            _case("smollm2_batch", positions=[0, 15, 16, 64, 300], counts=[1, 1, 0, 1, 1], **_SMOL),
            _case("llama3", positions=[63, 200], counts=[1, 1], heads=8, kv_heads=2, dim=128, page_size=32),
            _case(
                "llama3_early", positions=[63, 200], counts=[1, 1], heads=8, kv_heads=2, dim=128, page_size=32,
                early=True,
            ),
            _case(
                "window", positions=[5, 64, 127, 200], counts=[1] * 4, heads=4, kv_heads=1, dim=64, page_size=16,
                window=33,
            ),
            _case(
                "wide_window", positions=[700, 3000], counts=[1, 1], heads=4, kv_heads=1, dim=128, page_size=32,
                window=600,
            ),
            _case("qwen3", positions=[70, 3], counts=[1, 1], heads=4, kv_heads=2, dim=128, page_size=16, norm=True),
            _case("eight", positions=[70, 800], counts=[1, 1], heads=8, kv_heads=1, dim=128, page_size=16, norm=True),
            _case("mha_80", positions=[7, 130], counts=[1, 1], heads=4, kv_heads=4, dim=80, page_size=8, rope=False),
            _case("mqa_96", positions=[61], counts=[1], heads=6, kv_heads=1, dim=96, page_size=4, norm=True),
            _case(
                "many_rows", positions=[37 * i % 150 for i in range(40)], counts=[1] * 40, heads=4, kv_heads=2, dim=64,
                page_size=16,
            ),
            _case("long_context", positions=[4000, 17], counts=[1, 1], heads=8, kv_heads=2, dim=128, page_size=64),
        ),
        tolerance=_TOLERANCE,
        bytes_moved=lambda qkv, *rest: (
            2 * nbytes(qkv) + 2 * _keys_read(qkv, rest[5], rest[13]) * rest[8][0, 0].numel() * rest[8].element_size()
        ),
        flops=lambda qkv, *rest: 4 * rest[11] * rest[8].shape[3] * _keys_read(qkv, rest[5], rest[13]),
    )
)  # fmt: skip
"""qkv [B, 1, (heads + 2 kv_heads) D] -> [B, 1, heads, D]: arguments and meaning of `rope_cache_write`, then of
`paged_attention`, in one launch where there is a kernel.

`early`: what follows may start at once, in place of behind q, k and v: right for a launch that reads little before its
own wait, while one that asks for many codes would take the memory from keys and values. The result is the same.

A row with count 0, or that stands beyond the block table's reach, writes nothing and gets zeros. tickets int32
[>= B * kv_heads] must be zeros and is left as zeros: programs draw from it who merges. May run in a captured graph, or
after a kernel launched without the programmatic attribute (rule 4 of `ops/triton/launch.py`)."""
