"""The cost of TurboQuant's other kernels in a decode step on a GPU: the write, and the ring with its merge.

    python benchmarks/turboquant_step.py > lines.jsonl

Each is replayed from one graph of 32 calls on as many layers' tensors, 32 query and 8 kv heads of 128, bfloat16, beside
the write of an exact cache; microseconds a layer, median.
"""

from typing import Any

import torch

from onegraph.cli.common import print_json
from onegraph.engine.bench import machine, replay_us
from onegraph.formats.turboquant import parse_kv
from onegraph.nn.attention import Attention, PagedCache
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.attention import rope_cache_write
from onegraph.ops.recent_attention import recent_attention
from onegraph.ops.turboquant import turboquant_write

LAYERS, HEADS, KV_HEADS, DIM = 32, 32, 8, 128


def main() -> None:
    device = torch.device("cuda", 0)
    angle = torch.arange(40000, device=device)[:, None] * 500000.0 ** -(torch.arange(0, DIM, 2, device=device) / DIM)
    blocks = [
        Attention(
            index=i, qkv=torch.nn.Identity(), out=torch.nn.Identity(), heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
            cos=angle.cos(), sin=angle.sin(),
        )
        for i in range(LAYERS)
    ]  # fmt: skip
    for batch, context in ((1, 1024), (16, 1024), (1, 32768), (8, 32768)):
        per_row = -(-(context + 64) // 16)
        sizes: dict[str, Any] = {
            "layers": LAYERS, "pages": 1 + batch * per_row, "page_size": 16, "kv_heads": KV_HEADS, "head_dim": DIM,
            "rows": batch, "pages_per_row": per_row, "device": device, "dtype": torch.bfloat16,
        }  # fmt: skip
        qkv = torch.randn(batch, 1, (HEADS + 2 * KV_HEADS) * DIM, device=device, dtype=torch.bfloat16)
        plain = PagedCache(**(sizes | ({"layers": 1} if context > 4096 else {})))
        settings = ("turboquant:4", "turboquant:4,mode=full", "turboquant:k3v4", "turboquant:4,keys=prod")
        caches = {text: TurboQuantCache(parse_kv(text), **sizes) for text in settings}  # type: ignore[arg-type]
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
        print_json(
            row | {"part": "exact write", "us": round(replay_us(write_exact, device, LAYERS), 2)} | machine(device)
        )
        for text, cache in caches.items():
            q = torch.randn(batch, 1, HEADS, DIM, device=device, dtype=torch.bfloat16)
            lse = torch.randn(batch, 1, HEADS, device=device)

            def write(cache: TurboQuantCache = cache, qkv: torch.Tensor = qkv) -> None:
                for block in blocks:
                    found = cache.layers[block.index]
                    assert found is not None
                    how = found.layout
                    turboquant_write(
                        qkv, None, None, 0.0, block.cos, block.sin, cache.positions, cache.counts, cache.block_table,
                        cache._turn, cache._projection, found.k_codebook, found.v_codebook, found.codes, found.ring,
                        None if found.ring is None else cache.slots, HEADS, how.k_bits, how.v_bits, how.k_variant,
                        how.v_variant, cache.config.scale, False,
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
                print_json(row | {"part": part, "kv": text, "us": us} | machine(device))
        exact = [PagedCache(**(sizes | {"layers": LAYERS}))] if context <= 4096 else []
        for cache in exact:
            cache.block_table.copy_(caches[settings[0]].block_table)
            cache.positions.fill_(context)
            cache.counts.fill_(1)

            def attend_exact(cache: PagedCache = cache, qkv: torch.Tensor = qkv) -> None:
                for block in blocks:
                    cache.attend(block, qkv)

            us = round(replay_us(attend_exact, device, LAYERS, budget_ms=60), 2)
            print_json(row | {"part": "write and attend", "kv": "exact", "us": us} | machine(device))


if __name__ == "__main__":
    main()
