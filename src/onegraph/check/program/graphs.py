"""`torch.cuda.CUDAGraph`, `graph` and memory pools of the simulated machine."""

import ast
import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from onegraph.check import compat, containers
from onegraph.check.program import region as regions
from onegraph.check.program.comparison import EagerComparison
from onegraph.check.program.held import Gone, let_go
from onegraph.check.program.replays import freed, replay, tell_freed
from onegraph.check.program.statements import own_nodes
from onegraph.check.program.world import Capture, ProgramWorld, share_memory
from onegraph.check.report import Severity
from onegraph.check.rules.errors import ON_DEFAULT
from onegraph.check.simulate import frames, memory
from onegraph.check.simulate.cuda import _swapped
from onegraph.check.simulate.device import plain_of
from onegraph.check.simulate.records import UNWRITTEN, Step
from onegraph.check.simulate.state import Snapshot

NO_GRAPH = "replay() of a graph that was not captured: call capture_begin() and capture_end(), or torch.cuda.graph"


class Recorder:
    """Begins and ends captures in the world, and replays them."""

    def __init__(self, world: ProgramWorld, comparison: EagerComparison) -> None:
        self.world, self.comparison = world, comparison
        self.suite: Any = None

    def begin(self, pool: Any, generators: list[Any], mode: str, frame: FrameType) -> Capture:
        """A capture starts in `frame`, on its current stream, when no other thread captures."""
        world = self.world
        world.take()
        try:
            with world.threads.lock:
                capture = self._found(pool, generators, mode, frame)
                world.captures.append(capture)
                world.asked_capturing = capture.asked_capturing
                world.begin(capture.step, capture.stream.id)
                world.running = capture
        except BaseException:
            world.leave()
            raise
        if capture.stream.id == 0:
            world.see("CG304", "a capture begins on the default stream", ON_DEFAULT, chain=capture.chain)
        return capture

    def _found(self, pool: Any, generators: list[Any], mode: str, frame: FrameType) -> Capture:
        """The capture that starts in `frame`, with the statements that it will hold."""
        world = self.world
        number = len(world.captures) + 1
        home = _user_frame(frame)
        at = frames.place(home.f_code, home.f_lasti)
        capture = Capture(number, Step(number), at, pool=pool, generators=generators, mode=mode)
        capture.chain = frames.chain_from(home, world.stop)
        capture.stream = torch.cuda.current_stream()
        capture.modes = _modes()
        found = regions.of_with(frame)
        self.suite = None if found is not None else regions.suite_of(frame)
        self.scope = regions.scope_of(frame)
        if found is not None and _backward(found):
            found, self.suite, capture.backward = None, None, True
        elif found is not None:
            regions.remember(found, self.scope)
            self.scope = {}
        capture.region = found
        return capture

    def end(self, frame: FrameType) -> None:
        """The capture ends: what it made that is still held is its output, and memory of its pool."""
        world = self.world
        capture = world.running
        if capture is None or world.phase != "step":
            raise RuntimeError("capture_end() without a capture that began in this thread")
        step = capture.step
        world.end(step)
        step.memory_end = len(step.memory)
        capture.nodes = world.first_node, compat.next_node_number()
        self._cold(capture)
        with world.threads.lock:  # until all is noted, no other thread begins
            world.running = None
            world.leave()
            self._note(capture, frame)

    def _note(self, capture: Capture, frame: FrameType) -> None:
        """What the capture made, and the statements that it was."""
        world = self.world
        made = {number for number, nbytes, _ in capture.step.memory if nbytes >= 0}
        capture.kept = made & world.storages.alive()
        world.made_by.update(dict.fromkeys(capture.kept, capture))
        world.made_inside |= made
        self._charge(capture)
        if capture.region is None and self.suite is not None:
            body = regions.between(frame, self.suite)
            capture.region = regions.region_of(frame, body) if body else None
            if capture.region is not None:
                regions.remember(capture.region, self.scope)
        self.suite, self.scope = None, {}
        if capture.region is not None:
            self.comparison.regions[capture.region.key] += 1
        for other in world.captures:
            if other is not capture and other.region is not None:
                regions.settle(other.region)
        self._look(capture, frame)

    def _cold(self, capture: Capture) -> None:
        """A region none of whose kernels ran before was captured without a warm-up."""
        ran = [op for op in capture.step.ops if op.kind == "op" and op.func._schema.name not in UNWRITTEN]
        if ran and not any(op.func in self.world.warm for op in ran):
            self.world.see(
                "CG307", "captured without a warm-up: nothing of it ran before",
                "what is made at first use (handles, workspaces, compiled kernels) is made inside of the capture",
                chain=ran[0].chain, severity=Severity.WARNING,
            )  # fmt: skip

    def _charge(self, capture: Capture) -> None:
        """Play its allocations into the pool, after what earlier graphs of it have freed since."""
        pool = self.world.pools.setdefault(capture.pool, memory.Pool())
        for other in self.world.captures:
            if other is not capture and other.pool == capture.pool and other.need is not None:
                for number, nbytes, _ in other.step.memory[other.charged :]:
                    if nbytes < 0:
                        pool.release(number)
                other.charged = len(other.step.memory)
        capture.need = memory.charge(pool, capture.step)
        capture.charged = capture.step.memory_end or 0

    def _look(self, capture: Capture, frame: FrameType) -> None:
        """What the region assigned, and names for the storages that it reads."""
        found = capture.region
        if found is None:
            return
        results = found.results(frame)
        capture.outputs = {path: plain_of(t) for path, t in containers.tensors(results).items()}
        try:
            function = found.function(found.held())
        except (Gone, SyntaxError):
            return
        capture.names = Snapshot(function, self.world.roots).storages

    def replay(self, capture: Capture, frame: FrameType) -> None:
        """Compare with the region run again, then do what the graph does. Other threads wait."""
        with self.world.threads.lock:
            self._replay(capture, frame)

    def _replay(self, capture: Capture, frame: FrameType) -> None:
        world = self.world
        self._pool_at_once(capture, frame)
        let_go()
        dead = freed(world, capture)
        if dead:
            tell_freed(world, capture, dead)
        world.clock += 1
        self.comparison.compare(capture, dead)
        replay(world, capture, dead)
        capture.replays += 1
        capture.last = world.clock

    def _pool_at_once(self, capture: Capture, frame: FrameType) -> None:
        world = self.world
        current: Any = torch.cuda.current_stream()
        stream, before = current.id, world.replayed.get(capture.pool)
        unwaited = before is not None and before[1] != stream and before[2] == world.waits
        if before is not None and unwaited and share_memory(capture, before[0]):
            chain = frames.chain_from(_user_frame(frame), world.stop)
            text = "two graphs of one pool are replayed on two streams, and nothing waits in between"
            if before[0] is capture:
                text = "a graph is replayed on a second stream before its last replay is waited for"
            world.flag(capture, "CG312", text, chain)
        world.replayed[capture.pool] = capture, stream, world.waits
        for op in capture.step.ops:
            for number in op.externals:
                over = world.overwritten(number) if number in world.made_by else None
                if over is not None and over is not capture and "CG312" not in capture.told:
                    capture.told.add("CG312")
                    where = f"{frames.os.path.basename(over.place.path)}:{over.place.line}"
                    text = f"the graph reads memory of its pool that the graph captured at {where} ran over since"
                    world.flag(capture, "CG312", text, op.chain)


def _backward(region: regions.Region) -> bool:
    """The statements of `make_graphed_callables` that capture a backward pass, which cannot be run a second time."""
    ours = region.code.co_filename == torch.cuda.graphs.__file__
    return ours and any(isinstance(n, ast.Attribute) and n.attr == "autograd" for n in own_nodes(region.body))


def _user_frame(frame: FrameType) -> FrameType:
    """The innermost frame that people see, from `frame` on outwards."""
    found: FrameType | None = frame
    while found is not None and frames._skipped(found.f_code.co_filename):
        found = found.f_back
    return found or frame


def _modes() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cuda"),
        "dtype": torch.get_autocast_dtype("cuda"),
        "cache": torch.is_autocast_cache_enabled(),
    }


def _caller() -> FrameType:
    """The frame outside of this package that called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(frames.HERE):
        frame = frame.f_back
    assert frame is not None
    return frame


_ERROR_MODES = ("global", "thread_local", "relaxed")

_FIGURES = (
    "max_memory_reserved", "max_memory_cached", "memory_cached", "host_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_accumulated_memory_stats", "reset_peak_host_memory_stats", "ipc_collect",
)  # fmt: skip
"""What a program asks of an allocator that is not there, or tells it."""

_TOLD: dict[str, Any] = {
    "memory_stats": lambda *_, **__: defaultdict(int),
    "memory_summary": lambda *_, **__: "(simulated)",
    "memory_snapshot": lambda *_, **__: [],
}


def stand_ins(recorder: Recorder) -> dict[str, Any]:
    """Stand-ins for the names of `torch.cuda` and `torch.cuda.graphs` that make graphs."""
    handles = ((0, number) for number in itertools.count(1))

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._capture: Capture | None = None
            self._pool: Any = None
            self._generators: list[Any] = []

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
            if capture_error_mode not in _ERROR_MODES:
                raise RuntimeError(f"capture_error_mode: got {capture_error_mode!r}, allowed {', '.join(_ERROR_MODES)}")
            self._pool = next(handles) if pool is None else getattr(pool, "id", pool)
            capture = recorder.begin(self._pool, self._generators, capture_error_mode, _caller())
            self.reset()
            self._capture = capture
            weakref.finalize(self, capture.release).atexit = False

        def capture_end(self) -> None:
            recorder.end(_caller())

        def replay(self) -> None:
            if self._capture is None:
                raise RuntimeError(NO_GRAPH)
            caller = _caller()
            self._capture.callable |= caller.f_code.co_filename == torch.cuda.graphs.__file__
            recorder.replay(self._capture, caller)

        def pool(self) -> Any:
            if self._pool is None:
                self._pool = next(handles)
            return self._pool

        def reset(self) -> None:
            if self._capture is not None:
                self._capture.release()
            self._capture = None

        def register_generator_state(self, generator: Any) -> None:
            self._generators.append(generator)

        def instantiate(self) -> None:
            """A graph that is simulated is ready once it is captured."""

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
            torch.cuda.synchronize()
            self.context.__enter__()
            self.cuda_graph.capture_begin(self.pool, capture_error_mode=self.mode)

        def __exit__(self, *raised: Any) -> None:
            self.cuda_graph.capture_end()
            self.context.__exit__(*raised)

    class MemPool:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.id = next(handles)

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


@contextmanager
def graphs(recorder: Recorder) -> Iterator[None]:
    """Inside of `machine`: graphs can be captured, and work outside of them goes to the default stream."""
    world = recorder.world
    default = torch.cuda.default_stream()
    world.streams.start_on(default, 64)
    with ExitStack() as stack:
        for name, value in stand_ins(recorder).items():
            for module in (torch.cuda, torch.cuda.graphs, getattr(torch.cuda, "memory", None)):
                if module is not None and hasattr(module, name):
                    stack.enter_context(_swapped(module, name, value))
        yield
