"""Every layer's shares on several GPUs: the exchange alone, and the decode step beside one GPU's, in one run.

    PYTHONPATH=src python3 benchmarks/ranks.py --shape llama-3-8b --bits 2 4 --lm-head 4 --gpus 1 2 --context 1024

Weights are random, the same whoever reads them. The exchange is timed as a graph of many of them on each GPU, all
replaying at once. Before a step is timed, all ranks are held to each other's tokens. --draft adds rounds that read so
many drafts, of an oracle that is right with a chance of .8, beside n-grams and no drafts, as `speculate.py` has them.
Prints JSON lines; --out appends.
"""

import argparse
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import speculate
import torch
from step import SHAPES, RandomCheckpoint, random_model
from torch import Tensor

from onegraph.engine.bench import bench_step
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.record import emit, machine
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.ranks import Ranks, peers_for
from onegraph.nn.peers import Peers
from onegraph.ops.ranks import part_of

CHAIN = 100  # exchanges of a graph


class SameEverywhere(RandomCheckpoint):
    """Random tensors that depend on nothing but their names."""

    def tensor(self, name: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        torch.cuda.manual_seed_all(zlib.crc32(name.encode()))
        return super().tensor(name, device, dtype)


def ranks_model(shape: dict[str, Any], bits: int, lm_head: int | None, gpus: int, max_context: int) -> Ranks:
    places = [torch.device("cuda", i) for i in range(gpus)]
    config = LlamaConfig.from_dict(RandomCheckpoint(shape, bits, lm_head).config)
    peers = peers_for(config, places, torch.bfloat16)
    beside = []
    for i, place in enumerate(places):
        checkpoint = SameEverywhere(shape, bits, lm_head, str(place))
        with torch.cuda.device(place):
            beside.append(Llama.load(checkpoint, place, torch.bfloat16, max_context=max_context, peer=peers.rank(i)))
        torch.cuda.empty_cache()
    return Ranks(beside, peers)


def exchange_rows(gpus: int, shapes: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Microseconds of one all_reduce of [tokens, width] in bfloat16, and of one all_gather of 128,256 logits."""
    devices = [torch.device("cuda", i) for i in range(gpus)]
    for tokens, width in [*shapes, (1, 128256)]:
        gather = width == 128256
        peers = Peers(devices, max(64 * 8192 // 2, -(-width // gpus) + 128))
        graphs, streams = [], [torch.cuda.Stream(device) for device in devices]
        for i, device in enumerate(devices):
            peer = peers.rank(i)
            with torch.cuda.device(device), torch.cuda.stream(streams[i]):
                if gather:
                    first, last = part_of(width, 128, gpus, i)
                    x = torch.randn(tokens, last - first, device=device)
                else:
                    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)

                def run(peer: Any = peer, x: Tensor = x, gather: bool = gather, width: int = width) -> Tensor:
                    return peer.all_gather(x, width, 128) if gather else peer.all_reduce(x)

                run()
                torch.cuda.synchronize(device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=streams[i]):
                    for _ in range(CHAIN):
                        out = run()
                graphs.append((graph, out))
        peers.arm()
        times = []
        for _ in range(12):
            for device in devices:
                torch.cuda.synchronize(device)
            ends = []
            for i, (graph, _) in enumerate(graphs):
                with torch.cuda.device(devices[i]), torch.cuda.stream(streams[i]):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    graph.replay()
                    end.record()
                    ends.append((begin, end))
            for device in devices:
                torch.cuda.synchronize(device)
            times.append(ends[-1][0].elapsed_time(ends[-1][1]) * 1e3 / CHAIN)
        peers.check()
        same = all(torch.equal(graphs[0][1].cpu(), out.cpu()) for _, out in graphs)
        name = "all_gather" if gather else "all_reduce"
        yield {
            "bench": "exchange", "name": name, "gpus": gpus, "tokens": tokens, "width": width,
            "us": round(statistics.median(times), 2), "same_bits": same, **machine(devices[0]),
        }  # fmt: skip


def agree(model: Ranks, context: int) -> bool:
    """Whether all ranks end with the same drawn tokens."""
    engine = Engine(model, max_batch=2, max_context=context)
    prompts = torch.randint(0, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
    engine.generate(prompts, SamplingParams(max_tokens=40, temperature=0.8, seed=1))
    runner: Any = engine.executor.step("decode", sampling=True)
    drawn = [rank.stages[0].inputs["drawn"].cpu() for rank in runner.ranks]
    return all(torch.equal(each, drawn[0]) for each in drawn)


def round_rows(model: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rounds that check drafts, of each batch size."""
    for batch in args.batch:
        wanted = argparse.Namespace(
            batch=batch, context=args.context, tokens=args.steps, drafts=args.draft, chance=[0.8], repeats=3, kv=None,
            sampling=False, eagle=None,
        )  # fmt: skip
        for row in speculate.rows(wanted, model, None, False):
            yield row | machine(torch.device("cuda", 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--bits", type=int, nargs="*", default=[2])
    parser.add_argument("--lm-head", type=int, default=None, help="rate of the head; unquantized by default")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="of the step; 1 is the model on one GPU")
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--draft", type=int, nargs="*", default=[], metavar="K", help="also rounds of K drafts")
    parser.add_argument("--exchange", type=int, nargs="*", default=[], metavar="GPUS", help="time the exchange alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for gpus in args.exchange:
        for row in exchange_rows(gpus, [(1, 4096), (1, 7168), (1, 8192), (4, 4096), (16, 4096), (64, 4096)]):
            emit(row, args.out)
    reach = max(args.context + args.steps + 16, 2048)
    for bits in args.bits:
        for gpus in args.gpus:
            started = time.perf_counter()
            about: dict[str, Any] = {"shape": args.shape, "bits": bits, "lm_head": args.lm_head, "gpus": gpus}
            if gpus == 1:
                model = random_model(SHAPES[args.shape], bits, args.lm_head, reach)
            else:
                model = ranks_model(SHAPES[args.shape], bits, args.lm_head, gpus, reach)
                about["ranks_agree"] = agree(model, reach)
            print(f"loaded in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
            name = f"onegraph e8p {bits} bit" if bits != 16 else "onegraph bf16"
            options = {"batches": args.batch, "context": args.context, "steps": args.steps, "modes": (True,)}
            for row in bench_step(model, **options, name=f"{name}, {gpus} GPUs" if gpus > 1 else name):
                emit(row | about, args.out)
            for row in round_rows(model, args) if args.draft else ():
                emit(row | about, args.out)
            del model
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
