"""Microseconds of FP8 linears and routed experts beside torch's dense bfloat16, and of all products of a layer of
DeepSeek-V4-Flash behind one another, as JSON lines.

PYTHONPATH=src python3 benchmarks/fp8.py --out benchmarks/results/fp8-h200.jsonl

--variants times instead, for each shape and count of tokens, every way to cut it: what the constants of
ops/cuda/fp8.py were chosen by.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from kernels import copy_bandwidth, replay_us

from onegraph.engine.record import emit, machine
from onegraph.ops.cuda import build, fp8, stream
from onegraph.ops.fp8 import fp8_experts, fp8_grouped_linear, fp8_linear
from onegraph.ops.registry import nbytes

WORKING_SET = 480 << 20  # eight times an H200's L2
SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096), (4096, 1536), (1024, 32768), (8192, 4096), (1024, 8192))
EXPERTS = ((128, 2048, 768, 8), (64, 4096, 2048, 6))  # Qwen3-30B-A3B; a quarter of DeepSeek-V4-Flash-Base's
BLOCKS = {"128x128": (128, 128), "32x32": (32, 32), "1x32": (1, 32), "rows": (1, 0)}
DEVICE = torch.device("cuda", 0)
NO_GATE = float("inf"), 1.0, 0.0


def weight(block: tuple[int, int], *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales of weights [..., n, k], made on the device."""
    (rows, columns), (*lead, n, k) = block, shape
    codes = torch.randint(0, 127, shape, dtype=torch.uint8, device=DEVICE)  # positive, no NaN
    grid = (*lead, -(-n // rows), -(-k // columns)) if columns else (*lead, n)
    return codes, (0.5 + torch.rand(grid, device=DEVICE)) * k**-0.5 / 100


def timed(calls: list[Callable[[], Any]], budget_ms: int = 40) -> float:
    return replay_us(lambda: [call() for call in calls], DEVICE, len(calls), budget_ms)


def linears(tokens: list[int], kind: str) -> Iterator[dict[str, Any]]:
    block = BLOCKS[kind]
    for k, n in SHAPES:
        layers = [weight(block, n, k) for _ in range(-(-WORKING_SET // (n * k)))]
        dense = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(-(-WORKING_SET // (2 * n * k)))]
        for count in tokens:
            x = torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16)
            us = timed([partial(fp8_linear, x, *w, None, *block, False) for w in layers])
            peer = timed([partial(torch.nn.functional.linear, x, w) for w in dense])
            row = {"op": "fp8_linear", "block": kind, "k": k, "n": n, "tokens": count}
            yield row | {"us": us, "bf16_us": round(peer, 2), "bytes": nbytes(*layers[0])}


def experts(tokens: list[int]) -> Iterator[dict[str, Any]]:
    block = BLOCKS["128x128"]
    for total, dim, wide, top_k in EXPERTS:
        layer = *weight(block, total, 2 * wide, dim), *weight(block, total, dim, wide)
        for count in tokens:
            x = torch.randn(count, dim, device=DEVICE, dtype=torch.bfloat16)
            gains = torch.full((count, top_k), 1 / top_k, device=DEVICE)
            chosen = [
                torch.rand(count, total, device=DEVICE).argsort(1)[:, :top_k].int().contiguous() for _ in range(16)
            ]
            us = timed([partial(fp8_experts, x, c, gains, *layer, *block, *NO_GATE) for c in chosen])
            distinct = sum(len(set(c.flatten().tolist())) for c in chosen) / len(chosen)
            row = {"op": "fp8_experts", "dim": dim, "wide": wide, "top_k": top_k, "experts": total, "tokens": count}
            yield row | {"us": us, "bytes": int(distinct * (nbytes(*layer) // total))}


def layer() -> Iterator[dict[str, Any]]:
    """One token through what a layer of V4-Flash with an indexer multiplies in FP8 where its experts are FP4: launches
    that begin while the one before ends, which no figure of one of them shows."""
    block, dim, wide, count = BLOCKS["128x128"], 4096, 2048, 6
    shapes = (1536, dim), (32768, 1024), (8192, 1024), (8, 1024, 4096), (dim, 8192), (2 * wide, dim), (dim, wide)
    layers = [[weight(block, *shape) for shape in shapes] for _ in range(count)]

    def run(i: int, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        qkv_a, q_b, index_q, out_a, out_b, gate_up, down = layers[i]
        low = fp8_linear(x, *qkv_a, None, *block, False)[:, :1024].contiguous()
        fp8_linear(low, *q_b, None, *block, False)
        fp8_linear(low, *index_q, None, *block, False)
        x = fp8_linear(fp8_grouped_linear(heads, *out_a, *block).flatten(1), *out_b, None, *block, False)
        hidden = fp8_linear(x, *gate_up, None, *block, False)[:, :wide].contiguous()
        return fp8_linear(hidden, *down, None, *block, False)

    x, heads = (torch.randn(1, *shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((dim,), (8, 4096)))
    us = timed([partial(run, i, x, heads) for i in range(count)])
    bytes_ = sum(nbytes(*w) for w in layers[0])
    yield {"op": "the FP8 products of a V4-Flash layer", "tokens": 1, "us": us, "bytes": bytes_}


def decoded(x: torch.Tensor, layer: tuple[torch.Tensor, torch.Tensor], block: tuple[int, int]) -> torch.Tensor:
    return torch.nn.functional.linear(x, fp8.STREAM.decode(as_given(layer, block), x.dtype))


def as_given(layer: tuple[torch.Tensor, torch.Tensor], block: tuple[int, int]) -> stream.Weight:
    """As the kernels are given it."""
    codes, scale = layer
    found = fp8.STREAM.weight((1, *codes.shape), {"codes": codes, "scale": scale}, block)
    assert found is not None
    return found


def variants(tokens: list[int], kind: str) -> Iterator[dict[str, Any]]:
    """Every cut, of linears that `fp8.cu` runs, and decoding once."""
    block, device = BLOCKS[kind], build.device(DEVICE.index)
    room = device.shared - stream.ROUTES

    def ways(count: int) -> list[stream.Variant]:
        tiles = [t for t in (1, 2, 4) if 8 * t >= min(count, 16) and (t == 1 or 4 * t < count)]
        kinds = product(tiles, (False, True), (16, 8), (128, 256), (1, 8))
        return [
            stream.Variant(stream.LINEAR, t, False, ring, slice, ((warps, warps // 2),), early=early)
            for t, ring, warps, slice, early in kinds
            if (t == 1 or slice == 128) and (t < 4 or warps == 8)
            if early == 8 or not ring
        ]

    grain = 128 if block[1] in (0, 128) else 32
    every = {(v, depth) for count in tokens for v in ways(count) for depth in (2, 3, 4, 6)}
    with ThreadPoolExecutor(8) as pool:  # NVRTC compiles beside itself; the cubins are found again below
        forms = [variant.defines(depth) | {"HALF": 0, "GRAIN": grain} for variant, depth in every]
        list(pool.map(lambda form: fp8.STREAM.source.cubin(form, (9, 0)), forms))
    for k, n in SHAPES:
        layers = [weight(block, n, k) for _ in range(-(-WORKING_SET // (n * k)))]
        for count in tokens:
            x = torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16)
            given, y = [as_given(w, block) for w in layers], x.new_empty(count, n)
            row = {"op": "fp8_linear", "block": kind, "k": k, "n": n, "tokens": count, "bytes": nbytes(*layers[0])}
            for variant in ways(count):
                for depth in (2, 3, 4, 6):
                    tried, slices = replace(variant, depths=(depth,)), -(-k // variant.slice)
                    footprint = fp8.STREAM.footprint(tried, given[0])
                    cut = stream.plan(-(-n // stream.ROWS), slices, tried, footprint, device.sms, room)
                    if cut is None:
                        continue
                    us = timed([partial(fp8.STREAM.run, tried, w, x, y, cut, count) for w in given], 10)
                    about = {"tiles": variant.tiles, "ring_x": variant.ring_x, "warps": variant.warps[0][0]}
                    about |= {
                        "early": min(variant.early, depth),
                        "slice": variant.slice,
                        "depth": depth,
                        "across": cut.across,
                        "hold": cut.hold,
                    }
                    now, tiling = fp8.STREAM.tiling(count, given[0], DEVICE.index)
                    yield row | about | {"now": replace(now, depths=(depth,)) == tried and tiling == cut, "us": us}
            if count > 16:
                yield row | {"decoded": True, "us": timed([partial(decoded, x, w, block) for w in layers], 10)}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For each count of tokens its shapes, the best settings of each and what is set now, then what is best for all:
    geometric means of times over each shape's best."""
    settings = "tiles", "ring_x", "warps", "slice", "early", "depth"
    for count in sorted({row["tokens"] for row in rows}):
        ratios: dict[str, list[float]] = {}
        for k, n in SHAPES:
            here = [row for row in rows if (row["tokens"], row["k"], row["n"]) == (count, k, n)]
            said = {
                row["us"]: "decoded once"
                if "decoded" in row
                else " ".join(f"{name} {row[name]:d}" for name in settings)
                for row in here
            }
            least, now = min(said), [row["us"] for row in here if row.get("now")]
            yield f"{count} tokens, {k} -> {n}: {least} us ({said[least]}); now {now}"
            for us, which in said.items():
                ratios.setdefault(which, []).append(us / least)
        means = {which: statistics.geometric_mean(r) for which, r in ratios.items() if len(r) == len(SHAPES)}
        for which in sorted(means, key=means.__getitem__)[:6]:
            yield f"{count} tokens, all shapes: {means[which]:.3f} of the best ({which})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--block", choices=list(BLOCKS), default="128x128")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = {"bench": "fp8 variants" if args.variants else "fp8", **machine(DEVICE)}
    bandwidth = copy_bandwidth(DEVICE)
    few = [count for count in args.tokens if count <= 16]
    rows = (
        variants(args.tokens, args.block)
        if args.variants
        else chain(linears(args.tokens, args.block), experts(few), layer())
    )
    done = []
    for row in rows:
        done.append(row | {"us": round(row["us"], 2), "floor_us": round(row["bytes"] / bandwidth * 1e6, 2)} | about)
        emit(done[-1], args.out)
    if args.variants:
        print(*summary(done), sep="\n")


if __name__ == "__main__":
    main()
