"""The CUDA E8P linear against float64: all rates, token counts and tails, under capture, the same bits each time."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from onegraph.formats.e8p import codebook, residual_dtype
from onegraph.formats.rotated import hadamard_block
from onegraph.ops.calls import E8PLinear
from onegraph.ops.cuda import build, e8p_batch, e8p_decode, e8p_dequantize, e8p_portable, e8p_prefill
from onegraph.ops.cuda import e8p as cuda_e8p
from onegraph.ops.cuda.e8p_common import Linear
from onegraph.ops.e8p import e8p_decode as decode_op

gpu = pytest.mark.gpu
both = pytest.mark.usefixtures("kernel_family")  # the GPU's own kernels, then the portable ones
# (n, k): whole tiles and slices; blocks of 64 on either side; half a slice, half a tile; clusters of every kind
SHAPES = [
    (128, 256),
    (64, 64),
    (576, 576),
    (192, 1536),
    (576, 192),
    (1536, 576),
    (4096, 4096),
    (512, 11008),
    (320, 4160),
]


def _codes(n: int, k: int, bits: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    g = torch.Generator("cuda").manual_seed(seed)

    def draw(dtype: torch.dtype) -> torch.Tensor:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, (n, k // 8), device="cuda", generator=g).to(dtype)

    rest = residual_dtype(bits)
    return draw(torch.int16), None if rest is None else draw(rest)


def _arguments(
    tokens: int, n: int, k: int, bits: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False
) -> tuple:
    g = torch.Generator("cuda").manual_seed(1)

    def signed(size: int) -> torch.Tensor:
        u = torch.rand(size, device="cuda", generator=g)
        return (0.5 + u) * torch.randn(size, device="cuda", generator=g).sign()

    x = torch.randn(tokens, k, device="cuda", generator=g).to(dtype)
    b = torch.randn(n, device="cuda", generator=g) if bias else None
    return x, *_codes(n, k, bits), codebook("cuda"), signed(k), signed(n) * 0.1 * k**-0.5, b, bits


def _linear(*args: Any, **named: Any) -> torch.Tensor:
    return cuda_e8p.linear(E8PLinear(*args, **named))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    block = hadamard_block(x.shape[1])
    h = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (x.view(len(x), -1, block) @ h * block**-0.5).flatten(1)


def _truth(
    x, codes, residual, table, in_scale, out_scale, bias, bits, add=None, eps=None, silu=False, wide=False
) -> torch.Tensor:
    q = decode_op.reference(codes, residual, table, bits).double()
    x = x.double()
    if silu:
        gate, up = x.chunk(2, dim=-1)
        x = torch.nn.functional.silu(gate) * up
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = _rotated(_rotated(x * in_scale) @ q.T) * out_scale
    return y + (0 if bias is None else bias) + (0 if add is None else add)


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Leaves NaN in the block that the allocator hands out next for this shape."""
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def _error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return ((y.double() - truth).norm() / truth.norm()).item()


@gpu
@both
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_matches_float64(bits: int, n: int, k: int) -> None:
    """Only the result is rounded: half a unit in the last place of bfloat16 or float16 is all that shows."""
    for tokens, (dtype, bound) in product(
        (1, 3, 4, 6, 16, 19, 48, 130), ((torch.bfloat16, 2e-3), (torch.float16, 4e-4))
    ):
        args = _arguments(tokens, n, k, bits, dtype, bias=tokens % 2 == 0)
        assert cuda_e8p.supports_shape(tokens, n, k, dtype)
        _poison((tokens, n), dtype)
        y = _linear(*args)
        through_weight = cuda_e8p.choose(tokens, n, k, bits, 0) is e8p_dequantize.run  # which is rounded, too
        assert _error(y, _truth(*args)) < bound * (1.75 if through_weight else 1), (tokens, dtype)


@gpu
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("k", "across", "down"), [(4864, 19, 1), (1280, 5, 4)])
def test_more_than_16_warps(k: int, across: int, down: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 640 threads, whose registers are fewer; clusters that have none are cut so only where n is large."""
    for tokens in (1, 2, 4, 8):
        ahead = 1 if tokens > e8p_decode.FEW else e8p_decode.DEPTHS[bits][-2]
        plan = e8p_decode.DecodeTiling(ahead, 3, 1, 1, k // 256, k // 256, across, down)
        assert plan.most_threads == 640
        monkeypatch.setattr(e8p_decode, "plan", lambda *_, plan=plan: plan)
        args, add = _arguments(tokens, 320, k, bits), torch.randn(tokens, 320, device="cuda").bfloat16()
        _poison((tokens, 320), torch.bfloat16)
        y = _linear(*args, add, 1e-5)
        assert _error(y, _truth(*args, add, 1e-5)) < 2e-3
        assert torch.equal(_linear(*args, add, 1e-5), y)


@gpu
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("parts", [2, 4])
def test_clusters_that_meet_in_memory(parts: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever cluster comes last, with the same bits."""
    n, k = 320, 3840
    planned = e8p_batch.plan
    for tokens in (9, 16, 32, 64):
        own = planned(n, k, bits, tokens, build.device(0))
        plan = replace(own, cluster=2, parts=parts, per_block=-(-15 // (2 * parts)))
        monkeypatch.setattr(e8p_batch, "plan", lambda *_, plan=plan: plan)
        args, add = _arguments(tokens, n, k, bits, bias=True), torch.randn(tokens, n, device="cuda").bfloat16()
        _poison((tokens, n), torch.bfloat16)
        y = _linear(*args, add, 1e-5)
        assert _error(y, _truth(*args, add, 1e-5)) < 2e-3
        assert all(torch.equal(_linear(*args, add, 1e-5), y) for _ in range(50))


@gpu
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tile", [(32, 12), (64, 8), (128, 8), (256, 4)], ids=str)
def test_many_tokens_however_they_are_cut(tile: tuple[int, int], bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of blocks that exchange their sums, other splits through memory: also half a tile of rows, half a slice,
    splits of unequal length and of fewer stages than a ring has, and results in float32."""
    if not e8p_prefill.KERNELS.is_built(0):
        pytest.skip("needs clusters and wgmma")
    for n, k, tokens in ((2560, 1792, 100), (1280, 1024, 300), (448, 4032, 70), (320, 4032, 100), (192, 9216, 70)):
        slices = -(-k // 256)
        args, add = _arguments(tokens, n, k, bits, bias=True), torch.randn(tokens, n, device="cuda")
        truth = _truth(*args, add.bfloat16(), 1e-5)
        for splits, join in ((1, 1), (2, 1), (2, 2), (3, 1), (5, 1)):
            per_split = -(-slices // splits)
            if (splits - 1) * per_split >= slices:
                continue
            plan = e8p_prefill.PrefillTiling(*tile, per_split, splits, join)
            monkeypatch.setattr(e8p_prefill, "plan", lambda *_, plan=plan: plan)
            _poison((tokens, n), torch.bfloat16)
            y = _linear(*args, add.bfloat16(), 1e-5)
            assert _error(y, truth) < 2e-3, plan
            assert all(torch.equal(_linear(*args, add.bfloat16(), 1e-5), y) for _ in range(5)), plan
            wide = _linear(*args, add, 1e-5, wide=True)
            assert wide.dtype == torch.float32
            assert _error(wide, _truth(*args, add, 1e-5, wide=True)) < 4e-4, plan


@gpu
@pytest.mark.parametrize(
    ("k", "tokens"),
    [
        *((k, 1100) for k in (64, 2048, 4096)),
        *((k, 300) for k in (8192, 12288, 14336, 16384, 24576, 28672)),
        *((k, 150) for k in (29568, 32768)),
    ],
)
def test_a_rotation_of_any_width(k: int, tokens: int) -> None:
    """A warp holds one slice of 256 columns of a token, or up to sixteen; more tokens than blocks run at once."""
    both = torch.randn(tokens, 2 * k, device="cuda").bfloat16()
    x, *rest = _arguments(tokens, 64, k, 2)
    assert _error(_linear(x, *rest, None, 1e-5), _truth(x, *rest, None, 1e-5)) < 2e-3
    assert _error(_linear(both, *rest, silu=True), _truth(both, *rest, silu=True)) < 2e-3


@gpu
@both
def test_every_token_count() -> None:
    for tokens in (*range(1, 19), 33, 50, 64, 65, 129, 300):
        args = _arguments(tokens, 256, 1024, 4)
        _poison((tokens, 256), torch.bfloat16)
        through_weight = cuda_e8p.choose(tokens, 256, 1024, 4, 0) is e8p_dequantize.run
        assert _error(_linear(*args), _truth(*args)) < (3.5e-3 if through_weight else 2e-3), tokens


@gpu
@pytest.mark.parametrize("tokens", [1, 4, 7, 16, 20, 50, 200])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(192, 1536), (1536, 576), (4096, 4096)])
def test_what_stands_around_the_linear(n: int, k: int, bits: int, tokens: int, kernel_family: str) -> None:
    """RMSNorm, SwiGLU, residual, float32 out: over clusters, tails and several passes."""
    x, *rest = _arguments(tokens, n, k, bits, bias=True)
    # Another norm for each token; at most 16, whose square, that of gate times up, leaves room in float16.
    x = x * (1 + torch.arange(tokens, device="cuda") % 16).unsqueeze(1)
    both = torch.cat([x, x.flip(-1)], dim=-1)
    g = torch.Generator("cuda").manual_seed(2)
    for dtype in (torch.bfloat16, torch.float16):
        add = torch.randn(tokens, n, device="cuda", generator=g).to(dtype)
        for options in (
            (add, 1e-5, False, False),
            (add, None, True, False),
            (add.float(), 1e-5, False, True),
            (None, None, True, True),
        ):
            args = ((both if options[2] else x).to(dtype), *rest)
            y = _linear(*args, *options)
            assert y.dtype == (torch.float32 if options[3] else dtype)
            truth = _truth(*args, *options)
            # Of 192 results bfloat16's own rounding may be a fifth above its 1.66e-3.
            rounding = 0.0 if options[3] else _error(truth.to(dtype), truth)
            exact = e8p_portable.MAX_TOKENS if kernel_family == "portable" else e8p_decode.MAX_TOKENS
            if (
                tokens > exact and kernel_family == "portable"
            ):  # through the weight, which is rounded as what is in front
                limit = 3.5e-3 if dtype == torch.bfloat16 else 6e-4
            else:
                limit = math.hypot(rounding, 1e-4 if tokens <= exact else 5e-4 if options[3] else 3.4e-4)
            assert _error(y, truth) < limit, (dtype, options[1:])


@gpu
@both
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(192, 576), (960, 1536), (320, 4160), (4096, 1024)])
def test_many_tokens_through_the_weight(bits: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is rounded too, and what stands in front: half a unit in the last place each. One strip or more."""
    x, *rest = _arguments(e8p_dequantize.LEAST_TOKENS + 3, n, k, bits, bias=True)
    both, strips = torch.cat([x, x.flip(-1)], dim=-1), (e8p_dequantize.STRIP_BYTES, 2 * k * 130)
    for dtype, bound in ((torch.bfloat16, 3.5e-3), (torch.float16, 6e-4)):
        add = torch.randn(len(x), n, device="cuda").to(dtype)
        for options in ((None,), (add, 1e-5), (add, None, True), (add.float(), 1e-5, False, True)):
            given = (both if len(options) == 3 else x).to(dtype)
            plain = rest if options[0] is not None else [*rest[:-2], None, bits]  # straight into the result
            results = []
            for size in strips:
                monkeypatch.setattr(e8p_dequantize, "STRIP_BYTES", size)
                _poison((len(x), n), torch.float32 if len(options) == 4 else dtype)
                results.append(_linear(given, *plain, *options))
            truth = _truth(given, *plain, *options)
            assert all(_error(y, truth) < bound for y in results), (dtype, options[1:])


@gpu
@both
def test_the_weight_is_what_the_codes_stand_for() -> None:
    for (n, k), bits, (dtype, bound) in product(
        ((128, 256), (320, 576), (192, 4160)), (2, 3, 4), ((torch.bfloat16, 1.75e-3), (torch.float16, 2.3e-4))
    ):
        _, codes, rest, table, in_scale, out_scale, _, _ = _arguments(1, n, k, bits)
        w = torch.full((n, k), float("nan"), dtype=dtype, device="cuda")
        layer = codes, rest, table, in_scale, out_scale, None, bits
        e8p_dequantize.weight(Linear(w[:1], *layer, out=w), slice(0, n), w)
        eye = torch.eye(k, dtype=torch.float64, device="cuda")
        assert _error(w, _truth(eye, codes, rest, table, in_scale, out_scale, None, bits).T) < bound, (n, k, bits)


@gpu
@both
@pytest.mark.parametrize("tokens", [1, 8, 16, 40, 150, 512, 800])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_same_bits_each_time_and_in_a_graph(bits: int, tokens: int) -> None:
    args = _arguments(tokens, 4096, 4096, bits)
    expected = _linear(*args)
    for _ in range(20):
        assert torch.equal(_linear(*args), expected)
    x = args[0].clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        once = _linear(x, *args[1:])
        again = _linear(once, *args[1:])  # reads what the launch before it writes
    second = _linear(expected, *args[1:])
    x.copy_(args[0])
    for _ in range(20):
        once.fill_(float("nan"))
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(once, expected)
        assert torch.equal(again, second)
    other = _arguments(tokens, 4096, 4096, bits)[0].flip(-1).contiguous()
    x.copy_(other)
    graph.replay()
    assert torch.equal(once, _linear(other, *args[1:]))


@gpu
@both
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (28672, 4096)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 16])
def test_same_bits_under_load(tokens: int, n: int, k: int, bits: int) -> None:
    """All SMs busy, layers whose codes are in the L2 alternate: codes that overwrite those that a warp still reads show
    here, and a block that reads sums before all are there."""
    x, *first = _arguments(tokens, n, k, bits)
    layers = [first, [*_codes(n, k, bits, seed=7), *first[2:]]]
    x2, add = torch.cat([x, x], 1), x[:, :1].expand(tokens, n).contiguous()

    def results() -> list[torch.Tensor]:
        around = [(x, (None, 1e-5)), (x2, (add, None, True))]
        return [_linear(given, *layer, *more) for layer in layers for given, more in around]

    wanted = results()
    for _ in range(40):
        for y, want in zip(results(), wanted, strict=True):
            assert torch.equal(y, want)


@gpu
def test_a_row_does_not_depend_on_its_neighbours(kernel_family: str) -> None:
    """Within one kernel, that is for 3 and 4 (portable: 2 to 4), 5 to 8, 9 to 16, 17 to 32 and 33 to 64 tokens."""
    x, *rest = _arguments(16, 1536, 576, 3)
    whole = _linear(x, *rest)
    assert torch.equal(_linear(x[:9], *rest), whole[:9])
    four = _linear(x[:4], *rest)
    some = slice(1, 3) if kernel_family == "portable" else slice(1, 4)
    assert torch.equal(_linear(x[some], *rest), four[some])
    eight = _linear(x[:8], *rest)
    assert torch.equal(_linear(x[3:8], *rest), eight[3:])


@gpu
@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [2, 8, 9])
def test_nan_and_infinity_come_out(bad: float, tokens: int) -> None:
    args = _arguments(tokens, 128, 512, 2)
    args[0][1, 300] = bad
    y = _linear(*args)
    assert not y[1].isfinite().any()
    assert y[0].isfinite().all()


@gpu
@both
def test_zeros_and_offsets_in_memory() -> None:
    x, codes, *rest = _arguments(1, 128, 512, 2)
    assert _linear(torch.zeros_like(x), codes, *rest).eq(0).all()
    odd = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    shifted = torch.empty(codes.numel() + 1, dtype=codes.dtype, device="cuda")[1:].view_as(codes).copy_(codes)
    assert torch.equal(_linear(odd, shifted, *rest), _linear(x, codes, *rest))


@gpu
@both
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_where_its_tensors_are() -> None:
    args = _arguments(3, 256, 512, 3)
    moved = [each.to("cuda:1") if isinstance(each, torch.Tensor) else each for each in args]
    assert torch.equal(_linear(*moved).to("cuda:0"), _linear(*args))


@gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 20, 70])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_more_columns_than_a_block_holds(bits: int, tokens: int, kernel_family: str) -> None:
    """As `down` of a Llama of 405B has: what cannot have them leaves them to what can."""
    for dtype in (torch.bfloat16, torch.float16):
        args = _arguments(tokens, 192, 53248, bits, dtype)
        assert cuda_e8p.supports_shape(tokens, 192, 53248, dtype)
        assert cuda_e8p.choose(tokens, 192, 53248, bits, 0) is not None
        assert _error(_linear(*args), _truth(*args)) < 3.5e-3


@gpu
@both
def test_other_shapes_go_to_triton() -> None:
    for tokens, n, k, dtype in (
        (1, 49, 200, torch.bfloat16),
        (1, 128, 128, torch.float32),
    ):
        assert not cuda_e8p.supports_shape(tokens, n, k, dtype)
        args = _arguments(tokens, n, k, 3, dtype)
        assert _error(_linear(*args), _truth(*args)) < 8e-3


@gpu
def test_cubin_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k(int* p) { *p = N; }')
    first = build.compile_cubin(source, {"N": 1}, (9, 0))
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.compile_cubin(source, {"N": 1}, (9, 0)) == first
    assert len(list((tmp_path / "onegraph" / "cuda").glob("*.cubin"))) == 1


@gpu
def test_a_refused_source_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k() { nonsense; }')
    with pytest.raises(build.BuildError, match="nonsense"):
        build.compile_cubin(source, {}, (9, 0))
