"""DeepSeek-V4's attention: one latent vector a token is key and value of all heads.

A query sees the latest tokens (a ring that its sequence owns), and entries that stand for many tokens each (a paged
pool): all of them, or those that the indexer selected. Keys carry RoPE in their trailing dimensions and so do values,
which is why the result is rotated back by the query's own position. Every length is read on the device.
"""

import torch
from torch import Tensor

from onegraph.formats.deepseek_kv import row_bytes, unpack_rows
from onegraph.ops.calls import DeepseekAttention
from onegraph.ops.checks import FLOATS, check_query, check_tensors
from onegraph.ops.deepseek_compress import (
    INT32,
    angles,
    as_rows,
    check_rows,
    check_tables,
    check_width,
    paged_rows,
    rotate,
    write_ring,
)
from onegraph.ops.registry import Case, Op, nbytes, register


def _deepseek_qkv(
    q: Tensor, kv: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, fp8: bool
) -> tuple[Tensor, Tensor]:
    token = positions.unsqueeze(1) + torch.arange(q.shape[1], dtype=INT32, device=q.device)

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    heads = rotate(unit(q.float().unflatten(2, (-1, kv.shape[2]))), cos, sin, token).to(q.dtype)
    latent = rotate((unit(kv.float()) * norm.float()).unsqueeze(2), cos, sin, token)
    return heads, as_rows(latent.squeeze(2), torch.uint8 if fp8 else kv.dtype, 2 * cos.shape[1])


def _deepseek_attention(call: DeepseekAttention) -> Tensor:
    q, kv, ring, sinks, cos, sin, slots, positions, counts, block_table, entries, selected, ratio, window, scale = call
    batch, length = q.shape[:2]
    size = ring.shape[1]
    step = torch.arange(length, dtype=INT32, device=q.device)
    token = (positions.unsqueeze(1) + step).unsqueeze(2)  # [B, Q, 1]
    real = (step < counts.unsqueeze(1)).unsqueeze(2)
    # The window: what the ring holds of the tokens before this call, and this call's own.
    place = torch.arange(size, dtype=INT32, device=q.device)
    before = positions.unsqueeze(1) - 1
    held = (before - (before - place) % size).unsqueeze(1)  # [B, 1, R]: the latest token in each place
    old = (held >= 0) & (held > token - window)
    behind = step.unsqueeze(1) - step
    new = ((behind >= 0) & (behind < window)).expand(batch, -1, -1)
    keys, seen = [ring.index_select(0, slots), kv], [old, new]
    if entries is not None:
        capacity = block_table.shape[1] * entries.shape[1]
        keys.append(entries.index_select(0, block_table.flatten()).view(batch, capacity, entries.shape[2]))
        if selected is None:
            entry = torch.arange(capacity, dtype=INT32, device=q.device)
            seen.append(entry < (token + 1) // ratio)
        else:
            many = entries.shape[0] * entries.shape[1]
            chosen = torch.zeros(batch, length, many + 1, dtype=torch.bool, device=q.device)
            chosen = chosen.scatter(2, torch.where(selected < 0, many, selected).clamp(max=many).long(), True)
            rows = torch.arange(entries.shape[1], dtype=INT32, device=q.device)
            place = (block_table.unsqueeze(2) * entries.shape[1] + rows).view(batch, 1, capacity)
            seen.append(chosen.gather(2, place.expand(-1, length, -1).long()))
    out = attend_to(q, torch.cat(keys, dim=1), torch.cat(seen, dim=2) & real, sinks, 2 * cos.shape[1], scale)
    out = rotate(out, cos, -sin, token.squeeze(2)).to(q.dtype)
    write_ring(ring, kv, slots, positions, counts)
    return out


def attend_to(q: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor, rope: int, scale: float) -> Tensor:
    """q [B, Q, H, D] to keys [B, N, D] (or rows of FP8) of which each query sees `visible` [B, Q, N]; float32."""
    batch, length, heads, dim = q.shape
    every = unpack_rows(keys, dim, rope) if keys.dtype == torch.uint8 else keys.float()
    every = torch.where(visible.any(1).unsqueeze(2), every, 0.0)  # 0 * NaN would carry what a predecessor left
    scores = (q.float().flatten(1, 2) @ every.transpose(1, 2)).view(batch, length, heads, -1) * scale
    scores = torch.where(visible.unsqueeze(2), scores, -torch.inf)
    limit = torch.maximum(scores.amax(3, keepdim=True), sinks.view(-1, 1))
    weight = (scores - limit).exp()
    total = weight.sum(3, keepdim=True) + (sinks.view(-1, 1) - limit).exp()
    return ((weight / total).flatten(1, 2) @ every).view(batch, length, heads, dim)


def check_qkv(
    q: Tensor, kv: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, fp8: bool
) -> None:
    name = "deepseek_qkv"
    if q.dim() != 3 or kv.dim() != 3 or q.dtype not in FLOATS or kv.dtype != q.dtype or q.shape[:2] != kv.shape[:2]:
        raise ValueError(
            f"{name}: q is {q.dtype} {tuple(q.shape)}, kv {kv.dtype} {tuple(kv.shape)}; they must be floats of one "
            "type, [B, Q, H D] and [B, Q, D]"
        )
    if q.shape[2] % kv.shape[2] or norm.shape != kv.shape[2:] or q.stride(-1) != 1 or kv.stride(-1) != 1:
        raise ValueError(
            f"{name}: q has width {q.shape[2]}, kv {kv.shape[2]}, norm {tuple(norm.shape)}; q's must be a multiple of "
            "kv's, norm's equal to it, and rows contiguous"
        )
    check_rows(name, q, positions=positions)
    check_tables(name, kv.shape[2], cos, sin)


def _check_attention(call: DeepseekAttention) -> None:
    op, q, kv, entries, selected = "deepseek_attention", call.q, call.kv, call.entries, call.selected
    check_query(op, q)
    batch, length, heads, dim = q.shape
    some = -1, -1, -1
    for what, tensor, shape in (("kv", kv, (batch, length, -1)), ("ring", call.ring, some), ("entries", entries, some)):
        if tensor is not None:
            check_width(op, what, tensor, dim, 2 * call.cos.shape[1], q.dtype)
            check_tensors(op, q.device, **{what: (tensor, kv.dtype, shape)})
    rows = {"slots": call.slots, "positions": call.positions, "counts": call.counts}
    check_rows(op, q, None if entries is None else call.block_table, **rows)
    check_tables(op, dim, call.cos, call.sin)
    check_tensors(
        op, q.device, sinks=(call.sinks, torch.float32, (heads,)), selected=(selected, INT32, (batch, length, -1))
    )
    if not 1 <= call.window <= call.ring.shape[1]:
        raise ValueError(f"{op}: window is {call.window}; it must be 1 to {call.ring.shape[1]}, the places of the ring")
    if entries is not None and call.ratio < 1:
        raise ValueError(f"{op}: ratio is {call.ratio}; entries stand for one token or more")


def _qkv_case(name: str, batch: int, tokens: int, heads: int, dim: int, half: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        angle = angles(64 + tokens, half)
        args = (
            torch.randn(batch, tokens, heads * dim, generator=generator).to(dtype),
            torch.randn(batch, tokens, dim, generator=generator).to(dtype),
            (1 + 0.2 * torch.randn(dim, generator=generator)).to(dtype),
            1e-6,
            angle.cos(),
            angle.sin(),
            torch.randint(0, 64, (batch,), generator=generator, dtype=INT32),
            False,
        )
        return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)

    return Case(name=name, make=make)


def _case(
    name: str,
    *,
    heads: int,
    dim: int,
    half: int,
    window: int,
    ratio: int,
    per_page: int,
    positions: list[int],
    counts: list[int],
    top_k: int = 0,
    fp8: bool = False,
    spare: int = 0,
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        tokens, batch = max(counts), len(positions)
        rows, pages = paged_rows(generator, positions, counts, tokens, per_page * max(ratio, 1))

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        kind, selected = torch.uint8 if fp8 else dtype, None
        if top_k:  # distinct entries, of those that the query sees
            ready = (rows["positions"].unsqueeze(1) + torch.arange(tokens, dtype=INT32) + 1) // ratio
            order = torch.rand(batch, tokens, rows["block_table"].shape[1] * per_page, generator=generator)
            order = order.masked_fill(torch.arange(order.shape[2]) >= ready.unsqueeze(2), 2.0)
            best = order.sort(dim=2)
            selected = torch.where(best.values < 2, best.indices, -1)[:, :, :top_k].to(INT32).contiguous()
            selected = torch.nn.functional.pad(selected, (0, top_k - selected.shape[2]), value=-1)
            page = rows["block_table"].gather(1, (selected.clamp(min=0) // per_page).flatten(1).long())
            selected = torch.where(selected < 0, -1, page.view_as(selected) * per_page + selected % per_page)
        angle = angles(max(positions) + tokens, half)
        args = (
            randn(batch, tokens, heads, dim).to(dtype),
            as_rows(randn(batch, tokens, dim), kind, 2 * half),
            as_rows(randn(batch + 1, window + spare, dim), kind, 2 * half),
            randn(heads),
            angle.cos(),
            angle.sin(),
            *rows.values(),
            as_rows(randn(pages, per_page, dim), kind, 2 * half) if ratio else None,
            selected,
            ratio,
            window,
            dim**-0.5,
        )
        return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)

    return Case(name=name, make=make)


deepseek_qkv = register(
    Op(
        name="deepseek_qkv",
        schema=(
            "(Tensor q, Tensor kv, Tensor norm, float eps, Tensor cos, Tensor sin, Tensor positions, bool fp8) "
            "-> (Tensor, Tensor)"
        ),
        reference=_deepseek_qkv,
        fake=lambda q, kv, norm, eps, cos, sin, positions, fp8: (
            q.new_empty((*q.shape[:2], q.shape[2] // kv.shape[2], kv.shape[2])),
            kv.new_empty((*kv.shape[:2], row_bytes(kv.shape[2], 2 * cos.shape[1])), dtype=torch.uint8)
            if fp8
            else kv.new_empty(kv.shape),
        ),
        kernel="onegraph.ops.triton.deepseek_attention:deepseek_qkv",
        check=check_qkv,
        cases=(_qkv_case("flash", 2, 1, 64, 512, 32), _qkv_case("chunk", 3, 7, 3, 40, 4)),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda q, kv, *rest: 2 * nbytes(q, kv),
        flops=lambda q, kv, *rest: 4 * (q.numel() + kv.numel()),
    )
)
"""q [B, Q, H D], kv [B, Q, D] -> (q [B, Q, H, D], kv [B, Q, D]): per head x / RMS(x), kv also times `norm` [D], then
interleaved RoPE on the trailing 2 R dimensions at positions[b] + i; float32 inside, rounded once. With `fp8` kv comes
as rows of FP8, uint8 [B, Q, row_bytes] (`formats/deepseek_kv.py`)."""

deepseek_attention = register(
    Op(
        name="deepseek_attention",
        call=DeepseekAttention,
        schema="-> Tensor",
        reference=_deepseek_attention,
        fake=lambda call: torch.empty_like(call.q),
        kernel="onegraph.ops.triton.deepseek_attention:deepseek_attention",
        check=_check_attention,
        cases=(
            _case(
                "flash_window", heads=64, dim=512, half=32, window=128, ratio=0, per_page=1,
                positions=[0, 127, 300, 9], counts=[1, 1, 1, 0],
            ),
            _case(
                "flash_csa", heads=64, dim=512, half=32, window=128, ratio=4, per_page=16, top_k=64,
                positions=[2, 3, 900], counts=[1, 1, 1],
            ),
            _case(
                "flash_hca", heads=16, dim=512, half=32, window=128, ratio=128, per_page=2,
                positions=[126, 127, 1000], counts=[1, 1, 1],
            ),
            _case(
                "decode", heads=19, dim=48, half=8, window=16, ratio=4, per_page=4, top_k=8,
                positions=[2, 45, 80], counts=[1, 1, 0],
            ),
            _case(
                "decode_fp8", heads=19, dim=96, half=8, window=16, ratio=4, per_page=4, top_k=8,
                positions=[2, 45, 80], counts=[1, 1, 0], fp8=True,
            ),
            _case(
                "csa_chunk", heads=3, dim=48, half=8, window=8, ratio=4, per_page=4, top_k=4,
                positions=[0, 5, 30], counts=[13, 4, 0],
            ),
            _case(
                "hca_chunk", heads=3, dim=32, half=4, window=8, ratio=8, per_page=2,
                positions=[0, 6, 29], counts=[13, 9, 1],
            ),
            _case(
                "spare", heads=3, dim=48, half=8, window=16, ratio=0, per_page=1, spare=5,
                positions=[2, 45, 80, 17], counts=[1, 1, 1, 0],
            ),
            _case(
                "spare_chunk", heads=3, dim=48, half=8, window=8, ratio=4, per_page=4, top_k=4, spare=3,
                positions=[0, 5, 30], counts=[13, 4, 6],
            ),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: 2 * nbytes(call.q, call.kv) + call.q.shape[0] * nbytes(call.ring[0]),
        flops=lambda call: 4 * call.q.numel() * call.window,
    )
)  # fmt: skip
"""q [B, Q, H, D], kv [B, Q, D] (this call's, as deepseek_qkv returns them) -> [B, Q, H, D]; kv enters the ring.

Query i of row b stands at t = positions[b] + i; the first counts[b] are real, the result of the others is zero. It
sees the tokens above t - window (ring [slots, R, D] holds the sequence of slots[b], token j at j mod R; with R = window
+ s the latest s tokens may be taken back, since what they wrote over is seen by nobody) up to t, and entries
of the paged pool [pages, per page, D]: those at the places that `selected` int32 [B, Q, k] names (rows of the pool,
pages flattened; the sequence's own; -1: none), or without it all below (t + 1) // ratio. Softmax in float32 with
sinks[h] in the denominator; the result's trailing dimensions are rotated back by t. What a query does not see may be
anything, NaN included. Slot 0 is never written. kv, ring and entries may all be rows of FP8."""
