"""A decode step of mode `hybrid` in one op: what it refuses, and on a GPU one graph for every length and batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.formats.turboquant import parse_kv
from onegraph.formats.turboquant_layout import layout_of, unpack_pages
from onegraph.nn.attention import Attention
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cuda import turboquant_decode as kernel
from onegraph.ops.registry import OPS, reference_ops
from onegraph.ops.turboquant_decode import turboquant_decode
from onegraph.runtime.graph import Runner

FORMS = {"8": (8, 4, 2), "2": (2,), "alone": ()}  # CLUSTERS


def arguments(case: str, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    made = next(c for c in OPS["turboquant_decode"].cases if c.name == case)
    values = made.make(torch.device(device), dtype, torch.Generator().manual_seed(1))
    return dict(zip([a.name for a in turboquant_decode.overload._schema.arguments], values, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": torch.zeros(1, dtype=torch.int32)}, "turboquant_write: counts is .1,."),
        ({"heads": 6}, "qkv holds 1536 numbers a token"),
        ({"limit": 64}, "window is 64, limit 64"),
        ({"rotation": torch.zeros(4, 4)}, "recent_attention: rotation is .4, 4."),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        turboquant_decode(*(arguments("llama", torch.float32) | changes).values())
    assert "\n" not in str(caught.value)


def layer(device: str, dim: int = 128, **options: Any) -> Attention:
    angle = torch.arange(400).unsqueeze(1) * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": dim, "cos": angle.cos(), "sin": angle.sin()}
    return Attention(index=0, **sizes, **options).to(device)


def caches(text: str, device: str, dtype: torch.dtype, rows: int, dim: int = 128) -> list[TurboQuantCache]:
    """One that attends in one op, and one that does not; pages shuffled, rings crossed."""
    found = []
    for fused in (True, False):
        setting = parse_kv(text)
        assert setting is not None
        cache = TurboQuantCache(
            setting, layers=1, pages=1 + rows * 24, page_size=16, kv_heads=2, head_dim=dim, rows=rows, pages_per_row=24,
            device=device, dtype=dtype,
        )  # fmt: skip
        order = torch.randperm(rows * 24, generator=torch.Generator().manual_seed(1)).view(rows, 24)
        cache.block_table.copy_(1 + order)
        cache.slots.copy_(torch.arange(rows, 0, -1))
        cache.fused = fused
        found.append(cache)
    return found


@pytest.mark.parametrize("window", [0, 9, 40])
@pytest.mark.parametrize("text", ["turboquant:4,window=16", "turboquant:k1v3,window=16,values=prod"])
def test_one_op_is_the_two_that_it_replaces(text: str, window: int) -> None:
    one, two = caches(text, "cpu", torch.float32, 2, 64)
    attention, generator = layer("cpu", 64, window=window), torch.Generator().manual_seed(2)
    for t in range(60):
        for cache in (one, two):
            cache.positions.copy_(torch.tensor([t, max(t - 7, 0)]))
            cache.counts.copy_(torch.tensor([1, int(t >= 7)]))
        qkv = torch.randn(2, 1, 12 * 64, generator=generator)
        torch.testing.assert_close(one.attend(attention, qkv), two.attend(attention, qkv))
    assert torch.equal(one.layers[0].codes[1:], two.layers[0].codes[1:])  # page 0 and ring 0 are nobody's
    assert torch.equal(one.layers[0].ring[1:], two.layers[0].ring[1:])


# --------------------------------------------------------------------------------------------------------- a GPU


def force(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CLUSTERS", FORMS[form])
    monkeypatch.setattr(kernel, "TILES", 1 << 20)


def differing(args: dict[str, Any], left: Tensor, right: Tensor) -> int:
    """Codes that are not the same, of all pages but the sentinel."""
    levels = (args[name].numel() for name in ("k_codebook", "v_codebook"))
    layout = layout_of(args["turn"].shape[0], *levels, left.shape[2])
    pairs = zip(unpack_pages(layout, left[1:]), unpack_pages(layout, right[1:]), strict=True)
    return sum(int((a.codes != b.codes).sum()) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["smollm2", "llama", "limit", "group_6"])
def test_one_graph_serves_all_lengths(case: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that lie within the window, that just leave it, that wrap around the ring, and empty rows."""
    force(form, monkeypatch)
    args = arguments(case, torch.bfloat16, "cuda")
    batch, reach = len(args["positions"]), args["block_table"].shape[1] * 16
    assert kernel.plan_of(TurboQuantDecode(**args)) is not None
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        turboquant_decode(*args.values())
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = turboquant_decode(*args.values())
    generator = torch.Generator().manual_seed(3)
    for round in range(24):
        highest = args["window"] + 24 if round % 2 else reach
        positions = torch.randint(0, min(highest, reach), (batch,), generator=generator, dtype=torch.int32)
        counts = torch.randint(0, 3, (batch,), generator=generator, dtype=torch.int32).clamp(max=1)
        args["positions"].copy_(positions)
        args["counts"].copy_(counts)
        args["slots"].copy_(1 + torch.randperm(batch, generator=generator, dtype=torch.int32))
        args["qkv"].copy_(torch.randn(args["qkv"].shape, generator=generator))
        other = {name: value.clone() if isinstance(value, Tensor) else value for name, value in args.items()}
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        with reference_ops():
            want = turboquant_decode(*other.values()).cpu().float()
        got, real = out.cpu().float(), counts > 0
        assert (got - want)[real].norm() <= 8e-3 * want[real].norm() + 1e-6
        assert not got[~real].any()  # zeros
        assert (args["ring"][1:] - other["ring"][1:]).abs().max() <= 0.04  # the last bit of numbers up to 5
        assert differing(args, args["cache"], other["cache"]) <= 2 * batch
        args["cache"].copy_(other["cache"])
        args["ring"].copy_(other["ring"])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", ["turboquant:4", "turboquant:k3v4,window=16"])
def test_captured_steps_are_those_of_two_launches(text: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in a row, past the window and around the ring several times, rows apart, one of them idle for a while."""
    force(form, monkeypatch)
    both, attention = caches(text, "cuda:0", torch.bfloat16, 3), layer("cuda:0")
    generator = torch.Generator().manual_seed(4)

    def attend(qkv: Tensor, positions: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for cache in both:
            view = cache.view()
            view.positions, view.counts = positions, counts
            out.append(view.attend(attention, qkv))
        return out[0], out[1]

    inputs = {"qkv": torch.zeros(3, 1, 12 * 128, device="cuda:0", dtype=torch.bfloat16)}
    inputs |= {name: torch.zeros(3, dtype=torch.int32, device="cuda:0") for name in ("positions", "counts")}
    runner = Runner(attend, inputs, capture=True)
    at = torch.tensor([0, 61, 130])
    with runner.running():
        for t in range(200):
            counts = torch.tensor([1, int(not 50 <= t < 70), 1])
            qkv = torch.randn(3, 1, 12 * 128, generator=generator).bfloat16()
            runner.load(qkv=qkv, positions=at.int(), counts=counts.int())
            one, two = (x.float().cpu()[counts > 0] for x in runner.replay())
            assert (one - two).norm() <= 1e-2 * two.norm(), t
            at = at + counts
    first, second = (cache.layers[0] for cache in both)
    assert first is not None
    assert second is not None
    assert first.ring is not None
    torch.testing.assert_close(first.ring[1:], second.ring[1:], atol=0.04, rtol=0)
    books = {name: getattr(first, name) for name in ("k_codebook", "v_codebook")}
    assert differing({"turn": first.turn, **books}, first.codes, second.codes) <= 200
