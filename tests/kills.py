"""Kills `quantize`, `serve` and `soak` at random times, starts them again, and looks at what is left: `make kills`.

    PYTHONPATH=src python3 tests/kills.py --what quantize serve soak --count 100 --seed 0

The real commands on a tiny model. What each must hold after a kill is in the docstrings of tests/fuzz/killed.py. Prints
a line a command, as benchmarks/results has them; ends with status 1 where something was found.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from fuzz.killed import JOBS, kill
from onegraph.engine.record import emit, machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="+", choices=JOBS, default=list(JOBS), help="(default: all)")
    parser.add_argument("--count", type=int, default=100, help="kills of each (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of times and signals (default: 0)")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        for what in args.what:
            began = time.monotonic()
            tally = kill(what, args.count, args.seed, Path(folder) / what)
            seconds = {"seconds": round(time.monotonic() - began)}
            emit({"bench": "kills", "run": what} | tally.row() | seconds | machine("cpu"), args.out)
            found += len(tally.found)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
