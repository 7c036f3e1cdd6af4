"""The CUDA kernels of FP8 linears on a CPU: their own source, each thread a fiber (`nvfp4_on_cpu`).

What this proves: every index, mask and copy, the order of waiting, and the bits of decoding. What it cannot: that the
GPU's instructions do what `nvfp4_common.cuh` says; tests/ops/test_fp8_gpu.py does.
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

from h200 import H200
from h200 import PLAIN as PLAIN_CARD
from on_cpu import compile_run, host_lines
from onegraph.ops.cuda import build as cuda_build
from onegraph.ops.cuda import fp8, mxfp8, stream
from onegraph.ops.cuda.build import Device
from onegraph.ops.cuda.stream import DOWN, GATE_UP, LINEAR, Tiling, Variant
from onegraph.ops.fp8 import fp8_dequantize, fp8_experts, fp8_grouped_linear, random_weight

HERE = Path(__file__).parent
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}
BLOCKS = {"128": (128, 128), "32": (32, 32), "mx": (1, 32), "rows": (1, 0), "bytes": (1, 32)}  # "bytes": MXFP8
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    cuda = fp8.STREAM.source.path.parent
    sources = (cuda / name for name in ("fp8.cu", "fp8_dequantize.cu", "routes.cuh"))
    for file in (
        *sources,
        cuda / "mxfp8.cu",
        cuda / "e8m0.cuh",
        *cuda.glob("fp8_*.cuh"),
        *cuda.glob("stream*.cuh"),
        HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh",
        HERE / "fp8_on_cpu" / "run.cpp",
    ):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def build(folder: Path):
    @cache
    def made(**defines: int) -> Path:
        words = [f"-D{name}={value}" for name, value in defines.items()]
        program = folder / "-".join(["run", *map(str, defines.values())])
        compile_run(folder, words, program)
        return program

    return made


def weight_of(shape: tuple[int, ...], kind: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scale as a kernel reads it, scale as the ops of FP8 do."""
    codes, scale = random_weight(shape, *BLOCKS[kind], "cpu", rng(seed))
    if kind != "bytes":
        return codes, scale, scale
    exponents = scale.log2().round()
    return codes, (exponents + 127).to(torch.uint8), 2.0**exponents


def form_of(kind: str, scaled: fp8.Blocks) -> dict[str, int]:
    return {"BYTE_SCALES": 1} if kind == "bytes" else {"GRAIN": scaled.grain}


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


def run(build, variant: Variant, tensors, sizes, kind: str, y, cut: Tiling, **more) -> Tensor:
    scaled = fp8.blocks(*BLOCKS[kind], sizes[2])
    assert scaled is not None
    half = int(tensors[0].dtype == torch.float16)
    program = build(**variant.defines(cut.depth), HALF=half, **form_of(kind, scaled))
    grid = cut.blocks, sizes[3] if variant.mode == LINEAR else 1, -(-sizes[0] // variant.tokens)
    threads = cut.across * cut.down * 32
    return launch(program, tensors, sizes, scaled, y, grid, threads, across=cut.across, hold=cut.hold, **more)


def check(got: Tensor, wanted: Tensor) -> None:
    error = (got.float() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[got.dtype], error


NARROW = {"slice": fp8.SLICE, "warps": fp8.MANY}
PLAIN, TWO, FOUR = (Variant(LINEAR, tiles, **NARROW) for tiles in (1, 2, 4))
RING, RING_FOUR = (Variant(LINEAR, tiles, ring_x=True, **NARROW) for tiles in (2, 4))
LATER = Variant(LINEAR, early=1, **NARROW)
BROAD, BROAD_RING = (Variant(LINEAR, ring_x=ring, warps=fp8.MANY) for ring in (False, True))


@pytest.mark.parametrize(
    ("kind", "tokens", "groups", "n", "k", "dtype", "cut", "variant"),
    [
        ("128", 1, 1, 100, 512, torch.bfloat16, Tiling(2, 2, 2, 2, 2), PLAIN),  # rows beyond the last; two rounds
        ("128", 3, 1, 200, 208, torch.bfloat16, Tiling(1, 2, 1, 2, 2), PLAIN),  # a slice that ends early
        ("128", 2, 1, 144, 912, torch.float16, Tiling(2, 4, 2, 3, 2), PLAIN),  # two turns, the second not for all
        ("128", 5, 3, 48, 128, torch.bfloat16, Tiling(2, 1, 4, 4, 2), PLAIN),  # groups; warps without a tile
        ("128", 17, 1, 40, 416, torch.float16, Tiling(2, 2, 3, 4, 2), TWO),  # two passes of tokens
        ("128", 30, 1, 40, 416, torch.bfloat16, Tiling(2, 2, 1, 2, 2), FOUR),
        ("32", 1, 1, 72, 336, torch.bfloat16, Tiling(2, 2, 2, 2, 3), PLAIN),
        ("32", 12, 2, 33, 96, torch.float16, Tiling(2, 1, 2, 2, 2), TWO),
        ("mx", 2, 1, 50, 304, torch.bfloat16, Tiling(1, 3, 1, 2, 3), PLAIN),
        ("rows", 1, 1, 35, 16, torch.float16, Tiling(3, 1, 1, 1, 2), PLAIN),
        ("rows", 4, 2, 31, 400, torch.bfloat16, Tiling(1, 4, 2, 2, 2), PLAIN),
        ("128", 3, 1, 200, 720, torch.bfloat16, Tiling(2, 2, 2, 2, 2), BROAD),
        ("32", 2, 1, 40, 528, torch.float16, Tiling(1, 3, 1, 2, 2), BROAD),
        ("128", 9, 1, 100, 912, torch.bfloat16, Tiling(3, 2, 1, 2, 2), RING),  # two rounds, turns not for all
        (
            "rows",
            20,
            2,
            33,
            336,
            torch.bfloat16,
            Tiling(2, 3, 2, 2, 2),
            RING,
        ),  # groups, passes, a warp without a tile
        ("mx", 33, 1, 48, 272, torch.bfloat16, Tiling(1, 2, 2, 3, 3), RING_FOUR),
        ("128", 3, 1, 50, 720, torch.bfloat16, Tiling(2, 2, 1, 2, 2), BROAD_RING),
        ("128", 2, 2, 49, 400, torch.bfloat16, Tiling(2, 3, 3, 3, 3), LATER),  # a warp without a tile
        ("bytes", 3, 1, 100, 896, torch.bfloat16, Tiling(2, 2, 2, 2, 2), PLAIN),  # two rounds, turns not for all
        ("bytes", 20, 2, 33, 384, torch.float16, Tiling(2, 3, 2, 2, 2), RING),
        ("bytes", 2, 1, 50, 640, torch.bfloat16, Tiling(2, 2, 1, 2, 2), BROAD_RING),  # a slice that ends early
    ],
)
def test_linear(build, kind: str, tokens: int, groups: int, n: int, k: int, dtype, cut, variant) -> None:
    x = torch.randn(tokens, groups, k, generator=rng()).to(dtype)
    codes, scale, wide_scale = weight_of((groups, n, k), kind, 1)
    bias = torch.randn(n, generator=rng(2)) if groups == 1 else None
    tensors, sizes = [x, codes, scale, bias, None, None], (tokens, n, k, groups, 0)
    wanted = fp8_grouped_linear(x.float(), codes, wide_scale, *BLOCKS[kind])
    wanted = wanted if bias is None else wanted + bias
    check(run(build, variant, tensors, sizes, kind, ((tokens, groups, n), dtype), cut), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_and_its_place(build, dtype: torch.dtype) -> None:
    """Rows of the identity for x give the weight itself: each code, subnormals and signs too, in its column."""
    n, k = 64, 64
    codes = (torch.arange(n * k) * 37 % 256).to(torch.uint8).view(1, n, k)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    scale = 2.0 ** torch.randint(-3, 3, (1, n), generator=rng()).float()
    x = torch.eye(k, dtype=dtype).view(k, 1, k)
    tensors, sizes = [x, codes, scale, None, None, None], (k, n, k, 1, 0)
    got = run(build, TWO, tensors, sizes, "rows", ((k, 1, n), torch.float32), Tiling(2, 1, 2, 2, 2))
    assert torch.equal(got.view(k, n).T, fp8_dequantize(codes, scale, 1, 0)[0])


def test_codes_without_an_instruction_for_them(folder: Path, tmp_path: Path) -> None:
    """`e4m3.cuh`, of cards before 8.9: every code, bit for bit, what is not a number too."""
    for file in (folder / "nvfp4_common.cuh", fp8.STREAM.source.path.with_name("e4m3.cuh")):
        shutil.copy(file, tmp_path)
    (tmp_path / "run.cpp").write_text(
        '#define e4m3_to_half theirs\n#include "nvfp4_common.cuh"\n#undef e4m3_to_half\n'
        '#define multiply_f16 multiply\nstatic void thread() {}\n#include "e4m3.cuh"\n'
        'int main() { for (u32 i = 0; i < 256; i += 2) printf("%u\\n", e4m3_to_half((i + 1) << 8 | i)); }\n'
    )
    compile_run(tmp_path, ["-DHALF=1"], tmp_path / "run")
    words = subprocess.run([tmp_path / "run"], capture_output=True, text=True, check=True).stdout.split()
    got = torch.tensor([int(word) for word in words]).to(torch.uint32).view(torch.float16)
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int16), wanted.nan_to_num().view(torch.int16))


@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "experts", "dim", "wide", "gate", "twice", "cuts"),
    [
        ("128", 1, 6, 16, 256, 128, (10.0, 1.0, 0.0), False, (Tiling(5, 2, 4, 6, 4), Tiling(5, 4, 2, 4, 4))),
        ("128", 1, 3, 4, 144, 80, (2.0, 1.702, 1.0), True, (Tiling(3, 2, 3, 3, 4), Tiling(2, 2, 2, 3, 4))),
        ("32", 3, 2, 4, 128, 64, (1.0, 1.0, 0.0), True, (Tiling(3, 1, 3, 3, 4), Tiling(2, 2, 2, 3, 4))),
        ("mx", 18, 3, 6, 192, 128, (2.0, 1.702, 1.0), True, (Tiling(4, 1, 3, 4, 3), Tiling(3, 3, 2, 4, 3))),
        ("128", 13, 2, 9, 320, 128, (torch.inf, 1.0, 0.0), False, (Tiling(3, 2, 2, 5, 3), Tiling(2, 2, 1, 3, 3))),
        ("bytes", 9, 2, 3, 256, 128, (2.0, 1.702, 1.0), True, (Tiling(3, 2, 2, 5, 3), Tiling(2, 2, 1, 3, 3))),
        ("bytes", 2, 2, 4, 384, 128, (2.0, 1.0, 0.0), True, (Tiling(3, 1, 3, 3, 4), Tiling(2, 2, 2, 3, 4))),
        ("rows", 16, 2, 3, 320, 208, (2.0, 1.0, 0.0), True, (Tiling(3, 2, 2, 5, 3), Tiling(2, 2, 1, 3, 3))),
    ],
)
def test_experts(build, kind: str, tokens: int, top_k: int, experts: int, dim: int, wide: int, gate, twice, cuts):
    """Of unequal popularity; one token's choice may name an expert twice; of 16 tokens some are read twice."""
    x = (3 * torch.randn(tokens, dim, generator=rng())).to(torch.bfloat16)
    chosen = torch.rand(tokens, experts, generator=rng(1)).argsort(1)[:, :top_k].int().contiguous()
    if twice:
        chosen[0, 1] = chosen[0, 0]
    gains = torch.rand(tokens, top_k, generator=rng(2))
    *gate_up, wide_gate_up = weight_of((experts, 2 * wide, dim), kind, 3)
    *down, wide_down = weight_of((experts, dim, wide), kind, 4)
    gate_up_variant, down_variant = (
        Variant(mode, together=tokens > stream.FEW_PASS, **NARROW) for mode in (GATE_UP, DOWN)
    )
    sizes, tensors = (tokens, 2 * wide, dim, experts, top_k), [x, *gate_up, None, chosen, gains]
    y = (tokens * top_k, wide), x.dtype
    hidden = run(build, gate_up_variant, tensors, sizes, kind, y, cuts[0], gate=gate)
    sizes, tensors = (tokens, dim, wide, experts, top_k), [hidden, *down, None, chosen, gains]
    got = run(build, down_variant, tensors, sizes, kind, ((tokens, dim), x.dtype), cuts[1])
    layers = gate_up[0], wide_gate_up, down[0], wide_down
    check(got, fp8_experts(x.float(), chosen, gains, *layers, *BLOCKS[kind], *gate))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "shape"), [("128", (2, 130, 272)), ("32", (1, 40, 80)), ("rows", (3, 5, 16)), ("bytes", (2, 7, 80))]
)
def test_dequantize(build, kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    *weight, wide_scale = weight_of(shape, kind, 0)
    scaled = fp8.blocks(*BLOCKS[kind], shape[2])
    sizes, program = (0, shape[1], shape[2], shape[0], 0), build(OUT=fp8.OUT[dtype], BYTE_SCALES=int(kind == "bytes"))
    got = launch(program, [None, *weight, None, None, None], sizes, scaled, (shape, dtype), (2, 1, 1), 256)
    assert torch.equal(got, fp8_dequantize(weight[0], wide_scale, *BLOCKS[kind]).to(dtype))


def test_scales_of_a_byte_are_powers_of_two(build) -> None:
    """Each byte of E8M0 but the one that is no number, the subnormal one too, to the bit."""
    codes = torch.full((1, 255, 32), 0x38, dtype=torch.uint8)  # 1
    scale = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)
    scaled = fp8.blocks(*BLOCKS["bytes"], 32)
    program, tensors = build(OUT=2, BYTE_SCALES=1), [None, codes, scale, None, None, None]
    y = (1, 255, 32), torch.float32
    got = launch(program, tensors, (0, 255, 32, 1, 0), scaled, y, (2, 1, 1), 256)
    assert torch.equal(got[0], (2.0 ** (torch.arange(255).double() - 127)).float().view(-1, 1).expand(-1, 32))


def test_from_the_op_down(folder: Path) -> None:
    """Every case of the ops through what chooses and launches the kernels."""
    launched = [line.rsplit(" ", 1) for line in host_lines(HERE / "fp8_on_cpu" / "host.py", folder)]
    assert len(launched) > 20
    assert all(count == ("2" if "fp8_experts" in name else "1") for name, count in launched)


VARIANTS = (
    PLAIN, TWO, FOUR, RING, RING_FOUR, BROAD, Variant(GATE_UP, **NARROW), Variant(DOWN, together=True, **NARROW),
)  # fmt: skip


def weight(n: int, k: int, grain: int) -> stream.Weight:
    return stream.Weight((1, n, k), {}, {}, {"GRAIN": grain})


@pytest.mark.parametrize("room", [H200.shared, 99 << 10])
@pytest.mark.parametrize("depths", [(4, 3, 2), (3, 2)])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (14336, 4096), (16, 64), (129280, 7168), (1536, 576)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cut_covers_its_shape_and_fits(n: int, k: int, depths: tuple[int, ...], variant, room: int) -> None:
    row_tiles, slices = -(-n // stream.ROWS), -(-k // variant.slice)
    for grain in (32, 128):
        tried = replace(variant, depths=depths)
        footprint = fp8.STREAM.footprint(tried, weight(n, k, grain))
        cut = stream.plan(row_tiles, slices * 3, tried, footprint, 132, room - stream.ROUTES)
        if cut is None:  # activations of 32 tokens in a small GPU's ring
            assert variant.ring_x
            continue
        assert cut.shared(footprint) <= room - stream.ROUTES
        assert cut.blocks <= row_tiles
        assert cut.across <= slices * 3
        assert 1 <= cut.down <= cut.hold
        assert cut.across * cut.down <= variant.warps[0][0]


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 64])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 14336), (14336, 4096), (16, 64), (129280, 7168), (1536, 576), (1024, 4096)]
)
@pytest.mark.parametrize("device", [H200, PLAIN_CARD], ids=["H200", "99 KB"])
def test_every_linear_of_few_tokens_fits(
    tokens: int, n: int, k: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_build, "device", lambda index: device)
    monkeypatch.setattr(cuda_build.Source, "is_portable", lambda source, index: device is not H200)
    for grain in (32, 128):
        assert fp8.STREAM.tiling(tokens, weight(n, k, grain), 0)[1] is not None
    assert mxfp8.STREAM.tiling(tokens, stream.Weight((1, n, k), {}), 0)[1] is not None


@pytest.mark.parametrize(
    ("rows", "columns", "k", "known"),
    [
        (128, 128, 4096, True), (32, 32, 48, True), (1, 32, 96, True), (1, 0, 16, True), (1, 0, 24, False),
        (1, 16, 64, False), (96, 128, 256, False), (128, 96, 256, False),
    ],
)  # fmt: skip
def test_blocks_that_the_kernels_know(rows: int, columns: int, k: int, known: bool) -> None:
    assert (fp8.blocks(rows, columns, k) is not None) == known
