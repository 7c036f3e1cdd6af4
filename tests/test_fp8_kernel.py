"""The CUDA kernels of FP8 linears on a CPU: their own source, each thread a fiber (`nvfp4_on_cpu`).

What this proves: every index, mask and copy, the order of waiting, and the bits of decoding. What it cannot: that the
GPU's instructions do what `nvfp4_common.cuh` says; tests/test_fp8_gpu.py does.
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
from onegraph.ops.cuda import fp8
from onegraph.ops.fp8 import fp8_dequantize, fp8_experts, fp8_grouped_linear, random_weight

HERE = Path(__file__).parent
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}
BLOCKS = {"128": (128, 128), "32": (32, 32), "mx": (1, 32), "rows": (1, 0)}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("fp8")
    cuda = fp8.KERNEL.path.parent
    sources = (cuda / name for name in ("fp8.cu", "fp8_dequantize.cu", "fp8_decode.cuh", "routes.cuh"))
    for file in (*sources, HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", HERE / "fp8_on_cpu" / "run.cpp"):
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
    scaled: fp8.Blocks,
    y: tuple[tuple[int, ...], torch.dtype],
    grid: tuple[int, int, int],
    threads: int,
    *,
    across: int = 0,
    hold: int = 0,
    gate: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Tensor:
    """`tensors`: x, codes, scale, bias, experts, weights; `sizes`: tokens, n, k, matrices, top_k; `y`: shape, dtype."""
    shape, dtype = y
    numbers = [0 if t is None else t.numel() for t in tensors]
    cut = scaled.row_shift, scaled.column_shift, scaled.pitch, int(dtype == torch.float32), across, hold
    counts = numbers[0], numbers[2], torch.empty(shape, dtype=dtype).nbytes, numbers[3]
    head = struct.pack("19i3f", *sizes, *cut, *grid, threads, *counts, *gate)
    given, got = program.with_suffix(".in"), program.with_suffix(".out")
    given.write_bytes(
        head + b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors if t is not None)
    )
    done = subprocess.run([program, given, got], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout)
    return torch.frombuffer(bytearray(got.read_bytes()), dtype=dtype).view(shape)


def run(build, mode: int, tensors, sizes, kind: str, y, cut: fp8.Plan, tiles: int = 1, slice: int = 128, **more):
    together = sizes[0] > 8 and mode != fp8.LINEAR
    scaled = fp8.blocks(*BLOCKS[kind], sizes[2])
    assert scaled is not None
    program = build(
        HALF=int(tensors[0].dtype == torch.float16), TILES=tiles, MODE=mode, TOGETHER=int(together), SLICE=slice,
        GRAIN=scaled.grain, DEPTH=cut.depth,
    )  # fmt: skip
    passes = -(-sizes[0] // (fp8.PASS if together else 8 * tiles))
    grid = cut.blocks, sizes[3] if mode == fp8.LINEAR else 1, passes
    threads = cut.across * cut.down * 32
    return launch(program, tensors, sizes, scaled, y, grid, threads, across=cut.across, hold=cut.hold, **more)


def check(got: Tensor, wanted: Tensor) -> None:
    error = (got.float() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[got.dtype], error


@pytest.mark.parametrize(
    ("kind", "tokens", "groups", "n", "k", "dtype", "cut", "tiles", "slice"),
    [
        ("128", 1, 1, 100, 512, torch.bfloat16, fp8.Plan(2, 2, 2, 2, 2), 1, 128),  # rows beyond the last; two rounds
        ("128", 3, 1, 200, 208, torch.bfloat16, fp8.Plan(1, 2, 1, 2, 3), 1, 128),  # a slice that ends early
        ("128", 2, 1, 144, 912, torch.float16, fp8.Plan(2, 4, 2, 3, 2), 1, 128),  # two turns, the second not for all
        ("128", 5, 3, 48, 128, torch.bfloat16, fp8.Plan(2, 1, 4, 4, 2), 1, 128),  # groups; warps without a tile
        ("128", 17, 1, 40, 416, torch.float16, fp8.Plan(2, 2, 3, 4, 2), 2, 128),  # two passes of tokens
        ("128", 30, 1, 40, 416, torch.bfloat16, fp8.Plan(2, 2, 1, 2, 2), 4, 128),
        ("32", 1, 1, 72, 336, torch.bfloat16, fp8.Plan(2, 2, 2, 2, 3), 1, 128),
        ("32", 12, 2, 33, 96, torch.float16, fp8.Plan(2, 1, 2, 2, 2), 2, 128),
        ("mx", 2, 1, 50, 304, torch.bfloat16, fp8.Plan(1, 3, 1, 2, 2), 1, 128),
        ("rows", 1, 1, 35, 16, torch.float16, fp8.Plan(3, 1, 1, 1, 4), 1, 128),
        ("rows", 4, 2, 31, 400, torch.bfloat16, fp8.Plan(1, 4, 2, 2, 2), 1, 128),
        ("128", 3, 1, 200, 720, torch.bfloat16, fp8.Plan(2, 2, 2, 2, 2), 1, 256),
        ("32", 2, 1, 40, 528, torch.float16, fp8.Plan(1, 3, 1, 2, 2), 1, 256),
    ],
)
def test_linear(build, kind: str, tokens: int, groups: int, n: int, k: int, dtype, cut, tiles: int, slice: int) -> None:
    x = torch.randn(tokens, groups, k, generator=rng()).to(dtype)
    codes, scale = random_weight((groups, n, k), *BLOCKS[kind], "cpu", rng(1))
    bias = torch.randn(n, generator=rng(2)) if groups == 1 else None
    tensors, sizes = [x, codes, scale, bias, None, None], (tokens, n, k, groups, 0)
    wanted = fp8_grouped_linear(x.float(), codes, scale, *BLOCKS[kind])
    for out in (dtype, torch.float32):
        got = run(build, fp8.LINEAR, tensors, sizes, kind, ((tokens, groups, n), out), cut, tiles, slice)
        check(got, wanted if bias is None else wanted + bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_and_its_place(build, dtype: torch.dtype) -> None:
    """Rows of the identity for x give the weight itself: each code, subnormals and signs too, in its column."""
    n, k = 64, 64
    codes = (torch.arange(n * k) * 37 % 256).to(torch.uint8).view(1, n, k)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    scale = 2.0 ** torch.randint(-3, 3, (1, n), generator=rng()).float()
    x = torch.eye(k, dtype=dtype).view(k, 1, k)
    tensors, sizes = [x, codes, scale, None, None, None], (k, n, k, 1, 0)
    got = run(build, fp8.LINEAR, tensors, sizes, "rows", ((k, 1, n), torch.float32), fp8.Plan(2, 1, 2, 2, 2), 2)
    assert torch.equal(got.view(k, n).T, fp8_dequantize(codes, scale, 1, 0)[0])


@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "experts", "dim", "wide", "gate", "twice", "cuts"),
    [
        ("128", 1, 6, 16, 256, 128, (10.0, 1.0, 0.0), False, (fp8.Plan(5, 2, 4, 6, 4), fp8.Plan(5, 4, 2, 4, 4))),
        ("128", 1, 3, 4, 144, 80, (2.0, 1.702, 1.0), True, (fp8.Plan(3, 2, 3, 3, 2), fp8.Plan(2, 2, 2, 3, 2))),
        ("32", 3, 2, 4, 128, 64, (1.0, 1.0, 0.0), True, (fp8.Plan(3, 1, 3, 3, 4), fp8.Plan(2, 2, 2, 3, 4))),
        ("mx", 18, 3, 6, 192, 128, (2.0, 1.702, 1.0), True, (fp8.Plan(4, 1, 3, 4, 3), fp8.Plan(3, 3, 2, 4, 3))),
        ("128", 13, 2, 9, 320, 128, (torch.inf, 1.0, 0.0), False, (fp8.Plan(3, 2, 2, 5, 3), fp8.Plan(2, 2, 1, 3, 3))),
        ("rows", 16, 2, 3, 320, 208, (2.0, 1.0, 0.0), True, (fp8.Plan(3, 2, 2, 5, 3), fp8.Plan(2, 2, 1, 3, 3))),
    ],
)
def test_experts(build, kind: str, tokens: int, top_k: int, experts: int, dim: int, wide: int, gate, twice, cuts):
    """Of unequal popularity; one token's choice may name an expert twice; of 16 tokens some are read twice."""
    x = (3 * torch.randn(tokens, dim, generator=rng())).to(torch.bfloat16)
    chosen = torch.rand(tokens, experts, generator=rng(1)).argsort(1)[:, :top_k].int().contiguous()
    if twice:
        chosen[0, 1] = chosen[0, 0]
    gains = torch.rand(tokens, top_k, generator=rng(2))
    gate_up = random_weight((experts, 2 * wide, dim), *BLOCKS[kind], "cpu", rng(3))
    down = random_weight((experts, dim, wide), *BLOCKS[kind], "cpu", rng(4))
    sizes, tensors = (tokens, 2 * wide, dim, experts, top_k), [x, *gate_up, None, chosen, gains]
    y = (tokens * top_k, wide), x.dtype
    hidden = run(build, fp8.GATE_UP, tensors, sizes, kind, y, cuts[0], gate=gate)
    sizes, tensors = (tokens, dim, wide, experts, top_k), [hidden, *down, None, chosen, gains]
    got = run(build, fp8.DOWN, tensors, sizes, kind, ((tokens, dim), x.dtype), cuts[1])
    check(got, fp8_experts(x.float(), chosen, gains, *gate_up, *down, *BLOCKS[kind], *gate))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("kind", "shape"), [("128", (2, 130, 272)), ("32", (1, 40, 80)), ("rows", (3, 5, 16))])
def test_dequantize(build, kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight = random_weight(shape, *BLOCKS[kind], "cpu", rng())
    scaled = fp8.blocks(*BLOCKS[kind], shape[2])
    sizes = 0, shape[1], shape[2], shape[0], 0
    got = launch(
        build(OUT=fp8.OUT[dtype]), [None, *weight, None, None, None], sizes, scaled, (shape, dtype), (2, 1, 1), 256
    )
    assert torch.equal(got, fp8_dequantize(*weight, *BLOCKS[kind]).to(dtype))


@pytest.mark.parametrize("room", [H200.shared, 99 << 10])
@pytest.mark.parametrize("depths", [fp8.DEPTHS, fp8.LINEAR_DEPTHS])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (14336, 4096), (16, 64), (129280, 7168), (1536, 576)])
@pytest.mark.parametrize("sums", [512, 1024, 2048, fp8.sums(fp8.DOWN, together=True)])
def test_a_cut_covers_its_shape_and_fits(n: int, k: int, depths: tuple[int, ...], sums: int, room: int) -> None:
    room, row_tiles, slices = room - fp8.ROUTES, -(-n // fp8.ROWS), -(-k // fp8.SLICE)
    for grain in (32, 128):
        slot = fp8.slot_bytes(grain)
        cut = fp8.plan(row_tiles, slices, slot, sums, 132, depths, room)
        assert cut is not None
        assert cut.shared(slot, sums) <= room
        assert cut.blocks <= row_tiles
        assert cut.across <= slices
        assert 1 <= cut.down <= cut.hold
        assert cut.across * cut.down <= fp8.WARPS


@pytest.mark.parametrize(
    ("rows", "columns", "k", "known"),
    [
        (128, 128, 4096, True), (32, 32, 48, True), (1, 32, 96, True), (1, 0, 16, True), (1, 0, 24, False),
        (1, 16, 64, False), (96, 128, 256, False), (128, 96, 256, False),
    ],
)  # fmt: skip
def test_blocks_that_the_kernels_know(rows: int, columns: int, k: int, known: bool) -> None:
    assert (fp8.blocks(rows, columns, k) is not None) == known
