"""Attention from TurboQuant codes: what the op's record does not already test."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.formats import turboquant
from onegraph.formats.turboquant_layout import TurboQuantLayout, layout_of, unpack_pages
from onegraph.ops.calls import TurboQuantAttention, TurboQuantWrite
from onegraph.ops.cuda import turboquant_attention as kernel
from onegraph.ops.registry import OPS
from onegraph.ops.turboquant import dequantize, quantize, write_unfused
from onegraph.ops.turboquant_attention import attend_unfused, eight_bit_levels, turboquant_attention
from onegraph.ops.turboquant_hybrid import turboquant_hybrid

ARGUMENTS = [a.name for a in turboquant_attention.overload._schema.arguments]


def arguments(case: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    made = next(c for c in OPS["turboquant_attention"].cases if c.name == case)
    values = made.make(torch.device(device), dtype, torch.Generator().manual_seed(1))
    return dict(zip(ARGUMENTS, values, strict=True))


def attend(args: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = turboquant_attention(*(args | changes).values())
    return out


@pytest.mark.parametrize(("dim", "bits"), [(d, b) for d in turboquant.HEAD_DIMS for b in (1, 2, 3, 4)])
def test_levels_in_eight_bits_cost_next_to_nothing(dim: int, bits: int) -> None:
    levels = turboquant.codebook(dim, bits)
    rounded = eight_bit_levels(levels)
    units = rounded / levels.abs().max() * 255
    assert torch.allclose(units, units.round(), atol=1e-3)
    assert bool((units.round().int() % 2 != 0).all())
    assert torch.equal(rounded[::2], -rounded[1::2])
    # Levels are uniform enough over the codes that the mean square of the rounding bounds what it adds.
    distortion = (0.3634, 0.1175, 0.03455, 0.0095)[bits - 1]
    assert dim * (rounded - levels).square().mean() < 0.006 * distortion


def test_one_row_by_hand() -> None:
    """Score by score from the unpacked codes, without any of the op's own steps."""
    args = arguments("llama_3")
    out, lse = attend(args, rotation=None)
    q, cache, table = args["q"], args["cache"], args["block_table"]
    layout = layout_of(128, 8, 8, cache.shape[2])
    keys, values = unpack_pages(layout, cache)
    row, head, position = 1, 5, int(args["positions"][1])
    k_levels, v_levels = eight_bit_levels(args["k_codebook"]), eight_bit_levels(args["v_codebook"])
    scores, vectors = [], []
    for token in range(position + 1):
        at = int(table[row, token // layout.page_size]), head // 4, token % layout.page_size
        k = k_levels[keys.codes[at].long()] * keys.norms[at].float()
        vectors.append(v_levels[values.codes[at].long()] * values.norms[at].float())
        scores.append(128**-0.5 * q[row, 0, head] @ k)
    weights = torch.stack(scores).softmax(0)
    torch.testing.assert_close(out[row, 0, head], weights @ torch.stack(vectors), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[row, 0, head], torch.stack(scores).logsumexp(0), rtol=1e-5, atol=1e-5)


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """By log-sum-exp, as a caller with exact recent tokens does."""
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum((out * (lse - total).exp().unsqueeze(-1) for out, lse in parts), torch.zeros(()))


def test_history_and_the_rest_merge_to_the_whole() -> None:
    """`ends` splits the keys; a window that begins there sees the rest."""
    args = arguments("llama_4")
    whole, _ = attend(args)
    window = 9
    ends = (args["positions"] + 1 - window).clamp_min(0)
    parts = [attend(args, ends=ends.int()), attend(args, window=window)]
    torch.testing.assert_close(merge(parts), whole, rtol=1e-4, atol=1e-5)


def test_sinks_join_the_denominator_alone() -> None:
    args = arguments("window_sinks")
    plain, plain_lse = attend(args, sinks=None)
    out, lse = attend(args)
    sinks = args["sinks"].view(1, 1, -1)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks.expand_as(lse)))
    torch.testing.assert_close(out, plain * (plain_lse - lse).exp().unsqueeze(-1), rtol=1e-4, atol=1e-5)


def test_rows_without_keys_get_zeros_and_minus_infinity() -> None:
    args = arguments("history")
    out, lse = attend(args, sinks=None)
    assert not out[2].any()  # ends = 0
    assert bool(lse[2].isneginf().all())
    assert not out[1, 1:].any()  # beyond its count
    assert bool(out[0].isfinite().all())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "bits", "variants"),
    [(128, (4, 3), ("prod", "prod")), (80, (4, 3), ("prod", "mse")), (64, (1, 1), ("prod", "prod"))],
)
def test_prod_is_a_composition_that_attends_to_what_it_wrote(
    dim: int, bits: tuple[int, int], variants: tuple[str, str], dtype: torch.dtype, device: str
) -> None:
    """Sixty tokens of two rows, then queries: as attention to their dequantized keys and values is."""
    layout = TurboQuantLayout(dim, *bits, *variants)
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, counts = 4, 2, [60, 21]
    qkv = torch.randn(2, 60, (heads + 2 * kv_heads) * dim, generator=generator).to(device, dtype)
    table = 1 + torch.randperm(8, generator=generator).view(2, 4).int().to(device)
    zeros, real = torch.zeros(2, dtype=torch.int32, device=device), torch.tensor(counts).int().to(device)
    rotation, s = (t.to(device, dtype) for t in (turboquant.rotation(dim), turboquant.projection(dim)))
    books = [turboquant.codebook(dim, b, device) for b in (layout.k_code_bits, layout.v_code_bits)]
    cache = torch.zeros(layout.cache_shape(9, kv_heads), dtype=torch.uint8, device=device)
    token = qkv, None, None, 0.0, None, None, zeros, real, table, rotation.T.contiguous()
    q, kept = write_unfused(TurboQuantWrite(*token, *books, cache, None, None, heads, "norm", True), layout, s)
    call = TurboQuantAttention(q, cache, table, zeros, real, None, rotation, *books, None, dim**-0.5, 0)
    out, _ = attend_unfused(call, layout, s)
    coded = [
        dequantize(quantize(kept[:, :, i], book, s if variant == "prod" else None), eight_bit_levels(book), s)
        for i, (book, variant) in enumerate(zip(books, variants, strict=True))
    ]
    for row, count in enumerate(counts):
        k, v = (t[row, :count].repeat_interleave(2, dim=1).transpose(0, 1) for t in coded)
        want = torch.nn.functional.scaled_dot_product_attention(
            q[row, :count].float().transpose(0, 1), k, v, is_causal=True
        )
        want = want.transpose(0, 1) @ rotation.float() * dim**-0.5
        error = (out[row, :count].float() - want).norm() / want.norm()
        assert error < (1e-3 if dtype == torch.float32 else 0.12)  # codes and signs of near-ties fall either way


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 1, 8, 128, dtype=torch.float64)}, "q is .* torch.float64"),
        ({"cache": torch.zeros(4, 2, 1000, dtype=torch.uint8)}, "1000 bytes per head"),
        ({"cache": torch.zeros(4, 3, 1600, dtype=torch.uint8)}, "8 heads and 3 kv heads"),
        ({"k_codebook": torch.ones(32)}, "k_codebook is of 32 levels"),
        ({"window": -1}, "window is -1"),
        ({"counts": torch.ones(3, dtype=torch.int32)}, "counts is"),
        ({"ends": torch.ones(2, dtype=torch.int64)}, "ends is"),
        ({"v_codebook": torch.ones(4)}, "bytes per head"),
        ({"v_codebook": torch.ones(2, 4)}, "v_codebook is"),
        ({"sinks": torch.ones(7)}, "sinks is"),
        ({"rotation": torch.ones(64, 64)}, "rotation is"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(arguments("llama_3"), **changes)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("case", ["llama_4", "llama_k4v2_drafts", "window_sinks"])
def test_one_graph_serves_all_lengths(case: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured with one set of lengths, replayed with others, down to empty rows and back: as the reference says."""
    monkeypatch.setattr(kernel, "SHORT", kernel.SHORT if launches == 1 else 0)
    args = arguments(case, torch.bfloat16, "cuda")
    reach, batch = args["block_table"].shape[1] * 16, len(args["positions"])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attend(args)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out, lse = attend(args)
    generator = torch.Generator().manual_seed(3)
    length = args["q"].shape[1]
    for _ in range(12):
        positions = torch.randint(0, reach - length, (batch,), generator=generator, dtype=torch.int32)
        args["positions"].copy_(positions)
        args["counts"].copy_(torch.randint(0, length + 1, (batch,), generator=generator, dtype=torch.int32))
        args["q"].copy_(torch.randn(args["q"].shape, generator=generator))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        want, want_lse = turboquant_attention.reference(*args.values())
        assert (out.float() - want.float()).norm() <= 8e-3 * want.float().norm() + 1e-6
        seen = want_lse.isfinite()
        assert torch.equal(seen, lse.isfinite())
        torch.testing.assert_close(lse[seen], want_lse[seen], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("case", ["llama", "drafts", "limit", "mqa_256"])
def test_one_graph_serves_rings_and_codes(case: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, with a ring: contexts that lie within the window, that just leave it, and empty rows."""
    monkeypatch.setattr(kernel, "SHORT", kernel.SHORT if launches == 1 else 0)
    made = next(c for c in OPS["turboquant_hybrid"].cases if c.name == case)
    values = list(made.make(torch.device("cuda"), torch.bfloat16, torch.Generator().manual_seed(1)))
    args = dict(zip([a.name for a in turboquant_hybrid.overload._schema.arguments], values, strict=True))
    reach, batch, length = args["block_table"].shape[1] * 16, len(args["positions"]), args["q"].shape[1]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        turboquant_hybrid(*args.values())
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = turboquant_hybrid(*args.values())
    generator = torch.Generator().manual_seed(3)
    for round in range(16):
        highest = args["window"] + 24 if round % 2 else reach - length
        positions = torch.randint(0, min(highest, reach - length), (batch,), generator=generator, dtype=torch.int32)
        counts = torch.randint(0, length + 1, (batch,), generator=generator, dtype=torch.int32)
        args["positions"].copy_(positions)
        args["counts"].copy_(counts)
        args["slots"].copy_(1 + torch.randperm(batch, generator=generator, dtype=torch.int32))
        args["q"].copy_(torch.randn(args["q"].shape, generator=generator))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        want = turboquant_hybrid.reference(*args.values()).cpu().float()
        real = torch.arange(length) < counts.unsqueeze(1)
        got = out.cpu().float()
        assert (got - want)[real].norm() <= 8e-3 * want[real].norm() + 1e-6
        assert got.isfinite().all()


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
def test_a_heavy_first_token_does_not_drown_the_rest() -> None:
    """Thousands of keys with 1e-5 of the first one's weight each keep their share."""
    args = arguments("llama_4", torch.float32, "cuda")
    args["q"] *= 4
    want, want_lse = turboquant_attention.reference(*args.values())
    got, lse = attend(args)
    assert (got - want).norm() <= 1e-3 * want.norm()
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-3)
