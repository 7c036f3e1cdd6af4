"""The kernel of the expert cache on a CPU: its own source, each thread a fiber (`nvfp4_on_cpu`).

What this proves: every rank, index and copied byte, in two orders of blocks. What it cannot: that blocks which run at
once read the state before the last one writes it, and that a GPU reads host memory; test_expert_cache_gpu.py does.
"""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from h200 import PLAIN
from on_cpu import compile_run, flags, launch_on_cpu
from onegraph.ops.calls import DECAY, GAIN, ExpertCache
from onegraph.ops.cuda import build
from onegraph.ops.cuda import expert_cache as launcher
from onegraph.ops.expert_cache import expert_cache

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Kernel:
    def __init__(self, run: Any) -> None:
        self.run, self.step = run, 1

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert (grid[1:], shared, cluster) == ((1, 1), 0, 1)
        self.run(ctypes.c_char_p(arguments), grid[0], threads, self.step)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("expert_cache")
    for file in (launcher.KERNEL.path, *(HERE / "expert_cache_on_cpu").iterdir()):
        shutil.copy(file, folder)
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", folder / "cpu.cuh")
    compile_run(folder, flags(launcher.DEFINES), folder / "run.so", "-shared")
    return Kernel(ctypes.CDLL(str(folder / "run.so")).run)


@pytest.fixture
def check(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs the kernel in two orders of blocks, holds all that it writes to the reference, and returns that."""
    monkeypatch.setattr(build, "device", lambda index: replace(PLAIN, sms=5))
    launch_on_cpu(lambda source, *_: {"expert_cache": kernel}, monkeypatch.setattr)

    def run(args: tuple[Any, ...]) -> list[Any]:
        wanted = tree_map(Tensor.clone, args)
        slots = expert_cache.reference(*wanted)
        for kernel.step in (1, 7919):
            got = tree_map(Tensor.clone, args)
            assert torch.equal(launcher.fetch(ExpertCache(*got)), slots)
            for name, mine, right in zip(("slots", "shared", "resident", "score"), got[2:], wanted[2:], strict=False):
                same = all(map(torch.equal, mine, right)) if isinstance(mine, list) else torch.equal(mine, right)
                assert same, (name, mine, right)
            assert not got[-1].any()
        return [slots, *wanted]

    return run


@pytest.mark.parametrize("case", expert_cache.cases, ids=lambda case: case.name)
def test_the_kernel_is_the_reference(case: Any, check: Callable[..., list[Any]]) -> None:
    check(case.make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0)))


def test_many_calls_keep_in_step(check: Callable[..., list[Any]]) -> None:
    """Each on the state that the call before left, of one token and of many in turn, with numbers of no expert."""
    args = list(expert_cache.cases[1].make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(1)))
    g = torch.Generator().manual_seed(2)
    for turn in range(12):
        tokens = 7 if turn % 4 == 3 else 1
        args[0] = (torch.randn(tokens, 4, generator=g) * 6).int()
        _, *args = check(tuple(args))
        assert len(set(args[4].tolist())) == len(args[4])


def test_large_fields_are_copied_in_pieces(check: Callable[..., list[Any]]) -> None:
    g = torch.Generator().manual_seed(0)
    sizes = (launcher.THREADS * 16 * 3 + 16, 4, 48)  # bytes of an expert: four pieces, one that is copied byte by byte
    host = [torch.randint(0, 256, (6, size), generator=g, dtype=torch.uint8) for size in sizes]
    for tokens in (1, 3):
        chosen = torch.tensor([[5, 2]] * tokens, dtype=torch.int32)
        state = torch.tensor([0, 1, 2], dtype=torch.int32), torch.full((6,), 31 << GAIN + DECAY, dtype=torch.int32)
        slots, shared = [one[:3].clone() for one in host], [torch.zeros_like(one) for one in host]
        check((chosen, host, slots, shared, *state, torch.zeros(1, dtype=torch.int32)))
