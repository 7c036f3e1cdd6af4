"""Writing tokens into a TurboQuant KV cache: norm, RoPE, rotation, quantization, packing and scatter in one launch.

What a code means stands in `onegraph.formats.turboquant`, where its bits stand in `onegraph.formats.turboquant_layout`.
Everything behind this op lives in rotated coordinates: the query and the exact keys and values that it returns are
rotated as well, so that codes and exact vectors attend together and one product at the end turns the result back.
"""

import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant import SCALES, mean_abs_coordinate
from onegraph.formats.turboquant_layout import Coded, TurboQuantLayout, layout_of, pack_tokens
from onegraph.ops.attention import check_tokens, places, turned
from onegraph.ops.calls import TurboQuantAttention, TurboQuantDecode, TurboQuantHybrid, TurboQuantWrite
from onegraph.ops.cases import Draw
from onegraph.ops.checks import check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register

LARGEST_NORM = 65504.0  # float16
_Coded = TurboQuantWrite | TurboQuantAttention | TurboQuantHybrid | TurboQuantDecode


def quantize(y: Tensor, codebook: Tensor, projection: Tensor | None = None, scale: str = "norm") -> Coded:
    """Rotated vectors [..., d] -> codes, of `codebook` (float32, in the layout's order); `projection` [d, d] needs
    `prod`, whose residual norms come with everything but S^T sign(S r) multiplied in, and whose scale is the norm."""
    y = y.float()
    norm = y.norm(dim=-1, keepdim=True)
    unit = y / norm.clamp_min(1e-30)
    sizes = codebook[::2]
    codes = 2 * torch.bucketize(unit.abs().contiguous(), (sizes[1:] + sizes[:-1]) / 2, out_int32=True)
    if codebook.numel() > 1:
        codes = codes + (unit < 0)
    level = codebook.index_select(0, codes.flatten()).view_as(unit)
    if projection is None:
        if scale == "matched":
            norm = norm / level.norm(dim=-1, keepdim=True)
        elif scale == "unbiased":
            norm = norm / (unit * level).sum(-1, keepdim=True).clamp_min(1e-3)
        return Coded(codes.to(torch.uint8), _half(norm))
    d = y.shape[-1]
    rest = unit - level
    residual = norm * rest.norm(dim=-1, keepdim=True) / (d * mean_abs_coordinate(d))
    signs = (rest @ projection.float().T < 0).to(torch.uint8)
    return Coded(codes.to(torch.uint8), _half(norm), signs, _half(residual))


def dequantize(coded: Coded, codebook: Tensor, projection: Tensor | None = None) -> Tensor:
    """What codes stand for, float32 [..., d], in rotated coordinates."""
    level = codebook.index_select(0, coded.codes.flatten().int()).view(coded.codes.shape)
    out = level * coded.norms.float().unsqueeze(-1)
    if coded.signs is None or coded.residual_norms is None:
        return out
    assert projection is not None
    return out + coded.residual_norms.float().unsqueeze(-1) * ((1.0 - 2.0 * coded.signs) @ projection.float())


def _half(norm: Tensor) -> Tensor:
    return norm.squeeze(-1).clamp(max=LARGEST_NORM).half()


def write_unfused(call: TurboQuantWrite, layout: TurboQuantLayout, projection: Tensor | None) -> tuple[Tensor, Tensor]:
    """`turboquant_write` in torch's ops, into a cache of any `layout`; variant `prod` needs its `projection` [D, D]."""
    dtype, dim, (_, kv_heads, page_bytes) = call.qkv.dtype, layout.head_dim, call.cache.shape
    both, values, token = turned(call, call.heads, kv_heads, dim)
    whole = torch.cat((both.to(dtype).float(), values.float()), dim=2)
    q, k, v = ((whole @ call.turn.float()) * dim**-0.5).split((call.heads, kv_heads, kv_heads), dim=2)

    keys = quantize(k, call.k_codebook, projection if layout.k_variant == "prod" else None, call.kind)
    coded = quantize(v, call.v_codebook, projection if layout.v_variant == "prod" else None, call.kind)
    rows = pack_tokens(layout, keys, coded)  # [B, Q, kv_heads, bytes]
    page, place, real = places(token, call.counts, call.block_table, layout.page_size)
    head = torch.arange(kv_heads, device=page.device)
    start = (page.long().unsqueeze(2) * kv_heads + head) * page_bytes  # [B, Q, kv_heads]
    byte = start.unsqueeze(3) + layout.offsets(place.long()).unsqueeze(2)
    call.cache.view(-1).index_copy_(0, byte.flatten(), rows.flatten())

    kept = torch.stack((k, v), dim=2).to(dtype)  # [B, Q, 2, kv_heads, D]
    if call.ring is not None and call.slots is not None:
        size = call.ring.shape[1]
        step = torch.arange(token.shape[1], device=page.device)
        latest = real & (step >= call.counts.unsqueeze(1) - size)  # of a long chunk no two tokens share a place
        slot = torch.where(latest, call.slots.unsqueeze(1), 0) * size + token.clamp_min(0) % size
        call.ring.view(-1, *call.ring.shape[2:]).index_copy_(0, slot.flatten().long(), kept.flatten(0, 1))
    return q.to(dtype).contiguous(), kept if call.exact else kept[:0].clone()


def layout_in(op: str, call: _Coded, dim: int) -> TurboQuantLayout:
    """The layout of the call's cache, which its codebooks and the size of a page tell. Raises ValueError."""
    cache = call.cache
    if cache.dim() != 3 or cache.dtype != torch.uint8 or not cache.is_contiguous():
        raise ValueError(
            f"{op}: cache is {tuple(cache.shape)} {cache.dtype}; it must be contiguous uint8 [pages, kv_heads, bytes]"
        )
    try:
        return layout_of(dim, call.k_codebook.numel(), call.v_codebook.numel(), cache.shape[2])
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None


def _turboquant_write(call: TurboQuantWrite) -> tuple[Tensor, Tensor]:
    return write_unfused(call, layout_in("turboquant_write", call, call.turn.shape[0]), None)


def _check(call: TurboQuantWrite) -> None:
    op, qkv, turn, cache = "turboquant_write", call.qkv, call.turn, call.cache
    if turn.dim() != 2 or turn.shape[0] != turn.shape[1]:
        raise ValueError(f"{op}: turn is {tuple(turn.shape)}; it must be [head_dim, head_dim]")
    dim = turn.shape[0]
    layout = layout_in(op, call, dim)
    kv_heads = cache.shape[1]
    check_tokens(op, call, call.heads, kv_heads, dim, partial=True)
    if call.kind not in SCALES:
        raise ValueError(f"{op}: kind is {call.kind!r}; allowed are {', '.join(SCALES)}")
    if (call.ring is None) != (call.slots is None):
        raise ValueError(f"{op}: ring and slots go together: give both or neither")
    norm = torch.float32 if call.q_norm is not None and call.q_norm.dtype == torch.float32 else qkv.dtype
    check_tensors(
        op, qkv.device,
        qkv=(qkv, qkv.dtype, tuple(qkv.shape)),
        q_norm=(call.q_norm, norm, (dim,)),
        k_norm=(call.k_norm, norm, (dim,)),
        cos=(call.cos, torch.float32, (-1, -1)),
        sin=(call.sin, torch.float32, (-1, -1)),
        turn=(turn, qkv.dtype, (dim, dim)),
        k_codebook=(call.k_codebook, torch.float32, (1 << layout.k_bits,)),
        v_codebook=(call.v_codebook, torch.float32, (1 << layout.v_bits,)),
        cache=(cache, torch.uint8, tuple(cache.shape)),
        ring=(call.ring, qkv.dtype, (-1, -1, 2, kv_heads, dim)),
        slots=(call.slots, torch.int32, qkv.shape[:1]),
    )  # fmt: skip


def _case(
    name: str, *, tokens: int, heads: int, kv_heads: int, dim: int, bits: tuple[int, int], positions: list[int],
    counts: list[int], page_size: int = 16, kind: str = "matched", norm: bool = False, rope: bool = True,
    ring: int = 0, exact: bool = False, rotation: str = "hadamard", turned: int | None = None,
) -> Case:  # fmt: skip
    """turned: coordinates of a head that rotate, all of them unless said; fewer come with norms in float32."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, rows = Draw(device, dtype, generator), len(positions)
        brought = list(draw.tokens(heads, kv_heads, dim, tokens, positions, counts, page_size, norm, rope))
        if turned is not None:
            brought[1:3] = (t if t is None else t.float() for t in brought[1:3])
            brought[4:6] = (t[:, : turned // 2].contiguous() for t in brought[4:6])
        shape = TurboQuantLayout(dim, *bits, page_size=page_size).cache_shape(1 + brought[8].numel(), kv_heads)
        return (
            *brought,
            formats.rotation(dim, rotation).T.contiguous().to(device, dtype),
            *(formats.codebook(dim, b, device) for b in bits),
            torch.zeros(shape, dtype=torch.uint8, device=device),
            torch.zeros(rows + 1, ring, 2, kv_heads, dim, dtype=dtype, device=device) if ring else None,
            draw.ints(list(range(rows, 0, -1))) if ring else None,
            heads, kind, exact,
        )  # fmt: skip

    return Case(name=name, make=make)


_CASES = (
    _case("smollm2_4", tokens=1, heads=9, kv_heads=3, dim=64, bits=(4, 4), positions=[0, 15, 16, 70],
          counts=[1, 1, 0, 1]),
    _case("k3v4_ring", tokens=4, heads=9, kv_heads=3, dim=64, bits=(3, 4), positions=[0, 30], counts=[4, 3], ring=24),
    _case("llama_k4v3", tokens=1, heads=8, kv_heads=2, dim=128, bits=(4, 3), positions=[37, 4], counts=[1, 1],
          page_size=32, kind="norm"),
    _case("qwen3_2", tokens=3, heads=4, kv_heads=1, dim=128, bits=(2, 2), positions=[31, 5], counts=[3, 2], norm=True,
          kind="unbiased", exact=True),
    _case("nope_80", tokens=2, heads=4, kv_heads=4, dim=80, bits=(4, 3), positions=[7, 3], counts=[2, 1], rope=False),
    _case("one_bit", tokens=2, heads=2, kv_heads=1, dim=64, bits=(1, 1), positions=[7], counts=[2]),
    _case("qr_96", tokens=5, heads=6, kv_heads=1, dim=96, bits=(2, 3), positions=[2], counts=[4], rotation="qr"),
    _case("dim_192", tokens=1, heads=2, kv_heads=2, dim=192, bits=(4, 4), positions=[3], counts=[1]),
    _case("mqa_256", tokens=1, heads=16, kv_heads=1, dim=256, bits=(2, 4), positions=[40], counts=[1], exact=True),
    _case("qwen3_5", tokens=2, heads=6, kv_heads=1, dim=256, bits=(4, 4), positions=[31, 5], counts=[2, 1], norm=True,
          turned=64, ring=24),
    _case("turned_24_of_80", tokens=3, heads=4, kv_heads=4, dim=80, bits=(3, 4), positions=[7, 0], counts=[3, 2],
          turned=24),
    _case("gemma4_512", tokens=2, heads=8, kv_heads=2, dim=512, bits=(4, 4), positions=[7, 30], counts=[2, 1],
          norm=True, ring=24),
    _case("chunk_ring", tokens=24, heads=4, kv_heads=2, dim=64, bits=(4, 4), positions=[8, 3], counts=[21, 9], ring=16,
          exact=True),
)  # fmt: skip


def _fake(call: TurboQuantWrite) -> tuple[Tensor, Tensor]:
    (batch, length, _), dim, kv_heads = call.qkv.shape, call.turn.shape[0], call.cache.shape[1]
    kept = (batch if call.exact else 0, length, 2, kv_heads, dim)
    return call.qkv.new_empty((batch, length, call.heads, dim)), call.qkv.new_empty(kept)


turboquant_write = register(
    Op(
        name="turboquant_write",
        call=TurboQuantWrite,
        schema="-> (Tensor, Tensor)",
        reference=_turboquant_write,
        fake=_fake,
        kernel="onegraph.ops.cuda.turboquant:turboquant_write",
        check=_check,
        cases=_CASES,
        # A code at a near-tie falls either way, and moves its coordinate by a whole step.
        tolerance={torch.float32: 5e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2},
        bytes_moved=lambda call: 3 * nbytes(call.qkv) + nbytes(call.turn),
        flops=lambda call: 2 * call.qkv.numel() * call.turn.shape[0],
    )
)
"""qkv [B, Q, (heads + 2 kv_heads) D] -> (q [B, Q, heads, D], kv [B, Q, 2, kv_heads, D] or, without `exact`, empty).

As `rope_cache_write`: per head an optional RMSNorm of q and k (weights of qkv's dtype or float32), rotate-half RoPE of
all of a head or its first coordinates, result rounded to qkv's dtype; tokens
at positions[b] + i of which counts[b] are real; page 0 and the q of other tokens are anyone's. Then every vector is
turned, x @ turn / sqrt(D) with `turn` [D, D] the transpose of `formats.turboquant.rotation` in qkv's dtype, and so they
come back: q, and with `exact` keys and values too. Keys and values of real tokens go into `cache` uint8 [pages,
kv_heads, page_bytes], laid out as `TurboQuantLayout(D, k_bits, v_bits)` says, quantized by `quantize` with the
codebooks [2^k_bits] and [2^v_bits]; `kind` is what norm is stored. `ring` [rings, size, 2, kv_heads, D] takes the
exact vectors of the token at position p in ring slots[b] at p % size; ring 0 belongs to no sequence."""
