"""Microseconds of exllamav3's EXL3 linear beside ours and cuBLAS, as JSON lines.

    PYTHONPATH=src python3 benchmarks/exllamav3.py --out benchmarks/results/exllamav3-h200.jsonl

Wants exllamav3's compiled module to import, `exllamav3_ext`. Codes are random, of the codebook that its converter takes
by default (mul1). Its linear is called as `LinearEXL3.forward` calls it, rotations and scales of both sides inside, and
tunes itself at the first call. Of one or two tokens it rounds the rotated input to int8 ("exllamav3 int8"), unless
EXL3_INT8_GEMV=0, which is timed beside it. `error` is ||y - y64|| / ||y64||, in float64 from the weight that its own
`reconstruct` makes of the codes.
"""

import argparse
import importlib.metadata
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from kernels import L2_TIMES, bench_linear, copy_bandwidth, replay_us
from linear import compiled, running
from torch import Tensor

from onegraph.engine.record import Row, emit, machine
from onegraph.ops.hadamard import hadamard

DEVICE = torch.device("cuda", 0)
SHAPES = "4096x14336", "14336x4096"  # k x n
MAX_ERROR = 0.02  # int8 activations alone cost .009 of the result's norm
INT8 = "EXL3_INT8_GEMV"  # read at each call: 2, by default, or 0
BLOCK = 128  # of its rotations


class Exl3:
    """A linear of exllamav3 with random codes: trellis int16 [k / 16, n / 16, 16 * bits], scales float16 [k], [n]."""

    def __init__(self, k: int, n: int, bits: int) -> None:
        self.trellis = torch.randint(-(2**15), 2**15, (k // 16, n // 16, 16 * bits), device=DEVICE).short()
        self.in_scale = torch.randn(k, device=DEVICE).half()
        self.out_scale = (torch.randn(n, device=DEVICE) * k**-0.5).half()

    def __call__(self, x: Tensor) -> Tensor:
        import exllamav3_ext  # type: ignore[import-not-found]  # a peer, optional

        y = x.new_empty(len(x), len(self.out_scale))
        exllamav3_ext.exl3_gemm(
            x, self.trellis, y, self.in_scale, torch.empty_like(x), self.out_scale, -1, False, True, 0
        )
        return y

    def error(self, x: Tensor) -> float:
        """||y - y64|| / ||y64|| for x float16 [tokens, k]."""
        import exllamav3_ext

        weight = x.new_empty(len(self.in_scale), len(self.out_scale))
        exllamav3_ext.reconstruct(weight, self.trellis, self.trellis.shape[2] // 16, False, True)
        inner = hadamard(x.float() * self.in_scale, BLOCK).double() @ weight.double()
        truth = hadamard(inner.float(), BLOCK).double() * self.out_scale
        return ((self(x).double() - truth).norm() / truth.norm()).item()

    @property
    def nbytes(self) -> int:
        return self.trellis.nbytes + self.in_scale.nbytes + self.out_scale.nbytes


def run(layers: list[Exl3], x: Tensor) -> None:
    for layer in layers:
        layer(x)


def peers(shapes: list[tuple[int, int]], tokens: list[int], bits: list[int]) -> Iterator[Row]:
    wanted = L2_TIMES * torch.cuda.get_device_properties(DEVICE).L2_cache_size
    for k, n in shapes:
        for rate in bits:
            first = Exl3(k, n, rate)
            layers = [first, *(Exl3(k, n, rate) for _ in range(-(-wanted // first.nbytes) - 1))]
            for count in tokens:
                x = torch.randn(count, k, device=DEVICE, dtype=torch.float16)
                for int8 in (True, False) if count <= 2 else (False,):
                    os.environ[INT8] = "2" if int8 else "0"
                    error = first.error(x)
                    us = replay_us(partial(run, layers, x), DEVICE, len(layers), budget_ms=40)
                    roof = first.nbytes / copy_bandwidth(DEVICE) * 1e6
                    row: Row = {"name": "exllamav3 int8" if int8 else "exllamav3", "k": k, "n": n, "tokens": count}
                    row |= {"bits": rate, "dtype": "float16", "us": round(us, 2), "error": float(f"{error:.2g}")}
                    row |= {"gb_per_s": round(first.nbytes / us * 1e-3, 1), "roof_us": round(roof, 2)}
                    yield row | {"percent_of_roof": round(100 * roof / us, 1), "copies": len(layers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="k x n")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--kernels", nargs="*", choices=["hopper", "portable"], default=["hopper", "portable"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [(int(k), int(n)) for k, n in (shape.split("x") for shape in args.shapes)]
    about = {"bench": "exllamav3", **machine(DEVICE), "exllamav3": importlib.metadata.version("exllamav3")}
    wrong = []
    for row in peers(shapes, args.tokens, args.bits):
        emit(row | about, args.out)
        if not row["error"] < MAX_ERROR:
            wrong.append(f"{row['name']} {row['k']}x{row['n']}, {row['bits']} bits, {row['tokens']} tokens")
    for i, name in enumerate(args.kernels):
        with running(name):
            with ThreadPoolExecutor() as pool:
                kinds = [(k, n, rate) for k, n in shapes for rate in args.bits]
                jobs = [pool.submit(compiled, "onegraph e8p", *kind, args.tokens) for kind in kinds]
                for job in jobs:
                    job.result()
            for row in bench_linear(shapes, tokens=args.tokens, bits=args.bits, dense=i == 0, peers=False):
                shown = {} if row["bits"] == 16 else {"name": f"{row['name']} {name}"}
                emit(row | shown | about, args.out)
    if wrong:
        raise SystemExit(f"an error of {MAX_ERROR} and more, so what was timed is not the product: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
