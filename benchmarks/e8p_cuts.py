"""Every way to cut the CUDA E8P linear of 1 to 4 tokens over a GPU, timed and checked: what `Plan.cost` was fitted to.

    PYTHONPATH=src python3 benchmarks/e8p_cuts.py --shapes 4096x14336 14336x4096 4096x4096 --tokens 1 4 --bits 2 3 4

One JSON line a plan, the quickest first; `chosen` marks the one that the shape gets, `error` is ||y - y64|| / ||y64||
against float64.
"""

import argparse
from functools import cache
from unittest import mock

import torch
from torch import Tensor

from onegraph.engine.bench import L2_TIMES, replay_us
from onegraph.engine.record import emit, machine
from onegraph.formats.e8p import codebook, hadamard_block, residual_dtype
from onegraph.ops.cuda import build, e8p, e8p_decode
from onegraph.ops.e8p import e8p_decode as decode_op

DEVICE = torch.device("cuda", 0)


def random_layer(k: int, n: int, bits: int) -> tuple:
    def draw(dtype: torch.dtype) -> Tensor:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, (n, k // 8), device=DEVICE).to(dtype)

    rest = residual_dtype(bits)
    scales = torch.randn(k, device=DEVICE), torch.randn(n, device=DEVICE) * k**-0.5
    return draw(torch.int16), None if rest is None else draw(rest), codebook(DEVICE), *scales, None, bits


def rotated(x: Tensor) -> Tensor:
    block = hadamard_block(x.shape[1])
    h = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (x.view(len(x), -1, block) @ h * block**-0.5).flatten(1)


def truth(x: Tensor, codes: Tensor, rest: Tensor | None, table: Tensor, scale: Tensor, out: Tensor, _, bits) -> Tensor:
    q = decode_op.reference(codes, rest, table, bits).double()
    return rotated(rotated(x.double() * scale) @ q.T) * out


def timed(layers: list[tuple], x: Tensor) -> float:
    return replay_us(lambda: [e8p.linear(x, *layer) for layer in layers], DEVICE, len(layers), budget_ms=20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4096x14336", "14336x4096", "4096x4096"], help="k x n")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4], choices=[1, 2, 3, 4])
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument(
        "--within", type=float, default=1.5, help="plans that should cost at most so many times the best"
    )
    args = parser.parse_args()
    about, properties = machine(DEVICE), torch.cuda.get_device_properties(DEVICE)
    device = build.device(DEVICE.index)
    for shape in args.shapes:
        k, n = map(int, shape.split("x"))
        for bits in args.bits:
            count = max(2, -(-L2_TIMES * properties.L2_cache_size // (k * n * bits // 8)))
            layers = [random_layer(k, n, bits) for _ in range(count)]
            for tokens in args.tokens:
                x = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
                expected, chosen = truth(x, *layers[0]), e8p_decode.plan(n, k, bits, tokens, device)
                most, rows = args.within * chosen.cost(bits, tokens, device), []
                for plan in e8p_decode.plans(n, k, bits, tokens, device):
                    if plan.cost(bits, tokens, device) > most:
                        continue
                    kernel = cache(e8p_decode._kernel.__wrapped__)  # the module's own remembers the chosen plan
                    with (
                        mock.patch.object(e8p_decode, "plan", lambda *_, plan=plan: plan),
                        mock.patch.object(e8p_decode, "_kernel", kernel),
                    ):
                        error = ((e8p.linear(x, *layers[0]).double() - expected).norm() / expected.norm()).item()
                        rows.append((timed(layers, x), error, plan))
                for us, error, plan in sorted(rows):
                    row = {"bench": "e8p_cuts", "k": k, "n": n, "tokens": tokens, "bits": bits, "us": round(us, 2)}
                    row |= {"error": float(f"{error:.2g}"), "cost": round(plan.cost(bits, tokens, device), 1)}
                    row |= {"chosen": plan == chosen, "ahead": plan.ahead, "tiles": plan.tiles, "cluster": plan.cluster}
                    row |= {"blocks": plan.blocks, "across": plan.across, "down": plan.down}
                    emit(row | about)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
