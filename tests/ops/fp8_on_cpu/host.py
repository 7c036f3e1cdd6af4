"""The ops of FP8 and MXFP8 as a GPU runs them, from the op down to every launch, whose kernel runs on this CPU:
`host.py FOLDER`, which holds the sources. Prints a line for each case that launched something; fails where a result is
wrong."""

import ctypes
import sys
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import torch

from h200 import H200
from on_cpu import compile_run, launch_on_cpu
from onegraph.ops import mxfp8 as ops
from onegraph.ops.cuda import build, mxfp8, stream

FOLDER = Path(sys.argv[1])
launches = 0


@cache
def library(*defines: str) -> ctypes.CDLL:
    path = FOLDER / f"host-{'-'.join(defines)}.so"
    compile_run(FOLDER, ["-DHOST", *defines], path, "-shared")
    return ctypes.CDLL(str(path))


class Kernel:
    def __init__(self, **defines: int) -> None:
        self.run = library(*(f"-D{name}={value}" for name, value in defines.items())).run

    def launch(self, grid, threads: int, shared: int, cluster: int, stream: int, arguments: bytes) -> None:
        global launches
        launches += 1
        assert shared <= H200.shared
        assert threads <= 512
        assert cluster == 1
        self.run(ctypes.c_char_p(arguments), *grid, threads)


def kernels(source: build.Source, device: None, *defines: tuple[str, int]) -> dict[str, Kernel]:
    which = {"BYTE_SCALES": 1} if source is mxfp8.STREAM.source else {}  # as run.cpp calls it
    return {source.functions[0]: Kernel(**dict(defines), **which)}


launch_on_cpu(kernels)
torch.mm = lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype)  # which a CPU has not
build.device = lambda index: H200
build.Source.is_portable = lambda source, index: False
stream.Stream.takes = stream.Stream.takes_codes = lambda self, tensor: tensor.numel() > 0

for op in (*ops.FP8.ops.values(), *ops.CODED.ops.values()):
    name, (module, _, target) = op.name, op.kernel.partition(":")
    kernel = attrgetter(target)(import_module(module))
    for case in op.cases:
        launches, args = 0, case.make(torch.device("cpu"), torch.bfloat16, torch.Generator().manual_seed(0))
        got, given = kernel(*args), op.reference(*args)
        truth = op.reference(*(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
        assert (got.shape, got.dtype) == (given.shape, given.dtype), case.name
        error = float((got.float() - truth).norm() / truth.norm()) if got.numel() else 0.0
        assert error <= op.tolerance[torch.bfloat16], (name, case.name, error)
        if launches:
            print(name, case.name, launches)
