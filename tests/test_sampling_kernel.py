"""Sampling without clusters on a CPU: its own source, each thread a fiber (`nvfp4_on_cpu`), every launch of it.

What this proves: every index and shuffle, what the filters keep, and that the order of blocks changes no bit. What it
cannot: that blocks which run at once see each other's keys; the tests of test_sampling.py marked gpu do.
"""

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h200 import PLAIN
from on_cpu import compile_run
from onegraph.ops.cuda import build, sampling_portable
from onegraph.ops.registry import OPS
from onegraph.ops.sampling import sample

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SMALL = replace(PLAIN, sms=2)  # so that a row has few blocks
counters = torch.zeros(sampling_portable.MAX_ROWS, dtype=torch.int32)


class Kernel:
    def __init__(self, run: object, draw: int) -> None:
        self.run, self.draw, self.step = run, draw, 1

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert (shared, cluster) == (0, 1)
        self.run(ctypes.c_char_p(arguments), self.draw, grid[0], threads, self.step)


class Arrived:
    @staticmethod
    def of(device: int | None, stream: int) -> int:
        return counters.data_ptr()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Kernel, Kernel]:
    folder, cuda = tmp_path_factory.mktemp("sampling"), sampling_portable.KERNELS.path.parent
    headers = [file for file in cuda.glob("sampling_*.cuh")]
    for file in (cuda / "sampling_portable.cu", *headers, *(HERE / "sampling_on_cpu").iterdir()):
        shutil.copy(file, folder)
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", folder / "cpu.cuh")
    compile_run(folder, [], folder / "run.so", "-shared")
    run = ctypes.CDLL(str(folder / "run.so")).run
    return Kernel(run, 0), Kernel(run, 1)


@pytest.fixture
def drawn(kernels: tuple[Kernel, Kernel], monkeypatch: pytest.MonkeyPatch):
    """Tokens for the arguments of the op, in one order of blocks and in another."""
    monkeypatch.setattr(sampling_portable, "_kernels", lambda device: kernels)
    monkeypatch.setattr(sampling_portable, "ARRIVED", Arrived)
    monkeypatch.setattr(build, "device", lambda index: SMALL)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def run(*arguments: Tensor) -> Tensor:
        names = "logits", "temperature", "top_k", "top_p", "seed", "position"
        given, results = dict(zip(names, (t.contiguous() for t in arguments), strict=True)), []
        for step in (1, 7919):  # a prime, so that all come
            out = torch.full((len(arguments[0]),), -1)
            for kernel in kernels:
                kernel.step = step
            sampling_portable.launch(given, out)
            assert not counters.any()
            results.append(out)
        assert torch.equal(*results)
        return results[0]

    return run


@pytest.mark.parametrize("case", OPS["sample"].cases, ids=lambda case: case.name)
def test_every_case_of_the_op(drawn, case) -> None:
    arguments = case.make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))
    assert drawn(*arguments).tolist() == sample(*arguments).tolist()


@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "odd"])
def test_every_filter_on_every_kind_of_row(drawn, kind: str) -> None:
    """A row a filter; also where the list has no room for what top-k and top-p keep, which is searched for."""
    params = [
        (0.8, 0, 0.95),
        (0.8, 1000, 1.0),
        (2.0, 1000, 0.5),
        (0.8, 50, 0.0),
        (0.8, 0, 1.0),
        (0.0, 5, 0.5),
        (1, 9, 0.9),
    ]
    rows = len(params)
    logits = torch.randn(rows, 4000, generator=torch.Generator().manual_seed(3))
    logits = {"flat": logits, "peaked": 9 * logits, "equal": torch.zeros_like(logits), "odd": logits.round()}[kind]
    if kind == "odd":
        logits[0, 3], logits[4, 5], logits[:, 7:900], logits[2, 11] = -0.0, float("inf"), float("-inf"), float("nan")
    heat, top_k, top_p = (torch.tensor(column) for column in zip(*params, strict=True))
    seeds = torch.arange(rows) - 2**61, torch.arange(rows).int() + 7
    arguments = logits, heat.float(), top_k.int(), top_p.float(), *seeds
    assert drawn(*arguments).tolist() == sample(*arguments).tolist()


@pytest.mark.parametrize(("rows", "blocks"), [(1, 32), (16, 32), (64, 8), (999, 8)])
def test_a_row_has_blocks_for_a_list(rows: int, blocks: int) -> None:
    assert sampling_portable.blocks(rows, PLAIN) == blocks
    assert blocks * sampling_portable.WARPS <= sampling_portable.LIST
