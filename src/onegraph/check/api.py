"""`check_step`, and the same for targets and programs as people name them: what was looked at goes to the judge."""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from onegraph.check.deadline import deadline
from onegraph.check.judge import join, judge
from onegraph.check.reconcile import VARYING
from onegraph.check.report import CheckError, Report
from onegraph.check.rules import prefix_of
from onegraph.check.targets import Options, is_tree, load

LIVE_STEPS = 6


def check_step(
    factory: Callable[[], Any],
    *,
    simulate: bool = True,
    source: bool = True,
    live: bool = False,
    steps: int = 4,
    gpus: int = 1,
    target: str = "",
) -> Report:
    """Check the step that `factory` builds, as `onegraph check` does; allowances in the source are applied.

    Args:
        factory: builds model and buffers on device "cuda" and returns `(step, inputs)`; `step(*inputs(i))` is the i-th
            step (`step(**inputs(i))` where that is a mapping). It returns tensors in any container, or nothing.
        simulate: run it on the CPU against a simulated GPU.
        source: read the code that the step reaches; what it suspects is weighed against the steps that ran.
        live: capture and replay it on the GPU of this machine.
        steps: how many steps to simulate (3 or more) and to replay live, LIVE_STEPS of them at least: what a replay
            feeds on may be right for some steps by chance.
        gpus: how many GPUs the simulated machine has (`torch.cuda.device_count()`).
        target: what the report calls it.

    Raises CheckError (a ValueError) where the check could not run: the factory or a step raises, returns something
    else than the interface says, or there is no GPU for `live`.
    """
    if not (simulate or source or live):
        raise CheckError("check_step: got no way of looking, allowed simulate, source and live; turn one on")
    target = target or f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', repr(factory))}"
    reports = []
    if source:
        reports.append(_read(factory, target, alone=not (simulate or live)))
    if simulate:
        from onegraph.check.simulate.run import simulate_step

        suspect = any(finding.code in VARYING for report in reports for finding in report.findings)
        probe = True if suspect else None
        reports.append(simulate_step(factory, steps=steps, target=target, gpus=gpus, probe=probe))
    if live:
        from onegraph.check.live import live_step
        from onegraph.check.protocol import checked_count

        reports.append(live_step(factory, steps=max(checked_count(steps), LIVE_STEPS), target=target))
    return judge(target, reports)


def check_target(spec: str, options: Options) -> Report:
    """A factory, or the sources of a file or folder. Raises CheckError where it cannot be checked."""
    if is_tree(spec):
        if options.live:
            raise CheckError(f"{spec}: --live and --all need a factory; allowed {spec}:factory")
        from onegraph.check.source import check_tree

        report = check_tree(spec)
        return judge(report.target, [report])
    with deadline(options.timeout_s, f"target {spec!r}"):
        factory = load(spec, live=options.live).factory
        return check_step(
            factory, simulate=options.simulate, live=options.live, steps=options.steps, gpus=options.gpus, target=spec
        )


def check_targets(specs: Sequence[str], options: Options) -> Report:
    """All targets as one report; those that could not be checked are told in `facts["failed"]`. Raises CheckError where
    none could."""
    reports, failed = [], []
    for spec in specs:
        try:
            reports.append(check_target(spec, options))
        except CheckError as error:
            failed.append(error)
    if not reports:
        raise CheckError("; ".join(map(str, failed))) from failed[0]
    report = reports[0] if len(reports) == 1 else join(reports)
    report.facts.update({"failed": [str(error) for error in failed]} if failed else {})
    return report


def check_program(words: Sequence[str], options: Options) -> Report:
    """A program of one's own, and everything that it captures. Raises CheckError."""
    from onegraph.check.program import run_program

    with deadline(options.timeout_s, f"program {' '.join(words)!r}"):
        report = run_program(words, gpus=options.gpus)
    return judge(report.target, [report])


def codes(text: str, option: str) -> tuple[str, ...]:
    """Codes, names or prefixes from a comma-separated `option`. Raises CheckError for one that names nothing."""
    try:
        return tuple(prefix_of(word) for word in (w.strip() for w in text.split(",")) if word)
    except ValueError as error:
        raise CheckError(f"{option}: {error}") from None


def _read(factory: Callable[[], Any], target: str, *, alone: bool) -> Report:
    """What the source says, read from the undecorated factory on. Where it is no function that a file defines (a
    partial, an object, a function in a function), running it can still tell; alone, reading has nothing to tell."""
    from onegraph.check.source import check_source

    function = inspect.unwrap(factory)
    try:
        path = inspect.getsourcefile(function)
        if path is None or not os.path.isfile(path):
            raise CheckError(f"{target}: no source file to read")
        if function.__qualname__ != function.__name__:  # a function of the file may have the same name
            raise CheckError(f"{target}: no function at the top level of {path}")
        return check_source(path, function.__name__)
    except (TypeError, CheckError) as error:
        if not alone:
            return Report(target=target, facts={"source": "the factory is no function of a file: it was only run"})
        if isinstance(error, CheckError):
            raise
        raise CheckError(f"{target}: {type(factory).__name__} has no source to read, allowed a function") from error
