"""The E8P linear of 1 to 8 tokens as a Hopper GPU runs it, from its launcher down to every block, which runs on this
CPU: `host.py FOLDER`, which holds the sources. Prints a line for each case; fails where a result is wrong."""

import ctypes
import shutil
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from h200 import H200
from on_cpu import compile_run, flags, launch_on_cpu
from onegraph.formats.e8p import codebook
from onegraph.nn.peers import Peers
from onegraph.ops import e8p as ops
from onegraph.ops.cuda import build, e8p_decode
from onegraph.ops.cuda.e8p_common import Linear
from onegraph.ops.ranks import CHUNK, LAST_ROUND, ROUNDS

FOLDER = Path(sys.argv[1])
PLANNED = e8p_decode.plan
PLAN = e8p_decode.DecodeTiling  # ahead, tiles, cluster, blocks, slices, per_block, across, down


@dataclass(frozen=True)
class Case:
    """A shape, what stands around it, and a plan where the shape's own would be another."""

    tokens: int
    n: int
    k: int
    bits: int
    with_: str = ""
    plan: e8p_decode.DecodeTiling | None = None
    half: bool = False
    ranks: int = 1

    @property
    def around(self) -> tuple[int, ...]:
        return (*(name in self.with_ for name in ("norm", "silu", "bias", "add", "wide")), self.ranks)

    @property
    def chosen(self) -> e8p_decode.DecodeTiling:
        return self.plan or PLANNED(self.n, self.k, self.bits, self.tokens, H200)

    @property
    def defines(self) -> tuple[str, ...]:
        made = e8p_decode.defines(self.chosen, self.n, self.k, self.bits, self.tokens, self.half, self.around)
        return flags(made)


CASES = [
    # as planned for an H200: every rate, both dtypes, each number of tokens, blocks of 64 rows and columns, all fusions
    Case(1, 192, 576, 2, "norm"),
    Case(1, 320, 512, 3, "add silu", half=True),
    Case(2, 128, 1600, 4, "bias wide norm add"),
    Case(3, 64, 320, 3, "norm bias"),
    Case(4, 192, 768, 4, "silu wide", half=True),
    Case(5, 320, 576, 2, "norm add"),
    Case(6, 128, 512, 3, "add norm", half=True),
    Case(7, 192, 1024, 4, "silu add"),
    Case(8, 256, 832, 2, "norm bias add"),
    # a warp alone with a slice; clusters, of which one block has a slice less; two blocks of rows
    Case(1, 256, 768, 2, "add", PLAN(4, 2, 1, 1, 3, 3, 3, 1)),
    Case(2, 256, 1280, 4, "norm", PLAN(2, 1, 2, 2, 5, 3, 3, 1)),
    Case(4, 256, 1280, 2, "norm", PLAN(2, 1, 2, 2, 5, 3, 3, 1)),
    Case(8, 256, 1280, 4, "norm add", PLAN(1, 1, 3, 2, 5, 2, 2, 1)),
    Case(6, 128, 1536, 3, "norm", PLAN(2, 1, 3, 1, 6, 2, 2, 4)),
    # two slices a warp
    Case(1, 128, 1024, 3, "norm", PLAN(2, 1, 1, 1, 4, 4, 2, 2)),
    Case(2, 128, 1024, 2, "norm", PLAN(2, 1, 1, 1, 4, 4, 2, 2)),
    Case(3, 128, 1024, 2, "norm", PLAN(2, 1, 1, 1, 4, 4, 2, 1)),
    Case(8, 128, 1024, 4, "norm", PLAN(2, 1, 1, 1, 4, 4, 2, 2)),
    Case(5, 128, 1280, 2, "", PLAN(2, 1, 1, 1, 5, 5, 3, 1)),
    # ranks: one job a warp and several, in clusters and without, two blocks of rows
    Case(1, 256, 512, 2, "add", ranks=2),
    Case(1, 256, 768, 4, "silu add", half=True, ranks=3),
    Case(4, 256, 1280, 2, "add", PLAN(2, 1, 2, 2, 5, 3, 3, 1), ranks=2),
    Case(3, 256, 512, 3, "bias", PLAN(2, 1, 1, 2, 2, 2, 2, 1), ranks=2),
    Case(8, 256, 512, 2, "add silu", PLAN(2, 1, 1, 2, 2, 2, 2, 1), ranks=2),
]


@cache
def library(defines: tuple[str, ...], rank: int = 0) -> ctypes.CDLL:
    """Of each rank one of its own, since blocks run in its memory."""
    if rank:
        library(defines)
        copied = FOLDER / f"host-{abs(hash(defines))}-{rank}.so"
        shutil.copy(FOLDER / f"host-{abs(hash(defines))}.so", copied)
        return ctypes.CDLL(str(copied))
    path = FOLDER / f"host-{abs(hash(defines))}.so"
    compile_run(FOLDER, defines, path, "-shared", "-fno-gnu-unique")  # `Shape` is each library's own
    return ctypes.CDLL(str(path))


class Kernel:
    def __init__(self, run: object) -> None:
        self.run = run

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert shared <= H200.shared
        self.run(ctypes.c_char_p(arguments), grid[0], threads, shared, cluster)


def tensor_map(address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int) -> bytes:
    return struct.pack("16q", address, rows, row_bytes, box_bytes, box_rows, 1, *[0] * 10)


def sliced_tensor_map(address: int, rows: int, row_bytes: int, box: tuple[int, int, int], *, swizzle: bool) -> bytes:
    assert not swizzle
    return struct.pack("16q", address, rows, row_bytes, *box, *[0] * 10)


build.device = lambda index: H200
e8p_decode.tensor_map, e8p_decode.sliced_tensor_map = tensor_map, sliced_tensor_map
TABLES = e8p_decode.tables(codebook())
e8p_decode._TABLES = {None: TABLES.data_ptr()}  # a CPU has no index


def rank_of(case: Case, rank: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """What a rank multiplies: x, codes, residual codes, scales, and the bias, which the first one has."""
    _, silu, bias, *_ = case.around
    x = torch.randn(case.tokens, 2 * case.k if silu else case.k, generator=generator)
    codes = ops.random_codes(case.n, case.k, case.bits, torch.device("cpu"), generator)
    scales = ops.random_scales(case.n, case.k, torch.device("cpu"), generator)
    given = torch.randn(case.n, generator=generator) if bias and rank == 0 else None
    return x.to(torch.float16 if case.half else torch.bfloat16), *codes, *scales, given


def check_ranks(case: Case) -> None:
    """Several times, at each rank's own pace, over rounds that begin anew and differ between chunks; then alone."""
    silu, add, dtype = case.around[1], case.around[3], torch.float16 if case.half else torch.bfloat16
    g = torch.Generator().manual_seed(1)
    given = [rank_of(case, rank, g) for rank in range(case.ranks)]
    more = torch.randn(case.tokens, case.n, generator=g).to(dtype) if add else None
    book, bits, group = codebook(), case.bits, Peers([torch.device("cpu")] * case.ranks, case.tokens * case.n)
    own = [
        ops.e8p_linear.reference(x.float(), codes, rest, book, *scales, bias, bits, None, None, silu, True)
        for x, codes, rest, *scales, bias in given
    ]
    truth = sum(own[1:], own[0]) + (0.0 if more is None else more.float())
    rest_of = replace(case, with_=case.with_.replace("bias", ""))
    libraries = [library((rest_of if rank else case).defines, rank).run for rank in range(case.ranks)]
    here = threading.local()
    e8p_decode.plan = lambda *_: case.chosen
    launch_on_cpu(lambda *_: {"e8p_decode": Kernel(libraries[here.rank])})

    def run(rank: int) -> Tensor:
        here.rank = rank
        x, codes, rest, *scales, bias = given[rank]
        out = torch.full((case.tokens, case.n), float("nan"), dtype=dtype)
        layer = x, codes, rest, book, *scales, bias, bits
        e8p_decode.run(Linear(*layer, more, silu=bool(silu), out=out, group=group.rank(rank).group))
        return out

    group.arm()
    chunks = torch.arange(case.tokens * case.n // CHUNK)
    for state in group.states:
        state[ROUNDS:] = LAST_ROUND - chunks % 5
    with ThreadPoolExecutor(case.ranks) as pool:
        first, *others = pool.map(lambda rank: [run(rank) for _ in range(4)], range(case.ranks))
    rounding = (truth.to(dtype).float() - truth).norm()
    for i, out in enumerate(first):
        assert all(torch.equal(out, other[i]) for other in others), case
        assert (out.float() - truth).norm() < 1.3 * rounding + 1e-4 * truth.norm(), case
    group.check()
    next_round = (4 - chunks % 5 + LAST_ROUND - 1) % LAST_ROUND + 1
    assert all(torch.equal(state[ROUNDS:], next_round) for state in group.states)
    group.arm(False)
    alone = own[1] + (0.0 if more is None else more.float())
    assert (run(1).float() - alone).norm() < 8e-3 * alone.norm(), case
    plan = case.chosen
    print(f"{bits} bits, {case.tokens} tokens, clusters of {plan.cluster}, {case.ranks} ranks", flush=True)


def check(case: Case) -> None:
    norm, silu, bias, add, wide, _ = case.around
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
    e8p_decode.plan = lambda *_: case.chosen
    launch_on_cpu(lambda _, device, *defines: {"e8p_decode": Kernel(library(flags(dict(defines))).run)})
    out = torch.full((tokens, n), float("nan"), dtype=torch.float32 if wide else dtype)
    e8p_decode.run(Linear(x, codes, residual, codebook(), *scales, given, bits, more, eps, silu, wide, out=out))
    rounding = float((truth.to(dtype).float() - truth).norm() / truth.norm()) if not wide else 0.0
    for token in range(tokens):  # none is lost in the others' size
        error = float((out[token].float() - truth[token]).norm() / truth[token].norm())
        assert error < 1.3 * rounding + 1e-4, (case, token, error)
    plan = case.chosen
    print(f"{bits} bits, {tokens} tokens, clusters of {plan.cluster}, {plan.down} warps a slice, 1 rank", flush=True)


with ThreadPoolExecutor(2) as pool:
    first, *others = (case.defines for case in CASES)
    library(first)  # which compiles the header of all
    list(pool.map(library, others))
for each in CASES:
    check(each) if each.ranks == 1 else check_ranks(each)
