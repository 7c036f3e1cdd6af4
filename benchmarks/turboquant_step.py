"""What a TurboQuant cache costs a decode step on a GPU.

    PYTHONPATH=src python3 benchmarks/turboquant_step.py whole > lines.jsonl
    PYTHONPATH=src python3 benchmarks/turboquant_step.py parts > lines.jsonl
    PYTHONPATH=src python3 benchmarks/turboquant_step.py whole --shape qwen3.5-27b --bits 4 --lm-head 4 \\
        --shapes 1x1024 4x1024 8x1024 16x1024 --settings exact turboquant:4,short=0,mode=shadow turboquant:4,short=0

whole: the engine's decode step of --shape, all layers and the head, random E8P weights, beside the bfloat16 cache in
the same run; milliseconds, median over replays whose positions move on, and the overhead over the cache measured
first. --bits 16 takes bfloat16 weights. Rows that are short are exact, as the engine has them, unless a setting has
short=0. The third command is the table of one H200 with Qwen3.5-27B: concurrency 1 to 16, TurboQuant off, shadow, on.
parts: its kernels besides attention to codes, which are the write, and the ring with its merge. Each is replayed from
one graph of 32 calls on as many layers' tensors, 32 query and 8 kv heads of 128, bfloat16, beside the write of an exact
cache; microseconds a layer, median.
"""

import argparse
import gc
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from kernels import replay_us
from step import SHAPES, random_model
from torch import Tensor

from onegraph.engine import steps
from onegraph.engine.engine import Engine
from onegraph.engine.exact_window import MAX_EXACT_TOKENS
from onegraph.engine.record import emit, machine
from onegraph.formats.turboquant import parse_kv
from onegraph.formats.turboquant_layout import BLOCK
from onegraph.models.llama import Llama
from onegraph.nn.attention import Attention, PagedCache
from onegraph.nn.hybrid_cache import HybridCache
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.attention import rope_cache_write
from onegraph.ops.recent_attention import recent_attention
from onegraph.ops.turboquant import turboquant_write

LAYERS, HEADS, KV_HEADS, DIM = 32, 32, 8, 128
WHOLE = ((8, 32768), (1, 1024), (4, 1024), (16, 1024))  # batch, context
SETTINGS = ("exact", "turboquant:4", "turboquant:k3v4", "turboquant:4,mode=full")
STEPS, ROUNDS = 32, 5  # replays one after the other, and how often


def fill(cache: Any, exact: bool) -> None:
    """Random keys and values, or random codes with norms as keys have them. exact: rows are, for being short."""
    if isinstance(cache, HybridCache):
        cache = cache.attention
    if exact:
        for tensor in (*cache._short.keys, *cache._short.values):
            tensor.normal_()
        return
    for tensor in (*cache.keys, *cache.values) if isinstance(cache, PagedCache) else ():
        tensor.normal_()
    for layer in () if isinstance(cache, PagedCache) else cache.layers:
        layer.codes.random_(0, 256)
        norms = layer.codes.view(*layer.codes.shape[:2], -1, layer.layout.block_bytes)[..., -4 * BLOCK :]
        half = torch.rand((*norms.shape[:-1], 2 * BLOCK), device=norms.device).add_(0.5).mul_(6).half()
        norms.copy_(half.view(torch.uint8))
        if layer.ring is not None:
            layer.ring.normal_()


def rewind(cache: Any, position: int) -> None:
    """Recurrent states are applied up to `position`, with no records waiting."""
    for state in cache.states.values() if isinstance(cache, HybridCache) else ():
        for tensor in state:
            if tensor.dtype == torch.int32:
                tensor.fill_(position)


@torch.no_grad()
def step_ms(model: Llama, batch: int, context: int, kv: str, fused: bool, room: int) -> tuple[float, dict[str, Any]]:
    """Median milliseconds of a replay up to `context` tokens a row, in an engine with `room` for each, and what its
    cache is."""
    engine = Engine(model, max_batch=batch, max_context=max(context, room), kv=parse_kv(kv))
    if not isinstance(engine.executor.cache, HybridCache):
        engine.executor.cache.fused = fused
    exact = context <= engine.executor.sizes.exact_window.tokens and batch * (context - STEPS) < MAX_EXACT_TOKENS
    runner = engine.executor.step("decode", exact=exact)
    fill(engine.executor.cache, exact)
    inputs = runner.stages[0].inputs
    width = inputs["table"].shape[1]
    rows: dict[str, Tensor] = {name: torch.zeros_like(t, device="cpu") for name, t in inputs.items()}
    rows["drawn"] = torch.randint(0, model.config.vocab_size, (batch,))
    rows["positions"].fill_(context - STEPS - 1)
    rows["limits"].fill_(context)
    rows["slots"] = torch.arange(1, 1 + batch, dtype=torch.int32)
    order = torch.randperm(engine.executor.sizes.pages - 1).int()
    rows["table"] = 1 + order[torch.arange(batch * width) % len(order)].view(batch, width)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    with runner.running():
        for _ in range(ROUNDS):
            rewind(engine.executor.cache, context - STEPS - 1)
            runner.load(**rows)
            runner.replay(batch)
            begin.record()
            for _ in range(STEPS):
                runner.replay(batch)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / STEPS)
    about = {"max_context": engine.max_context, "cache_bytes": engine.executor.cache.nbytes}
    return statistics.median(times), about if kv == "exact" else about | {"exact_rows": exact}


def whole(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    steps.batch_sizes = lambda largest: [largest]  # no other is timed
    shapes = [(int(b), int(c)) for b, c in (s.split("x") for s in args.shapes)]
    reach = max(args.max_context, *(context for _, context in shapes))
    shape = SHAPES[args.shape] | {"max_position_embeddings": reach}
    shape |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    model = random_model(shape, args.bits, args.lm_head, reach)
    for batch, context in shapes:
        apart = [(kv, False) for kv in args.settings if args.apart and kv != "exact" and "mode=" not in kv]
        first = None
        for kv, fused in [*((kv, True) for kv in args.settings), *apart]:
            ms, about = step_ms(model, batch, context, kv, fused, args.max_context)
            row = {"bench": "turboquant step", "part": "whole", "shape": args.shape, "kv": kv}
            row |= {"layers": shape["num_hidden_layers"], "fused": fused}
            first = ms if first is None else first
            row |= {"bits": args.bits, "lm_head": args.lm_head, "batch": batch, "context": context}
            over = {"tokens_per_second": round(1e3 * batch / ms, 1), "overhead": round(ms / first - 1, 4)}
            yield row | {"ms": round(ms, 4)} | over | about | machine("cuda")
            gc.collect()  # an engine and its graphs hold each other
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("whole", "parts"))
    parser.add_argument("--bits", type=int, default=2, help="rate of the blocks' linears")
    parser.add_argument("--lm-head", type=int, default=None, help="rate of the head; bfloat16 by default")
    parser.add_argument("--apart", action="store_true", help="hybrid settings also with codes and ring in two ops")
    parser.add_argument("--max-context", type=int, default=4096, help="that the engine is made for at least, whole")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="of the whole step's model")
    parser.add_argument("--layers", type=int, help="of the whole step's model (default: the shape's)")
    parser.add_argument("--shapes", nargs="*", default=[f"{b}x{c}" for b, c in WHOLE], help="BATCHxCONTEXT, whole")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), help="of the whole step's cache")
    args = parser.parse_args()
    if args.what == "whole":
        for row in whole(args):
            emit(row)
    else:
        parts()


def parts() -> None:
    device = torch.device("cuda", 0)
    angle = torch.arange(40000, device=device)[:, None] * 500000.0 ** -(torch.arange(0, DIM, 2, device=device) / DIM)
    blocks = [
        Attention(index=i, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, cos=angle.cos(), sin=angle.sin())
        for i in range(LAYERS)
    ]
    for batch, context in ((1, 1024), (16, 1024), (1, 32768), (8, 32768)):
        per_row = -(-(context + 64) // 16)
        sizes: dict[str, Any] = {
            "layers": LAYERS, "pages": 1 + batch * per_row, "page_size": 16, "kv_heads": KV_HEADS, "head_dim": DIM,
            "rows": batch, "pages_per_row": per_row, "device": device, "dtype": torch.bfloat16,
        }  # fmt: skip
        qkv = torch.randn(batch, 1, (HEADS + 2 * KV_HEADS) * DIM, device=device, dtype=torch.bfloat16)
        plain = PagedCache(**(sizes | ({"layers": 1} if context > 4096 else {})))
        settings = ("turboquant:4", "turboquant:4,mode=full", "turboquant:k3v4")
        caches = {text: TurboQuantCache(kv, **sizes) for text in settings if (kv := parse_kv(text)) is not None}
        for cache in (plain, *caches.values()):
            cache.block_table.copy_(torch.arange(1, 1 + batch * per_row).view(batch, per_row))
            cache.positions.fill_(context)
            cache.counts.fill_(1)

        def write_exact(cache: PagedCache = plain, qkv: torch.Tensor = qkv) -> None:
            for block in blocks:
                i = block.index % len(cache.keys)
                rope_cache_write(
                    qkv, None, None, 0.0, block.cos, block.sin, cache.positions, cache.counts, cache.block_table,
                    cache.keys[i], cache.values[i], HEADS,
                )  # fmt: skip

        row: dict[str, Any] = {"bench": "turboquant step", "batch": batch, "context": context, "layers": LAYERS}
        emit(row | {"part": "exact write", "us": round(replay_us(write_exact, device, LAYERS), 2)} | machine(device))
        for text, cache in caches.items():
            q = torch.randn(batch, 1, HEADS, DIM, device=device, dtype=torch.bfloat16)
            lse = torch.randn(batch, 1, HEADS, device=device)

            def write(cache: TurboQuantCache = cache, qkv: torch.Tensor = qkv) -> None:
                for block in blocks:
                    found = cache.layers[block.index]
                    assert found is not None
                    turboquant_write(
                        qkv, None, None, 0.0, block.cos, block.sin, cache.positions, cache.counts, cache.block_table,
                        found.turn, found.k_codebook, found.v_codebook, found.codes, found.ring,
                        None if found.ring is None else cache.slots, HEADS, cache.config.scale, False,
                    )  # fmt: skip

            def recent(cache: TurboQuantCache = cache, q: torch.Tensor = q, lse: torch.Tensor = lse) -> None:
                for block in blocks:
                    found = cache.layers[block.index]
                    assert found is not None
                    assert found.ring is not None
                    recent_attention(
                        q, found.ring, cache.slots, cache.positions, q, lse, cache._rotation, block.scale,
                        cache.config.window, 8, 0,
                    )  # fmt: skip

            def attend(cache: TurboQuantCache = cache, qkv: torch.Tensor = qkv) -> None:
                for block in blocks:
                    cache.attend(block, qkv)

            parts = {"write": write, "write and attend": attend}
            if cache.config.window:
                parts["recent"] = recent
            for part, fn in parts.items():
                us = round(replay_us(fn, device, LAYERS, budget_ms=60), 2)
                emit(row | {"part": part, "kv": text, "us": us} | machine(device))
        exact = [PagedCache(**(sizes | {"layers": LAYERS}))] if context <= 4096 else []
        for cache in exact:
            cache.block_table.copy_(caches[settings[0]].block_table)
            cache.positions.fill_(context)
            cache.counts.fill_(1)

            def attend_exact(cache: PagedCache = cache, qkv: torch.Tensor = qkv) -> None:
                for block in blocks:
                    cache.attend(block, qkv)

            us = round(replay_us(attend_exact, device, LAYERS, budget_ms=60), 2)
            emit(row | {"part": "write and attend", "kv": "exact", "us": us} | machine(device))


if __name__ == "__main__":
    main()
