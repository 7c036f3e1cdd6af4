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
from onegraph.formats.turboquant_layout import Coded, TurboQuantLayout, pack_pages, unpack_pages
from onegraph.ops.calls import TurboQuantAttention
from onegraph.ops.cases import Draw
from onegraph.ops.checks import check_grouped, check_query, check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.turboquant import dequantize, layout_in


def eight_bit_levels(codebook: Tensor) -> Tensor:
    """A symmetric codebook with its levels rounded to odd multiples of the largest / 255."""
    largest = codebook.abs().max()
    if codebook.numel() == 1:
        return codebook
    magnitude = ((codebook.abs() / largest) * 127.5 - 0.5).round() * 2 + 1
    return magnitude * codebook.sign() * (largest / 255)


def attend_unfused(
    call: TurboQuantAttention, layout: TurboQuantLayout, projection: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`turboquant_attention` in torch's own ops, to a cache of any `layout`; variant `prod` needs its `projection`."""
    q, (batch, length, heads, dim), kv_heads = call.q, call.q.shape, call.cache.shape[1]
    group, capacity = heads // kv_heads, call.block_table.shape[1] * layout.page_size
    held = call.cache.index_select(0, call.block_table.flatten())
    keys, values = (
        dequantize(coded, eight_bit_levels(book), projection)
        .view(batch, -1, kv_heads, layout.page_size, dim).transpose(1, 2).reshape(batch, kv_heads, capacity, dim)
        for coded, book in zip(unpack_pages(layout, held), (call.k_codebook, call.v_codebook), strict=True)
    )  # fmt: skip

    key = torch.arange(capacity, dtype=torch.int32, device=q.device)
    step = torch.arange(length, dtype=torch.int32, device=q.device)
    token = (call.positions.unsqueeze(1) + step).clamp(max=capacity - 1).unsqueeze(2)
    hidden = (key > token) | (step >= call.counts.unsqueeze(1)).unsqueeze(2)  # [B, Q, L]
    if call.ends is not None:
        hidden = hidden | (key >= call.ends.view(batch, 1, 1))
    if call.window > 0:
        hidden = hidden | (key <= token - call.window)
    # A page may still hold what an earlier sequence left: 0 * NaN would carry it into the sum.
    unseen = hidden.all(1).view(batch, 1, capacity, 1)
    keys, values = keys.masked_fill(unseen, 0.0), values.masked_fill(unseen, 0.0)

    grouped = (q.float() * call.scale).view(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(batch, kv_heads, group * length, dim) @ keys.transpose(2, 3)
    scores = scores.view(batch, kv_heads, group, length, capacity)
    scores = scores.masked_fill(hidden.view(batch, 1, 1, length, capacity), float("-inf"))
    lse = scores.logsumexp(-1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.float().view(1, kv_heads, group, 1))
    weight = (scores - lse.clamp_min(-1e30).unsqueeze(-1)).exp()
    out = weight.view(batch, kv_heads, group * length, capacity) @ values
    out = out.view(batch, heads, length, dim).transpose(1, 2)
    if call.rotation is not None:
        out = (out @ call.rotation.float()) * dim**-0.5
    lse = lse.view(batch, heads, length).transpose(1, 2).contiguous()
    return out.to(q.dtype, memory_format=torch.contiguous_format, copy=True), lse


def _turboquant_attention(call: TurboQuantAttention) -> tuple[Tensor, Tensor]:
    return attend_unfused(call, layout_in("turboquant_attention", call, call.q.shape[3]), None)


def _on_gpu(call: TurboQuantAttention) -> tuple[Tensor, Tensor]:
    """The CUDA kernel; GPUs that it cannot be built for take the reference."""
    from onegraph.ops.cuda import turboquant_attention as kernel

    if not kernel.supports_input(call.q):
        return _turboquant_attention(call)
    page_size = layout_in("turboquant_attention", call, call.q.shape[3]).page_size
    *tensors, scale, window = call
    args: tuple[Any, ...] = (*tensors, page_size, scale, window)
    return kernel.attend(*args)


def _check(call: TurboQuantAttention) -> None:
    op, q, cache = "turboquant_attention", call.q, call.cache
    check_query(op, q)
    rows, _, heads, dim = q.shape
    layout = layout_in(op, call, dim)
    check_grouped(op, heads, cache.shape[1])
    if call.window < 0:
        raise ValueError(
            f"{op}: window is {call.window}; it must be 0 (no window) or the number of keys that a query sees"
        )
    check_tensors(
        op, q.device,
        block_table=(call.block_table, torch.int32, (rows, -1)),
        positions=(call.positions, torch.int32, (rows,)),
        counts=(call.counts, torch.int32, (rows,)),
        ends=(call.ends, torch.int32, (rows,)),
        rotation=(call.rotation, q.dtype, (dim, dim)),
        k_codebook=(call.k_codebook, torch.float32, (1 << layout.k_bits,)),
        v_codebook=(call.v_codebook, torch.float32, (1 << layout.v_bits,)),
        sinks=(call.sinks, torch.float32, (heads,)),
        cache=(cache, torch.uint8, tuple(cache.shape)),
    )  # fmt: skip


def case(
    name: str, *, heads: int, kv_heads: int, dim: int, bits: tuple[int, int], positions: list[int], counts: list[int],
    tokens: int = 1, page_size: int = 16, window: int = 0, ends: list[int] | None = None, sinks: bool = False,
    rotate: bool = True, peak: float = 1.0,
) -> Case:  # fmt: skip
    """Random queries and codes in shuffled pages, with a sentinel that must not be read."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, rows = Draw(device, dtype, generator), len(positions)
        layout = TurboQuantLayout(dim, *bits, page_size=page_size)
        table = draw.pages(rows, -(-(max(positions) + tokens) // page_size) + 1)
        shape = (1 + table.numel(), kv_heads, page_size)

        def coded(code_bits: int) -> Coded:
            codes = torch.randint(0, 1 << code_bits, (*shape, dim), generator=generator, dtype=torch.uint8)
            return Coded(codes, (dim**0.5 * (0.5 + torch.rand(shape, generator=generator))).half())

        pages = pack_pages(layout, coded(bits[0]), coded(bits[1]))
        pages[0] = 255  # the sentinel: norms are NaN
        return (
            peak * draw.randn(rows, tokens, heads, dim), pages.to(device), table, draw.ints(positions),
            draw.ints(counts), None if ends is None else draw.ints(ends),
            formats.rotation(dim, "qr").to(device, dtype) if rotate else None,
            *(formats.codebook(dim, b, device) for b in bits),
            torch.randn(heads, generator=generator).to(device) if sinks else None, dim**-0.5, window,
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
    case("gqa_512", bits=(4, 4), heads=8, kv_heads=1, dim=512, positions=[333, 7], counts=[1, 1]),
    case("mqa_256", bits=(3, 4), heads=16, kv_heads=1, dim=256, positions=[333, 64], counts=[1, 1], page_size=32),
)  # fmt: skip


def _tokens_read(call: TurboQuantAttention) -> int:
    """Tokens whose codes must be read once; it looks at the positions, so never inside a step."""
    positions, counts, ends, window = call.positions.long(), call.counts.long(), call.ends, call.window
    stop = (positions + counts).clamp_min(0)
    if ends is not None:
        stop = torch.minimum(stop, ends.long())
    first = (positions - window + 1).clamp_min(0) if window else positions * 0
    return int(((stop - first).clamp_min(0) * (counts > 0)).sum()) if call.q.numel() else 0


def _bytes(call: TurboQuantAttention) -> int:
    """Queries and results, codes and norms of every token once."""
    codes = _tokens_read(call) * call.cache.shape[1] * layout_in("", call, call.q.shape[3]).bytes_per_token_head
    return 2 * nbytes(call.q) + 4 * call.q[..., 0].numel() + codes


turboquant_attention = register(
    Op(
        name="turboquant_attention",
        call=TurboQuantAttention,
        schema="-> (Tensor, Tensor)",
        reference=_turboquant_attention,
        fake=lambda call: (call.q.new_empty(call.q.shape), call.q.new_empty(call.q.shape[:3], dtype=torch.float32)),
        kernel="onegraph.ops.turboquant_attention:_on_gpu",
        check=_check,
        cases=_CASES,
        # The kernel multiplies values by probabilities in float16, whatever q is.
        tolerance={torch.float32: 1e-3, torch.bfloat16: 8e-3, torch.float16: 2e-3},
        bytes_moved=_bytes,
        flops=lambda call: 4 * call.q[0].numel() * _tokens_read(call),
    )
)
"""q [B, Q, H, D], rotated -> (out [B, Q, H, D] in q's dtype, log-sum-exp float32 [B, Q, H], -inf where no key is seen).

cache uint8 [pages, kv_heads, page_bytes] as `TurboQuantLayout(D, k_bits, v_bits)` says, the codebooks [2^k_bits] and
[2^v_bits]; H is a multiple of kv_heads. Token i of row b stands at positions[b] + i and sees the keys up to itself
(none where that is negative) that lie before ends[b] (None: no such end), with window > 0 only the latest `window`; the
tokens from counts[b] on see nothing and get zeros.
`ends` is for tokens that are attended to elsewhere, exactly: the two results are merged by their log-sum-exp.
`rotation` [D, D] (`formats.turboquant.rotation`, in q's dtype) turns the result back; without it, it stays rotated.
`sinks` [H], float32, are logits that join the denominator (and the log-sum-exp) alone."""
