"""Microseconds of linears and routed experts in NVFP4 or MXFP4 beside torch's dense bfloat16, and of all products of a
layer of DeepSeek-V4-Flash behind one another, as JSON lines.

PYTHONPATH=src python3 benchmarks/nvfp4.py --out benchmarks/results/nvfp4-h200.jsonl
PYTHONPATH=src python3 benchmarks/nvfp4.py --format mxfp4 --out benchmarks/results/mxfp4-h200.jsonl
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from onegraph.engine.bench import copy_bandwidth, replay_us
from onegraph.engine.record import emit, machine
from onegraph.ops.mxfp4 import mxfp4_experts, mxfp4_grouped_linear, mxfp4_linear
from onegraph.ops.nvfp4_linear import nvfp4_experts, nvfp4_grouped_linear, nvfp4_linear
from onegraph.ops.registry import nbytes

WORKING_SET = 480 << 20  # eight times an H200's L2
SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096), (4096, 1536), (1024, 32768), (8192, 4096), (1024, 8192))
DEEPSEEK, GPT_OSS = (10.0, 1.0, 0.0), (7.0, 1.702, 1.0)  # limit, alpha, shift
V4 = ((256, 4096, 2048, 6, DEEPSEEK), (384, 7168, 3072, 6, DEEPSEEK))  # Flash, Pro
DEVICE = torch.device("cuda", 0)
Weight = tuple[torch.Tensor | None, ...]


class NVFP4:
    name, experts = "nvfp4", V4
    grouped = nvfp4_grouped_linear

    @staticmethod
    def weight(*shape: int) -> Weight:
        """Random codes, scales and global scales of weights [..., n, k], made on the device."""
        *rows, k = shape
        codes = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, device=DEVICE)
        scale = torch.randint(40, 127, (*rows, k // 16), dtype=torch.uint8, device=DEVICE)
        return codes, scale, torch.full(rows, k**-0.5 / 380, device=DEVICE)

    of_expert = weight

    @staticmethod
    def linear(x: torch.Tensor, *weight: Any) -> Any:
        return nvfp4_linear(x, *weight, None, False)

    run_experts = nvfp4_experts


class MXFP4:
    """Experts of gpt-oss, 120b and 20b, besides; biases with each, as they have."""

    name, experts = "mxfp4", (*V4, (128, 2880, 2880, 4, GPT_OSS), (32, 2880, 2880, 4, GPT_OSS))
    grouped = mxfp4_grouped_linear

    @staticmethod
    def weight(*shape: int) -> Weight:
        """Random codes and scales of weights [..., n, k], made on the device."""
        *rows, k = shape
        codes = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, device=DEVICE)
        about = 125 - round(math.log2(k) / 2)
        return codes, torch.randint(about - 2, about + 2, (*rows, k // 32), dtype=torch.uint8, device=DEVICE)

    @classmethod
    def of_expert(cls, *shape: int) -> Weight:
        return *cls.weight(*shape), torch.randn(shape[:-1], device=DEVICE) if shape[-1] == 2880 else None

    @staticmethod
    def linear(x: torch.Tensor, *weight: Any) -> Any:
        return mxfp4_linear(x, *weight, None, False)

    run_experts = mxfp4_experts


Format = type[NVFP4] | type[MXFP4]


def timed(calls: list[Callable[[], Any]]) -> float:
    return replay_us(lambda: [call() for call in calls], DEVICE, len(calls), 40)


def linears(format: Format, tokens: list[int]) -> Iterator[dict[str, Any]]:
    for k, n in SHAPES:
        bytes_ = nbytes(*format.weight(n, k))
        layers = [format.weight(n, k) for _ in range(-(-WORKING_SET // bytes_))]
        dense = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(-(-WORKING_SET // (2 * n * k)))]
        for count in tokens:
            x = torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16)
            us = timed([partial(format.linear, x, *w) for w in layers])
            peer = timed([partial(torch.nn.functional.linear, x, w) for w in dense])
            row = {"op": f"{format.name}_linear", "k": k, "n": n, "tokens": count}
            yield row | {"us": us, "bf16_us": peer, "bytes": bytes_}


def experts(format: Format, tokens: list[int]) -> Iterator[dict[str, Any]]:
    for total, dim, wide, top_k, gate in format.experts:
        layer = *format.of_expert(total, 2 * wide, dim), *format.of_expert(total, dim, wide)
        for count in tokens:
            x = torch.randn(count, dim, device=DEVICE, dtype=torch.bfloat16)
            gains = torch.full((count, top_k), 1 / top_k, device=DEVICE)
            chosen = [
                torch.rand(count, total, device=DEVICE).argsort(1)[:, :top_k].int().contiguous() for _ in range(16)
            ]
            us = timed([partial(format.run_experts, x, c, gains, *layer, *gate) for c in chosen])
            each = nbytes(*layer) // total
            distinct = sum(len(set(c.flatten().tolist())) for c in chosen) / len(chosen)
            row = {"op": f"{format.name}_experts", "dim": dim, "wide": wide, "top_k": top_k, "experts": total}
            yield row | {"tokens": count, "us": us, "bytes": int(distinct * each)}


def layer(format: Format) -> Iterator[dict[str, Any]]:
    """One token through what a layer of V4-Flash with an indexer multiplies in codes: launches that begin while the one
    before ends, which no figure of one of them shows."""
    total, dim, wide, top_k = 64, 4096, 2048, 7  # six experts and the shared one
    count = 6  # layers
    weight, linear = format.weight, format.linear
    experts = *format.of_expert(total, 2 * wide, dim), *format.of_expert(total, dim, wide)
    layers = [
        (weight(1536, dim), weight(32768, 1024), weight(8192, 1024), weight(8, 1024, 4096), weight(dim, 8192))
        for _ in range(count)
    ]
    chosen = [torch.rand(1, total, device=DEVICE).argsort(1)[:, :top_k].int().contiguous() for _ in range(count)]
    gains = torch.full((1, top_k), 1 / top_k, device=DEVICE)

    def run(i: int, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        qkv_a, q_b, index_q, out_a, out_b = layers[i]
        low = linear(x, *qkv_a)[:, :1024].contiguous()
        linear(low, *q_b)
        linear(low, *index_q)
        x = linear(format.grouped(heads, *out_a).flatten(1), *out_b)
        return format.run_experts(x, chosen[i], gains, *experts, *DEEPSEEK)

    x, heads = (torch.randn(1, *shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((dim,), (8, 4096)))
    us = timed([partial(run, i, x, heads) for i in range(count)])
    bytes_ = sum(nbytes(*w) for w in layers[0]) + nbytes(*experts) // total * top_k
    yield {"op": "the products of a V4-Flash layer", "tokens": 1, "us": us, "bytes": bytes_}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--format", choices=("nvfp4", "mxfp4"), default="nvfp4")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    format = MXFP4 if args.format == "mxfp4" else NVFP4
    about = {"bench": format.name, **machine(DEVICE)}
    bandwidth = copy_bandwidth(DEVICE)
    products = chain(linears(format, args.tokens), experts(format, args.tokens), layer(format))
    for row in products:
        row["us"] = round(row["us"], 2)
        emit(row | {"floor_us": round(row["bytes"] / bandwidth * 1e6, 2)} | about, args.out)


if __name__ == "__main__":
    main()
