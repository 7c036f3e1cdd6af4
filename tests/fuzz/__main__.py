"""`python -m tests.fuzz --count 10000`: prints each failure with the seed that reproduces it."""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from .run import Failure, Fuzzer


def run() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="cases to run (default: 1000)")
    parser.add_argument("--seed", type=int, help="of the first case; the others follow (default: a new one)")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    args = parser.parse_args()
    first = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    torch.set_num_threads(1)
    print(f"{args.count} cases from seed {first}", flush=True)
    started, printed, failures = time.monotonic(), time.monotonic(), 0
    ends: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        fuzzer = stack.enter_context(contextlib.closing(Fuzzer(Path(folder))))
        for number, seed in enumerate(range(first, first + args.count), 1):
            try:
                what = fuzzer.run(seed)
                ends[what.split("-> ")[-1].split()[0]] += 1
                if args.verbose:
                    print(what, flush=True)
            except Failure as failure:
                failures += 1
                print(f"\nFAILED {failure}\nreproduce: python -m tests.fuzz --count 1 --seed {seed}\n", flush=True)
            if time.monotonic() - printed > 10:
                printed = time.monotonic()
                print(f"{number} of {args.count}, {failures} failed, {printed - started:.0f} s", flush=True)
    print(
        f"{args.count} cases in {time.monotonic() - started:.0f} s: {ends['0']} went through, {ends['2']} ended in one "
        f"line, {failures} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run())
