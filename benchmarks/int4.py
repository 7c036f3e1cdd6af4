"""Microseconds of INT4 linears beside torch's dense bfloat16, as JSON lines.

PYTHONPATH=src python3 benchmarks/int4.py --out benchmarks/results/int4-h200.jsonl
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import copy_bandwidth, replay_us

from onegraph.engine.record import emit, machine
from onegraph.ops.cuda import int4 as kernels
from onegraph.ops.int4 import int4_linear
from onegraph.ops.registry import nbytes

WORKING_SET = 480 << 20  # eight times an H200's L2
SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096))
DEVICE = torch.device("cuda", 0)


def weight(n: int, k: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Random codes, scales and zeros of a weight [n, k], made on the device."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    scale = torch.full((n, k // columns), k**-0.5 / 6.5, device=DEVICE, dtype=torch.float16)
    return codes, scale, torch.randint(0, 16, (n, k // columns), dtype=torch.uint8, device=DEVICE)


def timed(calls: list[Callable[[], Any]]) -> float:
    return replay_us(lambda: [call() for call in calls], DEVICE, len(calls), 40)


def linears(tokens: list[int], groups: list[int], order: bool) -> Iterator[dict[str, Any]]:
    for k, n in SHAPES:
        dense = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(-(-WORKING_SET // (2 * n * k)))]
        peers = {}
        for count in tokens:
            x = torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16)
            peers[count] = timed([partial(torch.nn.functional.linear, x, w) for w in dense])
        del dense
        for columns in groups:
            one = weight(n, k, columns)
            layers = [one, *(weight(n, k, columns) for _ in range(-(-WORKING_SET // nbytes(*one)) - 1))]
            gather = torch.randperm(k, device=DEVICE).int() if order else None
            for count in tokens:
                x = torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16)
                us = timed([partial(int4_linear, x, *w, gather, None, False) for w in layers])
                row = {"op": "int4_linear", "k": k, "n": n, "group": columns, "order": order, "tokens": count}
                yield row | {"us": us, "bf16_us": peers[count], "bytes": nbytes(*one)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--groups", type=int, nargs="*", default=[128])
    parser.add_argument("--order", action="store_true", help="with act-order")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBERS",
        help="another value of a constant of ops/cuda/int4.py: PACE=0, ONE_DEPTHS=6,4, FEW=0, MAX_TOKENS=64",
    )  # fmt: skip
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name, numbers in (setting.split("=") for setting in args.set):
        values = tuple(map(int, numbers.split(",")))
        setattr(kernels, name, values if isinstance(getattr(kernels, name), tuple) else values[0])
    about = {"bench": "int4", **({"set": args.set} if args.set else {}), **machine(DEVICE)}
    bandwidth = copy_bandwidth(DEVICE)
    for row in linears(args.tokens, args.groups, args.order):
        row["us"], row["bf16_us"] = round(row["us"], 2), round(row["bf16_us"], 2)
        emit(row | {"floor_us": round(row["bytes"] / bandwidth * 1e6, 2)} | about, args.out)


if __name__ == "__main__":
    main()
