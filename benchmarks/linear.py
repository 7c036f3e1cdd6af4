"""Microseconds of the E8P or trellis linear beside torch's dense one and humming-kernels, as JSON lines; the tables of
docs/benchmarks/kernels.md are its lines, each held to float64.

PYTHONPATH=src python3 benchmarks/linear.py --tokens 1 8 16 32 64 512 4096 --out benchmarks/results/linear-h200.jsonl

`--warm` compiles every kernel beforehand, a process a layer: humming-kernels takes half a minute each.

    PYTHONPATH=src python3 benchmarks/linear.py --kernels hopper portable triton --no-peers --shapes 4096x14336

times families of kernels (onegraph/ops/family.py) beside each other in one run, with the bytes of codes and scales that
an SM gets a clock (of its highest rate). The portable one is then compiled for compute capability 8.0, in 99 KB.
"""

import argparse
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from kernels import HUMMING, LINEAR_SHAPES, bench_linear, has_humming, linear_layer

from onegraph.engine.record import Row, emit
from onegraph.formats.quantization import OWN
from onegraph.ops import family
from onegraph.ops.cuda import build, e8p, e8p_portable


def compiled(name: str, k: int, n: int, bits: int, tokens: list[int]) -> None:
    """Calls a layer once for each number of tokens, so that its kernels are in the caches on disk."""
    device = torch.device("cuda", 0)
    layer = linear_layer(name, k, n, bits, device, torch.bfloat16)
    for count in tokens:
        layer(torch.randn(count, k, device=device, dtype=torch.bfloat16))
    torch.cuda.synchronize()


@contextmanager
def running(kernels: str) -> Iterator[None]:
    """Inside of it the E8P linear runs this family's kernels; `ONEGRAPH_KERNELS` would say so for a whole process."""
    own = e8p.choose
    choose = {
        "hopper": own,
        "portable": lambda tokens, n, *_: e8p_portable.run if e8p_portable.supports_shape(tokens, n) else None,
        "triton": lambda *_: None,
    }[kernels]
    with mock.patch.object(family, "FORCED", kernels), mock.patch.object(e8p, "choose", choose):
        yield


def per_clock(row: Row) -> Row:
    """The row with its bytes by clock and SM."""
    clock = build.bindings()[0].CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    khz = build.check(build.bindings()[0].cuDeviceGetAttribute(clock, 0))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return row | {"bytes_per_clock": round(row["gb_per_s"] * 1e6 / (khz * sms), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[f"{k}x{n}" for k, n in LINEAR_SHAPES], help="k x n")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--format", choices=OWN, default="e8p")
    parser.add_argument("--warm", action="store_true", help="compile in parallel beforehand")
    parser.add_argument("--no-peers", action="store_true", help="without humming-kernels, installed or not")
    families = ["hopper", "portable", "triton"]
    parser.add_argument("--kernels", nargs="*", choices=families, default=[], help="families beside each other")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [(int(k), int(n)) for k, n in (shape.split("x") for shape in args.shapes)]
    peers = has_humming() and not args.no_peers
    if args.warm:
        ours = f"onegraph {args.format}"
        names = [ours, HUMMING] if peers else [ours]
        jobs = [(name, k, n, rate, args.tokens) for name in names for k, n in shapes for rate in args.bits]
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            pool.starmap(compiled, jobs, chunksize=1)
    if not args.kernels:
        for row in bench_linear(shapes, tokens=args.tokens, bits=args.bits, peers=peers, format=args.format):
            emit(row, args.out)
    for i, name in enumerate(args.kernels):
        with running(name):
            for row in bench_linear(shapes, tokens=args.tokens, bits=args.bits, dense=i == 0, peers=peers and i == 0):
                named = row if row["bits"] == 16 or row["name"] == HUMMING else row | {"name": f"{row['name']} {name}"}
                emit(per_clock(named), args.out)


if __name__ == "__main__":
    main()
