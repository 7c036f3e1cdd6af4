"""Experts in E8P as a GPU runs them, from the op down to every launch, whose kernel runs on this CPU: `host.py FOLDER
hopper|portable`, the folder of the sources and their form. Prints a line for each case; fails where one is wrong."""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from h200 import H200, PLAIN
from on_cpu import compile_run, flags, launch_on_cpu
from onegraph.formats.e8p import codebook
from onegraph.ops import e8p_experts as ops
from onegraph.ops.cuda import build, e8p_decode, e8p_experts

FOLDER, PORTABLE = Path(sys.argv[1]), "portable" in sys.argv
DEVICE = PLAIN if PORTABLE else H200
launches: list[str] = []


@cache
def library(*defines: str) -> ctypes.CDLL:
    path = FOLDER / f"host-{abs(hash(defines))}.so"
    compile_run(FOLDER, defines, path, "-shared")
    return ctypes.CDLL(str(path))


class Kernel:
    def __init__(self, function: int, run: Any) -> None:
        self.function, self.run = function, run

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        launches.append(("product", "prepare", "combine")[self.function])
        assert shared <= DEVICE.shared
        assert threads <= 512
        assert grid[0] % cluster == 0
        self.run(ctypes.c_char_p(arguments), self.function, grid[0], grid[1], threads, cluster)


def kernels(source: build.Source, device: None, *defines: tuple[str, int]) -> dict[str, Kernel]:
    run = library(*flags(dict(defines) | {"PORTABLE": int(PORTABLE)})).run
    return {name: Kernel(i, run) for i, name in enumerate(source.functions)}


launch_on_cpu(kernels)
build.device = lambda index: DEVICE
e8p_experts.KERNELS.is_portable = lambda device: PORTABLE
TABLES = e8p_decode.tables(codebook())
e8p_decode._TABLES = {None: TABLES.data_ptr()}  # a CPU has no index


def check(case: Any, dtype: torch.dtype) -> None:
    launches.clear()
    args = case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(0))
    call = ops.E8PExperts(*args)
    if not e8p_experts.supports_input(call):
        return
    got, truth = e8p_experts.compute(call), ops.e8p_experts.reference(args[0].float(), *args[1:])
    assert got is not None
    assert (got.shape, got.dtype) == (call.x.shape, call.x.dtype), case.name
    error = float((got.float() - truth).norm() / truth.norm())
    assert error <= ops.e8p_experts.tolerance[dtype] / 2, (case.name, error)  # most of it the result's own rounding
    print(case.name, str(dtype).removeprefix("torch."), *launches, flush=True)


for i, each in enumerate(ops.e8p_experts.cases):
    check(each, (torch.bfloat16, torch.float16)[i % 3 == 0])
