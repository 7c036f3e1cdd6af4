"""The protocol on a GPU: eager with every sync named, then capture, then replay with poisoned outputs against eager."""

import gc
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat, containers
from onegraph.check.live.buffers import junk, poison, refill
from onegraph.check.live.buffers import static as static_of
from onegraph.check.live.failure import blame, first_error, forget, recover, uncollected
from onegraph.check.live.recorder import Numbers, Recorder, stored
from onegraph.check.live.watch import calls_noted, recorded
from onegraph.check.protocol import GivenTensor, StepCheck, checked_count
from onegraph.check.report import SILENT, CheckError, Origin, Report, Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.calling import NOTHING, build, call_step, given_by, guarded, line
from onegraph.check.simulate.compare import StorageTable, differences, keys
from onegraph.check.simulate.findings import Findings, home_of
from onegraph.check.simulate.records import RawFinding, Step, close
from onegraph.check.simulate.replay import Verdict
from onegraph.check.simulate.state import Snapshot

_REPLAYS = 200
_SEED = 0


def live_step(factory: Callable[[], Any], *, steps: int = 4, target: str = "") -> Report:
    """Run, capture and replay `factory`'s step on the GPU of this machine.

    Two worlds are built with the same seed: one runs every step eagerly and gives the truth, the other warms up, is
    captured at step 1 and replays the later ones. Raises CheckError without a GPU, or where the step does not run.
    """
    if not torch.cuda.is_available():
        raise CheckError("live: no CUDA GPU is visible; without --live, --all or live=True the step is simulated")
    return _Live(factory, checked_count(steps), target).run()


class _Live(StepCheck):
    def __init__(self, factory: Callable[[], Any], steps: int, target: str) -> None:
        roots, self.storages = frames.Roots(), Numbers()
        self.recorder = Recorder(call_step.__code__, roots, self.storages)
        super().__init__(roots, self.recorder)
        self.factory, self.count, self.target = factory, steps, target
        self.truth: dict[int, dict[str, Tensor]] = {}
        self.state: dict[int, dict[str, Tensor]] = {}
        self.left: dict[int, dict[str, Tensor]] = {}  # what the steps leave in the buffers that they are given
        self.captured: Step | None = None
        self.facts: dict[str, Any] = {}
        self.before: Snapshot | None = None  # of the running step: holds what it replaces
        self.versions: dict[str, tuple[int, float]] = {}  # of state and inputs, before the running step
        self.compiled = False  # whether the step calls functions that torch compiles

    def run(self) -> Report:
        begin = time.perf_counter()
        gc.freeze()  # what exists already is no part of the step: the many collections need not walk it
        try:
            with calls_noted(self.recorder):
                self._eager()
                if self.compiled:
                    self._compiled_truth()
                devices = sorted(self.recorder.devices)
                home = torch.cuda.current_device()
                self._capture(devices[-1] if devices and home not in devices else home)
                if devices and devices != [home]:
                    self._without_stream(home)
        finally:
            gc.unfreeze()
        self.facts["live seconds"] = round(time.perf_counter() - begin, 3)
        return self._report()

    # the eager world

    def _build(self) -> tuple[Callable[..., Any], Callable[[int], Any]]:
        torch.manual_seed(_SEED)
        return build(self.factory)

    def _eager(self) -> None:
        step, inputs = self._build()
        for index in range(self.count):
            seen = self.observe(step, inputs, index)
            after = seen.after  # holds what the next step replaces, so that its memory is not taken for another's
            self.truth[index] = {path: o.detach().clone() for path, o in seen.outputs.items()}
            self.state[index] = {
                name: t.detach().clone()
                for name, t in after.tensors.items()
                if t.is_cuda and self.versions.get(name) != _version(t)
            }
            written = {p: t for p, t in seen.inputs.items() if self.versions[f"input {p}"] != _version(t) and stored(t)}
            self.left[index] = {path: t.detach().clone() for path, t in written.items()}
            del seen, written
        if not (self.returned or any(s.ops for s in self.steps.values())):
            raise CheckError(NOTHING)
        self.names = {self.storages.of(t, "outside", -1): name for name, t in _tensors(step, self.roots).items()}
        self.alive = self.storages.alive()
        self.before = None
        self.home = home_of(step, self.factory)

    # the GPU as a backend

    def storage(self, tensor: Tensor, phase: str, index: int) -> int | None:
        return self.storages.of(tensor, phase, index) if tensor.is_cuda else None

    def begin(
        self, record: Step, given: GivenTensor, leaves: dict[str, Tensor], before: Snapshot, *, lean: bool
    ) -> None:
        self.before = before
        self.versions = {f"input {path}": _version(t) for path, t in leaves.items()}
        self.versions |= {name: _version(t) for name, t in before.tensors.items()}
        torch.cuda.synchronize()
        self.recorder.step = record

    def call(self, step: Callable[..., Any], given: GivenTensor, record: Step) -> Any:
        index = record.index
        with self.recorder.watching() if index else ExitStack(), recorded(self.recorder) as compiled:
            result = guarded(f"step {index}", call_step, step, *given)
        self.compiled |= bool(compiled)
        return result

    def end(self, record: Step) -> None:
        self.recorder.step = None
        torch.cuda.synchronize()

    def outputs_of(self, result: Any, index: int) -> dict[str, Tensor]:
        outputs = containers.tensors(result)
        if not all(stored(o) for o in outputs.values()):
            raise CheckError(f"step {index}: returned a sparse or nested tensor, allowed dense ones: return .values()")
        return outputs

    def _compiled_truth(self) -> None:
        """What the steps give in their compiled form, whose roundings are not those of eager's ops."""
        step, inputs = self._build()
        for index in range(self.count):
            result = guarded(f"step {index}", call_step, step, *given_by(inputs, index))
            torch.cuda.synchronize()
            self.truth[index] = {path: o.detach().clone() for path, o in containers.tensors(result).items()}
            now = _tensors(step, self.roots)
            self.state[index] = {name: now[name].detach().clone() for name in self.state[index] if name in now}
            del result

    # the captured world

    def _capture(self, device: int) -> None:
        step, inputs = self._build()
        recorder = self.recorder
        with torch.cuda.device(device):
            stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
            arguments, handed = given_by(inputs, 0), containers.Handed()
            handed.note(arguments)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                guarded("step 0", call_step, step, *arguments)
            torch.cuda.synchronize()
            given = given_by(inputs, 1)
            static = containers.mapped(given, static_of, handed)
            buffers = containers.tensors(static, handed)
            handed.note(given)
            # What the step can reach before it is captured is state, whoever returns it: never to be poisoned.
            reached = [*_tensors(step, self.roots).values(), *containers.tensors(static).values()]
            lasting = {_memory(tensor) for tensor in reached}
            del arguments, given
            torch.cuda.synchronize()
            recorder.first_node = compat.next_node_number()
            recorder.step = record = Step(1)
            recorder.last, recorder.streams, recorder.written, recorder.capturing = None, {}, [], True
            recorder.broken = None
            graph = torch.cuda.CUDAGraph()
            empty, outer = False, sys.exc_info()[1]
            try:
                with warnings.catch_warnings(record=True, action="always") as said:
                    options: dict[str, Any] = {}
                    if "check_input_liveness" in inspect.signature(torch.cuda.graph.__init__).parameters:
                        options["check_input_liveness"] = True
                    # What is compiled is captured in its compiled form, which runs where no recorder listens.
                    listening = ExitStack() if self.compiled else recorded(recorder)
                    with uncollected(), torch.cuda.graph(graph, stream=stream, **options), listening:
                        result = call_step(step, *static)
                empty = any("is empty" in str(w.message) for w in said)
            except Exception as error:
                recorder.capturing = False
                first = first_error(error, outer)
                blame(recorder, self.roots, error, first, stream.cuda_stream)
                recorder.step = None
                self.facts["capture error"] = line(first)
                torch.cuda.set_stream(before)  # torch leaves the other one current where the end of a capture raises
                forget(error, outer)
                recover(stream)
                return
            recorder.capturing = False
            for number, chain in recorder.outside.items():
                code, which = ("CG303", "a stream that did not wait for the capturing one")
                if number == 0:
                    code, which = ("CG304", "the default stream inside the step")
                recorder.note(code, f"work is launched on {which}: it is not in the graph", SILENT, chain)
            recorder.step = None
            self.captured = self.steps[1] if self.compiled else record
            if empty and self.steps[1].ops:
                chain = self.steps[1].ops[0].chain
                self._add("CG303", "the captured graph is empty: the work went to another stream or device", chain)
                return
            outputs = containers.tensors(result)
            self._replays(step, inputs, buffers, handed, graph, outputs, lasting, stream)

    def _replays(
        self, step: Any, inputs: Any, buffers: dict[str, Tensor], handed: containers.Handed, graph: Any,
        outputs: dict[str, Tensor], lasting: set[int | None], stream: Any,
    ) -> None:  # fmt: skip
        for index in range(1, self.count):
            if index > 1:
                fresh = given_by(inputs, index)
                try:
                    refill(buffers, containers.tensors(fresh, handed))
                except (ValueError, RuntimeError) as error:
                    self.verdicts[index] = Verdict(step=index, failed=line(error))
                    continue
                del fresh
            gc.collect()
            torch.cuda.synchronize()
            for output in outputs.values():
                if _memory(output) not in lasting:
                    poison(output)
            held = self._held(step, buffers) if index == self.count - 1 else None
            garbage = junk()
            with torch.cuda.stream(stream):  # memory goes back to the stream that it was made on
                garbage += junk()
            torch.cuda.synchronize()
            verdict = Verdict(step=index)
            try:
                graph.replay()
                torch.cuda.synchronize()
            except RuntimeError as error:
                verdict.failed = line(error)
                self.verdicts[index] = verdict
                if "liveness" in str(error) or "deallocated" in str(error) or "freed" in str(error):
                    chain = self.steps[1].ops[0].chain if self.steps[1].ops else ()
                    self._add("CG206", f"an input of the graph is freed before the replay: {line(error)}", chain)
                return
            del garbage
            verdict.compare(outputs, self.truth[index])
            now = _tensors(step, self.roots)
            known = self.state[index]
            verdict.state = tuple(
                i for i, (name, t) in enumerate(known.items()) if name in now and not close(now[name].detach(), t)[0]
            )
            left = self.left[index]
            verdict.state += tuple(
                i for i, (path, t) in enumerate(left.items()) if path in buffers and not close(buffers[path], t)[0]
            )
            self.verdicts[index] = verdict
            if held is not None:
                self._memory(graph, held)

    def _held(self, step: Any, buffers: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]] | None:
        """What the captured step writes, with copies of now; None where memory is too short for them."""
        changed = {name for state in self.state.values() for name in state}
        found = [t for name, t in _tensors(step, self.roots).items() if name in changed]
        found += [t for reference in self.recorder.written if (t := reference()) is not None]
        found += [t for t in buffers.values() if t.is_cuda]
        found = [t for t in {id(t): t for t in found}.values() if stored(t)]
        tensors = [t for t in found if compat.overlaps(t) != 1]
        if 2 * sum(t.nbytes for t in tensors) > torch.cuda.mem_get_info()[0]:
            return None
        with torch.inference_mode(False):
            return [(t, t.detach().clone()) for t in tensors]

    def _memory(self, graph: Any, held: list[tuple[Tensor, Tensor]]) -> None:
        """Memory that hundreds of replays leave behind, each from the same state: a position that a step counts up
        would run past the end of its cache."""
        torch.cuda.synchronize()
        free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        try:
            for _ in range(_REPLAYS):
                with torch.inference_mode():  # which may write tensors made in that mode, and all others
                    for tensor, before in held:
                        tensor.copy_(before)
                graph.replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise CheckError(f"live: the last of the replays, repeated {_REPLAYS} times: {line(error)}") from error
        self.facts["replays for memory"] = _REPLAYS
        self.facts["bytes left by them"] = max(free - torch.cuda.mem_get_info()[0], 0)
        self.facts["tensor bytes left by them"] = torch.cuda.memory_allocated() - allocated

    def _without_stream(self, home: int) -> None:
        """What most people write, `torch.cuda.graph(g)`: its stream belongs to the device that was current first."""
        step, inputs = self._build()
        arguments = given_by(inputs, 0)
        call_step(step, *arguments)
        torch.cuda.synchronize()
        chain = next((c for d, c in self.recorder.devices.items() if d != home), ())
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with uncollected(), torch.cuda.graph(torch.cuda.CUDAGraph()):
                    call_step(step, *arguments)
            if any("is empty" in str(w.message) for w in said):
                self._add("CG303", "captured without stream= the graph is empty: it works on another GPU", chain)
        except RuntimeError as error:
            self._add("CG303", f"captured without stream= it fails: {line(error)}", chain)

    def _add(self, code: str, message: str, chain: frames.Chain) -> None:
        self.recorder.raw_findings.append(RawFinding(1, code, Severity.ERROR, chain, message, SILENT))

    # the report

    def _report(self) -> Report:
        first = self.steps[1]
        later = [self.steps[i] for i in range(2, self.count)]
        for step in later:
            step.parted = keys(step) != keys(first)
        table = StorageTable(self.names, self.alive, self.storages.made, self.returned)
        besides = []
        if self.captured is not None and self.recorder.asked_capturing:
            self.captured.parted = keys(self.captured) != keys(first)
            besides = differences(first, [self.captured], self.verdicts, table, {})[1]
        findings = Findings(self.recorder, self.roots, self.steps, self.names, self.home, origin=Origin.LIVE)
        # A freed tensor is told where a replay over junk differs; torch makes some where no recorder sees it.
        self.conclude(findings, self._relevant(), first, later, table, {}, freed_anyway=False, besides=besides)
        if self.captured is None:
            findings.of_failure(self.facts.get("capture error", "the graph is empty"))
        report = findings.report(self.target, self.count)
        self.facts |= self.facts_of_replays() | {
            "gpu": torch.cuda.get_device_name(),
            "captured": self.captured is not None,
        }
        report.facts.update(self.facts)
        return report

    def _relevant(self) -> Iterator[RawFinding]:
        """Syncs of eager steps count where the capture failed; a capture that worked has proven them harmless."""
        for raw in self.recorder.raw_findings:
            always = raw.code.startswith(("CG2", "CG303", "CG304", "CG306"))
            seed = raw.code == "CG302" and any(v.stale for v in self.verdicts.values())
            if self.captured is None or always or seed:
                yield raw


def _tensors(step: Any, roots: frames.Roots) -> dict[str, Tensor]:
    """Device tensors that the step can reach, by name."""
    return {name: t for name, t in Snapshot(step, roots).tensors.items() if t.is_cuda}


def _memory(tensor: Tensor) -> int | None:
    """Address of a tensor's storage; None for a subclass that wraps others and has no memory of its own."""
    try:
        address: int = tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None
    return address


def _version(tensor: Tensor) -> tuple[int, float]:
    """Address and number of writes; tensors of inference mode do not count theirs and equal nothing."""
    return tensor.data_ptr(), float("nan") if tensor.is_inference() else tensor._version
