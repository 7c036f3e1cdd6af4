"""The CUDA kernels of NVFP4 linears on a CPU: their own source, each thread a fiber (`nvfp4_on_cpu`).

What this proves: every index, mask and copy, the order of waiting, and the bits of decoding. What it cannot: that the
GPU's instructions do what `nvfp4_common.cuh` says; the GPU tests of the ops do.
"""

import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h200 import H200
from onegraph.ops.cuda import nvfp4, nvfp4_one
from onegraph.ops.nvfp4 import random_weight
from onegraph.ops.nvfp4_linear import nvfp4_experts, nvfp4_grouped_linear

HERE = Path(__file__).parent / "nvfp4_on_cpu"
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("nvfp4")
    sources = nvfp4.KERNEL.path, nvfp4.SHORT.path, nvfp4_one.KERNEL.path
    for file in (*sources, sources[0].with_name("nvfp4_decode.cuh"), HERE / "nvfp4_common.cuh", HERE / "run.cpp"):
        shutil.copy(file, path)

    @cache
    def made(**defines: int) -> Path:
        words = [f"-D{name}={value}" for name, value in defines.items()]
        program = path / "-".join(["run", *map(str, defines.values())])
        subprocess.run(["g++", "-O1", "-std=c++17", "-w", *words, path / "run.cpp", "-o", program], check=True)
        return program

    return made


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
    gate: tuple[float, ...] = nvfp4_one.NO_GATE,
    span: int = 0,
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
    return torch.frombuffer(bytearray(got.read_bytes()), dtype=x.dtype)


def run(
    build, mode: int, tensors, sizes, numbers: int, cut: nvfp4.Plan, gate: tuple[float, ...] = nvfp4_one.NO_GATE
) -> Tensor:
    tiles = 1 if sizes[0] <= 8 or mode != nvfp4.LINEAR else 2
    together = sizes[0] > 8 and mode != nvfp4.LINEAR
    half = int(tensors[0].dtype == torch.float16)
    program = build(HALF=half, TILES=tiles, MODE=mode, TOGETHER=int(together), DEPTH=cut.depth)
    passes = -(-sizes[0] // (nvfp4.PASS if together else 8 * tiles))
    grid = cut.blocks, sizes[3] if mode == nvfp4.LINEAR else 1, passes
    threads = cut.across * cut.down * 32
    return launch(program, tensors, sizes, numbers, grid, threads, across=cut.across, hold=cut.hold, gate=gate)


def check(got: Tensor, wanted: Tensor) -> None:
    error = (got.float() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[got.dtype], error


@pytest.mark.parametrize(
    ("tokens", "groups", "n", "k", "dtype", "cut"),
    [
        (1, 1, 100, 512, torch.bfloat16, nvfp4.Plan(2, 2, 2, 2, 2)),  # rows beyond the last; two rounds
        (3, 1, 48, 576, torch.bfloat16, nvfp4.Plan(1, 3, 1, 2, 2)),  # a slice that ends early
        (2, 1, 64, 1792, torch.bfloat16, nvfp4.Plan(2, 4, 2, 2, 2)),  # two turns, the second not for all
        (5, 3, 48, 256, torch.bfloat16, nvfp4.Plan(2, 1, 4, 4, 2)),  # groups; warps without a tile
        (17, 1, 40, 832, torch.float16, nvfp4.Plan(2, 2, 3, 4, 2)),  # two passes of tokens
    ],
)
def test_linear(build, tokens: int, groups: int, n: int, k: int, dtype: torch.dtype, cut: nvfp4.Plan) -> None:
    x = torch.randn(tokens, groups, k, generator=rng()).to(dtype)
    weight = random_weight((groups, n, k), "cpu", rng(1))
    bias = torch.randn(n, generator=rng(2)) if groups == 1 else None
    tensors = [x, *weight, bias, None, None]
    got = run(build, nvfp4.LINEAR, tensors, (tokens, n, k, groups, 0), tokens * groups * n, cut)
    wanted = nvfp4_grouped_linear(x.float(), *weight)
    check(got.view(tokens, groups, n), wanted if bias is None else wanted + bias)


@pytest.mark.parametrize(
    ("tokens", "groups", "n", "k", "dtype", "warps"),
    [(9, 1, 40, 832, torch.bfloat16, 2), (20, 2, 32, 576, torch.float16, 4)],
)
def test_short(build, tokens: int, groups: int, n: int, k: int, dtype: torch.dtype, warps: int) -> None:
    x = torch.randn(tokens, groups, k, generator=rng()).to(dtype)
    weight = random_weight((groups, n, k), "cpu", rng(1))
    bias = torch.randn(n, generator=rng(2)) if groups == 1 else None
    program = build(HALF=int(dtype == torch.float16), TILES=2, WARPS=warps)
    grid = -(-n // nvfp4.ROWS), groups, -(-tokens // 16)
    tensors = [x, *weight, bias, None, None]
    got = launch(program, tensors, (tokens, n, k, groups, 0), tokens * groups * n, grid, warps * 32)
    wanted = nvfp4_grouped_linear(x.float(), *weight)
    check(got.view(tokens, groups, n), wanted if bias is None else wanted + bias)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "dim", "wide", "gate", "twice", "cuts"),
    [
        (1, 6, 16, 256, 128, (10.0, 1.0, 0.0), False, (nvfp4.Plan(5, 1, 4, 6, 4), nvfp4.Plan(5, 4, 2, 4, 4))),
        (3, 2, 4, 128, 64, (1.0, 1.0, 0.0), True, (nvfp4.Plan(3, 1, 3, 3, 4), nvfp4.Plan(2, 2, 2, 3, 4))),
        (18, 3, 6, 192, 128, (2.0, 1.702, 1.0), True, (nvfp4.Plan(4, 1, 3, 4, 3), nvfp4.Plan(3, 3, 2, 4, 3))),
        (13, 2, 9, 320, 128, (float("inf"), 1.0, 0.0), False, (nvfp4.Plan(3, 2, 2, 5, 3), nvfp4.Plan(2, 2, 1, 3, 3))),
        (
            16,
            2,
            3,
            320,
            128,
            (2.0, 1.0, 0.0),
            True,
            (nvfp4.Plan(3, 2, 2, 5, 3), nvfp4.Plan(2, 2, 1, 3, 3)),
        ),  # experts read twice
    ],
)
def test_experts(
    build, tokens: int, top_k: int, experts: int, dim: int, wide: int, gate: tuple[float, ...], twice: bool, cuts
) -> None:
    """Of unequal popularity; one token's choice may name an expert twice."""
    x = (3 * torch.randn(tokens, dim, generator=rng())).to(torch.bfloat16)
    chosen = torch.rand(tokens, experts, generator=rng(1)).argsort(1)[:, :top_k].int().contiguous()
    if twice:
        chosen[0, 1] = chosen[0, 0]
    gains = torch.rand(tokens, top_k, generator=rng(2))
    gate_up = random_weight((experts, 2 * wide, dim), "cpu", rng(3))
    down = random_weight((experts, dim, wide), "cpu", rng(4))
    sizes, tensors = (tokens, 2 * wide, dim, experts, top_k), [x, *gate_up, None, chosen, gains]
    hidden = run(build, nvfp4.GATE_UP, tensors, sizes, tokens * top_k * wide, cuts[0], gate)
    sizes, tensors = (tokens, dim, wide, experts, top_k), [hidden, *down, None, chosen, gains]
    got = run(build, nvfp4.DOWN, tensors, sizes, tokens * dim, cuts[1])
    check(got.view(tokens, dim), nvfp4_experts(x.float(), chosen, gains, *gate_up, *down, *gate))


def run_one(
    build,
    mode: int,
    tensors,
    sizes,
    blocks: int,
    *,
    groups: int = 1,
    gate: tuple[float, ...] = nvfp4_one.NO_GATE,
    depth: int = 4,
) -> Tensor:
    """One mode of `nvfp4_one.cu` over `blocks` blocks, two row tiles at a time."""
    tokens, n, k, _, top_k = sizes
    each = -(-n // nvfp4_one.ROWS) * (top_k if mode == nvfp4_one.GATE_UP else 1)
    inner = top_k if mode == nvfp4_one.DOWN else 1
    rows = groups if mode == nvfp4_one.LINEAR else tokens
    slices = k // nvfp4_one.SLICE * inner
    cut = nvfp4_one.plan(rows * each, slices, inner, each, blocks, H200.shared)
    assert cut is not None
    half, warps = int(tensors[0].dtype == torch.float16), nvfp4_one.WARPS
    program = build(ONE=1, HALF=half, MODE=mode, WARPS=warps, DEPTH=depth, PACE=nvfp4_one.PACE)
    numbers = tokens * (groups * n if mode == nvfp4_one.LINEAR else top_k * n // 2 if mode == nvfp4_one.GATE_UP else n)
    options = {"across": min(2, cut.round), "hold": cut.hold, "span": cut.span, "gate": gate}
    return launch(program, tensors, sizes, numbers, (blocks, 1, 1), (warps + 1) * 32, **options)


@pytest.mark.parametrize(
    ("groups", "n", "k", "dtype", "blocks"),
    [
        (1, 100, 512, torch.bfloat16, 2),  # rows beyond the last; two slices for sixteen warps
        (1, 16, 256, torch.float16, 3),  # one unit
        (3, 32, 768, torch.bfloat16, 2),
        (1, 64, 2304, torch.bfloat16, 1),  # nine slices: sixteen warps begin in different tiles
    ],
)
def test_linear_of_one_token(build, groups: int, n: int, k: int, dtype: torch.dtype, blocks: int) -> None:
    """Also where columns differ in size by 2^30: a power of two for every 256 of them keeps the small."""
    x = torch.randn(1, groups, k, generator=rng())
    x[..., : k // 2] *= 2.0**-14 if dtype == torch.float16 else 2.0**-30
    x = x.to(dtype)
    weight = random_weight((groups, n, k), "cpu", rng(1))
    bias = torch.randn(n, generator=rng(2)) if groups == 1 else None
    got = run_one(build, nvfp4_one.LINEAR, [x, *weight, bias, None, None], (1, n, k, groups, 0), blocks, groups=groups)
    wanted = nvfp4_grouped_linear(x.float(), *weight)
    check(got.view(1, groups, n), wanted if bias is None else wanted + bias)
    x[..., k // 2 :] = 0
    got = run_one(build, nvfp4_one.LINEAR, [x, *weight, None, None, None], (1, n, k, groups, 0), blocks, groups=groups)
    if k > nvfp4_one.SLICE:
        check(got.view(1, groups, n) * 2.0**14, nvfp4_grouped_linear(x.float(), *weight) * 2.0**14)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(build, value: float) -> None:
    x = torch.randn(1, 1, 512, generator=rng()).to(torch.bfloat16)
    x[0, 0, 300] = value
    tensors = [x, *random_weight((1, 32, 512), "cpu", rng(1)), None, None, None]
    assert run_one(build, nvfp4_one.LINEAR, tensors, (1, 32, 512, 1, 0), 2).isnan().all()


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "dim", "wide", "blocks", "twice"),
    [
        (1, 6, 16, 256, 256, 5, False),
        (1, 3, 4, 512, 256, 2, True),
        (1, 1, 2, 256, 512, 132, False),
        (4, 2, 8, 256, 256, 3, False),  # blocks with several tokens
        (5, 3, 6, 256, 512, 9, True),
    ],
)
def test_experts_of_few_tokens(
    build, tokens: int, top_k: int, experts: int, dim: int, wide: int, blocks: int, twice: bool
) -> None:
    x = (3 * torch.randn(tokens, dim, generator=rng())).to(torch.bfloat16)
    chosen = torch.rand(tokens, experts, generator=rng(1)).argsort(1)[:, :top_k].int().contiguous()
    if twice:
        chosen[0, 1] = chosen[0, 0]
    gains, gate = torch.rand(tokens, top_k, generator=rng(2)), (2.0, 1.702, 1.0) if twice else (2.0, 1.0, 0.0)
    gate_up = random_weight((experts, 2 * wide, dim), "cpu", rng(3))
    down = random_weight((experts, dim, wide), "cpu", rng(4))
    tensors, sizes = [x, *gate_up, None, chosen, gains], (tokens, 2 * wide, dim, experts, top_k)
    hidden = run_one(build, nvfp4_one.GATE_UP, tensors, sizes, blocks, gate=gate, depth=2)
    tensors, sizes = [hidden, *down, None, chosen, gains], (tokens, dim, wide, experts, top_k)
    got = run_one(build, nvfp4_one.DOWN, tensors, sizes, blocks)
    check(got.view(tokens, dim), nvfp4_experts(x.float(), chosen, gains, *gate_up, *down, *gate))


@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (14336, 4096), (16, 256), (129280, 7168), (1536, 1024)])
def test_a_cut_of_one_token_covers_its_shape(n: int, k: int) -> None:
    cut = nvfp4_one.linear_plan(n, k, 1, H200)
    assert cut is not None
    assert cut.blocks * cut.hold >= -(-n // nvfp4_one.ROWS)
    assert nvfp4_one.linear_plan(n, k + 64, 1, H200) is None


@pytest.mark.parametrize(("dim", "wide"), [(4096, 2048), (7168, 3072)])
def test_experts_of_v4_fit(dim: int, wide: int) -> None:
    assert nvfp4_one.experts_plans(1, dim, wide, 7, H200) is not None
    assert nvfp4_one.experts_plans(1, dim, wide + 16, 7, H200) is None


@pytest.mark.parametrize("depths", [nvfp4.DEPTHS, nvfp4.LINEAR_DEPTHS])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (14336, 4096), (16, 64), (129280, 7168), (1536, 576)])
@pytest.mark.parametrize("sums", [512, 1024, nvfp4.sums(nvfp4.DOWN, together=True)])
def test_a_cut_covers_its_shape_and_fits(n: int, k: int, depths: tuple[int, ...], sums: int) -> None:
    row_tiles, slices = -(-n // nvfp4.ROWS), -(-k // nvfp4.SLICE)
    cut = nvfp4.plan(row_tiles, slices, sums, 132, depths, H200.shared - nvfp4.ROUTES)
    assert cut.shared(sums) <= H200.shared - nvfp4.ROUTES
    assert cut.blocks <= row_tiles
    assert cut.across <= slices
    assert 1 <= cut.down <= cut.hold
    assert cut.across * cut.down <= nvfp4.WARPS
