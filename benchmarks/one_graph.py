"""One graph over several GPUs beside one graph a GPU: the same chains, their bits, and the time of a launch.

    PYTHONPATH=src python3 benchmarks/one_graph.py --gpus 2 4

Each GPU's chain is captured by itself, as the engine captures a rank's step. `each` launches these graphs one behind
the other. The others are one graph with the nodes of all GPUs, launched once, on a stream of the first GPU:

- children: the captured graphs as child-graph nodes, with no edge between them;
- recorded: each GPU's stream captured into the same graph (cuStreamBeginCaptureToGraph);
- forked: one capture by torch, which forks to the other GPUs' streams by events.

GPUs wait for each other inside of the chains, so a graph that runs one GPU's part behind another's cannot end: its
ranks give up after two seconds, and the row says "serialised". A row has the time from the launch until all GPUs are
done (us, us_99: median and 99th percentile) and the host's part of it, the launch calls (host_us, host_us_99). A mode
takes turns with `each`, in a process of its own: what it breaks hides no other. Prints JSON lines; --out appends.
"""

import argparse
import faulthandler
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.engine.record import emit, machine
from onegraph.nn.peers import Peer, PeerError, Peers
from onegraph.ops.cuda import build

EXCHANGES, LAYERS, WIDTH, HIDDEN = 100, 32, 4096, 512
PATIENCE = 2.0  # seconds


def exchanges(peer: Peer, device: torch.device) -> Callable[[], Tensor]:
    """EXCHANGES sums of one token."""
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(peer.index)).to(device, torch.bfloat16)

    def run() -> Tensor:
        for _ in range(EXCHANGES):
            out = peer.all_reduce(x)
        return out

    return run


def layers(peer: Peer, device: torch.device) -> Callable[[], Tensor]:
    """LAYERS times what crosses in a layer, each behind two small linears and what is between them."""
    generator = torch.Generator().manual_seed(peer.index)
    up = (torch.randn(WIDTH, HIDDEN, generator=generator) / WIDTH**0.5).to(device, torch.bfloat16)
    down = (torch.randn(HIDDEN, WIDTH, generator=generator) / HIDDEN**0.5).to(device, torch.bfloat16)
    first = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(99)).to(device, torch.bfloat16)

    def run() -> Tensor:
        x = first
        for _ in range(2 * LAYERS):
            x = peer.all_reduce(torch.tanh(x @ up) @ down, x)
        return x

    return run


CHAINS: dict[str, Callable[[Peer, torch.device], Callable[[], Tensor]]] = {
    f"{EXCHANGES} exchanges": exchanges,
    f"{LAYERS} layers": layers,
}


class Captured:
    """A chain on each GPU, warmed up and captured alone.

    Attributes: streams, work, graphs and out, what a replay returns, of each GPU.
    """

    def __init__(self, peers: Peers, make: Callable[[Peer, torch.device], Callable[[], Tensor]]) -> None:
        self.peers, self.devices = peers, peers.devices
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self.work = [make(peers.rank(i), device) for i, device in enumerate(self.devices)]
        self.graphs: list[Any] = []
        self.out: list[Tensor] = []
        for i in range(len(self.devices)):
            with self.on(i):
                self.work[i]()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                with torch.cuda.graph(graph, stream=self.streams[i]):
                    self.out.append(self.work[i]())
                graph.instantiate()
                self.graphs.append(graph)

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
            yield

    def running(self) -> AbstractContextManager[Any]:
        """All streams are current, the first GPU is."""
        stack = ExitStack()
        for i in reversed(range(len(self.devices))):
            stack.enter_context(self.on(i))
        return stack

    def wait(self) -> None:
        for stream in self.streams:
            stream.synchronize()


@dataclass
class Mode:
    """launch: of all GPUs' chains; out: what they return then; held: what must live as long."""

    launch: Callable[[], object]
    out: list[Tensor]
    held: Any = None


def each(chain: Captured) -> Mode:
    def launch() -> None:
        for graph in chain.graphs:
            graph.replay()

    return Mode(launch, chain.out)


def one(chain: Captured, fill: Callable[[Any, Any, Captured], None], out: list[Tensor], held: Any = None) -> Mode:
    """`fill` puts the nodes of all GPUs into a graph, given as (driver, graph, chain)."""
    driver = build.bindings()[0]
    with chain.on(0):
        graph = build.check(driver.cuGraphCreate(0))
        fill(driver, graph, chain)
        whole = build.check(driver.cuGraphInstantiate(graph, 0))
        stream = driver.CUstream(chain.streams[0].cuda_stream)
        build.check(driver.cuGraphUpload(whole, stream))
        chain.wait()

    def launch() -> None:
        if int(code := driver.cuGraphLaunch(whole, stream)[0]):
            raise RuntimeError(f"cuGraphLaunch: {code!r}")

    return Mode(launch, out, held)


def children(chain: Captured) -> Mode:
    def fill(driver: Any, graph: Any, chain: Captured) -> None:
        for captured in chain.graphs:
            child = driver.CUgraph(captured.raw_cuda_graph())
            build.check(driver.cuGraphAddChildGraphNode(graph, None, 0, child))

    return one(chain, fill, chain.out)


def recorded(chain: Captured) -> Mode:
    """Memory is from pools of its own: torch does not know of this capture, and would hand it out again."""
    pools: list[Any] = []
    out: list[Tensor] = []

    def fill(driver: Any, graph: Any, chain: Captured) -> None:
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        for i, stream in enumerate(chain.streams):
            with chain.on(i):
                pools.append(torch.cuda.MemPool())
            with chain.on(i), torch.cuda.use_mem_pool(pools[i], device=chain.devices[i]):
                chain.work[i]()  # the pool then has the memory that the capture asks for
                torch.cuda.synchronize()
                name = driver.CUstream(stream.cuda_stream)
                build.check(driver.cuStreamBeginCaptureToGraph(name, graph, None, None, 0, relaxed))
                try:
                    out.append(chain.work[i]())
                finally:
                    ended = driver.cuStreamEndCapture(name)
                build.check(ended)

    return one(chain, fill, out, pools)


def forked(chain: Captured) -> Mode:
    graph, out = torch.cuda.CUDAGraph(), []
    begun = torch.cuda.Event()
    ends = [torch.cuda.Event() for _ in chain.streams[1:]]
    with chain.on(0), torch.cuda.graph(graph, stream=chain.streams[0], capture_error_mode="relaxed"):
        begun.record(chain.streams[0])
        out.append(chain.work[0]())
        for i, end in enumerate(ends, 1):
            with chain.on(i):
                chain.streams[i].wait_event(begun)
                out.append(chain.work[i]())
                end.record(chain.streams[i])
            chain.streams[0].wait_event(end)
    return Mode(graph.replay, out)


MODES: dict[str, Callable[[Captured], Mode]] = {
    "each": each,
    "children": children,
    "recorded": recorded,
    "forked": forked,
}


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def rows(gpus: int, name: str, modes: list[str], launches: int) -> list[dict[str, Any]]:
    """Of one chain on so many GPUs, a row for each mode; the first one gives the bits that others are held to."""
    peers = Peers([torch.device("cuda", i) for i in range(gpus)], 2 * WIDTH, PATIENCE)
    chain = Captured(peers, CHAINS[name])
    ready: dict[str, Mode] = {}
    found: dict[str, dict[str, Any]] = {}
    want: list[Tensor] = []
    with chain.running():
        for mode in modes:
            peers.arm(False)
            try:
                made = MODES[mode](chain)
                made.launch()  # alone: a first launch may wait for a whole GPU, which must not spin then
                chain.wait()
                peers.arm()
                out = once(chain, made)
            except Exception as error:  # of a launch that failed others may fail, too: nothing more is asked here
                found[mode] = {
                    "status": "serialised" if isinstance(error, PeerError) else "failed",
                    "error": said(error),
                }
                break
            ready[mode], want = made, want or out
            found[mode] = {"status": "runs", "same_bits": all(torch.equal(each, want[0]) for each in (*out, *want))}
        for mode, times in timed(chain, ready, launches).items() if len(ready) == len(modes) else ():
            found[mode] |= times
    return [{"bench": "one_graph", "run": name, "name": mode, "gpus": gpus, **told} for mode, told in found.items()]


def once(chain: Captured, mode: Mode) -> list[Tensor]:
    for out in mode.out:
        out.fill_(torch.nan)
    chain.wait()
    mode.launch()
    chain.wait()
    chain.peers.check()
    return [out.cpu() for out in mode.out]


def timed(chain: Captured, modes: dict[str, Mode], launches: int) -> dict[str, dict[str, Any]]:
    """Microseconds of each mode, which take turns; one whose ranks give up takes part no more."""
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    told: dict[str, dict[str, Any]] = {}
    gc.disable()
    for _ in range(launches):
        for name in [name for name in modes if name not in told]:
            begun = time.perf_counter()
            modes[name].launch()
            launched = time.perf_counter()
            chain.wait()
            done = time.perf_counter()
            found[name].append(((done - begun) * 1e6, (launched - begun) * 1e6))
            try:
                chain.peers.check()
            except PeerError as error:
                told[name] = {"status": "serialised", "error": f"launch {len(found[name])}: {said(error)}"}
                chain.peers.reset()
    gc.enable()
    for name, pairs in found.items():
        if name not in told:
            told[name] = {"launches": len(pairs)}
            for what, times in zip(("us", "host_us"), zip(*pairs, strict=True), strict=True):
                told[name] |= {
                    what: round(statistics.median(times), 2),
                    f"{what}_99": round(sorted(times)[int(0.99 * len(times))], 2),
                }
    return told


def measure(mode: str, args: argparse.Namespace) -> None:
    """In this process, which ends itself if it does not come to an end."""
    faulthandler.dump_traceback_later(args.limit, exit=True)
    about = machine("cuda:0")
    for gpus in [gpus for gpus in args.gpus if gpus <= torch.cuda.device_count()]:
        for name in CHAINS:
            try:
                found = rows(gpus, name, list(dict.fromkeys(("each", mode))), args.launches)
            except Exception as error:
                row = {"bench": "one_graph", "run": name, "name": mode, "gpus": gpus}
                found = [{**row, "status": "failed", "error": said(error)}]
            for row in found:
                emit(row | about, args.out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[mode for mode in MODES if mode != "each"])
    parser.add_argument("--launches", type=int, default=500)
    parser.add_argument("--limit", type=int, default=120, help="seconds of a mode, after which it is ended")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if len(args.modes) == 1:
        measure(args.modes[0], args)
        return 0
    failed = False
    for mode in args.modes:
        words = [sys.executable, sys.argv[0], "--gpus", *map(str, args.gpus), "--modes", mode]
        words += ["--launches", str(args.launches), "--limit", str(args.limit)]
        words += ["--out", str(args.out)] if args.out else []
        try:
            code: object = subprocess.run(words, timeout=args.limit + 30).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {args.limit + 30} s"
        if code:
            failed = True
            emit({"bench": "one_graph", "name": mode, "status": "failed", "error": f"exit code {code}"}, args.out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
