"""Microseconds of ops on a GPU's own kernels, on the portable ones and on Triton's, as JSON lines: a process each.

    PYTHONPATH=src python3 benchmarks/portable.py --out benchmarks/results/portable-h200.jsonl

From compute capability 9.0 on the portable kernels run as they are compiled for 8.0, in 99 KB, so that one Hopper GPU
measures what code an older card gets. Weights are rotated past the L2; under graph replay; some two minutes. `--here`
measures in this process alone, on what `ONEGRAPH_KERNELS` says.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attention
import torch
from torch import Tensor

from onegraph.engine.bench import Coded, bench_attention, replay_us
from onegraph.engine.record import emit, machine
from onegraph.formats.e8p import codebook
from onegraph.ops import choices, family
from onegraph.ops.e8p_experts import e8p_experts
from onegraph.ops.e8p_experts import random_weight as e8p_experts_weight
from onegraph.ops.fp8 import fp8_experts, fp8_linear
from onegraph.ops.fp8 import random_weight as fp8_weight
from onegraph.ops.int4 import int4_linear
from onegraph.ops.int4 import random_weight as int4_weight
from onegraph.ops.mxfp4 import mxfp4_linear
from onegraph.ops.mxfp4 import random_weight as mxfp4_weight
from onegraph.ops.nvfp4_linear import nvfp4_experts, nvfp4_linear
from onegraph.ops.nvfp4_linear import random_weight as nvfp4_weight
from onegraph.ops.registry import nbytes
from onegraph.ops.sampling import sample

DEVICE = torch.device("cuda", 0)
WORKING_SET = 256 << 20  # bytes of weights, five times an H100's L2
SHAPE = 4096, 14336  # k, n
EXPERTS = 64, 8, 2048, 768  # half of Qwen3-30B-A3B's: experts, of them chosen, hidden, width
TOKENS = 1, 4, 16
CONTEXTS = ((8, 32768), (1, 1024), (16, 1024))  # rows, tokens of each
VOCABULARY = 128256
FILTERS = {"greedy": (0.0, 0, 1.0), "top_k 50": (0.8, 50, 1.0), "top_p .95": (0.8, 0, 0.95), "all": (0.8, 0, 1.0)}
NO_GATE = float("inf"), 1.0, 0.0
FAMILIES = "", "portable", "triton"  # of ONEGRAPH_KERNELS; "": what the GPU runs of its own

Row = dict[str, Any]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def copies(one: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The weight and as many copies of it as the L2 forgets."""
    count = -(-WORKING_SET // nbytes(*one))
    return [one, *(tuple(t.clone() for t in one) for _ in range(count - 1))]


def timed(calls: list[Callable[[], Any]]) -> float:
    return round(replay_us(lambda: [call() for call in calls], DEVICE, len(calls), budget_ms=20), 2)


def linears() -> Iterator[Row]:
    k, n = SHAPE
    dense = copies((torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16),))
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
        yield {"op": "bf16", "tokens": tokens, "us": timed([partial(torch.nn.functional.linear, x, *w) for w in dense])}
    del dense
    for bits in (2, 4):
        coded = [Coded(k, n, bits, DEVICE) for _ in range(-(-WORKING_SET * 8 // (n * k * bits)))]
        for tokens in TOKENS:
            x = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
            yield {"op": f"e8p_linear {bits} bits", "tokens": tokens, "us": timed([partial(w, x) for w in coded])}
        del coded
    made: dict[str, tuple[tuple[Tensor, ...], Callable[..., Any], tuple[Any, ...]]] = {
        "nvfp4_linear": (nvfp4_weight((n, k), DEVICE, rng()), nvfp4_linear, (None, False)),
        "mxfp4_linear": (mxfp4_weight((n, k), DEVICE, rng()), mxfp4_linear, (None, False)),
        "int4_linear": (int4_weight(n, k, 128, DEVICE, rng()), int4_linear, (None, None, False)),
        "fp8_linear": (fp8_weight((n, k), 128, 128, DEVICE, rng()), fp8_linear, (None, 128, 128, False)),
    }
    for name, (weight, op, rest) in made.items():
        layers = copies(weight)
        for tokens in TOKENS:
            x = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
            yield {"op": name, "tokens": tokens, "us": timed([partial(op, x, *w, *rest) for w in layers])}


def experts() -> Iterator[Row]:
    count, top_k, dim, wide = EXPERTS
    sizes = (count, 2 * wide, dim), (count, dim, wide)
    e8p = [(*e8p_experts_weight(*size, 2, DEVICE, rng()), None) for size in sizes]
    nvfp4 = [nvfp4_weight(size, DEVICE, rng()) for size in sizes]
    fp8 = [fp8_weight(size, 128, 128, DEVICE, rng()) for size in sizes]
    made: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "e8p_experts 2 bits": (e8p_experts, (codebook(DEVICE), *e8p[0], *e8p[1], 2, *NO_GATE)),
        "nvfp4_experts": (nvfp4_experts, (*nvfp4[0], *nvfp4[1], *NO_GATE)),
        "fp8_experts": (fp8_experts, (*fp8[0], *fp8[1], 128, 128, *NO_GATE)),
    }
    for name, (op, layer) in made.items():
        for tokens in TOKENS:
            x = torch.randn(tokens, dim, device=DEVICE, dtype=torch.bfloat16)
            gains = torch.full((tokens, top_k), 1 / top_k, device=DEVICE)
            chosen = [
                torch.rand(tokens, count, device=DEVICE).argsort(1)[:, :top_k].int().contiguous() for _ in range(16)
            ]
            yield {"op": name, "tokens": tokens, "us": timed([partial(op, x, c, gains, *layer) for c in chosen])}


def attentions() -> Iterator[Row]:
    for batch, context in CONTEXTS:
        step, calls, _ = attention.codes(batch, context, (4, 4), 16, 1)
        us = round(replay_us(step, DEVICE, calls, budget_ms=20), 2)
        yield {"op": "turboquant_attention 4 bits", "batch": batch, "context": context, "us": us}
        del step
        for row in bench_attention([context], batches=[batch], device=DEVICE):
            if row["name"] == "onegraph paged_decode":
                yield {"op": "paged_decode", "batch": batch, "context": context, "us": row["us"]}


def sampling() -> Iterator[Row]:
    for rows in (1, 16):
        logits = 4 * torch.randn(rows, VOCABULARY, device=DEVICE)
        ints = torch.zeros(rows, device=DEVICE, dtype=torch.int32)
        for name, (heat, top_k, top_p) in FILTERS.items():
            given = torch.full_like(logits[:, 0], heat), ints + top_k, torch.full_like(logits[:, 0], top_p)
            call = partial(sample, logits, *given, ints.long(), ints)
            yield {"op": f"sample {name}", "batch": rows, "us": timed([call] * 20)}


def cache() -> Iterator[Row]:
    for name in ("turboquant_write", "turboquant_decode"):
        for case in choices.registered()[name].cases:
            if case.name in ("llama", "smollm2", "llama_k4v3", "smollm2_4"):
                args = case.make(DEVICE, torch.bfloat16, rng())
                yield {"op": name, "case": case.name, "us": timed([partial(choices.registered()[name], *args)] * 20)}


PARTS = {"linears": linears, "experts": experts, "attention": attentions, "sampling": sampling, "cache": cache}


def measure(parts: Sequence[str], out: Path | None) -> None:
    """In this process."""
    about = {"bench": "portable", **machine(DEVICE)}
    runs = {choice.op: choice.family for choice in choices.choices(DEVICE.index)}
    for part in parts:
        for row in PARTS[part]():
            emit(row | {"kernels": runs.get(row["op"].split()[0], "torch"), "forced": family.FORCED or ""} | about, out)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--here", action="store_true", help="in this process, on what ONEGRAPH_KERNELS says")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.here:
        measure(args.parts, args.out)
        return 0
    for name in FAMILIES:
        more = ["--parts", *args.parts, *(["--out", str(args.out)] if args.out else [])]
        environment = os.environ | {family.VARIABLE: name}
        done = subprocess.run([sys.executable, __file__, "--here", *more], env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
