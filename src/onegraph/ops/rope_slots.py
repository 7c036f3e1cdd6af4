"""RoPE and the write of keys and values where another engine says which slot of its cache each token has.

vLLM's cache lies otherwise than ours (keys beside values, heads before tokens), so it is described by strides.
"""

import torch
from torch import Tensor

from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _rope_slots_write(
    qkv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:
    tokens, (_, page_size, kv_heads, dim) = qkv.shape[0], keys.shape
    vectors = qkv.reshape(tokens, -1, dim).float()
    first, second = vectors[:, : heads + kv_heads].chunk(2, dim=-1)
    cos, sin = table.index_select(0, positions).float().unsqueeze(1).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    count = slots.shape[0]
    real = slots >= 0
    # Tokens without a slot write what the first one with a slot writes: two values for one place land in any order.
    source = torch.where(real, torch.arange(count, device=slots.device), real.int().argmax() if count else 0)
    slot, some = slots[source].clamp_min(0), real.any()
    page, place = slot // page_size, slot % page_size
    for cache, new in ((keys, turned[:count, heads:]), (values, vectors[:count, heads + kv_heads :].to(qkv.dtype))):
        cache.index_put_((page, place), torch.where(some, new[source], cache[page, place]))
    return turned[:, :heads].reshape(tokens, -1).contiguous()


def _check(
    qkv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int
) -> None:
    op = "rope_slots_write"
    if keys.dim() != 4 or keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(
            f"{op}: keys are {tuple(keys.shape)}, values {tuple(values.shape)}; both must be [pages, page_size, "
            "kv_heads, head_dim] with the same strides, those of the last dimension 1"
        )
    dim, width = keys.shape[3], (heads + 2 * keys.shape[2]) * keys.shape[3]
    if qkv.dtype not in FLOATS or qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
        raise ValueError(f"{op}: qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be [tokens, {width}] with whole rows")
    if keys.dtype != qkv.dtype or values.dtype != qkv.dtype:
        raise ValueError(f"{op}: the cache is {keys.dtype} and {values.dtype}, qkv {qkv.dtype}; they must agree")
    if table.dim() != 2 or table.shape[1] != dim or dim % 2 or not table.is_contiguous():
        raise ValueError(f"{op}: table is {tuple(table.shape)}; it must be contiguous [positions, {dim}], cos | sin")
    for name, tensor in (("positions", positions), ("slots", slots)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape[0] > qkv.shape[0]:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)}; it must be int64 with at most {qkv.shape[0]}"
            )
    if positions.shape[0] != qkv.shape[0]:
        raise ValueError(f"{op}: there are {positions.shape[0]} positions for {qkv.shape[0]} tokens")
    for name, tensor in (("positions", positions), ("table", table), ("slots", slots), ("keys", keys)):
        if tensor.device != qkv.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, qkv on {qkv.device}; move them to one device")


def _case(name: str, *, tokens: int, heads: int, kv_heads: int, dim: int, slots: list[int]) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        angle = torch.arange(50).unsqueeze(1) * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        cache = randn(4, kv_heads, 16, 2 * dim)  # as vLLM's FlashAttention has it
        keys, values = cache.transpose(1, 2).split(dim, dim=-1)
        return (
            randn(tokens, (heads + 2 * kv_heads) * dim),
            torch.randint(0, 50, (tokens,), generator=generator).to(device),
            torch.cat((angle.cos(), angle.sin()), dim=1).to(device, dtype),
            torch.tensor(slots, device=device),
            keys.clone(),
            values.clone(),
            heads,
        )

    return Case(name=name, make=make)


rope_slots_write = register(
    Op(
        name="rope_slots_write",
        schema=(
            "(Tensor qkv, Tensor positions, Tensor table, Tensor slots, Tensor(a!) keys, Tensor(b!) values, int heads) "
            "-> Tensor"
        ),
        reference=_rope_slots_write,
        fake=lambda qkv, positions, table, slots, keys, values, heads: qkv.new_empty(
            (qkv.shape[0], heads * keys.shape[3])
        ),
        kernel="onegraph.ops.triton.rope_slots:rope_slots_write",
        check=_check,
        cases=(
            _case("llama", tokens=1, heads=8, kv_heads=2, dim=128, slots=[17]),
            _case("smollm2_padded", tokens=5, heads=9, kv_heads=3, dim=64, slots=[63, -1, 0, 20]),
            _case("mqa_80", tokens=3, heads=4, kv_heads=1, dim=80, slots=[5, 4, 40]),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4},
        bytes_moved=lambda qkv, positions, table, slots, *rest: 2 * nbytes(qkv) + nbytes(positions, slots),
        flops=lambda qkv, *rest: 3 * qkv.numel(),
    )
)
"""qkv [T, (heads + 2 kv_heads) D] -> q [T, heads D], after rotate-half RoPE; keys after it and values go to the cache.

positions int64 [T]: rows of `table` [positions, D], cosines and then sines. slots int64 [S], S <= T: the places of the
first S tokens in `keys` and `values` [pages, page_size, kv_heads, D] (of any strides, both the same), page * page_size
+ place; a negative one is written nowhere."""
