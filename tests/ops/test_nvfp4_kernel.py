"""The CUDA kernels of NVFP4 and MXFP4 linears on a CPU: their own source, each thread a fiber (`nvfp4_on_cpu`).

What this proves: every index, mask and copy, the order of waiting, and the bits of decoding. What it cannot: that the
GPU's instructions do what `nvfp4_common.cuh` says; the GPU tests of the ops do.
"""

import shutil
import struct
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h200 import H200, PLAIN
from on_cpu import compile_run
from onegraph.ops import mxfp4
from onegraph.ops.cuda import nvfp4, nvfp4_one, stream
from onegraph.ops.cuda.build import Device
from onegraph.ops.cuda.stream import DOWN, GATE_UP, LINEAR, Tiling, Variant
from onegraph.ops.nvfp4_linear import nvfp4_experts, nvfp4_grouped_linear, random_weight

HERE = Path(__file__).parent / "nvfp4_on_cpu"
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("nvfp4")
    sources = nvfp4.STREAM.source.path, nvfp4.SHORT.path, nvfp4_one.KERNEL.path
    headers = [sources[0].with_name("nvfp4_decode.cuh")]
    for file in (*sources, *headers, HERE / "nvfp4_common.cuh", HERE / "run.cpp"):
        shutil.copy(file, path)

    @cache
    def made(**defines: int) -> Path:
        words = [f"-D{name}={value}" for name, value in defines.items()]
        program = path / "-".join(["run", *map(str, defines.values())])
        compile_run(path, words, program)
        return program

    return made


def weight_of(group: int, shape: tuple[int, ...], seed: int) -> list[Tensor | None]:
    """codes, scale and global scale of a random weight: NVFP4 (16), MXFP4 (32), which has no global scale."""
    if group == 16:
        return [*random_weight(shape, "cpu", rng(seed))]
    return [*mxfp4.random_weight(shape, "cpu", rng(seed)), None]


def product(x: Tensor, weight: list[Tensor | None]) -> Tensor:
    given = [t for t in weight if t is not None]
    return nvfp4_grouped_linear(x, *given) if len(given) == 3 else mxfp4.mxfp4_grouped_linear(x, *given)


def truth_of_experts(x, chosen, gains, layers, biases, gate) -> Tensor:
    if layers[0][2] is not None:
        return nvfp4_experts(x, chosen, gains, *layers[0], *layers[1], *gate)
    both = [[*layer[:2], bias] for layer, bias in zip(layers, biases, strict=True)]
    return mxfp4.mxfp4_experts(x, chosen, gains, *both[0], *both[1], *gate)


def group_of(tensors: list[Tensor | None]) -> int:
    return 32 if tensors[3] is None else 16


both = pytest.mark.parametrize("group", [16, 32], ids=["nvfp4", "mxfp4"])


def launch(
    program: Path,
    tensors: list[Tensor | None],
    sizes: tuple[int, int, int, int, int],
    numbers: int,
    grid: tuple[int, int, int],
    threads: int,
    *,
    across: int = 0,
    hold: int = 0,
    gate: tuple[float, ...] = stream.NO_GATE,
    span: int = 0,
    wide: bool = False,
) -> Tensor:
    """`tensors`: x, codes, scale, global_scale, bias, experts, weights; `sizes`: tokens, n, k, matrices, top_k."""
    x, bias = tensors[0], tensors[4]
    assert x is not None
    tail = threads, x.numel(), numbers, int(bias is not None), *gate
    head = struct.pack("14i3fi", *sizes, across, hold, *grid, *tail, span)
    given, got = program.with_suffix(".in"), program.with_suffix(".out")
    given.write_bytes(
        head + b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors if t is not None)
    )
    done = subprocess.run([program, given, got], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return torch.frombuffer(bytearray(got.read_bytes()), dtype=torch.float32 if wide else x.dtype)


def run(
    build, mode: int, tensors, sizes, numbers: int, cut: Tiling, gate: tuple[float, ...] = stream.NO_GATE,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    tiles = 1 if sizes[0] <= 8 or mode != LINEAR else 2
    together = sizes[0] > 8 and mode != LINEAR
    half = tensors[0].dtype == torch.float16
    variant = Variant(mode, tiles, together)
    program = build(**variant.defines(cut.depth), HALF=int(half), GROUP=group_of(tensors), FLOAT=int(wide))
    passes = -(-sizes[0] // variant.tokens)
    grid = cut.blocks, sizes[3] if mode == LINEAR else 1, passes
    threads = cut.across * cut.down * 32
    cuts = {"across": cut.across, "hold": cut.hold}
    return launch(program, tensors, sizes, numbers, grid, threads, **cuts, gate=gate, wide=wide)


def check(got: Tensor, wanted: Tensor) -> None:
    error = (got.float() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[got.dtype], error


@pytest.mark.parametrize(
    ("tokens", "groups", "n", "k", "dtype", "cut"),
    [
        (1, 1, 100, 512, torch.bfloat16, Tiling(2, 2, 2, 2, 2)),  # rows beyond the last; two rounds
        (3, 1, 48, 576, torch.bfloat16, Tiling(1, 3, 1, 2, 2)),  # a slice that ends early
        (2, 1, 64, 1792, torch.bfloat16, Tiling(2, 4, 2, 2, 2)),  # two turns, the second not for all
        (5, 3, 48, 256, torch.bfloat16, Tiling(2, 1, 4, 4, 2)),  # groups; warps without a tile
        (17, 1, 40, 832, torch.float16, Tiling(2, 2, 3, 4, 2)),  # two passes of tokens
    ],
)
@both
def test_linear(build, group: int, tokens: int, groups: int, n: int, k: int, dtype: torch.dtype, cut: Tiling) -> None:
    x = torch.randn(tokens, groups, k, generator=rng()).to(dtype)
    weight = weight_of(group, (groups, n, k), 1)
    bias = torch.randn(n, generator=rng(2)) if groups == 1 else None
    tensors = [x, *weight, bias, None, None]
    got = run(build, LINEAR, tensors, (tokens, n, k, groups, 0), tokens * groups * n, cut)
    wanted = product(x.float(), weight)
    check(got.view(tokens, groups, n), wanted if bias is None else wanted + bias)


@pytest.mark.parametrize(
    ("tokens", "groups", "n", "k", "dtype", "warps"),
    [(9, 1, 40, 832, torch.bfloat16, 2), (20, 2, 32, 576, torch.float16, 4)],
)
@both
def test_short(build, group: int, tokens: int, groups: int, n: int, k: int, dtype: torch.dtype, warps: int) -> None:
    x = torch.randn(tokens, groups, k, generator=rng()).to(dtype)
    weight = weight_of(group, (groups, n, k), 1)
    bias = torch.randn(n, generator=rng(2)) if groups == 1 else None
    program = build(HALF=int(dtype == torch.float16), TILES=2, WARPS=warps, GROUP=group, FLOAT=0)
    grid = -(-n // stream.ROWS), groups, -(-tokens // 16)
    tensors = [x, *weight, bias, None, None]
    got = launch(program, tensors, (tokens, n, k, groups, 0), tokens * groups * n, grid, warps * 32)
    wanted = product(x.float(), weight)
    check(got.view(tokens, groups, n), wanted if bias is None else wanted + bias)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "dim", "wide", "gate", "twice", "cuts"),
    [
        (1, 6, 16, 256, 128, (10.0, 1.0, 0.0), False, (Tiling(5, 1, 4, 6, 4), Tiling(5, 4, 2, 4, 4))),
        (3, 2, 4, 128, 64, (1.0, 1.0, 0.0), True, (Tiling(3, 1, 3, 3, 4), Tiling(2, 2, 2, 3, 4))),
        (18, 3, 6, 192, 128, (2.0, 1.702, 1.0), True, (Tiling(4, 1, 3, 4, 3), Tiling(3, 3, 2, 4, 3))),
        (13, 2, 9, 320, 128, (float("inf"), 1.0, 0.0), False, (Tiling(3, 2, 2, 5, 3), Tiling(2, 2, 1, 3, 3))),
        (
            16,
            2,
            3,
            320,
            128,
            (2.0, 1.0, 0.0),
            True,
            (Tiling(3, 2, 2, 5, 3), Tiling(2, 2, 1, 3, 3)),
        ),  # experts read twice
    ],
)
@both
def test_experts(
    build,
    group: int,
    tokens: int,
    top_k: int,
    experts: int,
    dim: int,
    wide: int,
    gate: tuple[float, ...],
    twice: bool,
    cuts,
) -> None:
    """Of unequal popularity; one token's choice may name an expert twice."""
    x = (3 * torch.randn(tokens, dim, generator=rng())).to(torch.bfloat16)
    chosen = torch.rand(tokens, experts, generator=rng(1)).argsort(1)[:, :top_k].int().contiguous()
    if twice:
        chosen[0, 1] = chosen[0, 0]
    gains = torch.rand(tokens, top_k, generator=rng(2))
    layers = weight_of(group, (experts, 2 * wide, dim), 3), weight_of(group, (experts, dim, wide), 4)
    biases = [torch.randn(experts, n, generator=rng(5)) if group == 32 else None for n in (2 * wide, dim)]
    sizes, tensors = (tokens, 2 * wide, dim, experts, top_k), [x, *layers[0], biases[0], chosen, gains]
    hidden = run(build, GATE_UP, tensors, sizes, tokens * top_k * wide, cuts[0], gate)
    sizes, tensors = (tokens, dim, wide, experts, top_k), [hidden, *layers[1], biases[1], chosen, gains]
    got = run(build, DOWN, tensors, sizes, tokens * dim, cuts[1])
    check(got.view(tokens, dim), truth_of_experts(x.float(), chosen, gains, layers, biases, gate))


def run_one(
    build,
    mode: int,
    tensors,
    sizes,
    blocks: int,
    *,
    groups: int = 1,
    gate: tuple[float, ...] = stream.NO_GATE,
    depth: int = 4,
    wide: bool = False,
) -> Tensor:
    """One mode of `nvfp4_one.cu` over `blocks` blocks, two row tiles at a time."""
    tokens, n, k, _, top_k = sizes
    each = -(-n // stream.ROWS) * (top_k if mode == GATE_UP else 1)
    inner = top_k if mode == DOWN else 1
    rows = groups if mode == LINEAR else tokens
    group, slices = group_of(tensors), -(-k // nvfp4_one.SLICE) * inner
    gains = inner + (group == 32 and mode == DOWN)
    cut = nvfp4_one.plan(rows * each, slices, gains, each, blocks, H200.shared, group)
    assert cut is not None
    half, warps = tensors[0].dtype == torch.float16, stream.WARPS
    edge = k % nvfp4_one.SLICE != 0
    program = build(ONE=1, **nvfp4_one._defines(mode, half, depth, group, edge=edge, wide=wide))
    numbers = tokens * (groups * n if mode == LINEAR else top_k * n // 2 if mode == GATE_UP else n)
    options = {"across": min(2, cut.round), "hold": cut.hold, "span": cut.span, "gate": gate, "wide": wide}
    return launch(program, tensors, sizes, numbers, (blocks, 1, 1), (warps + 1) * 32, **options)


@pytest.mark.parametrize(
    ("group", "groups", "n", "k", "dtype", "blocks"),
    [
        (16, 1, 100, 512, torch.bfloat16, 2),  # rows beyond the last; two slices for sixteen warps
        (16, 1, 16, 256, torch.float16, 3),  # one unit
        (16, 3, 32, 768, torch.bfloat16, 2),
        (16, 1, 64, 2304, torch.bfloat16, 1),  # nine slices: sixteen warps begin in different tiles
        (32, 1, 100, 512, torch.bfloat16, 2),
        (32, 1, 16, 256, torch.float16, 3),
        (32, 3, 32, 768, torch.bfloat16, 2),
        (32, 1, 37, 704, torch.bfloat16, 1),  # the last slice ends early, and rows at odd words of scales
        (32, 2, 48, 2880, torch.float16, 2),
    ],
)
def test_linear_of_one_token(build, group: int, groups: int, n: int, k: int, dtype: torch.dtype, blocks: int) -> None:
    """Also where columns differ in size by 2^30: a power of two for every 256 of them keeps the small."""
    x = torch.randn(1, groups, k, generator=rng())
    x[..., : k // 2] *= 2.0**-14 if dtype == torch.float16 else 2.0**-30
    x = x.to(dtype)
    weight = weight_of(group, (groups, n, k), 1)
    bias = torch.randn(n, generator=rng(2)) if groups == 1 else None
    got = run_one(build, LINEAR, [x, *weight, bias, None, None], (1, n, k, groups, 0), blocks, groups=groups)
    wanted = product(x.float(), weight)
    check(got.view(1, groups, n), wanted if bias is None else wanted + bias)
    x[..., k // 2 :] = 0
    got = run_one(build, LINEAR, [x, *weight, None, None, None], (1, n, k, groups, 0), blocks, groups=groups)
    if k > nvfp4_one.SLICE:
        check(got.view(1, groups, n) * 2.0**14, product(x.float(), weight) * 2.0**14)


# ------------------------------------------------------------------------------------------------------- range of E8M0


def extreme(n: int, k: int, *, low: int, high: int) -> tuple[list[Tensor | None], Tensor]:
    """A weight with scales at both ends of a range among ordinary ones, and x that keeps each result finite: where a
    scale is large, x is small or the codes are zeros."""
    codes, scale, _ = weight_of(32, (1, n, k), 1)
    x = torch.randn(1, 1, k, generator=rng())
    scale[0, 0::3, 0] = 0  # of E8M0 the smallest, 2^-127
    scale[0, 1::3, 1] = low
    scale[0, :, 2] = high  # for all rows
    x[..., 64:96] *= 2.0 ** max(120 - high, -90)
    codes[0, :, 48:64] = 0x80  # zeros of both signs, whatever the scale
    scale[0, :, 3] = 254
    return [codes, scale, None], x


@pytest.mark.parametrize("tokens", [1, 3, 9, 24])
@pytest.mark.parametrize(("high", "dtype"), [(128, torch.bfloat16), (129, torch.bfloat16), (200, torch.bfloat16),
                                             (252, torch.bfloat16), (140, torch.float16)])  # fmt: skip
def test_scales_far_apart(build, tokens: int, high: int, dtype: torch.dtype) -> None:
    n, k = 32, 320
    weight, x = extreme(n, k, low=1 if dtype == torch.bfloat16 else 104, high=high)
    x = (x * torch.linspace(0.5, 1.5, tokens).view(-1, 1, 1)).to(dtype)
    tensors, sizes, numbers = [x, *weight, None, None, None], (tokens, n, k, 1, 0), tokens * n
    if tokens == 1:
        got = run_one(build, LINEAR, tensors, sizes, 2, wide=True)
    elif tokens == 24:
        program = build(HALF=int(dtype == torch.float16), TILES=2, WARPS=2, GROUP=32, FLOAT=1)
        got = launch(program, tensors, sizes, numbers, (2, 1, 2), 64, wide=True)
    else:
        got = run(build, LINEAR, tensors, sizes, numbers, Tiling(2, 2, 1, 2, 2), wide=True)
    wanted = (x.double().flatten(1) @ mxfp4.mxfp4_dequantize(weight[0][0], weight[1][0]).double().T).float()
    assert got.isfinite().all()
    assert ((got.view(tokens, n) - wanted).norm(dim=1) < 1e-3 * wanted.norm(dim=1)).all()
    assert (got.view(tokens, n) - wanted).abs().max() < 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("tokens", [1, 3])
def test_each_number_of_the_range_is_its_own(build, tokens: int) -> None:
    """One scale a row, all of them; results in float32 are sums of two weights to the bit."""
    n, k = 253, 256
    codes = torch.zeros(1, n, k // 2, dtype=torch.uint8)
    codes[0, :, 5] = 0x07
    codes[0, :, 70] = 0x90
    scale = torch.arange(n, dtype=torch.uint8).view(1, n, 1).repeat(1, 1, k // 32)
    x = torch.zeros(tokens, 1, k, dtype=torch.bfloat16)
    x[0, 0, 10], x[-1, 0, 141] = 1, 2
    tensors, sizes = [x, codes, scale, None, None, None, None], (tokens, n, k, 1, 0)
    if tokens == 1:
        got = run_one(build, LINEAR, tensors, sizes, 2, wide=True)
    else:
        got = run(build, LINEAR, tensors, sizes, tokens * n, Tiling(2, 1, 2, 8, 2), wide=True)
    weight = mxfp4.mxfp4_dequantize(codes[0], scale[0]).double()
    wanted = (x.double().flatten(1) @ weight.T).float()
    assert torch.equal(got.view(tokens, n), wanted)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@both
def test_what_is_not_finite_is_not_hidden(build, group: int, value: float) -> None:
    x = torch.randn(1, 1, 512, generator=rng()).to(torch.bfloat16)
    x[0, 0, 300] = value
    tensors = [x, *weight_of(group, (1, 32, 512), 1), None, None, None]
    assert run_one(build, LINEAR, tensors, (1, 32, 512, 1, 0), 2).isnan().all()


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "dim", "wide", "blocks", "twice"),
    [
        (1, 6, 16, 256, 256, 5, False),
        (1, 3, 4, 512, 256, 2, True),
        (1, 1, 2, 256, 512, 132, False),
        (4, 2, 8, 256, 256, 3, False),  # blocks with several tokens
        (5, 3, 6, 256, 512, 9, True),
        (1, 4, 6, 320, 192, 3, False),  # of MXFP4 alone: widths that are no multiples of 256
        (1, 3, 4, 576, 832, 2, True),
    ],
)
@both
def test_experts_of_few_tokens(
    build, group: int, tokens: int, top_k: int, experts: int, dim: int, wide: int, blocks: int, twice: bool
) -> None:
    if not nvfp4_one.takes(group, dim, wide):
        assert nvfp4_one.experts_plans(tokens, dim, wide, top_k, H200, group) is None
        return
    x = (3 * torch.randn(tokens, dim, generator=rng())).to(torch.bfloat16)
    chosen = torch.rand(tokens, experts, generator=rng(1)).argsort(1)[:, :top_k].int().contiguous()
    if twice:
        chosen[0, 1] = chosen[0, 0]
    gains, gate = torch.rand(tokens, top_k, generator=rng(2)), (2.0, 1.702, 1.0) if twice else (2.0, 1.0, 0.0)
    layers = weight_of(group, (experts, 2 * wide, dim), 3), weight_of(group, (experts, dim, wide), 4)
    biases = [torch.randn(experts, n, generator=rng(5)) if group == 32 else None for n in (2 * wide, dim)]
    tensors, sizes = [x, *layers[0], biases[0], chosen, gains], (tokens, 2 * wide, dim, experts, top_k)
    hidden = run_one(build, GATE_UP, tensors, sizes, blocks, gate=gate, depth=2)
    tensors, sizes = [hidden, *layers[1], biases[1], chosen, gains], (tokens, dim, wide, experts, top_k)
    got = run_one(build, DOWN, tensors, sizes, blocks)
    check(got.view(tokens, dim), truth_of_experts(x.float(), chosen, gains, layers, biases, gate))


@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (14336, 4096), (16, 256), (129280, 7168), (1536, 1024)])
def test_a_cut_of_one_token_covers_its_shape(n: int, k: int) -> None:
    cut = nvfp4_one.linear_plan(n, k, 1, H200)
    assert cut is not None
    assert cut.blocks * cut.hold >= -(-n // stream.ROWS)
    assert nvfp4_one.linear_plan(n, k + 64, 1, H200) is None


@pytest.mark.parametrize(("dim", "wide"), [(4096, 2048), (7168, 3072)])
def test_experts_of_v4_fit(dim: int, wide: int) -> None:
    assert nvfp4_one.experts_plans(1, dim, wide, 7, H200) is not None
    assert nvfp4_one.experts_plans(1, dim, wide + 16, 7, H200) is None


@pytest.mark.parametrize(
    ("n", "k", "pace"), [(14336, 4096, 300), (4096, 14336, 300), (4096, 4096, 0), (24576, 1024, 0)]
)
def test_only_a_long_linears_first_stages_are_apart(n: int, k: int, pace: int) -> None:
    cut = nvfp4_one.linear_plan(n, k, 1, H200)
    assert cut is not None
    assert cut.pace(LINEAR) == pace
    plans = nvfp4_one.experts_plans(1, 4096, 2048, 7, H200)
    assert plans is not None
    modes = GATE_UP, DOWN
    assert [plan.pace(mode) for plan, mode in zip(plans, modes, strict=True)] == [0, 0]
    assert plans[0].stages > 2 * plans[0].depth


def test_experts_of_gpt_oss_fit() -> None:
    assert nvfp4_one.experts_plans(1, 2880, 2880, 4, H200, 32) is not None
    assert nvfp4_one.linear_plan(201088, 2880, 1, H200, 32) is not None


@pytest.mark.parametrize("depths", [(4, 3, 2), (2,)])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (14336, 4096), (16, 64), (129280, 7168), (1536, 576)])
@pytest.mark.parametrize("variant", [Variant(LINEAR), Variant(LINEAR, 2), Variant(DOWN, together=True)])
@pytest.mark.parametrize(("device", "warps"), [(H200, stream.WARPS), (PLAIN, nvfp4.PLAIN_WARPS)], ids=["H200", "99 KB"])
def test_a_cut_covers_its_shape_and_fits(
    n: int, k: int, depths: tuple[int, ...], variant: Variant, device: Device, warps: int
) -> None:
    row_tiles, slices = -(-n // stream.ROWS), -(-k // variant.slice)
    variant = replace(variant, depths=depths, warps=((warps,),))
    footprint = nvfp4.STREAM.footprint(variant, stream.Weight((1, n, k), {}))
    cut = stream.plan(row_tiles, slices, variant, footprint, 132, device.shared - stream.ROUTES)
    assert cut is not None
    assert cut.shared(footprint) <= device.shared - stream.ROUTES
    assert cut.blocks <= row_tiles
    assert cut.across <= slices
    assert 1 <= cut.down <= cut.hold
    assert cut.across * cut.down <= warps
