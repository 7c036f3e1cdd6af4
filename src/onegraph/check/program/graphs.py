"""`torch.cuda.CUDAGraph`, `graph` and memory pools of the simulated machine."""

import ast
from types import FrameType
from typing import Any

import torch

from onegraph.check import compat, containers
from onegraph.check.constructs import own_nodes
from onegraph.check.program import region as regions
from onegraph.check.program.comparison import EagerComparison
from onegraph.check.program.held import Gone, let_go
from onegraph.check.program.ordering import Ordering
from onegraph.check.program.replays import freed, replay, tell_freed
from onegraph.check.program.world import Capture, ProgramWorld, share_memory
from onegraph.check.report import Severity
from onegraph.check.rules.errors import NOT_PERMITTED, ON_DEFAULT
from onegraph.check.simulate import frames, memory
from onegraph.check.simulate.device import plain_of
from onegraph.check.simulate.graphs import user_frame
from onegraph.check.simulate.recording import put_back
from onegraph.check.simulate.records import UNWRITTEN, Step
from onegraph.check.simulate.state import Snapshot


class Recorder:
    """Begins and ends captures in the world, and replays them."""

    def __init__(self, world: ProgramWorld, comparison: EagerComparison) -> None:
        self.world, self.comparison = world, comparison
        self.clock = 0  # replays of all graphs
        self.replayed: dict[Any, tuple[Capture, int, int]] = {}  # by pool: the last one, its stream, waits until then
        self.suite: Any = None
        self.ordering = world.ordering = Ordering(world)
        world.streams.order = self.ordering.order

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
        home = user_frame(frame)
        at = frames.place(home.f_code, home.f_lasti)
        capture = Capture(number, Step(number, graph=True), at, pool=pool, generators=generators, mode=mode)
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
        put_back(world, step)
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
        capture.kept = made & (world.storages.alive() | {record.number for record in world.storages.weak.values()})
        self.ordering.captured(capture)
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

    def drop(self, capture: Capture) -> None:
        """The graph is reset or gone: during a capture of this thread the driver refuses to destroy it."""
        world = self.world
        running = world.running
        if running is not None and running is not capture and world.phase == "step":
            text = "a graph is reset, or dies, while another one is captured"
            chain = frames.chain(world.stop, 2)
            world.flag(running, "CG313", text, chain, happens=NOT_PERMITTED)
        capture.release()

    def replay(self, capture: Capture, frame: FrameType) -> None:
        """Compare with the region run again, then do what the graph does. Other threads wait."""
        capture.callable |= frame.f_code.co_filename == torch.cuda.graphs.__file__
        with self.world.threads.lock:
            self._replay(capture, frame)

    def _replay(self, capture: Capture, frame: FrameType) -> None:
        world = self.world
        self._pool_at_once(capture, frame)
        self.ordering.replayed(capture, frames.chain_from(user_frame(frame), world.stop))
        let_go()
        dead = freed(world, capture)
        if dead:
            tell_freed(world, capture, dead)
        self.clock += 1
        self.comparison.compare(capture, dead)
        replay(world, capture, dead)
        capture.replays += 1
        capture.last = self.clock

    def _pool_at_once(self, capture: Capture, frame: FrameType) -> None:
        world = self.world
        current: Any = torch.cuda.current_stream()
        stream, before = current.id, self.replayed.get(capture.pool)
        unwaited = before is not None and before[1] != stream and before[2] == world.waits
        if before is not None and unwaited and share_memory(capture, before[0]):
            chain = frames.chain_from(user_frame(frame), world.stop)
            text = "two graphs of one pool are replayed on two streams, and nothing waits in between"
            if before[0] is capture:
                text = "a graph is replayed on a second stream before its last replay is waited for"
            world.flag(capture, "CG312", text, chain)
        self.replayed[capture.pool] = capture, stream, world.waits
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


def _modes() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cuda"),
        "dtype": torch.get_autocast_dtype("cuda"),
        "cache": torch.is_autocast_cache_enabled(),
    }
