"""Microseconds of what stands between attention and the experts of a decode step: the sum, norms, router and choice in
one launch, and as ops of their own; and of unquantized linears beside cuBLAS. JSON lines.

PYTHONPATH=src python3 benchmarks/route.py --out benchmarks/results/route-h200.jsonl
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import copy_bandwidth, replay_us

from onegraph.engine.record import emit, machine
from onegraph.ops.calls import NormedRoute
from onegraph.ops.linear import linear
from onegraph.ops.normed_route import composed, normed_route
from onegraph.ops.registry import nbytes

WORKING_SET = 480 << 20  # eight times an H200's L2
DEVICE = torch.device("cuda", 0)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5-35b-a3b": {"hidden": 2048, "experts": 256, "top_k": 8, "shared": True},
    "qwen3.5-397b-a17b": {"hidden": 4096, "experts": 512, "top_k": 10, "shared": True},
    "qwen3-30b-a3b": {"hidden": 2048, "experts": 128, "top_k": 8},
    "gemma-4-26b-a4b": {"hidden": 2816, "experts": 128, "top_k": 8, "norms": 3},
    "gpt-oss-20b": {"hidden": 2880, "experts": 32, "top_k": 4, "biased": True},
    "deepseek-v3": {"hidden": 7168, "experts": 256, "top_k": 8, "groups": (8, 4)},
}
LINEARS = ((2880, 5120), (4096, 2880), (2048, 4096), (4096, 4096), (4096, 6144), (4096, 12288))  # k, n


def call(
    tokens: int, *, hidden: int, experts: int, top_k: int, shared: bool = False, norms: int = 1, biased: bool = False,
    groups: tuple[int, int] = (0, 1),
) -> NormedRoute:  # fmt: skip
    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=DEVICE)

    x, gate = draw(tokens, hidden).bfloat16(), (draw(experts + shared, hidden) * hidden**-0.5).bfloat16()
    residual = draw(tokens, hidden).bfloat16() if norms > 1 or biased else None
    post, bias = draw(hidden).bfloat16() if norms > 1 else None, draw(experts) if biased or groups[0] else None
    rest = top_k, True, *groups, 1.0, shared, shared, residual, post
    return NormedRoute(x, draw(norms, hidden), 1e-6, gate, bias, None, *rest)


def each_us(run: Callable[[Any], Any], given: list[Any]) -> float:
    """Of `run` on one of them, all in one graph."""
    return round(replay_us(lambda: [run(one) for one in given], DEVICE, len(given)), 2)


def own(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> Any:
    return linear(x, weight, False, bias)


def cublas(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> Any:
    return torch.nn.functional.linear(x, weight, bias)


def routes(bandwidth: float) -> Iterator[dict[str, Any]]:
    for model, sizes in MODELS.items():
        for tokens in (1, 4, 16):
            made = call(tokens, **sizes)
            size = nbytes(made.gate, made.norm)
            calls = [made, *(call(tokens, **sizes) for _ in range(min(WORKING_SET // size, 256)))]
            found = {"us": each_us(lambda one: normed_route(*one), calls), "parts_us": each_us(composed, calls)}
            yield {
                "name": "route",
                "model": model,
                "tokens": tokens,
                **found,
                "floor_us": round(size / bandwidth * 1e6, 2),
            }


def linears(bandwidth: float) -> Iterator[dict[str, Any]]:
    for k, n in LINEARS:
        count = WORKING_SET // (2 * k * n) + 1
        weights = [torch.randn(n, k, device=DEVICE).bfloat16() for _ in range(count)]
        bias = torch.randn(n, device=DEVICE).bfloat16()
        for tokens in (1, 4):
            x = torch.randn(tokens, k, device=DEVICE).bfloat16()
            ours, theirs = (partial(run, x=x, bias=bias) for run in (own, cublas))
            found = {"us": each_us(ours, weights), "cublas_us": each_us(theirs, weights)}
            yield {"name": "dense linear", "k": k, "n": n, "tokens": tokens, **found,
                   "floor_us": round(2 * k * n / bandwidth * 1e6, 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--only", choices=("routes", "linears"))
    args = parser.parse_args()
    bandwidth = copy_bandwidth(DEVICE)
    torch.manual_seed(0)
    for part in (routes, linears):
        if args.only in (None, part.__name__):
            for row in part(bandwidth):
                emit({"bench": "route", **row, **machine(DEVICE)}, args.out)


if __name__ == "__main__":
    main()
