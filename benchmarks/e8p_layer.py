"""The four linears of a layer behind one another, as a decode step runs them but for attention between them.

    PYTHONPATH=src python3 benchmarks/e8p_layer.py --tokens 1 2 4 16 --out benchmarks/results/e8p-layer-h200.jsonl

Layers of the Llama-3-8B shape with random codes, all in one graph: qkv behind its RMSNorm, output onto the residual,
gate and up behind theirs, down behind SwiGLU onto the residual. A JSON line for each rate and number of tokens.
"""

import argparse
from pathlib import Path

import torch
from e8p_cuts import random_layer
from kernels import replay_us
from torch import Tensor

from onegraph.engine.record import emit, machine
from onegraph.ops.e8p import e8p_linear

DEVICE = torch.device("cuda", 0)
HIDDEN, QKV, WIDE = 4096, 6144, 14336
SHAPES = (HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * WIDE), (WIDE, HIDDEN)  # k, n
EPS = 1e-5


def through(layers: list[list[tuple]], x: Tensor) -> Tensor:
    for qkv, out, gate_up, down in layers:
        heads = e8p_linear(x, *qkv, None, EPS)
        attended = heads.view(-1)[: x.numel()].view_as(x)  # attention's result is as large, and no copy makes it here
        x = e8p_linear(attended, *out, x)
        x = e8p_linear(e8p_linear(x, *gate_up, None, EPS), *down, x, None, True)
    return x


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    about = {"layers": args.layers, **machine(DEVICE)}
    for bits in args.bits:
        layers = [[random_layer(k, n, bits) for k, n in SHAPES] for _ in range(args.layers)]
        for tokens in args.tokens:
            x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
            us = replay_us(lambda layers=layers, x=x: through(layers, x), DEVICE, args.layers)
            row = {"bench": "e8p_layer", "what": "four linears of a layer", "bits": bits, "tokens": tokens}
            row |= {"us": round(us, 2), **about}
            emit(row, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
