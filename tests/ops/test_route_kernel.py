"""Norms, router and choice in one launch on a CPU: `route.cu` itself, each thread a fiber, some blocks at once.

What this proves: every index, mask and shuffle, that the last block waits for the others' logits, and that it leaves
zeros. What it cannot: that the GPU's instructions do what `ptx.cuh` says; the tests of test_ops.py marked gpu do.
"""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h200 import PLAIN
from on_cpu import compile_run, flags, launch_on_cpu
from onegraph.ops.calls import NormedRoute
from onegraph.ops.cuda import build, route
from onegraph.ops.normed_route import normed_route
from test_ops import clone, error, make, widen

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CASES = [case for case in normed_route.cases if case.name not in ("many_experts", "many_tokens", "all_of_three")]
words = torch.zeros(route.WORDS.size, dtype=torch.int32)
Run = Callable[..., tuple[Tensor, ...]]


class Kernel:
    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert (threads, shared, cluster) == (route.THREADS, 0, 1)
        self.run(ctypes.c_char_p(arguments), grid[0])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Kernel]]:
    folder = tmp_path_factory.mktemp("route")
    for file in (
        route.KERNEL.path, route.KERNEL.path.with_name("numbers.cuh"), *(HERE / "route_on_cpu").iterdir(),
    ):  # fmt: skip
        shutil.copy(file, folder)
    shutil.copy(HERE / "hyper_on_cpu" / "ptx.cuh", folder / "fibers.cuh")
    gcc = ["g++", "-O1", "-std=c++20", "-w", "-fPIC", "-pthread"]

    @cache
    def made(_: build.Source, device: None, *defines: tuple[str, int]) -> dict[str, Kernel]:
        path = folder / f"{abs(hash(defines))}.so"
        compile_run(folder, flags(dict(defines)), path, "-shared", gcc=gcc)
        return {"route": Kernel(ctypes.CDLL(str(path)).run)}

    return made


@pytest.fixture
def run(kernels: Callable[..., dict[str, Kernel]], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Results of a call by the kernel, twice: who is last or early changes no bit."""
    launch_on_cpu(kernels, monkeypatch.setattr)
    monkeypatch.setattr(build, "device", lambda index: replace(PLAIN, sms=12))
    monkeypatch.setattr(route.WORDS, "of", lambda device: words.data_ptr())

    def both(*args: Any) -> tuple[Tensor, ...]:
        call = NormedRoute(*args)
        assert route.supports(call)
        first, second = route.compute(call), route.compute(call)
        assert not words.any(), "zeros between launches"
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, second, strict=True))
        return first

    return both


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, list(normed_route.tolerance)[i % 3]) for i, case in enumerate(CASES)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_kernel_is_the_reference(case: Any, dtype: torch.dtype, run: Run) -> None:
    args = make(case, dtype)
    *normed, experts, weights = run(*clone(args))
    *truth, chosen, gains = normed_route.reference(*clone(args, widen(dtype)))
    assert torch.equal(experts, chosen)
    for got, true in zip((*normed, weights), (*truth, gains), strict=True):
        assert error(got, true) <= normed_route.tolerance[dtype]


def given(logits: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, float, Tensor]:
    """x, norm, eps and router that give exactly these logits [1, E], where they are few bits."""
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 0] = 8  # of 64 columns one: its norm is 8
    gate = torch.zeros(logits.shape[1], 64, dtype=dtype)
    gate[:, 0] = logits[0].to(dtype) / 8
    return x, torch.ones(64, dtype=dtype), 0.0, gate


INF, NAN = float("inf"), float("nan")


def test_of_equal_ones_the_first_is_chosen(run: Run) -> None:
    """Also of zeros of either sign, and of experts that lie far apart."""
    logits = torch.zeros(1, 150)
    logits[0, ::2] = -0.0
    for place in (3, 77, 78, 149):
        logits[0, place] = 1
    *_, experts, weights = run(*given(logits), None, None, 7, True, 0, 1, 1.0, False, False)
    assert experts.tolist() == [[3, 77, 78, 149, 0, 1, 2]]
    assert torch.allclose(weights, torch.tensor([[1.0] * 4 + [0.0] * 3]).softmax(1), atol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_nan_is_the_largest_and_spoils_the_weights_of_its_token(normalise: bool, run: Run) -> None:
    logits = torch.linspace(0, 1, 40).unsqueeze(0).clone()
    x, norm, eps, gate = given(logits)
    bias = torch.zeros(40)
    bias[9], bias[21], bias[5] = NAN, INF, -INF
    *_, experts, weights = run(x, norm, eps, gate, bias, None, 4, normalise, 0, 1, 1.0, False, False)
    assert experts.tolist() == [[9, 21, 39, 38]]
    assert weights.isnan().all()


def test_a_word_of_ones_is_a_nan_and_no_logit_that_never_comes(run: Run) -> None:
    x, norm, eps, gate = given(torch.zeros(1, 33))
    gate[7] = torch.full((64,), -1, dtype=torch.int32).view(torch.float32)  # all bits are set
    *_, experts, _ = run(x, norm, eps, gate, None, None, 2, True, 0, 1, 1.0, False, False)
    assert experts.tolist() == [[7, 0]]


def test_minus_infinity_can_be_chosen_but_not_what_is_shut_out(run: Run) -> None:
    x, norm, eps, gate = given(torch.zeros(1, 12))
    bias = torch.full((12,), -INF)
    bias[6], bias[7] = 1.0, 1.0
    *_, experts, weights = run(x, norm, eps, gate, bias, None, 4, False, 3, 1, 2.0, True, False)
    assert experts.tolist() == [[6, 7, 4, 5, 12]]
    assert torch.allclose(weights, torch.tensor([[1.0, 1, 1, 1, 1]]))
