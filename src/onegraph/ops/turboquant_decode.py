"""A decode step in mode `hybrid`, from the linear's q, k and v to the attention's result: one op for the write and both
halves of attention, so that a GPU can do them in one launch.

It is `turboquant_write` and `turboquant_hybrid`, one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant import DRAFTS
from onegraph.ops.calls import TurboQuantDecode, TurboQuantHybrid
from onegraph.ops.cases import Draw
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.turboquant import layout_in, turboquant_write
from onegraph.ops.turboquant_attention import case
from onegraph.ops.turboquant_hybrid import turboquant_hybrid


def _write(call: TurboQuantDecode) -> tuple[Any, ...]:
    """The arguments of `turboquant_write`."""
    *written, _, _, _, _, _ = call
    return *written, False


def _attention(call: TurboQuantDecode, q: Tensor) -> TurboQuantHybrid:
    """What attends, with the queries that the write returns."""
    state = call.cache, call.block_table, call.positions, call.counts, call.ring, call.slots
    books = call.k_codebook, call.v_codebook
    return TurboQuantHybrid(q, *state, call.rotation, *books, call.scale, call.window, call.limit)


def composed(call: TurboQuantDecode) -> Tensor:
    """The two ops."""
    q, _ = turboquant_write(*_write(call))
    out: Tensor = turboquant_hybrid(*_attention(call, q))
    return out


def _on_gpu(call: TurboQuantDecode) -> Tensor:
    """The CUDA kernel for what it takes: a token a row, of rows that can hold little. The rest in two ops."""
    from onegraph.ops.cuda import turboquant_decode as kernel

    found = kernel.plan_of(call)
    return composed(call) if found is None else kernel.decode(call, *found, DRAFTS)


def _check(call: TurboQuantDecode) -> None:
    assert turboquant_write.check is not None
    assert turboquant_hybrid.check is not None
    turboquant_write.check(*_write(call))
    turboquant_hybrid.check(*_attention(call, _like_q(call)))


def _like_q(call: TurboQuantDecode) -> Tensor:
    """A tensor of the queries' shape, of which nothing is read: a check launches nothing."""
    return call.qkv.new_empty((*call.qkv.shape[:2], call.heads, call.turn.shape[0]))


def _case(
    name: str, *, heads: int, kv_heads: int, dim: int, bits: tuple[int, int], positions: list[int], counts: list[int],
    tokens: int = 1, page_size: int = 16, kind: str = "matched", norm: bool = False, rope: bool = True,
    window: int = 64, limit: int = 0, early: bool = False,
) -> Case:  # fmt: skip
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "bits": bits}
    coded = case(name, positions=positions, counts=counts, tokens=tokens, page_size=page_size, **sizes)

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        _, cache, table, _, _, _, _, *books, _, _, _ = coded.make(device, dtype, generator)
        draw, rows = Draw(device, dtype, generator), len(positions)
        *brought, _ = draw.tokens(heads, kv_heads, dim, tokens, positions, counts, page_size, norm, rope)
        ring = draw.randn(rows + 2, window + 2 * DRAFTS, 2, kv_heads, dim)
        ring[0] = 1e4  # nobody's
        turn = formats.rotation(dim, "hadamard")
        return (
            *brought, table, turn.T.contiguous().to(device, dtype), *books, cache, ring,
            draw.ints(list(range(rows, 0, -1))), heads, kind, turn.to(device, dtype), dim**-0.5, window, limit, early,
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
)  # fmt: skip


def _bytes(call: TurboQuantDecode) -> int:
    """q, k, v, both rotations, what is stored, and what attention moves beside its queries."""
    out = _like_q(call)
    assert turboquant_hybrid.bytes_moved is not None
    attends = turboquant_hybrid.bytes_moved(*_attention(call, out)) - nbytes(out)
    stored = layout_in("", call, call.turn.shape[0]).bytes_per_token_head + 2 * nbytes(call.ring[0, 0, 0, 0])
    return nbytes(call.qkv, call.turn) + attends + int(call.counts.sum()) * call.cache.shape[1] * stored


def _flops(call: TurboQuantDecode) -> int:
    assert turboquant_hybrid.flops is not None
    return 2 * call.qkv.numel() * call.turn.shape[0] + turboquant_hybrid.flops(*_attention(call, _like_q(call)))


turboquant_decode = register(
    Op(
        name="turboquant_decode",
        call=TurboQuantDecode,
        schema="-> Tensor",
        reference=composed,
        fake=_like_q,
        kernel="onegraph.ops.turboquant_decode:_on_gpu",
        cpu="onegraph.ops.cpu.turboquant:turboquant_decode",
        check=_check,
        cases=_CASES,
        # As of the write and of attention: a code at a near-tie falls either way.
        tolerance={torch.float32: 5e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2},
        bytes_moved=_bytes,
        flops=_flops,
    )
)
"""qkv [B, Q, (heads + 2 kv_heads) D] -> [B, Q, heads, D], turned back.

`turboquant_write` of the tokens (its arguments up to `kind`), then `turboquant_hybrid` of the queries
that it returns; `early` as of `paged_decode`. Results of tokens that are not real are anyone's. On a GPU what earlier
calls on the same cache wrote may be read before the kernels in front are done, so between two such calls stands a
kernel that waits and starts no other early, as between the steps of a model."""
