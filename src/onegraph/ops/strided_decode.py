"""`paged_decode` over a cache that another engine laid out, for the lengths and into the tensor that it gives.

vLLM's cache lies otherwise than ours (keys beside values, heads before tokens), so it is described by strides.
"""

import torch
from torch import Tensor

from onegraph.ops.decode_attention import paged_decode
from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _strided_decode(
    qkv: Tensor,
    table: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scale: float,
) -> None:
    rows, heads, _ = out.shape
    k, v = keys.contiguous(), values.contiguous()
    tickets = lengths.new_zeros(rows, keys.shape[2])
    cos, sin = table.chunk(2, dim=1)
    found = paged_decode.reference(
        qkv.unsqueeze(1), None, None, 0.0, cos, sin, lengths - 1, lengths, block_table, k, v, tickets, heads, scale, 0
    )
    keys.copy_(k), values.copy_(v)
    out.copy_(found.squeeze(1))


def _check(
    qkv: Tensor,
    table: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scale: float,
) -> None:
    op, rows = "strided_decode", qkv.shape[0]
    if keys.dim() != 4 or keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(
            f"{op}: keys are {tuple(keys.shape)}, values {tuple(values.shape)}; both must be [pages, page_size, "
            "kv_heads, head_dim] with the same strides, those of the last dimension 1"
        )
    _, _, kv_heads, dim = keys.shape
    if any(stride % dim for stride, size in zip(keys.stride()[:3], keys.shape, strict=False) if size > 1):
        raise ValueError(f"{op}: keys have strides {keys.stride()}; they must be multiples of head_dim, {dim}")
    if out.dim() != 3 or out.shape[0] != rows or out.shape[1] % kv_heads or out.shape[2] != dim:
        raise ValueError(
            f"{op}: out is {tuple(out.shape)}; it must be [{rows}, heads, {dim}], heads a multiple of {kv_heads}"
        )
    width = (out.shape[1] + 2 * kv_heads) * dim
    if qkv.dtype not in FLOATS or qkv.shape != (rows, width):
        raise ValueError(f"{op}: qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be [{rows}, {width}] of a float dtype")
    for name, tensor in (("keys", keys), ("values", values), ("out", out)):
        if tensor.dtype != qkv.dtype:
            raise ValueError(f"{op}: {name} is {tensor.dtype}, qkv {qkv.dtype}; they must agree")
    if table.dtype != torch.float32 or table.dim() != 2 or table.shape[1] != dim or dim % 2:
        raise ValueError(
            f"{op}: table is {table.dtype} {tuple(table.shape)}; it must be float32 [positions, {dim}], cos | sin"
        )
    if lengths.dtype != torch.int32 or lengths.shape != (rows,):
        raise ValueError(f"{op}: lengths is {lengths.dtype} {tuple(lengths.shape)}; it must be int32 [{rows}]")
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != rows:
        raise ValueError(
            f"{op}: block_table is {block_table.dtype} {tuple(block_table.shape)}; it must be int32 [{rows}, pages]"
        )
    for name, tensor in (("qkv", qkv), ("table", table), ("lengths", lengths), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} must be contiguous")
    if block_table.stride(1) != 1:
        raise ValueError(f"{op}: rows of block_table must be contiguous (rows may be apart)")
    for name, tensor in (("table", table), ("lengths", lengths), ("block_table", block_table), ("keys", keys)):
        if tensor.device != qkv.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, qkv on {qkv.device}; move them to one device")


def _case(name: str, *, lengths: list[int], heads: int, kv_heads: int, dim: int, page_size: int = 16) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        rows, reach = len(lengths), -(-max(lengths) // page_size) + 1
        cache = torch.randn(1 + rows * reach, kv_heads, page_size, 2 * dim, generator=generator).to(device, dtype)
        keys, values = cache.transpose(1, 2).split(dim, dim=-1)  # as vLLM's FlashAttention has it
        pages = torch.randperm(rows * reach, generator=generator).add_(1).view(rows, reach)  # page 0 is nobody's
        angle = torch.arange(reach * page_size).unsqueeze(1) * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        return (
            torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=generator).to(device, dtype),
            torch.cat((angle.cos(), angle.sin()), dim=1).to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            pages.to(device, torch.int32),
            keys.clone(),
            values.clone(),
            torch.zeros(rows, heads, dim, dtype=dtype, device=device),
            dim**-0.5,
        )

    return Case(name=name, make=make)


strided_decode = register(
    Op(
        name="strided_decode",
        schema=(
            "(Tensor qkv, Tensor table, Tensor lengths, Tensor block_table, Tensor(a!) keys, "
            "Tensor(b!) values, Tensor(c!) out, float scale) -> ()"
        ),
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
        bytes_moved=lambda qkv, table, lengths, pages, keys, *rest: (
            2 * nbytes(qkv) + 2 * int(lengths.sum()) * keys[0, 0].numel() * keys.element_size()
        ),
        flops=lambda qkv, table, lengths, pages, keys, values, out, *rest: 4 * out[0].numel() * int(lengths.sum()),
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
