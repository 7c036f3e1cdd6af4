"""The portable E8P linear as a GPU runs it, from the op's kernel down to every launch, which runs on this CPU: `host.py
FOLDER`, which holds the sources. Prints a line for each case; fails where a result is wrong."""

import ctypes
import math
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
from onegraph.ops.cuda import build, e8p_portable, rotated_portable
from onegraph.ops.cuda.e8p_common import Linear

FOLDER = Path(sys.argv[1])
SMALL = replace(H200, sms=6, shared=build.PORTABLE_SHARED, clusters=(6,) + (0,) * 15)  # as sums meet there
counters = torch.zeros(4096, dtype=torch.int32)
step = 1  # in which blocks come


@dataclass(frozen=True)
class Case:
    """A shape, what stands around it, and a plan where the shape's own would be another."""

    tokens: int
    n: int
    k: int
    bits: int
    with_: str = ""
    plan: e8p_portable.E8PTiling | None = None
    half: bool = False

    @property
    def around(self) -> tuple[bool, ...]:
        return tuple(name in self.with_ for name in ("norm", "silu", "bias", "add", "wide"))

    @property
    def passes(self) -> list[int]:
        """Tokens of each."""
        count = -(-self.tokens // rotated_portable.AT_ONCE)
        return [self.tokens * (i + 1) // count - self.tokens * i // count for i in range(count)]

    def chosen(self, tokens: int) -> e8p_portable.E8PTiling:
        return self.plan or PLANNED(self.n, self.k, self.bits, tokens, SMALL)

    def defines(self, tokens: int) -> tuple[str, ...]:
        made = self.chosen(tokens).defines(self.n, self.k, self.bits, self.half, self.around)
        return flags(made | {"START": 1024, "FOLLOWS": made["TOKENS"] % 2})


PLANNED = e8p_portable.E8PTiling.plan
PLAN = e8p_portable.E8PTiling  # ahead, tokens, turns, strips, parts, unit, across, down, hold
CASES = [
    # as planned for 6 SMs: every rate, both dtypes, odd numbers of tokens, blocks of 64 rows and columns, all fusions
    Case(1, 192, 576, 2, "norm"),
    Case(1, 320, 512, 3, "add silu", half=True),
    Case(1, 128, 1600, 4, "bias wide norm add"),
    Case(3, 64, 64, 3, "norm bias"),
    Case(4, 192, 768, 4, "silu wide", half=True),
    Case(5, 320, 576, 2, "norm add"),
    Case(16, 576, 320, 3, "add", half=True),
    # two passes
    Case(17, 64, 320, 2, "add norm"),
    # rotated by a launch in front
    Case(8, 192, 512, 3, "silu bias", PLAN(2, 8, False, 3, 2, 1, 1, 4, 4)),
    Case(11, 128, 832, 4, "norm add wide", PLAN(2, 16, False, 2, 4, 1, 1, 4, 4)),
    # several rounds of sums in blocks that end their rows by themselves; the last round is short
    Case(1, 640, 512, 2, "norm", PLAN(4, 1, True, 2, 1, 8, 2, 2, 8)),
    # the same between blocks, where strips cut blocks of rows; a warp that has no slice
    Case(3, 704, 576, 4, "add norm", PLAN(2, 4, True, 5, 2, 1, 2, 2, 4)),
    # more than 32 blocks of rows a block
    Case(1, 4416, 128, 3, "bias", PLAN(2, 1, True, 1, 1, 1, 1, 8, 32)),
]


@cache
def library(defines: tuple[str, ...]) -> ctypes.CDLL:
    path = FOLDER / f"host-{abs(hash(defines))}.so"
    compile_run(FOLDER, defines, path, "-shared")
    return ctypes.CDLL(str(path))


class Kernel:
    def __init__(self, run: object, turns: int) -> None:
        self.run, self.turns = run, turns

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert shared <= build.PORTABLE_SHARED
        assert threads <= 512
        assert cluster == 1
        self.run(ctypes.c_char_p(arguments), self.turns, grid[0], threads, shared, step)


class Counters:
    @staticmethod
    def of(device: int | None) -> int:
        return counters.data_ptr()


def kernels(_: build.Source, device: None, *defines: tuple[str, int]) -> dict[str, Kernel]:
    made = dict(defines)
    run = library(flags(made | {"START": 1024, "FOLLOWS": made["TOKENS"] % 2})).run
    return {"e8p_portable": Kernel(run, 0), "e8p_portable_turn": Kernel(run, 1)}


build.device = lambda index: SMALL
launch_on_cpu(kernels)
rotated_portable.ARRIVED = Counters


def check(case: Case) -> None:
    global step
    norm, silu, bias, add, wide = case.around
    dtype, bits = torch.float16 if case.half else torch.bfloat16, case.bits
    tokens, n, k = case.tokens, case.n, case.k
    g = torch.Generator().manual_seed(0)
    codes, residual = ops.random_codes(n, k, bits, torch.device("cpu"), g)
    scales = ops.random_scales(n, k, torch.device("cpu"), g)
    # Each token of another size.
    x = (torch.randn(tokens, 2 * k if silu else k, generator=g) * (1 + torch.arange(tokens)[:, None])).to(dtype)
    given = torch.randn(n, generator=g) if bias else None
    more = torch.randn(tokens, n, generator=g).to(torch.float32 if wide else dtype) if add else None
    eps = 1e-5 if norm else None
    truth = ops.e8p_linear.reference(
        x.float(), codes, residual, codebook(), *scales, given, bits, more, eps, silu, True
    )

    e8p_portable.E8PTiling.plan = lambda n, k, bits, tokens, device: case.chosen(tokens)
    results = []
    for order in (1, 7919):  # a prime, so that all come
        step = order
        out = torch.full((tokens, n), float("nan"), dtype=torch.float32 if wide else dtype)
        e8p_portable.run(Linear(x, codes, residual, codebook(), *scales, given, bits, more, eps, silu, wide, out=out))
        assert not counters.any(), case
        results.append(out)
    assert torch.equal(*results), case  # whoever came last
    rounding = float((truth.to(dtype).float() - truth).norm() / truth.norm()) if not wide else 0.0
    error = float((results[0].float() - truth).norm() / truth.norm())
    assert error < math.hypot(rounding, 1e-4), (case, error)
    plan = case.chosen(case.passes[0])
    rounds = -(-plan.most(n) // plan.hold)
    who = "alone" if plan.whole else f"{plan.strips * plan.parts} blocks"
    turned = "" if plan.turns else "turned in front, "
    print(f"{bits} bits, {tokens} tokens, {turned}{who}, {rounds} rounds, {len(case.passes)} passes", flush=True)


def alike(n: int, k: int, bits: int, most: e8p_portable.E8PTiling | None = None) -> list[Case]:
    """A case for each number of tokens that a kernel is compiled for, cut as 16 are: as planned, or as `most`."""
    own = {t: e8p_portable.E8PTiling.like_most(n, k, bits, t, SMALL) for t in rotated_portable.CLASSES}
    plans = {t: plan if most is None else replace(most, tokens=t) for t, plan in own.items()}
    return [Case(tokens, n, k, bits, "norm add", plan) for tokens, plan in plans.items()]


def check_alike(cases: list[Case]) -> None:
    """A token has the same bits among any others, the last and the first of them."""
    n, k, bits = cases[0].n, cases[0].k, cases[0].bits
    g, out = torch.Generator().manual_seed(1), {}
    codes, residual = ops.random_codes(n, k, bits, torch.device("cpu"), g)
    scales = ops.random_scales(n, k, torch.device("cpu"), g)
    x, more = (torch.randn(16, size, generator=g).bfloat16() for size in (k, n))
    for case in cases:
        e8p_portable.E8PTiling.like_most = lambda *_, plan=case.plan: plan
        for first in {0, 16 - case.tokens}:
            part = slice(first, first + case.tokens)
            y = torch.full((case.tokens, n), float("nan"), dtype=torch.bfloat16)
            layer = x[part], codes, residual, codebook(), *scales, None, bits
            e8p_portable.run(Linear(*layer, more[part], 1e-5, out=y, steady=True))
            out[case.tokens, first] = y
    for (tokens, first), y in out.items():
        assert torch.equal(y, out[16, 0][first : first + tokens]), (n, k, bits, tokens)
    print(f"{bits} bits, alike", flush=True)


ALIKE = [
    alike(320, 1088, 2),
    alike(192, 576, 4, PLAN(2, 16, False, 3, 2, 1, 2, 2, 4)),
]
with ThreadPoolExecutor(2) as pool:
    first, *others = (case.defines(tokens) for case in sum(ALIKE, CASES) for tokens in case.passes)
    library(first)  # which compiles the header of all
    list(pool.map(library, others))
for each in CASES:
    check(each)
for each in ALIKE:
    check_alike(each)
