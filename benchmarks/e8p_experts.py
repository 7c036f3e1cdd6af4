"""Microseconds of routed experts in E8P beside torch's grouped product in bfloat16, and tokens per second of the whole
decode step of Qwen3-30B-A3B's shape, with random weights, as JSON lines.

PYTHONPATH=src:benchmarks python3 benchmarks/e8p_experts.py --out benchmarks/results/e8p-experts-h200.jsonl

Tokens choose experts evenly, anew in each of sixteen calls, one behind the other in a graph. --set tries other
constants of ops/cuda/e8p_experts.py; --parts runs some of "ops", "bf16", "step". "trellis" has the same experts in
trellis codes, by their kernel and one linear after the other.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import copy_bandwidth, replay_us
from torch import Tensor

from onegraph.engine.bench import bench_step
from onegraph.engine.record import emit, machine
from onegraph.formats.e8p import codebook, residual_dtype
from onegraph.formats.trellis import TILE, UNIT
from onegraph.ops.cuda import build
from onegraph.ops.cuda import e8p_experts as kernels
from onegraph.ops.cuda import trellis_experts as trellis_kernels
from onegraph.ops.e8p_experts import e8p_experts
from onegraph.ops.registry import nbytes
from onegraph.ops.trellis_experts import TrellisExperts, composed

# experts, chosen, hidden, width, gate
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, (float("inf"), 1.0, 0.0)),
    "mixtral-8x7b": (8, 2, 4096, 14336, (float("inf"), 1.0, 0.0)),
    "gpt-oss-20b": (32, 4, 2880, 2880, (7.0, 1.702, 1.0)),
}
DEVICE = torch.device("cuda", 0)
CALLS = 16
WORKING_SET = 480 << 20  # eight times an H200's L2


def weight(experts: int, n: int, k: int, bits: int) -> list[Tensor | None]:
    """codes, residual, in_scale, out_scale and no bias of random experts, made on the device."""
    shape, rest = (experts, n, k // 8), residual_dtype(bits)
    codes = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=DEVICE)
    more = None
    if rest is not None:
        info = torch.iinfo(rest)
        more = torch.randint(info.min, info.max + 1, shape, dtype=rest, device=DEVICE)
    out_scale = torch.full((experts, n), k**-0.5 / (16 if bits == 4 else 4), device=DEVICE)
    return [codes, more, torch.ones(experts, k, device=DEVICE), out_scale, None]


def routes(tokens: int, experts: int, top_k: int) -> list[Tensor]:
    """Of each call: as evenly as they come."""
    return [torch.rand(tokens, experts, device=DEVICE).argsort(1)[:, :top_k].int().contiguous() for _ in range(CALLS)]


def timed(calls: list[Callable[[], Any]]) -> float:
    return replay_us(lambda: [call() for call in calls], DEVICE, len(calls), 40)


def bf16(x: Tensor, chosen: Tensor, gains: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """torch's grouped product over tokens sorted by expert: gate-up, SwiGLU, down, the weighted sum."""
    (tokens, top_k), count = chosen.shape, gate_up.shape[0]
    found, order = chosen.flatten().sort()
    ends = torch.searchsorted(found, torch.arange(count, device=DEVICE, dtype=found.dtype), right=True, out_int32=True)
    hidden = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, -1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = torch.zeros(tokens, down.shape[1], device=DEVICE, dtype=torch.float32)
    return out.index_add_(0, order // top_k, y.float() * gains.flatten()[order, None]).to(x.dtype)


def ops(shape: str, bits: list[int], counts: list[int], peer: bool) -> Iterator[dict[str, Any]]:
    experts, top_k, dim, wide, gate = SHAPES[shape]
    peers: dict[int, float | None] = {}
    if peer:
        sizes = (experts, 2 * wide, dim), (experts, dim, wide)
        gate_up, down = (torch.randn(*size, device=DEVICE, dtype=torch.bfloat16) * size[2] ** -0.5 for size in sizes)
        for tokens in counts:
            x, gains = (
                torch.randn(tokens, dim, device=DEVICE, dtype=torch.bfloat16),
                torch.ones(tokens, top_k).to(DEVICE),
            )
            calls = [partial(bf16, x, chosen, gains, gate_up, down) for chosen in routes(tokens, experts, top_k)]
            peers[tokens] = round(timed(calls), 2)
        del gate_up, down
    for rate in bits:
        one = [*weight(experts, 2 * wide, dim, rate), *weight(experts, dim, wide, rate)]
        size = nbytes(*one)
        layers = [one, *([*map(_clone, one)] for _ in range(min(CALLS, -(-WORKING_SET // size)) - 1))]
        for tokens in counts:
            x = torch.randn(tokens, dim, device=DEVICE, dtype=torch.bfloat16)
            gains, book, chosen = torch.full((tokens, top_k), 1 / top_k, device=DEVICE), codebook(DEVICE), routes(
                tokens, experts, top_k
            )  # fmt: skip
            calls = [
                partial(e8p_experts, x, c, gains, book, *layers[i % len(layers)], rate, *gate)
                for i, c in enumerate(chosen)
            ]
            distinct = sum(len(set(c.flatten().tolist())) for c in chosen) / len(chosen)
            about = {
                "op": "e8p_experts",
                "shape": shape,
                "bits": rate,
                "tokens": tokens,
                "distinct": round(distinct, 1),
            }
            way = kernels.way(tokens, top_k, experts, dim, wide, rate, build.device(DEVICE.index))
            cuts = {} if way is None else {name: list(cut.defines(rate, False).values()) for name, cut in
                                           zip(way._fields, way, strict=True)}  # fmt: skip
            yield about | {"us": round(timed(calls), 2), "bf16_us": peers.get(tokens), "cuts": cuts,
                           "bytes": int(distinct * size / experts)}  # fmt: skip


def trellis(shape: str, bits: list[int], counts: list[int]) -> Iterator[dict[str, Any]]:
    """Trellis codes: by the kernel, and as calls of the linear's."""
    experts, top_k, dim, wide, gate = SHAPES[shape]
    for rate in bits:
        one: list[Tensor | None] = []
        for n, k in ((2 * wide, dim), (dim, wide)):
            size = experts, n // TILE, k * rate
            one.append(torch.randint(-(2**15), 2**15, size, dtype=torch.int16, device=DEVICE))
            one.append(torch.ones(experts, k, device=DEVICE))
            one += [torch.full((experts, n), k**-0.5 / UNIT, device=DEVICE), None]
        stored = nbytes(*one)
        layers = [one, *([*map(_clone, one)] for _ in range(min(CALLS, -(-WORKING_SET // stored)) - 1))]
        for tokens in counts:
            x = torch.randn(tokens, dim, device=DEVICE, dtype=torch.bfloat16)
            gains, chosen = torch.full((tokens, top_k), 1 / top_k, device=DEVICE), routes(tokens, experts, top_k)
            given = [TrellisExperts(x, c, gains, *layers[i % len(layers)], rate, *gate) for i, c in enumerate(chosen)]
            if trellis_kernels.experts(given[0]) is None:
                continue
            distinct = sum(len(set(c.flatten().tolist())) for c in chosen) / len(chosen)
            row: dict[str, Any] = {"op": "trellis_experts", "shape": shape, "bits": rate, "tokens": tokens}
            row |= {"distinct": round(distinct, 1), "bytes": int(distinct * stored / experts)}
            row["us"] = round(timed([partial(trellis_kernels.experts, each) for each in given]), 2)
            if tokens * top_k <= experts:
                row["linears_us"] = round(timed([partial(composed, each) for each in given]), 2)
            yield row


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def step(bits: int, batches: list[int], context: int, steps: int) -> Iterator[dict[str, Any]]:
    from step import SHAPES as MODELS
    from step import proven, random_model

    model = random_model(MODELS["qwen3-30b-a3b"], bits, 4, 2048)
    same = proven(model, batch=2)
    options = {"batches": batches, "context": context, "steps": steps, "modes": (True,)}
    for row in bench_step(model, **options, name=f"onegraph e8p {bits} bit"):
        yield row | {"shape": "qwen3-30b-a3b", "bits": bits, "lm_head": 4, "replay_equals_eager": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="*", default=["ops", "bf16", "step"], choices=["ops", "bf16", "step", "trellis"]
    )
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16], help="rows of the step")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER",
        help="another value of a constant of ops/cuda/e8p_experts.py: FRESH=0, WARPS=8, ACROSS=4, CROWDED=0",
    )  # fmt: skip
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name, number in (setting.split("=") for setting in args.set):
        setattr(kernels, name, int(number))
    about = {"bench": "e8p experts", **({"set": args.set} if args.set else {}), **machine(DEVICE)}
    if "ops" in args.parts:
        bandwidth = copy_bandwidth(DEVICE)
        for shape in args.shape:
            for row in ops(shape, args.bits, args.tokens, "bf16" in args.parts):
                emit(row | {"floor_us": round(row["bytes"] / bandwidth * 1e6, 2)} | about, args.out)
    if "trellis" in args.parts:
        for shape in args.shape:
            for row in trellis(shape, args.bits, args.tokens):
                emit(row | about, args.out)
    if "step" in args.parts:
        for bits in args.bits:
            for row in step(bits, args.batch, args.context, args.steps):
                emit(row | ({"set": args.set} if args.set else {}), args.out)


if __name__ == "__main__":
    main()
