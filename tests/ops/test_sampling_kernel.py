"""Sampling without clusters on a CPU: its own source, each thread a fiber (`nvfp4_on_cpu`), every launch of it.

What this proves: every index and shuffle, what the filters keep, and that neither the order of blocks changes a bit nor
how far float32 is trusted. What it cannot: that blocks which run at once see each other's keys; the tests of
test_sampling.py marked gpu do.
"""

import ctypes
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h200 import PLAIN
from on_cpu import compile_run, launch_on_cpu
from onegraph.ops.cuda import build, sampling_portable
from onegraph.ops.registry import OPS
from onegraph.ops.sampling import sample

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SMALL = replace(PLAIN, sms=2)  # so that a row has few blocks
counters = torch.zeros(sampling_portable.MAX_ROWS, dtype=torch.int32)
DISTRUST = {"DOUBT = 0x1p-15f": "DOUBT = .3f", "MARGIN = 0x1p-8f": "MARGIN = 8.f"}  # nearly all is left to float64


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
    def of(device: int | None) -> int:
        return counters.data_ptr()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every build of the source includes."""
    folder, cuda = tmp_path_factory.mktemp("sampling"), sampling_portable.KERNELS.path.parent
    for file in (cuda / "sampling_portable.cu", *cuda.glob("sampling_*.cuh"), *(HERE / "sampling_on_cpu").iterdir()):
        shutil.copy(file, folder)
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", folder / "cpu.cuh")
    return folder


def built(folder: Path, changes: dict[str, str]) -> tuple[Kernel, Kernel]:
    rough = folder / "sampling_rough.cuh"
    text = rough.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    rough.write_text(text)
    compile_run(folder, [], folder / f"run{len(changes)}.so", "-shared")
    run = ctypes.CDLL(str(folder / f"run{len(changes)}.so")).run
    return Kernel(run, 0), Kernel(run, 1)


@pytest.fixture(scope="module")
def kernels(sources: Path) -> tuple[Kernel, Kernel]:
    return built(sources, {})


@pytest.fixture(scope="module")
def distrustful(kernels: tuple[Kernel, Kernel], sources: Path) -> tuple[Kernel, Kernel]:
    return built(sources, DISTRUST)


@pytest.fixture
def drawn(kernels: tuple[Kernel, Kernel], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Tokens for the arguments of the op, in each of these orders of blocks."""
    monkeypatch.setattr(sampling_portable, "ARRIVED", Arrived)
    monkeypatch.setattr(build, "device", lambda index: SMALL)

    def run(*arguments: Tensor, by: tuple[Kernel, Kernel] = kernels, orders: tuple[int, ...] = (1, 7919)) -> Tensor:
        launch_on_cpu(lambda source, *_: dict(zip(source.functions, by, strict=True)), monkeypatch.setattr)
        names = "logits", "temperature", "top_k", "top_p", "seed", "position"
        given, results = dict(zip(names, (t.contiguous() for t in arguments), strict=True)), []
        for step in orders:  # 1 or a large prime, so that all come
            for kernel in by:
                kernel.step = step
            out = sampling_portable.sample(**given)
            assert not counters.any()
            results.append(out)
        assert all(torch.equal(results[0], other) for other in results)
        return results[0]

    return run


@pytest.mark.parametrize("case", OPS["sample"].cases, ids=lambda case: case.name)
def test_every_case_of_the_op(drawn, case) -> None:
    arguments = case.make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))
    assert drawn(*arguments, orders=(7919,)).tolist() == sample(*arguments).tolist()


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


INFINITE, WIDTH = math.inf, 4000
FLAT = torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))
EVEN = torch.arange(WIDTH) % 2 == 0
ZEROS = torch.where(FLAT > 0, -0.0, 0.0)  # equal ones, of either sign
EDGES: dict[str, tuple[Tensor, float, int, float]] = {
    "nearly all of a flat row": (FLAT, 0.8, 0, 0.999),
    "more than the list holds": (FLAT, 0.8, 3000, 1.0),
    "top-p of more than the list holds": (FLAT, 0.8, 1500, 0.9),
    "top-p of few": (FLAT, 0.8, 60, 0.9),
    "top-p of one": (FLAT, 0.8, 1, 0.9),
    "nothing but the likeliest": (FLAT, 0.8, 0, 0.0),
    "rounded to bfloat16": (4 * FLAT.bfloat16().float(), 1.0, 0, 0.95),
    "two values": ((FLAT > 1.5).float(), 0.8, 0, 0.95),
    "two values, the lower one cut": ((FLAT > 1.5).float(), 0.8, 2500, 0.9),
    "equal": (torch.ones(WIDTH), 1.0, 0, 0.95),
    "equal, both filters": (torch.ones(WIDTH), 1.0, 1500, 0.5),
    "zeros of either sign, cut": (ZEROS, 1.0, 7, 1.0),
    "zeros of either sign, many": (ZEROS, 1.0, 0, 0.7),
    "a small step at zero": (torch.where(EVEN, ZEROS, -1e-30), 1.0, 2020, 1.0),
    "cold": (FLAT, 1e-30, 0, 0.95),
    "colder than a float's ordinary numbers": (1e-38 * FLAT, 1e-44, 0, 0.95),
    "hot": (FLAT, 1e4, 0, 0.95),
    "as hot as can be": (FLAT, 3e38, 1000, 0.5),
    "large, and hot": (1e37 * FLAT, 1e37, 0, 0.9),
    "from end to end": (torch.where(EVEN, 3.4e38, -3.4e38) * FLAT.sign(), 3e38, 0, 0.9),
    "hot and masked": (torch.where(EVEN, FLAT, -1e9), 1e3, 0, 0.9),
    "one of many masked": (torch.where(torch.arange(WIDTH) == 77, 1.0, -INFINITE), 0.8, 3, 0.9),
    "most masked": (FLAT.masked_fill(FLAT < 2, -INFINITE), 0.8, 0, 0.9),
    "all masked": (torch.full((WIDTH,), -INFINITE), 0.8, 0, 0.9),
    "an infinity": (FLAT.where(FLAT < 3, INFINITE), 0.8, 0, 0.9),
    "not a number": (FLAT.where(FLAT < 3, math.nan), 0.8, 0, 0.9),
    "greedy": (FLAT, 0.0, 9, 0.5),
    "no filter": (FLAT, 0.8, 0, 1.0),
}
PLACES = torch.rand(WIDTH, generator=torch.Generator().manual_seed(6)).argsort()  # 0 to WIDTH - 1, without an order
FIRST = torch.arange(WIDTH)
WITHIN_A_BIN = {  # of equal logits some are kept, so that the draw tells which
    "a part of a block's equal ones": (
        torch.where(FIRST < 300, 1.0, torch.where(FIRST == 3000, 1.5, -INFINITE)), 1.0, 0, 0.5,
    ),
    "top-p in the first of two bins, top-k in the second": ((PLACES < 300).float() + (PLACES < 600), 1.0, 450, 0.3),
    "more in a bin than a block sorts": ((PLACES < 1500).float() + (PLACES < 3000), 1.0, 0, 0.3),
}  # fmt: skip
EDGES |= {f"{name}, draw {i}": row for name, row in WITHIN_A_BIN.items() for i in range(6)}


@pytest.mark.parametrize("trusted", [True, False])
def test_rows_at_the_edges_beside_each_other(drawn, kernels, distrustful, trusted: bool) -> None:
    """In one batch; also with float32 trusted with hardly anything, so that the last block decides in float64."""
    logits, *params = zip(*EDGES.values(), strict=True)
    heat, top_k, top_p = (torch.tensor(column) for column in params)
    rows = torch.arange(len(EDGES))
    arguments = torch.stack(logits), heat, top_k.int(), top_p, 7 * rows - 2**61, rows.int() + 11
    tokens = drawn(*arguments, by=kernels if trusted else distrustful, orders=(7919,))
    expected = sample(*arguments)
    assert dict(zip(EDGES, tokens.tolist(), strict=True)) == dict(zip(EDGES, expected.tolist(), strict=True))


@pytest.mark.parametrize(("rows", "blocks"), [(1, 32), (4, 32), (8, 16), (16, 8), (999, 8)])
def test_a_row_has_blocks_for_a_list(rows: int, blocks: int) -> None:
    assert sampling_portable.blocks(rows, PLAIN) == blocks
    assert blocks * sampling_portable.WARPS <= sampling_portable.LIST
