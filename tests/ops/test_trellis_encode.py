"""The trellis encoder: in C, in torch's calls, and as a GPU runs it, whose source runs here, each thread a fiber."""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h200 import H200
from on_cpu import compile_run, flags, launch_on_cpu
from onegraph.formats.trellis import BITS, UNIT, decode
from onegraph.ops.cpu import trellis_encode as cpu
from onegraph.ops.cuda import build
from onegraph.ops.cuda import trellis_encode as gpu
from onegraph.quant import trellis

HERE = Path(__file__).parent
PARTS = 3  # with weights of their own
Encoder = Callable[[Tensor, int, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]


def drawn(tiles: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Targets [16, 16 tiles], weights of inputs and outputs."""
    g = torch.Generator().manual_seed(seed)
    weights, outer = (0.5 + torch.rand(PARTS, 16, generator=g) for _ in range(2))
    return torch.randn(16, 16 * tiles, generator=g) * 0.9, weights, outer


def loss(x: Tensor, value: Tensor, weights: Tensor, outer: Tensor) -> Tensor:
    """Of each tile."""
    error = (value - x).view(16, len(weights), -1, 16).square()
    return (error * weights.T[:, :, None, None] * outer[None, :, None, :]).sum((0, 3)).flatten()


def value_of(codes: Tensor, bits: int) -> Tensor:
    """What codes [K, 16 tiles] stand for, [16, 16 tiles], by the format's decoder."""
    strings = codes.unflatten(-1, (-1, 16)).transpose(0, 1).flatten(1).to(torch.int16)
    return decode(strings, bits).float().view(len(strings), 16, 16).permute(2, 0, 1).reshape(16, -1) / UNIT


@pytest.mark.parametrize("bits", BITS)
def test_c_finds_the_path_that_torchs_calls_find(bits: int) -> None:
    run = cpu.native(bits, trellis.levels(torch.device("cpu")))
    if run is None:
        pytest.skip("needs gcc")
    x, weights, outer = drawn(PARTS)
    codes, value = run(x, weights, outer, 8)
    assert torch.equal(value, value_of(codes, bits))
    want = trellis.encode_in_calls(x, bits, weights, outer, 8)
    assert torch.equal(want[1], value_of(want[0], bits))
    assert torch.allclose(loss(x, value, weights, outer), loss(x, want[1], weights, outer), rtol=1e-3)
    assert (codes == want[0]).float().mean() > 0.5  # sums in another order decide a tie otherwise


def test_no_path_is_better() -> None:
    """At 8 bits with two weights that count the best is found by trying: of all 2^24 pairs, by their shared byte."""
    x, weights = torch.full((16, 16), 0.1), torch.zeros(1, 16)
    weights[0, :2] = 1.0  # places 0 and 1 of each row's runs
    outer = torch.zeros(1, 16)
    outer[0, 0] = 1.0
    x[0, 0], x[1, 0] = 0.7, -1.3
    _, value = trellis.encode(x, 8, weights, outer)
    levels = trellis.levels(torch.device("cpu"))
    first = (levels - 0.7).square().view(256, 256).amin(1)  # by its newer byte, which is the second's older one
    second = (levels + 1.3).square().view(256, 256).amin(0)
    found = (value[0, 0] - 0.7).square() + (value[1, 0] + 1.3).square()
    assert torch.isclose(found, (first + second).min(), atol=1e-9)


# What a Gaussian source loses, of which 256 weights a tile and the ring cost some 1.5 per cent (docs/log.md).
@pytest.mark.parametrize(("bits", "most"), [(2, 0.0712), (3, 0.0183), (4, 0.00475)])
def test_the_error_of_a_gaussian_source_is_near_to_the_limit(bits: int, most: float) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(16, 16 * 48, generator=g)
    rho = {2: 1.0, 3: 0.95, 4: 0.92}[bits]
    _, value = trellis.encode(x * rho, bits, torch.ones(1, 16))
    error = (value / rho - x).square().mean()
    assert 4.0**-bits < error < most


def test_weights_move_the_error_to_what_counts_less() -> None:
    x = torch.randn(16, 16 * 24, generator=torch.Generator().manual_seed(2))
    weights = torch.ones(1, 16)
    weights[0, :8] = 4.0
    error = (trellis.encode(x, 2, weights)[1] - x).square().mean(1)
    assert error[:8].mean() < 0.75 * error[8:].mean()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_gpus_kernel_finds_it_too(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tiles on two blocks."""
    cuda = gpu.KERNEL.path.parent
    for file in (cuda / "trellis_encode.cu", HERE / "trellis_encode_on_cpu" / "run.cpp"):
        shutil.copy(file, tmp_path)
    shutil.copy(HERE / "e8p_experts_on_cpu" / "ptx.cuh", tmp_path / "ptx.cuh")
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", tmp_path / "cpu.cuh")
    shutil.copy(HERE / "int4_on_cpu" / "nvfp4_common.cuh", tmp_path / "int4.cuh")
    compile_run(tmp_path, flags({"BITS": bits, "HALF": 1, "HELD": 56}), tmp_path / "made.so", "-shared")
    library = ctypes.CDLL(str(tmp_path / "made.so"))

    class Kernel:
        def launch(self, grid: tuple, threads: int, shared: int, cluster: int, stream: int, given: bytes) -> None:
            library.run(ctypes.c_char_p(given), grid[0], threads, shared)

    launch_on_cpu(lambda source, device, *defines: {"trellis_encode": Kernel()}, monkeypatch.setattr)
    monkeypatch.setattr(build, "device", lambda index: replace(H200, sms=2))
    x, weights, outer = drawn(PARTS)
    for under in (outer, None):
        codes, value = gpu.encode(x, bits, weights, under, 4)
        assert torch.equal(value, value_of(codes, bits))
        want = trellis.encode_in_calls(x, bits, weights, under, 4)[1]
        flat = torch.ones_like(outer) if under is None else under
        # At 8 bits the first pass ends among paths that hardly differ.
        assert torch.allclose(
            loss(x, value, weights, flat), loss(x, want, weights, flat), rtol=0.1 if bits == 8 else 2e-3
        )


@pytest.mark.parametrize("bits", BITS)
def test_the_launcher_gives_the_kernel_its_memory(bits: int) -> None:
    states_of_a_thread, kept = 128 >> bits, {1: 1, 2: 2, 3: 4, 4: 4}.get(bits, 8)
    assert gpu.words(bits) == -(-max(states_of_a_thread, 1) * kept // 32)
    assert gpu.shared(bits) <= build.PORTABLE_SHARED or bits == 1


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_a_gpu_finds_the_path(bits: int) -> None:
    x, weights, outer = drawn(300)
    want = trellis.encode_in_calls(x[:, :96].contiguous(), bits, weights[:1], outer[:1], 16)[1]
    codes, value = (each.cpu() for each in trellis.encode(x.cuda(), bits, weights.cuda(), outer.cuda(), 16))
    assert torch.equal(value, value_of(codes, bits))
    few = slice(0, 96)
    found, wanted = (loss(x[:, few], each, weights[:1], outer[:1]) for each in (value[:, few], want))
    assert torch.allclose(found.mean(), wanted.mean(), rtol=0.03 if bits > 6 else 2e-3)
    again = trellis.encode(x.cuda(), bits, weights.cuda(), outer.cuda(), 16)
    assert torch.equal(again[0].cpu(), codes)
