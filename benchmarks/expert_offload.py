"""Tokens per second of the decode step of Qwen3-30B-A3B's shape, with random weights, where some of its experts are on
the GPU and the others in host memory; and what the copy of a step's missing experts takes. JSON lines.

    PYTHONPATH=src:benchmarks python3 benchmarks/expert_offload.py --out benchmarks/results/expert-offload-h200.jsonl
    PYTHONPATH=src:benchmarks python3 benchmarks/expert_offload.py --tiny                # a CPU, some seconds

The weights are random and so say nothing about routing, so the experts of each step are drawn beforehand: "uniform",
each set of 8 of 128 alike, or "zipf", without replacement with probabilities of 1 / rank, the ranks of each layer in an
order of its own. --resident: percent of the experts' bytes that the GPU may take. A row's `hit_rate` is the share of
chosen experts that had a slot, in eager steps behind the timed ones. Before anything is timed, logits of the model are
held to those with all experts on the GPU, bit by bit (--resident must begin with 100).
"""

import argparse
import math
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import replay_us
from step import SHAPES, RandomCheckpoint
from torch import Tensor

from onegraph.engine.bench import bench_step
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.record import emit, machine
from onegraph.models.blocks import Block
from onegraph.models.llama import Llama, config_of
from onegraph.models.loader import Loader
from onegraph.nn.block import Stream
from onegraph.nn.expert_cache import CachedExperts
from onegraph.nn.moe import MoE
from onegraph.ops.cuda import expert_cache as launcher
from onegraph.ops.expert_cache import expert_cache
from onegraph.ops.route import softmax_route

DRAWN = 4096  # tokens whose experts are drawn, one after the other; a long run begins anew
TINY = SHAPES["qwen3-30b-a3b"] | {
    "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 512, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
}  # fmt: skip


class Routes:
    """Experts of every layer by tables [DRAWN, E] of scores, which the step's tokens read in turn."""

    def __init__(self, model: Llama) -> None:
        self.layers = [block.mlp for block in model.blocks if isinstance(block, Block) and isinstance(block.mlp, MoE)]
        self.count, device = self.layers[0].experts.count, model.device
        self.tables = [torch.zeros(DRAWN, self.count, device=device) for _ in self.layers]
        self.at, self.each = torch.zeros(1, dtype=torch.int64, device=device), torch.arange(DRAWN, device=device)
        self.rows: Tensor
        for i, layer in enumerate(self.layers):
            layer.choose = partial(self.choose, i, layer)  # type: ignore[method-assign]

    def choose(
        self, i: int, layer: MoE, stream: Stream, shared: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        normed, total = stream.normed(layer.norm, layer.eps)
        flat = normed.flatten(0, -2)
        tokens = len(flat)
        if i == 0:  # one layer turns the page for all
            self.rows = (self.at + self.each[:tokens]) % DRAWN
            self.at.add_(tokens)
        scores = self.tables[i].index_select(0, self.rows)
        chosen: tuple[Tensor, Tensor] = softmax_route(scores, None, layer.top_k, layer.normalise, shared, False)
        return (flat,), total, *chosen

    def draw(self, kind: str) -> None:
        """New tables, by the Gumbel trick; the slots begin as they were loaded."""
        g = torch.Generator().manual_seed(0)
        self.at.zero_()
        for layer, table in zip(self.layers, self.tables, strict=True):
            gumbel = -torch.log(-torch.log(torch.rand(table.shape, generator=g).clamp(1e-9, 1 - 1e-7)))
            ranks = torch.randperm(self.count, generator=g)
            table.copy_(gumbel if kind == "uniform" else gumbel - torch.log1p(ranks.float()))
            if isinstance(layer.experts, CachedExperts):
                layer.experts.score.zero_()


def hit_rate(model: Llama, engine: Engine, steps: int) -> float:
    """Of `steps` eager steps: chosen experts that have a slot before the step."""
    caches = [module for module in model.modules() if isinstance(module, CachedExperts)]
    if not caches:
        return 1.0
    found: list[Tensor] = []

    def look(cache: CachedExperts, given: tuple[Tensor, ...]) -> None:
        found.append(torch.isin(given[1], cache.resident).float().mean())

    hooks = [cache.register_forward_pre_hook(look) for cache in caches]
    engine.generate([[1]], SamplingParams(max_tokens=steps + 1))
    for hook in hooks:
        hook.remove()
    return float(torch.stack(found[len(caches) :]).mean())  # without the prompt's


def copies(model: Llama, device: torch.device, blocks: int) -> dict[str, Any]:
    """Microseconds of the kernel of so many blocks where no chosen expert has a slot, and where all have; and of
    cudaMemcpy for as many bytes."""
    launcher.BLOCKS = blocks
    cache = next(module for module in model.modules() if isinstance(module, CachedExperts))
    places, count = len(cache.resident), cache.count
    top_k = min(8, places // 2)
    state = cache.resident, cache.score, cache.arrived
    turns = [torch.arange(i * top_k, (i + 1) * top_k, device=device) % count for i in range(count // top_k)]
    turns = [turn.int().view(1, -1) for turn in turns]  # round and round: the least used are those that come next
    cache.score.zero_()

    def all_missing() -> None:
        for turn in turns:
            expert_cache(turn, cache._host, cache._slots, cache._shared, *state)

    def all_there() -> None:
        for _ in turns:
            expert_cache(turns[0], cache._host, cache._slots, cache._shared, *state)

    size = sum(tensor.nbytes for tensor in cache._host) // count * top_k
    pinned, target = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8)
    target = target.to(device)
    us = {
        "missing_us": replay_us(all_missing, device, len(turns), 20),
        "present_us": replay_us(all_there, device, len(turns), 20),
        "memcpy_us": replay_us(lambda: [target.copy_(pinned, non_blocking=True) for _ in range(8)], device, 8, 20),
    }
    rates = {name.replace("us", "gb_per_s"): round(size / us[name] / 1e3, 1) for name in ("missing_us", "memcpy_us")}
    return (
        {"op": "expert_cache", "blocks": blocks, "experts": top_k, "bytes": size}
        | {k: round(v, 2) for k, v in us.items()}
        | rates
    )


@torch.no_grad()
def logits(model: Llama) -> Tensor:
    """Of a prompt, and of single tokens, whose experts have slots."""
    device, g = model.device, torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, 20), generator=g).to(device)
    parts = [tokens, *tokens[:, :4].split(1, dim=1)]
    return torch.cat([model.logits(model(part, model.dense_attention))[0] for part in parts])


def rows(args: argparse.Namespace, device: torch.device, bits: int) -> Iterator[dict[str, Any]]:
    shape = TINY if args.tiny else SHAPES["qwen3-30b-a3b"]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    whole, wanted = 0, None
    for percent in args.resident:
        torch.manual_seed(0)
        checkpoint = RandomCheckpoint(shape, bits, 4, str(device))
        config = config_of(checkpoint)
        loader = Loader(checkpoint, config, dtype)
        whole = sum(loader.expert_bytes.values())
        size = whole if percent == 100 else math.ceil(whole * percent / 100)
        reach = args.context + args.steps + 1
        model = Llama.load(checkpoint, device, dtype, decode=False, max_context=max(reach, 64), expert_memory=size)
        routes = Routes(model)
        routes.draw("uniform")
        found = logits(model)
        wanted = found if wanted is None else wanted
        slots = [len(module.resident) for module in model.modules() if isinstance(module, CachedExperts)]
        about = {
            "bits": bits, "shape": "tiny" if args.tiny else "qwen3-30b-a3b", "lm_head": 4, "resident": percent,
            "slots": slots[0] if slots else routes.count, "expert_bytes": whole,
            "same_logits": torch.equal(found, wanted),
        }  # fmt: skip
        if device.type == "cuda":
            about["allocated"] = torch.cuda.memory_allocated(device)
            if slots:
                default = launcher.BLOCKS
                for blocks in (16, 32, 132, default):
                    yield copies(model, device, blocks) | about | {"bench": "expert offload"} | machine(device)
        for kind in args.routing:
            routes.draw(kind)
            options = {"batches": args.batch, "context": args.context, "steps": args.steps, "modes": (True,)}
            for row in bench_step(model, **options, name=f"{percent} resident, {kind}"):
                engine = Engine(model, max_batch=1, max_context=reach, capture=False)
                hits = round(hit_rate(model, engine, 32), 3)
                yield row | about | {"bench": "expert offload", "routing": kind, "hit_rate": hits}
        del model, routes
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="*", default=[2])
    parser.add_argument("--resident", type=int, nargs="*", default=[100, 50, 25])
    parser.add_argument("--routing", nargs="*", default=["uniform", "zipf"], choices=["uniform", "zipf"])
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="small layers on a CPU, to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.context, args.steps, args.resident = 24, 16, [100, 50]
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    rates: dict[str, list[float]] = {}
    for bits in args.bits:
        for row in rows(args, device, bits):
            emit(row, args.out)
            if "routing" in row:
                rates.setdefault(row["routing"], []).append(row["tokens_per_second"])
    print({kind: [round(each / statistics.median(found[:1]), 2) for each in found] for kind, found in rates.items()})


if __name__ == "__main__":
    main()
