"""`check_step`: everything that is known about one step, from one call."""

import inspect
from collections.abc import Callable
from typing import Any

from onegraph.check.causes import fold
from onegraph.check.places import users
from onegraph.check.reconcile import VARYING, reconcile
from onegraph.check.report import CheckError, Report, merge

LIVE_STEPS = 6


def check_step(
    factory: Callable[[], Any],
    *,
    simulate: bool = True,
    source: bool = False,
    live: bool = False,
    steps: int = 4,
    gpus: int = 1,
    target: str = "",
) -> Report:
    """Check the step that `factory` builds; allowances in the source are not applied here.

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
        from onegraph.check.simulate import simulate_step

        suspect = any(finding.code in VARYING for report in reports for finding in report.findings)
        probe = True if suspect else None
        reports.append(simulate_step(factory, steps=steps, target=target, gpus=gpus, probe=probe))
    if live:
        from onegraph.check.live import live_step

        reports.append(live_step(factory, steps=steps if steps < 3 else max(steps, LIVE_STEPS), target=target))
    return users(fold(reports[0] if len(reports) == 1 else reconcile(merge(target, reports))))


def _read(factory: Callable[[], Any], target: str, *, alone: bool) -> Report:
    """What the source says, read from the undecorated factory on. Where it is no function that a file defines (a
    partial, an object, a function in a function), running it can still tell; alone, reading has nothing to tell."""
    from onegraph.check.source import check_source

    function = inspect.unwrap(factory)
    try:
        path = inspect.getsourcefile(function)
        if path is None:
            raise CheckError(f"{target}: no source file to read")
        return check_source(path, function.__name__)
    except (TypeError, CheckError) as error:
        if not alone:
            return Report(target=target, facts={"source": "the factory is no function of a file: it was only run"})
        if isinstance(error, CheckError):
            raise
        raise CheckError(f"{target}: {type(factory).__name__} has no source to read, allowed a function") from error
