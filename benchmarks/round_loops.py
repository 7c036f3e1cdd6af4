"""Three ways to run many rounds that check drafts: who starts the next one, and what that costs a round.

    PYTHONPATH=src python3 benchmarks/round_loops.py --shape llama-3-8b --bits 2 --lm-head 4 --drafts 7

All of them run the same captured round, ROUNDS times from the same state, with an oracle that is right with a set
chance (`speculate.py`):

- replays: the host launches the round's graph ROUNDS times, as the engine does, and reads nothing;
- unrolled: one graph with ROUNDS copies of the round, launched once;
- while: one graph with a WHILE node, whose body is the round and a kernel that counts down, launched once.

`us_per_round` is the GPU's time from the first kernel to the end, over ROUNDS; `host_us`, the host's time in launch
calls for each round. A row says whether the text is that of `replays`. The row `generate` is the engine's own loop,
which launches a round ahead and reads every round's tokens. Prints JSON lines; --out appends.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from speculate import settle, timed
from step import SHAPES, random_model
from torch import Tensor

from onegraph.engine.draft import OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.record import emit, machine
from onegraph.ops.cuda import build
from onegraph.runtime.graph import GraphPool

ROUNDS, TURNS = 32, 15  # of a launch; how often each way takes its turn
SOURCE = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);
extern "C" __global__ void arm(int* left, int rounds, unsigned long long handle) {
  *left = rounds;
  cudaGraphSetConditional(handle, 1);
}
extern "C" __global__ void count_down(int* left, int, unsigned long long handle) {
  *left -= 1;
  cudaGraphSetConditional(handle, *left > 0);
}
"""


def compiled(*names: str) -> list[Any]:
    driver, nvrtc = build.bindings()
    program = build.check(nvrtc.nvrtcCreateProgram(SOURCE, b"loop.cu", 0, [], []))
    major, minor = torch.cuda.get_device_capability()
    build.check(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    cubin = bytearray(build.check(nvrtc.nvrtcGetCUBINSize(program)))
    build.check(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = build.check(driver.cuModuleLoadData(bytes(cubin)))
    return [build.check(driver.cuModuleGetFunction(module, name.encode())) for name in names]


class Loops:
    """The round `captured` of a graph that was kept, as a loop in one graph. Everything made lives as long as this."""

    def __init__(self, captured: Any, stream: torch.cuda.Stream) -> None:
        self.driver = build.bindings()[0]
        self.round = self.driver.CUgraph(captured.raw_cuda_graph())
        self.stream = self.driver.CUstream(stream.cuda_stream)
        self.context = build.check(self.driver.cuCtxGetCurrent())
        self.left = torch.zeros(1, dtype=torch.int32, device=stream.device)
        self.kernels = compiled("arm", "count_down")
        self.held: list[Any] = []

    def _kernel(self, graph: Any, behind: list[Any], kernel: Any, handle: Any) -> Any:
        values = [
            np.array([self.left.data_ptr()], dtype=np.uint64),
            np.array([ROUNDS], dtype=np.int32),
            np.array([int(handle)], dtype=np.uint64),
        ]
        places = np.array([value.ctypes.data for value in values], dtype=np.uint64)
        self.held += [*values, places]
        node = self.driver.CUDA_KERNEL_NODE_PARAMS()
        node.func, node.ctx, node.kernelParams = kernel, self.context, places.ctypes.data
        node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1
        return build.check(self.driver.cuGraphAddKernelNode(graph, behind, len(behind), node))

    def _round(self, graph: Any, behind: list[Any]) -> Any:
        return build.check(self.driver.cuGraphAddChildGraphNode(graph, behind, len(behind), self.round))

    def _launch(self, graph: Any) -> Callable[[], None]:
        whole = build.check(self.driver.cuGraphInstantiate(graph, 0))
        build.check(self.driver.cuGraphUpload(whole, self.stream))

        def launch() -> None:
            if int(code := self.driver.cuGraphLaunch(whole, self.stream)[0]):
                raise RuntimeError(f"cuGraphLaunch: {code!r}")

        return launch

    def unrolled(self) -> Callable[[], None]:
        graph = build.check(self.driver.cuGraphCreate(0))
        behind: list[Any] = []
        for _ in range(ROUNDS):
            behind = [self._round(graph, behind)]
        return self._launch(graph)

    def loop(self) -> Callable[[], None]:
        driver = self.driver
        graph = build.check(driver.cuGraphCreate(0))
        handle = build.check(driver.cuGraphConditionalHandleCreate(graph, self.context, 0, 0))
        begin = self._kernel(graph, [], self.kernels[0], handle)
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle, node.conditional.ctx, node.conditional.size = handle, self.context, 1
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        build.check(driver.cuGraphAddNode(graph, [begin], None, 1, node))
        body = node.conditional.phGraph_out[0]
        self._kernel(body, [self._round(body, [])], self.kernels[1], handle)
        return self._launch(graph)


class State:
    """What a round reads and changes of a row, to begin again `context` tokens into its text."""

    def __init__(self, engine: Engine, inputs: dict[str, Tensor], texts: list[list[int]], context: int) -> None:
        assert engine.executor.speculation is not None
        self.inputs, self.place = inputs, engine.executor.speculation.ranks[0].state
        self.rows, self.context = len(texts), context
        self.newest = torch.tensor([text[context] for text in texts], device=self.place.device)
        self.history = self.place.history.clone()

    def restore(self) -> None:
        self.inputs["positions"][: self.rows] = self.context
        self.inputs["drawn"][: self.rows] = self.newest
        self.place.history.copy_(self.history)
        self.place.found.zero_()

    def texts(self) -> list[list[int]]:
        found: list[list[int]] = self.place.history[self.inputs["slots"][: self.rows].long()].tolist()
        return found

    def told(self) -> list[Tensor]:
        """Where rows stand, and their texts up to there."""
        positions = self.inputs["positions"][: self.rows].cpu()
        texts = torch.tensor(self.texts())
        return [positions, texts.masked_fill(torch.arange(texts.shape[1]) > positions.unsqueeze(1), 0)]


def rows(args: argparse.Namespace, model: Any, drafts: int) -> list[dict[str, Any]]:
    batch, vocabulary = args.batch, model.config.vocab_size
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocabulary, (batch, args.context), generator=g).tolist()
    most = ROUNDS * (drafts + 1) + 8
    params = [SamplingParams(max_tokens=most, seed=i) for i in range(batch)]
    sizes = {"max_batch": batch, "max_context": args.context + most + 16, "draft_tokens": drafts}
    kept: list[Any] = []

    def keep(_: GraphPool) -> Any:
        kept.append(torch.cuda.CUDAGraph(keep_graph=True))
        return kept[-1]

    with mock.patch.object(GraphPool, "graph", keep):
        engine = Engine(model, **sizes, draft=partial(OracleDrafter, [[0]] * batch, args.chance, vocabulary))
        answers, _ = settle(engine, prompts, params)
        assert engine.executor.speculation is not None
        drafter: Any = engine.executor.speculation.ranks[0].drafter
        runner = engine.executor.step("decode", drafts=drafts)
    stage = runner.stages[0]
    assert stage.pool is not None
    captured = stage._programs[batch][0][0].__self__  # the graph whose replay is this bucket's whole program
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    engine.generate(prompts, params)
    found = []
    with torch.cuda.device(stage.device), runner.running():
        loops = Loops(captured, stage.pool.stream)
        state = State(engine, stage.inputs, texts, args.context)
        state.inputs["limits"][:batch] = args.context + most

        def replays() -> None:
            for _ in range(ROUNDS):
                runner.replay(batch)

        before: list[Tensor] = []
        for _ in range(most):  # as `settle`: from here on the first round reads wrong drafts, too
            state.restore()
            replays()
            now = state.told()
            if before and all(torch.equal(a, b) for a, b in zip(before, now, strict=True)):
                break
            before = now
            drafter.know(state.texts())
        ways = {"replays": replays, "unrolled": loops.unrolled(), "while": loops.loop()}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        told: dict[str, list[Tensor]] = {}
        for _ in range(TURNS):
            for name, launch in ways.items():
                state.restore()
                torch.cuda.synchronize()
                begin.record()
                started = time.perf_counter()
                launch()
                host = time.perf_counter() - started
                end.record()
                end.synchronize()
                times[name].append((begin.elapsed_time(end) * 1e3 / ROUNDS, host * 1e6 / ROUNDS))
                told[name] = state.told()
        for name, pairs in times.items():
            us, host_us = (round(statistics.median(each), 2) for each in zip(*pairs, strict=True))
            tokens = int((told[name][0] - args.context).sum()) / ROUNDS / batch
            same = all(torch.equal(a, b) for a, b in zip(told[name], told["replays"], strict=True))
            found.append({"name": name, "us_per_round": us, "host_us": host_us, "tokens_per_round": round(tokens, 3)})
            found[-1] |= {"rounds": ROUNDS, "same_text": same}
    drafter.know(texts)
    rate, _ = timed(engine, prompts, params, 3)
    stats = engine.stats
    us = round(1e6 * stats.decode_seconds / stats.decode_steps, 2)
    tokens = round(stats.decode_tokens / stats.decode_steps / batch, 3)
    found.append({"name": "generate", "us_per_round": us, "tokens_per_round": tokens, "rounds": stats.decode_steps})
    found[-1] |= {"tokens_per_second": round(rate, 1)}
    return [{"bench": "round-loops", **row, "drafts": drafts, "chance": args.chance} for row in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--lm-head", type=int, default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--chance", type=float, default=0.8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    reach = args.context + ROUNDS * (max(args.drafts) + 1) + 24
    model = random_model(SHAPES[args.shape], args.bits, args.lm_head, reach)
    about = {"shape": args.shape, "bits": args.bits, "lm_head": args.lm_head, "batch": args.batch}
    for drafts in args.drafts:
        for row in rows(args, model, drafts):
            emit(row | about | {"context": args.context} | machine("cuda"), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
