"""Microseconds of one layer's latent decode attention on one GPU, by how the cache holds latents, as JSON lines.

PYTHONPATH=src python3 benchmarks/latent_attention.py --out benchmarks/results/latent-attention-h200.jsonl

Attention alone, graph replay, layers' caches walked so that none stays in the L2. `roof_us` is the larger of two times:
the cache read once at the copy bandwidth measured first, and the products at the tensor cores' dense rate in bfloat16.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from attention import DEVICE, copies_of, shuffled
from kernels import MAX_COPIES, copy_bandwidth, replay_us

from onegraph.engine.record import emit, machine
from onegraph.formats.latent_kv import FP8, curve, row_bytes
from onegraph.ops.latent_attention import latent_attention

SHAPES = ((1, 1024), (1, 65536), (16, 8192))  # batch, context
MODELS = {"deepseek_v3": (128, 512), "kimi_k2": (64, 512), "mistral4": (32, 256)}  # heads, rank
FORMS = {"bf16": 0, "fp8": FP8, "turboquant:4": 4, "turboquant:3": 3}
ROPE, PAGE, DENSE = 64, 64, 989e12


def pools(copies: int, pages: int, rank: int, bits: int) -> torch.Tensor:
    if not bits:
        return torch.randn(copies, pages, PAGE, rank + ROPE, device=DEVICE, dtype=torch.bfloat16)
    size = rank * bits // 8
    made = torch.randint(0, 120, (copies, pages, PAGE, row_bytes(rank, ROPE, bits)), dtype=torch.uint8, device=DEVICE)
    keys = torch.randn(copies, pages, PAGE, ROPE, device=DEVICE, dtype=torch.bfloat16)
    made[..., size : size + 2 * ROPE] = keys.view(torch.uint8)
    factor = torch.full((copies, pages, PAGE, 1), 1e-2 if bits == FP8 else rank**0.5, device=DEVICE)
    made[..., size + 2 * ROPE : size + 2 * ROPE + 4] = factor.view(torch.uint8)
    return made


def measured(model: str, batch: int, context: int, form: str, tokens: int) -> dict[str, Any]:
    (heads, rank), bits = MODELS[model], FORMS[form]
    width = row_bytes(rank, ROPE, bits) if bits else 2 * (rank + ROPE)
    size, table = batch * context * width, shuffled(batch, context, PAGE)
    copies = min(copies_of(size), MAX_COPIES)
    caches = pools(copies, 1 + table.numel(), rank, bits)
    q = torch.randn(batch, tokens, heads, rank, device=DEVICE, dtype=torch.bfloat16)
    turned = torch.randn(batch, tokens, heads, ROPE, device=DEVICE, dtype=torch.bfloat16)
    positions = torch.full((batch,), context - tokens, device=DEVICE, dtype=torch.int32)
    levels = curve(rank, bits).to(DEVICE) if bits not in (0, FP8) else None
    rest = table, positions, torch.full_like(positions, tokens), None, (rank + ROPE) ** -0.5, bits, levels

    def step() -> None:
        for cache in caches:
            latent_attention(q, turned, cache, *rest)

    us = replay_us(step, DEVICE, copies, budget_ms=40)
    flops = 2 * heads * tokens * (2 * rank + ROPE) * batch * context
    memory, products = size / copy_bandwidth(DEVICE) * 1e6, flops / DENSE * 1e6
    row = {"bench": "latent-attention", "name": model, "kv": form, "batch": batch, "context": context, "tokens": tokens}
    row |= {"heads": heads, "rank": rank, "us": round(us, 2), "gb_per_s": round(size / us * 1e-3, 1)}
    row |= {"tflops": round(flops / us * 1e-6, 1), "memory_us": round(memory, 2), "products_us": round(products, 2)}
    return row | {"percent_of_roof": round(100 * max(memory, products) / us, 1), "copies": copies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--shapes", nargs="*", default=[f"{b}x{c}" for b, c in SHAPES], help="BATCHxCONTEXT")
    parser.add_argument("--kv", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--tokens", type=int, default=1, help="queries of a sequence (more in speculative decoding)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = machine(DEVICE)
    for model in args.models:
        for shape in args.shapes:
            batch, context = map(int, shape.split("x"))
            for form in args.kv:
                emit(measured(model, batch, context, form, args.tokens) | about, args.out)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
