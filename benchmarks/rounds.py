"""Microseconds of one layer's attention in a round of several tokens a row: one launch beside three, as JSON lines.

    PYTHONPATH=src python3 benchmarks/rounds.py --out rounds.jsonl

RoPE, the cache's write and attention, graph replay, layers' caches walked so that none stays in the L2. One token is a
decode step's own kernel. `ONEGRAPH_KERNELS=portable` in front measures the form without clusters.
"""

import argparse
from pathlib import Path

from kernels import bench_attention

from onegraph.engine.record import emit

SHAPES = {"llama-3-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}  # heads, kv heads, head size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2, 4, 8], help="of a row's round")
    parser.add_argument("--rows", nargs="*", default=["1x1024", "16x1024", "8x32768"], help="BATCHxCONTEXT")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    heads, kv_heads, dim = SHAPES[args.shape]
    for rows in args.rows:
        batch, context = map(int, rows.split("x"))
        for tokens in args.tokens:
            for row in bench_attention(
                [context], batches=[batch], tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=dim
            ):
                emit(row | {"shape": args.shape}, args.out)


if __name__ == "__main__":
    main()
