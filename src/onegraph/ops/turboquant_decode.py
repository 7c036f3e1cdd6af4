"""A decode step in mode `hybrid`, from the linear's q, k and v to the attention's result: one op for the write and both
halves of attention, so that a GPU can do them in one launch.

It is `turboquant_write` and `turboquant_hybrid`, one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant import DRAFTS
from onegraph.formats.turboquant_layout import TurboQuantLayout, layout_of
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.turboquant import turboquant_write
from onegraph.ops.turboquant_attention import case
from onegraph.ops.turboquant_hybrid import turboquant_hybrid

_WRITTEN = 22  # arguments that are those of `turboquant_write`
_AFTER = _WRITTEN + 5  # where those of `turboquant_hybrid` end


def _after(q: Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `turboquant_hybrid`, with the queries that the write returns."""
    positions, counts, table, _, projection, *books, cache, ring, slots = args[6:16]
    rotation, *rest = args[_WRITTEN:_AFTER]
    return (q, cache, table, positions, counts, ring, slots, rotation, projection, *books, *args[17:21], *rest)


def _turboquant_decode(*args: Any) -> Tensor:
    q, _ = turboquant_write(*args[:_WRITTEN], False)
    out: Tensor = turboquant_hybrid(*_after(q, args))
    return out


def _on_gpu(*args: Any) -> Tensor:
    """The CUDA kernel for what it takes: a token a row, of rows that can hold little. The rest in two ops."""
    from onegraph.ops.cuda import turboquant_decode as kernel

    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, table, turn = args[:10]
    k_book, v_book, cache, ring, slots = args[11:16]
    heads, k_bits, v_bits, k_variant, v_variant, kind, rotation, scale, window, spare, limit = args[16:_AFTER]
    early = len(args) > _AFTER and args[_AFTER]
    if (k_variant, v_variant) != ("mse", "mse"):
        return _turboquant_decode(*args)
    page_size = layout_of(turn.shape[0], k_bits, v_bits, k_variant, v_variant, cache.shape[2]).page_size
    token = kernel.Token(qkv, q_norm, k_norm, eps, cos, sin, turn, heads, kind)
    found = kernel.plan_of(token, cache, table, k_book, v_book, page_size)
    if found is None:
        return _turboquant_decode(*args)
    plan, cluster = found
    state = cache, table, positions, counts, rotation, k_book, v_book
    near = kernel.Near(ring, slots, spare, limit)
    return kernel.decode(token, plan, cluster, *state, page_size, scale, max(limit - window, 0), window, near, early)


def _check(*args: Any) -> None:
    assert turboquant_write.check is not None
    assert turboquant_hybrid.check is not None
    turboquant_write.check(*args[:_WRITTEN], False)
    qkv, turn, heads = args[0], args[9], args[16]
    shape = (*qkv.shape[:2], heads, turn.shape[0])
    count = shape[0] * shape[1] * shape[2] * shape[3]
    turboquant_hybrid.check(*_after(qkv.view(-1)[:count].view(shape), args))


def _case(
    name: str, *, heads: int, kv_heads: int, dim: int, bits: tuple[int, int], positions: list[int], counts: list[int],
    tokens: int = 1, page_size: int = 16, variants: tuple[str, str] = ("mse", "mse"), kind: str = "matched",
    norm: bool = False, rope: bool = True, window: int = 64, limit: int = 0, early: bool = False,
) -> Case:  # fmt: skip
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "bits": bits, "variants": variants}
    coded = case(name, positions=positions, counts=counts, tokens=tokens, page_size=page_size, **sizes)

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        _, cache, table, at, real, _, _, projection, k_codebook, v_codebook, *_ = coded.make(device, dtype, generator)
        batch, reach = len(positions), max(positions) + tokens
        angle = torch.arange(reach).unsqueeze(1) * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        ring = randn(batch + 2, window + 2 * DRAFTS, 2, kv_heads, dim)
        ring[0] = 1e4  # nobody's
        turn = formats.rotation(dim, "hadamard")
        return (
            randn(batch, tokens, (heads + 2 * kv_heads) * dim),
            1 + 0.2 * randn(dim) if norm else None,
            1 + 0.2 * randn(dim) if norm else None,
            1e-6,
            angle.cos().to(device) if rope else None,
            angle.sin().to(device) if rope else None,
            at, real, table,
            turn.T.contiguous().to(device, dtype),
            projection, k_codebook, v_codebook, cache, ring,
            torch.arange(batch, 0, -1, dtype=torch.int32, device=device),
            heads, *bits, *variants, kind,
            turn.to(device, dtype), dim**-0.5, window, DRAFTS, limit, early,
        )  # fmt: skip

    return Case(name=name, make=make)


_SMOL: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64}
_LLAMA: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 128}
_CASES = (
    _case("smollm2", bits=(4, 4), positions=[0, 63, 71, 72, 300], counts=[1, 1, 1, 0, 1], early=True, **_SMOL),
    _case("llama", bits=(4, 4), positions=[700, 79, 80, 5, 159], counts=[1, 1, 1, 1, 1], **_LLAMA),
    _case("k3v4", bits=(3, 4), positions=[130, 66, 0], counts=[1, 1, 0], page_size=32, kind="norm", **_LLAMA),
    _case("limit", bits=(4, 3), positions=[200, 90], counts=[1, 1], window=16, limit=50, kind="unbiased", **_LLAMA),
    _case("mha_norm", bits=(2, 2), heads=3, kv_heads=3, dim=64, positions=[90, 17], counts=[1, 1], window=1, norm=True,
          rope=False),
    _case("group_6", bits=(4, 1), heads=12, kv_heads=2, dim=128, positions=[333, 64], counts=[1, 1], window=150),
    _case("drafts", bits=(3, 4), tokens=8, positions=[130, 66, 0], counts=[8, 5, 8], window=32, **_LLAMA),
    _case("dim_80", bits=(4, 4), heads=4, kv_heads=4, dim=80, positions=[70, 130], counts=[1, 1], window=16),
    _case("prod", bits=(4, 3), positions=[99, 3], counts=[1, 1], variants=("prod", "mse"), window=16, **_LLAMA),
)  # fmt: skip


def _bytes(*args: Any) -> int:
    """q, k, v, both rotations, and what attention moves beside its queries."""
    qkv, turn, heads = args[0], args[9], args[16]
    out = qkv.new_empty((*qkv.shape[:2], heads, turn.shape[0]))
    assert turboquant_hybrid.bytes_moved is not None
    return nbytes(qkv, turn) + turboquant_hybrid.bytes_moved(*_after(out, args)) - nbytes(out) + _stored(args)


def _stored(args: tuple[Any, ...]) -> int:
    cache, ring = args[13], args[14]
    layout = TurboQuantLayout(args[9].shape[0], *args[17:21])
    return int(args[7].sum()) * cache.shape[1] * (layout.bytes_per_token_head + 2 * ring.element_size() * ring.shape[4])


def _flops(*args: Any) -> int:
    qkv, turn = args[0], args[9]
    assert turboquant_hybrid.flops is not None
    out = qkv.new_empty((*qkv.shape[:2], args[16], turn.shape[0]))
    return 2 * qkv.numel() * turn.shape[0] + turboquant_hybrid.flops(*_after(out, args))


turboquant_decode = register(
    Op(
        name="turboquant_decode",
        schema=(
            "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? cos, Tensor? sin, Tensor positions, "
            "Tensor counts, Tensor block_table, Tensor turn, Tensor? projection, Tensor k_codebook, Tensor v_codebook, "
            "Tensor(a!) cache, Tensor(b!) ring, Tensor slots, int heads, int k_bits, int v_bits, str k_variant, "
            "str v_variant, str kind, Tensor rotation, float scale, int window, int spare, int limit, "
            "bool early=False) -> Tensor"
        ),
        reference=_turboquant_decode,
        fake=lambda qkv, *rest: qkv.new_empty((*qkv.shape[:2], rest[15], rest[8].shape[0])),
        kernel="onegraph.ops.turboquant_decode:_on_gpu",
        check=_check,
        cases=_CASES,
        # As of the write and of attention: a code at a near-tie falls either way.
        tolerance={torch.float32: 5e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2},
        bytes_moved=_bytes,
        flops=_flops,
    )
)
"""qkv [B, Q, (heads + 2 kv_heads) D] -> [B, Q, heads, D], turned back.

`turboquant_write` of the tokens (its arguments up to its `scale`, here `kind`), then `turboquant_hybrid` of the queries
that it returns; `early` as of `paged_decode`. Results of tokens that are not real are anyone's. On a GPU what earlier
calls on the same cache wrote may be read before the kernels in front are done, so between two such calls stands a
kernel that waits and starts no other early, as between the steps of a model."""
