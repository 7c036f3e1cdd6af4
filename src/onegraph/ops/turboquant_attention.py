"""Attention straight from a TurboQuant KV cache: queries of one step against packed codes.

The query comes rotated, so that keys are never rotated back: a score is norm * (query . level of each code), the
result a sum of levels weighted by probability * norm, and one product with `rotation` turns it back. Levels are rounded
to 8 bits, odd multiples of the largest / 255: that is what tensor cores multiply, and it adds 0.4 per cent to the
distortion at 4 bits, less below.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant_layout import Coded, TurboQuantLayout, layout_of, pack_pages, unpack_pages
from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.turboquant import dequantize


def eight_bit_levels(codebook: Tensor) -> Tensor:
    """A symmetric codebook with its levels rounded to odd multiples of the largest / 255."""
    largest = codebook.abs().max()
    if codebook.numel() == 1:
        return codebook
    magnitude = ((codebook.abs() / largest) * 127.5 - 0.5).round() * 2 + 1
    return magnitude * codebook.sign() * (largest / 255)


def _turboquant_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    counts: Tensor,
    ends: Tensor | None,
    rotation: Tensor | None,
    projection: Tensor | None,
    k_codebook: Tensor,
    v_codebook: Tensor,
    sinks: Tensor | None,
    k_bits: int,
    v_bits: int,
    k_variant: str,
    v_variant: str,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, dim = q.shape
    kv_heads = cache.shape[1]
    layout = layout_of(dim, k_bits, v_bits, k_variant, v_variant, cache.shape[2])
    group, capacity = heads // kv_heads, block_table.shape[1] * layout.page_size
    held = cache.index_select(0, block_table.flatten())
    coded_keys, coded_values = unpack_pages(layout, held)  # of [B * P, kv_heads, page_size] tokens
    keys = dequantize(coded_keys, eight_bit_levels(k_codebook), projection)
    values = dequantize(coded_values, eight_bit_levels(v_codebook), projection)
    keys, values = (
        t.view(batch, -1, kv_heads, layout.page_size, dim).transpose(1, 2).reshape(batch, kv_heads, capacity, dim)
        for t in (keys, values)
    )

    key = torch.arange(capacity, dtype=torch.int32, device=q.device)
    step = torch.arange(length, dtype=torch.int32, device=q.device)
    token = (positions.unsqueeze(1) + step).clamp(max=capacity - 1).unsqueeze(2)
    hidden = (key > token) | (step >= counts.unsqueeze(1)).unsqueeze(2)  # [B, Q, L]
    if ends is not None:
        hidden = hidden | (key >= ends.view(batch, 1, 1))
    if window > 0:
        hidden = hidden | (key <= token - window)
    # A page may still hold what an earlier sequence left: 0 * NaN would carry it into the sum.
    unseen = hidden.all(1).view(batch, 1, capacity, 1)
    keys, values = keys.masked_fill(unseen, 0.0), values.masked_fill(unseen, 0.0)

    grouped = (q.float() * scale).view(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(batch, kv_heads, group * length, dim) @ keys.transpose(2, 3)
    scores = scores.view(batch, kv_heads, group, length, capacity)
    scores = scores.masked_fill(hidden.view(batch, 1, 1, length, capacity), float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, kv_heads, group, 1))
    weight = (scores - lse.clamp_min(-1e30).unsqueeze(-1)).exp()
    out = weight.view(batch, kv_heads, group * length, capacity) @ values
    out = out.view(batch, heads, length, dim).transpose(1, 2)
    if rotation is not None:
        out = (out @ rotation.float()) * dim**-0.5
    lse = lse.view(batch, heads, length).transpose(1, 2).contiguous()
    return out.to(q.dtype, memory_format=torch.contiguous_format, copy=True), lse


def _on_gpu(*args: Any) -> tuple[Tensor, Tensor]:
    """The CUDA kernel for `mse`; `prod`, and GPUs that the kernel cannot be built for, take the reference."""
    from onegraph.ops.cuda import turboquant_attention as kernel

    q, cache, k_bits, v_bits, k_variant, v_variant, scale, window = *args[:2], *args[11:]
    if (k_variant, v_variant) != ("mse", "mse") or not kernel.takes(q):
        return _turboquant_attention(*args)
    layout = layout_of(q.shape[3], k_bits, v_bits, k_variant, v_variant, cache.shape[2])
    table, positions, counts, ends, rotation, _, k_codebook, v_codebook, sinks = args[2:11]
    state = table, positions, counts, ends, rotation
    return kernel.attend(q, cache, *state, k_codebook, v_codebook, sinks, layout.page_size, scale, window)


def _check(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    counts: Tensor,
    ends: Tensor | None,
    rotation: Tensor | None,
    projection: Tensor | None,
    k_codebook: Tensor,
    v_codebook: Tensor,
    sinks: Tensor | None,
    k_bits: int,
    v_bits: int,
    k_variant: str,
    v_variant: str,
    scale: float,
    window: int,
) -> None:
    op = "turboquant_attention"
    if q.dim() != 4 or q.dtype not in FLOATS or not q.is_contiguous():
        raise ValueError(
            f"{op}: q is {tuple(q.shape)} {q.dtype}; it must be contiguous float32, bfloat16 or float16 "
            "[batch, tokens, heads, head_dim]"
        )
    if cache.dim() != 3 or cache.dtype != torch.uint8 or not cache.is_contiguous():
        raise ValueError(
            f"{op}: cache is {tuple(cache.shape)} {cache.dtype}; it must be contiguous uint8 [pages, kv_heads, bytes]"
        )
    batch, _, heads, dim = q.shape
    kv_heads, page_bytes = cache.shape[1:]
    layout = TurboQuantLayout(dim, k_bits, v_bits, k_variant, v_variant)  # of a page with one block
    if page_bytes == 0 or page_bytes % layout.block_bytes:
        raise ValueError(
            f"{op}: a page of the cache has {page_bytes} bytes a head; with {layout.bytes_per_token_head} bytes a token"
            f" it must be a multiple of {layout.block_bytes}"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: q has {heads} heads, the cache {kv_heads}; heads must be a multiple of kv heads")
    if window < 0:
        raise ValueError(f"{op}: window is {window}; it must be 0 (no window) or the number of keys that a query sees")
    if projection is None and "prod" in (k_variant, v_variant):
        raise ValueError(f"{op}: the variant prod needs a projection [{dim}, {dim}]")
    if block_table.dim() == 2 and block_table.stride(1) != 1:
        raise ValueError(f"{op}: rows of block_table must be contiguous (rows may be apart)")
    wanted: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
        ("block_table", block_table, torch.int32, (batch, -1)),
        ("positions", positions, torch.int32, (batch,)),
        ("counts", counts, torch.int32, (batch,)),
        ("ends", ends, torch.int32, (batch,)),
        ("rotation", rotation, q.dtype, (dim, dim)),
        ("projection", projection, q.dtype, (dim, dim)),
        ("k_codebook", k_codebook, torch.float32, (1 << layout.k_code_bits,)),
        ("v_codebook", v_codebook, torch.float32, (1 << layout.v_code_bits,)),
        ("sinks", sinks, torch.float32, (heads,)),
        ("cache", cache, torch.uint8, tuple(cache.shape)),
    ]
    for name, tensor, dtype, shape in wanted:
        if tensor is None:
            continue
        fits = len(shape) == tensor.dim() and all(s in (-1, n) for s, n in zip(shape, tensor.shape, strict=True))
        if not fits or tensor.dtype != dtype:
            sizes = ", ".join("any" if s < 0 else str(s) for s in shape)
            raise ValueError(f"{op}: {name} is {tuple(tensor.shape)} {tensor.dtype}; it must be {dtype} [{sizes}]")
        if tensor.device != q.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, q on {q.device}; move them to one device")
        if name != "block_table" and not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}; it must be contiguous")


def case(
    name: str,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    bits: tuple[int, int],
    positions: list[int],
    counts: list[int],
    tokens: int = 1,
    page_size: int = 16,
    variants: tuple[str, str] = ("mse", "mse"),
    window: int = 0,
    ends: list[int] | None = None,
    sinks: bool = False,
    rotate: bool = True,
    peak: float = 1.0,
) -> Case:
    """Random queries and codes in shuffled pages, with a sentinel that must not be read."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        batch = len(positions)
        layout = TurboQuantLayout(dim, *bits, *variants, page_size)
        per_row = -(-(max(positions) + tokens) // page_size) + 1
        table = 1 + torch.randperm(batch * per_row, generator=generator, dtype=torch.int32).view(batch, per_row)
        shape = (1 + batch * per_row, kv_heads, page_size)

        def coded(code_bits: int, variant: str) -> Coded:
            codes = torch.randint(0, 1 << code_bits, (*shape, dim), generator=generator, dtype=torch.uint8)
            norms = (dim**0.5 * (0.5 + torch.rand(shape, generator=generator))).half()
            if variant == "mse":
                return Coded(codes, norms)
            signs = torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8)
            return Coded(codes, norms, signs, norms * 0.02)

        pages = pack_pages(layout, coded(layout.k_code_bits, variants[0]), coded(layout.v_code_bits, variants[1]))
        pages[0] = 255  # the sentinel: norms are NaN
        return (
            (peak * randn(batch, tokens, heads, dim)).to(device, dtype),
            pages.to(device),
            table.to(device),
            ints(positions),
            ints(counts),
            None if ends is None else ints(ends),
            formats.rotation(dim, "qr").to(device, dtype) if rotate else None,
            formats.projection(dim).to(device, dtype) if "prod" in variants else None,
            formats.codebook(dim, layout.k_code_bits, device),
            formats.codebook(dim, layout.v_code_bits, device),
            randn(heads).to(device) if sinks else None,
            *bits, *variants, dim**-0.5, window,
        )  # fmt: skip

    return Case(name=name, make=make)


_SMOL: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64}
_LLAMA: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 128}
_CASES = (
    case("smollm2_4", bits=(4, 4), positions=[0, 15, 16, 300], counts=[1, 1, 0, 1], **_SMOL),
    case("smollm2_k3v4", bits=(3, 4), positions=[137], counts=[1], **_SMOL),
    case("llama_4", bits=(4, 4), positions=[4000, 17, 31, 32], counts=[1, 1, 1, 1], page_size=64, peak=3.0, **_LLAMA),
    case("llama_3", bits=(3, 3), positions=[200, 77], counts=[1, 1], page_size=32, **_LLAMA),
    case("llama_2", bits=(2, 2), positions=[200, 5], counts=[1, 1], **_LLAMA),
    case("llama_1", bits=(1, 1), positions=[99, 33], counts=[1, 1], **_LLAMA),
    case("llama_k4v2_drafts", bits=(4, 2), tokens=4, positions=[700, 0, 30], counts=[4, 3, 2], page_size=32, **_LLAMA),
    case("drafts_8", bits=(3, 4), tokens=8, positions=[130, 60], counts=[8, 5], page_size=32, **_LLAMA),
    case("window_sinks", bits=(4, 3), tokens=2, positions=[500, 20], counts=[2, 2], window=70, sinks=True, **_LLAMA),
    case("history", bits=(4, 4), tokens=5, positions=[500, 40, 9], counts=[5, 1, 2], ends=[437, 30, 0], sinks=True,
          rotate=False, **_LLAMA),
    case("before_the_first", bits=(4, 4), tokens=3, positions=[-2, -50, 40], counts=[3, 3, 2], **_LLAMA),
    case("chunk", bits=(4, 4), tokens=20, positions=[100, 3], counts=[20, 7], ends=[100, 3], **_LLAMA),
    case("mha_80", bits=(4, 4), heads=4, kv_heads=4, dim=80, positions=[70, 130], counts=[1, 1]),
    case("mha_80_k3v1", bits=(3, 1), heads=4, kv_heads=4, dim=80, positions=[70], counts=[1]),
    case("mha_80_k1v3", bits=(1, 3), heads=2, kv_heads=2, dim=80, positions=[70], counts=[1]),
    case("gqa_96", bits=(2, 3), heads=6, kv_heads=1, dim=96, tokens=3, positions=[61], counts=[3]),
    case("gqa_96_k4v2", bits=(4, 2), heads=6, kv_heads=1, dim=96, positions=[61], counts=[1]),
    case("dim_192", bits=(4, 3), heads=4, kv_heads=2, dim=192, positions=[333], counts=[1], page_size=32),
    case("mqa_256", bits=(3, 4), heads=16, kv_heads=1, dim=256, positions=[333, 64], counts=[1, 1], page_size=32),
    case("prod", bits=(4, 3), positions=[99, 3], counts=[1, 1], variants=("prod", "prod"), **_LLAMA),
    case("prod_keys_1", bits=(1, 2), positions=[99], counts=[1], variants=("prod", "mse"), **_SMOL),
)  # fmt: skip


def _tokens_read(args: tuple[Any, ...]) -> int:
    """Tokens whose codes must be read once; it looks at the positions, so never inside a step."""
    q, positions, counts, ends, window = args[0], args[3].long(), args[4].long(), args[5], args[16]
    stop = (positions + counts).clamp_min(0)
    if ends is not None:
        stop = torch.minimum(stop, ends.long())
    first = (positions - window + 1).clamp_min(0) if window else positions * 0
    return int(((stop - first).clamp_min(0) * (counts > 0)).sum()) if q.numel() else 0


def _bytes(*args: Any) -> int:
    """Queries and results, codes and norms of every token once."""
    q, cache = args[0], args[1]
    layout = TurboQuantLayout(q.shape[3], *args[11:15])
    return 2 * nbytes(q) + 4 * q[..., 0].numel() + _tokens_read(args) * cache.shape[1] * layout.bytes_per_token_head


turboquant_attention = register(
    Op(
        name="turboquant_attention",
        schema=(
            "(Tensor q, Tensor cache, Tensor block_table, Tensor positions, Tensor counts, Tensor? ends, "
            "Tensor? rotation, Tensor? projection, Tensor k_codebook, Tensor v_codebook, Tensor? sinks, int k_bits, "
            "int v_bits, str k_variant, str v_variant, float scale, int window) -> (Tensor, Tensor)"
        ),
        reference=_turboquant_attention,
        fake=lambda q, *rest: (q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)),
        kernel="onegraph.ops.turboquant_attention:_on_gpu",
        check=_check,
        cases=_CASES,
        # The kernel multiplies values by probabilities in float16, whatever q is.
        tolerance={torch.float32: 1e-3, torch.bfloat16: 8e-3, torch.float16: 2e-3},
        bytes_moved=_bytes,
        flops=lambda *args: 4 * args[0].shape[1] * args[0].shape[2] * args[0].shape[3] * _tokens_read(args),
    )
)
"""q [B, Q, H, D], rotated -> (out [B, Q, H, D] in q's dtype, log-sum-exp float32 [B, Q, H], -inf where no key is seen).

cache uint8 [pages, kv_heads, page_bytes] as `TurboQuantLayout(D, k_bits, v_bits, k_variant, v_variant)` says; H is a
multiple of kv_heads. Token i of row b stands at positions[b] + i and sees the keys up to itself (none where that is
negative) that lie before ends[b] (None: no such end), with window > 0 only the latest `window`; the tokens from
counts[b] on see nothing and get zeros.
`ends` is for tokens that are attended to elsewhere, exactly: the two results are merged by their log-sum-exp.
`rotation` [D, D] (`formats.turboquant.rotation`, in q's dtype) turns the result back; without it, it stays rotated.
`sinks` [H], float32, are logits that join the denominator (and the log-sum-exp) alone. `projection` [D, D] is needed
for `prod`."""
