"""`paged_decode` over a cache that another engine laid out, for the lengths and into the tensor that it gives.

vLLM's cache lies otherwise than ours (keys beside values, heads before tokens), so it is described by strides.
"""

import torch

from onegraph.ops.attention import check_caches
from onegraph.ops.calls import StridedDecode
from onegraph.ops.cases import Draw
from onegraph.ops.checks import FLOATS, check_grouped, check_tensors
from onegraph.ops.decode_attention import paged_decode
from onegraph.ops.registry import Case, Op, nbytes, register


def _strided_decode(call: StridedDecode) -> None:
    k, v = call.keys.contiguous(), call.values.contiguous()
    tickets = call.lengths.new_zeros(len(call.out), call.keys.shape[2])
    step = call.lengths - 1, call.lengths, call.block_table
    found = paged_decode.reference(
        call.qkv.unsqueeze(1), None, None, 0.0, *call.table.chunk(2, dim=1), *step, k, v, tickets, call.out.shape[1],
        call.scale, 0,
    )  # fmt: skip
    call.keys.copy_(k), call.values.copy_(v)
    call.out.copy_(found.squeeze(1))


def _check(call: StridedDecode) -> None:
    op, qkv, keys, out, table = "strided_decode", call.qkv, call.keys, call.out, call.table
    check_caches(op, qkv, keys, call.values)
    rows, _, kv_heads, dim = qkv.shape[0], *keys.shape[1:]
    if any(stride % dim for stride, size in zip(keys.stride()[:3], keys.shape, strict=False) if size > 1):
        raise ValueError(f"{op}: keys have strides {keys.stride()}; they must be multiples of head_dim, {dim}")
    heads = out.shape[1] if out.dim() == 3 else 0
    check_grouped(op, heads, kv_heads)
    width = (heads + 2 * kv_heads) * dim
    if qkv.dtype not in FLOATS or dim % 2:
        raise ValueError(f"{op}: qkv is {qkv.dtype}, head_dim {dim}; it must be of a float dtype, head_dim even")
    check_tensors(
        op, qkv.device, qkv=(qkv, qkv.dtype, (rows, width)), out=(out, qkv.dtype, (rows, heads, dim)),
        table=(table, torch.float32, (-1, dim)), lengths=(call.lengths, torch.int32, (rows,)),
        block_table=(call.block_table, torch.int32, (rows, -1)),
    )  # fmt: skip


def _case(name: str, *, lengths: list[int], heads: int, kv_heads: int, dim: int, page_size: int = 16) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, rows, per_row = Draw(device, dtype, generator), len(lengths), -(-max(lengths) // page_size) + 1
        cache = draw.randn(1 + rows * per_row, kv_heads, page_size, 2 * dim)
        keys, values = cache.transpose(1, 2).split(dim, dim=-1)  # as vLLM's FlashAttention has it
        return (
            draw.randn(rows, (heads + 2 * kv_heads) * dim), torch.cat(draw.turns(per_row * page_size, dim), dim=1),
            draw.ints(lengths), draw.pages(rows, per_row), keys.clone(), values.clone(),
            torch.zeros(rows, heads, dim, dtype=dtype, device=device), dim**-0.5,
        )  # fmt: skip

    return Case(name=name, make=make)


strided_decode = register(
    Op(
        name="strided_decode",
        call=StridedDecode,
        schema="-> ()",
        reference=_strided_decode,
        fake=lambda *_: None,
        kernel="onegraph.ops.cuda.decode_attention:strided_decode",
        check=_check,
        cases=(
            _case("llama3", lengths=[200], heads=8, kv_heads=2, dim=128),
            _case("smollm2_padded", lengths=[1, 16, 0, 17, 301], heads=9, kv_heads=3, dim=64),
            _case("pages_of_32", lengths=[64, 65], heads=4, kv_heads=4, dim=128, page_size=32),
            _case("many_rows", lengths=[1 + 37 * i % 150 for i in range(40)], heads=4, kv_heads=2, dim=64),
            _case("long_context", lengths=[4001, 18], heads=8, kv_heads=1, dim=128),
        ),
        tolerance={torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: (
            2 * nbytes(call.qkv) + 2 * int(call.lengths.sum()) * call.keys[0, 0].numel() * call.keys.element_size()
        ),
        flops=lambda call: 4 * call.out[0].numel() * int(call.lengths.sum()),
    )
)
"""qkv [B, (heads + 2 kv_heads) D], before RoPE, -> out [B, heads, D]: rotate-half RoPE, the new key and value to the
cache, attention over all of it, in one launch.

table: float32 [positions, D], cosines and then sines. lengths: int32 [B], tokens that the cache holds afterwards, so
that the new one stands at `length - 1`; a row of length 0 writes nothing and gets zeros. block_table: int32 [B, pages
of a row]; page 0 belongs to no row, and what it holds afterwards is unspecified. keys, values [pages, page_size,
kv_heads, D]: of any strides that are multiples of D, both the same. What `paged_decode` says of graphs and of launches
in front holds here too.

On a GPU: bfloat16 and float16, head sizes 64 and 128, up to 8 heads a kv head."""
