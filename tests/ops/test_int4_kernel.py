"""The CUDA kernels of INT4 linears on a CPU: their own source, each thread a fiber (`int4_on_cpu`, which stands on
`nvfp4_on_cpu`). What that proves and what not: `test_nvfp4_kernel.py`."""

import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h200 import H200, PLAIN
from on_cpu import compile_run
from onegraph.ops.cuda import int4, stream
from onegraph.ops.cuda.build import Device
from onegraph.ops.cuda.stream import Tiling
from onegraph.ops.int4 import int4_linear, random_order, random_weight

HERE = Path(__file__).parent
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 5e-5}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("int4")
    sources = int4.ONE.path, int4.BATCH.path
    for file in (*sources, sources[0].with_name("int4_common.cuh"), *(HERE / "int4_on_cpu").iterdir()):
        shutil.copy(file, path)
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", path / "cpu.cuh")

    @cache
    def made(**defines: int) -> Path:
        words = [f"-D{name}={value}" for name, value in defines.items()]
        program = path / "-".join(["run", *map(str, defines.values())])
        compile_run(path, words, program)
        return program

    return made


def run(build, x: Tensor, weight, order, bias, cut: int4.One | Tiling, *, wide: bool = False) -> Tensor:
    codes, scale, zero = weight
    (tokens, k), n, groups = x.shape, codes.shape[0], scale.shape[1]
    shift = int4.shift_of(k, groups)
    assert shift is not None
    defines = int4._kind(x.dtype, scale, shift) | {"FLOAT32": int(wide), "DEPTH": cut.depth}
    if isinstance(cut, int4.One):
        program = build(ONE=1, **defines, WARPS=stream.WARPS, PACE=int4.PACE)
        how = cut.hold, cut.round, cut.blocks, 1, (stream.WARPS + 1) * 32
    else:
        tiles = 1 if tokens <= 8 else 2
        program = build(**defines, TILES=tiles)
        how = cut.across, cut.hold, cut.blocks, -(-tokens // (8 * tiles)), cut.across * cut.down * 32
    head = struct.pack(
        "16i", tokens, n, k, groups, shift, *how, int(order is not None), int(bias is not None), *[0] * 4
    )
    given, got = program.with_suffix(".in"), program.with_suffix(".out")
    tensors = [x, codes, scale, zero, order, bias]
    given.write_bytes(
        head + b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors if t is not None)
    )
    done = subprocess.run([program, given, got], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout)
    return torch.frombuffer(bytearray(got.read_bytes()), dtype=torch.float32 if wide else x.dtype).view(tokens, n)


def check(got: Tensor, wanted: Tensor) -> None:
    error = (got.float() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[got.dtype], error


def one(tokens: int, n: int, k: int, groups: int, blocks: int, *, round: int = 2, depth: int = 4) -> int4.One:
    tiles = -(-n // 16)
    hold = -(-tiles // blocks)
    return int4.One(blocks, hold, min(round, hold), depth, tokens, 0)


@pytest.mark.parametrize(
    ("tokens", "n", "k", "columns", "dtype", "blocks", "choices"),
    [
        (1, 100, 512, 128, torch.bfloat16, 2, {"bias"}),  # rows beyond the last; two slices for sixteen warps
        (1, 16, 256, 256, torch.float16, 3, {"order"}),  # one unit; blocks without any
        (2, 48, 768, 64, torch.bfloat16, 1, {"bf16 scales"}),
        (3, 40, 512, 32, torch.float16, 2, {"order", "bias"}),
        (4, 64, 2304, 128, torch.bfloat16, 1, {"wide"}),  # nine slices: sixteen warps begin in different tiles
        (4, 33, 1280, 32, torch.bfloat16, 2, {"shallow", "wide", "order"}),
        (1, 80, 4096, 512, torch.float16, 1, {"bias", "shallow"}),
    ],
)
def test_few_tokens(
    build, tokens: int, n: int, k: int, columns: int, dtype: torch.dtype, blocks: int, choices: set[str]
) -> None:
    """Also where columns differ in size by 2^30: a power of two for every 256 of them keeps the small."""
    x = torch.randn(tokens, k, generator=rng())
    x[:, : k // 2] *= 2.0**-14 if dtype == torch.float16 else 2.0**-30
    x = x.to(dtype)
    weight = random_weight(n, k, columns, "cpu", rng(1), torch.bfloat16 if "bf16 scales" in choices else torch.float16)
    order = random_order(k, "cpu", rng(2)) if "order" in choices else None
    bias = torch.randn(n, generator=rng(3)) if "bias" in choices else None
    cut = one(tokens, n, k, k // columns, blocks, depth=2 if "shallow" in choices else 4)
    wide = "wide" in choices
    check(run(build, x, weight, order, bias, cut, wide=wide), int4_linear(x.float(), *weight, order, bias, True))
    if order is None and k > 256:
        x[:, k // 2 :] = 0
        got = run(build, x, weight, None, None, cut, wide=wide)
        check(got * 2.0**14, int4_linear(x.float(), *weight, None, None, True) * 2.0**14)


def test_zeros_cost_no_precision(build) -> None:
    """Codes that all equal their zeros give 0, and x that is the same everywhere the exact sum, in integers."""
    codes, scale, zero = random_weight(32, 512, 128, "cpu", rng())
    x = torch.ones(1, 512).bfloat16()
    got = run(build, x, (codes, scale, zero), None, None, one(1, 32, 512, 4, 1), wide=True)
    torch.testing.assert_close(got, int4_linear(x.float(), codes, scale, zero, None, None, True), rtol=1e-6, atol=1e-6)
    nibbles = zero.repeat_interleave(64, 1)
    x = (1000 * torch.randn(1, 512, generator=rng(1))).bfloat16()
    got = run(build, x, (nibbles | nibbles << 4, scale, zero), None, None, one(1, 32, 512, 4, 1))
    assert not got.any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(build, value: float) -> None:
    x = torch.randn(2, 512, generator=rng()).bfloat16()
    x[1, 300] = value
    got = run(build, x, random_weight(32, 512, 128, "cpu", rng(1)), None, None, one(2, 32, 512, 4, 2))
    assert got[1].isnan().all()
    assert got[0].isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "n", "k", "columns", "dtype", "cut", "choices"),
    [
        (5, 100, 512, 128, torch.bfloat16, Tiling(2, 2, 2, 2, 2), {"bias"}),  # rows beyond the last; two rounds
        (3, 48, 576, 64, torch.bfloat16, Tiling(1, 3, 1, 2, 2), {"wide"}),  # a slice that ends early
        (8, 64, 1792, 256, torch.float16, Tiling(2, 4, 2, 2, 2), set()),  # two turns, the second not for all
        (9, 33, 320, 32, torch.bfloat16, Tiling(2, 2, 1, 2, 2), {"bf16 scales", "bias"}),
        (17, 40, 832, 832, torch.float16, Tiling(2, 2, 3, 4, 2), {"bias"}),  # two passes; one group of all
        (16, 80, 384, 128, torch.bfloat16, Tiling(1, 2, 2, 4, 2), {"wide"}),
        (12, 48, 512, 64, torch.float16, Tiling(1, 1, 4, 4, 2), set()),  # warps without a tile
    ],
)
def test_more_tokens(
    build, tokens: int, n: int, k: int, columns: int, dtype: torch.dtype, cut: Tiling, choices: set[str]
) -> None:
    x = torch.randn(tokens, k, generator=rng()).to(dtype)
    weight = random_weight(n, k, columns, "cpu", rng(1), torch.bfloat16 if "bf16 scales" in choices else torch.float16)
    bias = torch.randn(n, generator=rng(2)) if "bias" in choices else None
    got = run(build, x, weight, None, bias, cut, wide="wide" in choices)
    check(got, int4_linear(x.float(), *weight, None, bias, True))


# --------------------------------------------------------------------------------------------------------------- plans

SHAPES = [(4096, 14336), (14336, 4096), (16, 256), (128256, 4096), (8192, 28672), (1536, 1024), (4096, 11008)]


@pytest.mark.parametrize("columns", [32, 64, 128, -1])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_cut_for_few_tokens_covers_its_shape_and_fits(n: int, k: int, tokens: int, columns: int) -> None:
    groups = 1 if columns == -1 else k // columns
    cut = int4.one_plan(tokens, n, k, groups, H200)
    if cut is None:  # scales of many rows in small groups, which all lie in shared memory
        assert -(-(n // 16) // H200.sms) * groups * 64 > 128 << 10
        return
    assert cut.shared <= H200.shared
    assert cut.blocks * cut.hold >= -(-n // stream.ROWS)
    assert 1 <= cut.round <= cut.hold
    assert 1 <= cut.tokens <= tokens
    if k <= 4096 and n < 128256:
        assert cut.tokens == tokens
        assert cut.depth >= 4
    assert int4.one_plan(tokens, n, k + 64, groups, H200) is None


@pytest.mark.parametrize("columns", [32, 64, 128, -1])
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (96, 64), (129280, 7168)])
@pytest.mark.parametrize("device", [H200, PLAIN], ids=["H200", "99 KB"])
def test_a_cut_for_more_tokens_covers_its_shape_and_fits(
    n: int, k: int, tiles: int, columns: int, device: Device
) -> None:
    groups = 1 if columns == -1 or k < columns else k // columns
    cut = int4.batch_plan(tiles, n, k, groups, device, device is PLAIN)
    assert cut is not None
    assert cut.shared(int4.footprint(tiles, groups)) <= device.shared
    assert cut.blocks <= -(-n // stream.ROWS)
    assert cut.across <= -(-k // int4.SLICE)
    assert 1 <= cut.down <= cut.hold
    assert cut.across * cut.down <= (stream.WARPS if device is H200 else 8 if columns == 32 and groups > 1 else 12)
    assert int4.batch_plan(tiles, n, k + 32, groups, H200) is None


def test_groups_are_found_by_a_shift() -> None:
    for k, groups, shift in ((256, 1, 31), (256, 2, 7), (256, 8, 5), (4096, 16, 8), (192, 2, None), (256, 16, None)):
        assert int4.shift_of(k, groups) == shift
    assert [int4.group_of(shift) for shift in (5, 6, 7, 9, 31)] == [32, 64, 128, 128, 128]
