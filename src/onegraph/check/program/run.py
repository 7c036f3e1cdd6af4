"""`onegraph check --run`: a program against the simulated machine, and a report on everything that it captured."""

import gc
import inspect
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from onegraph.check.program import launch
from onegraph.check.program.comparison import AGAIN, EagerComparison, findings_of
from onegraph.check.program.graphs import Recorder
from onegraph.check.program.world import FUNCTIONS, Capture, ProgramWorld
from onegraph.check.report import CheckError, Finding, Report, Severity, one_per_place
from onegraph.check.simulate import compiled, frames, memory, threads
from onegraph.check.simulate.cuda import machine
from onegraph.check.simulate.records import RawFinding, Step
from onegraph.check.simulate.unknown import told

NO_CAPTURES = "0 captures found: the program captured nothing (torch.cuda.graph, CUDAGraph, make_graphed_callables, "
MODES = "torch.compile with mode='reduce-overhead' or 'max-autotune')"
NEVER = "the program never replays it"
_MOST_VALUES = 6


def run_program(words: Sequence[str], *, gpus: int = 1) -> Report:
    """Run `script.py args` or `-m module args` on the CPU as if on a GPU, and say what is wrong with what it captures.

    `Report.facts["ended"]` says why where the program did not run to its end. Raises CheckError where it cannot be run,
    or nothing was captured.
    """
    target = launch.named(words)
    begin = time.perf_counter()
    roots = frames.Roots()
    world = ProgramWorld(launch.call_program.__code__, roots, gpus)
    comparison = EagerComparison(world)
    rng, ended = torch.get_rng_state(), ""
    gc.freeze()  # what exists already is no part of the program: its collections, and those of copies, leave it shared
    try:
        with launch.as_program(words), machine(world, Recorder(world, comparison)):
            world.streams.start_on(torch.cuda.default_stream(), 64)  # work outside of captures
            torch.default_generator.manual_seed(0)
            try:
                launch.call_program(words)
            except launch.Ended as error:
                ended = str(error)
            threads.finish(world)
            world.threads.raise_refused()
    finally:
        torch.set_rng_state(rng)
        gc.unfreeze()
    if not (world.captures or world.calls):
        raise CheckError(f"{target}: {ended or NO_CAPTURES + MODES}")
    report = _report(target, world, comparison)
    report.facts.update({"torch": torch.__version__, "simulation seconds": round(time.perf_counter() - begin, 3)})
    if ended:
        report.facts["ended"] = ended
    return report


def _report(target: str, world: ProgramWorld, comparison: EagerComparison) -> Report:
    reports = [_of_capture(world, capture, comparison.findings.get(capture.number, [])) for capture in world.captures]
    reports += _of_functions(world)
    drawn = next((report for report in reports if report.timeline), reports[0])
    captures = [_facts(world, capture) for capture in world.captures]
    facts: dict[str, Any] = {"compiled calls": len(world.calls), "captures": captures, "memory": _memory(world)}
    if unknown := told({source: world.roots.line(chain) for source, chain in world.unknowns.sources.items()}):
        facts["unknown"] = unknown
    findings = one_per_place((f for report in reports for f in report.findings), _both)
    replays = sum(capture.replays for capture in world.captures)
    return replace(drawn, target=target, findings=findings, steps=replays, facts=facts)


def _of_capture(world: ProgramWorld, capture: Capture, compared: list[tuple[int, Finding]]) -> Report:
    """What its own run, its replays and comparisons show."""
    findings = findings_of(world, capture)
    findings.of_running(s for s in world.raw_findings if s.step == capture.number)
    replayed = any(other.replays for other in world.captures)
    failed = any(f.severity is Severity.ERROR for f in (*findings.found.values(), *(f for _, f in compared)))
    if not (capture.compared or capture.backward or failed) and (capture.replays or not replayed):
        why = "; ".join(capture.why_not.values()) or NEVER
        findings.of_running([
            RawFinding(
                capture.number, "CG401", Severity.UNVERIFIED, capture.chain,
                f"no replay of this graph is compared with eager: {why}", "", construct="replay",
            )
        ])  # fmt: skip
    report = findings.report("", capture.replays)
    known = [*report.findings, *(f for _, f in compared)]
    bound = {(f.path, f.line) for f in known if f.code == "CG205" and f.severity is Severity.ERROR}
    known = [f for f in known if not (f.code == "CG206" and (f.path, f.line) in bound)]  # freed by binding it anew
    return replace(report, findings=tuple(_worded(f, capture.number) for f in one_per_place(known, _both)))


def _of_functions(world: ProgramWorld) -> list[Report]:
    """Functions that torch compiles with graphs of its own: why it leaves them out, and outputs that are read late."""
    if not world.calls:
        return []
    call = world.calls[0]
    code = getattr(inspect.unwrap(call.function), "__code__", None)
    home = frames.place(code, 0) if code is not None else frames.CodeLocation("<compiled>", 1, 1, "")
    step = Step(FUNCTIONS, ops=call.ops)
    view = Capture(FUNCTIONS, step, home, names=call.names)
    findings = findings_of(world, view)
    skipped = compiled.skips(world.calls, FUNCTIONS)
    findings.of_running(skipped)
    if not any(s.happens == compiled.NO_GRAPH for s in skipped):  # without a graph nothing is overwritten
        findings.of_running(replace(s, step=FUNCTIONS) for s in world.compiled_outputs.late)
    return [findings.report("", len(world.calls))]


def _worded(finding: Finding, number: int) -> Finding:
    """Steps by what they were: the capture, or a replay."""

    def word(match: re.Match[str]) -> str:
        step = int(match.group(1))
        return "capture" if step == number else f"replay {step - AGAIN}" if step > AGAIN else match.group(0)

    def worded(text: str) -> str:
        return re.sub(r"\bstep (\d+)", word, text.removesuffix(", made by the factory"))

    return replace(finding, message=worded(finding.message), values=tuple(worded(v) for v in finding.values))


def _both(known: Finding, other: Finding) -> Finding:
    """The worse of two findings of one place, with the values of both."""
    values = tuple(dict.fromkeys((*known.values, *other.values)))[:_MOST_VALUES]
    worse = other if other.severity.rank > known.severity.rank else known
    return replace(worse, values=values, count=max(known.count, other.count))


def _facts(world: ProgramWorld, capture: Capture) -> dict[str, Any]:
    need = capture.need
    found = {
        "path": capture.place.path,
        "line": capture.place.line,
        "ops": len(capture.step.ops),
        "replays": capture.replays,
        "compared": capture.compared,
        "adds to its pool": need.reserved if need else 0,
        "peak": need.peak if need else 0,
    }
    if capture.why_not:
        found["not compared"] = "; ".join(capture.why_not.values())
    return found


def _memory(world: ProgramWorld) -> dict[str, Any]:
    """All pools together, and the lines of the capture that asks the most."""
    needs = [(c, c.need) for c in world.captures if c.need is not None]
    if not needs:
        return {}
    capture, need = max(needs, key=lambda pair: pair[1].peak)
    reserved = sum(pool.reserved for pool in world.pools.values())
    needed = memory.told(need, capture.step, world.roots.place) | {"pool": reserved}
    return needed | {"pools": len(world.pools), "graphs": len(needs)}
