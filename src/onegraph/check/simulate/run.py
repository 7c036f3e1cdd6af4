"""The protocol on a simulated GPU: the second step is captured, the later ones run eagerly and are replayed beside."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat, containers
from onegraph.check.declared import nameless
from onegraph.check.protocol import GivenTensor, StepCheck, checked_count, checked_gpus
from onegraph.check.report import SILENT, CheckError, Report, Severity
from onegraph.check.simulate import compiled, frames, memory
from onegraph.check.simulate.calling import NO_GPU_YET, NOTHING, build, call_step, given_by, guarded
from onegraph.check.simulate.compare import StorageTable, differences
from onegraph.check.simulate.cuda import machine
from onegraph.check.simulate.device import DeviceTensor, plain_of, storage_of
from onegraph.check.simulate.findings import Findings, home_of
from onegraph.check.simulate.follow import BAKED
from onegraph.check.simulate.kernels import Code
from onegraph.check.simulate.records import OpRecord, RawFinding, Step, same
from onegraph.check.simulate.replay import replay as run_again
from onegraph.check.simulate.replay import source_of
from onegraph.check.simulate.state import Snapshot, random_state
from onegraph.check.simulate.sweep import Variation, variations
from onegraph.check.simulate.unknown import told
from onegraph.check.simulate.world import World

DEFAULT_STEPS = 4
"""One warm-up, one captured, two replayed: the fewest that show a number changing more than once."""

MOST_STEPS = 256
"""Steps run where nobody says how many: a page index is `position // 16`, a queue empties at the ninth step."""

FEWEST_STEPS = 18
"""The same where Python values differ from step to step, whatever it takes, up to LONGEST_SCAN: past 16."""

SCAN = 0.6
"""Seconds of this thread for all further steps."""

WAITED = 5.0
"""The same by the clock: a step may wait for something."""

SWEEP = 0.4
"""Seconds of this thread for variations of the inputs."""

LONGEST_SCAN = 4.0
"""Seconds of this thread for FEWEST_STEPS: a guard, seldom met, for tensors of a gigabyte."""

STALE_STEPS = 3
"""Steps with another result than a replay after which the further ones show nothing new."""

TRIES = 3
"""How often a simulation may begin again without the kernels that it had to give up too late."""


def simulate_step(
    factory: Callable[[], Any],
    *,
    steps: int = DEFAULT_STEPS,
    target: str = "",
    gpus: int = 1,
    probe: bool | None = None,
) -> Report:
    """Run `factory`'s step `steps` times on a simulated GPU, replay the second one against the later ones.

    `gpus` is what `torch.cuda.device_count()` gives. With `probe` the step is run FEWEST_STEPS times at least; None:
    where it finds other Python values each time; False: `steps` times alone.

    Raises CheckError where the factory, the inputs or the step raise, or return something else than the interface says.
    """
    checked_count(steps)
    checked_gpus(gpus)
    barred: dict[Code, str] = {}
    for tries in range(TRIES, 0, -1):
        simulation = _Simulation(factory, steps, target, gpus, probe)
        simulation.world.kernels.barred |= barred
        report = simulation.run(last=tries == 1)
        if report is not None:
            return report
        barred |= simulation.world.kernels.late
    raise AssertionError("the last try ends with a report")


class _Simulation(StepCheck):
    def __init__(self, factory: Callable[[], Any], steps: int, target: str, gpus: int, probe: bool | None) -> None:
        roots = frames.Roots()
        self.world = World(call_step.__code__, roots, gpus)
        super().__init__(roots, self.world)
        self.factory, self.count, self.target, self.probing = factory, steps, target, probe
        self.names: dict[int, str] = {}
        self.refreshed: dict[int, set[int]] = {}
        self.told: dict[int, str] = {}  # what Python values a step finds when it begins
        self.drew: dict[int, bool] = {}  # whether a step itself took random numbers of the host's
        self.probe_ended = ""  # what a step raised that the factory was not made for
        self.pinned: dict[int, Tensor] = {}  # what captured copies read from pinned memory, before the inputs came
        self.rng = torch.get_rng_state()  # of the host, as the running step found it
        self.varied: dict[int, Variation] = {}  # steps on inputs that `inputs` never gave
        self.lean = False  # whether the running step is one of the further ones

    def run(self, *, last: bool) -> Report | None:
        """The report; None where a kernel of the captured step could not be run again, unless this try is the last."""
        begin = time.perf_counter()
        rng = torch.get_rng_state()
        gc.freeze()  # what exists already is no part of the step: collections, the report's too, need not walk it
        try:
            torch.default_generator.manual_seed(0)
            with machine(self.world):
                step, inputs = self._build()
                for index in range(self.count):
                    self._one(step, inputs, index)
                    if self.world.kernels.late and not last:
                        return None
                self.world.phase = "idle"
                if self.count == DEFAULT_STEPS and self.probing is not False and self._is_clean(step):
                    self._scan(step, inputs)
                    self.world.phase = "idle"  # a step that raised has left it where it was
                    if self._is_clean(step):
                        self._sweep(step, inputs)
                    self.world.phase = "idle"
            return self._report(step, time.perf_counter() - begin)
        finally:
            torch.set_rng_state(rng)
            gc.unfreeze()

    def _scan(self, step: Callable[..., Any], inputs: Callable[[int], Any]) -> None:
        """More steps, past boundaries that so few do not reach: what they do is compared with the captured step, and
        judged where it differs."""
        started, clock = time.thread_time(), time.perf_counter()  # other work of the machine should decide little
        first, changes = self.count, self._host_changes() if self.probing is None else self.probing
        known = {(raw.code, raw.chain) for raw in self.world.raw_findings}
        for index in range(first, MOST_STEPS):
            spent = time.thread_time() - started
            late = spent > SCAN or time.perf_counter() - clock > WAITED
            if spent > LONGEST_SCAN or (late and not (changes and index < FEWEST_STEPS)):
                break
            seen = len(self.world.raw_findings)
            try:
                self._one(step, inputs, index, lean=True)
                ended = "; ".join(self.world.kernels.late.values())
            except CheckError as error:  # a cache is full, a queue is empty: the step was not made for so many
                ended = str(error)
            if ended:
                if changes:
                    self.probe_ended = f"{ended}; judged on the first {index} steps"
                del self.world.raw_findings[seen:]
                self._forget(index)
                break
            new = [raw for raw in self.world.raw_findings[seen:] if (raw.code, raw.chain) not in known]
            for raw in new:  # it may never be captured there: whoever captures chooses
                raw.severity = min(raw.severity, Severity.WARNING, key=lambda s: s.rank)
                raw.message += f" (in step {index}, in none of the first {first})"
            self.world.raw_findings[seen:] = new
            self.count = index + 1
            if sum(v.stale for v in self.verdicts.values()) >= STALE_STEPS:
                break

    def _sweep(self, step: Callable[..., Any], inputs: Callable[[int], Any]) -> None:
        """Steps on variations of the last inputs; what a replay gives for each is compared with eager."""
        started = time.thread_time()
        try:
            given = given_by(inputs, self.world.captured_step)
        except CheckError:  # each of its inputs can be had once
            return
        for leaf in variations(step, inputs, given):
            for varied in leaf:
                if time.thread_time() - started > SWEEP:
                    return
                index, seen = max(self.steps) + 1, len(self.world.raw_findings)
                anew = containers.replaced(given, varied.path, varied.value)
                try:
                    self._one(step, lambda i, anew=anew: anew[1] or anew[0], index, lean=True)  # type: ignore[misc]
                except CheckError:  # no value that the step can be given
                    self._forget(index)
                    continue
                finally:
                    self.world.phase = "idle"
                    del self.world.raw_findings[seen:]
                self.numbers.pop(index, None)
                if index in self.steps and self.verdicts[index].stale and self._tells(varied, index):
                    self.varied[index] = varied
                    if not varied.said:
                        del self.verdicts[index]
                    break  # the smallest that differs
                self._forget(index)

    def _tells(self, varied: Variation, index: int) -> bool:
        """Whether a step on a variation differs by more than the number that was put in."""
        if not varied.trivial:
            return True
        captured = self.steps[self.world.captured_step]
        found, branches = differences(captured, [self.steps[index]], self.verdicts, self._table(captured), {})
        return any(raw.code not in BAKED for raw in (*found, *(raw for _, raw in branches)))

    def qualified(self, raw: RawFinding) -> RawFinding | None:
        varied = self.varied.get(raw.step)
        if varied is None:
            return raw
        if varied.trivial and raw.code in BAKED:
            return None
        where = f"{varied.name} {varied.text}"
        severity = raw.severity if varied.said else min(raw.severity, Severity.WARNING, key=lambda s: s.rank)
        values = tuple(value.replace(f"step {raw.step}", where) for value in raw.values)
        return replace(raw, message=f"{raw.message}, where {where}", severity=severity, values=values)

    def _forget(self, index: int) -> None:
        """A step that is not looked at any further."""
        for known in (self.steps, self.verdicts, self.numbers, self.changed, self.refreshed):
            known.pop(index, None)

    def _differs(self, record: Step) -> bool:
        """Whether a step did, read or returned anything else than the captured one: else a replay does the same."""
        captured = self.steps[self.world.captured_step]
        mine, other = (self.numbers.get(i, {}) for i in (captured.index, record.index))
        return (
            record.parted
            or len(record.ops) != len(captured.ops)
            or any(op.evidence is not None for op in record.ops)
            or [(chain, repr(value)) for chain, value, _ in record.reads]
            != [(chain, repr(value)) for chain, value, _ in captured.reads]
            or repr(mine) != repr(other)
        )

    def _is_clean(self, step: Callable[..., Any]) -> bool:
        """Whether the steps so far show no error."""
        with compat.no_torch_function(), self.world.off():
            try:
                return not self._report(step, 0.0).errors
            except CheckError:  # nothing ran on the device: more steps would not, either
                return False

    def _host_changes(self) -> bool:
        """Whether Python values that the step can reach, is given or draws are others from step to step."""
        captured = self.world.captured_step
        later = range(captured + 1, self.count)
        return any(self.changed[i] or self.drew[i] or self.told[i] != self.told[captured] for i in later)

    def _build(self) -> tuple[Callable[..., Any], Callable[[int], Any]]:
        self.world.phase, self.world.step = "build", -1
        built = build(self.factory)
        self.world.threads.raise_refused()
        return built

    def _one(self, step: Callable[..., Any], inputs: Callable[[int], Any], index: int, *, lean: bool = False) -> None:
        world = self.world
        world.step, world.phase, world.current = index, "inputs", None
        self.pinned = self._pinned_contents()
        seen = self.observe(step, inputs, index, lean=lean)
        record, leaves, outputs = seen.record, seen.inputs, seen.outputs
        if lean and not self._differs(record):
            self._forget(index)
            return
        named = {**seen.before.storages, **seen.after.storages}
        self.names.update({n: name for n, name in named.items() if n not in self.names})
        plain = {path: plain_of(out) for path, out in outputs.items()}
        inner_leaves = {path: plain_of(leaf) for path, leaf in leaves.items()}
        if index == world.captured_step:
            world.reference = record
            self.captured_outputs, self.static_inputs = plain, inner_leaves
            self.static_wrappers = (leaves, outputs)
            self._end_of_capture(record)
        elif index > world.captured_step:
            del seen, outputs
            captured = self.steps[world.captured_step]
            # Inference mode may write every tensor; outside of it, those that were made in it cannot be written.
            with compat.no_torch_function(), world.off(), torch.inference_mode():
                self.verdicts[index] = run_again(
                    world, captured, record, self.captured_outputs, self.static_inputs, inner_leaves, plain,
                    self._dead(captured), self.rng,
                )  # fmt: skip
            record.before.clear()
            for op in record.ops:
                op.given = ()  # copies of what it was given

    # the simulated GPU as a backend

    def storage(self, tensor: Tensor, phase: str, index: int) -> int | None:
        return tensor.record.number if isinstance(tensor, DeviceTensor) else None

    def begin(
        self, record: Step, given: GivenTensor, leaves: dict[str, Tensor], before: Snapshot, *, lean: bool
    ) -> None:
        world = self.world
        for path, tensor in containers.tensors(given).items():
            if path not in leaves and isinstance(tensor, DeviceTensor) and tensor.record.phase == "inputs":
                name = f"inputs(i){path[3:]}, in an object that nobody copies tensors from,"
                self.names.setdefault(tensor.record.number, name)
        if not lean:
            self.told[record.index] = repr((before.values, containers.numbers(given)))
        if record.index > world.captured_step:
            self._refresh(leaves, self.pinned, record.index)
        self.lean = lean
        with compat.no_torch_function(), compat.no_modes():
            self.rng = torch.default_generator.get_state()
        world.begin(record, world.streams_main.id)

    def call(self, step: Callable[..., Any], given: GivenTensor, record: Step) -> Any:
        world = self.world
        drawn = None if self.lean else (random_state(), world.randomness.asked)
        world.phase = "step"
        result = guarded(f"step {record.index}", call_step, step, *given)
        world.threads.raise_refused()
        if drawn is not None:
            self.drew[record.index] = drawn != (random_state(), world.randomness.asked)
        world.end(record)
        return result

    def end(self, record: Step) -> None:
        self.world.phase = "idle"

    # pinned memory: a captured copy reads it again at every replay

    def _pinned_contents(self) -> dict[int, Tensor]:
        captured = self.steps.get(self.world.captured_step)
        found = {}
        for position, op in enumerate(captured.ops if captured else ()):
            if op.kind == "h2d" and op.source is not None and (storage := _storage(op)) is not None:
                found[position] = source_of(storage, op)
        return {position: tensor.clone() for position, tensor in found.items()}

    def _refresh(self, leaves: dict[str, Tensor], before: dict[int, Tensor], index: int) -> None:
        """What the caller wrote into pinned memory since, and the host inputs that it copied, reach the next replay."""
        captured = self.steps[self.world.captured_step]
        now = self._pinned_contents()
        statics = {storage_of(t): path for path, t in self.static_inputs.items()}
        for position, op in enumerate(captured.ops):
            if op.kind != "h2d" or op.source is None:
                continue
            path = statics.get(op.source.cdata)
            fresh = leaves.get(path) if path is not None else None
            if fresh is not None and op.contents is not None and fresh.numel() == op.contents.numel():
                op.frozen = fresh.detach().clone().view(op.contents.shape)
                self.refreshed.setdefault(index, set()).add(position)
            elif position in now and position in before and not same(now[position], before[position]):
                op.frozen = now[position]
                self.refreshed.setdefault(index, set()).add(position)

    def _end_of_capture(self, record: Step) -> None:
        world = self.world
        record.memory_end = len(record.memory)
        for op in record.ops:
            if op.kind != "h2d" or op.source is None or op.codes or op.contents is None or op.fed:
                continue
            storage = _storage(op)
            message, severity = "", Severity.WARNING
            if storage is None:  # torch 2.11 keeps it for the graph; other allocators and older versions do not
                message = "the pinned source of a captured copy is freed when the step ends"
            elif not same(source_of(storage, op), op.contents):
                message = "the pinned source of a captured copy is written again in the same step"
                op.frozen, severity = source_of(storage, op).clone(), Severity.ERROR
            if message:
                world.phase = "step"
                world.see("CG207", message, SILENT, chain=op.chain, severity=severity)
                world.phase = "idle"

    # storages

    def _dead(self, captured: Step) -> set[int]:
        """Storages that the captured step read and that no tensor of the user refers to any more."""
        outside = {n for op in captured.ops for n in op.externals if n != -1}
        dead = outside - self.world.storages.alive()
        # Only what was made since the build can be in a cycle that nobody refers to, and inputs are held here anyway:
        # to collect takes longer than a small step.
        made = self.world.storages.made
        if not dead and any(made.get(n, ("build", -1))[1] >= 0 for n in outside - captured.inputs.keys()):
            gc.collect()
            dead = outside - self.world.storages.alive()
        return dead

    def _table(self, captured: Step) -> StorageTable:
        alive = self.world.storages.alive() - self._dead(captured)
        return StorageTable(self.names, alive, self.world.storages.made, self.returned)

    # the report

    def _report(self, step: Callable[..., Any], seconds: float) -> Report:
        world = self.world
        captured = self.steps[world.captured_step]
        if not (world.raw_findings or self.returned or any(s.ops for s in self.steps.values())):
            raise CheckError(f"{NOTHING} ({NO_GPU_YET}, and a device chosen then is the CPU)")
        later = [self.steps[i] for i in range(world.captured_step + 1, self.count) if i in self.steps]
        later += [self.steps[i] for i in self.varied if i in self.steps]
        table = self._table(captured)
        findings = Findings(world, self.roots, self.steps, self.names, home_of(step, self.factory))
        raw = (*world.raw_findings, *compiled.skips(world.calls, world.captured_step))
        self.conclude(findings, raw, captured, later, table, self.refreshed)
        report = findings.report(self.target, self.count)
        report.facts.update({**self.facts_of_replays(), "simulation seconds": round(seconds, 3)})
        report.facts["memory"] = memory.facts(captured, self.roots.place)
        if unknown := told({source: self.roots.line(chain) for source, chain in world.unknowns.sources.items()}):
            report.facts["unknown"] = unknown
        if words := nameless(compat.ops):
            report.facts["declared"] = words
        if self.probe_ended:
            report.facts["probe ended"] = self.probe_ended
        return report


def _storage(op: OpRecord) -> torch.UntypedStorage | None:
    """The memory of the host that a copy reads, None where it was freed."""
    return compat.storage_by_address(op.source.cdata) if op.source is not None else None
