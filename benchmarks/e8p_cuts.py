"""Every way to cut the CUDA E8P linear over a GPU, timed and checked: what `Plan.cost` was fitted to.

    PYTHONPATH=src python3 benchmarks/e8p_cuts.py --shapes 4096x14336 14336x4096 4096x4096 --tokens 1 4 --bits 2 3 4
    PYTHONPATH=src python3 benchmarks/e8p_cuts.py --kernels portable --most 16 --shapes 4096x14336 14336x4096 --tokens 1

One JSON line a plan, the quickest first; `chosen` marks the one that the shape gets, `error` is ||y - y64|| / ||y64||
against float64. `--kernels portable` cuts e8p_portable.cu, compiled for compute capability 8.0 in 99 KB, the two
quickest also with fewer and more row tiles of codes under way (`ahead`); `--most` takes so many plans, which should be
best.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernels import L2_TIMES, replay_us
from torch import Tensor

from onegraph.engine.record import emit, machine
from onegraph.formats.e8p import codebook, residual_dtype
from onegraph.formats.rotated import hadamard_block
from onegraph.ops import family
from onegraph.ops.cuda import build, e8p, e8p_decode, e8p_portable
from onegraph.ops.e8p import e8p_decode as decode_op
from onegraph.ops.e8p import e8p_linear

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
    return replay_us(lambda: [e8p_linear(x, *layer) for layer in layers], DEVICE, len(layers), budget_ms=20)


def hopper_plans(
    n: int, k: int, bits: int, tokens: int, device: build.Device, warps: list[int]
) -> Iterator[tuple[float, Any]]:
    for plan in e8p_decode.plans(n, k, bits, tokens, device):
        yield plan.cost(bits, tokens, device), plan


def portable_plans(
    n: int, k: int, bits: int, tokens: int, device: build.Device, warps: list[int]
) -> Iterator[tuple[float, Any]]:
    for own in [dict.fromkeys(e8p_portable.CLASSES, count) for count in warps] or [e8p_portable.WARPS]:
        with mock.patch.object(e8p_portable, "WARPS", own):
            plans = e8p_portable.plans(n, k, bits, tokens, device)
        for plan in plans:
            yield plan.cost(n, bits, device), plan


def with_other_rings(plan: e8p_portable.PortableTiling, n: int, bits: int) -> Iterator[e8p_portable.PortableTiling]:
    """The same cut with fewer and more row tiles of codes under way."""
    for ahead in range(1, 5):
        other = replace(plan, ahead=ahead, hold=plan.most(n)).fitting(bits, build.PORTABLE_SHARED)
        if other and ahead != plan.ahead:
            yield other


def measured(module: Any, plan: Any, layers: list[tuple], x: Tensor, expected: Tensor) -> tuple[float, float]:
    """Microseconds, and the error."""
    chosen = mock.patch.object(e8p, "choose", return_value=module.run)
    with chosen, mock.patch.object(module, "plan", return_value=plan):
        error = ((e8p_linear(x, *layers[0]).double() - expected).norm() / expected.norm()).item()
        return timed(layers, x), error


def compiled(plan: e8p_portable.PortableTiling, n: int, k: int, bits: int) -> None:
    """Into the cache on disk."""
    defines = e8p_portable.defines(plan, n, k, bits, False, (False,) * 5)
    e8p_portable.KERNELS.cubin(defines, torch.cuda.get_device_capability(DEVICE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4096x14336", "14336x4096", "4096x4096"], help="k x n")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4], help="1 to 8, portable 1 to 16")
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--kernels", choices=["hopper", "portable"], default="hopper")
    parser.add_argument(
        "--within", type=float, default=1.5, help="plans that should cost at most so many times the best"
    )
    parser.add_argument("--warps", nargs="+", type=int, default=[], help="of a block of the portable kernel, at most")
    parser.add_argument("--most", type=int, default=1000, help="plans of a shape, rate and number of tokens")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    portable = args.kernels == "portable"
    module, made = (e8p_portable, portable_plans) if portable else (e8p_decode, hopper_plans)
    most = e8p_portable.AT_ONCE if portable else e8p_decode.MAX_TOKENS
    if max(args.tokens) > most:
        parser.error(f"--tokens is {max(args.tokens)}; the {args.kernels} kernel takes {most} at once")
    about, properties = machine(DEVICE), torch.cuda.get_device_properties(DEVICE)
    device = build.device(DEVICE.index)
    with mock.patch.object(family, "FORCED", args.kernels), ThreadPoolExecutor(16) as pool:
        for shape in args.shapes:
            k, n = map(int, shape.split("x"))
            for bits in args.bits:
                count = max(2, -(-L2_TIMES * properties.L2_cache_size // (k * n * bits // 8)))
                layers = [random_layer(k, n, bits) for _ in range(count)]
                for tokens in args.tokens:
                    x = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
                    expected, chosen = truth(x, *layers[0]), module.plan(n, k, bits, tokens, device)
                    plans = sorted(set(made(n, k, bits, tokens, device, args.warps)))
                    plans = [each for each in plans if each[0] <= args.within * plans[0][0]][: args.most]
                    if portable:
                        list(pool.map(partial(compiled, n=n, k=k, bits=bits), [plan for _, plan in plans]))
                    rows = [(*measured(module, plan, layers, x, expected), plan, cost) for cost, plan in plans]
                    if portable:
                        best = [plan for _, _, plan, _ in sorted(rows, key=lambda row: row[0])[:2]]
                        others = [
                            (each.cost(n, bits, device), each) for p in best for each in with_other_rings(p, n, bits)
                        ]
                        list(pool.map(partial(compiled, n=n, k=k, bits=bits), [plan for _, plan in others]))
                        rows += [(*measured(module, plan, layers, x, expected), plan, cost) for cost, plan in others]
                    for us, error, plan, cost in sorted(rows, key=lambda row: row[0]):
                        row = {"bench": "e8p_cuts", "kernels": args.kernels, "k": k, "n": n, "bits": bits}
                        row |= {"us": round(us, 2), "error": float(f"{error:.2g}"), "cost": round(cost, 1)}
                        emit(row | {"chosen": plan == chosen} | asdict(plan) | {"tokens": tokens} | about, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
