"""Sums over GPUs of a prompt's chunks, [tokens, 4096] in bfloat16: through the inboxes, by NCCL, and in two shots.

    PYTHONPATH=src python3 benchmarks/exchange_prefill.py --gpus 2 4

- parts: `Peer.all_reduce` of 64 tokens at a time, the least that the engine's inboxes take, a graph on each GPU;
- whole: the same of all tokens at once, which engines have room for where a vocabulary's logits need as much;
- nccl: torch.cuda.nccl, one process and one thread, without a graph;
- two-shot: each rank sums its own rows in float32, which it has from its peers by copies between GPUs, then all get
  all rows: plain torch, an experiment. A pair of GPUs has two streams on each, so that no copy waits for another one.

us is the GPUs' time: everything is queued behind a kernel that sleeps, and events around it are of the first GPU, which
begins before and ends behind all others. host_us is what it takes to queue it. Prints JSON lines; --out appends.
"""

import argparse
import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.engine.record import emit, machine
from onegraph.models.ranks import TOKENS
from onegraph.nn.peers import Peers

WIDTH = 4096
NAP = 10_000_000  # cycles, some 5 ms: longer than it takes to queue anything here

Sum = tuple[Callable[[], object], list[Tensor]]  # launches it on the current streams; what it gives on each GPU


def on(streams: list[torch.cuda.Stream]) -> AbstractContextManager[Any]:
    """All of them are current, the first one's device is."""
    stack = ExitStack()
    for stream in reversed(streams):
        stack.enter_context(torch.cuda.stream(stream))
    return stack


def whole(x: list[Tensor], streams: list[torch.cuda.Stream]) -> Sum:
    return parts(x, streams, len(x[0]))


def parts(x: list[Tensor], streams: list[torch.cuda.Stream], at_once: int = TOKENS) -> Sum:
    devices = [each.device for each in x]
    peers = Peers(devices, at_once * WIDTH * x[0].element_size() // 4)
    graphs, out = [], []
    for i, device in enumerate(devices):
        peer = peers.rank(i)
        with torch.cuda.device(device), torch.cuda.stream(streams[i]):
            peer.all_reduce(x[i])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=streams[i]):
                out.append(peer.all_reduce(x[i]))
            graph.replay()  # alone
            torch.cuda.synchronize()
        graphs.append(graph)
    peers.arm()

    def run() -> None:
        for graph in graphs:
            graph.replay()
        peers.check()  # of the runs before

    return run, out


def nccl(x: list[Tensor], streams: list[torch.cuda.Stream]) -> Sum:
    from torch.cuda import nccl

    out = [torch.empty_like(each) for each in x]
    return lambda: nccl.all_reduce(x, out, streams=streams), out


def two_shot(x: list[Tensor], streams: list[torch.cuda.Stream]) -> Sum:
    ranks = range(len(x))
    rows, left = divmod(len(x[0]), len(x))
    if left:
        raise ValueError(f"{len(x[0])} tokens are not shared evenly by {len(x)} GPUs")
    own = [slice(i * rows, (i + 1) * rows) for i in ranks]
    out = [torch.empty_like(each) for each in x]
    taken = [each.new_empty(len(x), rows, WIDTH) for each in x]
    sums = [each.new_empty(rows, WIDTH, dtype=torch.float32) for each in x]
    pairs = [(i, j) for i in ranks for j in ranks if i != j]
    into = {(i, j): torch.cuda.Stream(x[i].device) for i, j in pairs}  # on i, of what comes from j
    off = {(i, j): torch.cuda.Stream(x[j].device) for i, j in pairs}  # on j, of what goes to i

    def move(what: Callable[[int, int], tuple[Tensor, Tensor]]) -> None:
        """For each pair, from the second to the first; a copy runs on the source's stream and waits for both."""
        for i, j in pairs:
            into[i, j].wait_stream(streams[i])
            off[i, j].wait_stream(streams[j])
            with torch.cuda.stream(off[i, j]), torch.cuda.stream(into[i, j]):
                target, source = what(i, j)
                target.copy_(source, non_blocking=True)
        for i, j in pairs:
            streams[i].wait_stream(into[i, j])
            streams[j].wait_stream(off[i, j])

    def run() -> None:
        for i in ranks:
            taken[i][i].copy_(x[i][own[i]])
        move(lambda i, j: (taken[i][j], x[j][own[i]]))
        for i in ranks:
            torch.sum(taken[i], 0, dtype=torch.float32, out=sums[i])
            out[i][own[i]].copy_(sums[i])
        move(lambda i, j: (out[i][own[j]], out[j][own[j]]))

    return run, out


WAYS: dict[str, Callable[[list[Tensor], list[torch.cuda.Stream]], Sum]] = {
    "parts": parts,
    "whole": whole,
    "nccl": nccl,
    "two-shot": two_shot,
}


def wait(devices: list[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def measured(way: str, gpus: int, tokens: int, repeats: int) -> dict[str, Any]:
    devices = [torch.device("cuda", i) for i in range(gpus)]
    streams = [torch.cuda.Stream(device) for device in devices]
    x = [torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(gpus)]
    want = torch.stack(x).double().sum(0)
    there = [each.to(device) for each, device in zip(x, devices, strict=True)]
    wait(devices)
    pairs = []
    with on(streams):
        run, out = WAYS[way](there, streams)
        for _ in range(3):
            run()
        wait(devices)
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(NAP)
            begin.record(streams[0])
            for stream in streams[1:]:
                stream.wait_event(begin)
            started = time.perf_counter()
            run()
            queued = time.perf_counter() - started
            for stream in streams[1:]:
                streams[0].wait_stream(stream)
            end.record(streams[0])
            wait(devices)
            pairs.append((begin.elapsed_time(end) * 1e3, queued * 1e6))
        run()
        wait(devices)
    found = [each.cpu() for each in out]
    us, host = (round(statistics.median(times), 2) for times in zip(*pairs, strict=True))
    return {
        "us": us, "host_us": host, "same_bits": all(torch.equal(each, found[0]) for each in found),
        "error": float((found[0].double() - want).abs().max() / want.abs().max()),
    }  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for gpus in [gpus for gpus in args.gpus if gpus <= torch.cuda.device_count()]:
        for tokens in args.tokens:
            for way in args.ways:
                about = {"bench": "exchange_prefill", "name": way, "gpus": gpus, "tokens": tokens, "width": WIDTH}
                try:
                    yield about | measured(way, gpus, tokens, args.repeats)
                except Exception as error:  # the other ways go on
                    yield about | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--limit", type=int, default=240, help="seconds, after which the script ends wherever it is")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as the exchange does without NVLink multicast
    about = machine("cuda:0")
    for row in rows(args):
        emit(row | about, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
