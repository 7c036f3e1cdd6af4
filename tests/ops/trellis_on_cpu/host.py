"""The trellis linear as a GPU runs it, from the op's kernel down to every launch, which runs on this CPU: `host.py
FOLDER`, which holds the sources. Prints a line for each case; fails where a result is wrong."""

import ctypes
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from h200 import H200
from on_cpu import compile_run, flags, launch_on_cpu
from onegraph.formats.rotated import hadamard_block
from onegraph.formats.trellis import TILE, UNIT, decode
from onegraph.ops import e8p, trellis
from onegraph.ops.cuda import (
    build,
    rotated_portable,
    trellis_batch,
    trellis_dequantize,
    trellis_experts,
    trellis_portable,
)
from onegraph.ops.cuda.trellis_common import Linear
from onegraph.ops.hadamard import hadamard, rotate_rows
from onegraph.ops.trellis_experts import TrellisExperts
from onegraph.ops.trellis_experts import trellis_experts as experts

FOLDER = Path(sys.argv[1])
SMALL = replace(H200, sms=6, shared=build.PORTABLE_SHARED, clusters=(6,) + (0,) * 15)  # as sums meet there
counters = torch.zeros(1 << 14, dtype=torch.int32)
step = 1  # in which blocks come


@dataclass(frozen=True)
class Case:
    tokens: int
    n: int
    k: int
    bits: int
    with_: str = ""
    half: bool = False
    code: int = 0
    batch: bool = False  # by trellis_batch

    @property
    def source(self) -> build.Source:
        return trellis_batch.KERNELS if self.batch else trellis_portable.KERNELS

    @property
    def around(self) -> tuple[bool, ...]:
        return tuple(name in self.with_ for name in ("norm", "silu", "bias", "add", "wide"))

    def defines(self) -> dict[str, int]:
        if self.batch:
            at_once = -(-self.tokens // -(-self.tokens // trellis_batch.AT_ONCE))
            count = next(size for size in trellis_batch.CLASSES if size >= at_once)
            made = {"BITS": self.bits, "TOKENS": count, "HALF": int(self.half), "CODE": self.code}
            return made | trellis_batch.cut(self.bits, count).defines
        plan = trellis_portable.TrellisTiling.plan(self.n, self.k, self.bits, min(self.tokens, 16), SMALL)
        return plan.defines(self.n, self.k, self.bits, self.half, self.around) | {"CODE": self.code}


CASES = [
    Case(1, 192, 576, 1, "norm"),
    Case(1, 128, 1600, 2, "bias wide norm add"),
    Case(3, 64, 64, 3, "norm bias"),
    Case(1, 320, 512, 4, "add silu", half=True),
    Case(4, 192, 768, 4, "silu wide", half=True),
    Case(16, 576, 320, 5, "add", half=True),
    Case(8, 192, 512, 6, "silu bias"),
    Case(11, 128, 832, 7, "norm add wide"),
    Case(2, 704, 576, 8, "add norm"),
    Case(1, 640, 2048, 3, "norm"),
    Case(1, 128, 512, 3, "norm bias", code=1),
    Case(9, 256, 384, 6, "silu add", half=True, code=1),
    Case(2, 128, 1280, 4, "norm wide", code=2),
    Case(16, 256, 128, 5, "bias", half=True, code=2),
    Case(4, 384, 256, 8, "add", code=3),
    Case(1, 128, 640, 1, "norm", code=3),
]
CASES += [
    Case(16, 576, 1024, 2, "norm", batch=True),
    Case(33, 192, 576, 3, "bias wide norm add", batch=True),
    Case(64, 832, 448, 4, "add silu", half=True, batch=True),
    Case(23, 64, 64, 1, "silu bias", batch=True),
    Case(9, 320, 832, 6, "norm add wide", half=True, batch=True),
    Case(49, 384, 640, 8, "", batch=True),
    Case(17, 128, 320, 3, "norm", half=True, code=1, batch=True),
    Case(50, 320, 256, 5, "add", code=2, batch=True),
    Case(20, 64, 960, 7, "bias", code=3, batch=True),
    Case(65, 64, 128, 3, "add wide", batch=True),  # two passes
]
DENSE = [(128, 128, bits, bool(bits % 2), 0) for bits in range(1, 9)]
DENSE += [(192, 320, 3, False, 0), (320, 256, 4, True, 0), (256, 384, 3, False, 1), (384, 128, 6, True, 2)]
DENSE += [(128, 256, 4, True, 3)]


SOURCES = trellis_portable.KERNELS, trellis_dequantize.KERNEL, trellis_batch.KERNELS, trellis_experts.KERNELS


@cache
def library(defines: tuple[str, ...]) -> ctypes.CDLL:
    path = FOLDER / f"host-{abs(hash(defines))}.so"
    compile_run(FOLDER, defines, path, "-shared")
    return ctypes.CDLL(str(path))


def compiled(source: build.Source, made: dict[str, int]) -> ctypes.CDLL:
    kind = SOURCES.index(source)
    return library(flags(made | {"START": 1024, "FOLLOWS": made.get("TOKENS", 1) % 2, "KIND": kind}))


class Kernel:
    def __init__(self, run: object, which: int) -> None:
        self.run, self.which = run, which

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert shared <= build.PORTABLE_SHARED
        assert threads <= 512
        self.run(ctypes.c_char_p(arguments), self.which, *grid[:2], threads, shared, step)


class Counters:
    @staticmethod
    def of(device: int | None) -> int:
        return counters.data_ptr()


def kernels(source: build.Source, device: None, *defines: tuple[str, int]) -> dict[str, Kernel]:
    run = compiled(source, dict(defines)).run
    return {name: Kernel(run, i) for i, name in enumerate(source.functions)}


build.device = lambda index: SMALL
launch_on_cpu(kernels)
rotated_portable.ARRIVED = trellis_experts.ARRIVED = Counters
Counters.size = len(counters)


def scales(n: int, k: int, g: torch.Generator, code: int) -> tuple[torch.Tensor, torch.Tensor]:
    in_scale, out_scale = e8p.random_scales(n, k, torch.device("cpu"), g)
    return in_scale, out_scale * (10 / (1 if code else UNIT))


def check(case: Case) -> None:
    global step
    norm, silu, bias, add, wide = case.around
    dtype, tokens, n, k = torch.float16 if case.half else torch.bfloat16, case.tokens, case.n, case.k
    g = torch.Generator().manual_seed(0)
    codes, both = trellis.random_codes(n, k, case.bits, "cpu", g), scales(n, k, g, case.code)
    # Each token of another size.
    x = (torch.randn(tokens, 2 * k if silu else k, generator=g) * (1 + torch.arange(tokens)[:, None])).to(dtype)
    given = torch.randn(n, generator=g) if bias else None
    more = torch.randn(tokens, n, generator=g).to(torch.float32 if wide else dtype) if add else None
    eps = 1e-5 if norm else None
    truth = trellis.trellis_linear.reference(
        x.float(), codes, *both, given, case.bits, more, eps, silu, True, case.code
    )
    results = []
    for order in (1, 7919):  # a prime, so that all come
        step = order
        out = torch.full((tokens, n), float("nan"), dtype=torch.float32 if wide else dtype)
        run = trellis_batch.run if case.batch else trellis_portable.run
        run(Linear(x, codes, *both, given, case.bits, more, eps, silu, wide, case.code, out=out))
        assert not counters.any(), case
        results.append(out)
    assert torch.equal(*results), case  # whoever came last
    rounding = float((truth.to(dtype).float() - truth).norm() / truth.norm()) if not wide else 0.0
    error = float((results[0].float() - truth).norm() / truth.norm())
    assert error < math.hypot(rounding, 3e-4), (case, error)  # activations have 11 bits
    kernel = "batch, " * case.batch
    print(f"{case.bits} bits, {kernel}{tokens} tokens, code {case.code}, {error:.1e}", flush=True)


def check_dense(n: int, k: int, bits: int, half: bool, code: int) -> None:
    g, dtype = torch.Generator().manual_seed(0), torch.float16 if half else torch.bfloat16
    codes, (in_scale, out_scale) = trellis.random_codes(n, k, bits, "cpu", g), scales(n, k, g, code)
    q = hadamard.reference(decode(codes, bits, code).float(), hadamard_block(k))
    want = rotate_rows(q, hadamard_block(n)) * out_scale.unsqueeze(1) * in_scale
    x = torch.empty(1, k, dtype=dtype)
    call = Linear(x, codes, in_scale, out_scale, None, bits, code=code, out=torch.empty(1, n, dtype=dtype))
    got = torch.full((n, k), float("nan"), dtype=dtype)
    for first in range(0, n, 128):
        rows = slice(first, min(first + 128, n))
        trellis_dequantize.weight(call, rows, got[rows])
    rounding = float((want.to(dtype).float() - want).norm() / want.norm())
    error = float((got.float() - want).norm() / want.norm())
    # exllamav3's float16 numbers are rounded in six sums, integers hardly.
    assert error < math.hypot(rounding, 7e-4 if code else 4e-4), (n, k, bits, error)
    assert codes.shape[0] * TILE == n
    print(f"{bits} bits, dense, code {code}, {error:.1e}", flush=True)


def check_experts(case: Any, dtype: torch.dtype) -> None:
    global step
    arguments = case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(0))
    call = TrellisExperts(*arguments)
    if not trellis_experts.supports_input(call):
        return
    truth = experts.reference(arguments[0].float(), *arguments[1:])
    results = []
    for order in (1, 7919):
        step = order
        got = trellis_experts.compute(call)
        assert got is not None
        assert got.dtype == dtype
        assert not counters.any(), case.name
        results.append(got)
    assert torch.equal(*results), case.name
    rounding = float((truth.to(dtype).float() - truth).norm() / truth.norm())
    error = float((results[0].float() - truth).norm() / truth.norm())
    assert error < math.hypot(rounding, 6e-4), (case.name, error)
    print(f"{call.bits} bits, experts, {case.name}, code {call.code}, {error:.1e}", flush=True)


with ThreadPoolExecutor(2) as pool:
    wanted = [(case.source, case.defines()) for case in CASES]
    wanted += [
        (trellis_dequantize.KERNEL, {"BITS": bits, "HALF": int(half), "CODE": code}) for _, _, bits, half, code in DENSE
    ]
    compiled(*wanted[0])  # which compiles the header of all
    list(pool.map(lambda each: compiled(*each), wanted))
for each in CASES:
    check(each)
for dense in DENSE:
    check_dense(*dense)
for i, each in enumerate(experts.cases):
    check_experts(each, (torch.bfloat16, torch.float16)[i % 3 == 0])
