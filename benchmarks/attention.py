"""Microseconds of one layer's decode attention: TurboQuant codes beside bf16 and fp8 caches, as JSON lines.

PYTHONPATH=src python3 benchmarks/attention.py --out benchmarks/results/attention-h200.jsonl

Attention alone, graph replay, layers' caches walked so that none stays in the L2. Peers, all in the same run: this
project's bf16 paged attention, torch SDPA (contiguous keys) and, where vLLM is installed, its FlashAttention 3 on bf16
and fp8 pages. `roof_us` is the cache read once at the copy bandwidth measured first.
"""

import argparse
import importlib.metadata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import L2_TIMES, copy_bandwidth, replay_us
from torch import Tensor

from onegraph.engine.record import emit, machine
from onegraph.formats import turboquant
from onegraph.formats.turboquant_layout import BLOCK, TurboQuantLayout
from onegraph.ops.attention import paged_attention
from onegraph.ops.turboquant_attention import turboquant_attention

SHAPES = ((8, 32768), (1, 32768), (32, 4096), (1, 1024), (16, 1024))  # batch, context
HEADS, KV_HEADS, DIM = 32, 8, 128
RATES = ((4, 4), (3, 3), (3, 4), (2, 2))
DEVICE = torch.device("cuda")

Made = tuple[Callable[[], None], int, int]  # step over all copies, copies, bytes of one cache


def copies_of(size: int) -> int:
    return max(2, -(-L2_TIMES * torch.cuda.get_device_properties(DEVICE).L2_cache_size // size))


def shuffled(batch: int, context: int, page: int) -> Tensor:
    pages = -(-context // page)
    return torch.randperm(batch * pages, device=DEVICE, dtype=torch.int32).view(batch, pages) + 1


def codes(batch: int, context: int, rate: tuple[int, int], page: int, tokens: int) -> Made:
    layout = TurboQuantLayout(DIM, *rate, page_size=page)
    table = shuffled(batch, context, page)
    shape = layout.cache_shape(1 + table.numel(), KV_HEADS)
    size = batch * context * KV_HEADS * layout.bytes_per_token_head
    copies = copies_of(size)
    cache = torch.randint(0, 256, (copies, *shape), dtype=torch.uint8, device=DEVICE)
    norms = cache.view(copies, shape[0], KV_HEADS, -1, layout.block_bytes)[..., -4 * BLOCK :]
    norms.copy_(torch.rand((*norms.shape[:-1], 2 * BLOCK), device=DEVICE).add_(0.5).mul_(6).half().view(torch.uint8))
    q = torch.randn(batch, tokens, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    positions = torch.full((batch,), context - tokens, device=DEVICE, dtype=torch.int32)
    rest = (
        table, positions, torch.full_like(positions, tokens), None,
        turboquant.rotation(DIM).to(DEVICE, torch.bfloat16),
        turboquant.codebook(DIM, rate[0], DEVICE), turboquant.codebook(DIM, rate[1], DEVICE), None,
        DIM**-0.5, 0,
    )  # fmt: skip

    def step() -> None:
        for c in cache:
            turboquant_attention(q, c, *rest)

    return step, copies, size


def paged(batch: int, context: int, tokens: int) -> Made:
    size = 4 * batch * context * KV_HEADS * DIM
    copies, table = copies_of(size), shuffled(batch, context, 16)
    cache = torch.randn(copies, 2, 1 + table.numel(), 16, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(batch, tokens, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    positions = torch.full((batch,), context - tokens, device=DEVICE, dtype=torch.int32)

    def step() -> None:
        for k, v in cache:
            paged_attention(q, k, v, table, positions, DIM**-0.5, 0)

    return step, copies, size


def sdpa(batch: int, context: int) -> Made:
    size = 4 * batch * context * KV_HEADS * DIM
    copies = copies_of(size)
    cache = torch.randn(copies, 2, batch, KV_HEADS, context, DIM, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(batch, HEADS, 1, DIM, device=DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        for k, v in cache:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return step, copies, size


def flash(batch: int, context: int, tokens: int, fp8: bool, page: int) -> Made:
    """FlashAttention 3 as vLLM calls it: paged, with its scheduler's metadata made beforehand."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    size = 2 * kind.itemsize * batch * context * KV_HEADS * DIM
    copies, table = copies_of(size), shuffled(batch, context, page)
    shape = (1 + table.numel(), page, KV_HEADS, DIM)
    cache = [
        [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(kind) for _ in range(2)] for _ in range(copies)
    ]
    q = torch.randn(batch * tokens, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16).to(kind)
    out = torch.empty(batch * tokens, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    starts = torch.arange(0, batch * tokens + 1, tokens, device=DEVICE, dtype=torch.int32)
    lengths = torch.full((batch,), context, device=DEVICE, dtype=torch.int32)
    one = torch.ones(batch, KV_HEADS, device=DEVICE)
    plan = get_scheduler_metadata(
        batch_size=batch, max_seqlen_q=tokens, max_seqlen_k=context, num_heads_q=HEADS, num_heads_kv=KV_HEADS,
        headdim=DIM, cache_seqlens=lengths, qkv_dtype=kind, cu_seqlens_q=starts, page_size=page, causal=True,
    )  # fmt: skip
    scales = {"q_descale": one, "k_descale": one, "v_descale": one} if fp8 else {}

    def step() -> None:
        for k, v in cache:
            flash_attn_varlen_func(
                q, k, v, max_seqlen_q=tokens, cu_seqlens_q=starts, max_seqlen_k=context, seqused_k=lengths,
                block_table=table, causal=True, scheduler_metadata=plan, fa_version=3, out=out, **scales,
            )  # fmt: skip

    return step, copies, size


def measured(
    tokens: int, page: int, peers: bool, shapes: list[tuple[int, int]], rates: Any
) -> Iterator[dict[str, Any]]:
    try:
        version: str | None = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = None
    for batch, context in shapes:
        kinds: list[tuple[str, Callable[[], Made]]] = [
            (f"onegraph turboquant k{k}v{v}", partial(codes, batch, context, (k, v), page, tokens)) for k, v in rates
        ]
        if peers:
            kinds.append(("onegraph paged_attention bf16", partial(paged, batch, context, tokens)))
        if peers and tokens == 1:
            kinds.append(("torch SDPA bf16", partial(sdpa, batch, context)))
        if peers and version:
            # vLLM's default, and what the kernel likes best, which at 32 x 4k reads outside of its memory.
            for size in (16, 128) if (batch, context) == SHAPES[0] else (16,):
                for fp8 in (False, True):
                    name = f"FlashAttention 3 {'fp8' if fp8 else 'bf16'}, page {size}"
                    kinds.append((name, partial(flash, batch, context, tokens, fp8, size)))
        for name, make in kinds:
            step, copies, size = make()
            us = replay_us(step, DEVICE, copies, budget_ms=40)
            roof = size / copy_bandwidth(DEVICE) * 1e6
            row = {"bench": "attention", "name": name, "batch": batch, "context": context, "tokens": tokens}
            row |= {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "page_size": page, "us": round(us, 2)}
            row |= {"cache_bytes": size, "gb_per_s": round(size / us * 1e-3, 1), "roof_us": round(roof, 2)}
            yield row | {"percent_of_roof": round(100 * roof / us, 1), "copies": copies, "vllm": version}
            del step
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1, help="queries of a sequence (more in speculative decoding)")
    parser.add_argument("--page", type=int, default=16, help="tokens in a page of codes")
    parser.add_argument("--shapes", nargs="*", default=[f"{b}x{c}" for b, c in SHAPES], help="BATCHxCONTEXT")
    parser.add_argument("--rates", nargs="*", default=[f"{k}{v}" for k, v in RATES], help="bits of keys and values")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [(int(b), int(c)) for b, c in (s.split("x") for s in args.shapes)]
    rates = [(int(r[0]), int(r[1])) for r in args.rates]
    about = machine(DEVICE)
    for row in measured(args.tokens, args.page, not args.no_peers, shapes, rates):
        emit(row | about, args.out)


if __name__ == "__main__":
    main()
