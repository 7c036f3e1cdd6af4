"""Microseconds of the E8P linear beside torch's dense one, as JSON lines; `onegraph bench linear` prints the table.

PYTHONPATH=src python3 benchmarks/linear.py --out benchmarks/results/linear-h200.jsonl
"""

import argparse
import json
from pathlib import Path

from onegraph.engine.bench import LINEAR_SHAPES, bench_linear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[f"{k}x{n}" for k, n in LINEAR_SHAPES], help="k x n")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = (
        f"PYTHONPATH=src python3 benchmarks/linear.py --shapes {' '.join(args.shapes)} "
        f"--tokens {' '.join(map(str, args.tokens))} "
        f"--bits {' '.join(map(str, args.bits))}"
    )
    shapes = [(int(k), int(n)) for k, n in (shape.split("x") for shape in args.shapes)]
    for row in bench_linear(shapes, tokens=args.tokens, bits=args.bits):
        line = json.dumps(row | {"command": command})
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
