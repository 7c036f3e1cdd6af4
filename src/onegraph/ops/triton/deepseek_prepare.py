"""What stands between a layer's linears and its attention, one token a row: in one launch."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import DeepseekCompress, DeepseekPrepare
from onegraph.ops.triton.deepseek_attention import deepseek_qkv, qkv_out, unit_head
from onegraph.ops.triton.deepseek_compress import compress_entry, deepseek_compress, rows
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous


@triton.jit(do_not_specialize=["table_stride", "capacity", "capacity2", "last"])
def _prepare(
    q, kv, kv_norm, cos, sin, slots, positions, counts, block_table, q_out, kv_out, eps, q_stride, kv_stride,
    table_stride, last,
    states, ring, bias, norm, entries, stride, capacity,
    states2, ring2, bias2, norm2, entries2, stride2, capacity2,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, ROW: tl.constexpr,
    RATIO: tl.constexpr, REACH: tl.constexpr, RING: tl.constexpr, WIDE: tl.constexpr, PER_PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    INDEXED: tl.constexpr, REACH2: tl.constexpr, RING2: tl.constexpr, WIDE2: tl.constexpr, DIM2: tl.constexpr,
    WIDTH2: tl.constexpr, PER_PAGE2: tl.constexpr, TOKENS2: tl.constexpr, ROW2: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 of a row compresses its states, with INDEXED program 1 the indexer's; the others have a head each."""
    let_next_start(PDL)
    which, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if which == 0:
        wait_for_previous(PDL)
        compress_entry(
            states, ring, bias, norm, cos, sin, slots, positions, counts, block_table, entries, eps,
            row, 0, 1, stride, table_stride, capacity, last,
            RATIO, REACH, RING, WIDE, DIM, WIDTH, HALF, PER_PAGE, TOKENS, True, ROW,
        )  # fmt: skip
    elif which <= INDEXED:
        wait_for_previous(PDL)
        if INDEXED:
            compress_entry(
                states2, ring2, bias2, norm2, cos, sin, slots, positions, counts, block_table, entries2, eps,
                row, 0, 1, stride2, table_stride, capacity2, last,
                RATIO, REACH2, RING2, WIDE2, DIM2, WIDTH2, HALF, PER_PAGE2, TOKENS2, True, ROW2,
            )  # fmt: skip
    else:
        unit_head(
            q, kv, kv_norm, cos, sin, positions, q_out, kv_out, eps, row, which - 1 - INDEXED, 1, q_stride, kv_stride,
            last, HEADS, DIM, WIDTH, HALF, ROW, PDL,
        )  # fmt: skip


def _sizes(call: DeepseekCompress) -> tuple[int, int]:
    """Tokens that an entry sees, and how many of them a program looks at together."""
    reach = call.bias.shape[0] * (call.bias.shape[1] // call.norm.shape[0])
    return reach, min(8, triton.next_power_of_2(reach))


def deepseek_prepare(call: DeepseekPrepare) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.deepseek_prepare.deepseek_prepare`."""
    q, kv, cos, table = call.q, call.kv, call.cos, call.block_table
    main, *rest = call.compressed
    indexed = bool(rest)
    index = rest[0] if indexed else main
    if q.shape[1] != 1 or q.numel() == 0 or (index.bias.shape[0] != main.bias.shape[0]):
        for each in call.compressed:
            deepseek_compress(each)
        return deepseek_qkv(*call.qkv)
    batch, dim, half = q.shape[0], kv.shape[2], cos.shape[1]
    out, latent = qkv_out(q, kv, half, call.fp8)
    heads = out.shape[2]

    def given(one: DeepseekCompress) -> tuple[Any, ...]:
        states, capacity = rows(one.states), table.shape[1] * one.entries.shape[1]
        return states, one.ring, one.bias, one.norm, one.entries, states.stride(1), capacity

    q, kv, (reach, tokens), (reach2, tokens2) = rows(q), rows(kv), _sizes(main), _sizes(index)
    with on_device(q):
        _prepare[(heads + 2 + indexed, batch)](
            q, kv, call.kv_norm, cos, call.sin, call.slots, call.positions, call.counts, table, out, latent, call.eps,
            q.stride(1), kv.stride(1), table.stride(0), cos.shape[0] - 1, *given(main), *given(index),
            HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(dim), HALF=half, ROW=latent.shape[2],
            RATIO=main.bias.shape[0], REACH=reach, RING=main.ring.shape[1], WIDE=main.bias.shape[1],
            PER_PAGE=main.entries.shape[1], TOKENS=tokens,
            INDEXED=int(indexed), REACH2=reach2, RING2=index.ring.shape[1], WIDE2=index.bias.shape[1],
            DIM2=index.norm.shape[0], WIDTH2=triton.next_power_of_2(index.norm.shape[0]),
            PER_PAGE2=index.entries.shape[1], TOKENS2=tokens2, ROW2=index.entries.shape[2], num_warps=4, **options(q),
        )  # fmt: skip
    return out, latent
