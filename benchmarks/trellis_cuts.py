"""Microseconds of the trellis linear by each kernel and cut, as JSON lines: what `FEW` of ops/cuda/trellis.py and `cut`
of ops/cuda/trellis_batch.py are chosen by.

PYTHONPATH=src python3 benchmarks/trellis_cuts.py --shapes 4096x14336 --tokens 4 8 16 32 64 --bits 2 4
"""

import argparse
from unittest import mock

from kernels import bench_linear

from onegraph.engine.record import emit
from onegraph.ops.cuda import trellis, trellis_batch, trellis_dequantize, trellis_portable
from onegraph.ops.cuda.trellis_batch import Cut

CUTS = Cut(8, 2, 4), Cut(8, 2, 2), Cut(12, 1, 2), Cut(12, 1, 4), Cut(16, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["4096x14336"], help="k x n")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--bits", type=int, nargs="*", default=[4])
    args = parser.parse_args()
    shapes = [(int(k), int(n)) for k, n in (shape.split("x") for shape in args.shapes)]
    kinds = [("portable", trellis_portable.run, None), ("dequantize", trellis_dequantize.run, None)]
    kinds += [(f"batch {each.warps} {each.per_sm} {each.ahead}", trellis_batch.run, each) for each in CUTS]
    for name, run, cut in kinds:
        with (
            mock.patch.object(trellis, "choose", lambda *_, run=run, **__: run),
            mock.patch.object(trellis_batch, "cut", lambda *_, cut=cut: cut),
        ):
            few = args.tokens if run is not trellis_portable.run else [each for each in args.tokens if each <= 16]
            for row in bench_linear(shapes, tokens=few, bits=args.bits, dense=False, peers=False, format="trellis"):
                emit(row | {"name": name}, None)


if __name__ == "__main__":
    main()
