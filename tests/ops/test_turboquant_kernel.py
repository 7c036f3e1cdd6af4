"""Attention from TurboQuant's codes without clusters, and their write, on a CPU: their own sources, each thread a fiber
(`nvfp4_on_cpu`), as cut for 99 KB.

What this proves: every index, mask and shuffle, and that the order of blocks changes no bit. What it cannot: that the
GPU's instructions do what `turboquant_common.cuh` says; the tests of the ops marked gpu do.
"""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h200 import H200, PLAIN
from on_cpu import compile_run, launch_on_cpu
from onegraph.ops import choices, turboquant_hybrid
from onegraph.ops import turboquant_attention as turboquant_attention_op
from onegraph.ops.cuda import build, turboquant, turboquant_attention
from onegraph.ops.registry import Case, reference_ops

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Kernel:
    step = 1

    def __init__(self, run: Callable[..., None], which: int) -> None:
        self.run, self.which = run, which

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert shared <= build.PORTABLE_SHARED
        assert (cluster, grid[2]) == (1, 1)
        self.run(ctypes.c_char_p(arguments), self.which, *grid[:2], threads, shared, Kernel.step)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Callable[..., None]]:
    folder, cuda = tmp_path_factory.mktemp("turboquant"), turboquant.KERNEL.path.parent
    sources = [file for file in cuda.glob("turboquant_*.cu*") if file.name != "turboquant_common.cuh"]
    for file in (*sources, *(HERE / "turboquant_on_cpu").iterdir()):
        shutil.copy(file, folder)
    for source, name in (("e8p_experts_on_cpu/ptx.cuh", "experts"), ("int4_on_cpu/nvfp4_common.cuh", "int4")):
        shutil.copy(HERE / source, folder / f"{name}.cuh")
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", folder / "cpu.cuh")

    @cache
    def made(*defines: tuple[str, int]) -> Callable[..., None]:
        path = folder / f"{abs(hash(defines))}.so"
        compile_run(folder, [f"-D{name}={value}" for name, value in (*defines, ("PORTABLE", 1))], path, "-shared")
        run: Callable[..., None] = ctypes.CDLL(str(path)).run
        return run

    return made


@pytest.fixture
def cpu(library: Callable[..., Callable[..., None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launchers ask of a GPU with five SMs."""

    def kernels(source: build.Source, device: None, *defines: tuple[str, int]) -> dict[str, Kernel]:
        if source is turboquant.KERNEL:
            return {"turboquant_write": Kernel(library(*defines, ("WRITE", 1)), 0)}
        run = library(*defines)
        return {name: Kernel(run, which) for which, name in enumerate(turboquant_attention.FUNCTIONS)}

    launch_on_cpu(kernels, monkeypatch.setattr)
    monkeypatch.setattr(turboquant_attention.KERNELS, "is_portable", lambda device: True)
    monkeypatch.setattr(turboquant_attention, "supports_input", lambda q: True)
    monkeypatch.setattr(turboquant.KERNEL, "is_built", lambda device: True)
    monkeypatch.setattr(build, "device", lambda index: replace(PLAIN, sms=5))


def case_of(op: str, name: str) -> Case:
    return next(case for case in choices.registered()[op].cases if case.name == name)


def both_orders(run: Callable[[], Tensor]) -> Tensor:
    results = []
    for Kernel.step in (1, 7919):  # a prime, so that all come
        results.append(run())
    assert torch.equal(*results)
    return results[0]


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    ("op", "name", "dtype"),
    [
        ("turboquant_attention", "llama_4", torch.bfloat16),
        ("turboquant_attention", "window_sinks", torch.float16),
        ("turboquant_attention", "mha_80", torch.bfloat16),
        ("turboquant_attention", "dim_192", torch.bfloat16),
        ("turboquant_hybrid", "smollm2", torch.bfloat16),
        ("turboquant_hybrid", "drafts", torch.float16),
        ("turboquant_hybrid", "mqa_256", torch.bfloat16),
    ],
)
def test_attention_in_any_order_of_blocks(op: str, name: str, dtype: torch.dtype) -> None:
    found = choices.registered()[op]
    args = case_of(op, name).make(torch.device("cpu"), dtype, torch.Generator().manual_seed(1))
    with reference_ops():
        wanted = found(*args)
    kernel = {"turboquant_attention": turboquant_attention_op, "turboquant_hybrid": turboquant_hybrid}[op]._on_gpu
    got = both_orders(lambda: first(kernel(found.call(*args))))
    error = (got.float() - first(wanted).float()).norm() / first(wanted).float().norm()
    assert error < found.tolerance[dtype]


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


class Told(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("smollm2_4", torch.bfloat16),
        ("k3v4_ring", torch.float16),
        ("llama_k4v3", torch.bfloat16),
        ("qwen3_5", torch.bfloat16),
        ("turned_24_of_80", torch.float16),
    ],
)
def test_writes_in_any_order_of_blocks(name: str, dtype: torch.dtype) -> None:
    """Queries, rings and pages; a code at a near-tie falls either way."""
    found, results = choices.registered()["turboquant_write"], []
    case = case_of("turboquant_write", name)
    made = lambda: found.call(*case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(1)))  # noqa: E731
    truth = made()
    with reference_ops():
        wanted, _ = found(*truth)
    real = torch.arange(wanted.shape[1]) < truth.counts.unsqueeze(1)
    for Kernel.step in (1, 7919):
        call = made()
        call.qkv = call.qkv.as_subclass(Told)
        out, _ = turboquant.turboquant_write(call)
        assert float((out.float() - wanted.float())[real].norm() / wanted.float()[real].norm()) < found.tolerance[dtype]
        written = [call.cache[1:]]  # page 0 is nobody's, and so is ring 0
        assert int((written[0] != truth.cache[1:]).sum()) <= 0.01 * int((truth.cache != made().cache).sum()) + 4
        if call.ring is not None and truth.ring is not None:
            written.append(call.ring[1:])
            assert float((written[1].float() - truth.ring[1:].float()).abs().max()) <= 0.04  # the last bit of 5
        results.append(written)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("device", [H200, PLAIN], ids=["H200", "99 KB"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_plan_fits(dim: int, bits: int, device: build.Device) -> None:
    rows = turboquant_attention.most_rows(dim, device is H200)
    for batch in (1, 64, turboquant_attention.MAX_BATCH):
        for most in (4, 8, rows):
            plan = turboquant_attention.AttentionTiling(dim, bits, bits, min(most, rows), 0, 1).fitting(batch, device)
            assert plan.shared(plan.stages(batch, device), batch) <= device.shared
            assert device is PLAIN or plan.warps == turboquant_attention.WARPS
