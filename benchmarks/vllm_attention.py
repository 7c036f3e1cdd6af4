"""Microseconds of a decode step's attention over vLLM's KV cache: our launch beside vLLM's FlashAttention 3.

    PYTHONPATH=src python3 benchmarks/vllm_attention.py --out benchmarks/results/vllm-attention-h200.jsonl

Llama-3-8B's heads, the cache as vLLM lays it out, graph replays over so many copies of it that the L2 forgets them.
"onegraph" is RoPE, the write and attention; "vllm" is FlashAttention alone, its plan made beforehand. Their results are
held to each other.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kernels import L2_TIMES, replay_us
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

from onegraph.engine.record import emit, machine
from onegraph.ops.strided_decode import strided_decode

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SPLITS = 32  # vLLM's bound where graphs are captured
CLOSE = 0.01  # of the result's norm: what rounding to bfloat16 makes


def measure(context: int, batch: int) -> Iterator[dict[str, Any]]:
    device, about = torch.device("cuda"), machine("cuda")
    pages, size = -(-context // PAGE), 4 * batch * context * KV_HEADS * DIM
    copies = min(max(2, -(-L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size // size)), 128)
    shape = copies, 1 + batch * pages, KV_HEADS, PAGE, 2 * DIM
    caches = torch.randn(shape, device=device, dtype=torch.bfloat16)
    parts = [cache.transpose(1, 2).split(DIM, dim=-1) for cache in caches]
    table = torch.randperm(batch * pages, device=device, dtype=torch.int32).view(batch, pages) + 1
    lengths = torch.full((batch,), context, device=device, dtype=torch.int32)
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32)
    angles = torch.outer(torch.arange(context), 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))
    turns = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * DIM, device=device, dtype=torch.bfloat16)
    out, theirs = (torch.empty(batch, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    first, second = qkv.view(batch, -1, DIM)[:, :HEADS].float().chunk(2, dim=-1)
    cos, sin = turns[context - 1].chunk(2)
    q = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()
    settings = {"num_splits": SPLITS, "causal": True}
    plan = get_scheduler_metadata(
        batch,
        1,
        context,
        HEADS,
        KV_HEADS,
        DIM,
        lengths,
        torch.bfloat16,
        cu_seqlens_q=starts,
        page_size=PAGE,
        **settings,
    )

    def ours() -> None:
        for keys, values in parts:
            strided_decode(qkv, turns, lengths, table, keys, values, out, DIM**-0.5)

    def flash() -> None:
        for keys, values in parts:
            flash_attn_varlen_func(
                q, keys, values, 1, starts, context, seqused_k=lengths, softmax_scale=DIM**-0.5, block_table=table,
                out=theirs, scheduler_metadata=plan, fa_version=3, window_size=[-1, -1], **settings,
            )  # fmt: skip

    for name, step in (("onegraph", ours), ("vllm", flash)):
        us = replay_us(step, device, copies, budget_ms=40)
        row = {"bench": "vllm_attention", "name": name, "context": context, "batch": batch, "us": round(us, 2)}
        yield row | {"gb_per_s": round(size / us * 1e-3, 1), "copies": copies} | about
    error = float((out.float() - theirs.float()).norm() / theirs.float().norm())
    if not error < CLOSE:
        raise SystemExit(f"{batch} x {context}: results are {error:.3f} of their norm apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for context in args.contexts:
        for batch in args.batches:
            for row in measure(context, batch):
                emit(row, args.out)


if __name__ == "__main__":
    main()
