"""The E8P linear of 5 to 64 tokens as a Hopper GPU runs it, from its launcher down to every block, which runs on this
CPU: `host.py FOLDER`, which holds the sources. Prints a line for each case; fails where a result is wrong."""

import ctypes
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from h200 import H200
from on_cpu import compile_run, flags, launch_on_cpu
from onegraph.formats.e8p import codebook
from onegraph.ops import e8p as ops
from onegraph.ops.cuda import build, e8p_batch
from onegraph.ops.cuda.e8p_common import Linear

FOLDER = Path(sys.argv[1])
PLAN = e8p_batch.plan
SMS = 3  # so that blocks walk over several tiles


@dataclass(frozen=True)
class Case:
    """A shape, what stands around it, and how k is cut: blocks of a cluster, clusters."""

    tokens: int
    n: int
    k: int
    bits: int
    with_: str = ""
    cut: tuple[int, int] = (1, 1)
    half: bool = False

    @property
    def around(self) -> tuple[bool, ...]:
        norm, silu, bias, add, wide = (name in self.with_ for name in ("norm", "silu", "bias", "add", "wide"))
        return norm, silu, bias, add, wide

    @property
    def plan(self) -> e8p_batch.BatchTiling:
        own = PLAN(self.n, self.k, self.bits, self.tokens, H200)
        cluster, parts = self.cut
        return replace(own, cluster=cluster, parts=parts, per_block=-(-self.k // (256 * cluster * parts)))

    @property
    def defines(self) -> tuple[str, ...]:
        _, silu, _, _, wide = self.around
        made = e8p_batch.defines(self.plan, self.n, self.k, self.bits, self.half, silu, wide)
        return flags(made)


CASES = [
    # every rate, both dtypes, each number of tokens of a block, blocks of 64 rows and columns, all that stands around
    Case(6, 320, 576, 2, "norm add"),
    Case(16, 192, 512, 3, "bias norm", half=True),
    Case(20, 320, 768, 4, "silu add"),
    Case(40, 192, 640, 2, "wide norm add"),
    Case(64, 128, 512, 4, "norm", half=True),
    # several tiles a block
    Case(9, 1088, 512, 4, "norm add"),
    # clusters, of which the last block has a slice less; slices in several rounds of a rotating warp
    Case(16, 320, 1280, 2, "norm add bias", (3, 1)),
    Case(33, 192, 1280, 3, "silu", (3, 1)),
    Case(7, 64, 4352, 2, "norm"),
    # clusters that meet in memory
    Case(16, 320, 1792, 2, "norm add bias", (2, 4)),
    Case(12, 320, 1792, 4, "silu wide", (2, 2)),
    Case(32, 128, 1024, 3, "norm", (2, 2), half=True),
    Case(64, 192, 1024, 4, "add", (2, 2)),
]


@cache
def library(defines: tuple[str, ...]) -> ctypes.CDLL:
    path = FOLDER / f"host-{abs(hash(defines))}.so"
    compile_run(FOLDER, defines, path, "-shared", "-fno-gnu-unique")  # `Shape` is each library's own
    return ctypes.CDLL(str(path))


@dataclass(frozen=True)
class Kernel:
    run: object
    rotates: bool
    backwards: bool

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert shared <= H200.shared
        self.run(ctypes.c_char_p(arguments), self.rotates, grid[0], threads, shared, cluster, self.backwards)


def tensor_map(address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int) -> bytes:
    return struct.pack("16q", address, rows, row_bytes, box_bytes, box_rows, *[0] * 11)


e8p_batch.tensor_map = tensor_map
build.device = lambda index: replace(H200, sms=SMS)


def check(case: Case) -> None:
    norm, silu, bias, add, wide = case.around
    dtype, bits = torch.float16 if case.half else torch.bfloat16, case.bits
    tokens, n, k = case.tokens, case.n, case.k
    g = torch.Generator().manual_seed(0)
    codes, residual = ops.random_codes(n, k, bits, torch.device("cpu"), g)
    scales = ops.random_scales(n, k, torch.device("cpu"), g)
    # Each token of another size, and so are its parts.
    x = torch.randn(tokens, 2 * k if silu else k, generator=g) * (1 + torch.arange(tokens) % 16)[:, None]
    x = (x * (1 + torch.arange(x.shape[1]) * 3 // x.shape[1])).to(dtype)
    given = torch.randn(n, generator=g) if bias else None
    more = torch.randn(tokens, n, generator=g).to(torch.float32 if wide else dtype) if add else None
    eps = 1e-5 if norm else None
    truth = ops.e8p_linear.reference(
        x.float(), codes, residual, codebook(), *scales, given, bits, more, eps, silu, True
    )
    results = []
    for backwards in (False, True):

        def kernels(
            _: build.Source, device: None, *defines: tuple[str, int], backwards: bool = backwards
        ) -> dict[str, Kernel]:
            run = library(flags(dict(defines))).run
            return {"e8p_batch": Kernel(run, False, backwards), "e8p_rotate": Kernel(run, True, False)}

        launch_on_cpu(kernels)
        e8p_batch.plan = lambda *_: case.plan
        out = torch.full((tokens, n), float("nan"), dtype=torch.float32 if wide else dtype)
        e8p_batch.run(Linear(x, codes, residual, codebook(), *scales, given, bits, more, eps, silu, wide, out=out))
        results.append(out)
    first, second = results
    assert torch.equal(first, second), case
    rounding = float((truth.to(dtype).float() - truth).norm() / truth.norm()) if not wide else 0.0
    for token in range(tokens):  # none is lost in the others' size
        error = float((first[token].float() - truth[token]).norm() / truth[token].norm())
        assert error < 1.3 * rounding + 1e-4, (case, token, error)
    plan = case.plan
    print(f"{bits} bits, {plan.tokens} tokens, clusters of {plan.cluster}, {plan.parts} parts", flush=True)


with ThreadPoolExecutor(2) as pool:
    first, *others = dict.fromkeys(case.defines for case in CASES)
    library(first)  # which compiles the header of all
    list(pool.map(library, others))
for each in CASES:
    check(each)
