"""Appends lines that were measured outside of a checkout, whose `commit` is therefore a version, to a results file.

    python3 benchmarks/stamp.py measured.jsonl --commit 1a2b3c4 --to benchmarks/results/linear-h200.jsonl

The commit is that of the tree which was copied there; each line gets it, and its id anew.
"""

import argparse
import json
import re
from pathlib import Path

from onegraph.engine.record import emit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    if not re.fullmatch("[0-9a-f]{7,40}", args.commit):
        parser.error(
            f"--commit is {args.commit!r}; give the hash of a clean commit, as `git rev-parse --short HEAD` does"
        )
    for line in args.measured.read_text().splitlines():
        emit(json.loads(line) | {"commit": args.commit}, args.to)


if __name__ == "__main__":
    main()
