"""Writing tokens into a TurboQuant KV cache: norm, RoPE, rotation, quantization, packing and scatter in one launch.

What a code means stands in `onegraph.formats.turboquant`, where its bits stand in `onegraph.formats.turboquant_layout`.
Everything behind this op lives in rotated coordinates: the query and the exact keys and values that it returns are
rotated as well, so that codes and exact vectors attend together and one product at the end turns the result back.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant import SCALES, mean_abs_coordinate
from onegraph.formats.turboquant_layout import Coded, TurboQuantLayout, layout_of, pack_tokens
from onegraph.ops.attention import _head_norm, _rope
from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register

LARGEST_NORM = 65504.0  # float16


def quantize(y: Tensor, codebook: Tensor, projection: Tensor | None = None, scale: str = "norm") -> Coded:
    """Rotated vectors [..., d] -> codes, of `codebook` (float32, in the layout's order); `projection` [d, d] asks for
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


def _turboquant_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    turn: Tensor,
    projection: Tensor | None,
    k_codebook: Tensor,
    v_codebook: Tensor,
    cache: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    heads: int,
    k_bits: int,
    v_bits: int,
    k_variant: str,
    v_variant: str,
    scale: str,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    batch, length, _ = qkv.shape
    _, kv_heads, page_bytes = cache.shape
    dim = turn.shape[0]
    layout = layout_of(dim, k_bits, v_bits, k_variant, v_variant, page_bytes)
    vectors = qkv.view(batch, length, -1, dim).float()
    turned, values = vectors.split((heads + kv_heads, kv_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        q, k = turned.split((heads, kv_heads), dim=2)
        turned = torch.cat((_head_norm(q, q_norm, eps), _head_norm(k, k_norm, eps)), dim=2)
    step = torch.arange(length, dtype=torch.int32, device=qkv.device)
    token = positions.unsqueeze(1) + step
    if cos is not None and sin is not None:
        row, shape = token.flatten().clamp(0, cos.shape[0] - 1), (batch, length, 1, dim // 2)
        turned = _rope(turned, cos.index_select(0, row).view(shape), sin.index_select(0, row).view(shape))
    whole = torch.cat((turned.to(qkv.dtype).float(), values), dim=2)
    q, k, v = ((whole @ turn.float()) * dim**-0.5).split((heads, kv_heads, kv_heads), dim=2)

    keys = quantize(k, k_codebook, projection if k_variant == "prod" else None, scale)
    coded = quantize(v, v_codebook, projection if v_variant == "prod" else None, scale)
    rows = pack_tokens(layout, keys, coded)  # [B, Q, kv_heads, bytes]
    inside = token.clamp(0, block_table.shape[1] * layout.page_size - 1)
    real = (step < counts.unsqueeze(1)) & (inside == token)
    page = torch.where(real, block_table.gather(1, (inside // layout.page_size).long()), 0)
    head = torch.arange(kv_heads, device=qkv.device)
    start = (page.long().unsqueeze(2) * kv_heads + head) * page_bytes  # [B, Q, kv_heads]
    place = start.unsqueeze(3) + layout.offsets(inside.long() % layout.page_size).unsqueeze(2)
    cache.view(-1).index_copy_(0, place.flatten(), rows.flatten())

    kept = torch.stack((k, v), dim=2).to(qkv.dtype)  # [B, Q, 2, kv_heads, D]
    if ring is not None and slots is not None:
        size = ring.shape[1]
        latest = real & (step >= counts.unsqueeze(1) - size)  # of a long chunk no two tokens share a place
        slot = torch.where(latest, slots.unsqueeze(1), 0) * size + inside % size
        ring.view(-1, *ring.shape[2:]).index_copy_(0, slot.flatten().long(), kept.flatten(0, 1))
    return q.to(qkv.dtype).contiguous(), kept if exact else kept[:0].clone()


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
    turn: Tensor,
    projection: Tensor | None,
    k_codebook: Tensor,
    v_codebook: Tensor,
    cache: Tensor,
    ring: Tensor | None,
    slots: Tensor | None,
    heads: int,
    k_bits: int,
    v_bits: int,
    k_variant: str,
    v_variant: str,
    scale: str,
    exact: bool,
) -> None:
    op = "turboquant_write"
    if qkv.dim() != 3 or qkv.dtype not in FLOATS or not qkv.is_contiguous():
        raise ValueError(
            f"{op}: qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be contiguous float32, bfloat16 or float16 "
            "[batch, tokens, (heads + 2 kv_heads) * head_dim]"
        )
    batch = qkv.shape[0]
    if turn.dim() != 2 or turn.shape[0] != turn.shape[1]:
        raise ValueError(f"{op}: turn is {tuple(turn.shape)}; it must be [head_dim, head_dim]")
    dim = turn.shape[0]
    if cache.dim() != 3 or cache.dtype != torch.uint8 or not cache.is_contiguous():
        raise ValueError(
            f"{op}: cache is {tuple(cache.shape)} {cache.dtype}; it must be contiguous uint8 [pages, kv_heads, bytes]"
        )
    kv_heads, page_bytes = cache.shape[1:]
    layout = layout_of(dim, k_bits, v_bits, k_variant, v_variant, page_bytes)
    if layout.page_bytes != page_bytes:
        raise ValueError(
            f"{op}: a page of the cache has {page_bytes} bytes a head; with {layout.bytes_per_token_head} a token it "
            f"must be a multiple of {layout.block_bytes}"
        )
    if heads < 1 or heads % kv_heads or qkv.shape[2] != (heads + 2 * kv_heads) * dim:
        raise ValueError(
            f"{op}: qkv holds {qkv.shape[2]} numbers a token; with {heads} heads, {kv_heads} kv heads of {dim} it must "
            f"hold {(heads + 2 * kv_heads) * dim}, and heads must be a multiple of kv heads"
        )
    if scale not in SCALES:
        raise ValueError(f"{op}: scale is {scale!r}; allowed are {', '.join(SCALES)}")
    if (q_norm is None) != (k_norm is None) or (cos is None) != (sin is None) or (ring is None) != (slots is None):
        raise ValueError(f"{op}: q_norm and k_norm, cos and sin, ring and slots go together: give both or neither")
    if projection is None and "prod" in (k_variant, v_variant):
        raise ValueError(f"{op}: the variant prod needs a projection [{dim}, {dim}]")
    if cos is not None and sin is not None and cos.shape != sin.shape:
        raise ValueError(f"{op}: cos has {cos.shape[0]} positions, sin {sin.shape[0]}; they must agree")
    wanted: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
        ("q_norm", q_norm, qkv.dtype, (dim,)),
        ("k_norm", k_norm, qkv.dtype, (dim,)),
        ("cos", cos, torch.float32, (-1, dim // 2)),
        ("sin", sin, torch.float32, (-1, dim // 2)),
        ("positions", positions, torch.int32, (batch,)),
        ("counts", counts, torch.int32, (batch,)),
        ("block_table", block_table, torch.int32, (batch, -1)),
        ("turn", turn, qkv.dtype, (dim, dim)),
        ("projection", projection, qkv.dtype, (dim, dim)),
        ("k_codebook", k_codebook, torch.float32, (1 << layout.k_code_bits,)),
        ("v_codebook", v_codebook, torch.float32, (1 << layout.v_code_bits,)),
        ("cache", cache, torch.uint8, tuple(cache.shape)),
        ("ring", ring, qkv.dtype, (-1, -1, 2, kv_heads, dim)),
        ("slots", slots, torch.int32, (batch,)),
    ]
    for name, tensor, dtype, shape in wanted:
        if tensor is not None:
            _check_tensor(op, name, tensor, dtype, shape, qkv.device)


def _check_tensor(
    op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """-1 in `shape` allows any size. The rows of a block table may be apart; everything else is contiguous."""
    fits = len(shape) == tensor.dim() and all(s in (-1, n) for s, n in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype != dtype:
        sizes = ", ".join("any" if s < 0 else str(s) for s in shape)
        raise ValueError(f"{op}: {name} is {tuple(tensor.shape)} {tensor.dtype}; it must be {dtype} [{sizes}]")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, the input on {device}; move them to one device")
    dense = tensor.stride(1) == 1 if name == "block_table" else tensor.is_contiguous()
    if not dense:
        raise ValueError(f"{op}: {name} has strides {tensor.stride()}; its rows must be contiguous")


def _case(
    name: str,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    bits: tuple[int, int],
    positions: list[int],
    counts: list[int],
    page_size: int = 16,
    variants: tuple[str, str] = ("mse", "mse"),
    scale: str = "matched",
    norm: bool = False,
    rope: bool = True,
    ring: int = 0,
    exact: bool = False,
    kind: str = "hadamard",
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        batch, reach = len(positions), max(positions) + tokens
        per_row = -(-reach // page_size)
        table = 1 + torch.randperm(batch * per_row, generator=generator, dtype=torch.int32).view(batch, per_row)
        angle = torch.arange(reach).unsqueeze(1) * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        layout = TurboQuantLayout(dim, *bits, *variants, page_size)
        return (
            randn(batch, tokens, (heads + 2 * kv_heads) * dim),
            1 + 0.2 * randn(dim) if norm else None,
            1 + 0.2 * randn(dim) if norm else None,
            1e-6,
            angle.cos().to(device) if rope else None,
            angle.sin().to(device) if rope else None,
            torch.tensor(positions, dtype=torch.int32, device=device),
            torch.tensor(counts, dtype=torch.int32, device=device),
            table.to(device),
            formats.rotation(dim, kind).T.contiguous().to(device, dtype),
            formats.projection(dim).to(device, dtype) if "prod" in variants else None,
            formats.codebook(dim, layout.k_code_bits, device),
            formats.codebook(dim, layout.v_code_bits, device),
            torch.zeros(layout.cache_shape(1 + batch * per_row, kv_heads), dtype=torch.uint8, device=device),
            torch.zeros(batch + 1, ring, 2, kv_heads, dim, dtype=dtype, device=device) if ring else None,
            torch.arange(batch, 0, -1, dtype=torch.int32, device=device) if ring else None,
            heads, *bits, *variants, scale, exact,
        )  # fmt: skip

    return Case(name=name, make=make)


_CASES = (
    _case("smollm2_4", tokens=1, heads=9, kv_heads=3, dim=64, bits=(4, 4), positions=[0, 15, 16, 70],
          counts=[1, 1, 0, 1]),
    _case("k3v4_ring", tokens=4, heads=9, kv_heads=3, dim=64, bits=(3, 4), positions=[0, 30], counts=[4, 3], ring=24),
    _case("llama_k4v3", tokens=1, heads=8, kv_heads=2, dim=128, bits=(4, 3), positions=[37, 4], counts=[1, 1],
          page_size=32, scale="norm"),
    _case("qwen3_2", tokens=3, heads=4, kv_heads=1, dim=128, bits=(2, 2), positions=[31, 5], counts=[3, 2], norm=True,
          scale="unbiased", exact=True),
    _case("prod_80", tokens=2, heads=4, kv_heads=4, dim=80, bits=(4, 3), positions=[7, 3], counts=[2, 1],
          variants=("prod", "prod"), rope=False),
    _case("prod_keys_1", tokens=2, heads=2, kv_heads=1, dim=64, bits=(1, 1), positions=[7], counts=[2],
          variants=("prod", "mse")),
    _case("qr_96", tokens=5, heads=6, kv_heads=1, dim=96, bits=(2, 3), positions=[2], counts=[4], kind="qr"),
    _case("dim_192", tokens=1, heads=2, kv_heads=2, dim=192, bits=(4, 4), positions=[3], counts=[1]),
    _case("mqa_256", tokens=1, heads=16, kv_heads=1, dim=256, bits=(2, 4), positions=[40], counts=[1], exact=True),
    _case("chunk_ring", tokens=24, heads=4, kv_heads=2, dim=64, bits=(4, 4), positions=[8, 3], counts=[21, 9], ring=16,
          exact=True),
)  # fmt: skip


def _fake(qkv: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    turn, cache, heads, exact = args[8], args[12], args[15], args[21]
    batch, length, dim = qkv.shape[0], qkv.shape[1], turn.shape[0]
    kept = (batch if exact else 0, length, 2, cache.shape[1], dim)
    return qkv.new_empty((batch, length, heads, dim)), qkv.new_empty(kept)


turboquant_write = register(
    Op(
        name="turboquant_write",
        schema=(
            "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? cos, Tensor? sin, Tensor positions, "
            "Tensor counts, Tensor block_table, Tensor turn, "
            "Tensor? projection, Tensor k_codebook, Tensor v_codebook, Tensor(a!) cache, Tensor(b!)? ring, "
            "Tensor? slots, int heads, int k_bits, int v_bits, str k_variant, str v_variant, str scale, bool exact) "
            "-> (Tensor, Tensor)"
        ),
        reference=_turboquant_write,
        fake=_fake,
        kernel="onegraph.ops.cuda.turboquant:turboquant_write",
        check=_check,
        cases=_CASES,
        # A code at a near-tie falls either way, and moves its coordinate by a whole step.
        tolerance={torch.float32: 5e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2},
        bytes_moved=lambda qkv, *rest: 3 * nbytes(qkv) + nbytes(rest[8]),
        flops=lambda qkv, *rest: 2 * qkv.numel() * rest[8].shape[0],
    )
)
"""qkv [B, Q, (heads + 2 kv_heads) D] -> (q [B, Q, heads, D], kv [B, Q, 2, kv_heads, D] or, without `exact`, empty).

As `rope_cache_write`: per head an optional RMSNorm of q and k, rotate-half RoPE, result rounded to qkv's dtype; tokens
at positions[b] + i of which counts[b] are real; page 0 and the q of other tokens are anyone's. Then every vector is
turned, x @ turn / sqrt(D) with `turn` [D, D] the transpose of `formats.turboquant.rotation` in qkv's dtype, and so they
come back: q, and with `exact` keys and values too. Keys and values of real tokens go into `cache` uint8 [pages,
kv_heads, page_bytes] as `TurboQuantLayout(D, k_bits, v_bits, k_variant, v_variant)` says, quantized by `quantize` with
the codebooks of the code bits; `projection` [D, D] is needed for `prod`. `ring` [rings, size, 2, kv_heads, D] takes the
exact vectors of the token at position p in ring slots[b] at p % size; ring 0 belongs to no sequence."""
