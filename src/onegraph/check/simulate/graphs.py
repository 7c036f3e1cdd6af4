"""`torch.cuda.CUDAGraph`, `graph` and memory pools of the simulated machine, which a CPU build has as dummies alone.

What a capture holds is a recorder's business: `StepRecorder` for graphs that a factory or its step captures itself,
`program.graphs.Recorder` for those of a whole program.
"""

import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol

import torch

from onegraph.check import compat
from onegraph.check.rules.errors import IN_CAPTURE, NOT_PERMITTED
from onegraph.check.simulate import frames
from onegraph.check.simulate.calling import guarded
from onegraph.check.simulate.recording import keep, put_back
from onegraph.check.simulate.records import OpRecord, Step, targets
from onegraph.check.simulate.replay import REFUSALS, again, refresh
from onegraph.check.simulate.world import World

NO_GRAPH = "replay() of a graph that was not captured: call capture_begin() and capture_end(), or torch.cuda.graph"
NESTED = f"{NOT_PERMITTED} (a capture in a capture)"


class Recorder(Protocol):
    """What becomes of captures: `begin` gives what stands for the graph."""

    world: Any

    def begin(self, pool: Any, generators: list[Any], mode: str, frame: FrameType) -> Any: ...

    def end(self, frame: FrameType) -> None: ...

    def replay(self, capture: Any, frame: FrameType) -> None: ...

    def drop(self, capture: Any) -> None:
        """The graph is reset, or nobody refers to it any more."""


@dataclass(eq=False)
class OwnGraph:
    """A graph that the checked code captures itself. `outer`: what the world was doing when the capture began."""

    step: Step
    outer: dict[str, Any]
    asked: int

    def release(self) -> None:
        self.step.ops.clear()


class StepRecorder:
    """Graphs of a factory, or of its step: hazards inside of their captures count, as does a step that could not be
    captured once more because it captures or replays one itself."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.open: list[OwnGraph] = []

    def begin(self, pool: Any, generators: list[Any], mode: str, frame: FrameType) -> OwnGraph:
        world = self.world
        if world.phase == "step":
            world.see("CG307", "the step captures a graph of its own: no capture can hold another one", NESTED)
        names = ("phase", "step", "current", "reference", "stop", "first_node", "asked_capturing")
        outer = {name: getattr(world, name) for name in names} | {"streams": dict(vars(world.streams))}
        graph = OwnGraph(Step(world.captured_step, graph=True), outer, len(world.raw_findings))
        self.open.append(graph)
        world.phase, world.step, world.reference = "step", world.captured_step, None
        world.stop, world.asked_capturing = guarded.__code__, []
        world.begin(graph.step, torch.cuda.current_stream().id)  # type: ignore[attr-defined]  # of the simulation
        world.first_node = 0
        return graph

    def end(self, frame: FrameType) -> None:
        if not self.open:
            raise RuntimeError("capture_end() without a capture that began in this thread")
        world, graph = self.world, self.open.pop()
        world.end(graph.step)
        put_back(world, graph.step)
        made = {number for number, nbytes, _ in graph.step.memory if nbytes >= 0}
        for record in list(world.storages.records.values()):
            if record.number in made:  # memory of that graph, which any step may use
                record.born, record.phase = -1, "build"
                world.storages.made[record.number] = "build", -1
        streams = graph.outer.pop("streams")
        current = world.streams.current
        vars(world.streams).update(streams)
        world.streams.current.update(current)
        for name, value in graph.outer.items():
            setattr(world, name, value)

    def replay(self, graph: OwnGraph, frame: FrameType) -> None:
        """The graph's work; in a step each op of it is one of the step's, at the line that replays."""
        world = self.world
        live = world.phase == "step" and world.current is not None
        if (graph.outer["phase"], graph.outer["step"]) != ("step", world.step):  # else the capture is told already
            world.see("CG307", "the step replays a graph of its own: check the program that does (--run)", IN_CAPTURE)
        chain = world.chain()
        with compat.no_torch_function(), world.off(), torch.inference_mode():
            for op in graph.step.ops:
                if op.kind in ("view", "launch") and op.again is None:
                    continue
                if live and world.step > world.captured_step:
                    for tensor in _targets(op):
                        keep(world, tensor)
                refresh(op)
                try:
                    _ = op.again(op, lambda _: None) if op.again is not None else again(op)
                except REFUSALS:  # values that the op was not made for: the results are what they were
                    continue
                if live and world.current is not None:
                    world.current.ops.append(replace(op, chain=chain))

    def drop(self, graph: OwnGraph) -> None:
        graph.release()


def _targets(op: OpRecord) -> Iterator[torch.Tensor]:
    """What a recorded op writes: results that it made, and arguments."""
    yield from (out for out, fresh in zip(op.outs, op.fresh, strict=False) if fresh)
    if op.again is None:
        yield from targets(op.func, op.args, op.kwargs)
    else:
        yield from op.outs


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame that people see, from `frame` on outwards."""
    found: FrameType | None = frame
    while found is not None and frames._skipped(found.f_code.co_filename):
        found = found.f_back
    return found or frame


def _caller() -> FrameType:
    """The frame outside of this package that called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(frames.HERE):
        frame = frame.f_back
    assert frame is not None
    return frame


_ERROR_MODES = ("global", "thread_local", "relaxed")

_NO_POOL = (0, 0)
"""The handle that asks for a new pool, as None does."""

_FIGURES = (
    "max_memory_reserved", "max_memory_cached", "memory_cached", "host_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_accumulated_memory_stats", "reset_peak_host_memory_stats", "ipc_collect",
)  # fmt: skip
"""What a program asks of an allocator that is not there, or tells it."""

_TOLD: dict[str, Any] = {
    "memory_stats": lambda *_, **__: defaultdict(int),
    "memory_summary": lambda *_, **__: "(simulated)",
    "memory_snapshot": lambda *_, **__: [],
    "get_allocator_backend": lambda: "native",
}


def stand_ins(recorder: Recorder) -> dict[str, Any]:
    """Stand-ins for the names of `torch.cuda` and `torch.cuda.graphs` that make graphs."""
    handles = ((0, number) for number in itertools.count(1))

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._capture: Any = None
            self._pool: Any = None
            self._generators: list[Any] = []

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
            if capture_error_mode not in _ERROR_MODES:
                raise RuntimeError(f"capture_error_mode: got {capture_error_mode!r}, allowed {', '.join(_ERROR_MODES)}")
            given = getattr(pool, "id", pool)
            self._pool = next(handles) if given in (None, _NO_POOL) else given
            capture = recorder.begin(self._pool, self._generators, capture_error_mode, _caller())
            self.reset()
            self._capture = capture
            weakref.finalize(self, recorder.drop, capture).atexit = False

        def capture_end(self) -> None:
            recorder.end(_caller())

        def replay(self) -> None:
            if self._capture is None:
                raise RuntimeError(NO_GRAPH)
            recorder.replay(self._capture, _caller())

        def pool(self) -> Any:
            if self._pool is None:
                self._pool = next(handles)
            return self._pool

        def reset(self) -> None:
            if self._capture is not None:
                recorder.drop(self._capture)
            self._capture = None

        def register_generator_state(self, generator: Any) -> None:
            self._generators.append(generator)

        def instantiate(self) -> None:
            """A graph that is simulated is ready once it is captured."""

        def raw_cuda_graph(self) -> int:
            """A handle of the driver: 0, which is none."""
            return 0

        raw_cuda_graph_exec = raw_cuda_graph

        def enable_debug_mode(self) -> None:
            """Nothing of the driver's is there to be written out."""

        def debug_dump(self, debug_path: str) -> None:
            """Likewise."""

    class graph:
        default_capture_stream: Any = None

        def __init__(
            self, cuda_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any
        ) -> None:
            if stream is None:
                if graph.default_capture_stream is None:
                    graph.default_capture_stream = torch.cuda.Stream()
                stream = graph.default_capture_stream
            self.cuda_graph, self.pool, self.capture_stream = cuda_graph, pool, stream
            self.context, self.mode = torch.cuda.stream(stream), capture_error_mode

        def __enter__(self) -> None:
            if recorder.world.phase != "step":  # inside of a capture the capture itself is what cannot be
                torch.cuda.synchronize()
            self.context.__enter__()
            self.cuda_graph.capture_begin(self.pool, capture_error_mode=self.mode)

        def __exit__(self, *raised: Any) -> None:
            self.cuda_graph.capture_end()
            self.context.__exit__(*raised)

    class MemPool:
        def __init__(self, allocator: Any = None, *_: Any, **__: Any) -> None:
            self.id, self.allocator = next(handles), allocator

        def use_count(self) -> int:
            return 1

        def snapshot(self, include_traces: bool = True) -> list[Any]:
            return []

    @contextmanager
    def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
        yield

    return (
        {
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "graph_pool_handle": lambda: next(handles),
            "MemPool": MemPool,
            "use_mem_pool": use_mem_pool,
        }
        | dict.fromkeys(_FIGURES, lambda *_, **__: 0)
        | _TOLD
    )
