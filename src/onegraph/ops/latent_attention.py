"""Multi-head latent attention with the up-projections absorbed: one latent vector a token is key and value of all
heads.

DeepSeek-V2 (arXiv 2405.04434, section 2.1.2): a token leaves rank + rope numbers, its normed latent c and one rotated
key k for all heads. With W_UK folded into the queries, head h scores token j by (q_h . c_j + r_h . k_j) scale and sums
c_j; W_UV then makes the head's output of that sum. So attention is one key head of rank + rope numbers whose values are
its first `rank`, and the heads of a query fill the rows of a tensor core's tile.

The cache may hold codes (`formats/latent_kv.py`): E4M3, or TurboQuant's of the rotated latent. Then everything behind
the write lives in rotated coordinates, and the caller has the rotation in W_UK, W_UV and the signs of the norm.
"""

import torch
from torch import Tensor

from onegraph.formats.latent_kv import FP8, curve, fp8_codes, levels, pack_rows, row_bytes, unpack_rows
from onegraph.formats.turboquant import BITS, SCALES
from onegraph.ops.calls import LatentAttention, LatentWrite
from onegraph.ops.cases import Draw
from onegraph.ops.checks import FLOATS, check_tensors
from onegraph.ops.hadamard import rotate_rows
from onegraph.ops.registry import Case, Op, nbytes, register

INT32 = torch.int32
MAX_RANK = 512


def quantize(y: Tensor, bits: int, curve: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Rotated latents [..., rank] -> TurboQuant's codes uint8, and their factor float32 [...] as `kind` says it."""
    y = y.float()
    norm = y.norm(dim=-1, keepdim=True)
    unit = y / norm.clamp_min(1e-30)
    half = 1 << (bits - 1)
    sizes = levels(torch.arange(half, 2 * half, dtype=torch.uint8, device=y.device), bits, curve)
    rank = torch.bucketize(unit.abs().contiguous(), (sizes[1:] + sizes[:-1]) / 2, out_int32=True)
    codes = torch.where(unit < 0, half - 1 - rank, half + rank).to(torch.uint8)
    level = levels(codes, bits, curve)
    if kind == "matched":
        norm = norm / level.norm(dim=-1, keepdim=True)
    elif kind == "unbiased":
        norm = norm / (unit * level).sum(-1, keepdim=True).clamp_min(1e-3)
    return codes, norm.squeeze(-1)


def held(rows: Tensor, rank: int, rope: int, bits: int, curve: Tensor | None) -> Tensor:
    """Rows of a pool [..., W] -> latents and rotated keys, float32 [..., rank + rope]."""
    if not bits:
        return rows.float()
    codes, turned, factor = unpack_rows(rows, rank, rope, bits)
    return torch.cat((levels(codes, bits, curve) * factor.unsqueeze(-1), turned), dim=-1)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE of x [..., R], tables [..., R / 2]: pairs (2i, 2i + 1), or (i, i + R / 2). Float32."""
    x = x.float()
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _latent_write(call: LatentWrite) -> Tensor:
    q, latent, pool = call.q, call.latent, call.pool
    (batch, length), page_size, rope = latent.shape[:2], pool.shape[1], 2 * call.cos.shape[1]
    token = call.positions.unsqueeze(1) + torch.arange(length, dtype=INT32, device=q.device)
    at = token.clamp(0, call.cos.shape[0] - 1).flatten()
    cos, sin = (table.index_select(0, at).view(batch, length, -1) for table in (call.cos, call.sin))
    turned = turn(q[..., -rope:], cos.unsqueeze(2), sin.unsqueeze(2), call.interleaved).to(q.dtype)
    c, k = latent[..., :-rope].float(), latent[..., -rope:]
    c = c * torch.rsqrt(c.square().mean(-1, keepdim=True) + call.eps) * call.norm.float()
    k = turn(k, cos, sin, call.interleaved).to(q.dtype)
    if not call.bits:
        new = torch.cat((c.to(q.dtype), k), dim=-1)
    else:
        if call.curve is None:
            codes, factor = fp8_codes(c)
        else:
            y = rotate_rows(c.flatten(0, 1).T, c.shape[-1]).T.unflatten(0, c.shape[:2])
            codes, factor = quantize(y, call.bits, call.curve, call.kind)
        new = pack_rows(codes, k, factor, call.bits)
    step = torch.arange(length, dtype=INT32, device=q.device)
    inside = token.clamp(0, call.block_table.shape[1] * page_size - 1)
    real = (step < call.counts.unsqueeze(1)) & (inside == token)
    page = torch.where(real, call.block_table.gather(1, (inside // page_size).long()), 0).flatten().long()
    place = torch.where(real, inside % page_size, 0).flatten().long()
    # What is not real goes to the sentinel's first place, as what lies there.
    values = torch.where(real.flatten().unsqueeze(1), new.flatten(0, 1), pool[0, 0])
    pool.index_put_((page, place), values)
    return turned


def _latent_attention(call: LatentAttention) -> Tensor:
    q, pool = call.q, call.pool
    (batch, length, heads, rank), page_size = q.shape, pool.shape[1]
    capacity = call.block_table.shape[1] * page_size
    rows = pool.index_select(0, call.block_table.flatten()).view(batch, capacity, -1)
    keys = held(rows, rank, call.q_rope.shape[3], call.bits, call.curve)
    key, step = (torch.arange(n, dtype=INT32, device=q.device) for n in (capacity, length))
    token = (call.positions.unsqueeze(1) + step).unsqueeze(2)
    seen = (key <= token) & (step < call.counts.unsqueeze(1)).unsqueeze(2)  # [B, Q, L]
    if call.selected is not None:
        many = pool.shape[0] * page_size
        chosen = torch.zeros(batch, length, many + 1, dtype=torch.bool, device=q.device)
        chosen = chosen.scatter(2, torch.where(call.selected < 0, many, call.selected).clamp(max=many).long(), True)
        place = call.block_table.unsqueeze(2) * page_size + torch.arange(page_size, dtype=INT32, device=q.device)
        seen = seen & chosen.gather(2, place.view(batch, 1, capacity).expand(-1, length, -1).long())
    keys = torch.where(seen.any(1).unsqueeze(2), keys, 0.0)  # 0 * NaN would carry what a predecessor left
    wide = torch.cat((q, call.q_rope), dim=-1).float().flatten(1, 2) * call.scale
    scores = (wide @ keys.transpose(1, 2)).view(batch, length, heads, capacity)
    weights = scores.masked_fill(~seen.unsqueeze(2), float("-inf")).softmax(-1)
    weights = weights.masked_fill(~seen.any(2).view(batch, length, 1, 1), 0.0)
    out = weights.flatten(1, 2) @ keys[..., :rank]
    return out.view(batch, length, heads, rank).to(q.dtype)


def _check_rows(op: str, like: Tensor, call: LatentWrite | LatentAttention, rank: int, rope: int) -> None:
    rows, pool, bits = like.shape[0], call.pool, call.bits
    check_tensors(
        op, like.device, positions=(call.positions, INT32, (rows,)), counts=(call.counts, INT32, (rows,)),
        block_table=(call.block_table, INT32, (rows, -1)),
        curve=(call.curve, torch.float32, (3,)),
    )  # fmt: skip
    if bits not in (0, *BITS, FP8) or (call.curve is None) != (bits in (0, FP8)):
        raise ValueError(
            f"{op}: codes of {bits} bits with{'out' * (call.curve is None)} a curve; allowed are 0 and {FP8} without "
            f"one, and {BITS[0]} to {BITS[-1]} with one"
        )
    width = row_bytes(rank, rope, bits) if bits else rank + rope
    kind = torch.uint8 if bits else like.dtype
    fits = pool.dim() == 3 and pool.shape[2] == width and pool.device == like.device and pool.is_contiguous()
    if not fits or pool.dtype != kind:
        raise ValueError(
            f"{op}: the pool is {pool.dtype} {tuple(pool.shape)}; for a latent of {rank} numbers and a key of {rope} "
            f"it must be contiguous [pages, page_size, {width}] of {kind} on {like.device}"
        )


def _check_write(call: LatentWrite) -> None:
    op, q, latent, half = "latent_write", call.q, call.latent, call.cos.shape[-1]
    if q.dim() != 4 or q.dtype not in FLOATS or latent.dim() != 3 or latent.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"{op}: q is {q.dtype} {tuple(q.shape)}, latent {tuple(latent.shape)}; they must be floats [B, Q, heads, "
            "nope + rope] and [B, Q, rank + rope]"
        )
    width = latent.shape[2]
    if latent.dtype != q.dtype or call.norm.shape != (width - 2 * half,):
        raise ValueError(
            f"{op}: latent is {latent.dtype} of {width} numbers, of which {2 * half} rotate, norm is "
            f"{tuple(call.norm.shape)}; rank and dtype must agree"
        )
    if call.kind not in SCALES:
        raise ValueError(f"{op}: kind is {call.kind!r}; allowed are {', '.join(SCALES)}")
    if q.shape[3] < 2 * half or q.stride(3) != 1 or latent.stride(2) != 1:
        raise ValueError(f"{op}: a head of q has {q.shape[3]} numbers; {2 * half} rotate, and they must be contiguous")
    for name, table in (("cos", call.cos), ("sin", call.sin)):
        if table.dim() != 2 or table.dtype != torch.float32 or table.shape != call.cos.shape:
            raise ValueError(
                f"{op}: {name} is {table.dtype} {tuple(table.shape)}; it must be float32 [positions, R / 2]"
            )
    _check_rows(op, q, call, width - 2 * half, 2 * half)


def _check_attention(call: LatentAttention) -> None:
    op, q, rope = "latent_attention", call.q, call.q_rope
    if q.dim() != 4 or q.dtype not in FLOATS or rope.shape[:3] != q.shape[:3] or rope.dtype != q.dtype:
        raise ValueError(
            f"{op}: q is {q.dtype} {tuple(q.shape)}, q_rope {rope.dtype} {tuple(rope.shape)}; they must be floats of "
            "one type, [B, Q, heads, rank] and [B, Q, heads, rope]"
        )
    if q.shape[3] > MAX_RANK:
        raise ValueError(f"{op}: the latent has {q.shape[3]} numbers; allowed are {MAX_RANK} at most")
    if q.stride(3) != 1 or not rope.is_contiguous():
        raise ValueError(f"{op}: heads of q must be contiguous, and q_rope")
    _check_rows(op, q, call, q.shape[3], rope.shape[3])
    if call.selected is not None:
        check_tensors(op, q.device, selected=(call.selected, INT32, (*q.shape[:2], -1)))


def _rows(draw: Draw, positions: list[int], counts: list[int], tokens: int, page_size: int) -> tuple[Tensor, ...]:
    table = draw.pages(len(positions), -(-(max(positions) + tokens) // page_size))
    return draw.ints(positions), draw.ints(counts), table


def _pool(draw: Draw, pages: int, page_size: int, rank: int, rope: int, bits: int) -> tuple[Tensor, Tensor | None]:
    """Random rows, and the curve of their levels."""
    x, levels = draw.randn(pages, page_size, rank + rope), None
    if not bits:
        return x, None
    if bits == FP8:
        codes, factor = fp8_codes(x[..., :rank])
    else:
        levels = curve(rank, bits).to(draw.device)
        codes, factor = quantize(x[..., :rank], bits, levels, "matched")
    return pack_rows(codes, x[..., rank:], factor, bits), levels


def _write_case(
    name: str, *, heads: int, nope: int, rank: int, rope: int, positions: list[int], counts: list[int],
    tokens: int = 1, page_size: int = 16, interleaved: bool = True, bits: int = 0, kind: str = "matched",
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, batch = Draw(device, dtype, generator), len(positions)
        at, count, table = _rows(draw, positions, counts, tokens, page_size)
        q, latent = draw.randn(batch, tokens, heads, nope + rope), draw.randn(batch, tokens, rank + rope)
        pool, levels = _pool(draw, 1 + table.numel(), page_size, rank, rope, bits)
        turns = draw.turns(max(positions) + tokens, rope)
        return (
            q,
            latent,
            1 + 0.2 * draw.randn(rank),
            1e-6,
            *turns,
            at,
            count,
            table,
            pool,
            interleaved,
            bits,
            levels,
            kind,
        )

    return Case(name=name, make=make)


def _attention_case(
    name: str, *, heads: int, rank: int, rope: int, positions: list[int], counts: list[int], tokens: int = 1,
    page_size: int = 16, top_k: int = 0, bits: int = 0,
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, batch = Draw(device, dtype, generator), len(positions)
        at, count, table = _rows(draw, positions, counts, tokens, page_size)
        selected = None
        if top_k:  # distinct tokens that the query sees
            order = torch.rand(batch, tokens, table.shape[1] * page_size, generator=generator).argsort(dim=2)
            order = order[:, :, :top_k].to(INT32).to(device)
            page = table.gather(1, (order // page_size).flatten(1).long()).view_as(order)
            last = (at.unsqueeze(1) + torch.arange(tokens, dtype=INT32, device=device)).unsqueeze(2)
            selected = torch.where(order > last, -1, page * page_size + order % page_size).to(INT32)
        q = draw.randn(heads, batch * tokens, rank).transpose(0, 1).unflatten(0, (batch, tokens))  # as products give it
        pool, levels = _pool(draw, 1 + table.numel(), page_size, rank, rope, bits)
        q_rope = draw.randn(batch, tokens, heads, rope)
        return q, q_rope, pool, table, at, count, selected, (rank + rope) ** -0.5, bits, levels

    return Case(name=name, make=make)


latent_write = register(
    Op(
        name="latent_write",
        call=LatentWrite,
        schema="-> Tensor",
        reference=_latent_write,
        fake=lambda call: call.q.new_empty((*call.q.shape[:3], 2 * call.cos.shape[1])),
        kernel="onegraph.ops.triton.latent_attention:latent_write",
        check=_check_write,
        cases=(
            _write_case("v3", heads=128, nope=128, rank=512, rope=64, positions=[0, 700, 9], counts=[1, 1, 0]),
            _write_case("mistral4", heads=32, nope=64, rank=256, rope=64, positions=[63, 64], counts=[1, 1]),
            _write_case(
                "chunk", heads=3, nope=8, rank=24, rope=8, positions=[0, 5, 30], counts=[13, 4, 0], tokens=13,
                page_size=8,
            ),
            _write_case(
                "halves", heads=3, nope=8, rank=40, rope=16, positions=[2, 17], counts=[3, 1], tokens=3,
                interleaved=False,
            ),
            *(
                _write_case(
                    f"{name}_chunk", heads=3, nope=8, rank=rank, rope=8, positions=[0, 5, 30], counts=[13, 4, 0],
                    tokens=13, page_size=8, bits=bits, kind=kind,
                )
                for name, rank, bits, kind in (
                    ("fp8", 24, FP8, "matched"), ("4_bits", 64, 4, "matched"), ("3_bits", 128, 3, "unbiased"),
                    ("2_bits", 64, 2, "norm"), ("1_bit", 64, 1, "matched"),
                )
            ),
            _write_case("fp8_v3", heads=4, nope=128, rank=512, rope=64, positions=[700, 9], counts=[1, 0], bits=FP8),
            _write_case("4_bits_v3", heads=4, nope=128, rank=512, rope=64, positions=[700, 9], counts=[1, 0], bits=4),
            _write_case("3_bits_m4", heads=2, nope=64, rank=256, rope=64, positions=[63, 64], counts=[1, 1], bits=3),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda call: 2 * nbytes(call.latent) + 2 * call.cos.shape[1] * nbytes(call.q) // call.q.shape[3],
        flops=lambda call: 4 * call.latent.numel(),
    )
)  # fmt: skip
"""q [B, Q, heads, nope + rope] and latent [B, Q, rank + rope] as their linears give them -> the rotated parts of q
[B, Q, heads, rope]; RMSNorm(latent's first rank) * norm | its rotated rest go to the paged `pool` [pages, page_size,
rank + rope] of q's dtype (bits 0), or uint8 [pages, page_size, row_bytes] as rows of `formats/latent_kv.py`: of 8 bits
in E4M3, of 1 to 4 in TurboQuant's codes of H latent / sqrt(rank), with the `curve` float32 [3] of their levels and the
factor that `kind` says (`formats.turboquant`: scale). H is Sylvester's Hadamard matrix; the random signs of the
rotation are in `norm`. Token i of row b stands at positions[b] + i; the first counts[b] are real, others are not
written. Pairs of the rotation are neighbours (`interleaved`) or lie half of the part apart."""

latent_attention = register(
    Op(
        name="latent_attention",
        call=LatentAttention,
        schema="-> Tensor",
        reference=_latent_attention,
        fake=lambda call: call.q.new_empty(call.q.shape),
        kernel="onegraph.ops.triton.latent_attention:latent_attention",
        check=_check_attention,
        cases=(
            _attention_case("v3", heads=128, rank=512, rope=64, positions=[0, 700, 9], counts=[1, 1, 0]),
            _attention_case("v3_long", heads=64, rank=512, rope=64, positions=[4000], counts=[1], page_size=64),
            _attention_case("mistral4", heads=32, rank=256, rope=64, positions=[63, 64], counts=[1, 1]),
            _attention_case(
                "round", heads=16, rank=512, rope=64, positions=[12, 300], counts=[4, 2], tokens=4
            ),
            _attention_case("selected", heads=16, rank=512, rope=64, positions=[300, 40], counts=[1, 1], top_k=64),
            _attention_case(
                "chunk", heads=3, rank=24, rope=8, positions=[0, 5, 30], counts=[13, 4, 0], tokens=13, page_size=8
            ),
            *(
                _attention_case(
                    f"{name}_chunk", heads=3, rank=rank, rope=8, positions=[0, 5, 30], counts=[13, 4, 0], tokens=13,
                    page_size=8, bits=bits,
                )
                for name, rank, bits in (
                    ("fp8", 24, FP8), ("4_bits", 64, 4), ("3_bits", 64, 3), ("2_bits", 128, 2), ("1_bit", 64, 1)
                )
            ),
            *(
                _attention_case(
                    f"{name}_selected", heads=16, rank=256, rope=64, positions=[300, 40], counts=[1, 1], top_k=64,
                    bits=bits,
                )
                for name, bits in (("fp8", FP8), ("4_bits", 4))
            ),
            *(
                _attention_case(
                    f"{name}_40_heads", heads=40, rank=64, rope=16, positions=[130, 9], counts=[1, 1], bits=bits
                )
                for name, bits in (("exact", 0), ("fp8", FP8), ("4_bits", 4))
            ),
            *(
                _attention_case(
                    f"{name}_v3_long", heads=64, rank=512, rope=64, positions=[4000], counts=[1], page_size=64,
                    bits=bits,
                )
                for name, bits in (("fp8", FP8), ("4_bits", 4), ("3_bits", 3))
            ),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: 2 * nbytes(call.q) + _keys(call) * call.pool.shape[2] * call.pool.element_size(),
        flops=lambda call: 2 * call.q.shape[2] * (2 * call.q.shape[3] + call.q_rope.shape[3]) * _keys(call),
    )
)  # fmt: skip
"""q [B, Q, heads, rank] with W_UK folded in and q_rope [B, Q, heads, rope] -> [B, Q, heads, rank]: softmax of (q . c +
q_rope . k) scale over the row's tokens up to the query's own, times c. Query i of row b stands at positions[b] + i; the
result of those that are not real (i >= counts[b]) is zero. selected int32 [B, Q, k]: places in the pool, pages
flattened, of the only tokens that a query may see, its own and earlier ones (-1: none). pool, bits
and curve are `latent_write`'s; with a curve c is rotated, and so are q and the result."""


def _keys(call: LatentAttention) -> int:
    """Tokens that the rows of a call read."""
    return int((call.positions + call.counts).sum()) * call.q.shape[1]
