"""pytest: `assert_capturable(factory)`, and a marker that turns a factory into a test.

@pytest.mark.capturable
def test_decode_step():
    model = ...
    return step, inputs
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from onegraph.check.api import check_step, codes
from onegraph.check.report import CheckError, Report

MARK = "capturable"
LINE = (
    "capturable(steps=4, live=False, strict=False, gpus=1, ignore=(), baseline=''): the test function returns "
    "(step, inputs); it passes if the step can be captured in a CUDA graph and replays what eager computes"
)


def assert_capturable(
    factory: Callable[[], Any],
    *,
    steps: int = 4,
    live: bool = False,
    strict: bool = False,
    gpus: int = 1,
    ignore: Sequence[str] = (),
    baseline: str = "",
) -> Report:
    """Assert that the step which `factory` builds can be captured and replays what eager computes.

    Args:
        factory: returns `(step, inputs)`, as for `onegraph check`.
        steps: steps to simulate, at least 3.
        live: capture on the GPU of this machine besides.
        strict: count warnings and unverified launches too.
        gpus: GPUs of the simulated machine.
        ignore: codes, prefixes or names left out, e.g. ("CG401",), or as --ignore takes them, "CG401,CG2".
            Allowances in the source are honoured.
        baseline: a file as `onegraph check --write-baseline` writes it, whose findings are left out. From the working
            directory; the marker's from pytest's rootdir.

    Returns the report. Raises AssertionError with the findings, as `onegraph check` prints them; CheckError where the
    check could not run.
    """
    __tracebackhide__ = True
    from onegraph.check.output import text

    left_out = codes(ignore if isinstance(ignore, str) else ",".join(ignore), "ignore")
    name = f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', 'factory')}"
    try:
        report = check_step(factory, live=live, steps=steps, gpus=gpus, target=name)
    except CheckError as error:
        raise error.with_traceback(None) from _as_the_user_sees(error.__cause__)
    report = report.select((), left_out)
    if baseline:
        from onegraph.check.baseline import load

        report, _ = load(baseline).without_known(report)
    if report.exit_code(strict=strict):
        raise AssertionError(f"the step cannot be captured as it is\n\n{text.render(report)}".rstrip("\n"))
    return report


def _as_the_user_sees(cause: BaseException | None) -> BaseException | None:
    """What the factory or the step raised, with what that came from, without the frames of torch and of this package
    between the user's own."""
    from onegraph.check.simulate.calling import theirs

    error = cause
    while error is not None:
        trace: TracebackType | None = None
        for frame in reversed(theirs(error)):
            trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = trace
        error = error.__cause__ or error.__context__
    return cause


def pytest_configure(config: Any) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", LINE)


def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a marked test as a factory; leave every other test alone."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker(MARK)
    if mark is None:
        return None
    options = _options(mark, pyfuncitem)
    wanted = inspect.signature(pyfuncitem.obj).parameters
    given = {name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}

    @functools.wraps(pyfuncitem.obj)
    def factory() -> Any:
        return pyfuncitem.obj(**given)

    assert_capturable(factory, **options)
    return True


def _options(mark: Any, pyfuncitem: Any) -> dict[str, Any]:
    """What the marker says. Fails the test, in one line, where it says anything else."""
    allowed = [name for name, p in inspect.signature(assert_capturable).parameters.items() if p.kind is p.KEYWORD_ONLY]
    wrong = [repr(value) for value in mark.args] + [f"{name}=" for name in mark.kwargs if name not in allowed]
    if wrong:
        import pytest

        allow = ", ".join(f"{name}=" for name in allowed)
        pytest.fail(f"{MARK}: got {', '.join(wrong)}, allowed {allow}", pytrace=False)
    options = dict(mark.kwargs)
    if options.get("baseline"):
        options["baseline"] = os.path.join(pyfuncitem.config.rootpath, options["baseline"])
    return options
