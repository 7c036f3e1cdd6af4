"""Microseconds of the E8P linear beside torch's dense one and humming-kernels, as JSON lines; the tables of
docs/performance.md are its lines, each held to float64. `onegraph bench linear` prints a table.

PYTHONPATH=src python3 benchmarks/linear.py --tokens 1 8 16 32 64 512 4096 --out benchmarks/results/linear-h200.jsonl

`--warm` compiles every kernel beforehand, a process a layer: humming-kernels takes half a minute each.
"""

import argparse
import multiprocessing
from pathlib import Path

import torch

from onegraph.engine.bench import HUMMING, LINEAR_SHAPES, bench_linear, has_humming, linear_layer
from onegraph.engine.record import emit


def compiled(name: str, k: int, n: int, bits: int, tokens: list[int]) -> None:
    """Calls a layer once for each number of tokens, so that its kernels are in the caches on disk."""
    device = torch.device("cuda", 0)
    layer = linear_layer(name, k, n, bits, device, torch.bfloat16)
    for count in tokens:
        layer(torch.randn(count, k, device=device, dtype=torch.bfloat16))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[f"{k}x{n}" for k, n in LINEAR_SHAPES], help="k x n")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--warm", action="store_true", help="compile in parallel beforehand")
    parser.add_argument("--no-peers", action="store_true", help="without humming-kernels, installed or not")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [(int(k), int(n)) for k, n in (shape.split("x") for shape in args.shapes)]
    peers = has_humming() and not args.no_peers
    if args.warm:
        names = ["onegraph e8p", HUMMING] if peers else ["onegraph e8p"]
        jobs = [(name, k, n, rate, args.tokens) for name in names for k, n in shapes for rate in args.bits]
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            pool.starmap(compiled, jobs, chunksize=1)
    for row in bench_linear(shapes, tokens=args.tokens, bits=args.bits, peers=peers):
        emit(row, args.out)


if __name__ == "__main__":
    main()
